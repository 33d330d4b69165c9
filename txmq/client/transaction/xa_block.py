"""The XA side of a transaction block: its branches from their beginning to what the caller is told of their end.

The branches are begun in the order in which the block names its resources; one database takes part once. What the run
(``transaction_xa``) could not finish is left to the client's resolver, which is told what to look for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from txmq.client.transaction.broker_side import BrokerTransaction
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.xa_run import XaRun
from txmq.errors import (
    ConfigError,
    HeuristicError,
    HeuristicHazardError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionError,
    TransactionStateError,
    TxmqError,
    anew,
)
from txmq.model import Outcome, TransactionKind
from txmq.runtime.logging import get_logger
from txmq.xa.database.hazard import Hazard
from txmq.xa.two_phase.branch import UsedXAConnection, XABranch, XAResource
from txmq.xa.two_phase.coordinator import BranchState, XAEvent, XAState

_ENDED = (BranchState.COMMITTED, BranchState.ROLLED_BACK)


class Settler(Protocol):
    """The client's resolver, as a block sees it."""

    def add(self, resource: Any) -> None:
        """Settle for this resource, too."""

    def wake(self) -> None:
        """Something was left: look at once."""

    def report(self, hazard: Hazard, on_told: Callable[[], None]) -> None:
        """The broker could not be told of it: go on telling."""

    def completed(self, resource: XAResource, txid: str, answer: Any) -> None:
        """``complete`` was sent; what becomes of the answer decides when the marker goes."""

    def watch(self, resource: XAResource, txid: str, on_settled: Callable[[], None]) -> None:
        """Tell when nothing of a transaction is in doubt in this resource any more."""


class Ending(NamedTuple):
    """What the caller is told."""

    outcome: Outcome
    error: TransactionError | None


