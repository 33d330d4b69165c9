"""The last resource's side of a transaction block: its branch from the beginning to what the caller is told of the end.

What the run (``transaction_last_resource``) could not finish is left to the client's resolver, which is told by what
outcome to finish it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from txmq.client.transaction.broker_side import BrokerTransaction
from txmq.client.transaction.last_resource import LastResourceRun
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.xa_block import Ending
from txmq.errors import (
    HeuristicCommitError,
    HeuristicMixedError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionError,
    TransactionStateError,
    anew,
)
from txmq.model import Outcome
from txmq.runtime.logging import get_logger
from txmq.xa import LastResource
from txmq.xa.database import marker
from txmq.xa.database.hazard import Hazard
from txmq.xa.last_resource.coordinator import LastResourceEvent, LastResourceState
from txmq.xa.last_resource.resource import Unsettled, UsedConnection


class Settler(Protocol):
    """The client's resolver, as a block sees it."""

    def add(self, resource: Any) -> None:
        """Settle for this resource, too."""

    def wake(self) -> None:
        """Something was left: look at once."""

    def report(self, hazard: Hazard, on_told: Callable[[], None]) -> None:
        """The broker could not be told of it: go on telling."""


class LastResourceBlock:
    """See the module's docstring. Begun when made.

    Attributes:
        run: what carries the end out.
        pending: ("broker",) while the broker is still to be told of the decision.
    """

    def __init__(
        self, broker: BrokerTransaction, given: LastResource | UsedConnection, messages: MessageBuffer, settler: Settler
    ) -> None:
        self._broker, self._settler = broker, settler
        self.pending: tuple[str, ...] = ()
        self._resource, own = given if isinstance(given, UsedConnection) else (given, None)
        self._branch = self._resource.enlist(broker.cluster, own)
        settler.add(self._resource)
        self.run = LastResourceRun(broker, self._branch, messages)

    def connection(self, resource: Any) -> Any:
        """The database connection of the branch."""
        if self._resource is not resource:
            raise TransactionStateError(f"{resource!r} takes no part in this transaction")
        return self._branch.connection

    def parts_streamed(self) -> None:
        """A part of the messages is about to be sent ahead."""
        self.run.coordinator.step(LastResourceEvent.PARTS_STREAMED)

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ending:
        """Bring it to its end.

        Args:
            body_error: what the body raised.
            failure: a part sent ahead was refused.
        """
        if body_error is not None:
            self._branch.note(body_error)
        is_sound = body_error is None and self._is_body_sound(failure)
        return self._concluded(self.run.run(LastResourceEvent.BODY_DONE if is_sound else LastResourceEvent.BODY_FAILED))

    def told(self, outcome: Outcome) -> Outcome:
        """What the broker is known to have made of it: a database that decided may not have told it yet."""
        state = self.run.coordinator.state
        if state is LastResourceState.COMMITTED:
            return Outcome.COMMITTED
        is_over = (
            outcome is Outcome.ROLLED_BACK or state is LastResourceState.HAZARD
        ) and self.run.is_told is not False
        return Outcome.ROLLED_BACK if is_over and state is not LastResourceState.BROKER_ALONE else Outcome.UNKNOWN

    def _is_body_sound(self, failure: RolledBackError | None) -> bool:
        run = self.run
        try:
            self._branch.end_body()
            self._broker.check_deadline()
            self._broker.reach()
            if failure is not None:
                raise anew(failure)
        except TransactionError as error:
            run.error = error
        except BaseException as interrupt:  # noqa: BLE001  raised again when the transaction is undone
            run.interrupt = interrupt
        else:
            return True
        return False

    def _concluded(self, state: LastResourceState) -> Ending:
        """Leave the rest to the resolver; what the caller is told."""
        broker, run = self._broker, self.run
        if state in (LastResourceState.COMMITTED, LastResourceState.COMMITTED_PENDING):
            self._committed(state)
            return Ending(Outcome.COMMITTED, None)
        if state is LastResourceState.COMMITTED_ALONE:
            broker.finished()
            text = f"the rows are committed, the messages were given up: {run.error}"
            return Ending(Outcome.COMMITTED, HeuristicMixedError(text, broker.txid))
        if state is LastResourceState.UNKNOWN:
            self._leave(None)
            text = f"COMMIT was not answered: {run.error or run.interrupt}"
            return Ending(Outcome.UNKNOWN, OutcomeUnknownError(text, broker.txid))
        if state is LastResourceState.HAZARD:
            return self._hazarded()
        if state is LastResourceState.BROKER_ALONE:
            broker.finished()
            text = "the rows are rolled back, the broker committed the messages"
            return Ending(Outcome.ROLLED_BACK, HeuristicCommitError(text, broker.txid))
        return self._branches_rolled_back()

    def _committed(self, state: LastResourceState) -> None:
        broker = self._broker
        if state is LastResourceState.COMMITTED:
            broker.finished()
            self._resource.finished.append(broker.txid)
            return
        self.pending = ("broker",)

        def settled() -> None:
            self.pending = ()
            broker.finished()

        self._resource.unsettled.append(Unsettled(broker.txid, marker.COMMITTED, broker.deadline_ms, settled))
        self._settler.wake()

    def _hazarded(self) -> Ending:
        broker, run = self._broker, self.run
        if run.hazard is not None and not run.is_told:
            broker.keep()  # of what is finished the broker soon takes nothing more
            self._settler.report(run.hazard, broker.finished)
        else:
            broker.finished()
        log = get_logger(resource=self._resource.name, txid=broker.txid)
        log.error("heuristic: the body ended the transaction by itself", error=str(run.error))
        return Ending(Outcome.UNKNOWN, run.error)

    def _branches_rolled_back(self) -> Ending:
        if self.run.is_told is False:
            self._leave(marker.ROLLED_BACK)
        else:
            self._broker.finished()
        error = self.run.error or RolledBackError("the transaction was rolled back", self._broker.txid)
        return Ending(Outcome.ROLLED_BACK, error)

    def _leave(self, outcome: str | None) -> None:
        """Let the resolver tell the broker, by this outcome or (None) by what the database proves."""
        broker = self._broker
        self._resource.unsettled.append(Unsettled(broker.txid, outcome, broker.deadline_ms, broker.finished))
        self._settler.wake()
