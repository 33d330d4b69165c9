"""A last resource whose blocks use its outbox always: they ask no broker for anything; all arrives, once, in order."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Thread

import psycopg
import pytest

import txmq
from tests.crash_points import crash_at, hooked
from tests.services.loop_client import Connect, inside
from tests.services.transaction.test_outbox import EVER_MS, PATIENT_S, Shop
from tests.services.xa.mysql_orders import NAME, MySQLOrders
from txmq import Outcome, RolledBackError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, free_port
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.last_resource import pump, turns
from txmq.xa.last_resource.branch import Branch
from txmq.xa.last_resource.outbox import OutboxOptions
from txmq.xa.last_resource.pump import Pump
from txmq.xa.resolver import Resolver

ALWAYS = OutboxOptions(when="always", away_after_ms=2000)
AWAY = OutboxOptions(away_after_ms=200)
NEVER_S = 1000.0


@pytest.fixture
def sqlite_shop(broker: BrokerProcess, tmp_path: Path, connect: Connect) -> Iterator[Shop]:
    def database() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "shop.db", timeout=30.0, check_same_thread=False)

    with closing(database()) as connection:
        connection.execute("CREATE TABLE sold (pieces INTEGER)")
        connection.execute("INSERT INTO sold VALUES (0)")
        connection.commit()
    made = Shop(broker, database, "shop", connect, ALWAYS)
    yield made
    made.close()


@pytest.fixture
def mysql_shop(broker: BrokerProcess, mariadb: MariaDB, connect: Connect) -> Iterator[Shop]:
    orders = MySQLOrders(mariadb)
    orders.execute("CREATE TABLE sold (pieces INTEGER) ENGINE=InnoDB")
    orders.execute("INSERT INTO sold VALUES (0)")
    made = Shop(broker, orders.connect, NAME, connect, ALWAYS)
    yield made
    made.close()


@pytest.fixture
def postgresql_shop(broker: BrokerProcess, postgresql: PostgreSQL, connect: Connect) -> Iterator[Shop]:
    with psycopg.connect(postgresql.conninfo(), autocommit=True) as connection:
        for statement in (
            "DROP SCHEMA public CASCADE", "CREATE SCHEMA public",
            "CREATE TABLE sold (pieces INTEGER)", "INSERT INTO sold VALUES (0)",
        ):  # fmt: skip
            connection.execute(statement)
    made = Shop(broker, lambda: psycopg.connect(postgresql.conninfo()), "shop", connect, ALWAYS)
    yield made
    made.close()


_MYSQL = pytest.param("mysql_shop", marks=pytest.mark.threads)  # to be quick, as the next one


@pytest.fixture(params=["sqlite_shop", _MYSQL, pytest.param("postgresql_shop", marks=pytest.mark.threads)])
def any_shop(request: pytest.FixtureRequest, connect: Connect) -> Shop:
    found: Shop = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["sqlite_shop", _MYSQL])
def shop(request: pytest.FixtureRequest, connect: Connect) -> Shop:
    found: Shop = request.getfixturevalue(request.param)
    return found


def test_block_asks_no_broker_and_its_messages_follow(any_shop: Shop) -> None:
    shop = any_shop
    points: list[str] = []
    with hooked(points.append):
        taken = [shop.order() for _ in range(5)]
    assert not {"client.tx.prepare_sent", "client.tx.commit_sent"} & set(points)
    assert [tx.pending for tx in taken] == [("broker",)] * 5
    assert all(result.offset is None for tx in taken for result in tx.results)
    for _ in range(2):  # who asks again is told again
        taken[-1].wait_visible(PATIENT_S)
    assert (taken[-1].pending, shop.values()) == ((), [1, 2, 3, 4, 5, 6])
    shop.check()
    assert shop.outcomes() == ["enclosed"] * 6
    assert shop.client.outcome(taken[0].txid) is Outcome.COMMITTED


def test_orders_are_taken_while_the_broker_is_dead(any_shop: Shop) -> None:
    shop = any_shop
    shop.check()
    shop.broker.kill()
    for _ in range(5):
        shop.order()
    assert shop.waiting() == 5
    shop.broker.start()
    shop.order().wait_visible(PATIENT_S)
    shop.check()


def test_service_that_never_reached_its_broker_takes_orders(shop: Shop) -> None:
    shop.check()
    away = shop.process(f"txmq://127.0.0.1:{free_port()}")
    for _ in range(3):
        assert shop.order(away).pending == ("broker",)
    shop.order()
    shop.check()


def test_messages_keep_their_order_over_processes_and_modes(any_shop: Shop) -> None:
    """One uses the outbox always, one while the broker is away, one has never reached it; all change one row."""
    shop = any_shop
    processes = [(shop.client, shop.resource), shop.process(), shop.process(options=AWAY)]
    processes.append(shop.process(f"txmq://127.0.0.1:{free_port()}"))
    failed: list[BaseException] = []

    def take(process: int) -> None:
        try:
            for _ in range(25):
                shop.order(processes[process])
        except BaseException as error:  # noqa: BLE001  told below
            failed.append(error)

    threads = [Thread(target=take, args=(number,)) for number in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    shop.check()
    assert len(shop.values()) == 101


@pytest.mark.threads  # the block's clock is turned from outside
def test_block_behind_its_deadline_is_rolled_back(any_shop: Shop) -> None:
    shop = any_shop
    shop.check()
    tx = shop.client.producer().transaction(shop.resource, timeout=0.5)
    tx.__enter__()
    assert tx._broker is not None
    tx._broker.deadline += PATIENT_S  # this process's clock stands still
    tx.connection(shop.resource).cursor().execute("UPDATE sold SET pieces = pieces + 1")
    tx.send("orders", b"2", key=b"k")
    shop.client.clock.sleep(0.6)
    with pytest.raises(RolledBackError):
        tx.__exit__(None, None, None)
    shop.check()


def test_block_that_acknowledges_waits_for_earlier_messages(mysql_shop: Shop) -> None:
    """What it prepares comes behind them: were it prepared before, it would keep them from being placed."""
    shop = mysql_shop
    shop.check()
    shop.client.producer().send("elsewhere", b"request")
    with shop.client.consumer("g", ["elsewhere"], start="earliest") as consumer:
        (message,) = consumer.poll(max_records=1, timeout=PATIENT_S)
        shop.hold(500)
        shop.order()
        with shop.block() as tx:
            cursor = tx.connection(shop.resource).cursor()
            cursor.execute("UPDATE sold SET pieces = pieces + 1")
            tx.send("orders", b"3", key=b"k")
            tx.ack(message)
        assert tx.results[0].offset == 2
    shop.check()


def test_block_that_cannot_wait_is_refused_where_nobody_can_drain(
    sqlite_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has SQLite's one lock; and elsewhere, if what is ahead of it stays."""
    monkeypatch.setattr(turns, "LEASE_MS", 2 * EVER_MS)  # as ``hold`` takes it
    shop = sqlite_shop
    shop.check()
    shop.client.producer().send("elsewhere", b"request")
    with shop.client.consumer("g", ["elsewhere"], start="earliest") as consumer:
        (message,) = consumer.poll(max_records=1, timeout=PATIENT_S)
        shop.hold()
        shop.order()
        tx = shop.block()
        tx.__enter__()
        tx.send("orders", b"3", key=b"k")
        tx.ack(message)
        with pytest.raises(RolledBackError, match="run it again") as refused:
            tx.__exit__(None, None, None)
        assert refused.value.retriable
        with shop.block() as tx:  # other keys do not wait
            tx.send("orders", b"0", key=b"other", partition=0)
            tx.ack(message)
    shop.hold(-1)
    eventually(lambda: not shop.waiting(), "the outbox is empty")


