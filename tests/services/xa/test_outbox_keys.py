"""Keys behind which rows of an outbox wait, as each database compares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.services.xa.test_outbox_tables import RC, SERIES, World, world
from txmq.errors import RolledBackError, TransactionTimeoutError
from txmq.xa import LastResource
from txmq.xa.database import outbox_series
from txmq.xa.database.dbapi import run
from txmq.xa.database.outbox_homes import PARKED, WAITING
from txmq.xa.database.outbox_keys import OutboxKey
from txmq.xa.database.outbox_series import OutboxRow, OutboxSeries, SeriesChangedError
from txmq.xa.last_resource.enclosing import Waiting

__all__ = ["world"]
ORDERS, EUROPE, MOVED = OutboxKey("orders-0", "1a"), OutboxKey("orders-eu-0", "1a"), OutboxKey("orders-10", "1a")
UNDERLINED = OutboxKey("orders_eu-0", "1a")


@pytest.mark.parametrize(
    ("waits", "ours", "gets_in"),
    [
        (EUROPE, ORDERS, True), (ORDERS, EUROPE, True), (MOVED, ORDERS, False), (EUROPE, EUROPE, False),
        (UNDERLINED, UNDERLINED, False), (UNDERLINED, EUROPE, True),
    ],
)  # fmt: skip
def test_topic_whose_name_begins_alike_is_another(
    world: World, waits: OutboxKey, ours: OutboxKey, gets_in: bool
) -> None:  # fmt: skip
    """Otherwise what cannot wait, an order with tx.ack, is refused for as long as a row of that topic is parked."""
    world.outboxed("t1", waits)
    connection = world.begin()
    assert world.mark(connection, "t2", ours) is gets_in
    connection.rollback()


def test_condition_goes_in_one_packet_with_the_marker(world: World) -> None:
    """As text without parameters, where the driver sends several statements at once."""
    resource = LastResource("shop", connect=world.connect, outbox=True)
    for txid, gets_in in (("t1", True), ("t2", False)):
        branch = resource.enlist("c1" * 8)
        branch.end_body()
        assert branch.insert_marker(txid, 60.0, [ORDERS, OutboxKey("orders.x_y-1", "2b")]) is gets_in
        branch.fill_outbox(txid, 60.0, [Waiting("", b"x", [ORDERS])])
        branch.commit()
        branch.finish()
    resource.close()


def test_only_a_waiting_key_sends_a_block_to_the_outbox(world: World) -> None:
    """No row is inserted for other reasons, too: it is late, or the database is another one."""
    resource = LastResource("shop", connect=world.connect, outbox=True)
    world.outboxed("t0", ORDERS)
    branch = resource.enlist("c1" * 8)
    branch.end_body()
    with pytest.raises(TransactionTimeoutError, match="the deadline has passed"):
        branch.insert_marker("t1", -60.0, [ORDERS])
    assert branch.roll_back()
    branch = resource.enlist("c1" * 8)
    branch.end_body()
    assert not branch.insert_marker("t1", 60.0, [ORDERS])
    assert branch.roll_back()
    if world.dialect.name != "sqlite":  # of which one writes at a time
        branch = resource.enlist("c1" * 8)
        branch.end_body()
        world.run(f"UPDATE txmq_marker_identity SET uuid = '{'f' * 32}'")
        with pytest.raises(RolledBackError, match="another database answers"):
            branch.insert_marker("t1", 60.0, [ORDERS])
        assert branch.roll_back()
    resource.close()


def test_recalled_row_waits_again_and_keeps_those_behind_it(world: World) -> None:
    connection, outbox = world.connect(), world.outbox
    for row_id, keys in {"t1": [ORDERS], "t2": [EUROPE], "t3": [ORDERS, UNDERLINED]}.items():
        world.outboxed(row_id, *keys)
    outbox.number(connection)
    first, *_ = outbox.numbered(connection, 0, 9)
    assert outbox.recall(connection, first, "forbidden") == {"orders"}
    for row in outbox.numbered(connection, 0, 9):
        if row.state != WAITING:
            outbox.voided(connection, row)
    assert outbox.numbers(connection) == {2: "t2"}
    assert outbox.number(connection, without=[frozenset({"orders"})]) == 0
    states = {row_id: (state, reason) for row_id, state, _, _, _, reason, _ in outbox.listed(connection, 9)}
    assert states["t1"] == (WAITING, "forbidden")
    assert PARKED not in {state for state, _ in states.values()}
    assert outbox.number(connection) == 2
    assert outbox.numbers(connection) == {2: "t2", 4: "t1", 5: "t3"}


def test_turn_that_is_given_away_is_taken_at_once(world: World) -> None:
    connection = world.connect()
    assert world.outbox.hold(connection, "one", 60_000)
    assert not world.outbox.hold(connection, "other", 60_000)
    world.outbox.let_go(connection, "other")
    assert not world.outbox.hold(connection, "other", 60_000), "it is not his to give"
    world.outbox.let_go(connection, "one")
    assert world.outbox.hold(connection, "other", 60_000)


@pytest.mark.parametrize("count", [1, 5, 200])
def test_drainer_waits_for_no_writer_that_stands_still(world: World, count: int) -> None:
    """Stopped between its rows and its COMMIT. Of few rows a database may look at all, and wait for those locked."""
    connection, outbox = world.connect(), world.outbox
    writer = world.begin()
    for number in range(count):
        outbox.add(writer, f"t{number}", b"x", [OutboxKey(f"orders-{place}", f"{number:x}") for place in range(2)])
    writer.commit()
    open_one = None if world.dialect.name == "sqlite" else world.begin()  # SQLite has one writer
    if open_one is not None:
        outbox.add(open_one, "open", b"x", [ORDERS, EUROPE])
        world.table.insert_outboxed(open_one, "open", world.uuid, 1 << 50)
    assert outbox.hold(connection, "me", 60_000)
    assert outbox.number(connection) == count
    rows = outbox.numbered(connection, 0, count)
    assert outbox.park(connection, rows[0], "refused")
    outbox.voided(connection, rows[0])
    assert outbox.release(connection, "t0")
    assert outbox.number(connection) == 1
    outbox.delete(connection, outbox.numbered(connection, 0, count))
    assert outbox.size(connection).rows == 0
    world.outboxed("t-last", ORDERS)
    assert outbox.number(connection) == 1
    assert outbox.begin_series(connection, "7" * 32, "5" * 32)
    if open_one is not None:
        open_one.rollback()


def test_row_leaves_only_by_its_place_number_and_id(world: World) -> None:
    """As another drainer remembers it: the row has left since, and another one has what it had."""
    connection, outbox = world.connect(), world.outbox
    for row_id in ("t1", "t2"):
        world.outboxed(row_id, ORDERS)
    assert outbox.number(connection) == 2
    row, other = outbox.numbered(connection, 0, 2)
    stale = [replace(row, seq=other.seq), replace(row, number=other.number), replace(row, id=other.id)]
    outbox.delete(connection, stale)
    assert outbox.numbered(connection, 0, 2) == [row, other]
    assert outbox.last_ahead(connection, [ORDERS]) == other.seq
    connection.rollback()
    outbox.delete(connection, [*stale, row])
    assert outbox.numbered(connection, 0, 2) == [other]
    outbox.delete(connection, [other])
    assert outbox.last_ahead(connection, [ORDERS]) is None
    connection.rollback()
    ((keys,),) = run(connection, "SELECT COUNT(*) FROM txmq_marker_outbox_keys")[0]
    assert int(keys) == 0


@pytest.mark.parametrize(
    ("sizes", "pages"), [([1, 2, 3], [3]), ([9, 1, 30, 1, 9, 9], [2, 1, 2, 1]), ([40, 40], [1, 1])]
)
def test_page_ends_where_rows_are_too_large(
    world: World, monkeypatch: pytest.MonkeyPatch, sizes: list[int], pages: list[int]
) -> None:
    monkeypatch.setattr(outbox_series, "PAGE_BYTES_MAX", 16)  # four rows of 4 bytes are read at once
    connection, outbox = world.connect(), world.outbox
    for number, size in enumerate(sizes):
        writer = world.begin()
        outbox.add(writer, f"t{number}", bytes([number]) * size, [ORDERS])
        writer.commit()
    found = list[list[OutboxRow]]()
    while rows := outbox.take(connection, "5" * 32, 4, found[-1] if found else []):
        found.append(rows)
    assert [len(rows) for rows in found] == pages
    assert [row.batches for rows in found for row in rows] == [bytes([at]) * size for at, size in enumerate(sizes)]
    assert [row.number for rows in found for row in rows] == list(range(1, len(sizes) + 1))
    assert outbox.size(connection).rows == 0


def test_page_that_is_not_numbered_leaves_everything_as_it_was(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, outbox = world.connect(), world.outbox
    for row_id in ("t1", "t2", "t3"):
        world.outboxed(row_id, ORDERS)
    placed = outbox.take(connection, SERIES, 2, [])
    assert placed is not None
    assert outbox.numbers(connection) == {1: "t1", 2: "t2"}
    with pytest.raises(SeriesChangedError):
        outbox.take(connection, "6" * 32, 2, placed)
    with monkeypatch.context() as broken:
        numbering = OutboxSeries._numbering
        broken.setattr(OutboxSeries, "_numbering", lambda *given: [*numbering(*given), "UPDATE nowhere SET number = 1"])
        with pytest.raises(Exception, match="nowhere"):
            outbox.take(connection, SERIES, 2, placed)
    other = world.connect()  # which waits for no lock
    assert outbox.numbers(other) == {1: "t1", 2: "t2"}
    taken = outbox.take(other, SERIES, 2, placed)
    assert taken is not None
    assert [(row.number, row.id) for row in taken] == [(3, "t3")]
    assert outbox.numbers(connection) == {3: "t3"}


@pytest.mark.parametrize("world", [RC], indirect=True)
def test_page_goes_in_two_packets_if_the_server_takes_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, outbox = world.connect(), world.outbox
    for row_id in ("t1", "t2"):
        world.outboxed(row_id, ORDERS)
    placed = outbox.take(connection, SERIES, 1, [])
    assert placed is not None
    sent, driver = list[str](), type(connection)
    query = driver.query

    def noted(of: object, packet: str) -> None:
        sent.append(packet)
        query(of, packet)

    monkeypatch.setattr(driver, "query", noted)
    monkeypatch.setattr(driver, "commit", None)
    assert outbox.take(connection, SERIES, 1, placed) is not None
    assert [packet.split()[0] for packet in sent] == ["DELETE", "UPDATE"]
    assert sent[1].endswith("; COMMIT")


@pytest.mark.parametrize("world", [RC], indirect=True)
@pytest.mark.parametrize("character_set", ["latin1", "utf8mb3", "ucs2", "gbk"])
def test_bytes_are_not_converted_to_the_character_set_of_connection(world: World, character_set: str) -> None:
    connection, batches = world.begin(), bytes(range(256))
    connection.cursor().execute(f"SET character_set_connection = {character_set}")
    world.outbox.add(connection, "t1", batches, [ORDERS])
    rows = world.outbox.take(connection, SERIES, 1, [])
    assert rows is not None
    assert [row.batches for row in rows] == [batches]
    assert world.outbox.take(connection, SERIES, 1, rows) == []
    assert world.outbox.size(connection).rows == 0


@pytest.mark.parametrize("world", [RC], indirect=True)
def test_limits_of_the_applications_sessions_do_not_hold_for_drainers(world: World) -> None:
    def connect() -> Any:
        connection = world.connect()
        connection.cursor().execute("SET sql_safe_updates = 1, sql_select_limit = 25")
        return connection

    ids = [f"t{number:02}" for number in range(30)]
    for row_id in ids:
        world.outboxed(row_id, ORDERS)
    database = LastResource("shop", connect=connect, outbox=True).open_for_resolver("")
    outbox = database.outbox
    assert outbox is not None
    rows = outbox.take(database.connection, SERIES, 40, [])
    assert rows is not None
    assert [row.id for row in rows] == ids
    assert outbox.take(database.connection, SERIES, 40, rows) == []
    assert outbox.size(database.connection).rows == 0
