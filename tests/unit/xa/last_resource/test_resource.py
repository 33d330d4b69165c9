"""The database side: its identity, what it refuses, and what the body of a block may do with its connection."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.chains import has_circle
from txmq.errors import (
    ConfigError,
    HeuristicError,
    RolledBackError,
    TransactionStateError,
)
from txmq.model import Outcome
from txmq.xa import LastResource
from txmq.xa.database.dbapi import driver_of
from txmq.xa.database.dialects import DIALECTS, MYSQL, POSTGRESQL, SQLITE, dialect_for, placeholder_of
from txmq.xa.database.guarded_connection import GuardedConnection
from txmq.xa.database.marker_table import MarkerTable, create_tables
from txmq.xa.resolver_ports import cluster_of

from ..support import NAME, LastResourceFixture, abandon

# --- its identity ----------------------------------------------------------------------------------------------------


def test_install_is_idempotent_and_keeps_the_identity(world: LastResourceFixture) -> None:
    first = world.resource.uuid
    other = world.new_resource()
    other.install()
    other.install(world.home)
    assert first is not None
    assert (len(first), other.uuid) == (32, first)


@pytest.mark.parametrize("lock", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_locked_database_is_busy_and_not_misconfigured(tmp_path: Path, lock: str) -> None:
    """By a process that was stopped in the middle of its transaction, for instance."""
    path = tmp_path / "shop.db"
    resource = LastResource("shop", connect=lambda: sqlite3.connect(path, timeout=0.01))
    with closing(sqlite3.connect(path)) as other:
        other.execute(lock)
        with pytest.raises(RolledBackError, match=r"resource 'shop' is busy: .* locked") as refused:
            resource.install()
        assert refused.value.retriable
    resource.install()


def test_install_without_client_is_bound_by_first_transaction(tmp_path: Path, world: LastResourceFixture) -> None:
    path = tmp_path / "other.db"
    resource = LastResource("other", connect=lambda: sqlite3.connect(path))
    resource.install()
    with world.block(resource=resource) as tx:
        tx.send("orders", b"x")
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT cluster FROM txmq_marker_identity").fetchall() == [("00000000000000c1",)]
    connection.close()


def _rename(world: LastResourceFixture, column: str, value: str) -> None:
    with world.outside() as connection:
        connection.execute(f"UPDATE txmq_marker_identity SET {column} = ?", (value,))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("name", "someone-else", "installed as 'someone-else'"),
        ("cluster", "00000000000000c2", "belongs to cluster 00000000000000c2"),
        ("uuid", "f" * 32, "another database answers"),
    ],
)
def test_a_database_of_somebody_else_is_refused(
    world: LastResourceFixture, column: str, value: str, words: str
) -> None:
    _rename(world, column, value)
    with pytest.raises(ConfigError, match=words), world.block():
        pass
    with pytest.raises(ConfigError, match=words):
        world.resource.open_for_resolver("00000000000000c1")
    assert world.home.requests == []


def test_identity_that_changes_under_open_connection_lets_no_marker_in(world: LastResourceFixture) -> None:
    world.order(b"kept idle")
    _rename(world, "uuid", "f" * 32)
    with pytest.raises(RolledBackError):
        world.order(b"x")
    assert world.rows() == [b"kept idle"]
    world.check()


def test_database_of_an_older_txmq_is_refused_until_reinstalled(world: LastResourceFixture) -> None:
    txid = abandon(world, b"left")
    with world.outside() as connection:
        connection.execute("DROP TABLE txmq_marker_token")
    with pytest.raises(ConfigError, match="call install"):
        world.new_resource().enlist(cluster_of(world.home))
    world.resolver().run_once()
    assert world.home.states() == {txid: "prepared"}
    installed = world.new_resource()
    installed.install(world.home)
    assert installed.uuid == world.resource.uuid
    world.resolver().run_once()
    assert world.home.states()[txid] == "rolled-back"


@pytest.mark.parametrize("table", ["txmq_marker_identity", "txmq_marker"])
def test_missing_tables_are_an_error_never_an_absent_marker(world: LastResourceFixture, table: str) -> None:
    with world.outside() as connection:
        connection.execute(f"DROP TABLE {table}")
    with pytest.raises((ConfigError, RolledBackError), match=r"install\(\)|no such table"):
        world.order(b"x")
    assert world.rows() == []


def test_another_connection_is_refused_by_what_it_lacks(tmp_path: Path, world: LastResourceFixture) -> None:
    other = LastResource(NAME, connect=lambda: sqlite3.connect(tmp_path / "empty.db"))
    with pytest.raises(ConfigError, match="install"), world.block(resource=other):
        pass


# --- what is refused -------------------------------------------------------------------------------------------------


def test_database_in_memory_is_refused_and_nothing_is_created(tmp_path: Path, world: LastResourceFixture) -> None:
    shared = "file:shared?mode=memory&cache=shared"
    with closing(sqlite3.connect(shared, uri=True)) as kept, closing(sqlite3.connect(tmp_path / "a.db")) as installed:
        resource = LastResource(NAME, connect=lambda: sqlite3.connect(shared, uri=True), allow_weak_durability=True)
        with pytest.raises(ConfigError, match="in memory"):
            resource.install()
        assert kept.execute("SELECT * FROM sqlite_master").fetchall() == []
        LastResource(NAME, connect=lambda: sqlite3.connect(tmp_path / "a.db")).install()
        installed.backup(kept)
        with pytest.raises(ConfigError, match="in memory"), world.block(resource=resource):
            pass


@pytest.mark.parametrize(
    "pragma", ["PRAGMA synchronous = NORMAL", "PRAGMA synchronous = OFF", "PRAGMA journal_mode = MEMORY"]
)
def test_weak_durability_is_refused_unless_asked_for_by_name(world: LastResourceFixture, pragma: str) -> None:
    def connect() -> sqlite3.Connection:
        connection = world.connect()
        connection.execute(pragma).fetchall()
        return connection

    strict = LastResource(NAME, connect=connect)
    with pytest.raises(ConfigError, match="allow_weak_durability"), world.block(resource=strict):
        pass
    lax = LastResource(NAME, connect=connect, allow_weak_durability=True)
    with world.block(resource=lax) as tx:
        tx.send("orders", b"x")
    assert tx.outcome is Outcome.COMMITTED


@pytest.mark.parametrize("is_lent", [False, True])
def test_removal_of_sqlites_journal_is_synced_with_the_commit(world: LastResourceFixture, is_lent: bool) -> None:
    """At FULL a power loss may bring the journal back, which rolls the commit back."""
    with closing(world.connect()) as own:
        assert own.execute("PRAGMA journal_mode").fetchall() == [("delete",)]
        with world.block(resource=world.resource.using(own) if is_lent else world.resource) as tx:
            found = tx.connection(world.resource).execute("PRAGMA synchronous").fetchall()
            tx.send("orders", b"x")
    assert (found, tx.outcome) == ([(3,)], Outcome.COMMITTED)


def test_connection_that_keeps_others_out_is_refused(world: LastResourceFixture) -> None:
    with closing(world.connect()) as own:
        own.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        with (
            pytest.raises(TransactionStateError, match="locking_mode"),
            world.block(resource=world.resource.using(own)),
        ):
            pass


def test_a_database_that_cannot_roll_back_is_refused(world: LastResourceFixture) -> None:
    connection = world.connect()
    connection.execute("PRAGMA journal_mode = OFF").fetchall()
    with (
        pytest.raises(TransactionStateError, match="roll back"),
        world.block(resource=world.resource.using(connection)),
    ):
        pass


def test_a_connection_in_a_transaction_is_refused_and_left_alone(world: LastResourceFixture) -> None:
    connection = world.connect()
    connection.execute("INSERT INTO orders (value) VALUES (x'6d')")
    with (
        pytest.raises(TransactionStateError, match="already in"),
        world.block(resource=world.resource.using(connection)),
    ):
        pass
    connection.commit()
    assert world.rows() == [b"m"]


def test_a_connection_in_autocommit_is_refused(world: LastResourceFixture) -> None:
    """Python 3.12's ``autocommit=True``; here an attribute of the same name."""

    class InAutocommit(sqlite3.Connection):
        autocommit = True

    connection = sqlite3.connect(world.path, factory=InAutocommit)
    with (
        pytest.raises(TransactionStateError, match="autocommit"),
        world.block(resource=world.resource.using(connection)),
    ):
        pass
    connection.close()