class XaBlock:
    """See the module's docstring.

    Attributes:
        run: what carries the end out.
        pending: names of the resources whose branch the resolver finishes; shrinks as it does.
    """

    def __init__(
        self, broker: BrokerTransaction, resources: Sequence[Any], messages: MessageBuffer, settler: Settler
    ) -> None:
        self._broker, self._settler = broker, settler
        self.pending: tuple[str, ...] = ()
        self._untold = 0  # hazards that the broker has yet to hear of
        self._branches = self._begun(resources)
        self.run = XaRun(broker, self._branches, messages)

    def connection(self, resource: Any) -> Any:
        """The database connection of a resource's branch."""
        for branch in self._branches:
            if branch.resource is resource:
                return branch.connection
        raise TransactionStateError(f"{resource!r} takes no part in this transaction")

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ending:
        """Bring it to its end.

        Args:
            body_error: what the body raised.
            failure: a part sent ahead was refused.
        """
        is_sound = body_error is None and self._is_body_sound(failure)
        state = self.run.run(XAEvent.BODY_DONE if is_sound else XAEvent.BODY_FAILED)
        ended = [side.branch.resource for side in self.run.sides if side.branch.ended_by_body]
        hazard = self._hazarded(ended) if ended else None
        self._tell_settler(state)
        return self._concluded(state) if hazard is None else hazard

    # --- the beginning -----------------------------------------------------------------------------------------------

    def _begun(self, resources: Sequence[Any]) -> list[XABranch]:
        begun: list[XABranch] = []
        cluster, txid = self._broker.cluster, self._broker.txid
        try:
            for given in resources:
                resource, connection = given if isinstance(given, UsedXAConnection) else (given, None)
                begun.append(resource.enlist(cluster, txid, self._broker.remaining_s, connection))
                refuse_twins([branch.resource for branch in begun])  # its identity is known by now
                self._settler.add(resource)
        except BaseException:
            for branch in begun:
                branch.roll_back(False)
            raise
        return begun

    # --- the end -----------------------------------------------------------------------------------------------------

    def _is_body_sound(self, failure: RolledBackError | None) -> bool:
        run = self.run
        try:
            for branch in self._branches:
                branch.end_body()
            self._broker.check_deadline()
            self._broker.reach()  # what is prepared in a database stays locked until the broker has said something
            if failure is not None:
                raise anew(failure)
        except TransactionError as error:
            run.error = error
        except BaseException as interrupt:  # noqa: BLE001  raised again when the transaction is undone
            run.interrupt = interrupt
        else:
            return True
        return False

    def _tell_settler(self, state: XAState) -> None:
        txid = self._broker.txid
        left = []
        for side in self.run.sides:
            resource = side.branch.resource
            if side.complete is not None:
                self._settler.completed(resource, txid, side.complete)
            elif side.state not in _ENDED or state is XAState.COMMITTED_PENDING:
                left.append(resource)
        if state in (XAState.COMMITTED, XAState.COMMITTED_PENDING, XAState.ROLLED_BACK) and not self._untold:
            # Whatever floor the session states, the broker keeps a decision until every branch is complete.
            self._broker.finished()
            on_end = _nothing
        else:
            on_end = self._finish
        if not left:
            return
        if on_end is not _nothing:
            self._broker.keep()
        self.pending = tuple(resource.name for resource in left)
        for resource in left:
            self._settler.watch(resource, txid, self._settled(resource.name, on_end))
        self._settler.wake()

    def _settled(self, name: str, on_end: Callable[[], None]) -> Callable[[], None]:
        def settled() -> None:
            self.pending = tuple(other for other in self.pending if other != name)
            if not self.pending:
                on_end()

        return settled

    def _told(self) -> None:
        self._untold -= 1
        self._finish()

    def _finish(self) -> None:
        if not (self._untold or self.pending):
            self._broker.finished()

    def _hazarded(self, resources: Sequence[XAResource]) -> Ending:
        """Bodies have ended branches by themselves: have the broker keep that."""
        txid, cause = self._broker.txid, self.run.error
        names = ", ".join(repr(resource.name) for resource in resources)
        error = HeuristicHazardError(
            f"the body ended the branch in {names} by itself (XA END, XA COMMIT); its rows may be there, no message "
            f"was sent{'' if cause is None else f': {cause}'}",
            txid,
        )
        error.__cause__ = cause
        for resource in resources:
            hazard = Hazard(txid, TransactionKind.XA, resource.name, resource.uuid or "", str(error))
            try:
                self._broker.rollback(hazard)
            except TxmqError:
                self._broker.keep()  # of what is finished the broker soon takes nothing more
                self._untold += 1
                self._settler.report(hazard, self._told)
        get_logger(txid=txid).error("heuristic: the body ended its branch by itself", error=str(error))
        return Ending(Outcome.UNKNOWN, error)

    def _concluded(self, state: XAState) -> Ending:
        run, txid = self.run, self._broker.txid
        if state in (XAState.COMMITTED, XAState.COMMITTED_PENDING):
            return Ending(Outcome.COMMITTED, None)
        if state is XAState.UNKNOWN:
            why = run.error or run.interrupt
            return Ending(Outcome.UNKNOWN, OutcomeUnknownError(f"decide was not answered: {why}", txid))
        if isinstance(run.error, HeuristicError):  # the body ended a branch, which was there to be rolled back
            cause, run.error = run.error, RolledBackError(str(run.error.args[0]), retriable=False)
            run.error.__cause__, run.error.txid = cause, txid
        return Ending(Outcome.ROLLED_BACK, run.error or RolledBackError("the transaction was rolled back", txid))


def _nothing() -> None:
    """Nobody waits for it."""


def is_xa(resource: Any) -> bool:
    """Whether this takes part in two-phase commits."""
    return isinstance(resource, UsedXAConnection) or hasattr(resource, "open_recovery")


def refuse_twins(resources: Sequence[Any]) -> None:
    """Refuse a database that is named twice: its second marker row would wait for the first one's transaction.

    Args:
        resources: those whose identity is not known yet are told apart as objects.

    Raises:
        ConfigError: it is.
    """
    seen: dict[str | int, Any] = {}
    for given in resources:
        resource = given.resource if isinstance(given, UsedXAConnection) else given
        identity = resource.uuid or id(resource)
        if identity in seen:
            raise ConfigError(
                f"{seen[identity]!r} and {resource!r} are one database, which takes part in a transaction once: name "
                "one of them, and use its one connection"
            )
        seen[identity] = resource
