"""Segment files without a broker: data directories of brokers that were killed, copies of segments, damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import pack
from typing import TYPE_CHECKING, Any

import pytest
from crc32c import crc32c

import txmq
from txmq.client.transaction.conversation import Conversation
from txmq.client.transaction.messages import MessageBuffer
from txmq.errors import ConfigError, CorruptRecordError, DataLossError, DirectoryInUseError, StorageError
from txmq.log import batch, records
from txmq.protocol.transaction_bodies import encode_branch, encode_part
from txmq.redo.record_format import FILE_HEADER_SIZE, RECORD_HEADER_SIZE
from txmq.runtime.os_disk import OSDisk
from txmq.spark import segment_files as path_source
from txmq.spark.segment_files import FileReader, FileTask, plan
from txmq.spark.source.options import parse
from txmq.spark.stopped_broker import locked
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess

from .visible import wait_until_visible

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIME_MS = 1_700_000_000_000
DEADLINE_S = 60.0
Row = tuple[Any, ...]


def tasks_of(path: Path, **options: str) -> list[FileTask]:
    parsed = parse({"path": str(path), **options}, is_stream=False)
    return [task for tasks in plan(parsed, str(path), parsed.tasks_min or 2) for task in tasks]


def rows_of(tasks: list[FileTask]) -> list[Row]:
    found = []
    for task in tasks:
        for rows in FileReader(task, ("topic", "partition", "offset", "value")).rows():
            found += list(zip(*(column.to_pylist() for column in rows.columns), strict=True))
    return found


def read(path: Path, **options: str) -> list[Row]:
    return rows_of(tasks_of(path, **options))


def browsed(client: txmq.Client, topic: str) -> list[Row]:
    return [(m.topic, m.partition, m.offset, m.value) for m in client.browse(topic)]


def fill(client: txmq.Client, topic: str, count: int) -> None:
    """Messages that are in the journal; only with ``wait_until_visible`` also in the files."""
    with client.producer() as producer:
        for start in range(0, count, 50):
            producer.send_many(topic, [(b"k%d" % n, b"%0100d" % n) for n in range(start, min(start + 50, count))])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker of the test's own."""
    with BrokerProcess(tmp_path / "data", settings={"retention_check_interval_ms": 100}) as process:
        yield process


