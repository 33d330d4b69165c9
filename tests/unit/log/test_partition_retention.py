"""Retention of a partition: what goes by age and by size, and what readers see of it."""

from __future__ import annotations

import pytest

from txmq.errors import OffsetOutOfRangeError
from txmq.log.file_cache import FileCache
from txmq.model import TopicConfig

from .support import TIME_MS, Log, make_batch, with_fields


def retained(**changed: int | None) -> Log:
    """Five segments of one batch of ten messages each, a second apart."""
    config = TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=None, **changed)  # type: ignore[arg-type]
    log = Log(config)
    for number in range(5):
        log.append(make_batch(10, b"x" * 300, TIME_MS + number * 1000), now_ms=TIME_MS + number * 1000)
    assert [s.base_offset for s in log.partition.segments] == [0, 10, 20, 30, 40]
    return log


def test_without_limits_everything_stays() -> None:
    log = retained()
    assert log.partition.expired_segments(1 << 50) == (0, [])


def test_segments_whose_newest_message_is_past_the_age_go() -> None:
    log = retained(retention_ms=1500)
    path = log.partition.segment_path
    assert log.partition.expired_segments(TIME_MS + 1500) == (0, [])
    assert log.partition.expired_segments(TIME_MS + 1501) == (10, [path(0)])
    assert log.partition.expired_segments(TIME_MS + 3501) == (30, [path(0), path(10), path(20)])


def test_active_segment_goes_by_age_and_another_begins() -> None:
    log = retained(retention_ms=1500)
    assert log.partition.expired_segments(TIME_MS + 5500)[0] == 40
    start, paths = log.partition.expired_segments(TIME_MS + 5501)
    assert (start, len(paths)) == (50, 5)
    log.partition.set_log_start(start)
    for path in paths:
        log.files.unlink(path)
    assert (log.partition.size_bytes, log.read(50)) == (0, b"")
    assert log.partition.offset_for(log.files, 0) == 50
    assert log.partition.expired_segments(1 << 50) == (50, [])
    assert log.append(make_batch(10, b"y" * 300), publish=False) == 50
    assert (log.read(50), log.partition.offset_for(log.files, 0)) == (b"", 50)
    log.partition.publish(60)
    assert log.read(50) == log.batches[-1]
    with pytest.raises(OffsetOutOfRangeError, match=r"\[50, 60\]"):
        log.read(49)


def test_by_size_the_active_segment_never_goes() -> None:
    log = retained(retention_size_bytes=1)
    start, paths = log.partition.expired_segments(1 << 50)
    assert (start, len(paths)) == (40, 4)
    log.partition.set_log_start(start)
    assert log.partition.expired_segments(1 << 50) == (40, [])


@pytest.mark.parametrize("time_ms", [-1, TIME_MS + 10**10])
def test_an_active_segment_whose_age_no_message_tells_stays(time_ms: int) -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=None, retention_ms=1000))
    log.append(with_fields(make_batch(10, b"x" * 300), first_ms=time_ms, max_ms=time_ms))
    assert log.partition.expired_segments(TIME_MS + 10**9) == (0, [])


def test_active_segment_with_message_that_is_not_visible_yet_stays() -> None:
    log = Log(TopicConfig("orders", retention_ms=1000))
    log.append(make_batch(10))
    log.append(make_batch(10), publish=False)
    assert log.partition.expired_segments(1 << 50) == (0, [])


def test_time_from_future_does_not_keep_segment_for_ever() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=None, retention_ms=1000))
    log.append(make_batch(10, b"x" * 300, TIME_MS + 10**10))
    log.append(make_batch(10, b"x" * 300, TIME_MS + 501), now_ms=TIME_MS + 500)
    assert log.partition.expired_segments(TIME_MS + 1500)[0] == 0
    assert log.partition.expired_segments(TIME_MS + 1501)[0] == 10


