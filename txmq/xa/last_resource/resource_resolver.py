"""Resolves the transactions of one last resource that are in doubt, and removes marker rows that are not needed any
more.

Theory of operation. A round asks the broker for the resource's prepared transactions. One is due if its owner has been
gone for a second or its deadline has passed, both by the broker's clock: waiting is courtesy, the marker table is what
makes it safe. Due ones are proved by the database (``in_doubt_outcome``), those first that have failed least, and the
oldest of these; a row that an open transaction holds is waited for by nobody (``_Holders``). Then a fencing token is
drawn for those that are missing there (``xa/fencing.py``). Then all are reported to the broker at once: a commit may
have to wait for an earlier one of the same rows, so none is waited for before the rest is sent, and none for long: it
stays on its way, and the next round goes on with the others. Those that this process itself left
(``LastResource.unresolved``) are always due.

Committed markers leave as ``marker_sweep`` says; rolled-back ones 24 h after their deadline.

Invariants:
    * nothing is reported as rolled back because it is missing, before a token was drawn after that look;
    * only transactions of this cluster, this broker and this database's uuid are touched, and only of the kind that the
      marker table can prove;
    * a committed marker leaves only after every home has said that the commit is durable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from txmq.errors import (
    BrokerError,
    ClosedError,
    FencedError,
    ForbiddenError,
    RequestTimeoutError,
    TransactionConflictError,
    TxmqError,
    UnknownTransactionError,
)
from txmq.model import TransactionKind
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.xa.database import marker_table
from txmq.xa.database.marker_sweep import MarkerSweep
from txmq.xa.database.resource import PATIENCE_S
from txmq.xa.fencing import DRAW_EVERY_S, Fence, StrangeServerError
from txmq.xa.last_resource.in_doubt_outcome import ResolvingConnection, Step, Unresolved, prove
from txmq.xa.last_resource.resource import LastResource
from txmq.xa.reporter import Reporter, lost_messages
from txmq.xa.resolver_ports import (
    FAILURES_PER_ROUND_MAX,
    PAGE_SIZE,
    POLL_S,
    REPORT_TIMEOUT_S,
    Answer,
    HomeClient,
    Homes,
    cluster_of,
    home_of,
    is_of_this_broker,
    is_owner_gone,
    list_transactions,
    was_settled,
)
from txmq.xid import home_word

HELD_S_MAX = 1.0  # longer than a healthy COMMIT takes


class _Fences:
    """The database under the tokens of several homes, in one round.

    Args:
        fence: of the home in a transaction's id.

    Attributes:
        errors: why no token can be drawn, of each home where that is so.
    """

    def __init__(self, fence: Callable[[str], Fence]) -> None:
        self._fence, self._checked = fence, dict[str, Fence | None]()
        self.errors: list[Exception] = []

    def may_draw(self, txid: str) -> bool:
        """Whether the newest token of its home stands in the database; asked once."""
        home = home_word(txid)
        if home not in self._checked:
            self._checked[home] = self._tried(txid, Fence.check)
        return self._checked[home] is not None

    def draw(self, txids: Sequence[str]) -> set[str]:
        """Draw a token at the home of each of these, whose rolled-back markers are there; those of which it failed."""
        failed = set[str]()
        for home in {home_word(txid): None for txid in txids}:
            some = [txid for txid in txids if home_word(txid) == home]
            if self._tried(some[0], lambda fence, some=some: fence.draw(some)) is None:  # type: ignore[misc]
                failed.update(some)
        return failed

    def _tried(self, txid: str, attempt: Callable[[Fence], None]) -> Fence | None:
        try:
            fence = self._fence(txid)
            attempt(fence)
        except ClosedError:
            raise
        except Exception as error:  # noqa: BLE001  of the driver, or a home that is away: nothing is proved there
            self.errors.append(error)
            return None
        return fence


class _Holders:
    """Markers that an open transaction holds: its process stands still between marker and COMMIT, or is slow.

    Its session is ended after a second (courtesy: its COMMIT decides, or its end does), where the server has not done
    that before.

    Attributes:
        failures: how often each transaction could not be decided.
    """

    def __init__(self, clock: Clock, log: Any) -> None:
        self._clock, self._log, self._since = clock, log, dict[str, float]()
        self.failures: Counter[str] = Counter()

    def keep(self, txids: Collection[str]) -> None:
        """Forget all but these."""
        for known in (self._since, self.failures):
            for txid in [txid for txid in known if txid not in txids]:
                del known[txid]

    def failed(self, item: Unresolved) -> None:
        """It could not be decided, for whatever reason."""
        self.failures[item.txid] += 1

    def held(self, item: Unresolved, database: ResolvingConnection, *, may_end: bool) -> None:
        """It is held. Raises the driver's error, unless the user may not end a session.

        Args:
            may_end: this is the database, no replica that is applying the row: its number is of this server.
        """
        self.failed(item)
        now = self._clock.monotonic()
        if now - self._since.setdefault(item.txid, now) < HELD_S_MAX or not may_end:
            return
        self._since[item.txid] = now
        try:
            session = database.table.end_holder(database.connection, item.marker)
        except Exception as error:
            if database.table.dialect.is_lost(database.connection, error):
                raise
            self._log.warning("session holds a marker, and cannot be ended", txid=item.txid, error=repr(error))
        else:
            if session is not None:
                self._log.warning("session ended: it held a marker", txid=item.txid, session=session)


class _Reported(NamedTuple):
    """A transaction whose outcome is on its way to the broker."""

    item: Unresolved
    step: Step
    answer: Answer
    until: float


_OUTCOMES = {Step.REPORT_COMMIT: marker_table.COMMITTED, Step.REPORT_ROLLBACK: marker_table.ROLLED_BACK}
_STEPS = {outcome: step for step, outcome in _OUTCOMES.items()}


def is_due(listed: Mapping[str, Any]) -> bool:
    """Whether a transaction that ``recover`` lists may be resolved by others than its owner. By the broker's clock."""
    now_ms = int(listed["prepared_ms"]) + int(listed["age_ms"])
    deadline_ms = int(listed["deadline_ms"])
    is_late = 0 < deadline_ms <= now_ms
    return is_late or is_owner_gone(listed)


