"""Bodies that end MariaDB's transaction by themselves and then fail; and databases that end it for a reason."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import MySQLdb
import pymysql
import pytest

import txmq
from tests.services.loop_client import Connect
from txmq.errors import HeuristicHazardError, RolledBackError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource, MySQLResource
from txmq.xa.database.mysql_server import send
from txmq.xa.last_resource import branch
from txmq.xid import xid_sql

from .mysql_shop import MySQLShop
from .noting import forget_key

ENDS = ["COMMIT", "CREATE TABLE u (i INT)", "TRUNCATE txmq_marker"]


@pytest.fixture
def shop(broker: BrokerProcess, mariadb: MariaDB, connect: Connect) -> Iterator[MySQLShop]:
    with MySQLShop.installed(broker, mariadb, connect) as shop:
        yield shop


def _kept(shop: MySQLShop) -> dict[str, list[str]]:
    return {
        row["txid"]: [fact["what"] for fact in row["heuristics"]]
        for row in shop.client.transactions.list(state="heuristic")
    }


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("statement", ENDS)
def test_statement_failing_behind_it_is_a_hazard_listed_until_forgotten(
    shop: MySQLShop, broker: BrokerProcess, statement: str, is_packed: bool
) -> None:
    shop.arguments = {"multi_statements": is_packed}
    tx = shop.producer.transaction(shop.resource)
    with pytest.raises(HeuristicHazardError, match="by itself") as caught, tx:
        shop.insert(tx, b"x")
        cursor = tx.connection(shop.resource).cursor()
        cursor.execute(statement)
        with suppress(MySQLdb.IntegrityError):
            cursor.execute("INSERT INTO orders VALUES (7, ''), (7, '')")
    assert (shop.rows(), shop.messages(), tx.outcome) == ([b"x"], [], txmq.Outcome.UNKNOWN)
    assert caught.value.txid == tx.txid
    broker.kill()
    broker.start()
    assert _kept(shop) == {tx.txid: ["heuristic-hazard"]}
    assert shop.client.outcome(tx.txid) is txmq.Outcome.UNKNOWN
    assert list(shop.client.transactions.list(state="in-doubt")) == []
    shop.client.transactions.forget(tx.txid)
    assert _kept(shop) == {}
    assert shop.order(b"next") is txmq.Outcome.COMMITTED


@pytest.mark.parametrize("statement", ENDS)
def test_an_exception_behind_it_goes_on_with_a_note(shop: MySQLShop, statement: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught, shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        tx.connection(shop.resource).cursor().execute(statement)
        _ = 1 / 0
    assert any("by itself" in note for note in caught.value.__notes__)
    assert (shop.rows(), shop.messages(), tx.outcome) == ([b"x"], [], txmq.Outcome.UNKNOWN)
    assert _kept(shop) == {tx.txid: ["heuristic-hazard"]}


@pytest.mark.threads
def test_broker_that_was_down_meanwhile_keeps_the_hazard(shop: MySQLShop, broker: BrokerProcess) -> None:
    shop.order(b"1")
    with pytest.raises(ZeroDivisionError), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"2")
        txid = tx.txid
        tx.connection(shop.resource).cursor().execute("COMMIT")
        broker.kill()
        _ = 1 / 0
    assert tx.outcome is txmq.Outcome.UNKNOWN
    broker.start()
    eventually(lambda: _kept(shop) == {txid: ["heuristic-hazard"]}, "the broker keeps the hazard")
    assert shop.client.outcome(txid) is txmq.Outcome.UNKNOWN
    assert (shop.rows(), shop.messages()) == ([b"1", b"2"], [b"1"])


def _deadlock(shop: MySQLShop, tx: Any) -> None:
    """Let the block's statement be the victim: the other transaction has written more."""
    other = shop.connect()
    theirs = other.cursor()
    theirs.execute("INSERT INTO orders (value) VALUES " + ", ".join(["('many')"] * 50))
    theirs.execute("UPDATE orders SET value = 'other' WHERE id = 2")
    ours = tx.connection(shop.resource).cursor()
    ours.execute("UPDATE orders SET value = 'ours' WHERE id = 1")
    waits = threading.Thread(target=theirs.execute, args=("UPDATE orders SET value = 'other' WHERE id = 1",))
    waits.start()
    eventually(shop.lock_waits, "the other transaction waits for the lock")
    try:
        ours.execute("UPDATE orders SET value = 'ours' WHERE id = 2")
    finally:
        waits.join()
        other.rollback()