@pytest.mark.parametrize("point", ["client.outbox.filled", "client.tx.db_committed"])
def test_owner_that_dies_leaves_rows_and_messages_or_neither(any_shop: Shop, point: str) -> None:
    shop = any_shop
    shop.check()
    owner = shop.process()
    with crash_at(point), pytest.raises(SimulatedCrash):
        shop.order(owner)
    shop.end(owner)
    shop.order()
    shop.check()
    assert len(shop.values()) == (2 if point == "client.outbox.filled" else 3)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("sqlite_shop", "sent"),
        *(
            pytest.param(name, point, marks=pytest.mark.threads)  # to be quick
            for name, point in (
                *(("sqlite_shop", point) for point in ("numbered", "answered", "deleted")),
                *(("postgresql_shop", point) for point in ("chosen", "numbered")),
            )
        ),
    ],
)
def test_drainer_that_dies_sends_nothing_twice(
    request: pytest.FixtureRequest, connect: Connect, name: str, point: str
) -> None:
    shop: Shop = request.getfixturevalue(name)
    leave_waiting(shop, 20)
    client, resource = shop.process()
    outbox = resource.outbox
    assert outbox is not None

    def drain(client: txmq.Client) -> None:
        dying = Pump(client.routes.any_link(), resource, outbox, client.clock, client.routes)
        for _ in range(10):
            dying.step()

    with crash_at(f"client.outbox.{point}"), pytest.raises(SimulatedCrash):
        inside(client, drain)
    shop.end((client, resource))
    shop.client, shop.resource = shop.process()
    shop.client.settle(shop.resource)
    shop.check()
    assert len(shop.values()) == 21


