"""What ``MySQLResource`` refuses before a branch begins, and how it treats connections, threads and forks."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import MySQLdb
import pytest

from txmq.errors import ConfigError, TransactionStateError
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import MySQLResource
from txmq.xa.database.resource import IDLE_MAX
from txmq.xa.two_phase.resource_ports import UsedXAConnection

from .mysql_orders import CLUSTER, NAME, MySQLOrders, new_txid

# --- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def variable(orders: MySQLOrders) -> Iterator[Callable[[str, object], None]]:
    """Set a global variable, until the end of the test."""
    before: dict[str, object] = {}

    def put(name: str, value: object) -> None:
        before.setdefault(name, orders.execute(f"SELECT @@GLOBAL.{name}")[0][0])
        orders.execute(f"SET GLOBAL {name} = {value}")

    yield put
    for name, value in before.items():
        orders.execute(f"SET GLOBAL {name} = {value}")


@pytest.mark.parametrize("level", [0, 2])
def test_weak_durability_is_refused_unless_asked_for_by_name(
    orders: MySQLOrders, variable: Callable[[str, object], None], level: int
) -> None:
    variable("innodb_flush_log_at_trx_commit", level)
    with pytest.raises(ConfigError, match=f"innodb_flush_log_at_trx_commit = {level}.*allow_weak_durability"):
        orders.enlist()
    lax = orders.new_resource(allow_weak_durability=True)
    assert lax.enlist(CLUSTER, new_txid(), 30.0).roll_back(prepared=False)


def test_a_binary_log_is_warned_of_and_must_be_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MariaDB(tmp_path / "m", binary_log=True) as server:
        orders = MySQLOrders(server)
        assert orders.prepared(1).commit()
        assert orders.prepared(2).commit()
        assert caplog.text.count("binary log is on") == 1
        server.execute("SET GLOBAL sync_binlog = 0")
        with pytest.raises(ConfigError, match="sync_binlog = 0"):
            orders.new_resource().enlist(CLUSTER, new_txid(), 30.0)


@pytest.mark.parametrize("engine", ["MyISAM", pytest.param("Aria", marks=pytest.mark.needs(Ability.ARIA)), "MEMORY"])
def test_tables_that_cannot_roll_back_are_refused_unless_named(orders: MySQLOrders, engine: str) -> None:
    with orders.table_that_cannot_roll_back(engine=engine):
        with pytest.raises(ConfigError, match=rf"{orders.database}.cache \({engine}\).*ignore_tables"):
            orders.enlist()
        for name in ("cache", f"{orders.database}.cache"):
            branch = orders.new_resource(ignore_tables=[name]).enlist(CLUSTER, new_txid(), 30.0)
            assert branch.roll_back(prepared=False)
    with pytest.raises(ConfigError, match="ignore_tables"):
        orders.new_resource(ignore_tables="cache")


def test_views_and_temporary_tables_are_not_refused(orders: MySQLOrders) -> None:
    orders.execute("CREATE VIEW v AS SELECT * FROM orders")
    if Ability.SEQUENCES in orders.server.program.abilities:
        orders.execute("CREATE SEQUENCE s")
    branch = orders.enlist()
    assert branch.roll_back(prepared=False)


def test_a_table_that_comes_later_is_found_within_a_minute(orders: MySQLOrders) -> None:
    assert orders.prepared(1).commit()
    session = orders.resource._pool.take()
    assert session is not None
    assert len(orders.resource._pool) == 0
    orders.resource._pool.give_back(session)
    session.checked -= 61.0
    with orders.table_that_cannot_roll_back(), pytest.raises(ConfigError, match="cache"):
        orders.enlist()


def test_a_missing_privilege_is_named_before_the_first_branch(orders: MySQLOrders) -> None:
    orders.execute("CREATE USER IF NOT EXISTS poor IDENTIFIED BY 'x'")
    orders.let_recover("poor")
    resource = MySQLResource(NAME, connect=lambda: orders.connect(user="poor", passwd="x"))
    granted = ["SELECT", "INSERT", "UPDATE", "DELETE"]
    orders.execute(f"GRANT SELECT ON {orders.database}.* TO poor")
    with pytest.raises(ConfigError, match=r"(?s)cannot be bound.*UPDATE command denied"):
        resource.enlist(CLUSTER, new_txid(), 30.0)
    assert orders.enlist().roll_back(prepared=False)  # binds the cluster
    for privilege in granted[1:]:
        with pytest.raises(ConfigError, match=f"(?s)GRANT SELECT, INSERT.*{privilege} command denied"):
            resource.enlist(CLUSTER, new_txid(), 30.0)
        orders.execute(f"GRANT {privilege} ON {orders.database}.* TO poor")
    assert resource.enlist(CLUSTER, new_txid(), 30.0).roll_back(prepared=False)


def test_install_of_what_is_there_needs_no_privilege_to_create(orders: MySQLOrders) -> None:
    orders.execute("CREATE USER IF NOT EXISTS poor IDENTIFIED BY 'x'")
    orders.execute(f"GRANT SELECT ON {orders.database}.* TO poor")
    resource = MySQLResource(NAME, connect=lambda: orders.connect(user="poor", passwd="x"))
    resource.install()
    assert resource.uuid == orders.resource.uuid


def test_install_without_the_privilege_tells_what_to_run(orders: MySQLOrders) -> None:
    orders.execute("CREATE USER IF NOT EXISTS poor IDENTIFIED BY 'x'")
    orders.execute(f"GRANT SELECT, INSERT ON {orders.database}.* TO poor")
    orders.execute("DROP TABLE txmq_marker, txmq_marker_identity, txmq_marker_token")
    resource = MySQLResource(NAME, connect=lambda: orders.connect(user="poor", passwd="x"))
    with pytest.raises(ConfigError, match=r"(?s)cannot be created.*CREATE command denied") as refused:
        resource.install()
    told = str(refused.value).partition("as one who may: ")[2].partition("; and install() again")[0]
    for statement in told.split("; "):
        orders.execute(statement)
    resource.install()


# --- the database ----------------------------------------------------------------------------------------------------


def test_install_is_idempotent_and_waits_for_no_transaction_in_doubt(orders: MySQLOrders) -> None:
    uuid = orders.resource.uuid
    branch = orders.prepared(1)
    orders.end_session(branch)
    other = orders.new_resource()
    other.install()
    assert other.uuid == uuid


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("name", "someone-else", "installed as 'someone-else'"),
        ("cluster", "00000000000000c2", "belongs to cluster 00000000000000c2"),
        ("uuid", "f" * 32, "another database answers"),
        ("uuid", "", "another database answers"),
    ],
)
def test_a_database_of_somebody_else_is_refused(orders: MySQLOrders, column: str, value: str, words: str) -> None:
    orders.execute(f"UPDATE txmq_marker_identity SET {column} = '{value}'")
    with pytest.raises(ConfigError, match=words):
        orders.enlist()


def test_an_identity_that_is_none_is_refused(orders: MySQLOrders) -> None:
    orders.execute("UPDATE txmq_marker_identity SET uuid = 'x'")
    with pytest.raises(ConfigError, match="damaged"):
        orders.new_resource().enlist(CLUSTER, new_txid(), 30.0)


def test_the_first_branch_binds_the_cluster(orders: MySQLOrders) -> None:
    assert orders.execute("SELECT cluster FROM txmq_marker_identity") == [("",)]
    assert orders.enlist().roll_back(prepared=False)
    assert orders.execute("SELECT cluster FROM txmq_marker_identity") == [(CLUSTER,)]


def test_a_database_that_is_not_installed_is_refused(orders: MySQLOrders) -> None:
    orders.execute("DROP TABLE txmq_marker, txmq_marker_identity")
    with pytest.raises(ConfigError, match=r"call install\(\)"):
        orders.enlist()


def test_marker_tables_may_stand_in_a_schema_of_their_own(orders: MySQLOrders) -> None:
    orders.execute(f"CREATE DATABASE {orders.database}_m")
    resource = orders.new_resource(table=f"{orders.database}_m.marks")
    resource.install()
    branch = resource.enlist(CLUSTER, new_txid(), 30.0)
    branch.end_body()
    branch.prepare()
    assert branch.commit()
    assert orders.execute(f"SELECT outcome FROM {orders.database}_m.marks") == [("committed",)]


# --- connections -----------------------------------------------------------------------------------------------------


def test_a_connection_in_autocommit_is_refused(orders: MySQLOrders) -> None:
    with pytest.raises(TransactionStateError, match="autocommit"):
        orders.enlist(connection=orders.connect(autocommit=True))
    with pytest.raises(TransactionStateError, match="autocommit"):
        MySQLResource(NAME, connect=lambda: orders.connect(autocommit=True)).enlist(CLUSTER, new_txid(), 30.0)


@pytest.mark.parametrize(
    "begin", ["INSERT INTO orders VALUES (1, '')", "BEGIN", "SELECT * FROM orders", "XA START 'x'"]
)
def test_a_connection_in_a_transaction_is_refused_and_left_alone(orders: MySQLOrders, begin: str) -> None:
    connection = orders.connect()
    connection.cursor().execute(begin)
    with pytest.raises(TransactionStateError, match="already in"):
        orders.enlist(connection=connection)
    if begin.startswith("INSERT"):
        connection.commit()
        assert orders.rows() == [1]


def test_a_connection_of_the_caller_comes_back_clean(orders: MySQLOrders) -> None:
    connection = orders.connect()
    names = f"@@autocommit, @@{orders.server.program.isolation}, @@innodb_lock_wait_timeout, @@sql_mode"
    settings = f"SELECT {names}, DATABASE()"
    cursor = connection.cursor()
    cursor.execute(settings)
    before = cursor.fetchone()
    assert orders.prepared(1, connection).commit()
    assert orders.prepared(2, connection).roll_back(prepared=True)
    doomed = orders.enlist(connection=connection)
    with pytest.raises(MySQLdb.ProgrammingError):
        doomed.connection.cursor().execute("SELECT FROM")
    assert doomed.roll_back(prepared=False)
    cursor.execute(settings)
    assert cursor.fetchone() == before
    cursor.execute(f"SELECT {orders.server.program.in_transaction}")
    assert cursor.fetchone() == (0,)
    cursor.execute("INSERT INTO orders VALUES (3, '')")
    connection.rollback()
    assert orders.rows() == [1]
    assert len(orders.resource._pool) == 0


def test_using_pairs_the_resource_with_the_callers_connection(orders: MySQLOrders) -> None:
    connection = orders.connect()
    assert orders.resource.using(connection) == UsedXAConnection(orders.resource, connection)


def test_connection_without_multi_statements_works(orders: MySQLOrders) -> None:
    connection = orders.connect(multi_statements=False)
    assert orders.prepared(1, connection).commit()
    assert orders.prepared(2, connection).roll_back(prepared=True)
    assert orders.rows() == [1]


@pytest.mark.parametrize(
    "arguments",
    [{"charset": "latin1"}, {"use_unicode": False}, {"cursorclass": "SSCursor"}, {"cursorclass": "DictCursor"}],
)
def test_every_kind_of_connection_works(orders: MySQLOrders, arguments: dict[str, Any]) -> None:
    import MySQLdb.cursors

    if "cursorclass" in arguments:
        arguments = {"cursorclass": getattr(MySQLdb.cursors, arguments["cursorclass"])}
    resource = MySQLResource(NAME, connect=lambda: orders.connect(**arguments))
    resource.install()
    branch = resource.enlist(CLUSTER, new_txid(), 30.0)
    orders.insert(branch, 1)
    branch.end_body()
    branch.prepare()
    orders.end_session(branch)
    recovery = resource.open_recovery(CLUSTER)
    (listed,) = recovery.prepared()
    assert recovery.commit(listed.xid).value == "done"
    assert recovery.marker_outcome(str(listed.txid)) == "committed"
    assert orders.rows() == [1]


def test_a_connection_of_another_driver_is_refused(orders: MySQLOrders) -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(ConfigError, match=r"MySQLdb \(pip install 'mysqlclient>=2.2'\)"):
        MySQLResource(NAME, connect=lambda: connection).install()
    with pytest.raises(ConfigError, match="LastResource takes any driver"):
        orders.enlist(connection=sqlite3.connect(":memory:"))


def test_a_missing_driver_is_named_when_a_resource_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "MySQLdb", None)
    with pytest.raises(ConfigError, match=r"pip install 'mysqlclient>=2\.2'"):
        MySQLResource(NAME, connect=lambda: None)


def test_a_txid_that_is_none_is_refused(orders: MySQLOrders) -> None:
    with pytest.raises(ValueError, match="not a transaction id"):
        orders.enlist(txid="x'; DROP TABLE orders")


def test_one_resource_takes_part_once(orders: MySQLOrders) -> None:
    txid = new_txid()
    first = orders.enlist(txid=txid)
    second = orders.enlist(txid=txid)
    assert first.xid != second.xid
    first.end_body()
    assert first.roll_back(prepared=False)
    assert second.roll_back(prepared=False)


# --- without marker --------------------------------------------------------------------------------------------------


def test_unwritten_branch_without_marker_has_ended_when_prepared(orders: MySQLOrders) -> None:
    orders.resource = orders.new_resource(marker=False)
    branch = orders.enlist()
    branch.connection.cursor().execute("SELECT * FROM orders FOR UPDATE")
    branch.end_body()
    branch.prepare()
    assert branch.details()["wrote"] is False
    assert branch.details()["marker"] is False
    assert orders.listed() == []
    assert branch.commit()
    assert branch.roll_back(prepared=True)


@pytest.mark.parametrize(
    "statement", ["INSERT INTO orders VALUES (2, '')", "UPDATE orders SET value = 'y'", "DELETE FROM orders"]
)
def test_without_marker_a_branch_that_wrote_is_told(orders: MySQLOrders, statement: str) -> None:
    orders.execute("INSERT INTO orders VALUES (1, 'x')")
    orders.resource = orders.new_resource(marker=False)
    branch = orders.enlist()
    branch.connection.cursor().execute(statement)
    branch.end_body()
    assert branch.details()["wrote"] is True
    branch.prepare()
    assert len(orders.listed()) == 1
    assert branch.commit()
    assert orders.markers() == {}


# --- threads and processes -------------------------------------------------------------------------------------------


def test_threads_share_the_resource_and_its_connections(orders: MySQLOrders) -> None:
    orders.opened.clear()

    def order(number: int) -> bool:
        return orders.prepared(number).commit()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(order, range(200)))
    assert orders.rows() == list(range(200))
    assert len(orders.opened) <= 8
    assert len(orders.markers()) == 200
    orders.resource.close()
    assert len(orders.resource._pool) == 0


def test_idle_connections_are_bounded(orders: MySQLOrders) -> None:
    branches = [orders.enlist() for _ in range(IDLE_MAX + 2)]
    assert all(branch.roll_back(prepared=False) for branch in branches)
    assert len(orders.resource._pool) == IDLE_MAX


def test_a_forked_child_has_connections_of_its_own(orders: MySQLOrders) -> None:
    assert orders.prepared(1).commit()
    open_branch = orders.enlist()
    orders.insert(open_branch, 2)
    txid = new_txid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            branch = orders.enlist(txid=txid)
            orders.insert(branch, 3)
            branch.end_body()
            branch.prepare()
            status = 0 if branch.commit() else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    open_branch.end_body()
    open_branch.prepare()
    assert open_branch.commit()
    assert orders.prepared(4).commit()
    assert orders.rows() == [1, 2, 3, 4]


def test_forked_child_dropping_everything_keeps_its_parents_sessions(orders: MySQLOrders) -> None:
    assert orders.prepared(1).commit()
    assert orders.recovery().prepared() == []
    open_branch, idle = orders.enlist(), orders.enlist()
    assert idle.roll_back(prepared=False)
    orders.insert(open_branch, 2)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for connection in orders.opened:  # as an interpreter does that ends in order
                with suppress(MySQLdb.Error):
                    connection.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    open_branch.end_body()
    open_branch.prepare()
    assert open_branch.commit()
    number = idle.details()["connection"]
    assert orders.execute(f"SELECT 1 FROM information_schema.processlist WHERE id = {number}") == [(1,)]
    assert orders.rows() == [1, 2]
