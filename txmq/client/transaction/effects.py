"""The end of a transaction block with databases: feeds events to a coordinator and carries out what it asks for.

``LastResourceRun`` and ``XARun`` say how each effect is carried out. Every effect becomes at most one event, whatever
is raised meanwhile: a driver's error, the broker's refusal, a lost connection, Ctrl-C. The first error that led away
from the commit is kept for the caller.

Invariant: nothing is decided here. Which effect follows which event stands in the coordinator's table.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from txmq.client.transaction.homes import RoutedTransaction
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.preparing import begin_for_caller
from txmq.errors import RolledBackError, TransactionError, TransactionStateError, anew
from txmq.protocol.parts import PartResult
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa.coordinator import Coordinator

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)
Effect = TypeVar("Effect", bound=enum.Enum)


class Body(Protocol):
    """A branch while the body of the block uses it."""

    def end_body(self) -> None:
        """Take the connection from the body; raises if the transaction cannot commit any more."""


class EffectRun(ABC, Generic[State, Event, Effect]):
    """See the module's docstring.

    Attributes:
        error: the first that led away from the commit, to be raised in the caller.
        interrupt: KeyboardInterrupt and the like that came meanwhile; to be raised when all is done.
        lines: where the parts went; None before the broker has answered.
        has_begun: ``run`` was called; from then on nothing that is raised keeps it from its end.
    """

    def __init__(
        self, broker: RoutedTransaction, messages: MessageBuffer, coordinator: Coordinator[State, Event, Effect],
        interrupted: Event,
    ) -> None:  # fmt: skip
        self._broker, self._messages = broker, messages
        self.coordinator = coordinator
        self._interrupted = interrupted
        self.error: TransactionError | None = None
        self.interrupt: BaseException | None = None
        self.lines: list[PartResult] | None = None
        self.has_begun = False

    def is_body_sound(self, branches: Sequence[Body], failure: RolledBackError | None) -> bool:
        """Take the connections from the body. Returns whether the transaction can be committed.

        Args:
            failure: the refusal of a part that was sent ahead.
        """
        try:
            for branch in branches:
                branch.end_body()
            self._broker.check_deadline()
            self._find_homes()
            self._reach()  # prepared rows stay locked until the broker has answered
            if failure is not None:
                raise anew(failure)
            begin_for_caller(self._broker)
        except TransactionError as error:
            self.error = error
        except BaseException as interrupt:  # noqa: BLE001  raised again when the transaction is undone
            self.interrupt = interrupt
        else:
            return True
        return False

    def run(self, event: Event) -> State:
        """Feed an event, and carry out what follows until the end."""
        coordinator = self.coordinator
        effects: deque[Effect] = deque()
        found: Event | None = event
        self.has_begun = True
        while True:
            try:
                while True:  # a loop within: an interrupt may come where it begins again, too
                    if found is not None:
                        step, found = found, None
                        effects = deque(coordinator.step(step))  # those of the step before that are left are dropped
                    if not effects:
                        break
                    found = self._carry_out(effects.popleft())
                break
            except (SimulatedCrash, TransactionStateError):
                raise
            except BaseException as interrupt:  # noqa: BLE001  raised again by the caller, when all is done
                if self.interrupt is None:
                    self.interrupt = interrupt
                effects.clear()
                found = None if coordinator.is_over else self._interrupted
        if self.lines is not None:
            self._messages.place(self.lines)
        return coordinator.state

    def _reach(self) -> None:
        self._broker.reach()

    @abstractmethod
    def _find_homes(self) -> None:
        """Find the homes of the messages; raises RolledBackError."""

    @abstractmethod
    def _carry_out(self, effect: Effect) -> Event | None:
        """Do it; the event that came of it, or None if that is only known later."""
