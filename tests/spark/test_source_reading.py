"""Reading through a real broker, without Spark around it: what a task and a stream's planner do when things go wrong.

``read_ranges`` and the readers are what Spark calls in its Python processes; here they are called the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from crc32c import crc32c
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import txmq
from tests.older_copy import older_copy
from txmq.errors import ConfigError, ConnectionLostError, DataLossError, InvalidBatchError, UnknownTopicError
from txmq.log import records
from txmq.spark.source import batch_reader
from txmq.spark.source.batch_reader import Reading, plan, read_ranges, tasks
from txmq.spark.source.options import parse
from txmq.spark.source.ranges import Range
from txmq.spark.source.stream import StreamReader
from txmq.testing.processes.broker import BrokerProcess

from .visible import wait_until_visible

COLUMNS = ("partition", "offset", "value")
DEADLINE_S = 60.0
Row = tuple[Any, ...]


@pytest.fixture
def topic(client: txmq.Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic of this test alone, with two partitions."""
    name = request.node.name.partition("[")[0][:60]
    client.topics.create(name, partitions=2, segment_size_bytes=4096)
    yield name
    if name in [known.name for known in client.topics.list()]:
        client.topics.delete(name)


def fill(client: txmq.Client, topic: str, count: int, *, first: int = 0) -> None:
    """Messages of 100 B under keys of their own, in batches of 100; they are visible when this returns."""
    before = sum(held["end"] for held in client.topics.watermarks(topic))
    with client.producer() as producer:
        for start in range(first, first + count, 100):
            numbers = range(start, min(start + 100, first + count))
            producer.send_many(topic, [(b"k%d" % n, b"%0100d" % n) for n in numbers])
    wait_until_visible(client, topic, before + count)


def reading(broker: BrokerProcess, *, fails_on_loss: bool = True, timeout: float = DEADLINE_S) -> Reading:
    return Reading(broker.address, COLUMNS, fails_on_loss, timeout)


def rows_of(batches: Iterator[Any]) -> list[Row]:
    return [row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]


def planned(broker: BrokerProcess, topic: str, **options: str) -> list[Range]:
    given = {"bootstrap": broker.address, "topic": topic, "timeout": "10", **options}
    return plan(parse(given, is_stream=False))


def browsed(client: txmq.Client, topic: str) -> list[Row]:
    return [(m.partition, m.offset, m.value) for m in client.browse(topic)]


# --- batches ---------------------------------------------------------------------------------------------------------