@pytest.mark.parametrize("is_caught", [True, False])
def test_a_deadlock_explains_the_savepoint_that_is_gone(shop: MySQLShop, is_caught: bool) -> None:
    for value in (b"1", b"2"):
        shop.order(value)
    expected: tuple[type[Exception], str] = (RolledBackError, "1213") if is_caught else (MySQLdb.Error, "1213")
    with pytest.raises(expected[0], match=expected[1]) as caught, shop.producer.transaction(shop.resource) as tx:
        try:
            _deadlock(shop, tx)
        except MySQLdb.Error:
            if not is_caught:
                raise
    assert getattr(caught.value, "retriable", True)
    assert (tx.outcome, _kept(shop)) == (txmq.Outcome.ROLLED_BACK, {})
    assert shop.rows() == shop.messages() == [b"1", b"2"]


def test_deadlock_on_a_connection_of_the_caller_is_explained(shop: MySQLShop) -> None:
    for value in (b"1", b"2"):
        shop.order(value)
    own = shop.connect()
    with pytest.raises(ValueError, match="wrapped"), shop.producer.transaction(shop.resource.using(own)) as tx:
        try:
            _deadlock(shop, _Plain(own))
        except MySQLdb.Error as error:
            raise ValueError("wrapped") from error
    assert (tx.outcome, _kept(shop)) == (txmq.Outcome.ROLLED_BACK, {})


class _Plain:
    """A connection that the guard does not see."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def connection(self, _resource: object) -> Any:
        """As ``tx.connection``."""
        return self._connection


@pytest.mark.threads
def test_lock_that_was_waited_for_in_vain_leaves_savepoint(shop: MySQLShop) -> None:
    shop.order(b"1")
    holder = shop.connect()
    holder.cursor().execute("UPDATE orders SET value = 'held' WHERE id = 1")
    with pytest.raises(RolledBackError, match="1205"), shop.producer.transaction(shop.resource) as tx:
        cursor = tx.connection(shop.resource).cursor()
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        with suppress(MySQLdb.Error):
            cursor.execute("UPDATE orders SET value = 'x' WHERE id = 1")
    holder.rollback()
    assert (tx.outcome, _kept(shop)) == (txmq.Outcome.ROLLED_BACK, {})


@pytest.mark.threads
def test_behind_it_such_lock_explains_nothing_where_server_keeps_transaction(shop: MySQLShop) -> None:
    shop.order(b"1")
    holder = shop.connect()
    with pytest.raises(HeuristicHazardError), shop.producer.transaction(shop.resource) as tx:
        cursor = tx.connection(shop.resource).cursor()
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        shop.insert(tx, b"2")
        cursor.execute("COMMIT")
        holder.cursor().execute("UPDATE orders SET value = 'held' WHERE id = 1")
        with suppress(MySQLdb.Error):
            cursor.execute("UPDATE orders SET value = 'x' WHERE id = 1")
    holder.rollback()
    assert (shop.rows(), shop.messages()) == ([b"1", b"2"], [b"1"])
    assert _kept(shop) == {tx.txid: ["heuristic-hazard"]}


class _ConnectorError(pymysql.err.Error):  # type: ignore[misc]  # without types
    """As MariaDB's connector says it: a text, with the number beside it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error.args[1])
        self.errno = error.args[0]


class _ConnectorCursor(pymysql.cursors.Cursor):  # type: ignore[misc]  # the same
    """A cursor whose errors are those of MariaDB's connector."""

    def execute(self, query: str, args: Any = None) -> int:
        try:
            return int(super().execute(query, args))
        except pymysql.err.MySQLError as error:
            raise _ConnectorError(error) from error


