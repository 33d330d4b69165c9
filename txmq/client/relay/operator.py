"""What an operator does with an outbox: look, release, drop, adopt. Relays may run meanwhile.

Theory of operation. Each act is one transaction that begins with the lock on the relay row, as a relay's turns do, so
the two never mix. *Adopt* is for a line that has stopped because database and broker are not of one history any more
(a copy, a restore, a fail-over that lost commits). It takes the lease, so that relays wait, and learns what became of
the page on its way, as a relay does. Then it parks all that waits and takes the broker's newest page for its own. So
nothing is sent twice and nothing is dropped until the operator has said of each unit whether it was sent.

Invariants:
    * a claim is let go only when its outcome is known for certain, or when its broker is another one;
    * what was learned of the broker counts only while the locked relay row is the one that was asked for;
    * an act that dies leaves all or nothing of it, perhaps a lease that ends by itself, and may be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from txmq.client.relay.broker_side import RelayBroker
from txmq.client.relay.database_side import LEASE_MS, RelaySession
from txmq.errors import RequestTimeoutError, TxmqError
from txmq.outbox.outbox import Outbox
from txmq.outbox.page import TopicKey
from txmq.outbox.relay_core import OTHER_HOME, Chain, ClaimOutcome, Outcome, RelayRow
from txmq.outbox.tables import Backlog, ListedRow
from txmq.runtime.clocks import OSClock, OSRandom
from txmq.runtime.crashpoints import crash_point

if TYPE_CHECKING:
    from txmq.client.client import Client

ADOPT_TRIES: Final = 3

T = TypeVar("T")


class Look(NamedTuple):
    """An outbox as one transaction saw it.

    Attributes:
        is_led: a relay has renewed its lease.
    """

    row: RelayRow
    is_led: bool
    backlog: Backlog
    waiting: list[ListedRow]
    parked: list[ListedRow]


class Ends(NamedTuple):
    """What the broker knows of an outbox.

    Attributes:
        home: which has answered.
        is_same_home: it keeps the outbox's chain, or would.
        is_claim_committed: as far as it was asked for.
        last: the newest page it has of the outbox.
    """

    home: str
    is_same_home: bool
    is_claim_committed: bool
    last: str | None


class Adopted(NamedTuple):
    """What ``adopt`` has done: the relay row since then, and how many rows it has parked."""

    row: RelayRow
    parked: int


class Operator:
    """See the module's docstring. A context manager.

    Args:
        connect: opens a connection to the outbox's database.

    Raises:
        ConfigError: of each act: the outbox is not installed, or its database may lose commits.
        the driver's error: of each act: the database is away; what was begun is undone.

    Thread safety: one thread.
    """

    def __init__(self, outbox: Outbox, connect: Callable[[], Any]) -> None:
        self.outbox, self._connect = outbox, connect
        self._holder = f"{OSRandom().bits(64):016x}"
        self._session: RelaySession | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                session.connection.close()

    def look(self, rows_max: int = 0) -> Look:
        """What there is, with at most so many rows that wait, and so many parked ones."""
        with self._locked() as (session, row, is_led):
            connection, tables = session.connection, session.tables
            found = (tables.listed(connection, rows_max), tables.listed_parked(connection, rows_max))
            return Look(row, is_led, tables.backlog(connection), *found)

    def release(self, units: Sequence[int] | None = None, key: TopicKey | None = None) -> int:
        """Let parked units wait again, under their ids; a relay parks again what must wait for others.

        Args:
            units: a row that has none is named by its id. None: those that have a row with ``key``, or all.

        Returns:
            How many rows.
        """
        with self._locked() as (session, _, _):
            connection, tables = session.connection, session.tables
            if key is not None:
                units = sorted(tables.parked_units(connection, *key))
            ids = tables.parked_ids(connection) if units is None else _ids_of(session, units)
            tables.unpark(connection, ids)
            crash_point("operator.released")
        return len(ids)

    def drop(self, units: Sequence[int]) -> int:
        """Delete parked units, named as in ``release``; how many rows."""
        with self._locked() as (session, _, _):
            ids = _ids_of(session, units)
            session.tables.drop(session.connection, ids)
            crash_point("operator.dropped")
        return len(ids)

    def ends(self, client: Client, row: RelayRow, *, is_fenced: bool = False) -> Ends:
        """What the broker says. It may take longer than the database lets a session of ours be idle: none is open then.

        Args:
            is_fenced: ask for the claim's outcome as well: a page on its way is taken before that, or never.

        Raises:
            TxmqError: it does not answer.
        """
        self.close()
        with closing(RelayBroker(client, self.outbox)) as broker:
            home = _answered(broker, broker.connect(row.home))
            is_same_home = home != OTHER_HOME
            if not is_same_home:
                home = _answered(broker, broker.connect(""))
            found = None
            if row.claim is not None and is_fenced:
                found = ClaimOutcome.OTHER_HOME
                if is_same_home:
                    found = _answered(broker, broker.outcome(Outcome(row.claim)))
            (last,) = _answered(broker, broker.chain(Chain(row.uuid)))
            is_committed = found is ClaimOutcome.COMMITTED or (found is not None and last == row.claim)
            return Ends(home, is_same_home, is_committed, last)

    def adopt(self, client: Client, *, is_copy: bool) -> Adopted | None:
        """Let the line go on here, with what the broker has as its past; all that waits is parked.

        Args:
            is_copy: another database goes on as this outbox; this one becomes an outbox of its own.

        Returns:
            None: nothing is adopted, because database and broker agree.

        Raises:
            TxmqError: the broker does not answer.

        Durability: forced. If it is not known whether it has happened, it may be done again.
        """
        row = self.look().row
        if not is_copy and agree(row, self.ends(client, row)):  # no relay is disturbed
            return None
        try:
            for _ in range(ADOPT_TRIES):
                row = self._taken()
                ends = self.ends(client, row, is_fenced=True)
                crash_point("operator.settled")
                if not is_copy and agree(row, ends):
                    self._let_go()
                    return None
                found = self._adopted(row, ends, is_copy=is_copy)
                if found is not None:
                    return found
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell; the lease ends by itself
                self._let_go()
            raise
        raise RequestTimeoutError(
            f"outbox {self.outbox.name!r}: others took the lease while the broker was asked; nothing was adopted, "
            "try again"
        )

    def _taken(self) -> RelayRow:
        """Take the lease from any holder: what is on its way is settled by its claim."""
        with self._locked() as (session, row, _):
            row = row._replace(holder=self._holder)
            session.tables.claim(session.connection, row, LEASE_MS)
        return row

    def _let_go(self) -> None:
        with self._locked() as (session, _, _):
            session.tables.release(session.connection, self._holder)

    def _adopted(self, taken: RelayRow, ends: Ends, *, is_copy: bool) -> Adopted | None:
        """None: the lease is another's by now."""
        with self._locked() as (session, row, _):
            if row != taken:
                return None
            if ends.is_claim_committed:
                session.tables.delete(session.connection, row.ids)
            uuid, last = (f"{OSRandom().bits(128):032x}", None) if is_copy else (row.uuid, ends.last)
            row = RelayRow(uuid, ends.home, last)
            parked = session.tables.adopt(session.connection, row)
            crash_point("operator.adopted")
        return Adopted(row, parked)

    @contextmanager
    def _locked(self) -> Iterator[tuple[RelaySession, RelayRow, bool]]:
        """One transaction, which begins with the lock on the relay row; whether its lease is in force."""
        try:
            if self._session is None:
                # An operator accepts what the relays have accepted.
                self._session = RelaySession.opened(self.outbox, self._connect, durability="weak")
            row, is_over = self._session.lock(OSClock())
            yield self._session, row, not is_over and row.holder is not None
            self._session.connection.commit()
        except BaseException:
            self.close()
            raise


def agree(row: RelayRow, ends: Ends) -> bool:
    """Whether what the broker took last is what the database knows or has on its way.

    Relays stop where it is not, if the row has not changed since the broker was asked.
    """
    return ends.is_same_home and row.agrees_with(ends.last)


def _ids_of(session: RelaySession, units: Sequence[int]) -> list[int]:
    found = (session.tables.parked_ids(session.connection, unit) for unit in units)
    return sorted({one for ids in found for one in ids})


def _answered(broker: RelayBroker, answer: T | None) -> T:
    if answer is None:
        raise broker.problem or TxmqError("the broker did not answer")
    return answer


def forget(client: Any, uuid: str) -> None:
    """Have every home drop what it knows of an outbox whose database is no more.

    Raises:
        TxmqError: a home is away, or the client's user is no administrator.

    Durability: forced.
    """
    for link in client.routes.all_links():
        link.control.repeat("outbox", uuid, timeout=client.timeout, extensions={"forget": None})
