"""The ending of a block with a last resource: its database decides.

It carries out the effects of ``xa/last_resource/coordinator.py``: database, broker, waits. The database's COMMIT is the
decision. The commits of the homes are written after it, and the block returns. Their answers come later, in whichever
thread takes them (``homes``); then the marker may go, and the acknowledgements of the block count. A home
that has decided otherwise by then is a heuristic: logged, and raised by ``gather_results``. A transaction that could
not be finished here is left to the client's resolver, with the outcome by which to finish it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from txmq.client.transaction.ending import CoordinatedEnding, Ended, no_part
from txmq.client.transaction.homes import HomePart, TransactionHomes, nothing
from txmq.client.transaction.messages import MessageBuffer
from txmq.errors import (
    ConfigError,
    HeuristicCommitError,
    HeuristicError,
    HeuristicHazardError,
    HeuristicMixedError,
    NotOwnerError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionAwayError,
    TransactionConflictError,
    TransactionError,
    TxmqError,
    UnknownTransactionError,
    caused,
)
from txmq.model import Outcome, TransactionKind
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import Lock
from txmq.xa import LastResource
from txmq.xa.database import marker_table
from txmq.xa.fencing import Fence
from txmq.xa.last_resource.branch import Branch
from txmq.xa.last_resource.coordinator import (
    LastResourceCoordinator,
    LastResourceEffect,
    LastResourceEvent,
    LastResourceState,
)
from txmq.xa.last_resource.in_doubt_outcome import ResolvingConnection, Step, Unresolved, prove
from txmq.xa.last_resource.resource import UsedConnection
from txmq.xa.reporter import Hazard, lost_messages
from txmq.xa.resolver_ports import REQUEST_TIMEOUT_S, Answer, was_settled
from txmq.xa.two_phase.coordinator import BranchState
from txmq.xid import home_word

if TYPE_CHECKING:
    from txmq.client.transaction.background_resolver import BackgroundResolver

# An enum's member is slow to look up.
_COMMITTED, _COMMITTED_PENDING = LastResourceState.COMMITTED, LastResourceState.COMMITTED_PENDING
_MARKER_INSERTED, _MARKER_LEFT = LastResourceEvent.MARKER_INSERTED, LastResourceEvent.MARKER_LEFT
_PREPARED, _DATABASE_COMMITTED = LastResourceEvent.PREPARED, LastResourceEvent.DATABASE_COMMITTED
_BODY_DONE, _COMMIT_WRITTEN = LastResourceEvent.BODY_DONE, LastResourceEvent.COMMIT_WRITTEN
_INTERRUPTED = LastResourceEvent.INTERRUPTED
_PART_COMMITTED = BranchState.COMMITTED
_COMMIT_OUTCOME = Outcome.COMMITTED
RESOLVE_S_MIN = 1.0  # for looking the decision up, even if the deadline is closer
LOOK_UP_PAUSE_S = 0.05


def _nothing(_outcome: Outcome) -> None:
    """Do nothing."""


class LastResourceEnding(CoordinatedEnding[LastResourceState, LastResourceEvent, LastResourceEffect]):
    """See the module's docstring.

    Args:
        on_told: called with the outcome in the broker when all homes have answered to the commit.

    Attributes:
        is_acknowledged: whether the brokers have acknowledged the rollback; None if it was not asked for one.
        hazard: for the broker to keep, if the body had ended the database's transaction by itself.
    """

    _branch: Branch

    def __init__(
        self, homes: TransactionHomes, resource: LastResource | UsedConnection, messages: MessageBuffer,
        resolver: BackgroundResolver, on_told: Callable[[Outcome], None],
    ) -> None:  # fmt: skip
        super().__init__(homes, messages, LastResourceCoordinator(), _EFFECTS, _INTERRUPTED)
        self._on_told, self._resolver = on_told, resolver
        self._lent: Any = None
        if isinstance(resource, UsedConnection):
            self._resource, self._lent = resource
        else:
            self._resource = resource
        self._commit_error: Exception | None = None
        self._is_written: bool | None = None  # the commit at every home; None before the decision
        self._answered: set[HomePart] = set()
        self._lock = Lock()  # homes answer in any thread
        self.is_acknowledged: bool | None = None
        self.hazard: Hazard | None = None

    # --- the body ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See ``Ending``."""
        decider = self._decider
        decider.reach()
        decider.attach_for_caller()
        try:
            if decider.commits.is_full:
                self._make_room()
            self._branch = self._resource.enlist(decider.cluster, self._lent, decider.remaining_s)
            try:
                self._resolver.add(self._resource)
            except BaseException:
                self._branch.roll_back()
                raise
        except BaseException:
            self._homes.finished()
            raise

    def _make_room(self) -> None:
        try:
            self._decider.commits.make_room(self._decider.deadline)
        except TxmqError as error:
            text = f"the broker has yet to answer to too many transactions of this client: {error}"
            raise caused(RolledBackError(text, None), error) from error

    def connection(self, resource: Any) -> Any:
        """See ``Ending``."""
        if self._resource is not resource:
            raise no_part(resource)
        return self._branch.connection

    def parts_streamed(self) -> None:
        """See ``Ending``."""
        self._homes.find(self._messages)
        self.coordinator.step(LastResourceEvent.PARTS_STREAMED)

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ended:
        """See ``Ending``."""
        branch = self._branch
        if body_error is not None:
            branch.note(body_error)
        is_sound = body_error is None and self.is_body_sound((branch,), failure, branch.uuid)
        state = self.run(_BODY_DONE if is_sound else LastResourceEvent.BODY_FAILED)
        if state is _COMMITTED or state is _COMMITTED_PENDING:
            self._committed(state)
            return Ended(_COMMIT_OUTCOME, None, None, self.interrupt)  # the answers of the homes will tell
        outcome, error = self._concluded(state)
        return Ended(outcome, self._in_broker(state, outcome), error, self.interrupt)

    def _in_broker(self, state: LastResourceState, outcome: Outcome) -> Outcome:
        """The outcome in the broker, as far as it is known."""
        is_over = (
            outcome is Outcome.ROLLED_BACK or state is LastResourceState.HAZARD
        ) and self.is_acknowledged is not False
        return Outcome.ROLLED_BACK if is_over and state is not LastResourceState.BROKER_ALONE else Outcome.UNKNOWN

    def _concluded(self, state: LastResourceState) -> tuple[Outcome, TransactionError | None]:
        """Leave the rest to the resolver. Returns outcome and error for the caller."""
        homes, txid = self._homes, self._decider.txid
        self._let_go()  # no home has been told anything that it would answer to
        if state is LastResourceState.UNKNOWN:
            self._leave(None)
            text = f"COMMIT was not answered: {self.error or self.interrupt}; ask client.outcome(txid)"
            return (Outcome.UNKNOWN, OutcomeUnknownError(text, txid))
        if state is LastResourceState.HAZARD:
            return self._hazarded()
        if state is LastResourceState.BROKER_ALONE:
            homes.finished()
            text = "the rows are rolled back, the broker had committed the messages before: write the rows again"
            return (Outcome.ROLLED_BACK, HeuristicCommitError(text, txid))
        return self._rolled_back()

    def _committed(self, state: LastResourceState) -> None:
        """Leave the rest to the answers, and what is not written to the resolver."""
        if self._is_written is None:  # an interrupt came first
            self._write_commits()
        for part in (self._decider, *self._homes.others):
            self._resolver.tell(part.commits)
        if state is _COMMITTED_PENDING:
            self._resolver.wake()

    def _hazarded(self) -> tuple[Outcome, TransactionError | None]:
        decider, homes = self._decider, self._homes
        if self.hazard is not None and not self.is_acknowledged:
            decider.keep()  # of what is finished the broker soon takes nothing more
            self._resolver.report(self.hazard, homes.finished)
        else:
            homes.finished()
        log = get_logger(resource=self._resource.name, txid=decider.txid)
        log.error("heuristic: the body ended the transaction by itself", error=str(self.error))
        return (Outcome.UNKNOWN, self.error)

    def _rolled_back(self) -> tuple[Outcome, TransactionError | None]:
        if self.is_acknowledged is False:
            self._leave(marker_table.ROLLED_BACK)
        else:
            self._homes.finished()
        error = self.error or RolledBackError("the transaction was rolled back", self._decider.txid_or_none)
        return (Outcome.ROLLED_BACK, error)

    def _leave(self, outcome: str | None) -> None:
        """Let the resolver report this outcome, or (None) the one that the database proves."""
        decider, left = self._decider, self._resource.unresolved
        left.append(Unresolved(decider.txid, outcome, decider.deadline_ms, self._homes.finished_here))
        for part in self._homes.others:
            if part.has_ended:
                part.close()
            else:
                left.append(Unresolved(part.txid, outcome, part.deadline_ms, part.finished, of=decider.txid))
        self._resolver.wake()

    # --- effects: towards the decision -------------------------------------------------------------------------------

    @staticmethod
    def effects() -> dict[LastResourceEffect, Callable[[LastResourceEnding], LastResourceEvent | None]]:
        """What carries out each effect."""
        return {
            LastResourceEffect.SEND_PREPARE: LastResourceEnding._send_prepare,
            LastResourceEffect.INSERT_MARKER: LastResourceEnding._insert_marker,
            LastResourceEffect.AWAIT_PREPARED: LastResourceEnding._await_prepared,
            LastResourceEffect.COMMIT_DATABASE: LastResourceEnding._commit_database,
            LastResourceEffect.SEND_COMMIT: LastResourceEnding._send_commit,
            LastResourceEffect.LOOK_UP: LastResourceEnding._look_up,
            LastResourceEffect.ROLL_BACK_DATABASE: LastResourceEnding._roll_back_database,
            LastResourceEffect.SEND_ROLLBACK: LastResourceEnding._send_rollback,
            LastResourceEffect.REPORT_HAZARD: LastResourceEnding._report_hazard,
        }

    def _send_prepare(self) -> LastResourceEvent | None:
        crash_point("client.tx.body_done")
        decider, homes = self._decider, self._homes
        try:
            homes.take(self._messages)
            if decider.is_large:
                homes.stream()
            decider.prepare(partial(self._submit_prepare, decider))
            if homes.others and decider.error is None:
                homes.stream_large_others()
                homes.send_prepares(self._submit_prepare)
        except TxmqError as error:
            decider.refused(error)
        return None if decider.error is None else self._not_prepared(decider, decider.error)

    def _submit_prepare(self, part: HomePart) -> Answer:
        resource, of = self._branch.resource, "" if part.of is None else part.of.txid
        reply = part.submit_prepare(part.parts, resource.name, self._branch.uuid, resource.installation.table, of)
        crash_point("client.tx.prepare_sent")
        return reply

    def _insert_marker(self) -> LastResourceEvent:
        branch, decider = self._branch, self._decider
        if branch.leave_marker_to_commit(decider.txid, decider.timeout_s):
            return _MARKER_LEFT
        try:
            branch.insert_marker(decider.txid, decider.timeout_s)
        except (RolledBackError, HeuristicError) as error:
            self.error = error
            return LastResourceEvent.MARKER_REFUSED
        crash_point("client.tx.marker_inserted")
        return _MARKER_INSERTED

    def _await_prepared(self) -> LastResourceEvent:
        for part in (self._decider, *self._homes.others):
            part.await_prepared(partial(self._submit_prepare, part))
            if part.error is not None:
                return self._not_prepared(part, part.error)
        crash_point("client.tx.prepared")
        return _PREPARED

    def _not_prepared(self, part: HomePart, error: RolledBackError) -> LastResourceEvent:
        """A home is away, or late, or has refused."""
        self.error = error
        is_refused = part.state is BranchState.REFUSED
        return LastResourceEvent.PREPARE_REFUSED if is_refused else LastResourceEvent.PREPARE_UNKNOWN

    def _commit_database(self) -> LastResourceEvent:
        branch = self._branch
        try:
            branch.commit()
        except TransactionError as error:
            self.error = error
            return LastResourceEvent.MARKER_REFUSED
        except Exception as error:  # noqa: BLE001  a driver may raise anything; the database is asked what it did
            is_retriable = branch.is_retriable(error)
            self.error = RolledBackError(f"COMMIT failed: {error}", self._decider.txid, retriable=is_retriable)
            self.error.__cause__ = self._commit_error = error
            return LastResourceEvent.DATABASE_REFUSED if branch.is_still_open else LastResourceEvent.DATABASE_UNKNOWN
        crash_point("client.tx.db_committed")
        branch.finish()
        return _DATABASE_COMMITTED

    def _look_up(self) -> LastResourceEvent:
        outcome = None
        if self._commit_error is not None:
            outcome = self._branch.outcome_after(self._commit_error, self._decider.txid)
        if outcome is not None:
            self._branch.finish()
            is_committed = outcome == marker_table.COMMITTED
            return LastResourceEvent.PROVED_COMMITTED if is_committed else LastResourceEvent.PROVED_ROLLED_BACK
        self._branch.abandon()
        until_s = self._wait_ends_s()
        while True:
            step = self._proved()
            if step is Step.REPORT_COMMIT:
                return LastResourceEvent.PROVED_COMMITTED
            if step is Step.REPORT_ROLLBACK:
                return LastResourceEvent.PROVED_ROLLED_BACK
            if self._decider.remaining_s <= until_s:
                return LastResourceEvent.LOOKUP_FAILED
            self._decider.pause(LOOK_UP_PAUSE_S)

    def _wait_ends_s(self) -> float:
        """The value of ``remaining_s`` to stop at: 0, or later if the deadline is closer than RESOLVE_S_MIN."""
        return min(self._decider.remaining_s, RESOLVE_S_MIN) - RESOLVE_S_MIN

    def _proved(self) -> Step:
        try:
            timeout_s = max(self._decider.remaining_s, RESOLVE_S_MIN)
            database = self._branch.resource.open_for_resolver(self._decider.cluster, timeout_s)
        except Exception:  # noqa: BLE001  unreachable, in whatever way of the driver: nothing is known
            return Step.UNDECIDED
        database.limit.begin(timeout_s)
        try:
            with database.limit:
                return self._proved_in(database)
        except Exception:  # noqa: BLE001  as above
            return Step.UNDECIDED
        finally:
            database.close()

    def _proved_in(self, database: ResolvingConnection) -> Step:
        decider, resource = self._decider, self._branch.resource
        timeout_s = max(min(decider.remaining_s, REQUEST_TIMEOUT_S), RESOLVE_S_MIN)
        fence = Fence(database, home_word(decider.txid), decider.home.control, resource.new_token, timeout_s)
        try:
            fence.check()
            has_token = True
        except (TxmqError, ConfigError):  # a committed marker proves all the same
            has_token = False
        step, _ = prove(database, decider.txid, decider.deadline_ms, has_token=has_token)
        if step is Step.REPORT_ROLLBACK:
            fence.draw([decider.txid])
        return step

    # --- effects: after it -------------------------------------------------------------------------------------------

    def _send_commit(self) -> LastResourceEvent:
        is_written = self._write_commits()
        crash_point("client.tx.commit_sent")
        self._decider.commits.take_first()
        return _COMMIT_WRITTEN if is_written else LastResourceEvent.COMMIT_LEFT

    def _write_commits(self) -> bool:
        """Tell every home of the decision, without any wait; whether all could be written. Once is enough."""
        if self._is_written is None:
            decider, homes = self._decider, self._homes
            parts = (decider, *homes.others)
            for part in parts:
                part.on_answered, part.uuid = self._was_answered, self._branch.uuid or ""
            if homes.others:
                homes.commit_others()
            if decider.state is not _PART_COMMITTED:
                decider.commit()
            else:  # an interrupt came first
                decider.commits.add_once(decider)
            is_written = True
            for part in parts:
                is_written &= part.answer is not None or not part.is_unwritten
            self._is_written = is_written
        return self._is_written

    def _was_answered(self, part: HomePart) -> None:
        """A home has answered to its commit; when all have, the marker is not needed any more."""
        if part.of is not None:
            self._count(part)
            return
        if isinstance(part.refusal, NotOwnerError):
            self._leave_commit()
        else:
            if isinstance(part.refusal, UnknownTransactionError):
                self._report_lost()
            else:
                self._homes.finished_here()
            self._count(part)
        crash_point("client.tx.committed")

    def _count(self, part: HomePart) -> None:
        with self._lock:
            self._answered.add(part)
            is_last = len(self._answered) == 1 + len(self._homes.others)
        if is_last:
            self._all_answered()

    def _all_answered(self) -> None:
        is_contrary, on_told = False, self._on_told
        for part in (self._decider, *self._homes.others):
            is_contrary |= part.refusal is not None
        if not is_contrary:
            self._resource.finished.append(self._decider.txid)
        self._let_go()
        on_told(Outcome.UNKNOWN if is_contrary else _COMMIT_OUTCOME)

    def _let_go(self) -> None:
        """Tell nobody any more, and leave no cycle to collect."""
        self._on_told = _nothing
        for part in (self._decider, *self._homes.others):
            part.on_answered = nothing

    def _report_lost(self) -> None:
        """Have the broker keep that it has lost the messages: it may not call the transaction finished before."""
        decider, resource = self._decider, self._resource
        decider.keep()
        kind, uuid = TransactionKind.LAST_RESOURCE, self._branch.uuid
        self._resolver.report(lost_messages(decider.txid, kind, resource.name, uuid), self._homes.finished_here)

    def _leave_commit(self) -> None:
        """Another broker has the address for now: the resolver asks again and again."""
        decider = self._decider
        self._resource.unresolved.append(
            Unresolved(
                decider.txid, marker_table.COMMITTED, decider.deadline_ms, self._resolved,
                on_contrary=self._contradicted,
            )
        )  # fmt: skip

    def _contradicted(self, error: TxmqError) -> None:
        self._decider.refusal = error

    def _resolved(self) -> None:
        refusal = self._decider.refusal
        self._decider.answered([], None if isinstance(refusal, NotOwnerError) else refusal)

    @property
    def pending(self) -> tuple[str, ...]:
        """("broker",) while the decision has yet to reach the broker, and other homes that it has yet to reach."""
        decider = self._decider
        if decider.state is not BranchState.COMMITTED:
            return ()
        if decider.lines is None:
            decider.commits.look_closely()
            decider.commits.look()
        here = ("broker",) if decider.is_unwritten else ()
        return (*here, *(part.name for part in self._homes.others if part.is_pending))

    def gather_results(self, deadline: float) -> None:
        """See ``Ending``."""
        decider, others = self._decider, self._homes.others
        if decider.state is not BranchState.COMMITTED:
            if self.lines is not None:
                self._messages.place(self.lines)
            return
        if decider.lines is None:
            decider.await_answer(deadline)
        if decider.lines is not None:
            self.lines = self._homes.gather(decider.lines, deadline)
            self._messages.place(self.lines)
        for part in (decider, *others):
            error = part.refusal
            if error is None or was_settled(error) or (part is decider and isinstance(error, NotOwnerError)):
                continue
            text = f"the rows are committed, the messages were given up before ({error}): send them again"
            raise HeuristicMixedError(text, decider.txid)

    # --- effects: away from it ---------------------------------------------------------------------------------------

    def _roll_back_database(self) -> LastResourceEvent:
        if self._branch.roll_back():
            return LastResourceEvent.DATABASE_ROLLED_BACK
        resource, reason, decider = self._branch.resource, self._branch.ended_by_body, self._decider
        decider.begin()  # the broker keeps the hazard under an id
        if not isinstance(self.error, HeuristicError):
            reason = f"{reason}: {self.error}" if self.error is not None else reason
            cause, self.error = self.error, HeuristicHazardError(reason, decider.txid)
            self.error.__cause__ = cause
        kind, uuid = TransactionKind.LAST_RESOURCE, self._branch.uuid
        self.hazard = Hazard(decider.txid, kind, resource.name, uuid, str(self.error))
        return LastResourceEvent.DATABASE_ENDED

    def _report_hazard(self) -> LastResourceEvent:
        return self._send_rollback(self.hazard)

    def _send_rollback(self, hazard: Hazard | None = None) -> LastResourceEvent:
        self.is_acknowledged, homes = False, self._homes
        homes.send_rollbacks()
        found = self._roll_back_here(hazard)
        homes.await_rolled_back()
        has_ended = all(part.state is not BranchState.LEFT for part in homes.others)
        self.is_acknowledged = found is LastResourceEvent.BROKER_ROLLED_BACK and has_ended
        return found

    def _roll_back_here(self, hazard: Hazard | None) -> LastResourceEvent:
        if isinstance(self.error, TransactionAwayError):
            return LastResourceEvent.BROKER_UNKNOWN
        try:
            self._decider.rollback(hazard)
        except TransactionConflictError:
            with suppress(TxmqError):
                self.lines = self._decider.outcome()[1]
            return LastResourceEvent.BROKER_CONTRADICTS
        except TxmqError:
            return LastResourceEvent.BROKER_UNKNOWN
        return LastResourceEvent.BROKER_ROLLED_BACK


_EFFECTS = LastResourceEnding.effects()
