"""``df.write.format("txmq")`` and ``df.writeStream``: each batch once, whatever is repeated; clear errors."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import txmq
from txmq.client.partitioner import KeyHashSelector
from txmq.spark.sink import task as sink_task
from txmq.spark.sink.digest import Attempt
from txmq.spark.sink.options import SinkOptions
from txmq.spark.sink.queries import Queries
from txmq.testing.processes.broker import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEADLINE_S = 600.0


@pytest.fixture
def topic(client: txmq.Client, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, with 4 partitions."""
    name = request.node.name[:60].rstrip("[")
    client.topics.create(name, partitions=4)
    return str(name)


def rows(spark: SparkSession, count: int = 1000, tasks: int = 3) -> DataFrame:
    """Keys and values."""
    return spark.range(0, count, numPartitions=tasks).selectExpr("concat('k', id % 50) key", "concat('v', id) value")


def write(frame: DataFrame, broker: BrokerProcess, **options: str) -> None:
    """One batch write."""
    frame.write.format("txmq").options(bootstrap=broker.address, **options).mode("append").save()


def values(client: txmq.Client, topic: str) -> Counter[bytes | None]:
    """How often readers see each value."""
    return Counter(message.value for message in client.browse(topic))


def expected(count: int = 1000) -> Counter[bytes | None]:
    """Each value of ``rows`` once."""
    return Counter({f"v{number}".encode(): 1 for number in range(count)})


