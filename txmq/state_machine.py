"""Transition tables: the one look-up of every state machine.

A table maps (state, event) to what follows. A pair that is not in it is a defect of the caller, and nothing changes.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from txmq.errors import TransactionStateError

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)
Step = TypeVar("Step")


def next_step(table: dict[tuple[State, Event], Step], state: State, event: Event) -> Step:
    """Look up what follows when an event meets a state.

    Raises:
        TransactionStateError: the pair is not in the table; the text names both.
    """
    step = table.get((state, event))
    if step is None:
        raise no_transition(state, event)
    return step


def no_transition(state: enum.Enum, event: enum.Enum) -> TransactionStateError:
    """The error for a pair that is not in a table."""
    return TransactionStateError(f"no transition from {state.value} on {event.value}")