class LastResourceResolver:
    """See the module's docstring. Used by one thread at a time.

    Args:
        client: one home.
        homes: all of them.
    """

    def __init__(self, client: HomeClient, resource: LastResource, clock: Clock, homes: Homes) -> None:
        self.resource, self.has_failed, self._was_failing = resource, False, False
        self._homes = homes
        self.problem: Exception | None = None  # kept the last round from the database or the broker
        self._client, self._clock = client, clock
        self._database: ResolvingConnection | None = None
        self._sweep = MarkerSweep(client, clock, homes, resource.finished, resource.name)
        self._on_their_way: list[_Reported] = []
        self._reporter = Reporter(client, resource, TransactionKind.LAST_RESOURCE, clock)
        self._is_reached = False  # in this round
        self._has_expired = False  # markers, more than one round takes: an outage a day ago may have left a million
        self._is_strange = False  # the database may be a copy, and that was logged
        self._draw_at = float("-inf")  # a token, with or without a reason
        self._log = get_logger(resource=resource.name)
        self._holders = _Holders(clock, self._log)

    def round(self) -> set[str]:
        """Resolve what is due, and remove markers. Returns the txids that were resolved."""
        was_failing = self._was_failing = self.has_failed
        self.has_failed, self.problem = False, None
        self._is_reached = False
        resolved: set[str] = set()
        left = {item.txid: item for item in self._own()}
        own = set(left)
        try:
            self._client.look()
            if self._reporter.is_unreachable:
                self._open()
            left.update((item.txid, item) for item in self._due() if item.txid not in own)
            resolved = self._resolve(left)
            self._draw_if_due()
            self._clean_up()
        except ClosedError:
            raise
        except Exception as error:  # noqa: BLE001  one resource's trouble, of whatever driver, must not stop the others
            self._failed("resource or broker away", error, is_new=not was_failing)
        finally:
            # The broker lists its own again; those of this process it may never call due.
            self.resource.unresolved.extend(item for txid, item in left.items() if txid in own)
            if self._database is not None:
                self._database.limit.end()
        if self._is_reached or self.problem is not None:
            self._reporter.report(is_reachable=self._is_reached, problem=self.problem)
        return resolved

    def end(self) -> None:
        """Remove the last markers, if the database is there, and close the connection to it."""
        with suppress(Exception):
            self._sweep.delete_finished(self._open)
        self.close()

    def close(self) -> None:
        """Close the connection to the database."""
        if self._database is not None:
            self._database.close()
            self._database = None

    # --- what is in doubt --------------------------------------------------------------------------------------------

    def _own(self) -> list[Unresolved]:
        unresolved, found = self.resource.unresolved, list[Unresolved]()
        with suppress(IndexError):
            for _ in range(len(unresolved)):
                item = unresolved.popleft()
                (found if home_of(self._homes, item.txid) is self._client else unresolved).append(item)
        return found

    def _due(self) -> list[Unresolved]:
        uuid = self.resource.uuid or self._open().uuid
        return [
            Unresolved(listed["txid"], None, int(listed["deadline_ms"]), of=listed.get("of"))
            for listed in list_transactions(self._client, uuid, "prepared", PAGE_SIZE)
            if self._is_ours(listed, uuid) and is_due(listed)
        ]

    def _is_ours(self, listed: Mapping[str, Any], uuid: str) -> bool:
        return (
            listed["kind"] == TransactionKind.LAST_RESOURCE.value
            and listed["uuid"] == uuid
            and is_of_this_broker(self._client.session, listed["txid"])
        )

    # --- resolving ----------------------------------------------------------------------------------------------------

    def _resolve(self, left: dict[str, Unresolved]) -> set[str]:
        """Prove, oldest first, then report all; resolved ones leave ``left``, and are returned."""
        on_their_way, self._on_their_way = self._on_their_way, []
        reported_before = {one.item.txid for one in on_their_way}
        proved = self._proved([item for item in left.values() if item.txid not in reported_before])
        reported = [*on_their_way, *(self._report(item, step) for step, item in proved)]
        until = self._clock.monotonic() + POLL_S
        return {item.item.txid for item in reported if self._conclude(item, until, left)}

    def _proved(self, doubtful: list[Unresolved]) -> list[tuple[Step, Unresolved]]:
        proved: list[tuple[Step, Unresolved]] = []
        if any(item.outcome is None for item in doubtful):
            self._reopen_file()
        fences = _Fences(self._fence)
        failures = 0
        self._holders.keep({item.txid for item in doubtful})
        for item in sorted(doubtful, key=lambda item: self._holders.failures[item.txid]):
            has_token = item.outcome is not None or fences.may_draw(item.marker)
            step = self._prove(item, has_token=has_token)
            if step is Step.UNDECIDED:
                failures += has_token  # else no connection was lost by it
                if failures >= FAILURES_PER_ROUND_MAX:
                    break
            elif step is not Step.HELD:
                proved.append((step, item))
        missing = [item.marker for step, item in proved if step is Step.REPORT_ROLLBACK and item.outcome is None]
        undrawn = fences.draw(missing)
        self._judge(fences.errors)
        return [(step, item) for step, item in proved if not (item.outcome is None and item.marker in undrawn)]

    def _prove(self, item: Unresolved, *, has_token: bool) -> Step:
        if item.outcome is not None:
            return _STEPS[item.outcome]
        database = self._open()
        step, error = prove(database, item.marker, item.deadline_ms, has_token=has_token, waits=False)
        if step is Step.HELD:
            self._is_reached = self.has_failed = True
            self._holders.held(item, database, may_end=has_token)
        elif step is not Step.UNDECIDED:
            self._is_reached = True
        elif has_token:
            self._failed("transaction undecided", error, txid=item.txid)
            self._holders.failed(item)
            self.close()
        return step

    # --- fencing tokens ----------------------------------------------------------------------------------------------

    def _fence(self, txid: str) -> Fence:
        """The database under the tokens of the home in a transaction's id."""
        home = home_of(self._homes, txid)
        home.look()
        return Fence(self._open(), f"{home.session.home:016x}", home.control, self.resource.new_token)

    def _draw_if_due(self) -> None:
        now = self._clock.monotonic()
        if now < self._draw_at or self.resource.uuid is None:
            return
        self._draw_at, was_open = now + DRAW_EVERY_S, self._database is not None
        fence = Fence(self._open(), f"{self._client.session.home:016x}", self._client.control, self.resource.new_token)
        try:
            fence.draw()
            self._is_strange = False
        except StrangeServerError as error:
            self._strange(error)
        except Exception:
            self.close()
            raise
        if not was_open:
            self.close()

    def _judge(self, errors: Sequence[Exception]) -> None:
        """Note why no token could be drawn."""
        for error in errors:
            if isinstance(error, StrangeServerError):
                self._strange(error)
            else:
                is_new = not self._was_failing
                self._failed("rollback not proved: no fencing token can be drawn", error, is_new=is_new)
                self.close()

    def _strange(self, error: StrangeServerError) -> None:
        self.has_failed, self.problem = True, self.problem or error
        say = self._log.debug if self._is_strange else self._log.error
        say("rollback not proved", error=str(error))
        self._is_strange, self._is_reached = True, False
        self.close()

    def _reopen_file(self) -> None:
        """An SQLite file may have been put in the place of the one that is open: a commit now opens that one."""
        if self._database is not None and self._database.table.dialect.is_local_clock:
            self.close()

    def _report(self, item: Unresolved, step: Step) -> _Reported:
        control, txid, until = self._client.control, item.txid, self._clock.monotonic() + REPORT_TIMEOUT_S
        if step is Step.REPORT_COMMIT:
            return _Reported(item, step, control.submit("commit", txid, body=(), timeout=REPORT_TIMEOUT_S), until)
        return _Reported(item, step, control.submit("rollback", txid, timeout=REPORT_TIMEOUT_S), until)

    def _conclude(self, reported: _Reported, until: float, left: dict[str, Unresolved]) -> bool:
        """Wait for the broker's answer, not long; whether the transaction is resolved."""
        txid, now = reported.item.txid, self._clock.monotonic()
        try:
            reported.answer.result(max(until - now, 0.0) if until < reported.until else None)
        except (TransactionConflictError, UnknownTransactionError, FencedError) as error:
            self._contradicted(txid, reported.step, error)
            is_lost = reported.step is Step.REPORT_COMMIT and isinstance(error, UnknownTransactionError)
            if is_lost and not self._is_loss_kept(txid):
                return False
            reported.item.on_contrary(error)
        except TxmqError as error:
            if isinstance(error, RequestTimeoutError) and until < reported.until:
                self._on_their_way.append(reported)
            else:
                self._failed("outcome not reported to the broker", error, txid=txid)
            return False
        else:
            crash_point("resolver.told_broker")
            is_committed = reported.step is Step.REPORT_COMMIT
            self._log.info("transaction resolved", txid=txid, outcome=_OUTCOMES[reported.step])
            if is_committed and self._homes.is_single_home:  # otherwise other homes may have to ask the marker
                self.resource.finished.append(txid)
        reported.item.on_resolved()
        left.pop(txid, None)
        return True

    def _contradicted(self, txid: str, step: Step, error: BrokerError) -> None:
        if step is Step.REPORT_COMMIT and not was_settled(error):
            # The rows are there and the broker has given the messages up: an operator did, or data was lost. The
            # committed marker is kept as the proof.
            self._log.error("heuristic: rows committed, messages are not", txid=txid, error=str(error))
        else:
            self._log.info("transaction was resolved by another process", txid=txid, error=str(error))

    def _is_loss_kept(self, txid: str) -> bool:
        """Have the broker keep that it has lost the messages, before its session ends; whether that needs no repeat."""
        hazard = lost_messages(txid, TransactionKind.LAST_RESOURCE, self.resource.name, self.resource.uuid or "")
        control = self._client.control
        try:
            control.call("rollback", txid, extensions=hazard.extensions(), timeout=REPORT_TIMEOUT_S)
        except (TransactionConflictError, FencedError, ForbiddenError) as error:
            self._log.error("heuristic not kept by the broker", txid=txid, error=str(error))
        except TxmqError as error:
            self._failed("heuristic not reported to the broker", error, txid=txid)
            return False
        return True

    # --- markers -----------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        try:
            # A connection is not opened for others' markers alone.
            is_time = self._sweep.keep(self._open, sweeps=self._database is not None)
            if is_time or (self._has_expired and self._database is not None):
                self._has_expired = self._open().delete_expired()
        except Exception:
            self.close()
            raise

    def _open(self) -> ResolvingConnection:
        if self._database is None:
            self._database = self.resource.open_for_resolver(cluster_of(self._client))
            self._is_reached = True
        self._database.limit.work(PATIENCE_S)
        return self._database

    def _failed(self, event: str, error: Exception | None, *, is_new: bool = True, **fields: object) -> None:
        self.has_failed = True
        self.problem = self.problem or error
        say: Callable[..., None] = self._log.warning if is_new else self._log.debug
        say(event, error=repr(error), **fields)
