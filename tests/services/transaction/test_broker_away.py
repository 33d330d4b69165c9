"""The broker is away: killed, frozen, or never there. One error, soon, and no row stays locked meanwhile.

Times are not judged but for one: every block is given ``PATIENT_S``, and ends long before.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.crash_points import at_moment
from tests.services.loop_client import Connect, inside
from tests.services.xa.mysql_orders import NAME, MySQLOrders
from txmq import BrokerAwayError, Outcome, RolledBackError
from txmq.client.transport.reconnecting import SILENT_S
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, free_port
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource

PATIENT_S = 600.0  # timeout= of every block
SOON_S = 120.0  # far above the second that is promised: a loaded machine must not turn it red
BRIEFLY_S = 30.0  # the resolver has the file for a moment now and then
CLIENT_TIMEOUT_S = 2.0


class NoStock:
    """A transaction of messages alone."""

    resource: Any = None

    def take(self, tx: Any) -> None:
        """One piece."""

    def pieces(self) -> int:
        """How many are left; nobody holds a lock on them."""
        return 10


class Stock(NoStock):
    """One row in a database, which every order changes."""

    def take(self, tx: Any) -> None:
        tx.connection(self.resource).cursor().execute("UPDATE stock SET pieces = pieces - 1")


class SQLiteStock(Stock):
    """In a file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "stock.db"
        with closing(self._connect()) as connection:
            connection.execute("CREATE TABLE stock (pieces INTEGER)")
            connection.execute("INSERT INTO stock VALUES (10)")
            connection.commit()
        self.resource = LastResource("stock", connect=self._connect)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=BRIEFLY_S, check_same_thread=False)

    def pieces(self) -> int:
        with closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            return int(connection.execute("SELECT pieces FROM stock").fetchone()[0])


class MySQLStock(Stock):
    """In MariaDB."""

    def __init__(self, server: MariaDB, kind: str) -> None:
        self._orders = MySQLOrders(server)
        self._orders.execute("CREATE TABLE stock (pieces INTEGER) ENGINE=InnoDB")
        self._orders.execute("INSERT INTO stock VALUES (10)")
        self.resource = self._orders.resource if kind == "xa" else LastResource(NAME, connect=self._orders.connect)

    def pieces(self) -> int:
        return int(self._orders.execute("SELECT pieces FROM stock FOR UPDATE NOWAIT")[0][0])


class Shop:
    """A client and what it changes."""

    def __init__(self, broker: BrokerProcess, stock: NoStock, connect: Connect) -> None:
        self.broker, self.stock = broker, stock
        self.client = connect(broker.address, timeout=CLIENT_TIMEOUT_S)
        self.producer = self.client.producer(group="shop", checker=lambda _: txmq.Resolution.UNKNOWN)
        self.bodies = 0
        self.client.topics.create("orders")
        if stock.resource is not None:
            inside(self.client, stock.resource.install)

    def order(self, in_body: Callable[[], object] = lambda: None) -> txmq.SendResult:
        """One order; ``in_body`` runs between the row and the message."""
        resources = () if self.stock.resource is None else (self.stock.resource,)
        with self.producer.transaction(*resources, timeout=PATIENT_S) as tx:
            self.bodies += 1
            self.stock.take(tx)
            in_body()
            tx.send("orders", b"one", key=b"k")
        assert tx.outcome is Outcome.COMMITTED
        return tx.results[0]

    def order_when_it_is_back(self) -> None:
        """As an application does that runs blocks again."""
        deadline = time.monotonic() + SOON_S
        while True:
            try:
                self.order()
            except BrokerAwayError:
                assert time.monotonic() < deadline
            else:
                return

    def sold(self) -> int:
        """Messages that can be read; as many pieces are gone, and the row is free.

        XA shows them when the broker was told of the rows, for which the end of a block does not wait.
        """
        taken = 10 - self.stock.pieces()
        if self.stock.resource is not None:
            eventually(lambda: self._readable() >= taken, "the messages of committed blocks are visible")
        assert taken == (self._readable() if self.stock.resource is not None else 0)
        return self._readable()

    def _readable(self) -> int:
        return sum(1 for _ in self.client.browse("orders"))

    def kill_broker(self) -> None:
        """Dead for so long that the client looks whether its link still is one."""
        self.broker.kill()
        self._fall_silent()

    def is_cut(self) -> bool:
        """Whether the link is known to have ended; the resolver's thread may be about to read its end."""

        def is_cut(client: txmq.Client) -> bool:
            link = client.control.live
            return link is None or link.is_stale()

        return inside(self.client, is_cut)

    def freeze_broker(self) -> None:
        """Frozen for so long that the client asks before a block begins."""
        self.broker.pause()
        self._fall_silent()

    def _fall_silent(self) -> None:
        """No request of the last ``SILENT_S`` is answered, whenever the client reads answers to earlier ones."""
        fell_silent_at = time.monotonic()
        eventually(lambda: time.monotonic() - fell_silent_at > SILENT_S, "the silence has lasted")

    def close(self) -> None:
        self.client.close()
        if isinstance(self.stock.resource, LastResource):
            self.stock.resource.close()


def soon(call: Callable[[], object]) -> BrokerAwayError:
    """The error of a call that finds the broker away, and does not wait as long as it might."""
    began = time.monotonic()
    with pytest.raises(BrokerAwayError) as caught:
        call()
    assert time.monotonic() - began < SOON_S
    assert caught.value.retriable
    return caught.value


_QUICK = pytest.mark.threads  # for a loop: one last resource, and two phases