@pytest.mark.parametrize("table", ["", "a b", "a;b", "a.b.c", "1a", "x" * 60])
def test_a_table_name_that_is_none_is_refused(world: LastResourceFixture, table: str) -> None:
    with pytest.raises(ConfigError, match="table="):
        LastResource(NAME, connect=world.connect, table=table).install()


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="resource name"):
        LastResource("a b", connect=lambda: None)


def test_what_is_no_connection_is_refused(world: LastResourceFixture) -> None:
    with pytest.raises(ConfigError, match="DB-API"):
        LastResource(NAME, connect=lambda: 42).install()


def test_two_resources_in_one_block_are_refused(world: LastResourceFixture) -> None:
    from txmq.client.transaction.block import Transaction

    with pytest.raises(ConfigError, match="one last resource"):
        Transaction(world.home, world.home, (world.resource, world.resource))


# --- isolation levels and connections --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE", None])
def test_every_isolation_level_of_sqlite3_works(world: LastResourceFixture, level: str | None) -> None:
    world.options["isolation_level"] = level
    world.order(b"1")
    with pytest.raises(ZeroDivisionError), world.block() as tx:
        world.insert(tx, b"2")
        _ = 1 / 0
    world.order(b"3")
    assert world.rows() == [b"1", b"3"]
    world.check()