def leave_waiting(shop: Shop, orders: int) -> list[txmq.Transaction]:
    """Orders of a process that reaches no broker, and there is no other."""
    shop.check()
    shop.client.close()
    away = shop.process(f"txmq://127.0.0.1:{free_port()}")
    return [shop.order(away) for _ in range(orders)]


def test_rows_of_others_are_found_while_there_is_load(mysql_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one has the turn: it finds rows of which nobody tells it."""
    monkeypatch.setattr(pump, "LOOK_EVERY_S", NEVER_S)
    monkeypatch.setattr(pump, "REFUSED_S", NEVER_S)
    monkeypatch.setattr(pump, "IDLE_S", NEVER_S)
    shop = mysql_shop
    shop.order().wait_visible(PATIENT_S)  # this one has the turn
    other = shop.process()
    shop.order(other)
    shop.order(other).wait_visible(PATIENT_S)
    shop.check()


def test_turn_is_left_to_whoever_commits_next(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "LOOK_EVERY_S", NEVER_S)
    monkeypatch.setattr(pump, "IDLE_S", 0.05)
    shop.order().wait_visible(PATIENT_S)
    holder = "SELECT COUNT(*) FROM txmq_marker_outbox_series WHERE until_ms > 0"
    eventually(lambda: shop.run(holder) == [(0,)], "nobody has the turn")
    other = shop.process()
    shop.order(other).wait_visible(PATIENT_S)
    shop.check()


def test_client_that_is_closed_drains_first(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "GATHER_S", 0.5)
    for _ in range(3):
        shop.order()
    shop.client.close()
    assert shop.waiting() == 0
    shop.client, shop.resource = shop.process()
    assert shop.values() == [1, 2, 3, 4]


def test_markers_leave_and_are_not_taken_for_rolled_back(any_shop: Shop) -> None:
    shop = any_shop
    taken = shop.order()
    taken.wait_visible(PATIENT_S)
    (waits,) = leave_waiting(shop, 1)
    client, resource = shop.process()
    older = "UPDATE txmq_marker SET deadline_ms = deadline_ms - "
    shop.run(older + str(int(PATIENT_S * 1000) + 60_000))
    with closing(resource.open_for_operator()) as database:
        assert database.delete_enclosed(120_000, "") is None
        assert len(shop.outcomes()) == 3
        shop.run(older + "120000")
        assert database.delete_enclosed(120_000, "") is None
    assert len(shop.outcomes()) == 1  # that of the row that waits
    client.settle(resource)
    assert client.outcome(taken.txid) is Outcome.UNKNOWN
    assert client.outcome(waits.txid) is Outcome.COMMITTED
    shop.client = client
    shop.check()
    assert client.transactions.fence(taken.txid) is not Outcome.COMMITTED


@pytest.mark.threads  # the command line's
def test_resolver_without_pumps_drains_too(shop: Shop) -> None:
    """``txmq resolver``, for services that are gone."""
    leave_waiting(shop, 3)
    client, resource = shop.process()
    resolver = Resolver(client, [resource])
    with closing(resolver):
        for _ in count():
            resolver.round()
            if not resolver.has_more:
                break
    shop.client = client
    assert shop.values() == [1, 2, 3, 4]
    assert shop.waiting() == 0


def test_block_without_messages_leaves_no_row(shop: Shop) -> None:
    shop.check()
    with shop.block() as tx:
        tx.connection(shop.resource).cursor().execute("UPDATE sold SET pieces = pieces + 0")
    assert (tx.outcome, tx.pending, shop.waiting()) == (Outcome.COMMITTED, (), 0)


def test_refused_row_is_parked_and_others_go_on(any_shop: Shop) -> None:
    shop = any_shop
    shop.client.topics.create("gone", partitions=1)
    shop.client.topics.create("stays", partitions=1)
    shop.order(topic="gone")
    shop.order(topic="stays").wait_visible(PATIENT_S)
    eventually(lambda: not shop.waiting(), "the outbox is empty")
    shop.client.close()
    away = shop.process(f"txmq://127.0.0.1:{free_port()}")
    for topic in ("gone", "gone", "stays"):
        shop.order(away, topic=topic)
    shop.client, shop.resource = shop.process()
    shop.client.topics.delete("gone")
    shop.client.settle(shop.resource)
    eventually(lambda: shop.states() == ["parked", "waiting"], "the one that can be sent has gone")
    shop.order(topic="stays").wait_visible(PATIENT_S)
    assert [int(m.value or b"") for m in shop.client.browse("stays")] == [3, 6, 7]


def test_lost_answer_of_commit_is_looked_up(any_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker proves that the block is committed."""
    shop = any_shop
    commit = Branch.commit

    def lost(branch: Branch) -> None:
        commit(branch)
        raise ConnectionError("the answer is lost")

    with monkeypatch.context() as patched:
        patched.setattr(Branch, "commit", lost)
        tx = shop.order()
    assert (tx.outcome, tx.pending) == (Outcome.COMMITTED, ("broker",))
    shop.check()


def test_xa_goes_on_beside_it_in_one_service(mysql_shop: Shop, mariadb: MariaDB) -> None:
    """To the same topic, with keys of its own, by the same client; and to the same key, behind what is visible."""
    shop, stock = mysql_shop, MySQLOrders(mariadb)

    def ship(number: int, key: bytes) -> None:
        with shop.client.producer().transaction(stock.resource, timeout=PATIENT_S) as tx:
            tx.connection(stock.resource).cursor().execute("INSERT INTO orders VALUES (%s, 'x')", (number,))
            tx.send("elsewhere", b"%d" % number, key=key)
        assert tx.outcome is Outcome.COMMITTED

    def ship_all() -> None:
        for number in range(20):
            ship(number, b"s")

    shipping = Thread(target=ship_all)
    shipping.start()
    for _ in range(20):
        last = shop.order(topic="elsewhere")
        shop.order()
    shipping.join()
    last.wait_visible(PATIENT_S)
    ship(1000, b"k")
    found = [(message.key, int(message.value or b"")) for message in shop.client.browse("elsewhere")]
    shipped = [number for key, number in found if key == b"s"]
    assert shipped == [number for (number,) in stock.execute("SELECT id FROM orders WHERE id < 1000 ORDER BY id")]
    ordered = [number for key, number in found if key == b"k"]
    assert (len(shipped), ordered) == (20, [*range(2, 42, 2), 1000])
    eventually(lambda: not shop.waiting(), "the outbox is empty")