def test_killed_brokers_directory_gives_what_readers_saw_and_nothing_undecided(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("orders", partitions=2, segment_size_bytes=4096)
        client.topics.create("gone")
        client.topics.create("volatile", storage="memory")
        fill(client, "orders", 500)
        fill(client, "gone", 10)
        client.topics.delete("gone")
        with producer.transaction():
            producer.send("orders", b"committed", key=b"k")
        with suppress(ZeroDivisionError), producer.transaction():
            producer.send("orders", b"rolled back", key=b"k")
            raise ZeroDivisionError
        resource = client.xa_resource()
        xid = txmq.Xid(1, b"g", b"b")
        resource.start(xid)
        producer.send("orders", b"prepared", key=b"k")
        resource.end(xid)
        resource.prepare(xid)
        wait_until_visible(client, "orders", 501)
        seen = browsed(client, "orders")
        with pytest.raises(DirectoryInUseError, match=r"held by process .*: read through that broker"):
            tasks_of(broker.data_dir)
        broker.kill()
    with locked(OSDisk(str(broker.data_dir))):  # somebody else reads it, too
        assert read(broker.data_dir) == seen
        with pytest.raises(BrokerFailedError, match="held by process"):
            broker.start()
    parts = tasks_of(broker.data_dir, topic="orders", minPartitions="5", maxBytesPerPartition="2000")
    assert len(parts) > len({task.path for task in parts}), "no segment was cut"
    assert rows_of(parts) == seen
    bounds = {"startingOffsets": '{"orders": {"0": 7, "1": 30}}', "endingOffsets": '{"orders": {"0": 9, "1": 31}}'}
    assert read(broker.data_dir, topic="orders", **bounds) == [
        row for row in seen if (row[1], row[2]) in ((0, 7), (0, 8), (1, 30))
    ]
    with pytest.raises(ConfigError, match=r"no topic 'order' below .*there are orders"):
        read(broker.data_dir, topic="order")


def test_messages_of_a_held_decision_are_not_given_out(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        fill(client, "orders", 10)
        decide(client)
        wait_until_visible(client, "orders", 10)
        seen = browsed(client, "orders")
        broker.stop()
    assert len(seen) == 10
    assert read(broker.data_dir) == seen
    copy = broker.data_dir / "log"
    assert len(read(copy)) == 11, "segments alone do not say what is held"


def decide(client: txmq.Client) -> None:
    """A decision with one message, one of whose branches never completes."""
    home, buffer = (
        Conversation(client.routes.any_link(), client.clock, DEADLINE_S),
        MessageBuffer(None, lambda _topic: 0),
    )
    home.begin()
    buffer.add("orders", 0, (None, b"held", [], TIME_MS))
    parts = [b for p in home.take_parts(buffer) for b in encode_part(p.topic, p.partition, p.batch, p.keys)]
    branch = encode_branch(
        "a",
        "0123456789abcdef" * 2,
        {"bqual": "x", "connection": 1, "wrote": True, "marker": True, "table": "t"},
    )
    client.control.call("decide", home.txid, extensions={"branches": 1}, body=[branch, *parts], timeout=DEADLINE_S)


def test_what_only_journal_has_is_error_or_warning(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        fill(client, "orders", 100)
        wait_until_visible(client, "orders", 100)  # what is seen is in the files
    broker.kill()
    segment = broker.data_dir / "log" / "1" / "0" / f"{0:020d}.log"
    content = segment.read_bytes()
    segment.write_bytes(content[: len(content) * 3 // 4])  # as after a power loss: nothing was synced
    text = "orders-0: offsets 50 to 99 are not in the segment files; start the broker on the directory once"
    with pytest.raises(DataLossError, match=text):
        read(broker.data_dir)
    assert [row[2] for row in read(broker.data_dir, failOnDataLoss="false")] == list(range(50))
    broker.start()
    broker.stop()
    assert [row[2] for row in read(broker.data_dir)] == list(range(100))
    segment.write_bytes(content[: len(content) * 3 // 4])  # the checkpoint of the stop says that all of it was synced
    with pytest.raises(CorruptRecordError, match="ends at offset 50; more was forced into it"):
        read(broker.data_dir)


def test_archived_segments_come_before_those_that_are_left(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders", segment_size_bytes=8192, retention_policy="archive", retention_size_bytes=1)
        fill(client, "orders", 500)
        wait_until_visible(client, "orders", 500)
        deadline = client.clock.monotonic() + DEADLINE_S
        while client.offsets("orders", 0).start == 0 or not any((broker.data_dir / "archive").rglob("*.log")):
            assert client.clock.monotonic() < deadline, "nothing was archived"
            client.clock.sleep(0.02)
    broker.stop()
    start = min(int(left.stem) for left in (broker.data_dir / "log" / "1" / "0").iterdir())
    assert [row[2] for row in read(broker.data_dir)] == list(range(500))
    for archive in (broker.data_dir / "archive", broker.data_dir / "archive" / "1", broker.data_dir / "archive/1/0"):
        found = read(archive)
        assert [row[2] for row in found] == list(range(start))
        assert {row[0] for row in found} == {"1"}, "no journal says the name"


# --- copies of segments, made here -----------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Two segments of partition 3 of topic 7: offsets 0 to 99 and 100 to 149, in batches of 10, a second apart."""
    folder = tmp_path / "segments" / "7" / "3"
    folder.mkdir(parents=True)
    for base, count in ((0, 100), (100, 50)):
        content = b""
        for offset in range(base, base + count, 10):
            made = records.encode([(None, b"%d" % n, [], TIME_MS + 1000 * n) for n in range(offset, offset + 10)])
            batch.stamp(made, 7, 3, offset, batch.stored_crc(made))
            content += bytes(made)
        (folder / f"{base:020d}.log").write_bytes(content)
    return tmp_path / "segments"


def offsets(rows: list[Row]) -> list[int]:
    return [row[2] for row in rows]


@pytest.mark.parametrize("below", ["", "7", "7/3"])
def test_copies_are_known_by_their_directories(copy: Path, below: str) -> None:
    assert read(copy / below) == [("7", 3, n, b"%d" % n) for n in range(150)]


def test_times_and_offsets_choose_rows_of_a_copy(copy: Path) -> None:
    times = {"startingTimestamp": str(TIME_MS + 94_500), "endingTimestamp": str(TIME_MS + 102_000)}
    assert offsets(read(copy, **times)) == list(range(95, 102))
    assert offsets(read(copy, topic="7", startingOffsets='{"7": {"3": 142}}')) == list(range(142, 150))


def test_batch_with_a_later_header_time_hides_nothing_behind_it(copy: Path) -> None:
    segment = copy / "7" / "3" / f"{0:020d}.log"
    content = bytearray(segment.read_bytes())
    size = batch.HEADER.unpack_from(content)[1] + 12
    content[35:43] = pack(">q", TIME_MS + 500_000)  # the greatest time in the first batch
    content[17:21] = pack(">I", crc32c(content[21:size]))
    first = content[:size]
    batch.stamp(first, 7, 3, 0, batch.stored_crc(first))
    segment.write_bytes(first + content[size:])
    assert offsets(read(copy, startingTimestamp=str(TIME_MS + 20_000))) == list(range(10, 150))


def test_last_segment_that_ends_inside_batch_ends_before_it(copy: Path) -> None:
    segment = copy / "7" / "3" / f"{100:020d}.log"
    segment.write_bytes(segment.read_bytes()[:-5])
    assert offsets(read(copy)) == list(range(140))


@pytest.mark.parametrize("number", range(0, 100, 9))
def test_damage_is_error_with_file_and_position_or_ends_part(copy: Path, number: int) -> None:
    segment = copy / "7" / "3" / f"{0:020d}.log"
    content = bytearray(segment.read_bytes())
    position = len(content) * number // 100
    content[position] ^= 1
    bounds = [at + size for at, size, *_ in batch.headers(segment.read_bytes())]
    sound = sum(10 for end in bounds if end <= position)
    segment.write_bytes(content)
    with pytest.raises(CorruptRecordError, match=f"{segment.name}: damaged at byte") as caught:
        read(copy, minPartitions="1")
    assert caught.value.position == (bounds[sound // 10 - 1] if sound else 0)
    options = {"path": str(copy), "failOnDataLoss": "false", "minPartitions": "1"}
    reader = path_source.PathReader(parse(options, is_stream=False), ("offset",))
    found = [row for part in reader.partitions() for rows in reader.read(part) for row in rows.column(0).to_pylist()]
    assert found == [*range(sound), *range(100, 150)]


def test_segment_that_is_misnamed_or_missing_in_middle_is_error(copy: Path) -> None:
    folder = copy / "7" / "3"
    (folder / f"{100:020d}.log").rename(folder / f"{120:020d}.log")
    with pytest.raises(CorruptRecordError, match=f"{0:020d}.log.*ends at offset 100, 120 was to follow"):
        read(copy)
    (folder / f"{0:020d}.log").rename(folder / f"{50:020d}.log")
    with pytest.raises(CorruptRecordError, match="base offset 0 where 50 follows"):
        read(copy)


def test_segments_of_another_partition_are_refused(copy: Path) -> None:
    shutil.move(copy / "7" / "3", copy / "7" / "4")
    with pytest.raises(CorruptRecordError, match="placement CRC"):
        read(copy)


def test_what_is_no_directory_of_segments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no segments below"):
        read(tmp_path / "empty")
    reader = path_source.PathReader(parse({"path": str(tmp_path / "absent")}, is_stream=False), ("offset",))
    with pytest.raises(ConfigError, match="no such directory"):
        reader.partitions()
    assert not (tmp_path / "absent").exists()


def test_damaged_journal_is_an_error_a_missing_one_leaves_ids(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        fill(client, "orders", 100)
        wait_until_visible(client, "orders", 100)
    broker.kill()
    (journal,) = (broker.data_dir / "journal").glob("*.redo")
    content = bytearray(journal.read_bytes())
    content[FILE_HEADER_SIZE + RECORD_HEADER_SIZE] ^= 1  # in the first record: whole ones follow
    journal.write_bytes(content)
    with pytest.raises(StorageError, match="the journal cannot be read"):
        read(broker.data_dir)
    found = read(broker.data_dir, failOnDataLoss="false")
    assert {row[0] for row in found} == {"1"}
    assert offsets(found) == list(range(100))


def test_spark_reads_a_path_and_tells_damage(spark: SparkSession, copy: Path) -> None:
    from pyspark.errors import PythonException

    frame = spark.read.format("txmq").load(str(copy)).selectExpr("count(*)", "sum(offset)", "max(length(value))")
    assert tuple(frame.collect()[0]) == (150, 150 * 149 // 2, 3)
    segment = copy / "7" / "3" / f"{0:020d}.log"
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    with pytest.raises(PythonException, match=f"CorruptRecordError: .*{segment.name}: damaged at byte"):
        spark.read.format("txmq").load(str(copy)).count()
