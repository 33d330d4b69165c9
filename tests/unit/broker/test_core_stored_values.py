"""Values that one client states and the broker keeps for others; ``make fuzz`` goes on for longer."""

from __future__ import annotations

import pytest

from tools.fuzz import kept


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_of_one_client_stops_nobody_else(seed: int) -> None:
    assert kept.history(seed) > 5


def test_value_that_stops_somebody_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door as it was: a client's connection to its database might have any number."""
    monkeypatch.setattr("txmq.protocol.transaction_bodies._CONNECTION_END", 10**40)
    monkeypatch.setattr(kept, "KEPT", (kept._decide,))
    found = 0
    for seed in range(20):
        try:
            kept.history(seed)
        except AssertionError:
            found += 1
    assert found > 0
