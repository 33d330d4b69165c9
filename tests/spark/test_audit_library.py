"""The audit over DataFrames: each fault is found once, under its name, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from txmq.errors import ConfigError
from txmq.spark.audit.audit import InDoubt, Surroundings, audit
from txmq.spark.audit.match import Window
from txmq.spark.audit.spec import AuditSpec, Kind, RowTime, parse_source, parse_terms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from txmq.spark.audit.audit import AuditResult

pytestmark = pytest.mark.timeout(1200)  # on a machine with eight others
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp() * 1000)
MESSAGES = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "headers array<struct<key:string,value:binary>>, txid string"
)
ROWS = "id long, customer string, version long, amount decimal(10,2), committed timestamp, txid string"
SPEC = AuditSpec(
    "orders", parse_terms(["id = json:$.id"]), parse_terms(["amount = json:$.amount"]), order="version",
    row_time=RowTime("committed"), row_txid="txid",
)  # fmt: skip
CUSTOMERS = 4


class AuditedOrders:
    """100 orders of 4 customers, ten seconds apart; a transaction writes two of them."""

    def __init__(self, orders: int = 100) -> None:
        self.rows: list[list[Any]] = [
            [n, f"c{n % CUSTOMERS}", n, f"{n}.50", NOON + timedelta(seconds=10 * n), f"t{n // 8}-{n % CUSTOMERS}"]
            for n in range(orders)
        ]
        self.sent: dict[int, list[list[Any]]] = {0: [], 1: []}  # by partition: order, amount, time, txid, key
        for n, customer, _, amount, at, txid in self.rows:
            self.sent[n % 2].append([n, amount, at - timedelta(milliseconds=5), txid, customer])

    def place_of(self, order: int) -> tuple[int, int]:
        place = next(i for i, line in enumerate(self.sent[order % 2]) if line[0] == order)
        return order % 2, place

    def unsend(self, order: int) -> None:
        partition, place = self.place_of(order)
        del self.sent[partition][place]

    def messages(self, spark: SparkSession, hidden: Sequence[tuple[int, int]] = ()) -> DataFrame:
        lines = [
            (
                key.encode(), json.dumps({"id": n, "amount": amount}).encode(), "orders", partition, offset, at,
                [("size", b"2")], txid,
            )
            for partition, sent in self.sent.items()
            for offset, (n, amount, at, txid, key) in enumerate(sent)
            if (partition, offset) not in hidden
        ]  # fmt: skip
        return spark.createDataFrame(lines, MESSAGES)

    def table(self, spark: SparkSession) -> DataFrame:
        from decimal import Decimal

        return spark.createDataFrame([(*row[:3], Decimal(row[3]), *row[4:]) for row in self.rows], ROWS)


def found(result: AuditResult) -> dict[str, list[tuple[Any, ...]]]:
    lines: dict[str, list[tuple[Any, ...]]] = {}
    for row in result.findings.collect():
        lines.setdefault(row["kind"], []).append((row["identity"], row["partition"], row["offset"], row["txid"]))
    return {kind: sorted(places, key=str) for kind, places in lines.items()}


def of_kinds(result: AuditResult) -> Mapping[str, int]:
    return {kind.value: count for kind, count in result.counts.items() if count}


def test_each_fault_is_found_once_and_nothing_else_is(spark: SparkSession) -> None:
    world = AuditedOrders()
    world.unsend(20)  # missing, together with the other of its transaction
    world.unsend(16)
    world.unsend(41)  # torn: 45 is there
    partition, place = world.place_of(60)
    world.sent[partition][place][1] = "1.00"  # differs
    swapped, (_, second) = world.place_of(73), world.place_of(77)
    line = world.sent[1]
    line[swapped[1]], line[second] = line[second], line[swapped[1]]  # out of order
    line.append([51, "51.50", NOON + timedelta(seconds=900), "t6-3", "c3"])  # duplicate
    line.append([999, "1.50", NOON + timedelta(seconds=901), None, "c3"])  # phantom
    line.append([1000, "1.50", NOON + timedelta(seconds=902), None, "c3"])  # a phantom that nobody can read: a gap
    line.append([98, "98.50", NOON + timedelta(seconds=980), "t12-2", "c2"])  # a duplicate in another partition
    hidden = [(1, len(line) - 2)]
    ranges = {0: (0, len(world.sent[0])), 1: (0, len(line))}
    doubts = [InDoubt("t-hangs", NOON_MS, 10**9, "prepared"), InDoubt("t-young", NOON_MS, 5, "prepared")]
    around = Surroundings(ranges=ranges, in_doubt=lambda: doubts)
    result = audit(world.messages(spark, hidden), world.table(spark), SPEC, around=around)
    end = len(line)
    assert found(result) == {
        "missing": [("16", None, None, "t2-0"), ("20", None, None, "t2-0")],
        "torn": [(None, None, None, "t5-1")],
        "differs": [("60", *world.place_of(60), "t7-0")],
        "out-of-order": [("73", 1, second, "t9-1")],
        "duplicate": [("51", 1, end - 4, "t6-3"), ("98", 1, end - 1, "t12-2")],
        "phantom": [("999", 1, end - 3, None)],
        "gap": [(None, 1, end - 2, None)],
        "in-doubt": [(None, None, None, "t-hangs")],
    }
    assert of_kinds(result) == {
        "missing": 2, "torn": 1, "differs": 1, "out-of-order": 1, "duplicate": 2, "phantom": 1, "gap": 1, "in-doubt": 1,
    }  # fmt: skip
    (sample,) = result.sample(Kind.TORN, 10)
    assert sample["detail"] == "1 of its rows have messages, 1 have none: 41"


def test_the_edges_of_a_window_accuse_nobody(spark: SparkSession) -> None:
    """Just inside and just outside: a partner in the margin is a partner; what lies in the margin is not judged."""
    world = AuditedOrders()
    window = Window(NOON_MS + 100_000, NOON_MS + 500_000)  # orders 10 to 49; their messages are 5 ms older
    world.unsend(3)  # far outside
    world.rows[3][4] = None  # nothing says so: it may lie inside, it may not
    world.unsend(50)  # just outside: its row belongs to the next window
    world.sent[1].append([7, "7.50", NOON + timedelta(seconds=500, milliseconds=1), "t0-3", "c3"])  # outside too
    world.unsend(30)
    world.unsend(26)
    result = audit(world.messages(spark), world.table(spark), SPEC, window)
    assert found(result) == {"missing": [("26", None, None, "t3-2"), ("30", None, None, "t3-2")]}
    # That of order 50 is not there, and in time it belonged here.
    assert (result.totals.rows, result.totals.messages, result.totals.matched) == (40, 37, 38)
    assert result.totals.latency_ms_p50 == result.totals.latency_ms_max == -5.0
    assert sum(moment.rows for moment in result.moments) == 40
    assert [(line.first, line.last, line.messages) for line in result.partitions] == [(0, 46, 47), (0, 49, 50)]
    assert set(result.unchecked) == {Kind.IN_DOUBT, Kind.LATE}


def test_what_excuses_a_line_without_partner(spark: SparkSession) -> None:
    world = AuditedOrders()
    table = world.table(spark)
    for order in (40, 44, 99, 95):
        world.unsend(order)
    later = AuditedOrders()
    later.sent = {0: [], 1: [line for line in later.sent[1] if line[0] in (95, 99)]}
    world.sent[0].append([500, "1.50", NOON, None, "c9"])
    around = Surroundings(
        in_doubt=lambda: [InDoubt("t5-0", NOON_MS, 5, "prepared a moment ago")],
        later_messages=lambda: later.messages(spark),
        older_rows=lambda ids: ids.filter("id = '500'"),
    )
    result = audit(world.messages(spark), table, SPEC, around=around)
    assert found(result) == {"late": [("500", 0, 48, None)]}


def test_transactions_are_checked_for_size_and_other_topics(spark: SparkSession) -> None:
    world = AuditedOrders(16)
    world.unsend(9)
    others = AuditedOrders(16)
    others.unsend(3)
    others.unsend(7)
    spec = AuditSpec(
        "orders", parse_terms(["id = json:$.id"]), transaction_size=parse_source("header:size"), together=("audit",)
    )
    around = Surroundings(together={"audit": others.messages(spark)}, unmade={Kind.MISSING: "not asked"})
    result = audit(world.messages(spark), world.table(spark), spec, around=around)
    torn = {row["txid"]: row["detail"] for row in result.sample(Kind.TORN, 10)}
    assert torn == {
        "t1-1": "1 of its 2 messages are visible",
        "t0-3": "it has messages in orders and none in audit",
    }
    assert Kind.MISSING not in result.counts


def test_transaction_whose_other_parts_are_under_way_is_not_torn(spark: SparkSession) -> None:
    """Over several homes one part is visible before another."""
    world = AuditedOrders(16)
    for order in (9, 3, 8):
        world.unsend(order)
    others = AuditedOrders(16)
    for order in (2, 6, 10, 14):
        others.unsend(order)
    spec = AuditSpec(
        "orders", parse_terms(["id = json:$.id"]), transaction_size=parse_source("header:size"), together=("audit",)
    )
    around = Surroundings(
        together={"audit": others.messages(spark)}, unmade={Kind.MISSING: "not asked"},
        in_doubt=lambda: [InDoubt("t1-1", NOON_MS, 5, "at the other home")],
        came_since=lambda: spark.createDataFrame([("t0-3",), ("t0-2",)], "txid string"),
    )  # fmt: skip
    result = audit(world.messages(spark), world.table(spark), spec, around=around)
    assert {row["txid"] for row in result.sample(Kind.TORN, 10)} == {"t1-0", "t1-2"}


def test_identities_are_read_as_the_columns_type(spark: SparkSession) -> None:
    lines = [
        (b"\x01\xff", b'{"n": "007"}', "t", 0, 0, NOON, [("h", b"1.5")], None),
        (b"\x02", b'{"n": 8}', "t", 0, 1, NOON, [("h", b"2")], None),
        (b"\x03", b"not json", "t", 0, 2, NOON, [], None),
        (None, None, "t", 0, 3, NOON, None, None),
    ]
    rows = [(bytearray(b"\x01\xff"), 7, 1.5), (bytearray(b"\x02"), 8, 2.0)]
    spec = AuditSpec("t", parse_terms(["k = key, n = json:$.n", "h = header:h"]))
    table = spark.createDataFrame(rows, "k binary, n int, h double")
    result = audit(spark.createDataFrame(lines, MESSAGES), table, spec)
    assert found(result) == {"phantom": [(None, 0, 2, None), (None, 0, 3, None)]}
    assert "cannot be matched" in str(result.sample(Kind.PHANTOM, 1)[0]["detail"])


def test_table_that_misfits_the_spec_is_refused_with_its_columns(spark: SparkSession) -> None:
    world = AuditedOrders(1)
    spec = AuditSpec("orders", parse_terms(["number = key"]))
    with pytest.raises(ConfigError, match=r"no column 'number'; it has amount, committed, customer"):
        audit(world.messages(spark), world.table(spark), spec)
    spec = AuditSpec("orders", parse_terms(["id = key"]), row_time=RowTime("version"))
    with pytest.raises(ConfigError, match="version holds numbers: say of what, such as version:ms"):
        audit(world.messages(spark), world.table(spark), spec)
