"""Databases with prepared branches in memory, resources over them, and a home broker: XA without a network.

The databases do what MariaDB does (stack reference, section 2): a branch whose owner's session lives is listed and not
known to others; a rollback comes back with a crash until something was committed after it; markers are rows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tools.simulated.broker import SimulatedBroker
from tools.simulated.clock import SimClock
from tools.simulated.cluster import SimulatedCluster
from txmq.client.transaction.block import Transaction
from txmq.errors import HeuristicError, RolledBackError, TransactionTimeoutError
from txmq.runtime.call_limits import CallLimit
from txmq.xa.database.marker_table import TokenRow
from txmq.xa.resolver import Resolver
from txmq.xa.two_phase.resource_ports import (
    Bqual,
    Ended,
    ListedXid,
    PrepareUnknownError,
    UsedXAConnection,
    XAResource,
    encode_bqual,
    listed_xid,
)
from txmq.xid import FORMAT_ID, TxId, Xid

_TOKENS = count(1)


class DriverError(Exception):
    """What a driver raises."""


@dataclass
class Prepared:
    """A prepared branch: what it would commit, and whose session holds it (None: nobody's)."""

    rows: list[Any]
    txid: str
    session: int | None


@dataclass
class Database:
    """One database. ``faults`` are for the next calls of a method: in the place of doing it ("-") or after it ("+").

    Attributes:
        calls: what was asked of it, in order.
    """

    name: str
    number: int
    clock: SimClock
    has_marker: bool = True
    rows: list[Any] = field(default_factory=list)
    markers: dict[str, str] = field(default_factory=dict)
    prepared: dict[Xid, Prepared] = field(default_factory=dict)
    unforced: dict[Xid, Prepared] = field(default_factory=dict)
    sessions: set[int] = field(default_factory=set)
    faults: dict[str, deque[str | BaseException]] = field(default_factory=lambda: defaultdict(deque))
    calls: list[str] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    is_away: bool = False
    has_old_markers: bool = False
    tokens: dict[str, TokenRow] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: count(1))

    @property
    def uuid(self) -> str:
        """Its identity."""
        return f"{self.number:032x}"

    def fault(self, call: str) -> str:
        """Note a call; raise what is planned, or answer "" or "+"."""
        self.calls.append(call)
        if self.is_away:
            raise DriverError("away")
        planned = self.faults[call].popleft() if self.faults[call] else ""
        if isinstance(planned, BaseException):
            raise planned
        if planned == "-":
            raise DriverError("planned")
        return planned

    def commit(self, xid: Xid) -> None:
        """Make a prepared branch's rows and marker readable."""
        branch = self.prepared.pop(xid)
        self.rows.extend(branch.rows)
        if self.has_marker:
            self.markers[branch.txid] = "committed"
        self.unforced.clear()

    def rollback(self, xid: Xid) -> None:
        """Forget a prepared branch; not durably."""
        self.unforced[xid] = self.prepared.pop(xid)

    def end_session(self, session: int) -> None:
        """A connection ends: its prepared branches stay, and are anybody's."""
        self.sessions.discard(session)
        for branch in self.prepared.values():
            if branch.session == session:
                branch.session = None

    def crash(self) -> None:
        """kill -9, and a restart."""
        self.prepared.update(self.unforced)
        self.unforced.clear()
        for session in list(self.sessions):
            self.end_session(session)


class Rows:
    """The connection as the body sees it."""

    def __init__(self) -> None:
        self.added: list[Any] = []

    def add(self, value: Any) -> None:
        """INSERT."""
        self.added.append(value)


