"""The ending of a block with XA resources: the broker decides when all of them have prepared.

It carries out the effects of ``xa/two_phase/coordinator.py``: branches, broker, waits. The branches are begun in the
order in which the block names its resources; one database takes part once. Work for all branches is done at once
(``run_all``); work for one branch only is called, without a job. A home that does not decide is one more participant
(``HomePart``): its requests are written before the databases work, and its answers are read after that. Without
databases this is the end of a local transaction over homes. Branches that could not be finished here are left to the
client's resolver.

Invariants:
    * a branch's state is set before a call that may change it, and again after its answer: an interrupt in between
      leaves the more careful one;
    * a branch that a late thread still uses is touched by that thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from txmq.client.transaction.conversation import RETRY_S, ROLLBACK_TIMEOUT_S, rolled_back
from txmq.client.transaction.ending import CoordinatedEnding, Ended, no_part
from txmq.client.transaction.homes import HomePart, TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.errors import (
    BrokerError,
    FencedError,
    HeuristicError,
    HeuristicHazardError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionConflictError,
    TransactionError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.model import Outcome, TransactionKind
from txmq.protocol.transaction_bodies import BRANCH_SIZE_BYTES_MAX, encode_branch, parse_outcome, parse_result_lines
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Buffer
from txmq.runtime.threads import Lock, Signal, start_daemon
from txmq.xa.reporter import Hazard
from txmq.xa.resolver_ports import Answer
from txmq.xa.resources import refuse_twins
from txmq.xa.two_phase.coordinator import (
    BranchState,
    XACoordinator,
    XAEffect,
    XAEvent,
    XAState,
    branches_rolled_back,
    committed,
    vote,
)
from txmq.xa.two_phase.resource_ports import PrepareUnknownError, UsedXAConnection, XABranch, XAResource

if TYPE_CHECKING:
    from txmq.client.transaction.background_resolver import BackgroundResolver

GRACE_S = 2.0
_WAIT_S = 3600.0  # a wait that comes back early is begun again
_THREAD_NAME = "txmq-branch"
DECIDE_WAIT_S = 1.0  # after the deadline, if decide was sent and not answered
COMMITTED_STATES = (XAState.COMMITTED, XAState.COMMITTED_PENDING)
_ENTRY_SIZE_BYTES_MAX = BRANCH_SIZE_BYTES_MAX + 256
_MAY_BE_PREPARED = (BranchState.PREPARING, BranchState.PREPARED)
_DONE = (BranchState.COMMITTED, BranchState.ROLLED_BACK)
_ENDED = (BranchState.COMMITTED, BranchState.ROLLED_BACK, BranchState.LEFT)


class Job:
    """Work of one thread for one database, once at a time.

    A job that has not returned when its caller must go on is *late*: it still uses its connection, so no other thread
    may. Other work on that connection is given to ``when_free`` and done at the end of the late job's thread.

    Invariants:
        * a connection is used by one thread at a time;
        * an exception in any of the threads is raised in the caller, too.

    Attributes:
        is_busy: it runs, in whichever thread.

    Thread safety: ``run`` and ``when_free`` from different threads.
    """

    __slots__ = ("_afterwards", "_lock", "_signal", "error", "is_busy")

    def __init__(self) -> None:
        self.is_busy = False
        self.error: BaseException | None = None
        self._afterwards: Callable[[], None] | None = None
        self._lock = Lock()
        self._signal = Signal()

    def start(self, work: Callable[[], None]) -> None:
        """Run it in a thread of its own, or here if the system has none left."""
        self.is_busy, self.error = True, None
        try:
            start_daemon(_THREAD_NAME, lambda: self._run(work))
        except RuntimeError:
            self._run(work)

    def run(self, work: Callable[[], None]) -> None:
        """Run it here; its exception is kept."""
        self.error = None
        self._run(work)

    def when_free(self, work: Callable[[], None]) -> None:
        """Do something with the connection: now, or when the late one has ended."""
        with self._lock:
            if self.is_busy:
                self._afterwards = work
                return
        work()

    def wait(self, timeout_s: float = _WAIT_S) -> None:
        """Wait until it has run."""
        while self.is_busy and (self._signal.wait(timeout_s) or timeout_s == _WAIT_S):
            pass  # a signal may be left from an earlier run

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self.is_busy = True  # in here: a job that is interrupted before it begins would never be free again
            work()
        except BaseException as error:  # noqa: BLE001  raised again by ``run_all``
            self.error = error
        with self._lock:
            self.is_busy = False
            afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            afterwards()
        self._signal.set()


def run_all(jobs: Sequence[Job], works: Sequence[Callable[[], None]]) -> None:
    """Run each work as its job, all at once, and wait for them; the first runs in this thread.

    Databases answer while others do, so two branches take as long as one. If the caller is interrupted meanwhile
    (Ctrl-C), it waits ``GRACE_S`` more: a database that does not answer must not hold a person who wants to leave.

    Raises:
        BaseException: a work's; or the caller was interrupted, and some may be late.
    """
    try:
        for job, work in zip(jobs[1:], works[1:], strict=True):
            job.start(work)
        jobs[0].run(works[0])
        interrupt = jobs[0].error
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt
        for job in jobs[1:]:
            job.wait()
    except BaseException:
        for job in jobs[1:]:
            job.wait(GRACE_S)
        raise
    for job in jobs:
        if job.error is not None:
            raise job.error


_ALONE = Job()  # of every branch that is the only one of its block: its work is called directly, and never late


def _nothing() -> None:
    """Do nothing."""


class DatabasePart:
    """One database's part: its branch, and where that stands.

    Attributes:
        complete: the answer to ``complete``, once that was sent.
    """

    __slots__ = ("_txid", "branch", "complete", "error", "job", "state")

    def __init__(self, branch: XABranch, job: Job, txid: str) -> None:
        self.branch, self.job, self._txid, self.state = branch, job, txid, BranchState.ACTIVE
        self.error: TransactionError | None = None
        self.complete: Answer | None = None

    def prepare(self) -> None:
        """Ask the database to prepare; afterwards ``state`` says what is known."""
        self.state = BranchState.PREPARING
        try:
            self.branch.prepare()
        except (RolledBackError, HeuristicError) as error:
            self.error, self.state = error, BranchState.REFUSED
        except Exception as error:  # noqa: BLE001  a driver's: it may be prepared
            self.error = _maybe_prepared(error, self._txid)
        else:
            self.state = BranchState.PREPARED
            crash_point("client.xa.prepared")

    def commit(self) -> None:
        """Commit what is prepared and decided."""
        self.state = BranchState.ENDING
        if self.branch.commit():
            self.state = BranchState.COMMITTED
            crash_point("client.xa.committed")
        else:
            self.state = BranchState.LEFT

    def roll_back(self) -> None:
        """Roll back; if it may be prepared, the broker has fenced the transaction before."""
        is_prepared = self.state in _MAY_BE_PREPARED
        self.state = BranchState.ENDING
        if self.branch.roll_back(is_prepared):
            self.state = BranchState.ROLLED_BACK
            crash_point("client.xa.rolled_back")
        else:
            self.state = BranchState.LEFT

    def leave(self) -> None:
        """Close the connection, if the branch has not ended."""
        if self.state not in _ENDED:
            # If it is not prepared, that rolls it back; a resolver that looks for it finds nothing.
            self.state = BranchState.LEFT
            with suppress(Exception):
                self.branch.abandon()


class TwoPhaseEnding(CoordinatedEnding[XAState, XAEvent, XAEffect]):
    """See the module's docstring.

    Args:
        resolver: of a block with databases.

    Attributes:
        databases: the parts in databases.
    """

    def __init__(
        self, homes: TransactionHomes, messages: MessageBuffer, resources: Sequence[Any] = (),
        resolver: BackgroundResolver | None = None,
    ) -> None:  # fmt: skip
        super().__init__(homes, messages, XACoordinator(), _EFFECTS, XAEvent.INTERRUPTED)
        self._resources, self._resolver = resources, resolver
        self._branches: list[XABranch] = []
        self.databases: list[DatabasePart] = []
        self._encoded: list[Buffer] = []  # the decider's parts
        self._pending: tuple[str, ...] = ()
        self._unreported = 0  # hazards that the broker has yet to hear of

    # --- the body ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See ``Ending``."""
        homes, decider, branches, resolver = self._homes, self._decider, self._branches, self._resolver
        assert resolver is not None
        homes.go_to_likely_home()
        decider.begin_for_caller()
        try:
            for given in self._resources:
                resource, connection = given if isinstance(given, UsedXAConnection) else (given, None)
                branches.append(resource.enlist(decider.cluster, decider.txid, decider.remaining_s, connection))
                if len(branches) > 1:
                    refuse_twins([branch.resource for branch in branches])  # its identity is known by now
                resolver.add(resource)
        except BaseException:
            for branch in branches:
                branch.roll_back(False)
            homes.finished()
            raise
        jobs = [Job() if len(branches) > 1 else _ALONE for _ in branches]
        self.databases = [DatabasePart(branch, job, decider.txid) for branch, job in zip(branches, jobs, strict=True)]

    def connection(self, resource: Any) -> Any:
        """See ``Ending``."""
        for branch in self._branches:
            if branch.resource is resource:
                return branch.connection
        raise no_part(resource)

    def parts_streamed(self) -> None:
        """See ``Ending``."""
        self._homes.find(self._messages)

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ended:
        """See ``Ending``."""
        is_sound = body_error is None and self.is_body_sound(self._branches, failure)
        state = self.run(XAEvent.BODY_DONE if is_sound else XAEvent.BODY_FAILED)
        ended = [branch.resource for branch in self._branches if branch.ended_by_body]
        hazard = self._hazarded(ended) if ended else None
        self._hand_over(state)
        outcome, error = self._concluded(state) if hazard is None else (Outcome.UNKNOWN, hazard)
        return Ended(outcome, outcome, error, self.interrupt)

    def _hand_over(self, state: XAState) -> None:
        txid, left, resolver = self._decider.txid, [], self._resolver
        assert resolver is not None
        for database in self.databases:
            resource = database.branch.resource
            if database.complete is not None:
                resolver.completed(resource, txid, database.complete)
            elif database.state not in _DONE or state is XAState.COMMITTED_PENDING:
                left.append(resource)
        if (state in COMMITTED_STATES or state is XAState.ROLLED_BACK) and not self._unreported:
            # Whatever floor the session states, the broker keeps a decision until every branch is complete.
            self._homes.finished()
            on_end = _nothing
        else:
            on_end = self._finish
        if not left:
            if state is XAState.ROLLED_BACK_PENDING:
                self._finish()  # only other homes are left: they ask
            return
        if on_end is not _nothing:
            self._decider.keep()
        self._pending = tuple(resource.name for resource in left)
        for resource in left:
            resolver.watch(resource, txid, self._resolved(resource.name, on_end))
        resolver.wake()

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
            self._homes.finished()

    def _hazarded(self, resources: Sequence[XAResource]) -> TransactionError:
        """Have the broker keep that bodies ended branches by themselves; the error for the caller."""
        txid, cause, resolver = self._decider.txid, self.error, self._resolver
        assert resolver is not None
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
                self._decider.rollback(hazard)
            except TxmqError:
                self._decider.keep()  # of what is finished the broker soon takes nothing more
                self._unreported += 1
                resolver.report(hazard, self._hazard_reported)
        get_logger(txid=txid).error("heuristic: the body ended its branch by itself", error=str(error))
        return error

    def _concluded(self, state: XAState) -> tuple[Outcome, TransactionError | None]:
        txid = self._decider.txid
        if state in COMMITTED_STATES:
            return (Outcome.COMMITTED, None)
        if state is XAState.UNKNOWN:
            return (Outcome.UNKNOWN, self.unanswered("decide was not answered"))
        if isinstance(self.error, HeuristicError):  # the body ended a branch, which was there to be rolled back
            cause, self.error = self.error, RolledBackError(str(self.error.args[0]), retriable=False)
            self.error.__cause__, self.error.txid = cause, txid
        return (Outcome.ROLLED_BACK, self.rolled_back())

    def unanswered(self, what: str) -> OutcomeUnknownError:
        """The caller's error: the request that decides was not answered."""
        text = f"{what}: {self.error or self.interrupt}; ask client.outcome(txid)"
        return OutcomeUnknownError(text, self._decider.txid)

    def rolled_back(self) -> TransactionError:
        """The caller's error: nothing happened."""
        return self.error or RolledBackError("the transaction was rolled back", self._decider.txid)

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the resources whose branch the resolver finishes, and homes that could not be told; shrinks."""
        return (*self._pending, *self._homes.pending)

    def gather_results(self, deadline: float) -> None:
        """See ``Ending``."""
        if self.lines is not None:
            self._messages.place(self._homes.gather(self.lines, deadline))

    # --- effects: towards the decision -------------------------------------------------------------------------------

    @staticmethod
    def effects() -> dict[XAEffect, Callable[[TwoPhaseEnding], XAEvent | None]]:
        """What carries out each effect."""
        return {
            XAEffect.SEND_PARTS: TwoPhaseEnding._send_parts,
            XAEffect.PREPARE_BRANCHES: TwoPhaseEnding._prepare_branches,
            XAEffect.SEND_DECIDE: TwoPhaseEnding._send_decide,
            XAEffect.COMMIT_BRANCHES: TwoPhaseEnding._commit_branches,
            XAEffect.SEND_COMPLETE: TwoPhaseEnding._send_complete,
            XAEffect.SEND_ROLLBACK: TwoPhaseEnding._send_rollback,
            XAEffect.ROLL_BACK_BRANCHES: TwoPhaseEnding._roll_back_branches,
            XAEffect.WITHDRAW: TwoPhaseEnding._withdraw,
            XAEffect.CLOSE_BRANCHES: TwoPhaseEnding._close_branches,
            XAEffect.LEAVE: TwoPhaseEnding._leave,
        }

    def _send_parts(self) -> XAEvent | None:
        crash_point("client.xa.body_done")
        homes, decider = self._homes, self._decider
        try:
            decider.check_deadline()
            homes.take(self._messages, keyed=False)
            beside = len(self.databases) * _ENTRY_SIZE_BYTES_MAX
            if decider.streamed.parts or not decider.fits_one_request(decider.parts, beside):
                homes.stream()
            if homes.others:
                homes.stream_large_others()
        except TxmqError as error:
            self.error = rolled_back(error, decider.txid)
            return XAEvent.PARTS_REFUSED
        return None

    def _prepare_branches(self) -> XAEvent:
        homes, decider = self._homes, self._decider
        if homes.others:
            homes.send_prepares(self._submit_branch)
        try:
            self._encoded = decider.encoded(decider.parts)  # the homes work meanwhile
        except TxmqError:  # raised again when they must be sent
            pass
        self._on_all(DatabasePart.prepare)
        if homes.others:
            homes.await_prepared(self._submit_branch)
        error: TransactionError | None = None
        for database in self.databases:
            error = error or database.error
        for part in homes.others:
            error = error or part.error
        self.error = error
        return vote(self._states)

    def _submit_branch(self, part: HomePart) -> Answer:
        return part.submit_branch(self._decider.txid, part.parts, is_held=bool(self.databases))

    def _send_decide(self) -> XAEvent:
        """The same request until it is answered: the broker executes it once."""
        crash_point("client.xa.all_prepared")
        decider, is_doubtful = self._decider, False
        try:
            if decider.remaining_s > 0:  # otherwise the deadline ends it, not the broker
                decider.reach()  # the databases may have taken long; what is never sent leaves nothing unknown
        except RolledBackError as error:
            return self._refused(error, is_doubtful=False)
        entries = [_entry(database.branch) for database in self.databases]
        homes = [part.txid for part in self._homes.others]
        while True:
            left_s = decider.remaining_s + (DECIDE_WAIT_S if is_doubtful else 0.0)
            if left_s <= 0:
                self.error = TransactionTimeoutError("the deadline passed before decide was answered", decider.txid)
                return XAEvent.DECIDE_UNKNOWN if is_doubtful else XAEvent.DECIDE_REFUSED
            try:
                messages = self._encoded or decider.encoded(decider.parts)
                reply = decider.submit_decide(messages, entries, homes, left_s)
            except TxmqError as error:
                # Rows are locked meanwhile; if a decide may have arrived they stay so, whatever the caller gets.
                is_hopeless = not error.retriable or (not is_doubtful and not decider.is_back())
                found = self._refused(error, is_doubtful=is_doubtful) if is_hopeless else None
            else:
                crash_point("client.xa.decide_sent")
                found = self._decided(reply, is_doubtful=is_doubtful)
                is_doubtful = True
            if found is not None:
                return found
            decider.pause(RETRY_S)

    def _decided(self, reply: Answer, *, is_doubtful: bool) -> XAEvent | None:
        """Wait for the answer to ``decide``; None if there was none."""
        try:
            self.lines = parse_result_lines(reply.result())
        except UnavailableError:
            return None
        except BrokerError as error:
            return self._refused(error, is_doubtful=is_doubtful)
        except TxmqError:
            return None  # lost, late, or garbled: whether it was executed is not known
        self._homes.decided(self.lines)
        crash_point("client.xa.decided")
        return XAEvent.DECIDED

    def _refused(self, error: TxmqError, *, is_doubtful: bool) -> XAEvent:
        self._decider.look_at_refusal(error)
        self.error = rolled_back(error, self._decider.txid)
        return XAEvent.DECIDE_DOUBTFUL if is_doubtful else XAEvent.DECIDE_REFUSED

    # --- effects: after it -------------------------------------------------------------------------------------------

    def _commit_branches(self) -> XAEvent:
        if self._homes.others:
            self._homes.commit_others()
        self._on_all(DatabasePart.commit)
        return committed([database.state for database in self.databases])

    def _send_complete(self) -> XAEvent:
        """Not awaited: if it is lost, a resolver finds the branch in the broker's list."""
        crash_point("client.xa.all_committed")
        if self._homes.others:
            self._homes.commit_others()  # an interrupt may have come first
        try:
            for database in self.databases:
                if database.state is BranchState.COMMITTED and database.complete is None:
                    database.complete = self._decider.submit_complete(database.branch.resource.uuid or "")
        except TxmqError:
            return XAEvent.NOT_REPORTED
        crash_point("client.xa.complete_sent")
        return XAEvent.REPORTED

    # --- effects: away from it ---------------------------------------------------------------------------------------

    def _send_rollback(self) -> XAEvent:
        try:
            self._decider.rollback()
        except TransactionConflictError:
            return self._asked()
        except FencedError:
            return XAEvent.FORGOTTEN
        except TxmqError:
            return XAEvent.FENCE_UNKNOWN
        crash_point("client.xa.fenced")
        return XAEvent.FENCED

    def _asked(self) -> XAEvent:
        """Ask for the decision of a broker that has refused the rollback."""
        decider = self._decider
        try:
            word, lines = parse_outcome(decider.home.control.call("outcome", decider.txid, timeout=ROLLBACK_TIMEOUT_S))
        except TxmqError:
            return XAEvent.FENCE_UNKNOWN
        if word != Outcome.COMMITTED.value:
            return XAEvent.FENCE_UNKNOWN
        self.lines = lines
        self._homes.decided(lines)
        return XAEvent.DECIDED

    def _roll_back_branches(self) -> XAEvent:
        self._homes.send_rollbacks()
        self._on_all(DatabasePart.roll_back)
        self._homes.await_rolled_back()
        return branches_rolled_back(self._states)

    @property
    def _states(self) -> list[BranchState]:
        states = [database.state for database in self.databases]
        return states + [part.state for part in self._homes.others] if self._homes.others else states

    def _withdraw(self) -> None:
        if self._decider.streamed.parts:
            self._decider.try_rollback()

    def _close_branches(self) -> None:
        for database in self.databases:
            database.job.when_free(database.leave)
        for part in self._homes.others:
            part.leave()

    def _leave(self) -> XAEvent:
        if self.coordinator.state is XAState.LEAVING:
            self._homes.send_rollbacks()  # decide was never sent: they need not wait for the home that is away
        self._close_branches()
        return XAEvent.LEFT

    def _on_all(self, work: Callable[[DatabasePart], None]) -> None:
        databases = self.databases
        if len(databases) < 2:
            for database in databases:
                work(database)
            return
        late = [database for database in databases if database.job.is_busy]
        if not late:
            run_all([database.job for database in databases], [partial(work, database) for database in databases])
            return
        # After an interrupt: late jobs end in their own threads, the others here.
        for database in databases:
            if database.job.is_busy:
                database.job.when_free(database.leave)
            else:
                work(database)


_EFFECTS = TwoPhaseEnding.effects()


def _maybe_prepared(error: Exception, txid: str) -> RolledBackError:
    """The caller's error: the transaction is never decided, so nothing will have happened."""
    cause = error.__cause__ if isinstance(error, PrepareUnknownError) else error
    if isinstance(cause, RolledBackError):
        return cause
    wrapped = RolledBackError(f"XA PREPARE was not answered: {error}", txid)
    wrapped.__cause__ = cause
    return wrapped


def _entry(branch: XABranch) -> bytes:
    return encode_branch(branch.resource.name, branch.resource.uuid or "", branch.details())