def test_every_message_is_read_once_however_the_ranges_are_cut(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    fill(client, topic, 3000)
    options = parse({"bootstrap": broker.address, "topic": topic, "minPartitions": "7"}, is_stream=False)
    parts = tasks(plan(options), options)
    assert len(parts) >= 7
    assert len(tasks(plan(options), replace(options, tasks_min=None))) == 1, "small ranges make one task"
    assert sorted(row for part in parts for row in rows_of(read_ranges(part.ranges, reading(broker)))) == browsed(
        client, topic
    )


def test_what_arrives_behind_the_pinned_end_is_not_read(broker: BrokerProcess, client: txmq.Client, topic: str) -> None:
    fill(client, topic, 500)
    before = browsed(client, topic)
    ranges = planned(broker, topic)
    fill(client, topic, 500)
    assert sorted(row for each in ranges for row in rows_of(read_ranges([each], reading(broker)))) == before


def test_a_time_means_the_first_message_that_is_not_older(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    fill(client, topic, 300)
    by_partition: dict[int, list[txmq.Message]] = {0: [], 1: []}
    for message in client.browse(topic):
        by_partition[message.partition].append(message)
    time_ms = by_partition[0][len(by_partition[0]) // 2].timestamp_ms
    for option, side in (("startingTimestamp", "start"), ("endingTimestamp", "end")):
        for each in planned(broker, topic, **{option: str(time_ms)}):
            held = by_partition[each.partition]
            expected = next((m.offset for m in held if m.timestamp_ms >= time_ms), len(held))
            assert getattr(each, side) == expected


def test_batch_with_a_later_header_time_hides_nothing_behind_it(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    content = bytearray(records.encode([(None, b"v", [], 1_000)]))
    content[35:43] = pack(">q", 9_000)  # the greatest time in it
    content[17:21] = pack(">I", crc32c(content[21:]))
    client.control.call("put", topic, 0, body=[content], timeout=60.0)
    fill(client, topic, 100)
    starts = {each.partition: each.start for each in planned(broker, topic, startingTimestamp="5000")}
    assert starts == {0: 1, 1: 0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"startingOffsets": '{"TOPIC": {"0": 99, "1": 0}}'}, "offsets from 99 to"),
        ({"endingOffsets": '{"TOPIC": {"0": 99, "1": 0}}'}, "offsets from 0 to 99 are asked for"),
        ({"startingOffsets": '{"TOPIC": {"0": 0}}'}, "says nothing of TOPIC-1"),
        ({"startingOffsets": '{"TOPIC": {"0": 0, "1": 0, "2": 0}}'}, "TOPIC has no partition 2"),
        ({"startingOffsets": '{"other": {"0": 0}}'}, "names 'other', which is not read"),
    ],
)
def test_offsets_that_are_not_there_are_refused(
    options: Mapping[str, str], text: str, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    fill(client, topic, 10)
    with pytest.raises(ConfigError) as caught:
        planned(broker, topic, **{name: value.replace("TOPIC", topic) for name, value in options.items()})
    assert text.replace("TOPIC", topic) in str(caught.value)


def test_a_missing_topic_is_told_with_the_nearest_name(broker: BrokerProcess, client: txmq.Client, topic: str) -> None:
    with pytest.raises(UnknownTopicError, match=f"did you mean '{topic}'"):
        planned(broker, topic + "s")


def test_a_pattern_takes_what_matches_now(broker: BrokerProcess, client: txmq.Client, topic: str) -> None:
    options = {"bootstrap": broker.address, "subscribePattern": f"{topic[:20]}.*"}
    assert {each.topic for each in plan(parse(options, is_stream=False))} == {topic}
    assert plan(parse({**options, "subscribePattern": "nothing"}, is_stream=False)) == []


# --- what goes wrong meanwhile ---------------------------------------------------------------------------------------


def retain_last_segment(client: txmq.Client, topic: str) -> int:
    """Retention takes all but the last segment of partition 0; its new start."""
    client.topics.alter(topic, retention_size_bytes=1)
    deadline = client.clock.monotonic() + DEADLINE_S
    while (start := client.offsets(topic, 0).start) == 0:
        assert client.clock.monotonic() < deadline, "retention took nothing"
        client.clock.sleep(0.02)
    return start


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """As everywhere, with a retention that looks often."""
    folder = tmp_path_factory.mktemp("broker")
    with BrokerProcess(folder / "data", settings={"retention_check_interval_ms": 100}) as process:
        yield process


def test_retention_past_the_start_is_an_error_or_a_warning(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    fill(client, topic, 2000)
    task = next(each for each in planned(broker, topic) if each.partition == 0)
    start = retain_last_segment(client, topic)
    with pytest.raises(DataLossError, match=f"offsets 0 to {start - 1} are gone before they were read.*failOnDataLoss"):
        rows_of(read_ranges([task], reading(broker)))
    left = rows_of(read_ranges([task], reading(broker, fails_on_loss=False)))
    assert [row[1] for row in left] == list(range(start, task.end))
    wanted = {"startingOffsets": json.dumps({topic: {"0": 0, "1": 0}})}
    with pytest.raises(DataLossError, match=f"offsets 0 to {start - 1} are gone"):
        planned(broker, topic, **wanted)
    moved = planned(broker, topic, failOnDataLoss="false", **wanted)
    assert moved[0].start == start


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_unread_deleted_topic_is_error_and_its_successor_never_read(
    is_made_anew: bool, broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    fill(client, topic, 100)
    task = planned(broker, topic)[0]
    client.topics.delete(topic)
    text = "was deleted"
    if is_made_anew:
        client.topics.create(topic, partitions=2)
        fill(client, topic, 1000)
        text = "was deleted and made anew"
    with pytest.raises(DataLossError, match=text):
        rows_of(read_ranges([task], reading(broker, fails_on_loss=False)))


def test_broker_that_is_killed_and_comes_back_costs_no_row(
    broker: BrokerProcess, client: txmq.Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_reader, "ANSWER_SIZE_BYTES", 4096)
    monkeypatch.setattr(batch_reader, "ROWS_GATHERED", 100)
    fill(client, topic, 2000)
    task = planned(broker, topic)[0]
    batches = read_ranges([task], reading(broker))
    found = rows_of(iter([next(batches)]))
    broker.restart()
    found += rows_of(batches)
    assert [row[1] for row in found] == list(range(task.start, task.end))


def test_broker_that_stays_away_ends_reading_with_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reader, "ANSWER_SIZE_BYTES", 4096)
    monkeypatch.setattr(batch_reader, "ROWS_GATHERED", 100)
    with BrokerProcess(tmp_path / "data") as broker, txmq.connect(broker.address) as client:
        client.topics.create("orders")
        fill(client, "orders", 2000)
        task = planned(broker, "orders")[0]
        batches = read_ranges([task], reading(broker, timeout=3.0))
        next(batches)
        broker.kill()
        with pytest.raises(ConnectionLostError, match=r"tried for 3 s \(option timeout\)"):
            rows_of(batches)
        with pytest.raises(ConnectionLostError, match="option timeout"):
            planned(broker, "orders", timeout="0.3")


def test_damage_at_broker_is_error_that_names_partition(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker, txmq.connect(broker.address) as client:
        client.topics.create("orders")
        fill(client, "orders", 2000)
        task = planned(broker, "orders")[0]
        (segment,) = (tmp_path / "data" / "log").rglob("*.log")
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 1
        segment.write_bytes(content)
        with pytest.raises(InvalidBatchError, match=r"orders-0, from offset .*: the CRC does not match"):
            rows_of(read_ranges([task], reading(broker)))


# --- streams ---------------------------------------------------------------------------------------------------------


Open = Callable[..., StreamReader]


@pytest.fixture
def stream(broker: BrokerProcess) -> Iterator[Open]:
    """Makes a stream's reader as Spark does in the driver's process of a query; all are stopped in the end."""
    opened: list[StreamReader] = []

    def open_one(topic: str, **options: str) -> StreamReader:
        given = {"bootstrap": broker.address, "topic": topic, "timeout": "10", "startingOffsets": "earliest", **options}
        given = {name: value for name, value in given.items() if value}
        opened.append(StreamReader(parse(given, is_stream=True), COLUMNS))
        return opened[-1]

    yield open_one
    for reader in opened:
        reader.stop()


def read_between(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Row]:
    """What a micro-batch reads; the offsets go through text, as in a checkpoint."""
    parts = reader.partitions(json.loads(json.dumps(start)), json.loads(json.dumps(end)))
    return sorted(row for part in parts for row in rows_of(reader.read(part)))


def test_micro_batches_of_limited_size_read_everything_once(stream: Open, client: txmq.Client, topic: str) -> None:
    fill(client, topic, 1000)
    reader = stream(topic, maxOffsetsPerTrigger="300")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(300)
    at, found, sizes = reader.initialOffset(), list[Row](), []
    while (end := reader.latestOffset(at, limit)) != at:
        rows = read_between(reader, at, end)
        assert read_between(stream(topic), at, end) == rows  # a repeated micro-batch, in another process
        sizes.append(len(rows))
        found += rows
        at = end
    assert sorted(found) == browsed(client, topic)
    assert sizes == [300, 300, 300, 100]


def test_first_micro_batch_repeats_as_planned_although_latest_moved(
    stream: Open, client: txmq.Client, topic: str
) -> None:
    fill(client, topic, 100)
    reader = stream(topic, startingOffsets="latest")
    at = reader.initialOffset()
    fill(client, topic, 50, first=100)
    end = reader.latestOffset(at, ReadAllAvailable())
    assert len(read_between(reader, at, end)) == 50
    fill(client, topic, 70, first=150)
    again = stream(topic, startingOffsets="latest")
    assert len(read_between(again, again.initialOffset(), end)) == 50
    following = again.latestOffset(end, ReadAllAvailable())
    assert len(read_between(again, end, following)) == 70


def test_available_now_stops_at_its_start_and_leaves_new_partitions(
    stream: Open, client: txmq.Client, topic: str
) -> None:
    fill(client, topic, 100)
    reader = stream(topic)
    at = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    client.topics.alter(topic, partitions=4)
    with client.producer() as producer:
        producer.send(topic, b"new", partition=3)
    fill(client, topic, 100, first=100)
    end = reader.latestOffset(at, ReadAllAvailable())
    assert len(read_between(reader, at, end)) == 100
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    following = stream(topic)
    assert len(read_between(following, end, following.latestOffset(end, ReadAllAvailable()))) == 101


def test_bytes_are_admitted_about(stream: Open, client: txmq.Client, topic: str) -> None:
    fill(client, topic, 1000)
    reader = stream(topic, maxBytesPerTrigger="20000")
    at = reader.initialOffset()
    end = reader.latestOffset(at, reader.getDefaultReadLimit())
    assert 150 <= len(read_between(reader, at, end)) <= 200


@pytest.mark.parametrize("fails_on_loss", ["true", "false"])
def test_stream_stops_at_a_replaced_topic(fails_on_loss: str, stream: Open, client: txmq.Client, topic: str) -> None:
    fill(client, topic, 100)
    reader = stream(topic, failOnDataLoss=fails_on_loss)
    start = reader.initialOffset()
    at = reader.latestOffset(start, ReadAllAvailable())
    client.topics.delete(topic)
    client.topics.create(topic, partitions=2)
    fill(client, topic, 1000)
    for ask in (lambda: reader.latestOffset(at, ReadAllAvailable()), lambda: read_between(reader, start, at)):
        with pytest.raises(DataLossError, match="was deleted and made anew"):
            ask()


def test_a_deleted_topic_stops_a_stream_or_is_left_out(stream: Open, client: txmq.Client, topic: str) -> None:
    fill(client, topic, 100)
    at = stream(topic).latestOffset(stream(topic).initialOffset(), ReadAllAvailable())
    client.topics.delete(topic)
    with pytest.raises(DataLossError, match="was deleted while it was read"):
        stream(topic).latestOffset(at, ReadAllAvailable())
    lenient = stream("", subscribePattern=topic, failOnDataLoss="false")
    assert lenient.latestOffset(at, ReadAllAvailable()) == at


def test_retention_that_passed_stream_is_error_or_warning(stream: Open, client: txmq.Client, topic: str) -> None:
    fill(client, topic, 2000)
    reader = stream(topic)
    at = reader.initialOffset()
    end = reader.latestOffset(at, ReadAllAvailable())
    retain_last_segment(client, topic)
    with pytest.raises(DataLossError, match="are gone"):
        read_between(reader, at, end)
    lenient = read_between(stream(topic, failOnDataLoss="false"), at, end)
    assert lenient == browsed(client, topic)


# --- an older copy of the broker's data ------------------------------------------------------------------------------


def test_stream_on_an_older_copy_is_refused_at_once(tmp_path: Path) -> None:
    """It has read 130, and another log has 240 by now; the micro-batch that was under way is refused as well."""
    with BrokerProcess(tmp_path / "data") as own, txmq.connect(own.address, timeout=DEADLINE_S) as client:
        client.topics.create("orders")
        fill(client, "orders", 100)
        options = {"bootstrap": own.address, "topic": "orders", "timeout": "60", "startingOffsets": "earliest"}
        readers = [StreamReader(parse({**options, "failOnDataLoss": word}, is_stream=True), COLUMNS)
                   for word in ("true", "false")]  # fmt: skip
        first = readers[0].initialOffset()
        with older_copy(own):
            before = readers[0].latestOffset(first, ReadAllAvailable())
            fill(client, "orders", 30, first=100)
            after = readers[0].latestOffset(before, ReadAllAvailable())
            assert len(read_between(readers[0], before, after)) == 30
        own.start()
        assert len(read_between(readers[0], first, before)) == 100  # of both logs
        fill(client, "orders", 140, first=200)
        text = r"orders-0: offset 130 .* same up to offset 100"
        for reader in readers:
            with pytest.raises(DataLossError, match=text):
                reader.latestOffset(after, ReadAllAvailable())
            with pytest.raises(DataLossError, match=text):
                reader.partitions(before, after)
            reader.stop()


def test_stream_goes_on_behind_restarts_of_its_broker(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as own, txmq.connect(own.address, timeout=DEADLINE_S) as client:
        client.topics.create("orders")
        options = {"bootstrap": own.address, "topic": "orders", "timeout": "60", "startingOffsets": "earliest"}
        reader = StreamReader(parse(options, is_stream=True), COLUMNS)
        at, seen = reader.initialOffset(), 0
        for number in range(3):
            fill(client, "orders", 10, first=10 * number)
            own.kill()
            own.start()
            end = reader.latestOffset(at, ReadAllAvailable())
            seen += len(read_between(reader, at, end))
            at = end
        own.kill()
        own.start()
        assert reader.latestOffset(at, ReadAllAvailable()) == at
        assert seen == 30
        reader.stop()
