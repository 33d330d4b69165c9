"""What the outbox's statements cost, where a table may be large."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from txmq.outbox.outbox import Outbox, new_uuid
from txmq.outbox.page import PARKED_MAX
from txmq.outbox.tables import ADOPTED

PARKED = "INSERT INTO txmq_outbox_parked (id, topic, message_key, value, created_ms, why, since_ms) VALUES "


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        Outbox().tables(connection).create(connection, new_uuid())
        yield connection


def test_page_costs_the_same_however_many_rows_were_adopted(connection: sqlite3.Connection) -> None:
    tables, steps = Outbox().tables(connection), 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    def cost() -> int:
        nonlocal steps
        steps = 0
        connection.set_progress_handler(count, 100)
        waiting = tables.waiting(connection, 512, 1 << 20)
        connection.set_progress_handler(None, 0)
        assert (waiting.held, waiting.room) == ({("orders", b"0"): 1}, PARKED_MAX - 1)
        return steps

    connection.execute(f"{PARKED} (1, 'orders', '0', '', 0, 'refused', 0)")
    connection.execute("UPDATE txmq_outbox_parked SET message_key = CAST('0' AS BLOB)")
    for number in range(500):
        Outbox().send(connection, "orders", b"", b"%d" % number)
    few = cost()
    rows = ((number, b"k%d" % number, ADOPTED) for number in range(2, 20_000))
    connection.executemany(f"{PARKED} (?, 'orders', ?, '', 0, ?, 0)", rows)
    assert cost() < few * 1.5
