"""Parts into messages: markers, statements, XA, and what is refused because a change would be missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.services.binlog.scripted import PART_ROWS, TABLES, part, parts_of
from txmq.binlog.config import BinlogSettings, PublishSettings, SnapshotSettings
from txmq.binlog.decoded_changes import Ddl, DdlKind, RowChange, TableName, TransactionPart, XaEnd, XaPrepare
from txmq.binlog.errors import BinlogError, SourceError
from txmq.binlog.event_json import EventEncoder
from txmq.binlog.position import Position
from txmq.binlog.publish import change_messages
from txmq.binlog.publish.change_messages import Batch, Gathering, Outgoing, Step
from txmq.binlog.publish.published import ParkedRows, Published, read_published
from txmq.binlog.publish.publisher import opened
from txmq.binlog.publish.topics import Topics
from txmq.binlog.publish.unread import SnapshotState
from txmq.model import Message
from txmq.xid import Xid, xid_sql

ORDERS, STOCK, _ = TABLES
XID = Xid(1, b"x", b"b")
PARTITIONS = 3
TOPICS = ["s.shop.orders", "s.shop.stock", "s.crm.orders"]


def inserts(count: int, first: int = 0, schema: Any = ORDERS) -> list[RowChange]:
    """So many rows."""
    return [RowChange("c", schema, None, (number, "v")) for number in range(first, first + count)]


class Log:
    """What was published, and the parked topic that it makes."""

    def __init__(self) -> None:
        self.messages: list[Outgoing] = []

    def read(self, xid: str, rows: ParkedRows) -> Iterator[Outgoing]:
        """See ``change_messages.Parked``."""
        key = change_messages.parked_key(xid, rows.gtid)
        parked = [one for one in self.messages if one[0] == "s.parked"][rows.offset :]
        for topic, partition, own, value, headers, now_ms in parked:
            if own == key:
                yield opened(Message(topic, partition, 0, own, value, dict(headers), None, now_ms, None))

    def ops(self, topic: str = "s.shop.orders") -> list[tuple[str, int]]:
        """Op and partition of what a topic got."""
        return [(json.loads(one[3])["op"], one[1]) for one in self.messages if one[0] == topic]


def made(log: Log, begin: Published | None = None, **settings: Any) -> Gathering:
    """A gathering that begins after a position."""
    publish = PublishSettings(partitions=PARTITIONS, **{"transaction_rows_max": 2 * PART_ROWS, **settings})
    whole = BinlogSettings(name="s", publish=publish)
    begin = begin or Published("", Position("mariadb", ""))
    parked_end = sum(one[0] == "s.parked" for one in log.messages)
    topics = Topics(publish, "s", lambda _: PARTITIONS, lambda: TOPICS)
    return Gathering(whole, topics, EventEncoder("s"), log, begin, parked_end)


def taken(gathers: Gathering, log: Log, *parts: TransactionPart) -> list[Step]:
    """The steps of some parts, published."""
    steps = []
    for one in parts:
        for step in gathers.steps(one, 5):
            log.messages += step.messages
            steps.append(step)
    return steps


def published(steps: list[Step]) -> Published:
    """What the last step publishes, over its JSON: as another process reads it."""
    batch = Batch(0.0)
    for step in steps:
        batch.add(step)
    found = read_published(batch.published(None, "id", 7, "key-2", 70).to_json(), "it")
    assert found is not None
    return found


def test_a_whole_transaction_is_one_step_without_markers() -> None:
    log = Log()
    (step,) = taken(made(log), log, part(1, inserts(3)))
    assert [op for op, _ in log.ops()] == ["c", "c", "c"]
    found = published([step])
    assert (found.position.gtids, found.rows, found.transactions, found.open) == ("0-1-1", 3, 1, None)


def test_markers_stand_around_a_large_transaction_in_every_partition() -> None:
    log = Log()
    changes = [*inserts(PART_ROWS), *inserts(PART_ROWS, schema=STOCK), *inserts(2, 100)]
    steps = taken(made(log), log, *parts_of(1, changes))
    for topic, rows in (("s.shop.orders", PART_ROWS + 2), ("s.shop.stock", PART_ROWS)):
        ops = log.ops(topic)
        assert [op for op, _ in ops] == ["begin"] * PARTITIONS + ["c"] * rows + ["end"] * PARTITIONS
        assert {number for op, number in ops if op == "begin"} == set(range(PARTITIONS))
        assert {number for op, number in ops if op == "end"} == set(range(PARTITIONS))
    ends = [json.loads(one[3])["rows"] for one in log.messages if json.loads(one[3])["op"] == "end"]
    assert set(ends) == {len(changes)}
    assert [step.transactions for step in steps] == [0, 0, 1]


def test_a_restart_between_parts_repeats_no_marker() -> None:
    log, pieces = Log(), parts_of(1, inserts(3 * PART_ROWS))
    steps = taken(made(log), log, pieces[0])
    taken(made(log, published(steps)), log, *pieces[1:])
    assert Counter(op for op, _ in log.ops()) == {"begin": PARTITIONS, "c": 3 * PART_ROWS, "end": PARTITIONS}


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_part_that_is_not_the_next_one_is_refused(wrong: int) -> None:
    log, pieces = Log(), parts_of(1, inserts(3 * PART_ROWS))
    gathers = made(log)
    taken(gathers, log, pieces[0])
    with pytest.raises(SourceError, match=f"went on at change {pieces[wrong].number}, and {PART_ROWS} are published"):
        taken(gathers, log, pieces[wrong])


def test_another_transaction_in_the_middle_of_one_is_refused() -> None:
    log, gathers = Log(), made(Log())
    taken(gathers, log, parts_of(1, inserts(3 * PART_ROWS))[0])
    with pytest.raises(SourceError, match=f"of 0-1-1 only {PART_ROWS} changes are published"):
        taken(gathers, log, part(2, inserts(1)))


def test_a_transaction_that_begins_in_its_middle_is_refused() -> None:
    log = Log()
    with pytest.raises(SourceError, match=f"at change {PART_ROWS}, and 0 are published"):
        taken(made(log), log, parts_of(1, inserts(3 * PART_ROWS))[1])


def ddl(kind: DdlKind, *, additive: bool) -> TransactionPart:
    """A statement about both tables."""
    return part(1, ddl=Ddl(kind, "a statement", "shop", concerned=(ORDERS.table, STOCK.table), additive=additive))


def test_a_statement_goes_to_every_partition_of_its_tables_topics() -> None:
    log = Log()
    taken(made(log), log, ddl(DdlKind.RENAME, additive=False))
    for topic in ("s.shop.orders", "s.shop.stock"):
        assert log.ops(topic) == [("ddl", number) for number in range(PARTITIONS)]


def test_a_table_that_is_not_captured_gets_no_topic() -> None:
    log, other = Log(), TableName("attic", "orders")
    moved = Ddl(DdlKind.RENAME, "a statement", "shop", moved=((ORDERS.table, other),), foreign=frozenset({other}))
    taken(made(log), log, part(1, ddl=moved))
    assert {one[0] for one in log.messages} == {"s.shop.orders"}
    assert json.loads(log.messages[0][3])["moved"] == [[["shop", "orders"], ["attic", "orders"]]]


def test_a_dropped_database_is_told_to_all_its_topics() -> None:
    log = Log()
    dropped = Ddl(DdlKind.DATABASE, "DROP DATABASE shop", "shop", emptied=(TableName("shop", ""),))
    taken(made(log), log, part(1, ddl=dropped))
    assert [one[0] for one in log.messages] == ["s.shop.orders"] * PARTITIONS + ["s.shop.stock"] * PARTITIONS


def test_a_topic_that_two_tables_share_gets_a_statement_once() -> None:
    log = Log()
    taken(made(log, topic="{name}.{database}"), log, ddl(DdlKind.RENAME, additive=False))
    assert log.ops("s.shop") == [("ddl", number) for number in range(PARTITIONS)]


@pytest.mark.parametrize(
    ("kind", "additive", "stops"),
    [
        (DdlKind.ALTER, False, True), (DdlKind.DROP, False, True), (DdlKind.ALTER, True, False),
        (DdlKind.TRUNCATE, False, False), (DdlKind.CREATE, True, False), (DdlKind.OTHER, False, False),
    ],
)  # fmt: skip
def test_with_stop_nothing_passes_that_may_contradict_what_consumers_know(
    kind: DdlKind, additive: bool, stops: bool
) -> None:
    log = Log()
    if not stops:
        taken(made(log, ddl="stop"), log, ddl(kind, additive=additive))
        return
    with pytest.raises(BinlogError, match=r"stopped before transaction 0-1-1.*a statement"):
        taken(made(log, ddl="stop"), log, ddl(kind, additive=additive))
    assert log.messages == []


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("rows", [3, 2 * PART_ROWS, 5 * PART_ROWS])
def test_prepared_rows_are_parked_and_sent_when_they_are_committed(rows: int, restarts: bool) -> None:
    log = Log()
    gathers = made(log)
    taken(gathers, log, part(1, inserts(2)))
    steps = taken(gathers, log, *parts_of(2, inserts(rows, 10), XaPrepare(XID)))
    assert len(log.ops()) == 2
    assert published(steps).parked == {xid_sql(XID): ParkedRows("0-1-2", 0, rows)}
    steps = taken(gathers, log, part(3, inserts(1, 5)))
    if restarts:
        gathers = made(log, published(steps))
    steps = taken(gathers, log, part(4, xa=XaEnd(XID, committed=True)))
    sent = [json.loads(one[3])["after"]["id"] for one in log.messages if one[0] == "s.shop.orders" and b'"c"' in one[3]]
    assert sent == [0, 1, 5, *range(10, 10 + rows)]
    assert published(steps).parked == {}
    has_markers = rows > 2 * PART_ROWS
    assert Counter(op for op, _ in log.ops())["end"] == (PARTITIONS if has_markers else 0)


@pytest.mark.parametrize(("table", "stops"), [(ORDERS.table, True), (TableName("shop", "made"), False)])
def test_with_stop_a_replaced_table_without_a_topic_passes(table: TableName, stops: bool) -> None:
    statement = part(1, ddl=Ddl(DdlKind.CREATE, "CREATE OR REPLACE TABLE it (id INT)", "shop", emptied=(table,)))
    log = Log()
    if stops:
        with pytest.raises(BinlogError, match="stopped before transaction"):
            taken(made(log, ddl="stop"), log, statement)
        return
    taken(made(log, ddl="stop"), log, statement)
    assert log.ops("s.shop.made") == [("ddl", number) for number in range(PARTITIONS)]


def test_a_restart_within_an_xa_commit_repeats_nothing() -> None:
    log, rows = Log(), 5 * PART_ROWS
    gathers = made(log)
    taken(gathers, log, *parts_of(1, inserts(rows), XaPrepare(XID)))
    end = part(2, xa=XaEnd(XID, committed=True))
    first = next(gathers.steps(end, 5))
    log.messages += first.messages
    found = published([first])
    assert (found.position.gtids, found.open and found.open.rows) == ("0-1-1", 2 * PART_ROWS)
    taken(made(log, found), log, end)
    assert Counter(op for op, _ in log.ops()) == {"begin": PARTITIONS, "c": rows, "end": PARTITIONS}


def test_prepared_rows_that_are_rolled_back_are_never_sent() -> None:
    log, gathers = Log(), made(Log())
    taken(gathers, log, *parts_of(1, inserts(3), XaPrepare(XID)))
    (step,) = taken(gathers, log, part(2, xa=XaEnd(XID, committed=False)))
    assert (log.ops(), published([step]).parked) == ([], {})


def test_an_xid_that_is_prepared_again_has_the_new_rows() -> None:
    log, gathers = Log(), made(Log())
    taken(gathers, log, part(1, inserts(2), xa=XaPrepare(XID)), part(2, xa=XaEnd(XID, committed=False)))
    taken(gathers, log, part(3, inserts(1, 7), xa=XaPrepare(XID)), part(4, xa=XaEnd(XID, committed=True)))
    assert [json.loads(one[3])["after"]["id"] for one in log.messages if one[0] == "s.shop.orders"] == [7]


def test_an_xa_commit_that_stands_twice_counts_once() -> None:
    log = Log()
    gathers = made(log)
    taken(gathers, log, part(1, inserts(2), xa=XaPrepare(XID)))
    found = published(taken(gathers, log, part(2, xa=XaEnd(XID, committed=True))))
    again = read_published(found.to_json(), "")
    assert again == found
    gathers = made(log, again)
    taken(gathers, log, part(3, xa=XaEnd(XID, committed=True)), part(4, xa=XaEnd(XID, committed=False)))
    taken(gathers, log, part(5, inserts(1, 7), xa=XaPrepare(XID)), part(6, xa=XaEnd(XID, committed=True)))
    rows = [json.loads(one[3])["after"]["id"] for one in log.messages if one[0] == "s.shop.orders"]
    assert (len(rows), rows[-1]) == (3, 7)


def test_only_the_newest_xa_commits_are_known() -> None:
    log = Log()
    gathers = made(log)
    for number in range(101):
        xid = Xid(1, b"g%d" % number, b"")
        taken(gathers, log, part(2 * number + 1, inserts(1), xa=XaPrepare(xid)))
        (step,) = taken(gathers, log, part(2 * number + 2, xa=XaEnd(xid, committed=True)))
    assert len(step.ended) == 100
    taken(gathers, log, part(203, xa=XaEnd(Xid(1, b"g1", b""), committed=True)))
    with pytest.raises(SourceError, match=r"prepared before this reader's first\s+position"):
        taken(gathers, log, part(204, xa=XaEnd(Xid(1, b"g0", b""), committed=True)))


def test_rows_prepared_before_the_first_position_stop_the_reader() -> None:
    log = Log()
    taken(made(log), log, part(1, xa=XaEnd(XID, committed=False)))
    with pytest.raises(SourceError, match=r"prepared before this reader's first\s+position"):
        taken(made(log), log, part(1, xa=XaEnd(XID, committed=True)))


def test_rows_prepared_before_a_snapshot_are_in_its_first_view() -> None:
    end, begun = part(1, xa=XaEnd(XID, committed=True)), Published("", Position("mariadb", ""))
    unread = SnapshotState((ORDERS.table,), tables=1)
    log = Log()
    (step,) = taken(made(log, replace(begun, snapshot=unread)), log, end)
    assert (log.messages, step.snapshot, published([step]).position.gtids) == ([], unread, "0-1-1")
    for read in (replace(unread, rows=1), replace(unread, again=True)):
        with pytest.raises(SourceError, match=r"prepared before this reader's first\s+position"):
            taken(made(log, replace(begun, snapshot=read)), log, end)
    gathers = made(log, replace(begun, snapshot=unread))
    gathers._settings = replace(gathers._settings, snapshot=SnapshotSettings(mode="shop.o*"))  # others are not shown
    with pytest.raises(SourceError, match=r"prepared before this reader's first\s+position"):
        taken(gathers, log, end)


def test_parked_rows_beyond_the_memory_limit_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_messages, "_FRESH_BYTES_MAX", 1)
    log, gathers = Log(), made(Log())
    gathers = made(log)
    taken(gathers, log, *parts_of(1, inserts(3), XaPrepare(XID)), part(2, xa=XaEnd(XID, committed=True)))
    assert [op for op, _ in log.ops()] == ["c"] * 3


def test_an_event_too_large_for_a_request_names_its_table() -> None:
    change = RowChange("c", ORDERS, None, (1, "v" * change_messages.MESSAGE_SIZE_BYTES_MAX))
    with pytest.raises(BinlogError, match=r"shop\.orders: a change of transaction 0-1-1 is an event of"):
        taken(made(Log()), Log(), part(1, [change]))


def test_a_batch_takes_whole_steps_up_to_its_limits() -> None:
    log = Log()
    small, large = taken(made(log), log, part(1, inserts(3)), part(2, inserts(30)))
    batch = Batch(0.0)
    assert batch.has_room(large, 10, 10)  # alone, whatever its size
    batch.add(small)
    assert batch.has_room(small, 6, 1 << 20)
    assert not batch.has_room(small, 5, 1 << 20)
    assert not batch.has_room(small, 6, 2 * small.size_bytes - 1)
    batch.add(replace_rows(small))
    assert (batch.rows, batch.transactions, len(batch.messages)) == (6, 2, 6)


def replace_rows(step: Step) -> Step:
    """The same step again."""
    return step._replace(source_ms=step.source_ms + 1)


def test_counts_go_on_where_the_former_message_ended() -> None:
    log = Log()
    steps = taken(made(log), log, part(1, inserts(3)))
    batch = Batch(0.0)
    batch.add(steps[0])
    before = replace(published(steps), rows=100, transactions=10)
    found = batch.published(before, "next", 9, "key-2", 71)
    assert (found.rows, found.transactions, found.published_ms, found.epoch) == (103, 11, 9, 71)
    assert before.epoch == 70


def epochs_of(messages: list[Outgoing]) -> list[int]:
    """The number that each message has."""
    return [int(dict(headers)["txmq.epoch"]) for _, _, _, _, headers, _ in messages]


def test_epochs_are_numbered_on_from_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_messages, "EPOCH_ROWS_MAX", 2)
    log = Log()
    batch = Batch(0.0)
    for step in taken(made(log), log, part(1, inserts(5))):
        batch.add(step)
    messages, last = batch.numbered(None, 1000, "parked")
    assert (epochs_of(messages), last) == ([1000, 1000, 1001, 1001, 1002], 1002)  # a first one begins at the clock
    before = replace(Published("", Position("mariadb", "")), epoch=last)
    assert epochs_of(batch.numbered(before, 2000, "parked")[0])[0] == 1003
    monkeypatch.setattr(change_messages, "EPOCH_BYTES_MAX", 1)
    assert epochs_of(batch.numbered(before, 2000, "parked")[0]) == [1003, 1004, 1005, 1006, 1007]
    assert batch.numbered(before, 2000, messages[0][0])[0] == batch.messages  # what is parked has none


def test_no_epoch_ends_within_a_change_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_messages, "EPOCH_ROWS_MAX", 1)
    log = Log()
    moved = [RowChange("u", ORDERS, (number, "v"), (number + 10, "v")) for number in range(2)]
    batch = Batch(0.0)
    for step in taken(made(log), log, part(1, [*moved, RowChange("d", ORDERS, (10, "v"), None)])):
        batch.add(step)
    assert epochs_of(batch.numbered(None, 5, "parked")[0]) == [5, 5, 6, 6, 7]


@pytest.mark.parametrize("value", [None, b"", b"[]", b"{}", b'{"id": 1}', b'{"genesis": false}'])
def test_a_message_that_is_no_position_stops_the_reader(value: bytes | None) -> None:
    with pytest.raises(BinlogError, match="message 3 is no position"):
        read_published(value, "message 3")


def test_the_first_message_names_no_position() -> None:
    assert read_published(b'{"genesis": true}', "it") is None
