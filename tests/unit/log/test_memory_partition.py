"""Partitions in memory: the surface of a partition, bounded, nothing on disk."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulated.disk import SimDisk
from txmq.errors import OffsetOutOfRangeError, StorageError
from txmq.log import batch, records
from txmq.log.file_cache import FileCache
from txmq.log.memory_partition import EPOCH_SHIFT, RETENTION_SIZE_BYTES, MemoryPartition, new_partition
from txmq.log.partition import Partition
from txmq.model import Storage, TopicConfig

from .support import NUMBER, TIME_MS, TOPIC_ID, make_batch, with_fields

FILES = FileCache(SimDisk())


def new_memory(**changed: int) -> MemoryPartition:
    config = TopicConfig("prices", storage=Storage.MEMORY, **changed)  # type: ignore[arg-type]
    partition = new_partition(TOPIC_ID, "prices", NUMBER, config)
    assert isinstance(partition, MemoryPartition)
    return partition


def append(partition: MemoryPartition, made: bytearray) -> int:
    count, max_ms, _, _, _, crc = batch.check(made)
    return partition.append(made, count, max_ms, crc)


def read(partition: MemoryPartition, offset: int, size_bytes_max: int = 1 << 20) -> bytes:
    content = partition.read(FILES, offset, size_bytes_max, nowait=True)
    assert content is not None
    return content


def test_the_storage_says_which_kind_it_is() -> None:
    assert type(new_partition(1, "t", 0, TopicConfig("t"))) is Partition
    assert type(new_memory()) is MemoryPartition


def test_appended_batch_is_readable_at_once_in_its_place() -> None:
    partition = new_memory()
    assert [append(partition, make_batch(count)) for count in (2, 3, 1)] == [0, 2, 5]
    assert (partition.log_start, partition.high_watermark, partition.next_offset) == (0, 6, 6)
    found = records.decode(read(partition, 0), "prices", NUMBER, topic_id=TOPIC_ID, expected_offset=0)
    assert [message.offset for message in found] == list(range(6))
    assert read(partition, 6) == b""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 400)), min_size=1, max_size=80), st.data())
def test_it_holds_the_newest_batches_within_its_size(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    partition = new_memory(retention_size_bytes=6400)
    stored: list[tuple[int, bytes]] = []
    for count, size in shapes:
        made = make_batch(count, b"x" * size)
        stored.append((append(partition, made), bytes(made)))
        assert partition.size_bytes <= 6400
    assert partition.size_bytes == sum(len(b) for offset, b in stored if offset >= partition.log_start)
    assert partition.log_start == 0 or partition.size_bytes > 6400 - 2200, "no more was dropped than had to be"
    offset = data.draw(st.integers(partition.log_start, partition.high_watermark - 1))
    size_max = data.draw(st.sampled_from([0, 300, 1000, 1 << 20]))
    content = read(partition, offset, size_max)
    first = max(number for number, (base, _) in enumerate(stored) if base <= offset)
    count = sum(1 for _ in batch.walk(content, TOPIC_ID, NUMBER, stored[first][0], full=True))
    assert content == b"".join(b for _, b in stored[first : first + count])
    assert count == 1 or len(content) <= size_max
    following = stored[first + count : first + count + 1]
    assert not following or len(content) + len(following[0][1]) > size_max, "as much as fits"


def test_outside_of_what_it_holds_is_out_of_range() -> None:
    partition = new_memory(retention_size_bytes=6400)
    for _ in range(100):
        append(partition, make_batch(1, b"x" * 300))
    assert partition.log_start > 0
    for offset in (0, partition.log_start - 1, 101):
        with pytest.raises(OffsetOutOfRangeError, match="prices-3"):
            read(partition, offset)


def test_one_batch_larger_than_the_limit_is_held() -> None:
    partition = new_memory(retention_size_bytes=100)
    append(partition, make_batch())
    made = make_batch(1, b"x" * 1000)
    assert append(partition, made) == 1
    assert (partition.log_start, read(partition, 1)) == (1, bytes(made))


def test_by_default_it_is_bounded() -> None:
    partition = new_memory()
    for _ in range(80):
        append(partition, make_batch(1, b"x" * (1 << 20)))
    assert RETENTION_SIZE_BYTES - (3 << 20) < partition.size_bytes <= RETENTION_SIZE_BYTES


def test_old_blocks_go_by_age() -> None:
    partition = new_memory(retention_ms=1000, retention_size_bytes=6400)
    for number in range(10):
        append(partition, make_batch(1, b"x" * 200, TIME_MS + number * 100))
    assert partition.expired_segments(TIME_MS + 1000) == (0, [])
    assert partition.expired_segments(TIME_MS + 1301) == (4, [])
    assert partition.log_start == 4
    partition.expired_segments(1 << 50)
    assert read(partition, 9) != b""


def test_blocks_without_times_go_by_size_alone() -> None:
    partition = new_memory(retention_ms=1000, retention_size_bytes=6400)
    for _ in range(10):
        append(partition, with_fields(make_batch(1, b"x" * 200), first_ms=-1, max_ms=-1))
    assert partition.expired_segments(1 << 50) == (0, [])


def test_an_offset_for_a_time() -> None:
    partition = new_memory()
    for number in range(10):
        append(partition, make_batch(2, b"x", TIME_MS + number))
    assert partition.offset_for(FILES, TIME_MS + 4) == 8
    assert partition.offset_for(FILES, TIME_MS + 10) == 20
    assert new_memory().offset_for(FILES, 0) == 0


def test_each_life_begins_empty_at_offsets_of_its_own() -> None:
    partition, restored, first = new_memory(), new_memory(), 3 << EPOCH_SHIFT
    append(partition, make_batch(7))
    restored.restore(partition.snapshot())
    assert restored.snapshot() == partition.snapshot()
    for each in (partition, restored):
        each.began(3)
        assert (each.log_start, each.high_watermark, read(each, first)) == (first, first, b"")
        assert append(each, make_batch(2)) == first
    assert partition.snapshot() == restored.snapshot()


def test_log_start_moves_by_blocks_and_hides_what_is_below() -> None:
    partition = new_memory(retention_size_bytes=6400)
    for _ in range(10):
        append(partition, make_batch(1, b"x" * 200))
    partition.set_log_start(4)
    assert partition.log_start == 4
    with pytest.raises(OffsetOutOfRangeError):
        read(partition, 3)
    partition.set_log_start(2)
    assert partition.log_start == 4


def test_the_journal_has_nothing_to_do_with_it() -> None:
    partition = new_memory()
    with pytest.raises(StorageError, match="memory"):
        partition.place(1, 100, TIME_MS, TIME_MS)
    with pytest.raises(StorageError, match="memory"):
        partition.redo(0, 0, 0, 1, TIME_MS, 100, TIME_MS)
