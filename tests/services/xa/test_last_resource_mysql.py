"""Last-resource transactions over a real MariaDB at a real broker, with the resolver in its thread."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import MySQLdb
import MySQLdb.connections
import MySQLdb.cursors
import pytest

import txmq
from tests.crash_points import at_moment, crash_at
from tests.services.loop_client import Connect, inside
from tests.services.xa.mysql_database import MySQLDatabase
from tests.services.xa.mysql_shop import MySQLShop
from tests.services.xa.noting import Noting, forget_key, idle, nothing_prepared, noting, sent_by_an_order
from tools.simulated.clock import SimClock
from txmq.client.transaction.background_resolver import resolver_of
from txmq.errors import ConfigError, HeuristicError, OutcomeUnknownError, RolledBackError, TransactionStateError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource
from txmq.xa.database.dialects import server_began_ms
from txmq.xa.database.installation import CHECK_EVERY_S
from txmq.xa.last_resource.branch import BEGUN_FRESH_S


@pytest.fixture
def shop(shared_broker: BrokerProcess, mariadb: MariaDB, connect: Connect) -> Iterator[MySQLShop]:
    with MySQLShop.installed(shared_broker, mariadb, connect) as shop:
        yield shop


# --- rows and messages -----------------------------------------------------------------------------------------------


def test_rows_and_messages_of_threads_agree(shop: MySQLShop) -> None:
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(shop.order, [b"%d" % number for number in range(100)]))
    assert set(outcomes) == {txmq.Outcome.COMMITTED}
    assert len(shop.rows()) == 100
    assert sorted(shop.rows()) == sorted(message or b"" for message in shop.messages())


def test_messages_of_rows_with_lock_conflicts_follow_order_of_rows(shop: MySQLShop) -> None:
    shop.execute("CREATE TABLE counter (n INT) ENGINE=InnoDB")
    shop.execute("INSERT INTO counter VALUES (0)")

    def count(_: int) -> None:
        with shop.producer.transaction(shop.resource) as tx:
            cursor = tx.connection(shop.resource).cursor()
            cursor.execute("UPDATE counter SET n = n + 1")
            cursor.execute("SELECT n FROM counter")
            shop.producer.send(shop.topic, b"%d" % cursor.fetchone()[0], key=b"k")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(80)))
    assert shop.messages() == [b"%d" % number for number in range(1, 81)]


def test_a_body_that_raises_leaves_neither_row_nor_message(shop: MySQLShop) -> None:
    with pytest.raises(ZeroDivisionError), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        _ = 1 / 0
    assert (shop.rows(), shop.messages()) == ([], [])
    assert shop.order(b"next") is txmq.Outcome.COMMITTED


@pytest.mark.parametrize("cursors", ["DictCursor", "SSCursor"])
def test_connections_with_other_cursors_and_without_unicode_work(shop: MySQLShop, cursors: str) -> None:
    shop.arguments = {"cursorclass": getattr(MySQLdb.cursors, cursors), "use_unicode": False}
    shop.resource = LastResource("shop", connect=shop.connect)
    inside(shop.client, shop.resource.install)
    assert shop.order(b"1") is txmq.Outcome.COMMITTED
    assert shop.messages() == shop.rows() == [b"1"]


def test_a_connection_of_the_caller_stays_open_and_idle(shop: MySQLShop) -> None:
    connection = shop.connect()
    for number in range(2):
        with shop.producer.transaction(shop.resource.using(connection)) as tx:
            shop.insert(tx, b"%d" % number)
    cursor = connection.cursor()
    cursor.execute(f"SELECT {shop.server.program.in_transaction}, @@autocommit")
    assert cursor.fetchone() == (0, 0)
    assert shop.messages() == shop.rows() == [b"0", b"1"]


# --- what dooms a transaction ----------------------------------------------------------------------------------------


def test_a_failed_statement_dooms_the_transaction(shop: MySQLShop) -> None:
    with pytest.raises(RolledBackError, match="Duplicate") as caught, shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        with suppress(MySQLdb.IntegrityError):
            tx.connection(shop.resource).cursor().execute("INSERT INTO orders VALUES (1, ''), (1, '')")
    assert not caught.value.retriable
    assert (shop.rows(), shop.messages()) == ([], [])


def test_a_lock_that_is_held_dooms_the_transaction(shop: MySQLShop) -> None:
    shop.order(b"1")
    holder = shop.connect()
    holder.cursor().execute("UPDATE orders SET value = 'held' WHERE id = 1")
    with pytest.raises(RolledBackError, match="1205") as caught, shop.producer.transaction(shop.resource) as tx:
        cursor = tx.connection(shop.resource).cursor()
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        shop.insert(tx, b"2")
        with suppress(MySQLdb.OperationalError):
            cursor.execute("UPDATE orders SET value = 'x' WHERE id = 1")
    assert caught.value.retriable
    holder.rollback()
    assert shop.messages() == shop.rows() == [b"1"]


@pytest.mark.parametrize("leave", [lambda c: c.execute("SELECT 1"), lambda c: c.close(), lambda c: None])
def test_later_statement_of_one_text_that_fails_unread_dooms_transaction(shop: MySQLShop, leave: Any) -> None:
    with pytest.raises(RolledBackError, match="Duplicate"), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        cursor = tx.connection(shop.resource).cursor()
        cursor.execute("INSERT INTO orders VALUES (90, ''); INSERT INTO orders VALUES (90, '')")
        with suppress(MySQLdb.IntegrityError):
            leave(cursor)
    assert (shop.rows(), shop.messages()) == ([], [])


def test_error_that_comes_out_when_cursors_block_ends_dooms_transaction(shop: MySQLShop) -> None:
    with pytest.raises(RolledBackError, match="Duplicate"), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        with suppress(MySQLdb.IntegrityError), tx.connection(shop.resource).cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (90, ''); INSERT INTO orders VALUES (90, '')")
    assert (shop.rows(), shop.messages()) == ([], [])


@pytest.mark.threads  # it notes what its own thread sends
@pytest.mark.parametrize(("has_key", "packed_trips"), [(True, [2, 2, 3, 2]), (False, [3, 3, 4, 3])])
def test_transaction_costs_two_round_trips_and_six_with_single_statements(
    shop: MySQLShop, has_key: bool, packed_trips: list[int]
) -> None:
    clock = SimClock()
    if not has_key:
        forget_key(shop)
    for is_packed, trips in ((True, packed_trips), (False, [6, 6, 6, 6])):
        resource = noting(shop, clock, multi_statements=is_packed)
        sent_by_an_order(shop)  # verifies its connection
        counts = []
        for passed_s in (BEGUN_FRESH_S / 2, BEGUN_FRESH_S / 2, 2 * BEGUN_FRESH_S, 0.0):
            clock.advance(passed_s)
            counts.append(len(sent_by_an_order(shop)))
        assert counts == trips, Noting.seen
        resource.close()
    assert len(shop.rows()) == len(shop.messages()) == 10


@pytest.mark.threads  # it notes what its own thread sends
def test_tables_are_checked_again_each_minute_also_on_begun_connections(shop: MySQLShop) -> None:
    clock = SimClock()
    noting(shop, clock)
    sent_by_an_order(shop)
    clock.advance(CHECK_EVERY_S - BEGUN_FRESH_S / 2)
    sent_by_an_order(shop)
    clock.advance(BEGUN_FRESH_S * 0.9)
    assert "BEGIN; SAVEPOINT txmq_body" in sent_by_an_order(shop)
    assert sent_by_an_order(shop)[0].startswith(b"INSERT")
    assert len(shop.rows()) == len(shop.messages()) == 4


@pytest.mark.threads  # it notes what its own thread sends
def test_idle_begun_connection_locks_nothing_and_has_no_snapshot(shop: MySQLShop) -> None:
    noting(shop, SimClock())
    sent_by_an_order(shop)
    shop.execute("INSERT INTO orders (value) VALUES ('other')")
    shop.execute("ALTER TABLE orders ADD COLUMN note INT")  # a transaction that has used the table holds it up
    Noting.seen.clear()
    with shop.producer.transaction(shop.resource) as tx:
        cursor = tx.connection(shop.resource).cursor()
        cursor.execute("SELECT value FROM orders ORDER BY id")
        assert [value for (value,) in cursor.fetchall()] == [b"a", b"other"]
    assert len(Noting.seen) == 2


@pytest.mark.threads  # it notes what its own thread sends
@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
def test_body_that_ends_transaction_begun_ahead_is_heuristic(shop: MySQLShop, statement: str) -> None:
    noting(shop, SimClock())
    sent_by_an_order(shop)
    with pytest.raises(HeuristicError, match="by itself"), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        tx.connection(shop.resource).cursor().execute(statement)
    assert shop.messages() == [b"a"]
    # On another connection: what the body has left on that one is not known.
    assert any(isinstance(query, str) and query.startswith("BEGIN") for query in sent_by_an_order(shop))


@pytest.mark.threads  # it notes what its own thread sends
def test_connection_ended_by_the_server_dooms_only_an_immediate_block(shop: MySQLShop) -> None:
    clock = SimClock()
    for passed_s in (BEGUN_FRESH_S / 2, 2 * BEGUN_FRESH_S):
        noting(shop, clock)
        sent_by_an_order(shop)
        number = idle(shop).connection.thread_id()
        shop.execute(f"KILL {number}")
        clock.advance(passed_s)
        if passed_s < BEGUN_FRESH_S:
            with pytest.raises(MySQLdb.OperationalError):
                shop.order(b"lost")
        assert shop.order(b"b") is txmq.Outcome.COMMITTED
    assert shop.rows() == shop.messages() == [b"a", b"b", b"a", b"b"]


@pytest.mark.threads  # it notes what its own thread sends
@pytest.mark.parametrize("sent", ["prepared", "packet"])
def test_connection_lost_behind_its_commit_has_committed_and_is_replaced(shop: MySQLShop, sent: str) -> None:
    noting(shop, SimClock())
    with nothing_prepared(shop, sent == "packet"):
        assert shop.order(b"1") is txmq.Outcome.COMMITTED
    number = idle(shop).connection.thread_id()
    Noting.loses.append("lost in the middle of the results")
    assert shop.order(b"2") is txmq.Outcome.COMMITTED
    assert Noting.loses == []
    assert shop.order(b"3") is txmq.Outcome.COMMITTED
    assert idle(shop).connection.thread_id() != number
    assert shop.rows() == shop.messages() == [b"1", b"2", b"3"]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "BEGIN", "CREATE TABLE u (i INT)", "TRUNCATE txmq_marker"])
def test_body_that_ends_transaction_by_itself_is_heuristic(shop: MySQLShop, statement: str, is_packed: bool) -> None:
    shop.arguments = {"multi_statements": is_packed}
    with pytest.raises(HeuristicError, match="by itself"), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        tx.connection(shop.resource).cursor().execute(statement)
    assert shop.rows() == ([] if statement == "ROLLBACK" else [b"x"])
    assert shop.messages() == []
    assert shop.order(b"next") is txmq.Outcome.COMMITTED


def test_a_killed_session_is_rolled_back(shop: MySQLShop) -> None:
    with pytest.raises(RolledBackError), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        shop.execute(f"KILL {shop.session_of(tx)}")
    assert (shop.rows(), shop.messages()) == ([], [])
    assert shop.order(b"next") is txmq.Outcome.COMMITTED


# --- the marker that goes with COMMIT --------------------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["DO 1", "SET foreign_key_checks = 0"])
@pytest.mark.parametrize("has_key", [True, False])
def test_identity_that_changes_under_open_block_lets_no_marker_in(
    shop: MySQLShop, statement: str, has_key: bool
) -> None:
    if not has_key:
        forget_key(shop)
    with pytest.raises(RolledBackError), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        tx.connection(shop.resource).cursor().execute(statement)
        shop.execute(f"UPDATE txmq_marker_identity SET uuid = '{'f' * 32}'")
    assert (shop.rows(), shop.messages(), shop.is_resolved()) == ([], [], True)


def test_body_that_switches_foreign_keys_off_commits_all_the_same(shop: MySQLShop) -> None:
    for value in (b"1", b"2"):
        with shop.producer.transaction(shop.resource) as tx:
            shop.insert(tx, value)
            tx.connection(shop.resource).cursor().execute("SET foreign_key_checks = 0")
    assert shop.rows() == shop.messages() == [b"1", b"2"]


def test_markers_that_cannot_refer_to_the_identity_are_made_without(shop: MySQLShop) -> None:
    shop.execute("DROP TABLE txmq_marker")
    shop.execute("ALTER TABLE txmq_marker_identity DROP KEY uuid")
    inside(shop.client, shop.resource.install)
    assert shop.order(b"1") is txmq.Outcome.COMMITTED
    assert "REFERENCES" not in shop.execute("SHOW CREATE TABLE txmq_marker")[0][1]
    assert shop.rows() == shop.messages() == [b"1"]


def test_marker_behind_deadline_of_databases_clock_keeps_commit_out(shop: MySQLShop) -> None:
    assert shop.order(b"1") is txmq.Outcome.COMMITTED
    with pytest.raises(RolledBackError, match="clock of 'shop'"), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"2")
        tx.connection(shop.resource).cursor().execute("SET timestamp = UNIX_TIMESTAMP() + 60")
    assert shop.rows() == shop.messages() == [b"1"]


@pytest.mark.parametrize("is_lent", [False, True])
def test_resolver_that_was_faster_keeps_marker_and_commit_out(shop: MySQLShop, is_lent: bool) -> None:
    resource = shop.resource.using(shop.connect()) if is_lent else shop.resource
    with pytest.raises(RolledBackError, match="a resolver"), shop.producer.transaction(resource) as tx:
        shop.insert(tx, b"x")
        shop.execute(f"INSERT INTO txmq_marker VALUES ('{tx.txid}', 'rolled-back', 0, 0, 0, NULL)")
    assert (shop.rows(), shop.messages()) == ([], [])
    assert shop.order(b"next") is txmq.Outcome.COMMITTED


def test_connection_lost_in_front_of_marker_is_looked_up(shop: MySQLShop) -> None:
    sessions = list[int]()

    def kill() -> None:
        shop.execute(f"KILL {sessions[0]}")

    with (
        at_moment("client.tx.prepared", kill),
        pytest.raises(RolledBackError),
        shop.producer.transaction(shop.resource) as tx,
    ):
        sessions.append(shop.session_of(tx))
        shop.insert(tx, b"x")
    assert (shop.rows(), shop.messages()) == ([], [])
    assert shop.order(b"next") is txmq.Outcome.COMMITTED


# --- what is refused -------------------------------------------------------------------------------------------------


def test_tables_that_cannot_roll_back_are_refused_unless_named(shop: MySQLShop) -> None:
    other = MySQLDatabase(shop.server)
    for database in (shop, other):
        with database.table_that_cannot_roll_back() as cache:
            shop.resource = LastResource("shop", connect=shop.connect)
            with pytest.raises(ConfigError, match=rf"{database.database}\.cache \(MyISAM\).*ignore_tables"):
                shop.order(b"x")
            for name in (cache, f"{database.database}.cache", f"{database.database}.*"):
                shop.resource = LastResource("shop", connect=shop.connect, ignore_tables=(name,))
                assert shop.order(b"x") is txmq.Outcome.COMMITTED


def test_weak_durability_is_refused(shop: MySQLShop) -> None:
    shop.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    try:
        with pytest.raises(ConfigError, match="innodb_flush_log_at_trx_commit = 2"):
            shop.order(b"x")
    finally:
        shop.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")


def test_connections_in_autocommit_or_in_a_transaction_are_refused(shop: MySQLShop) -> None:
    connection = shop.connect()
    connection.autocommit(True)
    with pytest.raises(TransactionStateError, match="autocommit"):
        shop.order(b"x", shop.resource.using(connection))
    connection.autocommit(False)
    connection.cursor().execute("SELECT * FROM orders")
    with pytest.raises(TransactionStateError, match="already in"):
        shop.order(b"x", shop.resource.using(connection))


# --- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["client.tx.prepared", "client.tx.db_commit_sent", "client.tx.db_committed"])
def test_what_dead_client_left_is_settled_by_thread_of_another(
    shop: MySQLShop, shared_broker: BrokerProcess, point: str, connect: Connect
) -> None:
    with crash_at(point), pytest.raises(SimulatedCrash):
        shop.order(b"left")
    shop.die()
    other = MySQLShop(shared_broker, shop.server, shop.database, connect)
    assert other.order(b"next") is txmq.Outcome.COMMITTED  # starts the thread; waits for the earlier one of its key
    expected = [b"next"] if point == "client.tx.prepared" else [b"left", b"next"]
    assert other.rows() == expected
    eventually(other.is_resolved, "nothing is in doubt")
    assert other.messages() == expected
    other.die()


@pytest.mark.parametrize(
    "point", ["client.tx.body_done", "client.tx.prepared", "client.tx.db_commit_sent", "client.tx.db_committed"]
)
def test_a_database_that_is_killed_meanwhile_ends_in_agreement(shop: MySQLShop, point: str) -> None:
    assert shop.order(b"1") is txmq.Outcome.COMMITTED
    with at_moment(point, shop.server.kill), suppress(RolledBackError, OutcomeUnknownError):
        shop.order(b"2", timeout=4.0)  # so long a busy machine may take to come there
    shop.server.start()
    inside(shop.client, lambda client: resolver_of(client).wake())
    eventually(shop.is_resolved, "nothing is in doubt")
    assert shop.messages() == shop.rows()
    if point != "client.tx.db_commit_sent":  # the server may have reached it, or not
        assert shop.rows() == ([b"1", b"2"] if point == "client.tx.db_committed" else [b"1"])
    assert shop.order(b"3") is txmq.Outcome.COMMITTED


def test_frozen_owners_neither_delay_others_nor_stay(shop: MySQLShop, connect: Connect) -> None:
    """Of four owners three stand still between marker and COMMIT: as many as once ended each round of a resolver."""
    began_s = server_began_ms(shop.connect()) / 1000
    eventually(lambda: time.time() > began_s, "no marker is of the second in which the server began")
    left = []
    for number, point in enumerate(["client.tx.prepared"] * 3 + ["client.tx.db_committed"]):
        owner = MySQLShop(shop.broker, shop.server, shop.database, connect)
        owner.arguments = {"multi_statements": False}  # the marker is in before prepare is answered
        inside(owner.client, owner.resource.install)
        with crash_at(point), pytest.raises(SimulatedCrash), owner.producer.transaction(owner.resource) as tx:
            owner.insert(tx, b"%d" % number)
        owner.client.close()
        left.append(owner)
    inside(shop.client, lambda client: resolver_of(client).add(shop.resource))
    eventually(lambda: shop.messages() == [b"3"], "the one that has committed is seen")
    eventually(shop.is_resolved, "nothing is in doubt")
    assert shop.rows() == [b"3"]
    for owner in left:
        owner.disconnect()
