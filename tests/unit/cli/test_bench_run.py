"""``txmq bench`` without a broker: how counts are found, and what is said about where the figures are from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from txmq.cli.bench_run import COUNT_MAX, FIRST_BYTES, Measured, Plan, Report, measured, show
from txmq.errors import TxmqError
from txmq.testing.bench.limits import BARE_LIMITS
from txmq.testing.bench.model import Load, Run, Target

MACHINE = {
    "system": "Linux", "processor": "one", "cores": "2", "memory": "1 GiB", "file system": "ext4", "python": "3",
    "load before": "0.1",
}  # fmt: skip


def plan(messages: int | None = None, size_bytes: int = 100, seconds: float = 2.0) -> Plan:
    return Plan(None, (), Path(), {}, seconds, messages, size_bytes, 10, 1)


def load(rate: float, asked: list[int], first_count: int = 50) -> Load:
    @contextmanager
    def opened(_: Target) -> Iterator[Run]:
        def run(count: int) -> dict[str, float]:
            asked.append(count)
            return {"rate": rate}

        yield run

    return Load("fake", "fake", opened, {"rate": "msg/s"}, (), first_count)


@pytest.mark.parametrize(
    ("rate", "counts"),
    [(10_000.0, [50, 2000, 20_000]), (10.0, [50, 50, 50]), (1e9, [50, 2_684_354, 2_684_354])],
    ids=["a tenth, then all of the time", "never fewer than the first", "never more than the memory holds"],
)
def test_counts_follow_the_rate_that_was_seen(rate: float, counts: list[int]) -> None:
    asked: list[int] = []
    result = measured(load(rate, asked), plan(), "txmq://127.0.0.1:1")
    assert asked == counts
    assert (result.count, result.figures, result.failure) == (counts[-1], {"rate": rate}, None)


def test_counts_have_their_limits_and_may_be_given() -> None:
    asked: list[int] = []
    measured(load(1e12, asked), plan(size_bytes=1), "x")
    assert max(asked) == COUNT_MAX
    asked.clear()
    measured(load(1.0, asked, first_count=20_000), plan(size_bytes=1 << 20), "x")
    assert set(asked) == {FIRST_BYTES >> 20}
    asked.clear()
    measured(load(1.0, asked), plan(messages=7), "x")
    assert asked == [7]


@pytest.mark.parametrize("error", [TxmqError("refused"), OSError("no space")])
def test_a_load_that_fails_is_told_with_its_reason(error: Exception) -> None:
    @contextmanager
    def opened(_: Target) -> Iterator[Run]:
        raise error
        yield

    result = measured(Load("fake", "fake", opened, {}, (), 1), plan(), "x")
    assert result.failure == str(error)


def report(server: str, **machine: str) -> Report:
    rows = [Measured(load(1.0, []), 1, {"rate": 12.0})]
    return Report(server, False, {"sync": "always"}, MACHINE | machine, dict.fromkeys(BARE_LIMITS, 0.1), rows)


@pytest.mark.parametrize(
    ("server", "is_remote"),
    [
        ("txmq://127.0.0.1", False),
        ("txmq://localhost:9", False),
        ("txmq://[::1]:9", False),
        ("txmq://10.1.1.1:9", True),
    ],
)
def test_bare_limits_of_another_machine_are_marked(
    server: str, is_remote: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    show(report(server))
    assert ("The broker is elsewhere" in capsys.readouterr().out) is is_remote


def test_what_blurs_the_figures_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    made = report("txmq://127.0.0.1:9", **{"file system": "tmpfs", "load before": "3.0"})
    made.interrupted = True
    made.rows.append(Measured(load(1.0, []), failure="the disk\x1b[2J is full"))
    show(made)
    said = capsys.readouterr().out
    for words in ("no disk was measured", "Others used this machine", "Interrupted", r"the disk\x1b[2J is full", "12"):
        assert words in said
    show(report("txmq://127.0.0.1:9"))
    said = capsys.readouterr().out
    for words in ("no disk", "Others used", "Interrupted", "failed", "elsewhere"):
        assert words not in said
