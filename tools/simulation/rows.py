"""A real SQLite database of simulated processes: files below a directory of its own, locks, and a COMMIT that may fail.

Theory of operation. ``Connection`` is sqlite3's, as a driver of its own (``simulated_sqlite``): waiting for a lock
parks the task, statements take simulated time, the clock in SQL is the host's. A connection dies with its host: what
it had not committed is rolled back, what was committed stays, as after the death of a real process. A COMMIT fails in
each of the three ways there are: not committed and still open; rolled back; committed and not told.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from txmq.xa.database.dbapi import driver_of_class

from .threads import Host, pause, required_task
from .world import Simulation, Violation

DRIVER = "simulated_sqlite"
LOCK_WAIT_S = 0.2
_POLL_S = 0.005
_NEVER_FAIL = ("PRAGMA", "SELECT", "RELEASE")  # RELEASE: any failure is taken for a body that committed by itself


class Cursor(sqlite3.Cursor):
    """Waits for locks in simulated time."""

    def execute(self, sql: str, parameters: Any = (), /) -> Cursor:
        """See PEP 249."""
        connection = self.connection
        assert isinstance(connection, Connection)
        with connection.alone():
            return self._execute(connection, sql, parameters)

    def _execute(self, connection: Connection, sql: str, parameters: Any) -> Cursor:
        connection.before(sql)
        waited_s = 0.0
        while True:
            try:
                super().execute(sql, parameters)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or waited_s >= connection.wait_s:
                    raise
                connection.host.world.meet("waited for a database lock")
                pause(_POLL_S)
                waited_s += _POLL_S
            else:
                return self


class Connection(sqlite3.Connection):
    """One process's connection."""

    __module__ = DRIVER
    host: Host
    wait_s: float
    failing: float  # probability for each statement
    database: Rows
    is_busy = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One statement at a time: a driver's connection takes no second one while one runs."""
        if self.is_busy and self.host.is_alive:
            self.host.threads.failure = Violation("a second statement on a connection, while one runs")
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def before(self, sql: str) -> None:
        """Every statement takes its time, and may fail."""
        self.host.require_alive()
        world = self.host.world
        draw = world.rng.random()
        if draw < 0.25:
            pause(world.rng.uniform(0.0, 0.006))
        if draw > 1.0 - self.failing and not self.database.is_healed and not sql.startswith(_NEVER_FAIL):
            world.meet("statement failed")
            raise sqlite3.OperationalError("simulated: disk I/O error")

    def cursor(self, *_: Any, **__: Any) -> Any:
        """See PEP 249."""
        self.host.require_alive()
        return super().cursor(Cursor)

    def commit(self) -> None:
        """See PEP 249."""
        self.host.require_alive()
        if self.in_transaction:
            with self.alone():
                self._commit()

    def _commit(self) -> None:
        draw, world = self.host.world.rng.random(), self.host.world
        if draw < 0.3:
            pause(world.rng.uniform(0.0, 0.01))
        if self.database.is_healed or draw < 0.88:
            super().commit()
            return
        world.meet("database answer lost")
        world.trace(self.host.name, "COMMIT fails", round(draw, 3))
        if draw < 0.92:
            super().rollback()
        elif draw < 0.96:
            super().commit()
        raise sqlite3.OperationalError("simulated: COMMIT failed")

    def rollback(self) -> None:
        """See PEP 249."""
        self.host.require_alive()
        with self.alone():
            super().rollback()

    def close(self) -> None:
        """See PEP 249."""
        with self.alone():
            self.end()

    def end(self) -> None:
        """The session ends, whoever says so."""
        super().close()  # rolls back what is open


class Rows:
    """One database file.

    Attributes:
        is_healed: nothing fails any more.
    """

    def __init__(self, world: Simulation, path: str) -> None:
        self.world, self.path, self.is_healed = world, path, False
        self._outside = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._outside.execute("CREATE TABLE orders (row TEXT PRIMARY KEY, key INTEGER, version INTEGER)")
        self._driver = self._make_driver()

    def _make_driver(self) -> ModuleType:
        driver = ModuleType(DRIVER)
        for name in ("paramstyle", "Error", "IntegrityError", "OperationalError"):
            setattr(driver, name, getattr(sqlite3, name))
        driver.connect = self._connect  # type: ignore[attr-defined]
        sys.modules[DRIVER] = driver
        driver_of_class.cache_clear()  # the class is that of other histories' drivers, too
        return driver

    def connect(self) -> Connection:
        """What the application gives as ``connect=``."""
        return self._connect(self.path)

    def _connect(self, path: str, uri: bool = False, timeout: float = LOCK_WAIT_S) -> Connection:
        host = required_task().host
        host.require_alive()
        if uri:
            path = unquote(path.removeprefix("file:").partition("?")[0])
        assert path == self.path, path
        connection = sqlite3.connect(path, factory=Connection, timeout=0, check_same_thread=False)
        connection.host, connection.wait_s, connection.database = host, timeout, self
        connection.failing = 0.05 if uri else 0.005  # resolvers open by URI, and have to live with more
        connection.create_function("julianday", 1, lambda _: 2440587.5 + host.now_ms() / 86_400_000)
        host.on_death.append(connection.end)
        return connection

    def close(self) -> None:
        """At the end of the world."""
        self._outside.close()
        sys.modules.pop(DRIVER, None)
        driver_of_class.cache_clear()

    def has(self, row: str) -> bool:
        """Whether a row is committed."""
        return self._outside.execute("SELECT 1 FROM orders WHERE row = ?", (row,)).fetchone() is not None

    def markers(self) -> dict[str, str]:
        """The marker table; empty before anybody installed it."""
        return self._pairs("SELECT txid, outcome FROM txmq_marker")

    def _pairs(self, query: str) -> dict[str, Any]:
        try:
            return dict(self._outside.execute(query).fetchall())
        except sqlite3.OperationalError:
            return {}
