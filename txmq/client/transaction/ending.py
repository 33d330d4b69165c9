"""The end of a transaction block: its shape, and how the orders of a coordinator are carried out.

A block has one of three endings: ``local_ending.py`` (the broker decides), ``last_resource_ending.py`` (a database
decides), ``two_phase_ending.py`` (the broker decides when all databases have prepared). The last two feed events to a
coordinator and carry out what it asks for (``CoordinatedEnding``). Every effect becomes at most one event, whatever is
raised meanwhile: a driver's error, the broker's refusal, a lost connection, Ctrl-C. The first error that led away from
the commit is kept for the caller.

Invariant: nothing is decided here. Which effect follows which event stands in the coordinator's table.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from txmq.client.transaction.homes import TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.errors import RolledBackError, TransactionError, TransactionStateError, anew
from txmq.model import Outcome
from txmq.protocol.transaction_bodies import PartResult
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.state_machine import Coordinator

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)
Effect = TypeVar("Effect", bound=enum.Enum)


class Ended(NamedTuple):
    """How a block ended.

    Attributes:
        outcome: the transaction's, for the caller.
        in_broker: the outcome in the broker, as far as it is known; None if the ending is told of it later.
        error: to be raised in the caller.
        interrupt: KeyboardInterrupt and the like that came at the end of the block.
    """

    outcome: Outcome
    in_broker: Outcome | None
    error: TransactionError | None = None
    interrupt: BaseException | None = None


class Ending(Protocol):
    """How a block ends; made when the block is entered."""

    @property
    def pending(self) -> tuple[str, ...]:
        """Where the decision has yet to arrive: "broker", names of XA resources, "home <id>"."""

    @property
    def has_begun(self) -> bool:
        """Whether ``end`` will see to the end by itself, whatever is raised; before that it may be called again."""

    def begin(self) -> None:
        """Begin in the broker and the databases.

        Raises:
            RolledBackError: the broker is away, or refuses.
            Exception: a database does not begin.
        """

    def connection(self, resource: Any) -> Any:
        """The database connection for the body of the block.

        Raises:
            TransactionStateError: the resource takes no part in the transaction.
        """

    def parts_streamed(self) -> None:
        """Note that a part of the messages is about to be sent ahead.

        Raises:
            RolledBackError: the homes of the messages cannot be reached.
        """

    def gather_results(self, deadline: float) -> None:
        """Wait for the answers of the homes that were told of the decision: they say where messages are.

        Args:
            deadline: monotonic time.

        Raises:
            HeuristicError: a home had given its messages up before.
        """

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ended:
        """Commit, or undo everything.

        Args:
            body_error: the exception that left the body.
            failure: the refusal of a part that was sent ahead.

        Raises:
            BaseException: a local transaction's outcome is not known, or its end was interrupted.
        """


class Body(Protocol):
    """A branch while the body of the block uses it."""

    def end_body(self) -> None:
        """Take the connection from the body; raises if the transaction cannot commit any more."""


class CoordinatedEnding(Generic[State, Event, Effect]):
    """See the module's docstring.

    Args:
        effects: what carries each of them out; answers the event that came of it, or None if that is known later.
        interrupted: the event of an interrupt.

    Attributes:
        error: the first that led away from the commit, to be raised in the caller.
        interrupt: KeyboardInterrupt and the like that came meanwhile; to be raised when all is done.
        lines: where the messages went; None before the broker has answered.
        has_begun: ``run`` was called; from then on nothing that is raised keeps it from its end.
    """

    def __init__(
        self, homes: TransactionHomes, messages: MessageBuffer, coordinator: Coordinator[State, Event, Effect],
        effects: Mapping[Effect, Callable[[Any], Event | None]], interrupted: Event,
    ) -> None:  # fmt: skip
        self._homes, self._decider, self._messages = homes, homes.decider, messages
        self.coordinator = coordinator
        self._effects, self._interrupted = effects, interrupted
        self.error: TransactionError | None = None
        self.interrupt: BaseException | None = None
        self.lines: list[PartResult] | None = None
        self.has_begun = False

    def is_body_sound(self, branches: Sequence[Body], failure: RolledBackError | None, uuid: str = "") -> bool:
        """Take the connections from the body. Returns whether the transaction can be committed.

        Args:
            failure: the refusal of a part that was sent ahead.
            uuid: of the last resource that decides.
        """
        try:
            for branch in branches:
                branch.end_body()
            self._decider.check_deadline()
            self._homes.find(self._messages)
            self._homes.let_pass(self._messages, uuid)
            self._decider.reach()  # prepared rows stay locked until the broker has answered
            if failure is not None:
                raise anew(failure)
            self._decider.begin_for_caller()
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
                    found = self._effects[effects.popleft()](self)
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


def no_part(resource: Any) -> TransactionStateError:
    """The error for a resource that the block does not name."""
    return TransactionStateError(f"{resource!r} takes no part in this transaction")
