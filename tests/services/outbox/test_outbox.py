"""Messages written in the application's own transaction: there with its commit, gone with its rollback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from txmq.errors import ConfigError, OutboxFullError, TransactionStateError
from txmq.outbox.outbox import Outbox, new_unit
from txmq.outbox.page import OutboxRow
from txmq.outbox.relay_core import RelayRow
from txmq.outbox.tables import OutboxTables
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

from .databases import KINDS, Connect, connector

TABLES = ("txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay", "orders")


class Shop:
    """A database with an outbox, and how it is reached."""

    def __init__(self, connect: Connect) -> None:
        self.connect, self.outbox, self.opened = connect, Outbox("orders-db"), list[Any]()

    def open(self) -> Any:
        """A connection, closed with the test."""
        self.opened.append(self.connect())
        return self.opened[-1]

    def begin(self, connection: Any) -> None:
        """Begin a transaction if the driver does not by itself."""
        if self.would_autocommit:
            run(connection, "BEGIN")

    def end(self, connection: Any, word: str) -> None:
        """COMMIT or ROLLBACK, as one writes it with this driver."""
        run(connection, word) if self.would_autocommit else getattr(connection, word.lower())()

    def seen(self, rows_max: int = 100, bytes_max: int = 1 << 20) -> list[OutboxRow]:
        """What waits, as another connection sees it."""
        connection = self.connect()
        try:
            return list(self.outbox.tables(connection).waiting(connection, rows_max, bytes_max).rows)
        finally:
            connection.close()

    would_autocommit = False


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Iterator[Shop]:
    made = Shop(connector(request.param, tmp_path, mariadb, postgresql))
    made.would_autocommit = request.param.endswith("autocommit")
    connection = made.open()
    made.begin(connection)
    for table in TABLES:
        run(connection, f"DROP TABLE IF EXISTS {table}")
    run(connection, "CREATE TABLE orders (id INTEGER)")
    made.end(connection, "COMMIT")
    made.outbox.install(connection)
    yield made
    for one in made.opened:
        one.close()


def test_message_exists_with_the_commit_of_its_row(shop: Shop) -> None:
    connection = shop.open()
    for number, word in enumerate(("COMMIT", "ROLLBACK", "COMMIT")):
        shop.begin(connection)
        run(connection, f"INSERT INTO orders VALUES ({number})")
        shop.outbox.send(connection, "orders", b"\x00\xff%d" % number, b"k\xfe", headers={"trace": b"\x80"})
        shop.end(connection, word)
    rows = shop.seen()
    assert [(row.topic, row.key, row.value, row.headers) for row in rows] == [
        ("orders", b"k\xfe", b"\x00\xff%d" % number, (("trace", b"\x80"),)) for number in (0, 2)
    ]
    assert rows[0].id < rows[1].id
    assert {row.unit for row in rows} == {None}


def test_transaction_commits_rows_and_messages_as_one_unit(shop: Shop) -> None:
    connection = shop.open()
    with shop.outbox.transaction(connection) as tx:
        run(connection, "INSERT INTO orders VALUES (1)")
        tx.send("orders", b"one")
        tx.send("mails", b"two", b"key")
    with pytest.raises(ZeroDivisionError):
        _fail_in_transaction(shop, connection)
    rows = shop.seen()
    assert [row.value for row in rows] == [b"one", b"two"]
    assert len({row.unit for row in rows}) == 1
    assert rows[0].unit is not None
    other = shop.open()
    assert run(other, "SELECT id FROM orders")[0] == [(1,)]
    other.rollback()


def _fail_in_transaction(shop: Shop, connection: Any) -> None:
    with shop.outbox.transaction(connection) as tx:
        run(connection, "INSERT INTO orders VALUES (2)")
        tx.send("orders", b"never")
        raise ZeroDivisionError


def test_message_that_would_be_committed_alone_is_refused(shop: Shop) -> None:
    connection = shop.open()
    if shop.would_autocommit:
        with pytest.raises(TransactionStateError, match="begin one"):
            shop.outbox.send(connection, "orders", b"alone")
    else:
        shop.outbox.send(connection, "orders", b"in the transaction that the driver begins")
        connection.rollback()
    assert shop.seen() == []


def test_transaction_within_another_one_is_refused(shop: Shop) -> None:
    connection = shop.open()
    shop.begin(connection)
    run(connection, "INSERT INTO orders VALUES (1)")
    with pytest.raises(TransactionStateError, match="commit it or roll it back"), shop.outbox.transaction(connection):
        pass
    shop.end(connection, "ROLLBACK")


def test_calls_of_one_unit_are_joined(shop: Shop) -> None:
    connection, unit = shop.open(), new_unit()
    shop.begin(connection)
    shop.outbox.send_many(connection, [("a", b"1"), ("a", b"2", b"k")])
    shop.outbox.send_many(connection, [("a", b"3")], unit=unit)
    shop.outbox.send(connection, "a", b"4", unit=unit)
    shop.end(connection, "COMMIT")
    first, second, third, fourth = (row.unit for row in shop.seen())
    assert first == second != third == fourth == unit


def test_installing_again_keeps_what_is_there(shop: Shop) -> None:
    connection = shop.open()
    before = shop.outbox.tables(connection).peek(connection)
    connection.rollback()
    shop.outbox.install(connection)
    after = shop.outbox.tables(connection).peek(connection)
    connection.rollback()
    assert before == after
    assert after is not None
    assert (len(after.uuid), after.home, after.claim) == (32, "", None)


def test_table_of_another_shape_is_refused_by_name(shop: Shop) -> None:
    connection = shop.open()
    with pytest.raises(ConfigError, match="table orders is not an outbox's"):
        Outbox("other", table="orders").install(connection)
    connection.rollback()


def test_full_outbox_refuses_more(shop: Shop) -> None:
    connection, outbox = shop.open(), Outbox("orders-db", rows_max=2)
    shop.begin(connection)
    outbox.send_many(connection, [("a", b"1"), ("a", b"2"), ("a", b"3")])
    shop.end(connection, "COMMIT")
    outbox._looked = float("-inf")
    shop.begin(connection)
    with pytest.raises(OutboxFullError, match="more than 2 messages wait"):
        outbox.send(connection, "a", b"4")
    shop.end(connection, "ROLLBACK")


@pytest.mark.parametrize(("topic", "value"), [("no name", b"v"), ("a", "text"), ("a", None)])
def test_message_that_cannot_be_sent_is_refused_at_once(shop: Shop, topic: str, value: Any) -> None:
    connection = shop.open()
    with pytest.raises(ConfigError):
        shop.outbox.send(connection, topic, value)


# --- the relay's statements -------------------------------------------------------------------------------------------


def _relaying(shop: Shop, *messages: tuple[Any, ...]) -> tuple[Any, OutboxTables]:
    writer = shop.open()
    for message in messages:
        with shop.outbox.transaction(writer) as tx:
            tx.send(*message)
    connection = shop.open()
    return connection, shop.outbox.tables(connection)


def test_claim_is_read_back_as_it_was_written(shop: Shop) -> None:
    connection, tables = _relaying(shop, ("a", b"1"))
    shop.begin(connection)
    row, is_over = tables.lock(connection)
    assert is_over
    claimed = row._replace(home="cluster-home", last="t1", claim="t2", ids=((1, 3), (7, 7)), holder="me")
    tables.claim(connection, claimed, 60_000)
    shop.end(connection, "COMMIT")
    shop.begin(connection)
    assert tables.lock(connection) == (claimed, False)
    tables.claim(connection, row, -1000)
    shop.end(connection, "COMMIT")
    shop.begin(connection)
    assert tables.lock(connection) == (row, True)
    shop.end(connection, "ROLLBACK")
    assert isinstance(tables.peek(connection), RelayRow)
    connection.rollback()


def test_rows_leave_by_the_runs_of_a_claim(shop: Shop) -> None:
    connection, tables = _relaying(shop, *[("a", b"%d" % number) for number in range(5)])
    ids = [row.id for row in shop.seen()]
    shop.begin(connection)
    tables.lock(connection)
    tables.delete(connection, [(ids[0], ids[1]), (ids[3], ids[3])])
    assert [row.value for row in tables.waiting(connection, 100, 1 << 20).rows] == [b"2", b"4"]
    shop.end(connection, "COMMIT")
    assert [row.value for row in shop.seen()] == [b"2", b"4"]


def test_read_ends_with_rows_or_bytes_and_names_cut_units(shop: Shop) -> None:
    connection = shop.open()
    with shop.outbox.transaction(connection) as tx:
        for number in range(4):
            tx.send("a", b"%d" % number * 1000)
    shop.begin(connection)
    tables = shop.outbox.tables(connection)
    first = tables.waiting(connection, 3, 1 << 20)
    assert (len(first.rows), set(first.cut)) == (3, {first.rows[0].unit})
    assert len(tables.waiting(connection, 4, 2500).rows) == 2
    assert len(tables.waiting(connection, 4, 1).rows) == 1
    assert tables.waiting(connection, 4, 1 << 20).cut == set()
    shop.end(connection, "ROLLBACK")


def test_rows_of_every_size_are_read_whole_and_in_order(shop: Shop) -> None:
    """Half of them have more bytes than come with the first question (a hundredth of 100,000)."""
    sizes = (0, 10, 999, 1000, 1001, 5000, 1, 60_000, 2, 40_000)
    connection, tables = _relaying(shop, *[("a", bytes([65 + n]) * size, b"k" * n) for n, size in enumerate(sizes)])
    with shop.outbox.transaction(connection) as tx:
        tx.send("a", b"z", headers={"large": b"h" * 2000})
    shop.begin(connection)
    waiting = tables.waiting(connection, 100, 100_000)
    first = [(bytes([65 + n]) * size, b"k" * n) for n, size in enumerate(sizes[:9])]
    assert [(row.value, row.key) for row in waiting.rows] == first
    rest = tables.waiting(connection, 100, 1 << 20).rows[9:]
    assert [row.value for row in rest] == [b"J" * 40_000, b"z"]
    assert rest[1].headers == (("large", b"h" * 2000),)
    shop.end(connection, "ROLLBACK")


def test_parked_rows_hold_their_keys(shop: Shop) -> None:
    connection, tables = _relaying(shop, ("a", b"1", b"x"), ("a", b"2", b"y"), ("a", b"3"), ("a", b"4", b"x"))
    rows = shop.seen()
    shop.begin(connection)
    tables.lock(connection)
    tables.park(connection, [rows[0], rows[2]], "the broker refuses it")
    waiting = tables.waiting(connection, 100, 1 << 20)
    assert ([row.value for row in waiting.rows], waiting.held) == (
        [b"2", b"4"], {("a", b"x"): rows[0].id},
    )  # fmt: skip
    shop.end(connection, "COMMIT")
