"""The ending of a block with a last resource: from the beginning of its branch to the outcome for the caller.

The database decides, and the block returns when the homes have been written to. Their answers come later, in whichever
thread takes them (``branch_commits``); then the marker may go, and the acknowledgements of the block count. A home that
has decided otherwise by then is a heuristic: logged, and raised by ``gather_results``. A transaction that the run
(``last_resource``) could not finish is left to the client's resolver, with the outcome by which to finish it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from txmq.client.transaction.ending import BlockResolver, Ending, no_part
from txmq.client.transaction.homes import HomeBranch, RoutedTransaction
from txmq.client.transaction.last_resource.run import LastResourceRun
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.preparing import attach_for_caller
from txmq.errors import (
    HeuristicCommitError,
    HeuristicMixedError,
    NotOwnerError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionError,
    TxmqError,
    UnknownTransactionError,
    caused,
)
from txmq.model import Outcome, TransactionKind
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import Lock
from txmq.xa import LastResource
from txmq.xa.database import marker_table
from txmq.xa.database.hazard import lost_messages
from txmq.xa.last_resource.branch import Branch
from txmq.xa.last_resource.coordinator import LastResourceEvent, LastResourceState
from txmq.xa.last_resource.resolving import Unresolved
from txmq.xa.last_resource.resource import UsedConnection


def _nothing(_outcome: Outcome) -> None:
    """Do nothing."""


class LastResourceBlock:
    """See the module's docstring.

    Attributes:
        run: carries out the end.
    """

    run: LastResourceRun
    _branch: Branch

    def __init__(
        self, broker: RoutedTransaction, resource: LastResource | UsedConnection, messages: MessageBuffer,
        resolver: BlockResolver, on_told: Callable[[Outcome], None],
    ) -> None:  # fmt: skip
        self._on_told = on_told
        self._broker, self._messages, self._resolver = broker, messages, resolver
        self._lent: Any = None
        if isinstance(resource, UsedConnection):
            self._resource, self._lent = resource
        else:
            self._resource = resource
        self._answered: set[HomeBranch | None] = set()
        self._lock = Lock()  # homes answer in any thread

    @property
    def pending(self) -> tuple[str, ...]:
        """("broker",) while the decision has yet to reach the broker, and other homes that it has yet to reach."""
        commit = self.run.commit
        if commit is not None and commit.lines is None:
            self._broker.commits.look_closely()
        return self.run.unwritten

    @property
    def has_begun(self) -> bool:
        """See ``BlockEnding``."""
        return self.run.has_begun

    def begin(self) -> None:
        """See ``BlockEnding``."""
        broker = self._broker
        broker.reach()
        attach_for_caller(broker)
        try:
            self._make_room()
            self._branch = self._resource.enlist(broker.cluster, self._lent, broker.remaining_s)
            try:
                self._resolver.add(self._resource)
            except BaseException:
                self._branch.roll_back()
                raise
        except BaseException:
            broker.finished()
            raise
        self.run = LastResourceRun(broker, self._branch, self._messages, self._told)

    def _make_room(self) -> None:
        broker = self._broker
        try:
            broker.commits.make_room(broker.deadline)
        except TxmqError as error:
            text = f"the broker has yet to answer to too many transactions of this client: {error}"
            raise caused(RolledBackError(text, None), error) from error

    def connection(self, resource: Any) -> Any:
        """See ``BlockEnding``."""
        if self._resource is not resource:
            raise no_part(resource)
        return self._branch.connection

    def parts_streamed(self) -> None:
        """See ``BlockEnding``."""
        self._broker.find_homes(self._messages)
        self.run.coordinator.step(LastResourceEvent.PARTS_STREAMED)

    def gather_results(self, deadline: float) -> None:
        """See ``BlockEnding``."""
        error = self.run.await_told(deadline)
        if self.run.lines is not None:
            self._messages.place(self.run.lines)
        if error is not None and not isinstance(error, NotOwnerError):
            text = f"the rows are committed, the messages were given up before ({error}): send them again"
            raise HeuristicMixedError(text, self._broker.txid)

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ending:
        """See ``BlockEnding``."""
        if body_error is not None:
            self._branch.note(body_error)
        run = self.run
        is_sound = body_error is None and run.is_body_sound((self._branch,), failure)
        state = run.run(LastResourceEvent.BODY_DONE if is_sound else LastResourceEvent.BODY_FAILED)
        outcome, error = self._concluded(state)
        return Ending(outcome, self._in_broker(state, outcome), error, run.interrupt)

    def _in_broker(self, state: LastResourceState, outcome: Outcome) -> Outcome | None:
        """The outcome in the broker, if known; None if the answers of the homes will tell."""
        if outcome is Outcome.COMMITTED:
            return None
        is_over = (
            outcome is Outcome.ROLLED_BACK or state is LastResourceState.HAZARD
        ) and self.run.is_acknowledged is not False
        return Outcome.ROLLED_BACK if is_over and state is not LastResourceState.BROKER_ALONE else Outcome.UNKNOWN

    def _concluded(self, state: LastResourceState) -> tuple[Outcome, TransactionError | None]:
        """Leave the rest to the resolver. Returns outcome and error for the caller."""
        broker, run = self._broker, self.run
        if state in (LastResourceState.COMMITTED, LastResourceState.COMMITTED_PENDING):
            self._committed(state)
            return (Outcome.COMMITTED, None)
        self._let_go()  # no home has been told anything that it would answer to
        if state is LastResourceState.UNKNOWN:
            self._leave(None)
            text = f"COMMIT was not answered: {run.error or run.interrupt}; ask client.outcome(txid)"
            return (Outcome.UNKNOWN, OutcomeUnknownError(text, broker.txid))
        if state is LastResourceState.HAZARD:
            return self._hazarded()
        if state is LastResourceState.BROKER_ALONE:
            broker.finished()
            text = "the rows are rolled back, the broker had committed the messages before: write the rows again"
            return (Outcome.ROLLED_BACK, HeuristicCommitError(text, broker.txid))
        return self._rolled_back()

    def _committed(self, state: LastResourceState) -> None:
        """Leave the rest to the answers, and what is not written to the resolver."""
        run = self.run
        run.write_commits()  # also if an interrupt came first
        self._resolver.tell(self._broker.commits)
        for home in run.homes:
            self._resolver.tell(home.commits)
        if state is LastResourceState.COMMITTED_PENDING:
            self._resolver.wake()

    def _told(self, home: HomeBranch | None) -> None:
        """A home has answered to its commit; when all have, the marker is not needed any more."""
        commit = self.run.commit
        if home is None and commit is not None:
            if isinstance(commit.error, NotOwnerError):
                self._leave_commit()
                return
            if isinstance(commit.error, UnknownTransactionError):
                self._report_lost()
            else:
                self._broker.finished_here()
        with self._lock:
            self._answered.add(home)
            is_last = len(self._answered) == 1 + len(self.run.homes)
        if is_last:
            self._all_told()

    def _report_lost(self) -> None:
        """Have the broker keep that it has lost the messages: it may not call the transaction finished before."""
        broker, resource = self._broker, self._resource
        broker.keep()
        kind, uuid = TransactionKind.LAST_RESOURCE, self._branch.uuid
        self._resolver.report(lost_messages(broker.txid, kind, resource.name, uuid), broker.finished_here)

    def _all_told(self) -> None:
        commit = self.run.commit
        errors = [home.error for home in self.run.homes if home.error is not None]
        is_contrary = bool(errors) or (commit is not None and commit.error is not None)
        if not is_contrary:
            self._resource.finished.append(self._broker.txid)
        on_told = self._on_told
        self._let_go()
        on_told(Outcome.UNKNOWN if is_contrary else Outcome.COMMITTED)

    def _let_go(self) -> None:
        """Nobody is to be told any more, and no cycle is left to be collected."""
        self._on_told = _nothing
        self.run.let_go()

    def _leave_commit(self) -> None:
        """Another broker has the address for now: the resolver asks again and again."""
        broker = self._broker
        self._resource.unresolved.append(
            Unresolved(
                broker.txid, marker_table.COMMITTED, broker.deadline_ms, self._resolved, on_contrary=self._contradicted
            )
        )

    def _contradicted(self, error: TxmqError) -> None:
        if self.run.commit is not None:
            self.run.commit.error = error

    def _resolved(self) -> None:
        commit = self.run.commit
        if commit is not None:
            commit.told([], None if isinstance(commit.error, NotOwnerError) else commit.error)

    def _hazarded(self) -> tuple[Outcome, TransactionError | None]:
        broker, run = self._broker, self.run
        if run.hazard is not None and not run.is_acknowledged:
            broker.keep()  # of what is finished the broker soon takes nothing more
            self._resolver.report(run.hazard, broker.finished)
        else:
            broker.finished()
        log = get_logger(resource=self._resource.name, txid=broker.txid)
        log.error("heuristic: the body ended the transaction by itself", error=str(run.error))
        return (Outcome.UNKNOWN, run.error)

    def _rolled_back(self) -> tuple[Outcome, TransactionError | None]:
        if self.run.is_acknowledged is False:
            self._leave(marker_table.ROLLED_BACK)
        else:
            self._broker.finished()
        error = self.run.error or RolledBackError("the transaction was rolled back", self._broker.txid_or_none)
        return (Outcome.ROLLED_BACK, error)

    def _leave(self, outcome: str | None) -> None:
        """Let the resolver report this outcome, or (None) the one that the database proves."""
        broker, left = self._broker, self._resource.unresolved
        left.append(Unresolved(broker.txid, outcome, broker.deadline_ms, broker.finished_here))
        for home in self.run.homes:
            if home.has_ended:
                home.close()
            else:
                there = home.broker
                left.append(Unresolved(there.txid, outcome, there.deadline_ms, there.finished, of=broker.txid))
        self._resolver.wake()
