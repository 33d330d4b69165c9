"""The source as a user of Spark meets it: one session, one broker, few jobs; ``test_source_reading`` has the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import txmq
from txmq.spark.source.offsets import lag
from txmq.testing.processes.broker import BrokerProcess

from .visible import wait_until_visible

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "orders"


@pytest.fixture(scope="module", autouse=True)
def _filled(client: txmq.Client) -> None:
    """Three partitions with plain, compressed and transactional messages, headers, tags, empty and absent parts."""
    client.topics.create(TOPIC, partitions=3)
    with client.producer() as producer, client.producer(compression="zstd") as compressing:
        producer.send_many(TOPIC, [(b"k%d" % n, b"value %d" % n) for n in range(500)])
        compressing.send_many(TOPIC, [(b"z%d" % n, b"value " * 50) for n in range(500)])
        for number in range(3):
            producer.send(TOPIC, b"", key=None, headers={"a": b"1", "b": b""}, tag="t", partition=number)
        with producer.transaction():
            for number in range(30):
                producer.send(TOPIC, b"in a transaction", key=b"t%d" % number)
    wait_until_visible(client, TOPIC, 1033)


def load(spark: SparkSession, broker: BrokerProcess, **options: str) -> DataFrame:
    return spark.read.format("txmq").options(bootstrap=broker.address, topic=TOPIC, timeout="5", **options).load()


def row_of(message: txmq.Message) -> dict[str, Any]:
    headers = dict(message.headers) | ({} if message.tag is None else {"tag": message.tag.encode()})
    return {
        "key": message.key, "value": message.value, "topic": message.topic, "partition": message.partition,
        "offset": message.offset, "timestamp": message.timestamp_ms, "headers": headers, "txid": message.txid,
    }  # fmt: skip


def test_every_column_is_what_the_client_reads(spark: SparkSession, broker: BrokerProcess, client: txmq.Client) -> None:
    frame = load(spark, broker, includeHeaders="true", minPartitions="4").selectExpr(
        "* except (timestamp)", "unix_millis(timestamp) as timestamp"
    )
    found = sorted((row.asDict(recursive=True) for row in frame.collect()), key=lambda r: (r["partition"], r["offset"]))
    for row in found:
        row["key"], row["value"] = (None if row[name] is None else bytes(row[name]) for name in ("key", "value"))
        row["headers"] = {entry["key"]: bytes(entry["value"]) for entry in row["headers"] or ()}
    assert found == [row_of(message) for message in client.browse(TOPIC)]


def test_fewer_columns_by_option_or_schema(spark: SparkSession, broker: BrokerProcess) -> None:
    assert load(spark, broker, columns="offset,key").columns == ["offset", "key"]
    declared = spark.read.format("txmq").schema("txid STRING, offset BIGINT").options(
        bootstrap=broker.address, topic=TOPIC, endingOffsets=json.dumps({TOPIC: {"0": 2, "1": 0, "2": 1}})
    )  # fmt: skip
    assert sorted(map(tuple, declared.load().collect()), key=str) == [(None, 0), (None, 0), (None, 1)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topic": "order"}, "UnknownTopicError: no topic 'order' at txmq://127.0.0.1:.*; did you mean 'orders'"),
        ({"startingOffset": "latest"}, "ConfigError: unknown option 'startingoffset'; did you mean 'startingOffsets'"),
        ({"columns": "offset,valu"}, "ConfigError: option columns: 'valu' is not one of key, value"),
        ({"bootstrap": "txmq://127.0.0.1:1", "timeout": "0.2"}, r"BrokerAwayError: .*tried for 0.2 s"),
    ],
)
def test_errors_are_sparks_own_and_say_what_is_wrong(
    options: dict[str, str], text: str, spark: SparkSession, broker: BrokerProcess
) -> None:
    from pyspark.errors import AnalysisException

    given = {"bootstrap": broker.address, "topic": TOPIC, **options}
    with pytest.raises(AnalysisException, match=text):
        spark.read.format("txmq").options(**given).load().collect()


def test_a_declared_column_of_another_type_is_refused(spark: SparkSession, broker: BrokerProcess) -> None:
    from pyspark.errors import AnalysisException

    reader = spark.read.format("txmq").schema("value STRING").options(bootstrap=broker.address, topic=TOPIC)
    with pytest.raises(AnalysisException, match="value string is not one of the columns there are: key binary"):
        reader.load().collect()


def drain(spark: SparkSession, broker: BrokerProcess, checkpoint: Path, **options: str) -> tuple[list[Any], list[Any]]:
    """Stream all there is into a list; the rows, and the progress of each micro-batch."""
    rows: list[Any] = []
    given = {"topic": TOPIC, "columns": "partition,offset", "startingOffsets": "earliest", **options}
    stream = spark.readStream.format("txmq").options(bootstrap=broker.address, **given)
    writer = stream.load().writeStream.foreachBatch(lambda frame, _: rows.extend(map(tuple, frame.collect())))
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert query.awaitTermination(200)
    return rows, query.recentProgress


def test_stream_goes_on_from_its_checkpoint_and_tells_its_lag(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    before = sorted((m.partition, m.offset) for m in client.browse(TOPIC))
    first, progress = drain(spark, broker, tmp_path / "checkpoint", maxOffsetsPerTrigger="600")
    assert sorted(first) == before
    assert [p["numInputRows"] for p in progress] == [600, len(before) - 600]
    assert [sum(lag(p).values()) for p in progress] == [len(before) - 600, 0]
    # The last micro-batch was not marked as done: as after a crash, it is run again, the same.
    marks = tmp_path / "checkpoint" / "commits"
    for name in ("1", ".1.crc"):
        (marks / name).unlink(missing_ok=True)
    with client.producer() as producer:
        producer.send_many(TOPIC, [(b"k%d" % n, b"later") for n in range(100)])
    wait_until_visible(client, TOPIC, len(before) + 100)
    again, _ = drain(spark, broker, tmp_path / "checkpoint")
    after = sorted((m.partition, m.offset) for m in client.browse(TOPIC))
    repeated = sorted(set(first) & set(again))
    assert len(repeated) == len(before) - 600
    assert sorted(again) == sorted([*repeated, *(set(after) - set(before))])


def test_stream_with_nothing_new_waits_and_ends_at_replaced_topic(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    def fill(count: int, total: int) -> None:
        with client.producer() as producer:
            producer.send_many("changing", [(None, b"v")] * count)
        wait_until_visible(client, "changing", total)

    client.topics.create("changing")
    fill(10, 10)
    options = {"topic": "changing", "startingOffsets": "latest"}
    assert drain(spark, broker, tmp_path / "checkpoint", **options)[0] == []
    fill(5, 15)
    assert sorted(drain(spark, broker, tmp_path / "checkpoint", **options)[0]) == [(0, n) for n in range(10, 15)]
    client.topics.delete("changing")
    client.topics.create("changing")
    fill(100, 100)
    with pytest.raises(StreamingQueryException, match="'changing' was deleted and made anew"):
        drain(spark, broker, tmp_path / "checkpoint", **options)