def test_message_of_clock_behind_is_as_old_as_it_says() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=None, retention_ms=1000))
    for _ in range(2):
        log.append(make_batch(10, b"x" * 300, TIME_MS), now_ms=1)
    assert log.partition.expired_segments(TIME_MS + 1000)[0] == 0
    assert log.partition.expired_segments(TIME_MS + 1001)[0] == 20


def test_segment_of_clock_ahead_counts_from_first_look() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=None, retention_ms=1000))
    for _ in range(2):
        log.append(with_fields(make_batch(10, b"x" * 300), first_ms=-1, max_ms=-1), now_ms=TIME_MS + 10**11)
    assert log.partition.expired_segments(TIME_MS)[0] == 0
    assert log.partition.expired_segments(TIME_MS + 1000)[0] == 0
    assert log.partition.expired_segments(TIME_MS + 1001)[0] == 10


def test_look_by_clock_behind_makes_no_segment_older() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=None, retention_ms=1000))
    for _ in range(2):
        log.append(with_fields(make_batch(10, b"x" * 300), first_ms=-1, max_ms=-1), now_ms=TIME_MS)
    assert log.partition.expired_segments(1)[0] == 0
    assert log.partition.expired_segments(TIME_MS + 1000)[0] == 0
    assert log.partition.expired_segments(TIME_MS + 1001)[0] == 10


def test_clock_that_is_corrected_twice_counts_from_the_last() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=None, retention_ms=1000))
    for _ in range(2):
        log.append(with_fields(make_batch(10, b"x" * 300), first_ms=-1, max_ms=-1), now_ms=TIME_MS + 2 * 10**11)
    for now_ms in (TIME_MS + 10**11, TIME_MS):
        assert log.partition.expired_segments(now_ms)[0] == 0
    assert log.partition.expired_segments(TIME_MS + 1001)[0] == 10


def test_messages_without_time_are_as_old_as_their_segments_end() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=4096, segment_age_ms=None, retention_ms=1000))
    for now_ms in (TIME_MS, TIME_MS + 500):
        log.append(with_fields(make_batch(10, b"x" * 300), first_ms=-1, max_ms=-1), now_ms=now_ms)
    assert log.partition.expired_segments(TIME_MS + 1500)[0] == 0
    assert log.partition.expired_segments(TIME_MS + 1501)[0] == 10


def test_by_size_the_oldest_go_while_the_others_hold_enough() -> None:
    one = len(retained().batches[0])
    assert retained(retention_size_bytes=4 * one + 1).partition.expired_segments(0)[0] == 0
    assert retained(retention_size_bytes=4 * one).partition.expired_segments(0)[0] == 10
    assert retained(retention_size_bytes=2 * one).partition.expired_segments(0)[0] == 30


def test_a_segment_that_is_not_wholly_visible_stays() -> None:
    log = Log(TopicConfig("orders", segment_size_bytes=4096, retention_size_bytes=1))
    for _ in range(3):
        log.append(make_batch(10, b"x" * 300), publish=False)
    log.partition.publish(10)
    assert log.partition.expired_segments(0) == (10, [log.partition.segment_path(0)])


def test_below_the_log_start_nothing_is_read_and_above_everything() -> None:
    log = retained()
    log.partition.set_log_start(20)
    log.partition.set_log_start(10)  # never back
    for base in (0, 10):
        log.files.unlink(log.partition.segment_path(base))
    assert [s.base_offset for s in log.partition.segments] == [20, 30, 40]
    with pytest.raises(OffsetOutOfRangeError, match=r"\[20, 50\]"):
        log.read(19)
    assert log.read(20) == log.batches[2]
    assert log.partition.offset_for(log.files, 0) == 20


def test_read_overtaken_by_retention_is_out_of_range_not_damage() -> None:
    log = retained()

    class Overtaken(FileCache):
        """Retention comes between the reader's look at the partition and its read."""

        def read(self, path: str, size: int, position: int) -> bytes:
            log.partition.set_log_start(10)
            self.unlink(path)
            return super().read(path, size, position)

    with pytest.raises(OffsetOutOfRangeError, match=r"\[10, 50\]"):
        log.partition.read(Overtaken(log.disk), 0, 100)
