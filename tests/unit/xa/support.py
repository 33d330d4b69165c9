"""A database file, a resource over it, and a home broker: what a last-resource transaction needs, without a network."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.crash_points import crash_at
from tools.simulated.broker import SimulatedBroker
from txmq.client.transaction.block import Transaction
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa import LastResource
from txmq.xa.reporter import Hazard
from txmq.xa.resolver import Resolver

NAME = "orders-db"


class Connection(sqlite3.Connection):
    """A connection whose COMMIT can fail: ``fail_before`` is raised in its place, ``fail_behind`` after it.

    One that the collector finds is closed without a word: Python 3.13 would blame whatever test runs then.
    """

    fail_before: BaseException | None = None
    fail_behind: BaseException | None = None

    def __del__(self) -> None:
        with suppress(sqlite3.Error):  # it belongs to another thread, or was never opened
            self.close()

    def commit(self) -> None:
        """Commit, with the planned failure."""
        planned, self.fail_before = self.fail_before, None
        if planned is not None:
            raise planned
        super().commit()
        planned, self.fail_behind = self.fail_behind, None
        if planned is not None:
            raise planned


class LastResourceFixture:
    """One database, one broker, one client process.

    Attributes:
        home: the broker; also the client and the producer.
        resource: the database as the application sees it.
        opened: every connection the application was given.
    """

    def __init__(self, folder: Path, request_size_bytes_max: int = 64 << 10) -> None:
        self.path = folder / "orders.db"
        self.home = SimulatedBroker(request_size_bytes_max=request_size_bytes_max)
        self.opened: list[Connection] = []
        self.resolvers: list[Resolver] = []
        self.options: dict[str, Any] = {"timeout": 0.05}
        self.on_connect = "PRAGMA foreign_keys = OFF"
        with self.outside() as connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, value BLOB)")
        self.resource = self.new_resource()
        self.resource.install(self.home)

    def new_resource(self) -> LastResource:
        """The same database as another process sees it."""
        return LastResource(NAME, connect=self.connect)

    def connect(self) -> Connection:
        """What the application gives as ``connect=``."""
        connection = sqlite3.connect(self.path, factory=Connection, **self.options)
        connection.execute(self.on_connect)
        self.opened.append(connection)
        return connection

    @contextmanager
    def outside(self) -> Iterator[sqlite3.Connection]:
        """Somebody else's connection; each statement is committed at once."""
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=0.05)
        try:
            yield connection
        finally:
            connection.close()

    def block(self, timeout: float = 30.0, resource: Any = None) -> Transaction:
        """A transaction block with the resource."""
        return Transaction(self.home, self.home, (resource or self.resource,), timeout)

    def order(self, value: bytes, timeout: float = 30.0) -> Transaction:
        """One row and one message."""
        with self.block(timeout) as tx:
            self.insert(tx, value)
        return tx

    def insert(self, tx: Transaction, value: bytes) -> None:
        """A row and its message."""
        tx.connection(self.resource).execute("INSERT INTO orders (value) VALUES (?)", (value,))
        tx.send("orders", value)

    def rows(self) -> list[bytes]:
        """The rows, in order of their insertion."""
        with self.outside() as connection:
            return [value for (value,) in connection.execute("SELECT value FROM orders ORDER BY id")]

    def markers(self) -> dict[str, str]:
        """The marker table."""
        with self.outside() as connection:
            return dict(connection.execute("SELECT txid, outcome FROM txmq_marker").fetchall())

    def close(self) -> None:
        """The test ends: what was opened is closed, by whomever."""
        for close in [opened.close for opened in self.opened] + [resolver.close for resolver in self.resolvers]:
            with suppress(sqlite3.ProgrammingError):  # it belongs to a thread that has ended
                close()

    def die(self) -> None:
        """The process ends: its connections are lost, to the database and to the broker."""
        self.lose_database()
        self.home.owner_dies()

    def lose_database(self) -> None:
        """The process lives, and its connections to the database are lost."""
        for connection in self.opened:
            connection.close()
        self.opened.clear()
        self.resource.close()
        self.resource.writers.renew()

    def resolver(self, resource: LastResource | None = None) -> Resolver:
        """A resolver in another process, unless the resource is one of this one."""
        resolver = Resolver(self.home, [resource or self.new_resource()])
        self.resolvers.append(resolver)
        return resolver

    def heal(self) -> None:
        """Everything works again, the owner has gone; resolve what is left."""
        self.home.faults.clear()
        self.home.owner_dies()
        self.home.pending_commits.settle()
        resolver = Resolver(self.home, [self.resource])
        resolver.run_once()
        resolver.close()

    def check(self) -> None:
        """Rows and messages are equal and in order, and nothing is in doubt."""
        assert self.rows() == self.home.values("orders")
        assert "prepared" not in self.home.states().values()


class Quiet:
    """In place of the client's resolver thread: notes what it would have been told."""

    def __init__(self) -> None:
        self.wakes = 0
        self.resources: list[LastResource] = []
        self.hazards: list[tuple[Hazard, Callable[[], None]]] = []

    def add(self, resource: LastResource) -> None:
        """See ``BackgroundResolver``."""
        self.resources.append(resource)

    def wake(self) -> None:
        """See ``BackgroundResolver``."""
        self.wakes += 1

    def tell(self, commits: Any) -> None:
        """See ``BackgroundResolver``: tests look themselves."""

    def completed(self, resource: Any, txid: str, answer: Any) -> None:
        """See ``BackgroundResolver``."""

    def watch(self, resource: Any, txid: str, on_resolved: Callable[[], None]) -> None:
        """See ``BackgroundResolver``."""

    def report(self, hazard: Hazard, on_reported: Callable[[], None]) -> None:
        """See ``BackgroundResolver``."""
        self.hazards.append((hazard, on_reported))


def quiet_resolver(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    """No thread: the test says when a round is."""
    quiet = Quiet()
    monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _client: quiet)
    return quiet


def abandon(world: LastResourceFixture, value: bytes, point: str = "client.tx.prepared", *, dies: bool = True) -> str:
    """A transaction whose process died at a point, or (not ``dies``) stands still there; its id."""
    known = set(world.home.states())
    with crash_at(point), pytest.raises(SimulatedCrash):
        world.order(value)
    if dies:
        world.die()
    (txid,) = set(world.home.states()) - known
    return txid
