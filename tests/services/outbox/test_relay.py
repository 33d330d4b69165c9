"""The relay: each committed message once and in order, whoever dies, whatever was copied or restored."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.crash_points import at_moment
from tests.logged import said
from tools.simulated.clock import SimClock
from txmq.client.relay.broker_side import RelayBroker
from txmq.client.relay.database_side import TURN_S, RelayDatabase
from txmq.client.relay.relay import Relay
from txmq.errors import ConfigError, OutboxStoppedError
from txmq.outbox.outbox import Outbox
from txmq.outbox.page import PARKED_MAX, REFUSED, runs
from txmq.outbox.relay_core import RelayRow
from txmq.outbox.tables import ADOPTED
from txmq.runtime.backoff import Backoff
from txmq.runtime.crashpoints import POINTS
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

from .databases import RELAYED, Fields, connector_of, fields_of
from .relaying import started

TABLES = ("txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay")
KEYS = 5
DRAIN_S = 60.0
KILLED = -signal.SIGKILL
SMALL = {"request_size_bytes_max": 2 << 20, "batch_size_bytes_max": 2 << 20, "transaction_size_bytes_max": 8 << 20}
PAGE = f"{1:016x}-{1:016x}-1-"  # of no broker
LARGE = b"x" * 600_000


class Shop:
    """A database with an outbox that writes to topic ``orders`` of a broker."""

    def __init__(self, fields: Fields) -> None:
        self.fields, self.connect, self.outbox = fields, connector_of(fields), Outbox("orders-db")
        self.connection: Any = self.connect()
        for table in TABLES:
            run(self.connection, f"DROP TABLE IF EXISTS {table}")
        self.connection.commit()
        self.outbox.install(self.connection)
        self.written = 0

    def write(self, count: int, topic: str = "orders") -> None:
        """So many transactions of one message each; every third one is rolled back."""
        for _ in range(count):
            number = self.written
            self.written += 1
            self.outbox.send(self.connection, topic, b"%d" % number, b"k%d" % (number % KEYS))
            self.connection.rollback() if number % 3 == 2 else self.connection.commit()

    def committed(self, first: int = 0) -> list[bytes]:
        """What must be there."""
        return [b"%d" % number for number in range(first, self.written) if number % 3 != 2]


def check(client: txmq.Client, wanted: list[bytes], topic: str = "orders") -> None:
    """Each once, each key in order."""
    found: dict[bytes | None, list[bytes]] = {}
    for message in client.browse(topic):
        found.setdefault(message.key, []).append(message.value or b"")
    assert Counter(value for values in found.values() for value in values) == Counter(wanted)
    assert all(values == sorted(values, key=int) for values in found.values())


def test_committed_messages_arrive_once_in_order_of_their_keys(shop: Shop, client: txmq.Client) -> None:
    with Relay(client, shop.outbox, shop.connect) as relay:
        shop.write(30)
        relay.drain(DRAIN_S)
        shop.write(300)
        relay.drain(DRAIN_S)
        assert relay.sent == len(shop.committed())
    check(client, shop.committed())


def test_messages_wait_for_the_broker(shop: Shop, broker: BrokerProcess, client: txmq.Client) -> None:
    with Relay(client, shop.outbox, shop.connect) as relay:
        shop.write(9)
        relay.drain(DRAIN_S)
        broker.kill()
        shop.write(30)
        broker.start()
        relay.drain(DRAIN_S)
    check(client, shop.committed())


def test_two_relays_send_nothing_twice(shop: Shop, client: txmq.Client) -> None:
    with Relay(client, shop.outbox, shop.connect) as one, Relay(client, shop.outbox, shop.connect) as other:
        for _ in range(10):
            shop.write(12)
            one.wake()
            other.wake()
        eventually(lambda: one.sent + other.sent == len(shop.committed()), "everything has been sent")
    check(client, shop.committed())


RELAYS_POINTS = [point for point in POINTS if point.startswith("relay.") and point != "relay.page.part_sent"]


@pytest.mark.parametrize("point", RELAYS_POINTS)
def test_relay_that_dies_leaves_its_page_to_the_next(
    shop: Shop, client: txmq.Client, broker: BrokerProcess, point: str
) -> None:
    shop.write(20)
    dying = started(broker.address, shop.fields, f"{point}:1")
    assert dying.wait(DRAIN_S) == KILLED
    shop.write(20)
    _expire(shop)
    with Relay(client, shop.outbox, shop.connect) as relay:
        relay.drain(DRAIN_S)
    check(client, shop.committed())


@pytest.fixture(params=RELAYED[1:])
def served_shop(request: pytest.FixtureRequest, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Shop:
    """One whose database ends a session that is idle in a transaction."""
    return Shop(fields_of(request.param, tmp_path, mariadb, postgresql))


@pytest.mark.parametrize("point", ["relay.claim.written", "relay.claim.committed", "relay.page.sent"])
def test_paused_relay_holds_nothing_up_and_sends_nothing_late(
    served_shop: Shop, client: txmq.Client, broker: BrokerProcess, point: str
) -> None:
    shop = served_shop
    shop.write(20)
    paused = started(broker.address, shop.fields, f"{point}:1:stop")
    try:
        eventually(lambda: _is_paused(paused.pid), "it is paused")
        shop.write(20)
        _expire(shop)
        with Relay(client, shop.outbox, shop.connect) as relay:
            relay.drain(DRAIN_S)
            paused.send_signal(signal.SIGCONT)
            shop.write(20)
            relay.drain(DRAIN_S)
        shop.write(20)
        eventually(lambda: not _waiting(shop), "it goes on where the other one has ended")
    finally:
        paused.kill()
        paused.wait()
    check(client, shop.committed())
    shop.connection.close()


def _is_paused(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _waiting(shop: Shop) -> int:
    rows, _ = run(shop.connection, "SELECT COUNT(*) FROM txmq_outbox")
    shop.connection.commit()
    return int(rows[0][0])


def _expire(shop: Shop) -> None:
    """The lease of the dead relay is over, without waiting for it."""
    run(shop.connection, "UPDATE txmq_outbox_relay SET until_ms = 0")
    shop.connection.commit()


def test_broker_that_dies_with_a_page_places_it_once(shop: Shop, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "dying") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("orders", partitions=4)
        for point in ("broker.outbox.page_taken", "broker.outbox.page_taken>journal.sync.done"):
            broker.stop()
            broker.start(env={"TXMQ_CRASH": f"{point}:2"})
            with txmq.connect(broker.address) as client, Relay(client, shop.outbox, shop.connect) as relay:
                while broker.is_running:
                    shop.write(2)
                    relay.wake()
                broker.start(env={})
                relay.drain(DRAIN_S)
                check(client, shop.committed())


def test_copy_of_the_database_stops_and_sends_nothing(sqlite_shop: Shop, client: txmq.Client, tmp_path: Path) -> None:
    with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
        sqlite_shop.write(6)
        relay.drain(DRAIN_S)
        sqlite_shop.connection.execute("PRAGMA wal_checkpoint")
        shutil.copy(sqlite_shop.fields["where"], tmp_path / "copy.db")
        sqlite_shop.write(6)
        relay.drain(DRAIN_S)
    copy = connector_of({"kind": "sqlite", "where": str(tmp_path / "copy.db")})
    connection = copy()
    sqlite_shop.outbox.send(connection, "orders", b"of the copy")
    connection.execute("UPDATE txmq_outbox_relay SET until_ms = 0")
    connection.commit()
    with Relay(client, sqlite_shop.outbox, copy) as relay, pytest.raises(OutboxStoppedError, match="says which one"):
        relay.drain(DRAIN_S)
    check(client, sqlite_shop.committed())
    assert connection.execute("SELECT COUNT(*) FROM txmq_outbox").fetchall() == [(1,)]
    connection.close()


def test_restored_broker_stops_the_line_until_it_is_put_right(
    sqlite_shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agrees, failures = RelayBroker.agrees_with, iter([RuntimeError("once, when it was put right")])

    def fails_once(self: RelayBroker, row: RelayRow) -> bool:
        found = agrees(self, row)
        if found:
            for failure in failures:
                raise failure
        return found

    monkeypatch.setattr(RelayBroker, "agrees_with", fails_once)
    monkeypatch.setattr("txmq.client.relay.relay._ASK_AGAIN_S", Backoff(1.0, 120.0))
    with BrokerProcess(tmp_path / "data") as broker:

        def put_in_place(name: str) -> None:
            shutil.rmtree(tmp_path / "data")
            shutil.copytree(tmp_path / name, tmp_path / "data")
            broker.start()

        with txmq.connect(broker.address) as client:
            client.topics.create("orders")
            for name in ("older", "right"):
                with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
                    sqlite_shop.write(3)
                    relay.drain(DRAIN_S)
                broker.stop()
                shutil.copytree(tmp_path / "data", tmp_path / name)
                broker.start()
        broker.stop()
        put_in_place("older")
        with txmq.connect(broker.address) as client, Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
            sqlite_shop.write(3)
            with pytest.raises(OutboxStoppedError):
                relay.drain(DRAIN_S)
            broker.stop()
            put_in_place("right")
            eventually(lambda: relay.stopped is None, "the relay goes on by itself")
            assert list(failures) == []
            relay.drain(DRAIN_S)
            check(client, sqlite_shop.committed())


def test_message_for_no_topic_is_parked_and_others_go_on(
    shop: Shop, client: txmq.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with Relay(client, shop.outbox, shop.connect) as relay:
        shop.write(1, "nowhere")
        shop.write(4)
        relay.drain(DRAIN_S)
    parked, _ = run(shop.connection, "SELECT topic, why FROM txmq_outbox_parked")
    assert [tuple(map(str, row)) for row in parked] == [("nowhere", "its topic does not exist")]
    (told,) = [line for line in said(caplog) if line["event"] == "outbox: messages are parked"]
    assert (told["topic"], told["why"], told["parked"]) == ("nowhere", "its topic does not exist", 1)
    check(client, shop.committed(first=1))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "small", settings=SMALL) as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("large")
        yield broker


def test_unit_over_a_request_arrives_over_a_transaction_is_parked(sqlite_shop: Shop, small: BrokerProcess) -> None:
    with txmq.connect(small.address) as client:
        for count in (3, 16, 9, 1):
            sqlite_shop.outbox.send_many(sqlite_shop.connection, [("large", LARGE)] * count)
            sqlite_shop.connection.commit()
        with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
            relay.drain(DRAIN_S)
        assert sum(1 for _ in client.browse("large")) == 13
    parked, _ = run(sqlite_shop.connection, "SELECT why FROM txmq_outbox_parked")
    assert parked == [(REFUSED,)] * 16


def test_stream_that_dies_in_the_middle_leaves_nothing(sqlite_shop: Shop, small: BrokerProcess) -> None:
    sqlite_shop.outbox.send_many(sqlite_shop.connection, [("large", LARGE)] * 9)
    sqlite_shop.connection.commit()
    dying = started(small.address, sqlite_shop.fields, "relay.page.part_sent:2")
    assert dying.wait(DRAIN_S) == KILLED
    _expire(sqlite_shop)
    with txmq.connect(small.address) as client, Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
        relay.drain(DRAIN_S)
        assert sum(1 for _ in client.browse("large")) == 9
        sqlite_shop.outbox.send_many(sqlite_shop.connection, [("large", LARGE)] * 9)
        with at_moment("relay.page.part_sent", small.kill):
            sqlite_shop.connection.commit()
            eventually(lambda: not small.is_running, "the broker is dead")
        small.start()
        relay.drain(DRAIN_S)
        assert sum(1 for _ in client.browse("large")) == 18


def test_relay_waits_for_no_open_transaction(
    client: txmq.Client, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    """InnoDB would lock the row after those that are deleted, too."""
    shop = Shop(fields_of("mysqlclient", tmp_path, mariadb, postgresql))
    shop.write(6)
    with closing(shop.connect()) as late:
        shop.outbox.send(late, "orders", b"1000")
        with Relay(client, shop.outbox, shop.connect) as relay:
            relay.drain(DRAIN_S)
            check(client, shop.committed())
            late.commit()
            relay.drain(DRAIN_S)
    check(client, [*shop.committed(), b"1000"])
    shop.connection.close()


def test_units_are_seen_whole_or_not_at_all(sqlite_shop: Shop, client: txmq.Client) -> None:
    ended, torn = threading.Event(), list[Any]()

    def read() -> None:
        while not ended.is_set():
            found = Counter((message.value or b"").partition(b" ")[0] for message in client.browse("units"))
            torn.extend(unit for unit, count in found.items() if count != 3)

    reader = threading.Thread(target=read)
    client.topics.create("units")
    reader.start()
    with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
        connection: sqlite3.Connection = sqlite_shop.connect()
        for number in range(60):
            with sqlite_shop.outbox.transaction(connection) as tx:
                for part in range(3):
                    tx.send("units", b"%d %d" % (number, part), b"%d" % part)
            relay.wake()
        relay.drain(DRAIN_S)
        connection.close()
    ended.set()
    reader.join()
    assert torn == []
    assert sum(1 for _ in client.browse("units")) == 180


def test_relays_session_ends_when_idle_and_sees_commits(shop: Shop, mariadb: MariaDB) -> None:
    opened = list[Any]()

    def connect() -> Any:
        opened.append(shop.connect())
        return opened[-1]

    database = RelayDatabase(shop.outbox, connect, SimClock())
    assert database.peek() is not None
    asked = {
        "sqlite": ("PRAGMA synchronous",),
        "mysqlclient": tuple(f"SELECT @@{name}" for name in (mariadb.program.idle_timeout, mariadb.program.isolation)),
        "psycopg": ("SHOW idle_in_transaction_session_timeout", "SHOW default_transaction_isolation"),
    }  # fmt: skip
    found = [run(opened[0], question)[0][0][0] for question in asked[shop.fields["kind"]]]
    assert found in ([3], [10, "READ-COMMITTED"], ["10s", "read committed"])
    database.close()


def test_relay_refuses_database_that_may_lose_its_commits(sqlite_shop: Shop, client: txmq.Client) -> None:
    def connect() -> Any:
        connection = sqlite_shop.connect()
        connection.execute("PRAGMA synchronous = OFF")  # it is the connection's own, and corrected
        connection.execute("PRAGMA journal_mode = MEMORY")
        return connection

    sqlite_shop.write(1)
    with Relay(client, sqlite_shop.outbox, connect) as relay:
        eventually(lambda: relay.refusal, "the database is refused")
        with pytest.raises(ConfigError, match="power loss"):
            relay.drain(DRAIN_S)
    check(client, [])
    with Relay(client, sqlite_shop.outbox, connect, durability="weak") as relay:
        relay.drain(DRAIN_S)
    check(client, sqlite_shop.committed())


class Turning(SimClock):
    """Its third pause ends the transaction of another one."""

    def __init__(self, other: sqlite3.Connection) -> None:
        super().__init__()
        self.pauses = list[float]()
        self._other = other

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == 3:
            self._other.rollback()


def test_relay_asks_sqlite_for_its_turn_without_growing_pauses(sqlite_shop: Shop) -> None:
    other = sqlite_shop.connect()
    other.execute("BEGIN IMMEDIATE")
    clock = Turning(other)
    database = RelayDatabase(sqlite_shop.outbox, sqlite_shop.connect, clock)
    assert database.peek() is not None
    assert database.lock() is not None
    assert clock.pauses == [TURN_S] * 3
    database.close()
    other.close()


def test_parked_rows_are_counted_without_those_of_adopt(shop: Shop) -> None:
    tables, connection = shop.outbox.tables(shop.connection), shop.connection
    shop.write(7)
    _, second, *others = (row.id for row in tables.waiting(connection, 10, 1 << 20).rows)
    tables.park(connection, tables.waiting(connection, 1, 1 << 20).rows, ADOPTED)
    tables.park(connection, tables.waiting(connection, 1, 1 << 20).rows, REFUSED)
    found = tables.waiting(connection, 10, 1 << 20)
    assert (found.room, found.held) == (PARKED_MAX - 1, {("orders", b"k1"): second})
    assert [row.id for row in found.rows] == others
    connection.commit()


def test_innodb_reads_no_adopted_row_for_a_page(tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> None:
    shop = Shop(fields_of("mysqlclient", tmp_path, mariadb, postgresql))
    shop.write(90)
    parked = (
        "INSERT INTO txmq_outbox_parked (id, topic, message_key, value, created_ms, why, since_ms) "
        "VALUES (%s, 'orders', %s, '', 0, %s, 0)"
    )
    with closing(shop.connection.cursor()) as cursor:
        cursor.executemany(parked, [(number, b"adopted%d" % number, ADOPTED) for number in range(1000, 21_000)])

    def reads() -> int:
        return sum(int(count) for _, count in run(shop.connection, "SHOW SESSION STATUS LIKE 'Handler_read%'")[0])

    before = reads()
    assert len(shop.outbox.tables(shop.connection).waiting(shop.connection, 100, 1 << 20).rows) == 60
    assert reads() - before < 2000
    shop.connection.close()


def test_headers_count_among_the_bytes_of_a_page(shop: Shop) -> None:
    for _ in range(4):
        shop.outbox.send(shop.connection, "orders", b"v", headers={"h": b"x" * 1000})
    assert len(shop.outbox.tables(shop.connection).waiting(shop.connection, 10, 5000).rows) == 2
    shop.connection.commit()


def test_rows_with_gaps_leave_by_their_own_ids(shop: Shop) -> None:
    shop.write(900)
    tables, connection = shop.outbox.tables(shop.connection), shop.connection
    ids = [row.id for row in tables.waiting(connection, 1000, 1 << 20).rows]
    tables.delete(connection, runs(ids[::2]))
    assert [row.id for row in tables.waiting(connection, 1000, 1 << 20).rows] == ids[1::2]
    connection.commit()


def test_long_keys_are_held_each_for_itself(shop: Shop) -> None:
    tables, connection = shop.outbox.tables(shop.connection), shop.connection
    keys = [b"k" * 3000 + b"%d" % number for number in range(3)]
    for key in keys * 2:
        shop.outbox.send(connection, "orders", b"v", key)
    rows = tables.waiting(connection, 3, 1 << 20).rows
    tables.park(connection, rows, REFUSED)
    held = tables.waiting(connection, 10, 1 << 20).held
    assert held == {("orders", row.key): row.id for row in rows}
    connection.commit()


def test_relay_that_has_no_turn_sees_the_other_drain(sqlite_shop: Shop, client: txmq.Client) -> None:
    with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as one:
        one.drain(DRAIN_S)
        with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as other:
            sqlite_shop.write(30)
            other.drain(DRAIN_S)
            assert (one.sent, other.sent) == (len(sqlite_shop.committed()), 0)


@pytest.mark.parametrize("column", ["created_ms = -5", "headers = 'none'", """headers = '[[1, "00"]]'"""])
def test_row_that_no_batch_can_carry_is_parked(sqlite_shop: Shop, client: txmq.Client, column: str) -> None:
    sqlite_shop.write(2)
    run(sqlite_shop.connection, f"UPDATE txmq_outbox SET {column} WHERE id = 1")
    sqlite_shop.connection.commit()
    with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
        relay.drain(DRAIN_S)
    check(client, sqlite_shop.committed(first=1))
    assert run(sqlite_shop.connection, "SELECT why FROM txmq_outbox_parked")[0] == [(REFUSED,)]


def test_relays_that_have_stopped_do_not_set_one_another_going(sqlite_shop: Shop, client: txmq.Client) -> None:
    seen, relays = list[str | None](), list[Relay]()

    def connect() -> sqlite3.Connection:
        connection: sqlite3.Connection = sqlite_shop.connect()
        connection.set_trace_callback(lambda _: seen.append(relays[0].stopped) if relays else None)
        return connection

    sqlite_shop.write(1)
    run(sqlite_shop.connection, f"UPDATE txmq_outbox_relay SET last = '{PAGE}1'")
    sqlite_shop.connection.commit()
    with Relay(client, sqlite_shop.outbox, connect) as relay:
        eventually(lambda: relay.stopped, "the broker knows no such page")
        relays.append(relay)
        run(sqlite_shop.connection, f"UPDATE txmq_outbox_relay SET claim = '{PAGE}2', holder = 'another'")
        sqlite_shop.connection.commit()
        eventually(lambda: len(seen) > 6, "it has looked again")
    assert None not in seen