class FakeBranch:
    """See ``XABranch``."""

    def __init__(self, resource: FakeResource, txid: str, timeout_s: float) -> None:
        self.database = resource.database
        self.resource: XAResource = resource
        self.connection = Rows()
        self.session = next(self.database.numbers)
        self.database.sessions.add(self.session)
        deadline_ms = self.database.clock.now_ms() + int(timeout_s * 1000)
        bqual = encode_bqual(Bqual(self.database.uuid, deadline_ms, self.session))
        self.txid, self.xid = txid, Xid(FORMAT_ID, txid.encode(), bqual)
        self.is_over = self.ended_by_body = False

    def details(self) -> dict[str, Any]:
        """What ``decide`` carries."""
        wrote = self.database.has_marker or bool(self.connection.added)
        return {
            "bqual": self.xid.bqual.decode(), "connection": self.session, "wrote": wrote,
            "marker": self.database.has_marker, "table": "txmq_marker",
        }  # fmt: skip

    def end_body(self) -> None:
        """A planned DriverError dooms."""
        try:
            self.database.fault("end_body")
        except DriverError as error:
            raise RolledBackError("a statement failed", self.txid) from error

    def prepare(self) -> None:
        """Fault "refuse", "by hand": surely not; "-", "+": no answer, not executed or executed; "late": no marker."""
        try:
            planned = self.database.fault("prepare")
        except DriverError as error:
            raise PrepareUnknownError("no answer", self.txid) from error
        if planned == "refuse":
            raise RolledBackError("refused", self.txid)
        if planned == "by hand":
            self.ended_by_body = True
            raise HeuristicError("ended by the body", self.txid)
        self.database.prepared[self.xid] = Prepared(self.connection.added, self.txid, self.session)
        if planned == "+":
            raise PrepareUnknownError("no answer", self.txid)
        if planned == "late":
            raise PrepareUnknownError("no marker", self.txid) from TransactionTimeoutError("late", self.txid)

    def commit(self) -> bool:
        """Fault "-", "+": no answer, not executed or executed."""
        try:
            planned = self.database.fault("commit")
            self.database.commit(self.xid)
        except (DriverError, KeyError):
            self.abandon()
            return False
        if planned == "+":
            self.abandon()
            return False
        self.finish()
        return True

    def roll_back(self, prepared: bool) -> bool:
        """Fault "-": no answer."""
        try:
            self.database.fault("roll_back" if prepared else "drop")
        except DriverError:
            self.abandon()
            return not prepared
        if self.xid in self.database.prepared:
            assert prepared, "rolled back as if it were not prepared"
            self.database.rollback(self.xid)
            self.database.unforced.clear()
        self.finish()
        return True

    def finish(self) -> None:
        """Once."""
        assert not self.is_over
        self.abandon()

    def abandon(self) -> None:
        """The session ends."""
        self.is_over = True
        self.database.end_session(self.session)


class FakeResource:
    """See ``XAResource``."""

    def __init__(self, database: Database) -> None:
        self.database, self.name = database, database.name
        self.branches: list[FakeBranch] = []

    @property
    def uuid(self) -> str | None:
        """Identity."""
        return self.database.uuid

    def enlist(self, cluster: str, txid: str, timeout_s: float, connection: Any = None) -> FakeBranch:
        """Begin."""
        assert len(cluster) == 16
        self.database.fault("enlist")
        branch = FakeBranch(self, txid, timeout_s)
        if connection is not None:
            branch.connection = connection
        self.branches.append(branch)
        return branch

    def using(self, connection: Any) -> UsedXAConnection:
        """With the caller's connection."""
        return UsedXAConnection(self, connection)

    def open_recovery(self, cluster: str) -> FakeRecovery:
        """For a resolver."""
        self.database.fault("open_recovery")
        return FakeRecovery(self.database, int(cluster, 16))

    def new_token(self) -> str:
        """One that nobody has drawn."""
        return f"{next(_TOKENS):032x}"

    def close(self) -> None:
        """Nothing is idle."""


class FakeRecovery:
    """See ``Recovery``."""

    def __init__(self, database: Database, cluster: int) -> None:
        self._database, self._cluster = database, cluster
        self.uuid, self.limit = database.uuid, CallLimit()

    def prepared(self) -> list[ListedXid]:
        """Ours."""
        self._database.fault("recover")
        found = (listed_xid(xid) for xid in self._database.prepared)
        return [
            listed for listed in found
            if listed is not None and listed.uuid == self.uuid and listed.txid.cluster == self._cluster
        ]  # fmt: skip

    def _end(self, call: str, xid: Xid) -> Ended:
        planned = self._database.fault(call)
        if planned == "rolled back":
            self._database.prepared.pop(xid, None)
            return Ended.ROLLED_BACK
        branch = self._database.prepared.get(xid)
        if branch is None or branch.session is not None:
            return Ended.NOT_KNOWN
        (self._database.commit if call == "xa commit" else self._database.rollback)(xid)
        return Ended.DONE

    def commit(self, xid: Xid) -> Ended:
        """Of anybody whose session has ended."""
        return self._end("xa commit", xid)

    def rollback(self, xid: Xid) -> Ended:
        """The same."""
        return self._end("xa rollback", xid)

    def force(self) -> None:
        """A small commit."""
        self._database.fault("force")
        self._database.unforced.clear()

    def marker_outcome(self, txid: str) -> str | None:
        """The row."""
        self._database.fault("marker")
        return self._database.markers.get(txid)

    def token_row(self, home: str) -> TokenRow:
        """The row."""
        self._database.fault("token")
        return self._database.tokens.get(home, TokenRow())

    def draw_token(self, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()) -> bool:
        """In the place of another one."""
        assert not rolled_back
        self._database.fault("draw")
        if self._database.tokens.get(home, TokenRow()) != before:
            return False
        self._database.tokens[home] = after
        self._database.unforced.clear()
        return True

    def committed_before(self, age_ms: int, after: str, limit: int) -> list[str]:
        """All of them, or none."""
        if not self._database.has_old_markers:
            return []
        return sorted(txid for txid in self._database.markers if txid > after)[:limit]

    def delete_committed(self, txids: Any) -> None:
        """Remove rows."""
        self._database.fault("delete")
        for txid in txids:
            self._database.markers.pop(txid, None)

    def kill(self, connection: int) -> bool:
        """End a session."""
        self._database.fault("kill")
        if connection not in self._database.sessions:
            return False
        self._database.killed.append(connection)
        self._database.end_session(connection)
        return True

    def now_ms(self) -> int:
        """The broker's clock, here."""
        return self._database.clock.now_ms()

    def close(self) -> None:
        """Nothing to close."""


