"""A last resource with an outbox: the broker dies, and the application takes orders; all arrive, once, in order."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import txmq
from tests.crash_points import at_moment, crash_at, hooked
from tests.services.loop_client import Connect, inside
from tests.services.xa.mysql_orders import NAME, MySQLOrders
from txmq import Outcome, RolledBackError
from txmq.cli.main import app
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import RequestTimeoutError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, free_port
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource
from txmq.xa.last_resource import drainer
from txmq.xa.last_resource.outbox import OutboxOptions
from txmq.xa.resolver import Resolver
from txmq.xid import TxId

PATIENT_S = 600.0
EVER_MS = 3_600_000
_OPTIONS = OutboxOptions(away_after_ms=1000)


class Shop:
    """A database of orders, and processes that take them."""

    def __init__(
        self, broker: BrokerProcess, connect: Callable[[], Any], name: str, api: Connect,
        options: OutboxOptions = _OPTIONS,
    ) -> None:  # fmt: skip
        self.broker, self.connect, self._name, self._api, self._options = broker, connect, name, api, options
        self.opened: list[Any] = []
        self.is_sqlite = name != NAME
        self._connections: dict[LastResource, list[Any]] = {}
        self.client, self.resource = self.process()
        self.client.topics.create("orders")
        self.client.topics.create("elsewhere")
        inside(self.client, self.resource.install)
        self.order()

    def process(self, address: str = "", options: OutboxOptions | None = None) -> tuple[txmq.Client, LastResource]:
        """One more, as far as broker and database can tell; or one that reaches no broker at an address."""
        client = self._api(address or self.broker.address, timeout=2.0, lazy=bool(address))
        connections = list[Any]()

        def connect() -> Any:
            connections.append(self.connect())
            return connections[-1]

        resource = LastResource(self._name, connect=connect, outbox=options or self._options)
        self._connections[resource] = connections
        self.opened += [client, resource]
        return client, resource

    def order(
        self, process: tuple[txmq.Client, LastResource] | None = None, in_body: Callable[[], object] = lambda: None,
        topic: str = "orders", key: bytes | None = b"k",
    ) -> txmq.Transaction:  # fmt: skip
        """A row and a message, with the row's number."""
        client, resource = process or (self.client, self.resource)
        with client.producer().transaction(resource, timeout=PATIENT_S) as tx:
            cursor = tx.connection(resource).cursor()
            cursor.execute("UPDATE sold SET pieces = pieces + 1")
            cursor.execute("SELECT pieces FROM sold")
            ((pieces,),) = cursor.fetchall()
            in_body()
            tx.send(topic, str(pieces).encode(), key=key)
        assert tx.outcome is Outcome.COMMITTED
        return tx

    def end(self, process: tuple[txmq.Client, LastResource]) -> None:
        """It is gone, and its connections with it."""
        client, resource = process
        client.close()
        for connection in self._connections[resource]:
            with suppress(Exception):  # it was closed before
                connection.close()

    def block(self) -> txmq.Transaction:
        """A transaction with the database."""
        return self.client.producer().transaction(self.resource, timeout=PATIENT_S)

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """One statement of its own."""
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            rows = list(cursor.fetchall()) if cursor.description is not None else []
            connection.commit()
            return rows

    def hold(self, milliseconds: int = EVER_MS) -> None:
        """Another process has the turn to drain, for ever."""
        clock = "(julianday('now') - 2440587.5) * 86400000" if self.is_sqlite else "UNIX_TIMESTAMP() * 1000"
        self.run(f"UPDATE txmq_marker_outbox_series SET holder = 'another', until_ms = {clock} + {milliseconds}")

    def states(self) -> list[str]:
        """Of the rows in the outbox."""
        return [str(state) for (state,) in self.run("SELECT state FROM txmq_marker_outbox ORDER BY seq")]

    def waiting(self) -> int:
        """Rows in the outbox."""
        return int(self.run("SELECT COUNT(*) FROM txmq_marker_outbox")[0][0])

    def outcomes(self) -> list[str]:
        """Of the markers that are there."""
        return [str(outcome) for (outcome,) in self.run("SELECT outcome FROM txmq_marker ORDER BY written_ms")]

    def values(self) -> list[int]:
        """What readers see."""
        return [int(message.value or b"") for message in self.client.browse("orders")]

    def check(self) -> None:
        """Rows are messages, each once, in their order; nothing waits, in the database or in the broker."""
        sold = int(self.run("SELECT pieces FROM sold")[0][0])
        eventually(lambda: len(self.values()) >= sold, "every message is visible")
        assert self.values() == list(range(1, sold + 1))
        eventually(lambda: not self.waiting(), "the outbox is empty")
        eventually(lambda: not list(self.client.transactions.list(state="in-doubt")), "nothing is in doubt")

    def close(self) -> None:
        for one in self.opened:
            one.close()