def test_wal_mode_works(world: LastResourceFixture) -> None:
    with world.outside() as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    world.order(b"1")
    world.check()


def test_a_connection_of_the_caller_stays_open_and_idle(world: LastResourceFixture) -> None:
    connection = world.connect()
    for number in range(2):
        with world.block(resource=world.resource.using(connection)) as tx:
            world.insert(tx, b"%d" % number)
    assert not connection.in_transaction
    assert connection.execute("SELECT COUNT(*) FROM orders").fetchone() == (2,)


def test_a_connection_whose_rollback_fails_is_not_used_again(world: LastResourceFixture) -> None:
    with pytest.raises(ZeroDivisionError), world.block() as tx:
        world.insert(tx, b"x")
        world.opened[-1].close()
        _ = 1 / 0
    assert world.order(b"next").outcome is Outcome.COMMITTED


def test_locked_database_is_drivers_error_and_nothing_is_left_behind(world: LastResourceFixture) -> None:
    world.order(b"1")
    with world.outside() as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError, match="locked"), world.block():
                pass
        other.execute("ROLLBACK")
    world.order(b"2")
    assert world.rows() == [b"1", b"2"]
    world.check()
    assert world.home.session.finished_through == 2, "the ids that were taken are done with"


# --- the body --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["", None])
@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
def test_a_body_that_ends_the_transaction_itself_is_a_heuristic(
    world: LastResourceFixture, statement: str, level: str | None
) -> None:
    world.options["isolation_level"] = level
    with pytest.raises(HeuristicError, match="by itself"), world.block() as tx:
        world.insert(tx, b"x")
        tx.connection(world.resource).execute(statement)
    assert world.rows() == ([b"x"] if statement == "COMMIT" else [])
    assert (world.home.values("orders"), world.home.requests, tx.outcome) == ([], ["rollback"], Outcome.UNKNOWN)
    ((what, reason),) = world.home.heuristics(tx.txid)
    assert (what, "by itself" in reason) == ("hazard", True)
    assert world.order(b"next").outcome is Outcome.COMMITTED


def test_ddl_is_part_of_a_transaction_where_the_database_can(world: LastResourceFixture) -> None:
    with pytest.raises(ZeroDivisionError), world.block() as tx:
        tx.connection(world.resource).execute("CREATE TABLE more (id INTEGER)")
        _ = 1 / 0
    with world.block() as tx:
        tx.connection(world.resource).execute("CREATE TABLE more (id INTEGER)")
    assert tx.outcome is Outcome.COMMITTED


def test_one_failed_statement_dooms_the_transaction(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError, match="no such table") as caught, world.block() as tx:
        world.insert(tx, b"x")
        with pytest.raises(sqlite3.OperationalError):
            tx.connection(world.resource).cursor().execute("INSERT INTO nowhere VALUES (1)")
        world.insert(tx, b"y")
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    assert not caught.value.retriable
    assert not has_circle(caught.value)
    assert (tx.outcome, world.rows(), world.home.requests) == (Outcome.ROLLED_BACK, [], [])


@pytest.mark.parametrize(
    "use",
    [
        lambda c: c.commit(),
        lambda c: c.rollback(),
        lambda c: c.close(),
        lambda c: c.executescript("SELECT 1"),
        lambda c: c.cursor().executescript("SELECT 1"),
        lambda c: c.cursor().connection,
        lambda c: c.__enter__(),
        lambda c: setattr(c, "isolation_level", None),
    ],
)
def test_the_ends_of_the_transaction_are_not_for_the_body(
    world: LastResourceFixture, use: Callable[[Any], object]
) -> None:
    with world.block() as tx:
        world.insert(tx, b"x")
        with pytest.raises(TransactionStateError):
            use(tx.connection(world.resource))
    assert world.rows() == [b"x"]
    world.check()


