"""``using(connection)``: wrapped connections, and what is remembered of those that were verified."""

from __future__ import annotations

import gc
import sqlite3
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.pool import NullPool

from txmq.errors import ConfigError, TransactionStateError
from txmq.xa import LastResource
from txmq.xa.database.dbapi import driver_of, innermost
from txmq.xa.database.installation import DatabaseSession

from ..support import NAME, LastResourceFixture, abandon


class Hiding:
    """A wrapper that has what PEP 249 asks for, and no more."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def cursor(self) -> Any:
        """A cursor."""
        return self._connection.cursor()

    def commit(self) -> None:
        """Commit."""
        self._connection.commit()

    def rollback(self) -> None:
        """Roll back."""
        self._connection.rollback()

    def close(self) -> None:
        """Close."""
        self._connection.close()


class Passing(Hiding):
    """A wrapper that passes on whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Tracing(Passing):
    """One that says what it wraps, as wrapt's do."""

    @property
    def __wrapped__(self) -> Any:
        return self._connection


def pooled(connection: Any) -> Any:
    """SQLAlchemy's, as ``connection.connection`` gives it."""
    return NullPool(lambda: connection).connect()


WRAPPERS: list[Callable[[Any], Any]] = [Passing, Tracing, pooled, lambda connection: Tracing(Passing(connection))]


def order(world: LastResourceFixture, connection: Any, resource: LastResource | None = None) -> None:
    """A row and a message through this connection."""
    resource = resource or world.resource
    with world.block(resource=resource.using(connection)) as tx:
        tx.connection(resource).cursor().execute("INSERT INTO orders (value) VALUES (?)", (b"x",))
        tx.send("orders", b"x")


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["passing", "tracing", "sqlalchemy", "twice"])
def test_wrapped_connection_is_known_by_its_inner_or_forwarded_one(
    world: LastResourceFixture, wrap: Callable[[Any], Any]
) -> None:
    for _ in range(2):
        order(world, wrap(world.connect()))
    world.check()
    assert world.rows() == [b"x", b"x"]


def test_a_wrapper_that_hides_the_driver_needs_the_dialect(world: LastResourceFixture) -> None:
    with pytest.raises(ConfigError, match="give dialect="):
        order(world, Hiding(world.connect()))
    resource = LastResource(NAME, connect=lambda: Hiding(world.connect()), dialect="sqlite")
    resource.install(world.home)
    order(world, Hiding(world.connect()), resource)
    with world.block(resource=resource) as tx:
        tx.connection(resource).cursor().execute("INSERT INTO orders (value) VALUES (?)", (b"y",))
        tx.send("orders", b"y")
    world.check()
    resource.close()


def test_what_a_dead_owner_left_is_settled_through_wrapped_connections(world: LastResourceFixture) -> None:
    abandon(world, b"left")
    resource = LastResource(NAME, connect=lambda: Hiding(world.connect()), dialect="sqlite")
    world.new_resource = lambda: resource  # type: ignore[method-assign]
    resolver = world.resolver()
    resolver.run_once()
    resolver.close()
    assert (set(world.markers().values()), set(world.home.states().values())) == ({"rolled-back"}, {"rolled-back"})


def test_a_wrapped_connection_in_a_transaction_is_refused(world: LastResourceFixture) -> None:
    for wrap in WRAPPERS:
        connection = world.connect()
        connection.execute("BEGIN")
        wrapped = wrap(connection)
        with pytest.raises(TransactionStateError, match="already in"):
            order(world, wrapped)
        assert connection.in_transaction, "it is the caller's to end"
        connection.rollback()


class Interrupted(Passing):
    """Ctrl-C comes after a statement, or before undoing it, too."""

    def __init__(self, connection: Any, is_undone: bool) -> None:
        super().__init__(connection)
        self.is_undone = is_undone

    def cursor(self) -> Any:
        return InterruptedCursor(self._connection.cursor())

    def rollback(self) -> None:
        if not self.is_undone:
            raise KeyboardInterrupt
        super().rollback()


class InterruptedCursor(Passing):
    """After SAVEPOINT."""

    def execute(self, sql: str, *given: Any) -> Any:
        self._connection.execute(sql, *given)
        if sql.startswith("SAVEPOINT"):
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_undone", [True, False])
def test_block_interrupted_while_it_begins_leaves_no_transaction(world: LastResourceFixture, is_undone: bool) -> None:
    """Found: it stayed open on the caller's connection, and SQLite's one lock with it."""
    connection = world.connect()
    with pytest.raises(KeyboardInterrupt):
        order(world, Interrupted(connection, is_undone))
    order(world, world.connect())
    world.check()
    assert world.rows() == [b"x"]
    if is_undone:
        order(world, connection)
    else:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def test_a_hidden_transaction_is_found_and_left_alone(world: LastResourceFixture) -> None:
    connection = world.connect()
    resource = LastResource(NAME, connect=world.connect, dialect="sqlite")
    resource.install(world.home)
    connection.execute("BEGIN")
    with pytest.raises(TransactionStateError, match="already in"):
        order(world, Hiding(connection), resource)
    assert connection.in_transaction, "it is the caller's to end"
    connection.rollback()
    order(world, Hiding(connection), resource)


def test_what_is_no_connection_is_refused_by_what_it_is() -> None:
    with pytest.raises(ConfigError, match="not PosixPath"):
        driver_of(Path())
    endless = Tracing(None)
    endless._connection = endless
    assert innermost(endless) is endless


def test_connection_is_verified_once_in_its_life_and_not_kept(
    world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[str] = []
    real = world.resource.installation.verify

    def verify(connection: Any, cluster: str) -> DatabaseSession:
        verified.append(cluster)
        return real(connection, cluster)

    monkeypatch.setattr(world.resource.installation, "verify", verify)
    connection = world.connect()
    for _ in range(3):
        order(world, Tracing(connection))  # a new wrapper for each request, as pools have it
    assert len(verified) == 1
    order(world, world.connect())
    assert len(verified) == 2
    kept = weakref.ref(connection)
    for opened in world.opened:
        opened.close()  # a pool does, too, before it lets go of one
    world.opened.clear()
    del connection
    gc.collect()
    assert kept() is None


def test_a_remembered_connection_is_still_refused_in_a_transaction(world: LastResourceFixture) -> None:
    connection = world.connect()
    order(world, connection)
    connection.execute("BEGIN")
    with pytest.raises(TransactionStateError, match="already in"):
        order(world, connection)


def test_a_remembered_connection_is_not_one_of_another_cluster(world: LastResourceFixture) -> None:
    connection = world.connect()
    order(world, connection)
    with pytest.raises(ConfigError, match="belongs to cluster"):
        world.resource.enlist("f" * 16, connection)
