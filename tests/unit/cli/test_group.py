"""What ``txmq group`` prints when not every home answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from txmq.cli import group

ROW = {
    "topic": "orders", "partition": 1, "owner": None, "generation": 1, "offset": 2, "start": 0, "end": 2, "lag": 0,
    "held_by": None,
}  # fmt: skip
FOUND: dict[str, Any] = {"group": "g", "strategy": None, "members": [], "partitions": [ROW]}


@pytest.fixture
def away(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    named: tuple[str, ...] = request.param

    @contextmanager
    def connected(*_: object, **__: object) -> Iterator[object]:
        yield SimpleNamespace(groups=SimpleNamespace(describe=lambda _: {**FOUND, "away": named}))

    monkeypatch.setattr(group, "connected", connected)
    return named


@pytest.mark.parametrize("away", [("broker-1 (0b)",)], indirect=True)
@pytest.mark.parametrize("as_json", [False, True])
def test_description_without_a_home_is_printed_and_fails(
    capsys: pytest.CaptureFixture[str], away: tuple[str, ...], as_json: bool
) -> None:
    with pytest.raises(SystemExit) as ended:
        group.describe("g", as_json=as_json)
    told = capsys.readouterr()
    assert (ended.value.code, told.err) == (1, "txmq: broker-1 (0b) did not answer: its partitions are missing\n")
    assert json.loads(told.out)["away"] == [*away] if as_json else "orders" in told.out


@pytest.mark.parametrize("away", [()], indirect=True)
def test_description_of_all_homes_succeeds(capsys: pytest.CaptureFixture[str], away: tuple[str, ...]) -> None:
    group.describe("g")
    assert (capsys.readouterr().err, away) == ("", ())