class XAFixture:
    """Some databases, one broker, one client process."""

    def __init__(self, names: str = "ab", *, has_marker: bool = True) -> None:
        self.home = SimulatedBroker()
        self.databases = [Database(name, n, self.home.clock, has_marker) for n, name in enumerate(names, 1)]
        self.resources = [FakeResource(database) for database in self.databases]

    def block(self, timeout: float = 30.0) -> Transaction:
        """A block over all databases."""
        return Transaction(self.home, self.home, self.resources, timeout)

    def home_block(self, *resources: Any) -> Transaction:
        """A block over these."""
        return Transaction(self.home, self.home, resources)

    def transfer(self, value: bytes, timeout: float = 30.0) -> Transaction:
        """A row in each, and a message."""
        with self.block(timeout) as tx:
            self.insert(tx, value)
        return tx

    def insert(self, tx: Transaction, value: bytes) -> None:
        """The body."""
        for resource in self.resources:
            tx.connection(resource).add(value)
        tx.send("orders", value)

    def die(self) -> None:
        """The client's process ends: sessions, and the connection to the broker."""
        self.end_sessions()
        self.home.owner_dies()

    def end_sessions(self) -> None:
        """The connections to the databases are lost."""
        for database in self.databases:
            for session in list(database.sessions):
                database.end_session(session)

    def resolver(self) -> Resolver:
        """One of another process."""
        return Resolver(self.home, [FakeResource(database) for database in self.databases], self.home.clock)

    def check(self) -> None:
        """Rows of all databases and messages are the same, nothing is prepared or incomplete."""
        messages = self.home.values("orders")
        for database in self.databases:
            assert database.rows == messages
            assert database.prepared == {}
            assert database.unforced == {}
        assert not {"prepared", "decided"} & set(self.home.states().values())


class Notes:
    """In place of the client's resolver: notes what it is told, and resolves when asked."""

    def __init__(self, home: SimulatedBroker | SimulatedCluster) -> None:
        self.resolver = Resolver(home, [], home.clock)
        self.completes: list[tuple[str, str]] = []
        self.watched: list[tuple[str, str]] = []
        self.wakes = 0

    def add(self, resource: Any) -> None:
        """See ``Settler``."""
        self.resolver.add(resource)

    def wake(self) -> None:
        """See ``Settler``."""
        self.wakes += 1

    def tell(self, commits: Any) -> None:
        """See ``BackgroundResolver``: tests look themselves."""

    def report(self, hazard: Any, on_reported: Callable[[], None]) -> None:
        """See ``Settler``."""
        self.resolver.report(hazard, on_reported)

    def completed(self, resource: Any, txid: str, answer: Any) -> None:
        """See ``Settler``."""
        self.completes.append((resource.name, txid))
        self.resolver.branch_resolver(resource, txid).completed(txid, answer)

    def watch(self, resource: Any, txid: str, on_resolved: Any) -> None:
        """See ``Settler``."""
        self.watched.append((resource.name, txid))
        self.resolver.branch_resolver(resource, txid).watch(txid, on_resolved)


def external_branch(world: XAFixture, database: Database, *, how: str) -> Xid:
    """A prepared branch that is not ours."""
    home = world.home.session
    txid = TxId(home.cluster, home.home, 7, 99)
    bqual = Bqual(database.uuid, 0, 1)
    if how == "format id":
        xid = Xid(1, str(txid).encode(), encode_bqual(bqual))
    elif how == "cluster":
        xid = Xid(FORMAT_ID, str(txid._replace(cluster=1)).encode(), encode_bqual(bqual))
    elif how == "resource":
        xid = Xid(FORMAT_ID, str(txid).encode(), encode_bqual(bqual._replace(uuid="f" * 32)))
    elif how == "home":
        xid = Xid(FORMAT_ID, str(txid._replace(home=1)).encode(), encode_bqual(bqual))
    else:
        xid = Xid(FORMAT_ID, b"\xff\x00", b"")
    database.prepared[xid] = Prepared([b"?"], "", None)
    return xid
