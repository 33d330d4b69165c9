"""Failed logins of an address: the answer to the next one waits, for longer each time."""

from __future__ import annotations

import pytest

from txmq.broker.state import refusals
from txmq.broker.state.refusals import FORGOTTEN_AFTER_MS, FREE_MAX, PAUSE_MS, FailedLogins


def test_pauses_double_up_to_the_longest() -> None:
    failed = FailedLogins()
    pauses = [failed.failed(f"10.0.0.1:{port}", 1_000_000) for port in range(FREE_MAX + 12)]
    assert pauses[:FREE_MAX] == [0] * FREE_MAX
    assert pauses[FREE_MAX : FREE_MAX + 3] == [PAUSE_MS.after(failures) for failures in range(3)]
    assert pauses[-1] == PAUSE_MS.most
    assert failed.failed("10.0.0.2:5", 1_000_000) == 0


@pytest.mark.parametrize("later_ms", [FORGOTTEN_AFTER_MS, -1])
def test_failures_of_long_ago_are_forgotten(later_ms: int) -> None:
    failed = FailedLogins()
    for _ in range(FREE_MAX):
        failed.failed("a:1", 1000)
    assert failed.failed("a:1", 1000 + later_ms) == 0


def test_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "ADDRESSES_MAX", 2)
    failed = FailedLogins()
    for address in ("a:1", "b:1", "c:1"):
        for _ in range(FREE_MAX):
            failed.failed(address, 1000)
    assert [bool(failed.failed(address, 1000)) for address in ("c:1", "b:1", "a:1")] == [True, True, False]
