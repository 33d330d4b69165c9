"""Transition tables: the one look-up of every state machine, and the coordinators' state. No I/O.

A table maps (state, event) to what follows. A pair that is not in it is a defect of the caller, and nothing changes.
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

from txmq.errors import TransactionStateError

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)
Step = TypeVar("Step")
Effect = TypeVar("Effect", bound=enum.Enum)


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


class Coordinator(Generic[State, Event, Effect]):
    """One transaction's place in a transition table: of ``xa/last_resource`` or ``xa/two_phase``.

    ``step(event)`` moves it and answers the effects that the caller carries out in order; the result of each is the
    next event.

    Attributes:
        state: where the transaction stands.
    """

    def __init__(
        self, table: dict[tuple[State, Event], tuple[State, tuple[Effect, ...]]], ends: frozenset[State], state: State
    ) -> None:
        self.state = state
        self._table, self._ends = table, ends

    def step(self, event: Event) -> tuple[Effect, ...]:
        """Move, and answer what must be done now.

        Raises:
            TransactionStateError: the event does not fit the state (a defect); nothing has changed.
        """
        step = self._table.get((self.state, event))
        if step is None:
            raise no_transition(self.state, event)
        self.state, effects = step
        return effects

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen here."""
        return self.state in self._ends