def test_batch_is_one_decision_with_keys_placed_as_producers_do(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    write(rows(spark), broker, topic=topic)
    messages = list(client.browse(topic))
    assert Counter(message.value for message in messages) == expected()
    partition_of = KeyHashSelector().partition_of
    assert all(message.partition == partition_of(message.key, 4) for message in messages)
    assert (Queries(client).list(), client.transactions.list()) == ([], [])


def test_columns_say_topic_partition_and_headers(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    client.topics.create("other")
    headers = "array(struct('h' as key, cast('1' as binary) as value)) headers"
    frame = spark.range(10).selectExpr(
        f"if(id < 5, '{topic}', 'other') topic", "cast(null as binary) key", "cast(id as string) value", headers,
        "if(id < 5, 3, null) partition",
    )  # fmt: skip
    write(frame, broker)
    found = {(m.topic, m.partition, m.value, m.headers["h"]) for name in (topic, "other") for m in client.browse(name)}
    assert found == {(topic if n < 5 else "other", 3 if n < 5 else 0, b"%d" % n, b"1") for n in range(10)}


def test_a_job_that_is_run_again_writes_its_batch_once(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    told = SinkOptions(broker.address, topic, None, 60.0, None, None)
    epoch = Queries(client).new_epoch()
    Queries(client).open("job", epoch)  # a driver that died before its commit
    left = sink_task.write(client, told, Attempt("job", epoch, 7, 0, 0), iter([_arrow(b"left")]))
    assert [row["query"] for row in client.transactions.list()] == ["job"]
    for _ in range(2):
        write(rows(spark), broker, topic=topic, queryId="job", batchId="7")
        assert values(client, topic) == expected()
    assert client.transactions.list() == []
    assert client.outcome(left.txids[0]) is txmq.Outcome.ROLLED_BACK
    write(rows(spark, 1), broker, topic=topic, queryId="job", batchId="8")
    assert values(client, topic) == expected() + Counter([b"v0"])
    assert [(row["query"], row["batch"]) for row in Queries(client).list()] == [("job", 8)]
    Queries(client).delete("job")


def test_batch_below_the_newest_is_written_once(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    for number, repeats in ((7, 1), (3, 2), (5, 1), (3, 1)):
        for _ in range(repeats):
            write(spark.sql(f"SELECT 'v{number}' value"), broker, topic=topic, queryId="any", batchId=str(number))
    assert values(client, topic) == Counter({b"v3": 1, b"v5": 1, b"v7": 1})
    Queries(client).delete("any")


def test_other_rows_under_a_committed_number_are_refused(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    write(rows(spark, 10), broker, topic=topic, queryId="same", batchId="0")
    for other in (rows(spark, 11), spark.sql("SELECT 'k' key, 'other' value")):
        with pytest.raises(Exception, match="batch 0 of query same is committed with other rows"):
            write(other, broker, topic=topic, queryId="same", batchId="0")
    write(rows(spark, 10, tasks=1), broker, topic=topic, queryId="same", batchId="0")
    assert values(client, topic) == expected(10)
    Queries(client).delete("same")


def _arrow(*contents: bytes) -> Any:
    import pyarrow as pa

    return pa.record_batch([pa.array(contents, pa.binary())], names=["value"])


def test_a_task_that_fails_leaves_nothing_of_its_job(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    frame = spark.range(0, 1000, numPartitions=3).selectExpr("if(id = 999, raise_error('no'), concat('v', id)) value")
    with pytest.raises(Exception, match="no"):
        write(frame, broker, topic=topic)
    assert values(client, topic) == Counter()
    assert (Queries(client).list(), client.transactions.list()) == ([], [])


def test_stream_that_repeats_batch_after_crash_writes_it_once(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str, tmp_path: Path
) -> None:
    client.topics.create("in", partitions=2)
    checkpoint = tmp_path / "checkpoint"
    with client.producer() as producer:
        for number in range(2):
            producer.send_many("in", [(None, f"v{number * 100 + n}".encode()) for n in range(100)])
            _drain(spark, broker, topic, checkpoint)
            if number == 1:  # the driver died after the broker's commit: Spark does not know of it
                for commit in (checkpoint / "commits").glob("[.1]*"):
                    commit.unlink()
                _drain(spark, broker, topic, checkpoint)
    assert values(client, topic) == expected(200)
    (query,) = Queries(client).list()
    assert (query["batch"], query["prepared"]) == (1, 0)
    Queries(client).delete(query["query"])


def test_stream_whose_checkpoint_lacks_the_newest_batch_is_refused(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str, tmp_path: Path
) -> None:
    checkpoint, copy, source = tmp_path / "checkpoint", tmp_path / "copy", "in-copied"
    client.topics.create(source)
    with client.producer() as producer:
        for number in range(2):
            producer.send_many(source, [(None, f"v{number * 100 + n}".encode()) for n in range(100)])
            _drain(spark, broker, topic, checkpoint, source)
            if number == 0:
                shutil.copytree(checkpoint, copy)
        producer.send_many(source, [(None, b"v200")])
    with pytest.raises(Exception, match="committed with other rows"):
        _drain(spark, broker, topic, copy, source)
    _drain(spark, broker, topic, checkpoint, source)
    assert values(client, topic) == expected(201)
    (query,) = Queries(client).list()
    Queries(client).delete(query["query"])


def _drain(spark: SparkSession, broker: BrokerProcess, topic: str, checkpoint: Path, source: str = "in") -> None:
    """Everything that is there, read from txmq and written to txmq."""
    reader = spark.readStream.format("txmq").options(bootstrap=broker.address, topic=source, startingOffsets="earliest")
    writer = reader.load().select("key", "value").writeStream.format("txmq").trigger(availableNow=True)
    query = writer.options(bootstrap=broker.address, topic=topic, checkpointLocation=str(checkpoint)).start()
    assert query.awaitTermination(DEADLINE_S)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topic": "nosuch"}, "UnknownTopicError"),
        ({"topik": "x"}, "did you mean topic?"),
        ({"topic": "x", "bootstrap": "txmq://127.0.0.1:1", "timeout": "0.2"}, "cannot connect to 127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_told_before_a_row_is_computed(
    spark: SparkSession, broker: BrokerProcess, options: dict[str, str], text: str
) -> None:
    with pytest.raises(Exception) as caught:
        rows(spark).write.format("txmq").options(**{"bootstrap": broker.address, **options}).mode("append").save()
    assert text in str(caught.value)


def test_rows_that_do_not_fit_are_told(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    for frame, text in (
        (spark.range(1).selectExpr("id value"), "column value is bigint: expected binary or string"),
        (spark.range(1).selectExpr("repeat('x', 16 * 1024 * 1024) value"), f"a row for topic '{topic}', partition"),
        (spark.range(1).selectExpr("'x' value", "9 partition"), "has partitions 0 to 3, not 9"),
    ):
        with pytest.raises(Exception) as caught:
            write(frame, broker, topic=topic)
        assert text in str(caught.value)
    with pytest.raises(Exception, match="a topic is not overwritten"):
        rows(spark).write.format("txmq").options(bootstrap=broker.address, topic=topic).mode("overwrite").save()
    assert (values(client, topic), Queries(client).list(), client.transactions.list()) == (Counter(), [], [])