@pytest.mark.parametrize("fails", [True, False])
def test_driver_whose_errors_begin_with_text_tells_hazard(shop: MySQLShop, mariadb: MariaDB, fails: bool) -> None:
    where = {"host": "127.0.0.1", "port": mariadb.port, "user": "root", "database": shop.database}
    with closing(pymysql.connect(cursorclass=_ConnectorCursor, **where)) as own:
        expected = ZeroDivisionError if fails else HeuristicHazardError
        with pytest.raises(expected), shop.producer.transaction(shop.resource.using(own)) as tx:
            cursor = tx.connection(shop.resource).cursor()
            cursor.execute("INSERT INTO orders (value) VALUES ('x')")
            shop.producer.send(shop.topic, b"x", key=b"k")
            cursor.execute("COMMIT")
            if fails:
                _ = 1 / 0
    assert (shop.rows(), shop.messages(), tx.outcome) == ([b"x"], [], txmq.Outcome.UNKNOWN)
    assert _kept(shop) == {tx.txid: ["heuristic-hazard"]}


# --- branches --------------------------------------------------------------------------------------------------------


def _end_by_hand(tx: Any, connection: Any, *verbs: str) -> None:
    xid = xid_sql(tx._ending._branches[0].xid)
    for verb in verbs:
        name, _, rest = verb.partition(" ")
        connection.cursor().execute(f"XA {name} {xid} {rest}")


@pytest.mark.threads
@pytest.mark.parametrize("fails", [True, False])
def test_branch_that_body_has_committed_by_hand_is_hazard(shop: MySQLShop, fails: bool) -> None:
    resource = MySQLResource("shop", connect=shop.connect)
    expected = ZeroDivisionError if fails else HeuristicHazardError
    with pytest.raises(expected) as caught, shop.producer.transaction(resource) as tx:
        connection = tx.connection(resource)
        connection.cursor().execute("INSERT INTO orders (value) VALUES ('x')")
        tx.send(shop.topic, b"x", key=b"k")
        _end_by_hand(tx, connection, "END", "COMMIT ONE PHASE")
        if fails:
            _ = 1 / 0
    assert "by itself" in str([caught.value, *getattr(caught.value, "__notes__", [])])
    assert (shop.rows(), shop.messages(), tx.outcome) == ([b"x"], [], txmq.Outcome.UNKNOWN)
    assert _kept(shop) == {tx.txid: ["heuristic-hazard"]}
    assert shop.client.outcome(tx.txid) is txmq.Outcome.UNKNOWN


@pytest.mark.threads
def test_branch_that_body_has_only_ended_is_rolled_back(shop: MySQLShop) -> None:
    resource = MySQLResource("shop", connect=shop.connect)
    with pytest.raises(RolledBackError, match="1399") as caught, shop.producer.transaction(resource) as tx:
        connection = tx.connection(resource)
        connection.cursor().execute("INSERT INTO orders (value) VALUES ('x')")
        tx.send(shop.topic, b"x", key=b"k")
        _end_by_hand(tx, connection, "END")
    assert (shop.rows(), shop.messages(), tx.outcome) == ([], [], txmq.Outcome.ROLLED_BACK)
    assert (_kept(shop), caught.value.retriable) == ({}, False)


def test_ddl_in_branch_is_refused_by_server_and_dooms_it(shop: MySQLShop) -> None:
    resource = MySQLResource("shop", connect=shop.connect)
    with pytest.raises(RolledBackError, match="1399"), shop.producer.transaction(resource) as tx:
        cursor = tx.connection(resource).cursor()
        cursor.execute("INSERT INTO orders (value) VALUES ('x')")
        tx.send(shop.topic, b"x", key=b"k")
        with suppress(MySQLdb.Error):
            cursor.execute("CREATE TABLE more (i INT)")
    assert (shop.rows(), shop.messages(), tx.outcome) == ([], [], txmq.Outcome.ROLLED_BACK)
    assert _kept(shop) == {}


