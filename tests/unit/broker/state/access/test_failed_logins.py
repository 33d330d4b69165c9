"""Failed logins of an address make the next one wait, for longer each time."""

from __future__ import annotations

import pytest

from txmq.broker.state.access import failed_logins
from txmq.broker.state.access.failed_logins import FORGOTTEN_AFTER_MS, FREE_MAX, PAUSE_MS, PAUSE_MS_MAX, FailedLogins


def test_pauses_double_up_to_the_longest() -> None:
    failed, pauses = FailedLogins(), []
    for _ in range(FREE_MAX + 12):
        failed.failed("10.0.0.1:5", 1_000_000)
        pauses.append(failed.wait_ms("10.0.0.1:7", 1_000_000))
    assert pauses[: FREE_MAX - 1] == [0] * (FREE_MAX - 1)
    assert pauses[FREE_MAX - 1 : FREE_MAX + 2] == [PAUSE_MS, 2 * PAUSE_MS, 4 * PAUSE_MS]
    assert pauses[-1] == PAUSE_MS_MAX
    assert failed.wait_ms("10.0.0.1:7", 1_000_000 + PAUSE_MS_MAX) == 0
    assert failed.wait_ms("10.0.0.2:5", 1_000_000) == 0


def test_failures_of_long_ago_are_forgotten() -> None:
    failed = FailedLogins()
    for _ in range(FREE_MAX):
        failed.failed("a:1", 1000)
    failed.failed("a:1", 1000 + FORGOTTEN_AFTER_MS)
    assert failed.wait_ms("a:1", 1000 + FORGOTTEN_AFTER_MS) == 0


def test_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_logins, "ADDRESSES_MAX", 2)
    failed = FailedLogins()
    for address in ("a:1", "b:1", "c:1"):
        for _ in range(FREE_MAX):
            failed.failed(address, 1000)
    assert [bool(failed.wait_ms(address, 1000)) for address in ("a:1", "b:1", "c:1")] == [False, True, True]