@pytest.fixture(params=[pytest.param("messages", marks=_QUICK), "sqlite", pytest.param("mysql", marks=_QUICK), "xa"])
def shop(request: pytest.FixtureRequest, broker: BrokerProcess, tmp_path: Path, connect: Connect) -> Iterator[Shop]:
    kind = request.param
    if kind == "messages":
        stock = NoStock()
    elif kind == "sqlite":
        stock = SQLiteStock(tmp_path)
    else:
        stock = MySQLStock(request.getfixturevalue("mariadb"), kind)
    opened = Shop(broker, stock, connect)
    yield opened
    opened.close()


def test_block_does_not_begin_while_the_broker_is_dead(shop: Shop) -> None:
    shop.order()
    shop.broker.kill()
    eventually(shop.is_cut, "the client sees that the link has ended")
    for _ in range(4):
        assert isinstance(soon(shop.order), RolledBackError)
    assert shop.bodies == 1
    shop.broker.start()
    shop.order_when_it_is_back()
    assert shop.sold() == 2


def test_broker_death_in_body_undoes_block_and_frees_rows(shop: Shop) -> None:
    shop.order()
    left = shop.stock.pieces()
    error = soon(lambda: shop.order(shop.kill_broker))
    assert isinstance(error, RolledBackError)
    is_xa = shop.stock.resource is not None and not isinstance(shop.stock.resource, LastResource)
    assert (error.txid is not None) == is_xa  # the others ask for their id after the body
    assert shop.stock.pieces() == left
    shop.broker.start()
    shop.order_when_it_is_back()
    assert shop.sold() == 2
    assert list(shop.client.transactions.list(state="in-doubt")) == []


def test_send_in_body_to_dead_broker_raises_that_error(shop: Shop) -> None:
    def die() -> None:
        shop.broker.kill()
        inside(shop.client, lambda client: client.topics.forget("orders"))  # as it is once in METADATA_AGE_S_MAX

    assert isinstance(soon(lambda: shop.order(die)), RolledBackError)
    assert shop.stock.pieces() == 10


def test_frozen_broker_is_noticed_before_first_row_and_found_again(shop: Shop) -> None:
    shop.order()
    left = shop.stock.pieces()
    shop.freeze_broker()
    try:
        for _ in range(3):
            assert isinstance(soon(shop.order), RolledBackError)
        assert (shop.bodies, shop.stock.pieces()) == (1, left)
    finally:
        shop.broker.resume()
    shop.order_when_it_is_back()
    assert shop.sold() == 2


@pytest.fixture
def sqlite_shop(broker: BrokerProcess, tmp_path: Path, connect: Connect) -> Iterator[Shop]:
    opened = Shop(broker, SQLiteStock(tmp_path), connect)
    yield opened
    opened.close()


def test_committed_block_is_reported_soon_despite_broker_that_died_since(sqlite_shop: Shop) -> None:
    began = time.monotonic()
    with at_moment("client.tx.db_committed", sqlite_shop.broker.kill):
        assert sqlite_shop.order().status is txmq.SendStatus.PENDING
    assert time.monotonic() - began < SOON_S
    assert sqlite_shop.stock.pieces() == 9
    sqlite_shop.broker.start()
    sqlite_shop.order_when_it_is_back()  # wakes the resolver, and queues after the first, which has its key
    eventually(lambda: not list(sqlite_shop.client.transactions.list(state="in-doubt")), "nothing is in doubt")
    assert sqlite_shop.sold() == 2


def test_a_half_message_that_cannot_be_prepared_never_was(sqlite_shop: Shop) -> None:
    send_half = partial(sqlite_shop.producer.half, "orders", b"half", timeout=PATIENT_S)
    send_half().rollback()
    sqlite_shop.broker.kill()
    for _ in range(2):
        assert isinstance(soon(send_half), RolledBackError)
    sqlite_shop.broker.start()
    sqlite_shop.order_when_it_is_back()
    assert (sqlite_shop.sold(), list(sqlite_shop.client.transactions.list())) == (1, [])


@pytest.mark.parametrize("is_frozen", [False, True], ids=["nobody listens", "nobody answers"])
def test_calls_to_a_broker_that_was_never_there_report_it(
    broker: BrokerProcess, tmp_path: Path, is_frozen: bool, connect: Connect
) -> None:
    address = broker.address if is_frozen else f"txmq://127.0.0.1:{free_port()}"
    if is_frozen:
        broker.pause()
    with pytest.raises(BrokerAwayError):
        connect(address, timeout=0.2)
    with connect(address, timeout=0.2, lazy=True) as client:
        producer = client.producer(timeout=0.2, group="shop", checker=lambda _: txmq.Resolution.UNKNOWN)
        ordered = client.ordered_producer(txmq.KeyHashSelector(), str(tmp_path / "spool"))
        calls: list[Callable[[], object]] = [
            lambda: producer.send("orders", b"one"),
            lambda: producer.send_async("orders", b"one"),
            lambda: producer.send_many("orders", [(b"k", b"one")]),
            lambda: producer.half("orders", b"one"),
            lambda: producer.transaction().__enter__(),
            lambda: ordered.send("orders", b"one", timeout=0.2),
            client.topics.list,
        ]
        for call in calls:
            soon(call)


def test_lone_send_retries_until_its_timeout_and_reports_nothing_stored(sqlite_shop: Shop) -> None:
    sqlite_shop.producer.send("orders", b"one", timeout=PATIENT_S)
    sqlite_shop.kill_broker()
    error = soon(lambda: sqlite_shop.producer.send("orders", b"two", timeout=0.2))
    assert "nothing was stored" in str(error)
    future = sqlite_shop.producer.send_async("orders", b"three", timeout=PATIENT_S)
    sqlite_shop.broker.start()
    assert future.result(SOON_S).offset == 1
