"""Carries out the effects of ``xa/last_resource/coordinator.py``: database, broker, waits (``effects``).

The database's COMMIT is the decision. The commits of the homes are written behind it, and their answers are not awaited
(``branch_commits``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from txmq.client.transaction.broker_side import BrokerTransaction
from txmq.client.transaction.effects import EffectRun
from txmq.client.transaction.homes import HomeBranch, RoutedTransaction
from txmq.client.transaction.messages import EncodedPart, MessageBuffer
from txmq.client.transaction.preparing import NOT_KNOWN, Preparing
from txmq.client.transaction.refusals import rolled_back
from txmq.errors import (
    ConfigError,
    HeuristicError,
    HeuristicHazardError,
    RolledBackError,
    TransactionAwayError,
    TransactionConflictError,
    TransactionError,
    TxmqError,
)
from txmq.model import TopicPartition, TransactionKind
from txmq.protocol.parts import PartResult
from txmq.runtime.crashpoints import crash_point
from txmq.xa.broker_port import REQUEST_TIMEOUT_S, Answer, was_settled
from txmq.xa.database.hazard import Hazard
from txmq.xa.database.marker_table import COMMITTED
from txmq.xa.fencing import Fence
from txmq.xa.last_resource.branch import Branch
from txmq.xa.last_resource.coordinator import (
    LastResourceCoordinator,
    LastResourceEffect,
    LastResourceEvent,
    LastResourceState,
)
from txmq.xa.last_resource.proof import Step, prove
from txmq.xa.last_resource.resolving import ResolvingConnection
from txmq.xa.two_phase.coordinator import BranchState
from txmq.xid import home_word

RESOLVE_S_MIN = 1.0  # for looking the decision up, even if the deadline is closer
LOOK_UP_PAUSE_S = 0.05


def _nothing(_home: HomeBranch | None = None) -> None:
    """Do nothing."""


class DecisiveCommit:
    """The commit at the home of the id: its database has decided.

    Attributes:
        broker, slots, uuid: see ``Committed``.
        lines: where the parts went; None before the home has said so.
        error: what it said in place of that.
        is_late: it was waited for, and has not answered.
    """

    def __init__(
        self, broker: BrokerTransaction, slots: Collection[TopicPartition], uuid: str, on_told: Callable[[], None]
    ) -> None:  # fmt: skip
        self.broker, self.uuid = broker, uuid
        self.slots: Collection[TopicPartition] = slots
        self._on_told = on_told
        self.lines: list[PartResult] | None = None
        self.error: TxmqError | None = None
        self.is_late = False

    def is_told(self) -> bool:
        """Whether the home has answered: any thread may take that in."""
        return self.lines is not None

    def told(self, lines: list[PartResult], error: TxmqError | None = None) -> None:
        """See ``Committed``."""
        self.lines, self.error = lines, error
        self._on_told()
        crash_point("client.tx.committed")

    def let_go(self) -> None:
        """All homes have answered: nobody is to be told any more, and no cycle is left to be collected."""
        self._on_told = _nothing


class LastResourceRun(EffectRun[LastResourceState, LastResourceEvent, LastResourceEffect]):
    """One block's end, or its undoing.

    Attributes:
        homes: the parts at other homes; complete when the run begins.
        is_acknowledged: whether the brokers have acknowledged the rollback; None if it was not asked for one.
        commit: at the home of the id; None before the decision.
        hazard: for the broker to keep, if the body had ended the database's transaction by itself.

    Args:
        on_told: called with each home that has answered to its commit; None is the home of the id.
    """

    _preparing: Preparing  # from ``_send_prepare`` on

    def __init__(
        self, broker: RoutedTransaction, branch: Branch, messages: MessageBuffer,
        on_told: Callable[[HomeBranch | None], None],
    ) -> None:  # fmt: skip
        super().__init__(broker, messages, LastResourceCoordinator(), LastResourceEvent.INTERRUPTED)
        self.homes = broker.branches
        self._branch, self._commit_error = branch, None  # type: Branch, Exception | None
        self.is_acknowledged: bool | None = None
        self.commit: DecisiveCommit | None = None
        self._on_told = on_told
        self._is_written: bool | None = None
        self.hazard: Hazard | None = None
        self._parts: list[EncodedPart] = []

    def _find_homes(self) -> None:
        self._broker.find_homes(self._messages)
        self._broker.let_pass(self._messages, self._branch.uuid)

    def _carry_out(self, effect: LastResourceEffect) -> LastResourceEvent | None:
        match effect:
            case LastResourceEffect.SEND_PREPARE:
                return self._send_prepare()
            case LastResourceEffect.INSERT_MARKER:
                return self._insert_marker()
            case LastResourceEffect.AWAIT_PREPARED:
                return self._await_prepared()
            case LastResourceEffect.COMMIT_DATABASE:
                return self._commit_database()
            case LastResourceEffect.SEND_COMMIT:
                return self._send_commit()
            case LastResourceEffect.LOOK_UP:
                return self._look_up()
            case LastResourceEffect.ROLL_BACK_DATABASE:
                return self._roll_back_database()
            case LastResourceEffect.SEND_ROLLBACK:
                return self._send_rollback()
            case LastResourceEffect.REPORT_HAZARD:
                return self._send_rollback(self.hazard)

    # --- towards the decision ----------------------------------------------------------------------------------------

    def _send_prepare(self) -> LastResourceEvent | None:
        crash_point("client.tx.body_done")
        broker = self._broker
        self._preparing = Preparing(broker, lambda: self._submit_prepare(broker, self._parts))
        try:
            self._take_parts()
            self._preparing.send()
            for home in self.homes:
                home.stream_if_large()
                home.submit_prepare(self._submit_prepare)
        except TxmqError as error:
            return self._not_prepared(error)
        return None

    def _take_parts(self) -> None:
        broker = self._broker
        self._parts = broker.take_parts(self._messages)
        if broker.streamed.parts or not broker.fits_one_request(self._parts):
            broker.stream(self._parts)
            self._parts = []

    def _submit_prepare(self, home: BrokerTransaction, parts: Sequence[EncodedPart]) -> Answer:
        resource, of = self._branch.resource, "" if home is self._broker else self._broker.txid
        reply = home.submit_prepare(parts, resource.name, self._branch.uuid, resource.installation.table, of)
        crash_point("client.tx.prepare_sent")
        return reply

    def _insert_marker(self) -> LastResourceEvent:
        branch, broker = self._branch, self._broker
        if branch.leave_marker_to_commit(broker.txid, broker.timeout_s):
            return LastResourceEvent.MARKER_LEFT
        try:
            branch.insert_marker(broker.txid, broker.timeout_s)
        except (RolledBackError, HeuristicError) as error:
            self.error = error
            return LastResourceEvent.MARKER_REFUSED
        crash_point("client.tx.marker_inserted")
        return LastResourceEvent.MARKER_INSERTED

    def _await_prepared(self) -> LastResourceEvent:
        try:
            self._preparing.wait()
        except TxmqError as error:
            return self._not_prepared(error)
        for home in self.homes:
            home.await_prepared()
            if home.error is not None:
                self.error = home.error
                is_refused = home.state is BranchState.REFUSED
                return LastResourceEvent.PREPARE_REFUSED if is_refused else LastResourceEvent.PREPARE_UNKNOWN
        crash_point("client.tx.prepared")
        return LastResourceEvent.PREPARED

    def _not_prepared(self, error: TxmqError) -> LastResourceEvent:
        """The broker is away, or late, or has refused."""
        if isinstance(error, NOT_KNOWN):
            self.error = rolled_back(error, self._broker.txid)
            return LastResourceEvent.PREPARE_UNKNOWN
        self._broker.was_refused(error)
        self.error = rolled_back(error, self._broker.txid_or_none)
        return LastResourceEvent.PREPARE_REFUSED

    def _commit_database(self) -> LastResourceEvent:
        try:
            self._branch.commit()
        except TransactionError as error:
            self.error = error
            return LastResourceEvent.MARKER_REFUSED
        except Exception as error:  # noqa: BLE001  a driver may raise anything; the database is asked what it did
            is_retriable = self._branch.is_retriable(error)
            self.error = RolledBackError(f"COMMIT failed: {error}", self._broker.txid, retriable=is_retriable)
            self.error.__cause__ = self._commit_error = error
            return (
                LastResourceEvent.DATABASE_REFUSED if self._branch.is_still_open else LastResourceEvent.DATABASE_UNKNOWN
            )
        crash_point("client.tx.db_committed")
        self._branch.finish()
        return LastResourceEvent.DATABASE_COMMITTED

    def _look_up(self) -> LastResourceEvent:
        outcome = None
        if self._commit_error is not None:
            outcome = self._branch.outcome_after(self._commit_error, self._broker.txid)
        if outcome is not None:
            self._branch.finish()
            is_committed = outcome == COMMITTED
            return LastResourceEvent.PROVED_COMMITTED if is_committed else LastResourceEvent.PROVED_ROLLED_BACK
        self._branch.abandon()
        until_s = self._wait_ends_s()
        while True:
            step = self._proved()
            if step is Step.REPORT_COMMIT:
                return LastResourceEvent.PROVED_COMMITTED
            if step is Step.REPORT_ROLLBACK:
                return LastResourceEvent.PROVED_ROLLED_BACK
            if self._broker.remaining_s <= until_s:
                return LastResourceEvent.LOOKUP_FAILED
            self._broker.pause(LOOK_UP_PAUSE_S)

    def _wait_ends_s(self) -> float:
        """The value of ``remaining_s`` to stop at: 0, or later if the deadline is closer than RESOLVE_S_MIN."""
        return min(self._broker.remaining_s, RESOLVE_S_MIN) - RESOLVE_S_MIN

    def _proved(self) -> Step:
        try:
            timeout_s = max(self._broker.remaining_s, RESOLVE_S_MIN)
            database = self._branch.resource.open_for_resolver(self._broker.cluster, timeout_s)
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
        broker, resource, home = self._broker, self._branch.resource, self._broker.home
        timeout_s = max(min(broker.remaining_s, REQUEST_TIMEOUT_S), RESOLVE_S_MIN)
        fence = Fence(database, home_word(broker.txid), home.control, resource.new_token, timeout_s)
        try:
            fence.check()
            has_token = True
        except (TxmqError, ConfigError):  # a committed marker proves all the same
            has_token = False
        step, _ = prove(database, broker.txid, broker.deadline_ms, has_token=has_token)
        if step is Step.REPORT_ROLLBACK:
            fence.draw([broker.txid])
        return step

    # --- after it ----------------------------------------------------------------------------------------------------

    def _send_commit(self) -> LastResourceEvent:
        is_written = self.write_commits()
        crash_point("client.tx.commit_sent")
        self._broker.commits.take_first()
        return LastResourceEvent.COMMIT_WRITTEN if is_written else LastResourceEvent.COMMIT_LEFT

    def write_commits(self) -> bool:
        """Tell every home of the decision, without any wait; whether all could be written. Once is enough."""
        if self._is_written is None:
            commit, commits = self.commit, self._broker.commits
            for home in self.homes:
                home.on_told, home.uuid = partial(self._on_told, home), self._branch.resource.uuid or ""
                if home.state is not BranchState.COMMITTED:
                    home.commit()
            if commit is None:
                commit = self.commit = self._new_commit()
                is_written = commits.add(commit)
            else:  # an interrupt came first
                commits.add_once(commit)
                is_written = commits.is_written(commit)
            self._is_written = is_written and all(home.pending is None for home in self.homes)
        return self._is_written

    def _new_commit(self) -> DecisiveCommit:
        elsewhere = {slot for home in self.homes for slot in home.slots}
        slots = [slot for slot in self._messages.slots() if slot not in elsewhere]
        on_told = self._on_told
        return DecisiveCommit(self._broker, slots, self._branch.uuid, lambda: on_told(None))

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Where the decision could not be written yet: "broker" for the home of the id, or the name of another one."""
        commit, commits = self.commit, self._broker.commits
        if commit is None:
            return ()
        if not commit.is_told():
            commits.look()
        is_here = not commit.is_told() and (commit.is_late or not commits.is_written(commit))
        homes = (name for home in self.homes if (name := home.pending) is not None)
        return ("broker", *homes) if is_here else tuple(homes)

    def await_told(self, deadline: float) -> TxmqError | None:
        """Wait for the homes' answers to their commits; what one said in place of having committed."""
        commit = self.commit
        if commit is None:
            return None
        if not commit.is_told():
            with suppress(TxmqError):
                self._broker.commits.wait_for(commit, deadline)
            commit.is_late = not commit.is_told()
        if commit.lines is not None:
            self.lines = self._broker.gather(commit.lines, deadline)
        errors = (commit.error, *(other.error for other in self.homes))
        return next((error for error in errors if error is not None and not was_settled(error)), None)

    def let_go(self) -> None:
        """As of ``DecisiveCommit``."""
        self._on_told = _nothing
        if self.commit is not None:
            self.commit.let_go()

    def _roll_back_database(self) -> LastResourceEvent:
        if self._branch.roll_back():
            return LastResourceEvent.DATABASE_ROLLED_BACK
        resource, reason = self._branch.resource, self._branch.ended_by_body
        self._broker.begin()  # the broker keeps the hazard under an id
        if not isinstance(self.error, HeuristicError):
            reason = f"{reason}: {self.error}" if self.error is not None else reason
            cause, self.error = self.error, HeuristicHazardError(reason, self._broker.txid)
            self.error.__cause__ = cause
        kind, uuid = TransactionKind.LAST_RESOURCE, self._branch.uuid
        self.hazard = Hazard(self._broker.txid, kind, resource.name, uuid, str(self.error))
        return LastResourceEvent.DATABASE_ENDED

    def _send_rollback(self, hazard: Hazard | None = None) -> LastResourceEvent:
        self.is_acknowledged = False
        for home in self.homes:
            home.submit_rollback()
        found = self._roll_back_here(hazard)
        for home in self.homes:
            home.await_rolled_back()
        has_ended = all(home.state is not BranchState.LEFT for home in self.homes)
        self.is_acknowledged = found is LastResourceEvent.BROKER_ROLLED_BACK and has_ended
        return found

    def _roll_back_here(self, hazard: Hazard | None) -> LastResourceEvent:
        if isinstance(self.error, TransactionAwayError):
            return LastResourceEvent.BROKER_UNKNOWN
        try:
            self._broker.rollback(hazard)
        except TransactionConflictError:
            with suppress(TxmqError):
                self.lines = self._broker.outcome()[1]
            return LastResourceEvent.BROKER_CONTRADICTS
        except TxmqError:
            return LastResourceEvent.BROKER_UNKNOWN
        return LastResourceEvent.BROKER_ROLLED_BACK
