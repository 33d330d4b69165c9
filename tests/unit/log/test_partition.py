"""A partition: places, redo, watermarks, reads."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulated.disk import SimDisk
from txmq.errors import CorruptRecordError, OffsetOutOfRangeError, StorageError
from txmq.log import batch, records
from txmq.log.file_cache import FileCache
from txmq.log.partition import Partition
from txmq.model import TopicConfig

from .support import NUMBER, TIME_MS, TOPIC_ID, Log, make_batch

SMALL = TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=1000)


def new_partition(config: TopicConfig = SMALL) -> Partition:
    return Partition(TOPIC_ID, "orders", NUMBER, config)


# --- assigned side ---------------------------------------------------------------------------------------------------


def test_places_follow_each_other() -> None:
    partition = new_partition()
    assert partition.place(3, 100, TIME_MS, TIME_MS) == (0, 0, 0)
    assert partition.place(1, 50, TIME_MS, TIME_MS) == (0, 100, 3)
    assert partition.place(1, 50, TIME_MS, TIME_MS) == (0, 150, 4)
    assert (partition.next_offset, partition.size_bytes, partition.high_watermark) == (5, 200, 0)


def test_segment_rolls_when_next_batch_would_pass_its_size() -> None:
    partition = new_partition()
    assert partition.place(1, 4000, 0, TIME_MS) == (0, 0, 0)
    assert partition.place(1, 96, 0, TIME_MS) == (0, 4000, 1)  # just fits
    assert partition.place(1, 1, 0, TIME_MS) == (2, 0, 2)
    assert partition.place(1, 10_000, 0, TIME_MS) == (3, 0, 3)  # larger than a segment: one of its own
    assert partition.place(1, 1, 0, TIME_MS) == (4, 0, 4)


def test_a_segment_rolls_by_age_but_never_an_empty_one() -> None:
    partition = new_partition()
    partition.place(1, 10, 0, TIME_MS)
    assert partition.place(1, 10, 0, TIME_MS + 999) == (0, 10, 1)
    assert partition.place(1, 10, 0, TIME_MS + 1000) == (2, 0, 2)
    assert partition.place(1, 10, 0, TIME_MS + 1999) == (2, 10, 3)


def test_a_topic_may_be_altered_between_places() -> None:
    partition = new_partition()
    partition.place(1, 100, 0, TIME_MS)
    partition.config = TopicConfig("orders", segment_size_bytes=120, segment_age_ms=None)
    assert partition.place(1, 100, 0, TIME_MS + 10**9) == (1, 0, 1)


def test_paths_are_ids_and_numbers() -> None:
    assert new_partition().segment_path(42) == "log/7/3/00000000000000000042.log"


placements = st.lists(st.tuples(st.integers(1, 9), st.integers(70, 3000), st.integers(0, 700)), max_size=40)


@given(placements)
def test_redo_moves_as_place_did(given_placements: list[tuple[int, int, int]]) -> None:
    live, redone, now_ms, begun_ms = new_partition(), new_partition(), TIME_MS, 0
    for count, size, later_ms in given_placements:
        now_ms += later_ms
        base, position, offset = live.place(count, size, now_ms, now_ms)
        begun_ms = now_ms if position == 0 else begun_ms
        redone.redo(base, position, offset, offset + count, now_ms, size, begun_ms)
    assert live.snapshot() == redone.snapshot()
    redone.publish(redone.next_offset)
    assert redone.high_watermark == live.next_offset


def test_an_entry_that_does_not_follow_is_refused() -> None:
    for entry in [(0, 0, 1), (0, 5, 0), (0, 100, 2), (9, 0, 9), (0, 0, 0)]:
        partition = new_partition()
        partition.redo(0, 0, 0, 1, TIME_MS, 100, TIME_MS)
        with pytest.raises(StorageError, match="journal places offset"):
            partition.redo(*entry, entry[2] + 1, TIME_MS, 100, TIME_MS)


def test_segment_of_a_clock_that_was_ahead_takes_no_more() -> None:
    partition = new_partition()
    partition.place(1, 100, TIME_MS, TIME_MS + 10**11)
    assert partition.place(1, 100, TIME_MS, TIME_MS) == (1, 0, 1)
    assert partition.place(1, 100, TIME_MS, TIME_MS) == (1, 100, 2)


def test_a_segment_that_was_redone_is_as_old_as_before() -> None:
    partition = new_partition()
    partition.redo(0, 0, 0, 1, TIME_MS, 100, TIME_MS + 50_000)
    assert partition.place(1, 100, 0, TIME_MS + 50_999) == (0, 100, 1)
    assert partition.place(1, 100, 0, TIME_MS + 51_000) == (2, 0, 2)


@given(placements, st.data())
def test_snapshot_restores_an_equal_partition(
    given_placements: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    live, now_ms = new_partition(), TIME_MS
    for count, size, later_ms in given_placements:
        now_ms += later_ms
        live.place(count, size, now_ms, now_ms)
    live.publish(live.next_offset)
    live.set_log_start(data.draw(st.sampled_from([0] + [s.base_offset for s in live.segments])))
    restored = new_partition()
    restored.restore(json.loads(json.dumps(live.snapshot())))
    restored.publish(restored.next_offset)
    assert restored.snapshot() == live.snapshot()
    assert (restored.log_start, restored.high_watermark) == (live.log_start, live.high_watermark)
    assert restored.place(2, 500, 0, now_ms + 1) == live.place(2, 500, 0, now_ms + 1)


# --- durable side ----------------------------------------------------------------------------------------------------


def test_readers_see_what_is_published_and_no_more() -> None:
    log = Log(SMALL)
    for _ in range(3):
        log.append(make_batch(2), publish=False)
    assert log.read(0) == b""
    log.partition.publish(2)
    assert log.read(0) == log.batches[0]
    log.partition.publish(6)
    assert log.read(0) == b"".join(log.batches)
    log.append(make_batch(), publish=False)
    assert log.read(0) == b"".join(log.batches[:3])


def test_publishing_again_or_less_changes_nothing() -> None:
    log = Log(SMALL)
    log.fill([2, 2])
    log.append(make_batch(), publish=False)
    log.partition.publish(4)
    log.partition.publish(2)
    assert log.partition.high_watermark == 4
    assert log.read(0) == b"".join(log.batches[:2])


def test_publishing_inside_batch_or_beyond_end_is_error() -> None:
    partition = new_partition()
    partition.place(4, 100, 0, TIME_MS)
    partition.place(4, 100, 0, TIME_MS)
    for wrong in (3, 9):
        with pytest.raises(StorageError, match=f"offset {wrong} is not the end"):
            partition.publish(wrong)


def test_publishing_does_not_gather_memory() -> None:
    partition = new_partition()
    for _ in range(100):
        partition.place(1, 100, 0, TIME_MS)
        partition.place(1, 100, 0, TIME_MS)
        partition.publish(partition.next_offset - 1)
    assert len(partition._pending) == 1


# --- reads -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3000)), min_size=1, max_size=60), st.data())
def test_reads_are_whole_batches_from_the_offset_on(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    """Against a list of batches; segments of several sizes, published and unpublished ends, reads in any order."""
    segment_size = data.draw(st.sampled_from([4096, 60_000, 1 << 20]))
    log = Log(TopicConfig("orders", segment_size_bytes=segment_size))
    for count, size in shapes:
        log.append(make_batch(count, b"x" * size), publish=False)
    ends = [batch.HEADER.unpack_from(b)[0] + batch.HEADER.unpack_from(b)[12] for b in log.batches]
    visible = data.draw(st.integers(1, len(shapes)))
    log.partition.publish(ends[visible - 1])
    segment_bases = {segment.base_offset for segment in log.partition.segments}
    for _ in range(6):
        offset = data.draw(st.integers(0, ends[visible - 1] - 1))
        size_max = data.draw(st.sampled_from([0, 1, 500, 4096, 40_000, 1 << 20]))
        content = log.read(offset, size_max)
        first = next(number for number, end in enumerate(ends) if end > offset)
        count = sum(1 for _ in batch.walk(content, TOPIC_ID, NUMBER, None))
        assert count >= 1
        assert content == b"".join(log.batches[first : first + count])
        assert first + count <= visible
        assert len(content) <= size_max or count == 1
        assert not segment_bases & set(ends[first : first + count - 1])  # never across segments


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9000)), min_size=1, max_size=80),
    st.sampled_from([1, 3000, 33_000, 1 << 20]),
)
def test_reading_on_from_where_last_read_ended_gives_everything_once(
    shapes: list[tuple[int, int]], size_max: int
) -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=100_000))
    found, offset = b"", 0
    for number, (count, size) in enumerate(shapes):
        log.append(make_batch(count, b"x" * size))
        if number % 3 == 0:
            content = log.read(offset, size_max)
            found += content
            offset += sum(placed[3] for placed in batch.headers(content))
    while offset < log.partition.high_watermark:
        content = log.read(offset, size_max)
        found += content
        offset += sum(placed[3] for placed in batch.headers(content))
    assert found == b"".join(log.batches)
    assert log.read(offset) == b""


def test_sequential_full_reads_do_not_look_into_the_bytes_again() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=1 << 30))
    log.fill([1] * 2000, b"x" * 1000)
    offset = 0
    while offset < 2000:
        log.read(offset, 100_000)
        offset = log.partition._hint[0]
    before = log.disk.counts["read"]
    offset = reads = 0
    while offset < 2000:
        log.read(offset, 100_000)
        offset, reads = log.partition._hint[0], reads + 1
    assert log.disk.counts["read"] - before == reads  # one pread each: the index knew both ends
    assert reads <= 1 + sum(len(b) for b in log.batches) // (100_000 - 34_000)


@pytest.mark.parametrize("offset", [-1, 5, 1 << 40])
def test_an_offset_outside_is_refused_with_start_and_end(offset: int) -> None:
    log = Log()
    log.fill([4])
    with pytest.raises(OffsetOutOfRangeError, match=r"orders-3 is outside \[0, 4\]"):
        log.partition.read(log.files, offset, 100)


def test_a_batch_larger_than_asked_for_comes_whole() -> None:
    log = Log()
    log.fill([1, 1, 1], b"x" * 3_000_000)
    assert log.read(1, 10) == log.batches[1]
    assert log.partition.read(log.files, 2, 10, nowait=True) is None  # too much for the loop
    assert log.read(2, 10) == log.batches[2]


def test_cold_bytes_are_left_to_a_thread() -> None:
    log = Log()
    log.fill([1] * 10)
    log.disk.cold_reads = True
    assert log.partition.read(log.files, 0, 1000, nowait=True) is None
    assert log.partition.read(log.files, 0, 1 << 20) == b"".join(log.batches)
    log.disk.cold_reads = False
    assert log.partition.read(log.files, 0, 1 << 20, nowait=True) == b"".join(log.batches)


def test_the_loop_does_not_walk_a_long_segment() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=1 << 30))
    log.fill([1] * 500, b"x" * 10_000)  # 5 MB nobody has read
    assert log.partition.read(log.files, 499, 1000, nowait=True) is None
    assert log.partition.read(log.files, 499, 1000) == log.batches[499]
    assert log.partition.read(log.files, 498, 1000, nowait=True) == log.batches[498]


# --- by time ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 50)), min_size=1, max_size=80), st.integers(-1, 60), st.data()
)
def test_an_offset_for_a_time(shapes: list[tuple[int, int]], wanted: int, data: st.DataObject) -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=120_000))
    first_offsets: list[tuple[int, int]] = []
    for count, time in shapes:
        first_offsets.append((log.append(make_batch(count, b"x" * 5000, TIME_MS + time), publish=False), time))
    visible = data.draw(st.integers(1, len(shapes)))
    end = first_offsets[visible][0] if visible < len(shapes) else log.partition.next_offset
    log.partition.publish(end)
    expected = next((offset for offset, time in first_offsets[:visible] if time >= wanted), end)
    assert log.partition.offset_for(log.files, TIME_MS + wanted) == expected


def test_offset_for_time_is_not_below_log_start() -> None:
    log = Log(SMALL)
    log.fill([4] * 10, b"x" * 500)
    log.partition.set_log_start(6)
    assert log.partition.offset_for(log.files, 0) == 6


def test_an_empty_partition_has_no_time() -> None:
    assert Log().partition.offset_for(FileCache(SimDisk()), 5) == 0


# --- damage ----------------------------------------------------------------------------------------------------------


def damaged_log() -> Log:
    log = Log(TopicConfig("orders", segment_size_bytes=1 << 20))
    log.fill([2] * 5, b"x" * 100)
    return log


def test_a_missing_segment_is_damage_and_named() -> None:
    log = damaged_log()
    path = log.partition.segment_path(0)
    log.files.unlink(path)
    with pytest.raises(CorruptRecordError, match="missing"):
        log.read(0)
    with pytest.raises(CorruptRecordError, match="missing"):
        log.partition.offset_for(log.files, 0)


def read_until_damage(log: Log) -> int:
    """How many bytes a client can read from the beginning."""
    size, offset = 0, 0
    try:
        while content := log.read(offset):
            for _, batch_size, base, count, _ in batch.walk(content, TOPIC_ID, NUMBER, offset, full=True):
                size, offset = size + batch_size, base + count
    except CorruptRecordError:
        return size
    raise AssertionError("no damage was found")


def test_segment_cut_off_under_broker_is_read_up_to_there() -> None:
    log = damaged_log()
    whole = log.read(0)
    path = log.partition.segment_path(0)
    for size in range(len(whole)):
        log.disk.open(path).truncate(size)
        left = size // len(log.batches[0]) * len(log.batches[0])
        assert read_until_damage(log) == left  # the index knows that there was more
        log.files.indexes.drop(path)
        assert read_until_damage(log) == left
        log.files.write(path, 0, whole)
        assert log.read(0) == whole


def test_damaged_header_hides_nothing_that_stands_before_it() -> None:
    log = damaged_log()
    path, second = log.partition.segment_path(0), len(log.batches[0])
    for position in [*range(12), 57, 58, 59, 60]:  # base offset, length, count
        log.disk.damage(path, second + position, bytes([log.batches[1][position] ^ 0x41]))
        assert read_until_damage(log) == second
        log.disk.damage(path, 0, b"".join(log.batches))
        log.files.indexes.drop(path)


def test_damage_inside_a_batch_reaches_no_consumer() -> None:
    log = damaged_log()
    log.disk.damage(log.partition.segment_path(0), len(log.batches[0]) + 80, b"?")
    content = log.read(0)  # the broker does not look inside
    with pytest.raises(CorruptRecordError, match="CRC"):
        list(batch.walk(content, TOPIC_ID, NUMBER, 0, full=True))


def test_a_segment_of_another_partition_is_damage_for_the_reader() -> None:
    log, other = damaged_log(), damaged_log()
    strangers = [bytes(b) for b in other.batches]
    for number, stranger in enumerate(strangers):
        copy = bytearray(stranger)
        batch.stamp(copy, TOPIC_ID, NUMBER + 1, number * 2, batch.stored_crc(copy))
        strangers[number] = bytes(copy)
    log.files.write(log.partition.segment_path(0), 0, b"".join(strangers))
    with pytest.raises(CorruptRecordError, match="placement"):
        list(batch.walk(log.read(0), TOPIC_ID, NUMBER, 0))


# --- many ------------------------------------------------------------------------------------------------------------


def test_ten_thousand_idle_partitions_are_cheap() -> None:
    config = TopicConfig("orders")
    tracemalloc.start()
    try:
        partitions = [Partition(1, "orders", number, config) for number in range(10_000)]
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used / len(partitions) < 1000


def test_a_thousand_written_partitions_on_few_descriptors_survive_a_crash() -> None:
    disk = SimDisk()
    files = FileCache(disk, 16)
    config = TopicConfig("orders")
    made = make_batch()
    crc = batch.check(made)[5]
    partitions = [Partition(1, "orders", number, config) for number in range(1000)]
    for partition in partitions:
        base, position, offset = partition.place(1, len(made), TIME_MS, TIME_MS)
        batch.stamp(made, 1, partition.number, offset, crc)
        files.write(partition.segment_path(base), position, made)
        partition.publish(1)
    files.sync_dirty()
    survivor = FileCache(disk.crash(), 16)
    for partition in partitions[::9]:
        content = partition.read(survivor, 0, 100)
        assert content is not None
        (message,) = records.decode(content, "orders", partition.number, topic_id=1, expected_offset=0)
        assert message.value == b"value"
