"""Carries out the effects of ``xa/two_phase/coordinator.py``: branches, broker, waits (``effects``).

Work for all branches is done at once (``parallel``); work for one branch only is called, without a job. A home that
does not decide is one more branch (``homes``): its requests are written before the databases work, and its answers are
read behind them. Without databases this is the end of a local transaction over homes.

Invariants:
    * a branch's state is set before a call that may change it, and again after its answer: an interrupt in between
      leaves the more careful one;
    * a branch that a late thread still uses is touched by that thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from txmq.client.transaction.broker_side import RETRY_S, ROLLBACK_TIMEOUT_S, BrokerTransaction
from txmq.client.transaction.effects import EffectRun
from txmq.client.transaction.homes import RoutedTransaction
from txmq.client.transaction.messages import EncodedPart, MessageBuffer
from txmq.client.transaction.refusals import rolled_back
from txmq.client.transaction.xa.parallel import Job, run_all
from txmq.errors import (
    BrokerError,
    FencedError,
    HeuristicError,
    RolledBackError,
    TransactionConflictError,
    TransactionError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.model import Outcome
from txmq.protocol.branches import BRANCH_SIZE_BYTES_MAX, encode_branch
from txmq.protocol.parts import parse_outcome, parse_result_lines
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Buffer
from txmq.xa.broker_port import Answer
from txmq.xa.two_phase.branch import PrepareUnknownError, XABranch
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

DECIDE_WAIT_S = 1.0  # after the deadline, if decide was sent and not answered
_ENTRY_SIZE_BYTES_MAX = BRANCH_SIZE_BYTES_MAX + 256
_MAY_BE_PREPARED = (BranchState.PREPARING, BranchState.PREPARED)
_ALONE = Job()  # of every branch that is the only one of its block: its work is called directly, and never late
_ENDED = (BranchState.COMMITTED, BranchState.ROLLED_BACK, BranchState.LEFT)


class BranchRun:
    """One branch, and where it stands.

    Attributes:
        complete: the answer to ``complete``, once that was sent.
    """

    __slots__ = ("branch", "complete", "error", "job", "state")

    def __init__(self, branch: XABranch, job: Job) -> None:
        self.branch, self.job, self.state = branch, job, BranchState.ACTIVE
        self.error: TransactionError | None = None
        self.complete: Answer | None = None

    def prepare(self, txid: str) -> None:
        """Ask the database to prepare; afterwards ``state`` says what is known."""
        self.state = BranchState.PREPARING
        try:
            self.branch.prepare()
        except (RolledBackError, HeuristicError) as error:
            self.error, self.state = error, BranchState.REFUSED
        except Exception as error:  # noqa: BLE001  a driver's: it may be prepared
            self.error = _maybe_prepared(error, txid)
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


class XARun(EffectRun[XAState, XAEvent, XAEffect]):
    """One block's end, or its undoing.

    Attributes:
        sides: the branches in databases.
        homes: the branches at other homes; complete when the run begins.
    """

    def __init__(self, broker: RoutedTransaction, branches: Sequence[XABranch], messages: MessageBuffer) -> None:
        super().__init__(broker, messages, XACoordinator(), XAEvent.INTERRUPTED)
        self.homes = broker.branches
        self.sides = [BranchRun(branch, Job() if len(branches) > 1 else _ALONE) for branch in branches]
        self._parts: list[EncodedPart] = []
        self._encoded: list[Buffer] = []  # the same

    def _find_homes(self) -> None:
        self._broker.find_homes(self._messages)
        self._broker.let_pass(self._messages)

    def _carry_out(self, effect: XAEffect) -> XAEvent | None:
        match effect:
            case XAEffect.SEND_PARTS:
                return self._send_parts()
            case XAEffect.PREPARE_BRANCHES:
                return self._prepare_branches()
            case XAEffect.SEND_DECIDE:
                return self._send_decide()
            case XAEffect.COMMIT_BRANCHES:
                return self._commit_branches()
            case XAEffect.SEND_COMPLETE:
                return self._send_complete()
            case XAEffect.SEND_ROLLBACK:
                return self._send_rollback()
            case XAEffect.ROLL_BACK_BRANCHES:
                return self._roll_back_branches()
            case XAEffect.WITHDRAW:
                self._withdraw()
            case XAEffect.CLOSE_BRANCHES:
                self._close_branches()
            case XAEffect.LEAVE:
                return self._leave()
        return None

    # --- towards the decision ----------------------------------------------------------------------------------------

    def _send_parts(self) -> XAEvent | None:
        crash_point("client.xa.body_done")
        broker = self._broker
        try:
            broker.check_deadline()
            self._parts = broker.take_parts(self._messages, keyed=False)
            beside = len(self.sides) * _ENTRY_SIZE_BYTES_MAX
            if broker.streamed.parts or not broker.fits_one_request(self._parts, beside):
                broker.stream(self._parts)
                self._parts = []
            for home in self.homes:
                home.stream_if_large()
        except TxmqError as error:
            self.error = rolled_back(error, broker.txid)
            return XAEvent.PARTS_REFUSED
        return None

    def _prepare_branches(self) -> XAEvent:
        for home in self.homes:
            home.submit_prepare(self._submit_branch)
        with suppress(TxmqError):  # is raised again when they are to be sent
            self._encoded = self._broker.encoded(self._parts)  # the homes work meanwhile
        self._on_all([partial(side.prepare, self._broker.txid) for side in self.sides])
        for home in self.homes:
            home.await_prepared()
        errors = (*(side.error for side in self.sides), *(home.error for home in self.homes))
        self.error = next((error for error in errors if error is not None), None)
        return vote(self._states)

    def _submit_branch(self, home: BrokerTransaction, parts: Sequence[EncodedPart]) -> Answer:
        return home.submit_branch(self._broker.txid, parts, is_held=bool(self.sides))

    def _send_decide(self) -> XAEvent:
        """The same request until it is answered: the broker executes it once."""
        crash_point("client.xa.all_prepared")
        broker, is_doubtful = self._broker, False
        try:
            if broker.remaining_s > 0:  # otherwise the deadline ends it, not the broker
                broker.reach()  # the databases may have taken long; a decide that is never sent leaves nothing unknown
        except RolledBackError as error:
            return self._refused(error, is_doubtful=False)
        entries, homes = [_entry(side.branch) for side in self.sides], [home.broker.txid for home in self.homes]
        while True:
            left_s = broker.remaining_s + (DECIDE_WAIT_S if is_doubtful else 0.0)
            if left_s <= 0:
                self.error = TransactionTimeoutError("the deadline passed before decide was answered", broker.txid)
                return XAEvent.DECIDE_UNKNOWN if is_doubtful else XAEvent.DECIDE_REFUSED
            try:
                messages = self._encoded or broker.encoded(self._parts)
                reply = broker.submit_decide(messages, entries, homes, left_s)
            except TxmqError as error:
                # Rows are locked meanwhile; if a decide may have arrived they stay so, whatever the caller gets.
                is_hopeless = not error.retriable or (not is_doubtful and not broker.is_back())
                found = self._refused(error, is_doubtful=is_doubtful) if is_hopeless else None
            else:
                crash_point("client.xa.decide_sent")
                found = self._decided(reply, is_doubtful=is_doubtful)
                is_doubtful = True
            if found is not None:
                return found
            broker.pause(RETRY_S)

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
        self._broker.decided(self.lines)
        crash_point("client.xa.decided")
        return XAEvent.DECIDED

    def _refused(self, error: TxmqError, *, is_doubtful: bool) -> XAEvent:
        self._broker.look_at_refusal(error)
        self.error = rolled_back(error, self._broker.txid)
        return XAEvent.DECIDE_DOUBTFUL if is_doubtful else XAEvent.DECIDE_REFUSED

    # --- after it ----------------------------------------------------------------------------------------------------

    def _commit_branches(self) -> XAEvent:
        for home in self.homes:
            home.commit()
        self._on_all([side.commit for side in self.sides])
        return committed(side.state for side in self.sides)

    def _send_complete(self) -> XAEvent:
        """Not awaited: if it is lost, a resolver finds the branch in the broker's list."""
        crash_point("client.xa.all_committed")
        for home in self.homes:
            if home.state is not BranchState.COMMITTED:  # an interrupt came first
                home.commit()
        try:
            for side in self.sides:
                if side.state is BranchState.COMMITTED and side.complete is None:
                    side.complete = self._broker.submit_complete(side.branch.resource.uuid or "")
        except TxmqError:
            return XAEvent.NOT_REPORTED
        crash_point("client.xa.complete_sent")
        return XAEvent.REPORTED

    # --- away from it ------------------------------------------------------------------------------------------------

    def _send_rollback(self) -> XAEvent:
        try:
            self._broker.rollback()
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
        broker = self._broker
        try:
            word, lines = parse_outcome(broker.home.control.call("outcome", broker.txid, timeout=ROLLBACK_TIMEOUT_S))
        except TxmqError:
            return XAEvent.FENCE_UNKNOWN
        if word != Outcome.COMMITTED.value:
            return XAEvent.FENCE_UNKNOWN
        self.lines = lines
        self._broker.decided(lines)
        return XAEvent.DECIDED

    def _roll_back_branches(self) -> XAEvent:
        for home in self.homes:
            home.submit_rollback()
        self._on_all([side.roll_back for side in self.sides])
        for home in self.homes:
            home.await_rolled_back()
        return branches_rolled_back(self._states)

    @property
    def _states(self) -> list[BranchState]:
        return [*(side.state for side in self.sides), *(home.state for home in self.homes)]

    def _withdraw(self) -> None:
        if self._broker.streamed.parts:
            self._broker.try_rollback()

    def _close_branches(self) -> None:
        for side in self.sides:
            side.job.when_free(side.leave)
        for home in self.homes:
            home.leave()

    def _leave(self) -> XAEvent:
        if self.coordinator.state is XAState.LEAVING:
            for home in self.homes:  # decide was never sent: they need not wait for the home that is away
                home.submit_rollback()
        self._close_branches()
        return XAEvent.LEFT

    def _on_all(self, works: Sequence[Callable[[], None]]) -> None:
        if len(works) < 2:
            for work in works:
                work()
            return
        late = [side for side in self.sides if side.job.is_busy]
        if not late:
            run_all([side.job for side in self.sides], works)
            return
        # After an interrupt: late jobs end in their own threads, the others here.
        for side, work in zip(self.sides, works, strict=True):
            if side.job.is_busy:
                side.job.when_free(side.leave)
            else:
                work()


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
