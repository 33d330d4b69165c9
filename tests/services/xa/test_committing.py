"""What goes to a real MariaDB with COMMIT: prepared as one statement, or in a packet; and how its errors are judged."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.loop_client import Connect, inside
from tests.services.xa.mysql_shop import MySQLShop
from tests.services.xa.noting import idle, nothing_prepared, noting, sent_by_an_order
from tools.simulated.clock import SimClock
from txmq.errors import OutcomeUnknownError, RolledBackError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource

# What a marker refers to.
_LOCK = "SELECT uuid FROM txmq_marker_identity FORCE INDEX (uuid) WHERE uuid > '' FOR UPDATE"


@pytest.fixture
def shop(shared_broker: BrokerProcess, mariadb: MariaDB, connect: Connect) -> Iterator[MySQLShop]:
    with MySQLShop.installed(shared_broker, mariadb, connect) as shop:
        yield shop


def statements_of_an_order(shop: MySQLShop) -> list[str]:
    """The first words of what one more transaction has sent, but for the body's statement."""
    return [query.split("(")[0].split("_", 1)[0] for query in sent_by_an_order(shop) if isinstance(query, str)]


@pytest.mark.needs(Ability.COMPOUND_STATEMENTS)
@pytest.mark.threads  # it notes what its own thread sends
def test_connection_prepares_what_goes_with_commit_once(shop: MySQLShop) -> None:
    noting(shop, SimClock())
    sent = [statements_of_an_order(shop) for _ in range(3)]
    assert (sent[0][-2:], *sent[1:]) == (["PREPARE txmq", "EXECUTE txmq"], ["EXECUTE txmq"], ["EXECUTE txmq"])
    assert shop.rows() == shop.messages() == [b"a"] * 3


@pytest.mark.threads  # it notes what its own thread sends
def test_server_that_prepares_nothing_is_sent_packets(shop: MySQLShop) -> None:
    noting(shop, SimClock())
    with nothing_prepared(shop):
        assert statements_of_an_order(shop)[-2:] == ["PREPARE txmq", "RELEASE SAVEPOINT txmq"]
    assert statements_of_an_order(shop) == ["RELEASE SAVEPOINT txmq"]
    assert shop.rows() == shop.messages() == [b"a"] * 2


@pytest.mark.needs(Ability.COMPOUND_STATEMENTS)
@pytest.mark.threads  # it notes what its own thread sends
def test_what_the_server_has_forgotten_goes_in_a_packet(shop: MySQLShop) -> None:
    noting(shop, SimClock())
    sent_by_an_order(shop)
    name = idle(shop).compound.name
    with shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"b")
        tx.connection(shop.resource).cursor().execute(f"DEALLOCATE PREPARE {name}")
    assert statements_of_an_order(shop) == ["RELEASE SAVEPOINT txmq"]
    assert shop.rows() == shop.messages() == [b"a", b"b", b"a"]


@pytest.mark.needs(Ability.COMPOUND_STATEMENTS)
@pytest.mark.threads  # it notes what its own thread sends
def test_prepared_statement_goes_on_behind_a_changed_table(shop: MySQLShop) -> None:
    noting(shop, SimClock())
    sent_by_an_order(shop)
    shop.execute("ALTER TABLE txmq_marker ADD COLUMN note INT")
    assert statements_of_an_order(shop) == ["EXECUTE txmq"]
    shop.execute("ALTER TABLE txmq_marker DROP COLUMN note")
    assert statements_of_an_order(shop) == ["EXECUTE txmq"]
    assert shop.rows() == shop.messages() == [b"a"] * 3


@pytest.mark.parametrize("sent", ["prepared", "packet"])
@pytest.mark.parametrize(("change", "match"), [("DROP COLUMN seen", "seen"), ("RENAME TO gone", "doesn't exist")])
def test_block_whose_marker_cannot_be_written_is_rolled_back(
    shop: MySQLShop, sent: str, change: str, match: str
) -> None:
    with nothing_prepared(shop, sent == "packet"):
        shop.order(b"1")
    with pytest.raises(RolledBackError, match=match), shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"2")
        shop.execute(f"ALTER TABLE txmq_marker {change}")
    assert (shop.rows(), shop.messages()) == ([b"1"], [b"1"])


@pytest.mark.parametrize("sent", ["prepared", "packet"])
def test_marker_that_waits_too_long_for_lock_is_rolled_back(shop: MySQLShop, sent: str) -> None:
    with nothing_prepared(shop, sent == "packet"):
        shop.order(b"1")
    with pytest.raises(RolledBackError, match="Lock wait") as caught, shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"2")
        tx.connection(shop.resource).cursor().execute("SET innodb_lock_wait_timeout = 1")
        holder = shop.connect()
        holder.cursor().execute(_LOCK)
    holder.rollback()
    assert caught.value.retriable
    assert shop.order(b"3") is txmq.Outcome.COMMITTED
    assert shop.rows() == shop.messages() == [b"1", b"3"]