# --- savepoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LastResource, MySQLResource])
@pytest.mark.parametrize("is_packed", [True, False])
def test_duplicate_in_a_savepoint_undoes_only_its_rows_and_messages(
    shop: MySQLShop, kind: Any, is_packed: bool
) -> None:
    shop.arguments = {"multi_statements": is_packed}
    resource = kind("shop", connect=shop.connect)
    with shop.producer.transaction(resource) as tx:
        cursor = tx.connection(resource).cursor()
        cursor.execute("INSERT INTO orders VALUES (1, 'before')")
        tx.send(shop.topic, b"before", key=b"k")
        with pytest.raises(MySQLdb.IntegrityError), tx.savepoint(resource):
            cursor.execute("INSERT INTO orders VALUES (2, 'undone')")
            tx.send(shop.topic, b"undone", key=b"k")
            cursor.execute("INSERT INTO orders VALUES (1, 'again')")
        with tx.savepoint(resource), suppress(MySQLdb.IntegrityError):
            cursor.execute("INSERT INTO orders VALUES (3, 'behind')")
            tx.send(shop.topic, b"behind", key=b"k")
            cursor.execute("INSERT INTO orders VALUES (1, 'again')")
    assert tx.outcome is txmq.Outcome.COMMITTED
    assert shop.rows() == shop.messages() == [b"before", b"behind"]


def test_a_deadlock_in_a_savepoint_dooms_the_block(shop: MySQLShop) -> None:
    for value in (b"1", b"2"):
        shop.order(value)
    tx = shop.producer.transaction(shop.resource)
    with (
        pytest.raises(RolledBackError, match="1213") as caught,
        tx,
        suppress(MySQLdb.Error),
        tx.savepoint(shop.resource),
    ):
        _deadlock(shop, tx)
    assert caught.value.retriable
    assert (tx.outcome, _kept(shop)) == (txmq.Outcome.ROLLED_BACK, {})
    assert shop.rows() == shop.messages() == [b"1", b"2"]


@pytest.mark.threads  # a thread of its own has the connection of a task, which is not interrupted
@pytest.mark.parametrize("ended", [False, True])
def test_interrupt_behind_our_release_is_no_end_by_body(
    shop: MySQLShop, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    def interrupted(connection: Any, statements: Sequence[str], *, in_one_packet: bool) -> Any:
        if statements[0].startswith("RELEASE"):
            with suppress(MySQLdb.Error):
                connection.query("; ".join(statements))
            raise KeyboardInterrupt
        return send(connection, statements, in_one_packet=in_one_packet)

    forget_key(shop)  # so that the marker goes in with the release, before COMMIT
    resource = LastResource("shop", connect=shop.connect)
    tx = shop.producer.transaction(resource)
    with pytest.raises(KeyboardInterrupt), tx:
        tx.connection(resource).cursor().execute("INSERT INTO orders (value) VALUES ('x')")
        shop.producer.send(shop.topic, b"x", key=b"k")
        if ended:
            tx.connection(resource).cursor().execute("COMMIT")
        monkeypatch.setattr(branch, "send", interrupted)
    assert tx.outcome is (txmq.Outcome.UNKNOWN if ended else txmq.Outcome.ROLLED_BACK)
    assert (shop.rows(), shop.messages()) == ([b"x"] if ended else [], [])
    assert list(_kept(shop)) == ([tx.txid] if ended else [])


def test_what_a_body_locked_behind_its_end_is_let_go(shop: MySQLShop) -> None:
    tx = shop.producer.transaction(shop.resource)
    with pytest.raises(HeuristicHazardError, match="by itself"), tx:
        shop.insert(tx, b"x")
        tx.connection(shop.resource).cursor().execute("LOCK TABLES orders WRITE")
    # A connection that is closed gives its locks up a moment later.
    with closing(shop.connect(autocommit=True)) as connection:
        connection.query("SET SESSION lock_wait_timeout = 60")
        connection.query("INSERT INTO orders (value) VALUES ('y')")
    assert shop.order(b"z") is txmq.Outcome.COMMITTED
    assert shop.rows() == [b"x", b"y", b"z"]
