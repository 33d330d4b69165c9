"""The ending of a block with XA resources: from the beginning of its branches to the outcome for the caller.

The branches are begun in the order in which the block names its resources; one database takes part once. Branches that
the run (``run``) could not finish are left to the client's resolver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from txmq.client.transaction.ending import BlockResolver, Ending, no_part
from txmq.client.transaction.homes import RoutedTransaction
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.preparing import begin_for_caller
from txmq.client.transaction.xa.run import XARun
from txmq.errors import (
    HeuristicError,
    HeuristicHazardError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionError,
    TxmqError,
)
from txmq.model import Outcome, TransactionKind
from txmq.runtime.logging import get_logger
from txmq.xa.database.hazard import Hazard
from txmq.xa.resources import refuse_twins
from txmq.xa.two_phase.branch import UsedXAConnection, XABranch, XAResource
from txmq.xa.two_phase.coordinator import BranchState, XAEvent, XAState

_ENDED = (BranchState.COMMITTED, BranchState.ROLLED_BACK)


class XABlock:
    """See the module's docstring.

    Attributes:
        run: carries out the end.
    """

    run: XARun

    def __init__(
        self, broker: RoutedTransaction, resources: Sequence[Any], messages: MessageBuffer, resolver: BlockResolver
    ) -> None:
        self._broker, self._resources, self._messages, self._resolver = broker, resources, messages, resolver
        self._branches: list[XABranch] = []
        self._pending: tuple[str, ...] = ()
        self._unreported = 0  # hazards that the broker has yet to hear of

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the resources whose branch the resolver finishes, and homes that could not be told; shrinks."""
        return (*self._pending, *self._broker.pending_homes)

    @property
    def has_begun(self) -> bool:
        """See ``BlockEnding``."""
        return self.run.has_begun

    def begin(self) -> None:
        """See ``BlockEnding``."""
        broker, branches = self._broker, self._branches
        broker.go_to_likely_home()
        begin_for_caller(broker)
        try:
            for given in self._resources:
                resource, connection = given if isinstance(given, UsedXAConnection) else (given, None)
                branches.append(resource.enlist(broker.cluster, broker.txid, broker.remaining_s, connection))
                if len(branches) > 1:
                    refuse_twins([branch.resource for branch in branches])  # its identity is known by now
                self._resolver.add(resource)
        except BaseException:
            for branch in branches:
                branch.roll_back(False)
            broker.finished()
            raise
        self.run = XARun(broker, branches, self._messages)

    def connection(self, resource: Any) -> Any:
        """See ``BlockEnding``."""
        for branch in self._branches:
            if branch.resource is resource:
                return branch.connection
        raise no_part(resource)

    def parts_streamed(self) -> None:
        """See ``BlockEnding``."""
        self._broker.find_homes(self._messages)

    def gather_results(self, deadline: float) -> None:
        """See ``BlockEnding``."""
        if self.run.lines is not None:
            self._messages.place(self._broker.gather(self.run.lines, deadline))

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ending:
        """See ``BlockEnding``."""
        run = self.run
        is_sound = body_error is None and run.is_body_sound(self._branches, failure)
        state = run.run(XAEvent.BODY_DONE if is_sound else XAEvent.BODY_FAILED)
        ended = [side.branch.resource for side in run.sides if side.branch.ended_by_body]
        hazard = self._hazarded(ended) if ended else None
        self._hand_over(state)
        outcome, error = self._concluded(state) if hazard is None else (Outcome.UNKNOWN, hazard)
        return Ending(outcome, outcome, error, run.interrupt)

    def _hand_over(self, state: XAState) -> None:
        txid = self._broker.txid
        left = []
        for side in self.run.sides:
            resource = side.branch.resource
            if side.complete is not None:
                self._resolver.completed(resource, txid, side.complete)
            elif side.state not in _ENDED or state is XAState.COMMITTED_PENDING:
                left.append(resource)
        if state in (XAState.COMMITTED, XAState.COMMITTED_PENDING, XAState.ROLLED_BACK) and not self._unreported:
            # Whatever floor the session states, the broker keeps a decision until every branch is complete.
            self._broker.finished()
            on_end = _nothing
        else:
            on_end = self._finish
        if not left:
            if state is XAState.ROLLED_BACK_PENDING:
                self._finish()  # only other homes are left: they ask
            return
        if on_end is not _nothing:
            self._broker.keep()
        self._pending = tuple(resource.name for resource in left)
        for resource in left:
            self._resolver.watch(resource, txid, self._resolved(resource.name, on_end))
        self._resolver.wake()

    def _resolved(self, name: str, on_end: Callable[[], None]) -> Callable[[], None]:
        def resolved() -> None:
            self._pending = tuple(other for other in self._pending if other != name)
            if not self._pending:
                on_end()

        return resolved

    def _hazard_reported(self) -> None:
        self._unreported -= 1
        self._finish()

    def _finish(self) -> None:
        if not (self._unreported or self._pending):
            self._broker.finished()

    def _hazarded(self, resources: Sequence[XAResource]) -> TransactionError:
        """Have the broker keep that bodies ended branches by themselves; the error for the caller."""
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
                self._unreported += 1
                self._resolver.report(hazard, self._hazard_reported)
        get_logger(txid=txid).error("heuristic: the body ended its branch by itself", error=str(error))
        return error

    def _concluded(self, state: XAState) -> tuple[Outcome, TransactionError | None]:
        run, txid = self.run, self._broker.txid
        if state in (XAState.COMMITTED, XAState.COMMITTED_PENDING):
            return (Outcome.COMMITTED, None)
        if state is XAState.UNKNOWN:
            why = run.error or run.interrupt
            text = f"decide was not answered: {why}; ask client.outcome(txid)"
            return (Outcome.UNKNOWN, OutcomeUnknownError(text, txid))
        if isinstance(run.error, HeuristicError):  # the body ended a branch, which was there to be rolled back
            cause, run.error = run.error, RolledBackError(str(run.error.args[0]), retriable=False)
            run.error.__cause__, run.error.txid = cause, txid
        return (Outcome.ROLLED_BACK, run.error or RolledBackError("the transaction was rolled back", txid))


def _nothing() -> None:
    """Do nothing."""