@pytest.fixture
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drainer, "LEASE_MS", 2 * EVER_MS)  # as ``hold`` takes it


@pytest.fixture
def sqlite_shop(broker: BrokerProcess, tmp_path: Path, long_turns: None, connect: Connect) -> Iterator[Shop]:
    made = _sqlite_shop(broker, tmp_path, connect)
    yield made
    made.close()


@pytest.fixture
def mysql_shop(broker: BrokerProcess, mariadb: MariaDB, long_turns: None, connect: Connect) -> Iterator[Shop]:
    orders = MySQLOrders(mariadb)
    orders.execute("CREATE TABLE sold (pieces INTEGER) ENGINE=InnoDB")
    orders.execute("INSERT INTO sold VALUES (0)")
    made = Shop(broker, orders.connect, NAME, connect)
    yield made
    made.close()


@pytest.fixture(params=["sqlite_shop", pytest.param("mysql_shop", marks=pytest.mark.threads)])  # to be quick
def shop(request: pytest.FixtureRequest, connect: Connect) -> Shop:
    found: Shop = request.getfixturevalue(request.param)
    return found


def _sqlite_shop(broker: BrokerProcess, folder: Path, api: Connect) -> Shop:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(folder / "shop.db", timeout=30.0, check_same_thread=False)

    with closing(connect()) as connection:
        connection.execute("CREATE TABLE sold (pieces INTEGER)")
        connection.execute("INSERT INTO sold VALUES (0)")
        connection.commit()
    return Shop(broker, connect, "shop", api)


def test_orders_are_taken_while_the_broker_is_dead(shop: Shop) -> None:
    shop.broker.kill()
    taken = [shop.order() for _ in range(5)]
    assert [tx.pending for tx in taken] == [("broker",)] * 5
    assert all(result.offset is None for tx in taken for result in tx.results)
    assert shop.waiting() == 5
    with pytest.raises(RequestTimeoutError):
        taken[-1].wait_visible(0.1)
    shop.broker.start()
    taken[-1].wait_visible(PATIENT_S)
    assert (taken[-1].pending, shop.values()) == ((), [1, 2, 3, 4, 5, 6])
    eventually(lambda: not shop.resource.outbox or not shop.resource.outbox.is_tripped, "the broker is tried again")
    eventually(lambda: shop.order().pending == (), "blocks go to the broker again")
    shop.check()
    assert shop.outcomes().count("outboxed") >= 5


