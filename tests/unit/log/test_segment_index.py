"""Sparse indexes: what they know, and how much of it they keep."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from txmq.errors import CorruptRecordError
from txmq.log.segment_index import ENTRY_DISTANCE_BYTES, End, IndexCache, SegmentIndex, extend

from .support import TIME_MS, make_placed, with_fields

SIZE = len(make_placed(0, 1, b"x" * 10_000))


def chain(count: int, times: dict[int, int] | None = None) -> bytes:
    return b"".join(make_placed(n, 1, b"x" * 10_000, (times or {}).get(n, TIME_MS)) for n in range(count))


def indexed(content: bytes) -> SegmentIndex:
    index = SegmentIndex(0)
    index.adopt(extend(index, index.end, content, len(content), "a.log"))
    return index


def test_entries_stand_at_batch_boundaries_and_no_closer_than_distance() -> None:
    index = indexed(chain(20))
    assert index.end == End(20, 20 * SIZE, TIME_MS)
    step = -(-ENTRY_DISTANCE_BYTES // SIZE)
    assert [(offset, position) for offset, position, _ in index.entries] == [(n, n * SIZE) for n in range(0, 20, step)]


def test_lookups_find_the_boundaries_around() -> None:
    index = indexed(chain(20))  # entries at 0, 4, 8, 12, 16
    assert [index.floor(offset) for offset in (0, 3, 4, 19)] == [(0, 0), (0, 0), (4, 4 * SIZE), (16, 16 * SIZE)]
    assert index.last_boundary(5 * SIZE) == (4, 4 * SIZE)
    assert index.last_boundary(20 * SIZE) == index.last_boundary(1 << 40) == (20, 20 * SIZE)
    assert index.next_boundary(0) == (4, 4 * SIZE)
    assert index.next_boundary(4 * SIZE) == (8, 8 * SIZE)
    assert index.next_boundary(17 * SIZE) == (20, 20 * SIZE)


def test_time_index_begins_before_first_batch_that_is_not_older() -> None:
    index = indexed(chain(20, {n: TIME_MS + (n if n != 9 else 100) for n in range(20)}))
    assert index.before_time(0) == (0, 0)
    assert index.before_time(TIME_MS + 5) == (4, 4 * SIZE)
    assert index.before_time(TIME_MS + 50) == (8, 8 * SIZE)  # number 9 has it
    assert index.before_time(TIME_MS + 1000) == (16, 16 * SIZE)


def test_successive_steps_give_the_index_of_one_step() -> None:
    content = chain(20)
    index = SegmentIndex(0)
    while index.end.position < len(content):
        start = index.end
        piece = content[start.position : start.position + 25_000]
        index.adopt(extend(index, start, piece, len(content), "a.log"))
    whole = indexed(content)
    assert (index.entries, index.end) == (whole.entries, whole.end)


def test_what_another_reader_found_first_is_not_added_again() -> None:
    content = chain(10)
    index = SegmentIndex(0)
    found = extend(index, index.end, content, len(content), "a.log")
    again = extend(index, index.end, content, len(content), "a.log")
    assert index.adopt(found) > 0
    assert index.adopt(again) == 0
    assert index.end.offset == 10


def test_reader_meets_no_half_of_entry_whenever_it_looks() -> None:
    """Between any two lines of ``adopt`` another thread may read; here a trace reads there."""
    index, content = SegmentIndex(0), chain(20)
    extension = extend(index, index.end, content, len(content), "a.log")
    looks = 0

    def look(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        nonlocal looks
        if frame.f_code is not SegmentIndex.adopt.__code__:
            return None
        looks += 1
        for place in range(0, 20 * SIZE, SIZE):
            offset, position = index.last_boundary(place)
            assert offset * SIZE == position <= place, event
            offset, position = index.next_boundary(place)
            assert offset * SIZE == position, event
            assert index.floor(offset)[0] <= offset, event
        index.before_time(TIME_MS + 1)
        return look

    previous = sys.gettrace()
    sys.settrace(look)
    try:
        index.adopt(extension)
    finally:
        sys.settrace(previous)
    assert looks >= 3


@pytest.mark.parametrize(
    ("content", "position", "text"),
    [
        (bytes(500), 0, "no batch"),
        (bytes(make_placed(0)[:50]), 0, "no batch"),
        (bytes(make_placed(5)), 0, "0 follows"),
        (bytes(with_fields(make_placed(0), count=0, delta=-1)), 0, "0 messages"),
        (bytes(with_fields(make_placed(0), length=10_000)), 0, "10012 bytes"),
    ],
)
def test_damage_is_named_with_its_position(content: bytes, position: int, text: str) -> None:
    index = SegmentIndex(0)
    with pytest.raises(CorruptRecordError, match=text) as caught:
        extend(index, index.end, content, len(content), "log/7/3/a.log")
    assert (caught.value.path, caught.value.position) == ("log/7/3/a.log", position)


@pytest.mark.parametrize("damaged", [make_placed(2), b"tail", bytes(500)])
def test_what_stands_before_damage_is_taken_in(damaged: bytes) -> None:
    index, whole = SegmentIndex(0), bytes(make_placed(0))
    content = whole + bytes(damaged)
    found = extend(index, index.end, content, len(content), "log/7/3/a.log")
    assert found.end[:2] == (1, len(whole))
    with pytest.raises(CorruptRecordError, match=r"no batch|1 follows") as caught:
        extend(index, found.end, bytes(damaged), len(content), "log/7/3/a.log")
    assert caught.value.position == len(whole)


def test_least_recently_used_indexes_go_beyond_the_entry_limit() -> None:
    cache = IndexCache(entries_max=50)
    first = cache.get("a", 0)
    content = chain(20)
    for name in "abcde":
        index = cache.get(name, 0)
        cache.adopt(name, index, extend(index, index.end, content, len(content), name))
        assert cache.get("a", 0) is first  # kept by being used
    cache.get("f", 0)
    assert cache.get("b", 0).end.offset == 0  # gone, and begun again
    assert cache.get("a", 0).end.offset == 20


def test_a_dropped_index_weighs_nothing() -> None:
    cache = IndexCache(entries_max=50)
    content = chain(20)
    for _ in range(100):
        index = cache.get("a", 0)
        extension = extend(index, index.end, content, len(content), "a")
        cache.adopt("a", index, extension)
        cache.drop("a")
        cache.drop("a")
        cache.adopt("a", index, extension)  # a reader that was at it when it was dropped
    kept = [cache.get(name, 0) for name in "abcde"]
    assert [cache.get(name, 0) for name in "abcde"] == kept
