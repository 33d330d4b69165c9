"""Which refusals are written: the first ones of a minute, of each user and address; the others are counted."""

from __future__ import annotations

import pytest

from txmq.broker.state import refusals
from txmq.broker.state.refusals import LINES_A_MINUTE, RefusalLines


def test_first_ones_of_a_minute_are_written() -> None:
    lines = RefusalLines()
    taken = [lines.take("shop", "10.0.0.1:4000", 1000 + number) for number in range(LINES_A_MINUTE + 5)]
    assert taken == [0] * LINES_A_MINUTE + [None] * 5
    assert lines.take("shop", "10.0.0.1:4001", 60_999) is None  # another connection
    assert lines.take("shop", "10.0.0.1:4001", 61_000) == 6
    assert lines.take("shop", "10.0.0.1:4001", 61_001) == 0


def test_each_user_and_address_has_lines_of_its_own() -> None:
    lines = RefusalLines()
    for _ in range(LINES_A_MINUTE + 1):
        lines.take("shop", "10.0.0.1:4000", 1000)
    assert lines.take("shop", "10.0.0.2:4000", 1000) == 0
    assert lines.take("card", "10.0.0.1:4000", 1000) == 0


def test_clock_set_back_begins_a_minute() -> None:
    lines = RefusalLines()
    for _ in range(LINES_A_MINUTE + 2):
        lines.take("shop", "10.0.0.1:4000", 100_000)
    assert lines.take("shop", "10.0.0.1:4000", 1000) == 2


def test_many_addresses_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "PAIRS_MAX", 10)
    lines = RefusalLines()
    for number in range(100):
        assert lines.take("shop", f"10.0.0.{number}:1", number) == 0
    assert len(lines._begun) == 10
