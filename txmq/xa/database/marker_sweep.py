"""How committed markers leave: those of this process's own transactions, and those that others left.

Theory of operation. A marker is needed as long as the outcome may be asked for. Those of this process's finished
transactions leave in bulk, at most once a second if there are hundreds, every ten seconds if there are few, and the
last ones at the end. Those of others are looked at when they are ten minutes old, a page of keys at a time, each page
after the one before: markers that must stay keep none from leaving. Their broker is asked for the outcomes, and then
every home for all that it lists of this database.

A marker of another leaves if its broker says committed, or 410 `fenced` (the outcome is no longer kept, or the session
has ended: later requests are refused), and no home lists anything of the transaction: not prepared, no branch
incomplete, no heuristic decision that an operator has yet to forget. Rolled back means rows without messages: the
marker stays, as the proof. So does 410 `never-issued`: the broker was restored from an older copy. The database goes
with the question: nothing else says, of what is over, that the resolver's user may ask. If the broker does not tell,
the marker stays.

Unknown, of a session that is there: such a broker had the session in the copy. It is made to keep that
(``reporter.lost_messages``), for when the session has ended the transaction would look settled.

Invariants:
    * the broker lists after it was asked for the outcome: a branch that was incomplete then is listed, or complete;
    * a transaction of another broker is never touched, nor any while a home cannot be asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from txmq.errors import (
    BrokerError,
    FencedError,
    ForbiddenError,
    NeverIssuedError,
    NotOwnerError,
    OverloadedError,
    TransactionConflictError,
)
from txmq.model import Outcome, TransactionKind
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.xa.reporter import lost_messages
from txmq.xa.resolver_ports import (
    DELETE_EVERY_S,
    DELETE_FEW_EVERY_S,
    DELETE_SIZE,
    PAGE_SIZE,
    REQUEST_TIMEOUT_S,
    SWEEP_AGE_MS,
    SWEEP_EVERY_S,
    Client,
    Homes,
    is_of_this_broker,
    list_transactions,
)

FINISHED_MAX = 100_000  # markers waiting for their removal; one that falls off is swept later
SAID_MAX = 10_000


class Markers(Protocol):
    """A marker table, through a connection of a resolver."""

    @property
    def uuid(self) -> str:
        """Identity of the database."""

    def committed_before(self, age_ms: int, after: str, limit: int) -> list[str]:
        """Transaction ids of committed markers older than that and after ``after``, in order."""

    def delete_committed(self, txids: Sequence[str]) -> None:
        """Remove committed markers, all of them or none."""


class MarkerSweep:
    """One resource's share. See the module's docstring.

    Args:
        client: the home whose transactions' markers it looks at.
        homes: all of them: a transaction has parts at other homes, too, which its marker proves.
        finished: txids whose markers may go, appended by any thread; one that stays in it is still there.
        name, kind: of the resource, and of its transactions.

    Thread safety: one thread, but for ``finished``.
    """

    def __init__(
        self, client: Client, clock: Clock, homes: Homes, finished: deque[str] | None = None, name: str = "",
        kind: TransactionKind = TransactionKind.LAST_RESOURCE,
    ) -> None:  # fmt: skip
        self.finished: deque[str] = deque(maxlen=FINISHED_MAX) if finished is None else finished
        self._client, self._clock, self._homes = client, clock, homes
        self._deleted_at, self._sweep_at = float("-inf"), 0.0
        self._after = ""
        self._said: set[str] = set()
        self._is_refused = False  # and that was said
        self._name, self._kind = name, kind
        self._log = get_logger(resource=name)

    def keep(self, database: Callable[[], Markers], *, sweeps: bool = True) -> bool:
        """Do what is due; whether it was time for a sweep of others' markers.

        Raises:
            Exception: broker or database are away, in whatever way; nothing was lost.
        """
        now, count = self._clock.monotonic(), len(self.finished)
        if count and now >= self._deleted_at + (DELETE_EVERY_S if count >= DELETE_SIZE else DELETE_FEW_EVERY_S):
            self._deleted_at = now
            self.delete_finished(database)
        if not sweeps or now < self._sweep_at:
            return False
        self._sweep_at = now + SWEEP_EVERY_S
        if self._sweep(database()):
            self._sweep_at = now
        return True

    def delete_finished(self, database: Callable[[], Markers]) -> None:
        """Remove the markers of this process's transactions.

        Raises:
            Exception: the driver's own; markers that were not removed are kept for later.
        """
        while self.finished:
            some = list[str]()
            with suppress(IndexError):  # another client's resolver, with the same resource, took them
                while len(some) < DELETE_SIZE:
                    some.append(self.finished.popleft())
            try:
                database().delete_committed(some)
            except BaseException:
                self.finished.extend(some)
                raise

    def _sweep(self, database: Markers) -> bool:
        """Look at one page; whether the next one should not wait."""
        page = database.committed_before(SWEEP_AGE_MS, self._after, DELETE_SIZE)
        is_full = len(page) == DELETE_SIZE
        ours = [txid for txid in page if is_of_this_broker(self._client.session, txid)]
        over = set(self._over(ours, database.uuid))
        if over:
            for home in self._homes.all_links():
                home.look()
                listed = list_transactions(home, database.uuid, "all", PAGE_SIZE)
                over.difference_update(row.get("of") or row["txid"] for row in listed)
        if over:
            database.delete_committed(sorted(over))
        self._after = page[-1] if is_full else ""
        return is_full and bool(over)

    def _over(self, txids: Sequence[str], uuid: str) -> Iterator[str]:
        """Those that the broker calls committed, or keeps no outcome of."""
        control = self._client.control
        words = {"uuid": uuid} if self._client.session.fences_by_database else {}
        answers = [
            (txid, control.submit("outcome", txid, extensions=words, timeout=REQUEST_TIMEOUT_S)) for txid in txids
        ]
        for txid, answer in answers:
            try:
                word = answer.result(REQUEST_TIMEOUT_S).partition(b"\n")[0].decode()
            except NeverIssuedError as error:
                self._say_once(
                    txid, "heuristic: rows are committed, the broker was restored and has no messages", error
                )
            except FencedError:
                yield txid
            except NotOwnerError:
                pass
            except ForbiddenError as error:
                self._say_refused(error)
            else:
                if word == Outcome.COMMITTED.value:
                    yield txid
                elif word == Outcome.UNKNOWN.value:
                    self._report_lost(txid, uuid)
                elif word == Outcome.ROLLED_BACK.value:
                    self._say_once(txid, "heuristic: rows are committed, the transaction was rolled back")

    def _report_lost(self, txid: str, uuid: str) -> None:
        """Have the broker keep that it has lost a transaction, before its session ends and it looks settled."""
        hazard = lost_messages(txid, self._kind, self._name, uuid)
        try:
            self._client.control.call("rollback", txid, extensions=hazard.extensions(), timeout=REQUEST_TIMEOUT_S)
        except (TransactionConflictError, FencedError, OverloadedError):
            pass  # it came about meanwhile; or the next sweep tries
        except ForbiddenError as error:
            self._say_refused(error)
        self._say_once(txid, "heuristic: rows are committed, the broker does not know the transaction")

    def _say_refused(self, error: ForbiddenError) -> None:
        if not self._is_refused:
            self._is_refused = True
            self._log.warning("markers of other users stay: their outcomes are not told", reason=str(error))

    def _say_once(self, txid: str, event: str, error: BrokerError | None = None) -> None:
        if txid not in self._said:
            if len(self._said) >= SAID_MAX:
                self._said.clear()
            self._said.add(txid)
            self._log.error(event, txid=txid, **({} if error is None else {"error": str(error)}))