def test_the_connection_behaves_like_the_drivers(world: LastResourceFixture) -> None:
    with world.block() as tx:
        connection = tx.connection(world.resource)
        connection.row_factory = sqlite3.Row
        with connection.cursor() as cursor:
            assert cursor.executemany("INSERT INTO orders (value) VALUES (?)", [(b"1",), (b"2",)]) is cursor
            assert cursor.rowcount == 2
        connection.executemany("INSERT INTO orders (value) VALUES (?)", [(b"3",)])
        rows = connection.execute("SELECT value FROM orders ORDER BY id")
        assert [row["value"] for row in rows] == [b"1", b"2", b"3"]
        assert connection.execute("SELECT 1 WHERE 0").fetchone() is None
        assert connection.total_changes >= 3


@pytest.mark.parametrize("use", [lambda c, k: c.cursor(), lambda c, k: k.fetchone(), lambda c, k: list(k)])
def test_a_connection_kept_beyond_its_block_is_refused(
    world: LastResourceFixture, use: Callable[[GuardedConnection, Any], object]
) -> None:
    with world.block() as tx:
        connection = tx.connection(world.resource)
        cursor = connection.execute("SELECT 1")
    with pytest.raises(TransactionStateError, match="over"):
        use(connection, cursor)
    assert world.order(b"x").outcome is Outcome.COMMITTED


def test_connection_of_resource_that_takes_no_part_is_refused(world: LastResourceFixture) -> None:
    with world.block() as tx, pytest.raises(TransactionStateError, match="no part"):
        tx.connection(world.new_resource())


# --- dialects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "dialect"),
    [("sqlite3", SQLITE), ("MySQLdb", MYSQL), ("pymysql", MYSQL), ("mariadb", MYSQL), ("psycopg", POSTGRESQL)],
)
def test_the_dialect_is_told_by_the_driver(driver: str, dialect: object) -> None:
    assert dialect_for(ModuleType(driver), None) is dialect


def test_a_driver_nobody_knows_needs_its_dialect_named() -> None:
    driver = ModuleType("odd")
    with pytest.raises(ConfigError, match="dialect="):
        dialect_for(driver, None)
    assert dialect_for(driver, "mysql") is MYSQL
    with pytest.raises(ConfigError, match="'oracle'"):
        dialect_for(driver, "oracle")


@pytest.mark.parametrize(("style", "mark"), [("qmark", "?"), ("format", "%s"), ("pyformat", "%s")])
def test_placeholders_follow_the_driver(style: str, mark: str) -> None:
    driver = ModuleType("driver")
    driver.paramstyle = style  # type: ignore[attr-defined]
    assert placeholder_of(driver, MYSQL) == mark


def test_a_placeholder_nobody_knows_is_refused() -> None:
    driver = ModuleType("driver")
    driver.paramstyle = "numeric"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="numeric"):
        placeholder_of(driver, MYSQL)


def test_the_driver_is_found_through_a_subclass(world: LastResourceFixture) -> None:
    assert driver_of(world.connect()) is sqlite3


@pytest.mark.parametrize("name", DIALECTS)
def test_statements_leave_no_placeholder_of_another_style(name: str) -> None:
    """Statements are written with ``?``: with a format driver none may be left, and no bare ``%`` may be there."""
    said: list[str] = []

    class Cursor:
        description, rowcount = None, 1

        def execute(self, operation: str, *_: object) -> None:
            said.append(operation)

        def close(self) -> None:
            """Nothing to let go of."""

    class Recorder:
        def cursor(self) -> Cursor:
            return Cursor()

        def commit(self) -> None:
            """Nothing to keep."""

        rollback = close = commit

    table = MarkerTable("txmq_marker", DIALECTS[name], "%s")
    create_tables(Recorder(), table)
    table.insert_committed(Recorder(), "t", "u", 1)
    table.insert_rolled_back(Recorder(), "t", "u", 1)
    table.read_durably(Recorder(), "t")
    table.delete_committed(Recorder(), ["a", "b"])
    table.delete_expired_rolled_back(Recorder())
    assert len(said) >= 8
    for statement in said:
        assert "?" not in statement
        assert "%" not in statement.replace("%s", "")