@pytest.mark.parametrize("sent", ["prepared", "packet"])
def test_session_killed_while_its_marker_waits_is_looked_up(shop: MySQLShop, sent: str) -> None:
    with nothing_prepared(shop, sent == "packet"):
        shop.order(b"1")
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(RolledBackError),
        shop.producer.transaction(shop.resource) as tx,
    ):
        shop.insert(tx, b"2")
        number, holder = shop.session_of(tx), shop.connect()
        holder.cursor().execute(_LOCK)
        threads.submit(kill_waiting, shop, holder, number)
    assert shop.order(b"3") is txmq.Outcome.COMMITTED
    assert shop.rows() == shop.messages() == [b"1", b"3"]


def kill_waiting(shop: MySQLShop, holder: Any, number: int) -> None:
    """End a statement that waits for a lock of the holder, and then let go of it."""
    eventually(lambda: shop.lock_waits() == 1, "the marker waits")
    shop.execute(f"KILL QUERY {number}")
    holder.rollback()


@pytest.mark.needs(Ability.COMPOUND_STATEMENTS)
def test_look_up_behind_a_locked_table_ends_with_the_block(shop: MySQLShop) -> None:
    holder = shop.connect()
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(OutcomeUnknownError),
        shop.producer.transaction(shop.resource, timeout=6) as tx,
    ):
        shop.insert(tx, b"1")
        number = shop.session_of(tx)
        holder.cursor().execute("LOCK TABLES txmq_marker READ")
        threads.submit(kill_waiting_for_a_table, shop, number)
    holder.cursor().execute("UNLOCK TABLES")
    eventually(lambda: shop.client.outcome(tx.txid) is txmq.Outcome.ROLLED_BACK, "it is rolled back")
    assert (shop.rows(), shop.messages()) == ([], [])


@pytest.mark.needs(Ability.COMPOUND_STATEMENTS)
@pytest.mark.parametrize("sent", ["prepared", "packet"])
def test_commit_that_is_refused_is_looked_up_by_its_session(shop: MySQLShop, sent: str) -> None:
    """A backup's lock keeps every COMMIT out, and a resolver's: nobody else could tell."""
    with nothing_prepared(shop, sent == "packet"):
        shop.order(b"1")
    holder, own = shop.connect(), shop.connect()
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(RolledBackError, match="interrupted"),
        shop.producer.transaction(shop.resource.using(own), timeout=60) as tx,
    ):
        shop.insert(tx, b"2")
        number = shop.session_of(tx)
        holder.cursor().execute("FLUSH TABLES WITH READ LOCK")
        threads.submit(kill_committing, shop, number)
    assert (tx.outcome, shop.rows(), shop.messages()) == (txmq.Outcome.ROLLED_BACK, [b"1"], [b"1"])
    holder.cursor().execute("UNLOCK TABLES")
    holder.close()
    assert shop.order(b"3", shop.resource.using(own)) is txmq.Outcome.COMMITTED  # it was not closed
    assert shop.rows() == shop.messages() == [b"1", b"3"]


def kill_committing(shop: MySQLShop, number: int) -> None:
    """End a COMMIT that waits."""
    state = f"SELECT state FROM information_schema.processlist WHERE id = {number}"
    eventually(lambda: "backup lock" in str(shop.execute(state)), "COMMIT waits")
    shop.execute(f"KILL QUERY {number}")


def kill_waiting_for_a_table(shop: MySQLShop, number: int) -> None:
    """End a session that waits for a table."""
    state = f"SELECT state FROM information_schema.processlist WHERE id = {number}"
    eventually(lambda: "lock" in str(shop.execute(state)), "the marker waits")
    shop.execute(f"KILL {number}")


@pytest.mark.threads  # it notes what its own thread sends
def test_two_resources_on_one_connection_have_statements_of_their_own(shop: MySQLShop) -> None:
    other = LastResource("other", connect=shop.connect, table="others")
    inside(shop.client, other.install)
    connection = shop.connect()
    for value, resource in ((b"1", shop.resource), (b"2", other), (b"3", shop.resource), (b"4", other)):
        with shop.producer.transaction(resource.using(connection)) as tx:
            tx.connection(resource).cursor().execute("INSERT INTO orders (value) VALUES (%s)", (value,))
            shop.producer.send(shop.topic, value, key=b"k")
    assert shop.rows() == shop.messages() == [b"1", b"2", b"3", b"4"]
    assert connection.thread_id()  # still open: none was looked up


def test_replicas_are_told_what_was_written_not_its_parameters(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    options = ("--binlog-format=MIXED",)
    with (
        MariaDB(tmp_path / "m", binary_log=True, options=options) as server,
        MySQLShop.installed(shared_broker, server) as shop,
    ):
        shop.execute("SET GLOBAL TRANSACTION ISOLATION LEVEL REPEATABLE READ")  # statements, not rows
        assert shop.order(b"1") is txmq.Outcome.COMMITTED
        written = f"INTO `{shop.database}`.txmq_marker "
        told = [str(event[-1]) for event in shop.execute("SHOW BINLOG EVENTS") if written in str(event[-1])]
        ((txid,),) = shop.execute("SELECT txid FROM txmq_marker")
    assert [f"VALUES ('{txid.decode() if isinstance(txid, bytes) else txid}'" in one for one in told] == [True]
    assert "?" not in told[0]
