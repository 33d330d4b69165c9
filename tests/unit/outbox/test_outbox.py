"""``Outbox`` over the ways in which sqlite3 begins and ends transactions; of Python 3.12 there are two more."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.simulated.clock import SimClock
from txmq.client.relay.database_side import RelayDatabase
from txmq.errors import ConfigError, TransactionStateError
from txmq.outbox.outbox import UNITS_MAX, Outbox
from txmq.outbox.relay_core import Claim, Locked, Read
from txmq.xa.database.dbapi import run
from txmq.xa.database.dialects import SQLITE

Connect = Callable[[], sqlite3.Connection]
OLD: dict[str, dict[str, Any]] = {"begins before it writes": {}, "told": {"isolation_level": None}}
NEW: dict[str, dict[str, Any]] = {"always open": {"autocommit": False}, "autocommit": {"autocommit": True}}
MODES = OLD | (NEW if sys.version_info >= (3, 12) else {})
ALONE = ("told", "autocommit")  # each statement is committed by itself there


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(mode: str, tmp_path: Path) -> Connect:
    def opened() -> sqlite3.Connection:
        opened: sqlite3.Connection = sqlite3.connect(tmp_path / "shop.db", **MODES[mode])
        return opened

    connection = opened()
    Outbox().install(connection)
    connection.close()
    return opened


def seen(tmp_path: Path, what: str = "value FROM txmq_outbox ORDER BY id") -> list[Any]:
    connection = sqlite3.connect(tmp_path / "shop.db")
    found = [value for (value,) in connection.execute(f"SELECT {what}")]
    connection.close()
    return found


def test_message_that_would_be_committed_alone_is_refused(mode: str, connect: Connect, tmp_path: Path) -> None:
    connection = connect()
    if mode in ALONE:
        with pytest.raises(TransactionStateError, match="no transaction is open"):
            Outbox().send(connection, "orders", b"alone")
    else:
        Outbox().send(connection, "orders", b"in the transaction that the driver begins")
        connection.rollback()
    connection.close()
    assert seen(tmp_path) == []


def test_tables_are_made_once_for_a_driver(connect: Connect) -> None:
    outbox, connections = Outbox(), [connect(), connect()]
    one, another = map(outbox.tables, connections)
    assert one is another
    for connection in connections:
        connection.close()


def test_transactions_are_committed_or_rolled_back(connect: Connect, tmp_path: Path) -> None:
    connection, outbox = connect(), Outbox()
    with outbox.transaction(connection) as tx:
        tx.send("orders", b"one")
    assert seen(tmp_path) == [b"one"]
    with pytest.raises(LookupError):
        _fail(outbox, connection)
    with outbox.transaction(connection) as tx:
        tx.send("orders", b"two")
    connection.close()
    assert seen(tmp_path) == [b"one", b"two"]


def _fail(outbox: Outbox, connection: sqlite3.Connection) -> None:
    with outbox.transaction(connection) as tx:
        tx.send("orders", b"never")
        raise LookupError


def test_transaction_that_reads_first_can_still_write(mode: str, connect: Connect, tmp_path: Path) -> None:
    """Found: it began with its first write, when another one may have written since it had read."""
    connection, other = connect(), sqlite3.connect(tmp_path / "shop.db", timeout=0.0)
    if mode != "always open":
        with Outbox().transaction(connection) as tx:
            connection.execute("SELECT COUNT(*) FROM txmq_outbox").fetchall()
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("INSERT INTO txmq_outbox (topic, value, created_ms) VALUES ('a', 'b', 0)")
            tx.send("orders", b"one")
        assert seen(tmp_path) == [b"one"]
    connection.close()
    other.close()


def test_claim_of_a_relay_is_committed(connect: Connect, tmp_path: Path) -> None:
    database = RelayDatabase(Outbox(), connect, SimClock())
    locked = database.lock()
    assert isinstance(locked, Locked)
    assert database.claim(Claim(locked.row._replace(claim="claimed", holder="me"), ()))
    assert seen(tmp_path, "claim FROM txmq_outbox_relay") == ["claimed"]
    locked = database.lock()
    assert locked is not None
    assert locked.row.claim == "claimed"
    database.unlock()
    database.close()


def test_lease_is_as_long_as_a_large_page_may_take(connect: Connect, tmp_path: Path) -> None:
    now = f"{SQLITE.now_ms} FROM txmq_outbox_relay"
    connection, database = connect(), RelayDatabase(Outbox(), connect, SimClock())
    for size, bytes_max, lease_s in ((1, 1 << 20, 15), (1, 8 << 20, 22), (30 << 20, 1 << 20, 44)):
        with Outbox().transaction(connection) as tx:
            tx.send("orders", bytes(size))
        locked = database.lock()
        assert isinstance(locked, Locked)
        assert database.read(Read((), 1, bytes_max)) is not None
        (before,) = seen(tmp_path, now)
        assert database.claim(Claim(locked.row._replace(claim="claimed", holder="me"), ()))
        (begun,) = seen(tmp_path, f"until_ms - {1000 * lease_s} FROM txmq_outbox_relay")
        (after,) = seen(tmp_path, now)
        assert before <= begun <= after
        run(connection, "DELETE FROM txmq_outbox")
        connection.commit()
    database.close()
    connection.close()


def test_unit_over_a_brokers_transaction_is_refused(connect: Connect, tmp_path: Path) -> None:
    outbox, connection = Outbox(unit_bytes_max=9), connect()
    too_large = pytest.raises(ConfigError, match="10 bytes of messages are more than the 9 of a unit")
    with too_large:
        outbox.send(connection, "orders", b"123456789", b"k")
    with too_large:
        outbox.send_many(connection, [("orders", b"12345"), ("orders", b"12345")])
    connection.rollback()
    with outbox.transaction(connection) as tx:
        tx.send("orders", b"123456789")
        with too_large:
            tx.send("orders", b"1")
    assert seen(tmp_path) == [b"123456789"]
    connection.close()


def test_calls_joined_by_a_unit_are_added_up(connect: Connect, tmp_path: Path) -> None:
    outbox, connection = Outbox(unit_bytes_max=9), connect()
    if connection.isolation_level is None or not connection.in_transaction:
        connection.execute("BEGIN")
    outbox.send(connection, "orders", b"1234", unit=7)
    connection.execute("SAVEPOINT half")
    outbox.send(connection, "orders", b"5678", unit=7)
    for unit in range(100, 100 + UNITS_MAX):  # others, which are forgotten first
        outbox._note_joined(unit, 1, 1)
        outbox._note_joined(7, 2, 8)
    with pytest.raises(ConfigError, match="10 bytes of messages are more than the 9 of a unit"):
        outbox.send_many(connection, [("orders", b"9"), ("orders", b"0")], unit=7)
    outbox.send(connection, "orders", b"90", unit=8)
    connection.execute("ROLLBACK TO half")  # of which the outbox is not told
    outbox.send_many(connection, [("orders", b"abc"), ("orders", b"de")], unit=7)
    connection.execute("COMMIT")
    assert (seen(tmp_path), len(outbox._joined)) == ([b"1234", b"abc", b"de"], UNITS_MAX)
    connection.close()
