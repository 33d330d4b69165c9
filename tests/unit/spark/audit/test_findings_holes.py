"""Holes are found whatever run of offsets they lie in, before, between and after; twice-read offsets too."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from txmq.spark.audit.findings import BUCKET_BITS, GapRun, Hole, between_runs

SIZE = 1 << BUCKET_BITS


def runs_of(offsets: list[int], partition: int = 0) -> list[GapRun]:
    """As Spark counts them."""
    by_bucket: dict[int, list[int]] = {}
    for offset in offsets:
        by_bucket.setdefault(offset // SIZE, []).append(offset % SIZE)
    return [
        GapRun(partition, bucket, len(found), min(found), max(found), sum(found)) for bucket, found in by_bucket.items()
    ]


def test_what_is_whole_has_no_holes() -> None:
    runs = runs_of(list(range(5, 3 * SIZE + 7)))
    assert between_runs(runs, {0: (5, 3 * SIZE + 7)}) == []
    assert between_runs(runs, None) == []
    assert all(run.adds_up for run in runs)


def test_holes_before_between_and_behind_are_found_with_their_offsets() -> None:
    runs = runs_of([*range(10, 20), *range(2 * SIZE, 2 * SIZE + 5)])
    ranges = {0: (5, 2 * SIZE + 9), 3: (0, 2), 4: (7, 7)}
    assert between_runs(runs, ranges) == [
        Hole(0, 5, 9), Hole(0, 20, 2 * SIZE - 1), Hole(0, 2 * SIZE + 5, 2 * SIZE + 8), Hole(3, 0, 1),
    ]  # fmt: skip
    assert between_runs(runs, None) == [Hole(0, 20, 2 * SIZE - 1)]


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(0, 60))
def test_run_adds_up_only_where_every_offset_is_there_once(offsets: set[int], doubled: int) -> None:
    dense = max(offsets) - min(offsets) + 1 == len(offsets)
    (run,) = runs_of(sorted(offsets))
    assert run.adds_up == dense
    (twice,) = runs_of([*sorted(offsets), doubled])
    if doubled in offsets:
        assert not twice.adds_up


def test_a_hole_says_what_it_is() -> None:
    assert str(Hole(0, 7, 7)) == "1 offset cannot be read: 7 to 7"
    assert str(Hole(0, 7, 9)) == "3 offsets cannot be read: 7 to 9"
    assert str(Hole(0, 7, 6)) == "offset 7 was read twice"
