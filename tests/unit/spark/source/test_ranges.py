"""Ranges of offsets: cut for tasks, admitted to a micro-batch, remembered in a checkpoint."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txmq.errors import ConfigError, DataLossError
from txmq.log.history import Lives, LogHistory
from txmq.spark.source.catalog import Held
from txmq.spark.source.offsets import Position, lag
from txmq.spark.source.ranges import Range, admit, pack, share, split


def make(start: int, end: int, size_bytes: int = 0, partition: int = 0) -> Range:
    return Range("orders", 7, partition, start, end, size_bytes)


some_ranges = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 10_000)), min_size=1, max_size=6
).map(lambda found: [make(start, start + count, size, n) for n, (start, count, size) in enumerate(found)])


@settings(deadline=None)
@given(some_ranges, st.integers(1, 20), st.integers(1, 5000))
def test_parts_cover_every_offset_once_and_none_is_empty(ranges: list[Range], tasks_min: int, size_bytes: int) -> None:
    parts = split(ranges, tasks_min, size_bytes)
    for each in ranges:
        own = [part for part in parts if part.partition == each.partition]
        assert [offset for part in own for offset in range(part.start, part.end)] == list(range(each.start, each.end))
    assert all(part.count > 0 for part in parts)
    assert len(parts) >= min(tasks_min, sum(each.count for each in ranges))


def test_large_partition_keeps_all_cores_busy_with_bounded_tasks() -> None:
    assert [part.count for part in split([make(0, 1000)], 4, 1 << 30)] == [250] * 4
    assert len(split([make(0, 1000, 10_000)], 1, 1000)) == 10


@settings(deadline=None)
@given(some_ranges, st.integers(0, 3000))
def test_packs_hold_every_part_in_order(ranges: list[Range], rows: int) -> None:
    packs = pack(ranges, rows)
    assert [part for each in packs for part in each] == ranges
    assert all(len(each) == 1 or sum(part.count for part in each) <= rows for each in packs)


@settings(deadline=None)
@given(st.dictionaries(st.integers(), st.integers(0, 10**9), max_size=8), st.integers(0, 10**9))
def test_shares_are_never_more_than_allowed_or_wanted(wanted: dict[int, int], allowed: int) -> None:
    given_out = share(wanted, allowed)
    assert sum(given_out.values()) == min(allowed, sum(wanted.values()))
    assert all(given_out[key] <= want for key, want in wanted.items())


def test_what_waits_longest_gets_most() -> None:
    available = {"a": make(0, 300), "b": make(50, 150), "c": make(7, 7)}
    assert admit(available, 40, None) == {"a": 30, "b": 60, "c": 7}
    assert admit(available, None, None) == {"a": 300, "b": 150, "c": 7}


def test_nobody_starves_beside_one_who_always_has_plenty() -> None:
    assert share({"a": 10**6, "b": 1, "c": 0, "d": 3}, 100) == {"a": 98, "b": 1, "c": 0, "d": 1}
    assert share({"a": 10**6, "b": 1, "c": 5}, 2) == {"a": 2, "b": 0, "c": 0}  # where there is not one for each


def test_bytes_are_admitted_by_their_share_and_one_message_always() -> None:
    available = {"a": make(0, 100, 10_000)}
    assert admit(available, None, 2500) == {"a": 25}
    assert admit(available, 10, 2500) == {"a": 10}
    assert admit(available, None, 1) == {"a": 1}


LIFE, NEXT, LATER = ("1" * 16, "2" * 16, "3" * 16)


# --- what a stream remembers -----------------------------------------------------------------------------------------


def test_position_survives_json_and_equal_ones_have_equal_text() -> None:
    logs = {
        "b": {10: LogHistory(2, ((LIFE, 0),)), 9: LogHistory(2, ())},
        "a": {0: LogHistory(1, ((LIFE, 1), (NEXT, 2)))},
    }
    position = Position({"b": 2, "a": 1}, {"b": {10: 5, 9: 1}, "a": {0: 3}}, {"b": {9: 0}}, is_initial=False, logs=logs)
    again = Position.from_json(json.loads(json.dumps(position.to_json())))
    assert again == position
    reordered = Position({"a": 1, "b": 2}, {"a": {0: 3}, "b": {9: 1, 10: 5}}, {"b": {9: 0}}, logs=logs)
    assert json.dumps(reordered.to_json()) == json.dumps(position.to_json())


def test_the_first_micro_batch_begins_where_its_end_says() -> None:
    """Spark asks for the beginning anew when it repeats the first micro-batch; "latest" is somewhere else by then."""
    planned = Position({"a": 1}, {"a": {0: 90}}, begins={"a": {0: 40}})
    assert Position({"a": 1}, {"a": {0: 77}}, is_initial=True).start_of(planned) == {"a": {0: 40}}
    nothing = Position({"a": 1}, {"a": {0: 40}}, is_initial=True)
    assert Position({"a": 1}, {"a": {0: 77}}, is_initial=True).start_of(nothing) == {"a": {0: 40}}
    following = Position({"a": 1}, {"a": {0: 95}})
    assert planned.start_of(following) == {"a": {0: 90}}


@pytest.mark.parametrize(
    ("now", "shared"),
    [
        (((LIFE, 0), (NEXT, 10)), None),  # the same, and more after it
        (((LIFE, 0), (NEXT, 10), (LATER, 30)), None),
        (((LIFE, 0), (LATER, 10)), 10),  # a copy from before the second life
        (((LIFE, 0), (NEXT, 10), (LATER, 20)), 20),  # from within it
        (((LATER, 0),), 0),
    ],
)
def test_position_is_checked_against_the_log_as_it_is(now: Lives, shared: int | None) -> None:
    position = Position({"a": 1}, {"a": {0: 30}}, logs={"a": {0: LogHistory(1, ((LIFE, 0), (NEXT, 10)))}})
    held = Held("a", 1, {0: Range("a", 1, 0, 0, 99, 0)}, {0: LogHistory(1, now)})
    with (
        nullcontext()
        if shared is None
        else pytest.raises(
            DataLossError, match=f"a-0: offset 30 .* up to offset {shared}" if shared else "nobody can tell how far"
        )
    ):
        position.check(held)


@pytest.mark.parametrize("fields", [{}, {"topics": 3}, {"topics": {"a": {"0": 1}}}, {"topics": {"a": {"id": "x"}}}])
def test_a_checkpoint_of_something_else_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="the checkpoint holds no offsets of txmq"):
        Position.from_json(fields)


def test_the_lag_is_what_is_there_and_was_not_read() -> None:
    read, there = (
        {"topics": {"a": {"id": 1, "offsets": offsets, "logs": dict.fromkeys(offsets, "1")}}}
        for offsets in ({"0": 3}, {"0": 10, "1": 4})
    )
    progress = {
        "sources": [{"endOffset": json.dumps(read), "latestOffset": there}, {"endOffset": 5, "latestOffset": None}]
    }
    assert lag(progress) == {"a-0": 7, "a-1": 4}