@pytest.mark.threads  # what is asked, and when, is the core's
def test_broker_that_dies_behind_the_look_refuses_no_order(sqlite_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of a process: the broker was there when it was looked at, and gives no session."""
    first, second = sqlite_shop.process(), sqlite_shop.process()
    sqlite_shop.broker.kill()
    with monkeypatch.context() as looked:
        looked.setattr(ReconnectingConnection, "reach", lambda _control, _deadline: None)
        taken = [sqlite_shop.order(process) for process in (first, second)]
    assert [tx.pending for tx in taken] == [("broker",)] * 2
    sqlite_shop.broker.start()
    sqlite_shop.check()


@pytest.mark.parametrize("moment", ["client.tx.body_done", "client.tx.prepare_sent", "client.tx.marker_inserted"])
def test_broker_that_dies_at_the_end_loses_no_order(mysql_shop: Shop, moment: str) -> None:
    with at_moment(moment, mysql_shop.broker.kill):
        mysql_shop.order()
    mysql_shop.order()
    mysql_shop.broker.start()
    mysql_shop.check()
    mysql_shop.order()
    mysql_shop.check()


def test_outcome_of_outboxed_block_is_asked_of_database(sqlite_shop: Shop) -> None:
    with at_moment("client.tx.prepare_sent", sqlite_shop.broker.kill):
        txid = sqlite_shop.order().txid
    assert sqlite_shop.client.outcome(txid) is Outcome.COMMITTED
    sqlite_shop.broker.start()
    sqlite_shop.check()
    assert sqlite_shop.client.outcome(txid) is Outcome.COMMITTED


def test_client_without_the_database_hears_unknown_of_voided_block(sqlite_shop: Shop) -> None:
    session = inside(sqlite_shop.client, lambda client: client.session)
    with at_moment("client.tx.body_done", sqlite_shop.broker.kill):
        txid = sqlite_shop.order().txid
    sqlite_shop.broker.start()
    eventually(lambda: session.finished_through >= TxId.parse(txid).counter, "the broker has been told of the void")
    with txmq.connect(sqlite_shop.broker.address) as stranger:
        assert (stranger.outcome(txid), stranger.transactions.fence(txid)) == (Outcome.UNKNOWN, Outcome.UNKNOWN)
    sqlite_shop.check()
    assert sqlite_shop.client.outcome(txid) is Outcome.COMMITTED


def test_block_behind_message_of_its_key_waits_too(shop: Shop) -> None:
    """Another process, whose broker is there, neither overtakes nor fails; other keys go on as ever."""
    shop.hold()
    away = shop.resource.outbox
    assert away is not None
    away.trip()
    shop.order()
    other = shop.process()
    behind = shop.order(other)
    assert (behind.pending, shop.waiting()) == (("broker",), 2)
    shop.order(other, key=None)  # it stands for its partition
    assert shop.waiting() == 3
    elsewhere = shop.order(other, topic="elsewhere")
    assert shop.waiting() == 3
    elsewhere.wait_visible(PATIENT_S)
    assert not shop.client.transactions.list(state="prepared")
    assert shop.values() == [1]
    shop.hold(-1)
    eventually(lambda: shop.values() == [1, 2, 3, 4], "what waited has gone on, in order")


@pytest.mark.threads  # its hook waits for others of its own process
def test_drained_row_waits_for_what_was_prepared_before(mysql_shop: Shop) -> None:
    """T1 waits in the outbox, T2 of its key is prepared; T1 is sent before T2 has its marker: T1 comes first."""
    mysql_shop.hold()
    away, other = mysql_shop.resource.outbox, mysql_shop.process()
    assert away is not None
    away.trip()
    mysql_shop.order()

    def drain() -> None:
        eventually(lambda: bool(mysql_shop.client.transactions.list(state="prepared")), "T2 is prepared")
        mysql_shop.hold(-1)
        eventually(lambda: bool(mysql_shop.client.transactions.list(state="placing")), "T1 is sent, and waits for T2")
        assert mysql_shop.waiting() == 1

    with at_moment("client.tx.prepare_sent", drain):
        behind = mysql_shop.order(other)
    assert behind.pending == ("broker",)
    mysql_shop.check()


def test_messages_too_large_do_not_wait_in_database(sqlite_shop: Shop) -> None:
    sqlite_shop.broker.kill()
    sqlite_shop.order()
    with pytest.raises(RolledBackError, match="away"), sqlite_shop.block() as tx:
        tx.send("orders", bytes(9 << 20), key=b"k")
    sqlite_shop.broker.start()
    sqlite_shop.check()


def test_refused_row_is_parked_and_others_go_on(sqlite_shop: Shop) -> None:
    sqlite_shop.client.topics.create("gone", partitions=1)
    sqlite_shop.client.topics.create("stays", partitions=1)
    sqlite_shop.order(topic="gone")
    sqlite_shop.order(topic="stays")
    sqlite_shop.hold()
    away = sqlite_shop.resource.outbox
    assert away is not None
    away.trip()
    sqlite_shop.order(topic="gone")
    sqlite_shop.order(topic="gone")
    sqlite_shop.order(topic="gone", key=b"other")
    sqlite_shop.order(topic="stays")
    sqlite_shop.client.topics.delete("gone")
    sqlite_shop.hold(-1)
    eventually(lambda: sqlite_shop.waiting() == 3, "the one that can be sent has gone")
    eventually(lambda: sqlite_shop.states() == ["parked", "waiting", "parked"], "each key has one that is parked")
    assert [int(m.value or b"") for m in sqlite_shop.client.browse("stays")] == [3, 7]


def test_row_larger_than_the_broker_takes_by_now_is_parked(sqlite_shop: Shop) -> None:
    """It is not sent: that would end the connection, on which others' rows are on their way."""
    shop = sqlite_shop
    shop.order()
    shop.hold()
    _trip(shop)
    with shop.block() as tx:
        tx.send("elsewhere", bytes(6 << 20), key=b"large")
    shop.order()
    shop.broker.kill()
    limit = str(1 << 20)
    shop.broker.start(env={"TXMQ_REQUEST_SIZE_BYTES_MAX": limit, "TXMQ_BATCH_SIZE_BYTES_MAX": limit})
    shop.hold(-1)
    eventually(lambda: shop.states() == ["parked"], "the others have gone")
    assert "the broker takes 1048576" in shop.run("SELECT reason FROM txmq_marker_outbox")[0][0]
    assert shop.values() == [1, 2, 3]


@pytest.mark.parametrize("point", ["chosen", "numbered", "sent", "answered", "deleted"])
def test_drainer_that_dies_sends_nothing_twice(sqlite_shop: Shop, point: str) -> None:
    shop = sqlite_shop
    shop.hold()
    _trip(shop)
    for _ in range(20):
        shop.order()
    client, resource = shop.process()
    assert resource.outbox is not None
    resource.outbox.holder = "another"  # which has the turn
    with crash_at(f"client.outbox.{point}"), pytest.raises(SimulatedCrash):
        inside(client, lambda client: Resolver(client, [resource]).round())
    shop.hold(-1)
    shop.check()


@pytest.mark.parametrize("point", ["filled", "committed"])
def test_owner_that_dies_leaves_rows_and_messages_or_neither(sqlite_shop: Shop, point: str) -> None:
    """Behind its prepare, which is void if the messages are in the outbox."""
    shop = sqlite_shop
    shop.hold()
    _trip(shop)
    shop.order()
    owner = shop.process()
    with crash_at(f"client.outbox.{point}"), pytest.raises(SimulatedCrash):
        shop.order(owner)  # it is behind: prepared, and to be void
    shop.end(owner)
    shop.hold(-1)
    shop.check()
    assert len(shop.values()) == (2 if point == "filled" else 3)


def test_drainer_that_dies_behind_parking_parks_once(sqlite_shop: Shop) -> None:
    shop = sqlite_shop
    shop.client.topics.create("gone")
    shop.order(topic="gone")
    shop.hold()
    _trip(shop)
    shop.order(topic="gone")
    shop.order(topic="elsewhere")
    shop.client.topics.delete("gone")
    client, resource = shop.process()
    assert resource.outbox is not None
    resource.outbox.holder = "another"
    with crash_at("client.outbox.parked"), pytest.raises(SimulatedCrash):
        inside(client, lambda client: Resolver(client, [resource]).round())
    shop.hold(-1)
    eventually(lambda: shop.states() == ["parked"], "the other one has gone")


def _trip(shop: Shop) -> None:
    assert shop.resource.outbox is not None
    shop.resource.outbox.trip()


def test_restored_broker_stops_the_drainer(sqlite_shop: Shop) -> None:
    _drain_one(sqlite_shop)
    sqlite_shop.run("UPDATE txmq_marker_outbox_series SET number = number + 5")  # as if five more had left
    problem = _refused(sqlite_shop)
    assert "was it restored?" in problem


def test_restored_database_stops_the_drainer(sqlite_shop: Shop) -> None:
    _drain_one(sqlite_shop)
    sqlite_shop.run("UPDATE txmq_marker_outbox_series SET number = 0")
    # The last round may still run, and number the new row: the broker has another row of that number then.
    assert re.search(r"was the database restored\?|row 1 is .* here, and .* at the broker", _refused(sqlite_shop))


@pytest.mark.threads  # the command line's own
def test_series_is_numbered_anew_only_where_both_disagree(sqlite_shop: Shop, tmp_path: Path) -> None:
    shop = sqlite_shop
    renumber = ["outbox", "renumber", "--config", str(_config(shop, tmp_path)), "--yes", "shop"]
    _drain_one(shop)
    refused = CliRunner().invoke(app, renumber)
    assert refused.exit_code != 0
    assert "the broker took the rows up to 1, the database gave the numbers up to 1" in refused.stderr
    shop.run("UPDATE txmq_marker_outbox_series SET number = 0")
    _refused(shop)
    done = CliRunner().invoke(app, renumber)
    assert done.exit_code == 0
    assert "took 1 rows, and 0 have a number" in " ".join(done.output.split())
    shop.check()


@pytest.mark.threads  # the command line's own, and its hook takes orders
def test_drain_ends_while_orders_go_on(sqlite_shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for what waits when it begins."""
    shop = sqlite_shop
    monkeypatch.setattr(drainer, "ROUND_S", 0.02)  # behind each round it looks whether it is done
    shop.hold()
    _trip(shop)
    for _ in range(3):
        shop.order()
    shop.client.close()  # nobody else drains
    away, came = shop.process(f"txmq://127.0.0.1:{free_port()}"), 0

    def go_on(point: str) -> None:
        nonlocal came
        if point == "client.outbox.sent":
            came += 1
            assert came < 1000, "it does not end"
            assert shop.order(away, key=f"k{came}".encode()).pending

    shop.hold(-1)
    with hooked(go_on):
        done = CliRunner().invoke(app, ["outbox", "drain", "--config", str(_config(shop, tmp_path)), "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"left": {"shop": 0}, "problems": []}), done.output
    assert came
    shop.client, _ = shop.process()
    assert shop.values() == list(range(1, 5 + came - shop.waiting()))


def _config(shop: Shop, folder: Path) -> Path:
    config = folder / "resolver.toml"
    config.write_text(
        f'bootstrap = "{shop.broker.address}"\n[[resource]]\nname = "shop"\nkind = "last-resource"\n'
        f'driver = "sqlite3"\noutbox = true\nconnect = {{ database = "{folder / "shop.db"}" }}\n'
    )
    return config


def _drain_one(shop: Shop) -> None:
    away = shop.resource.outbox
    assert away is not None
    away.trip()
    shop.order().wait_visible(PATIENT_S)
    eventually(lambda: not shop.waiting(), "the row has left")


def _refused(shop: Shop) -> str:
    away = shop.resource.outbox
    assert away is not None
    away.trip()
    shop.order()
    eventually(lambda: away.problem is not None, "the drainer has found it")
    assert shop.waiting() == 1
    assert shop.values() == [1, 2]
    return away.problem or ""
