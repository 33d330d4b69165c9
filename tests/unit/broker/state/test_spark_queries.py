"""The committed batches of a query: runs of numbers, the digests of the newest, and what is not known any more."""

from __future__ import annotations

import random

import pytest

from txmq.broker.state.spark_queries import DIGESTS_MAX, INTERVALS_MAX, Queries, Query
from txmq.errors import TransactionConflictError


def test_numbers_in_any_order_are_kept_as_runs() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        numbers = rng.sample(range(60), rng.randint(1, 60))
        query = Query("q", 1, 0)
        for number in numbers:
            query.commit(number, None, 0)
        assert [number for number in range(61) if query.has(number)] == sorted(numbers)
        assert query.newest == max(numbers)
        assert all(
            last + 1 < first for (_, last), (first, _) in zip(query.intervals, query.intervals[1:], strict=False)
        )


def test_lowest_run_beyond_the_limit_is_refused_as_unknown() -> None:
    query = Query("q", 1, 0)
    for number in range(INTERVALS_MAX + 1):
        query.commit(2 * number, None, 0)
    with pytest.raises(TransactionConflictError, match="nobody knows whether it is committed"):
        query.has(0)
    assert (query.has(1), query.has(2)) == (False, True)


def test_digests_of_the_batches_committed_last_are_kept() -> None:
    query = Query("q", 1, 0)
    for number in range(DIGESTS_MAX + 2):
        query.commit(number, f"{number}", 0)
    assert (len(query.digests), min(query.digests), query.intervals) == (DIGESTS_MAX, 2, [(0, DIGESTS_MAX + 1)])


def test_queries_are_the_same_after_a_checkpoint() -> None:
    queries, restored = Queries(), Queries()
    queries.open("q", 3, 5)
    for number in (4, 0, 9):
        queries.committed("q", number, f"1-{number}", 6)
    restored.restore(queries.snapshot())
    assert restored.snapshot() == queries.snapshot()
    assert restored.named["q"].digests == {4: "1-4", 0: "1-0", 9: "1-9"}
