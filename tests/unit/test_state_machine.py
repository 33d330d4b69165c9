"""The look-up in transition tables."""

from __future__ import annotations

import enum

import pytest

from txmq.errors import TransactionStateError
from txmq.state_machine import next_step


class Door(enum.Enum):
    OPEN = "open"
    SHUT = "shut"


class Push(enum.Enum):
    PUSHED = "pushed"


TABLE = {(Door.OPEN, Push.PUSHED): Door.SHUT}


def test_pair_in_the_table_is_looked_up() -> None:
    assert next_step(TABLE, Door.OPEN, Push.PUSHED) is Door.SHUT


def test_missing_pair_names_state_and_event() -> None:
    with pytest.raises(TransactionStateError, match="no transition from shut on pushed"):
        next_step(TABLE, Door.SHUT, Push.PUSHED)
