"""Runs of issued session numbers: what is in them, whatever the order, and how few there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from txmq.broker.state import session
from txmq.broker.state.session import IssuedSessions


@given(st.lists(st.integers(1, 40), max_size=60))
def test_exactly_the_issued_numbers_are_in_it_in_few_runs(numbers: list[int]) -> None:
    issued = IssuedSessions()
    for number in numbers:
        issued.add(number)
    restored = IssuedSessions()
    restored.restore(issued.freeze())
    assert [n for n in range(42) if n in restored] == sorted(set(numbers))
    runs = list(restored.freeze())
    assert runs == list(issued.freeze())
    assert len(runs) == sum(number - 1 not in numbers for number in set(numbers))


def test_oldest_runs_are_forgotten_beyond_the_limit() -> None:
    issued = IssuedSessions()
    for start in range(session.RUNS_MAX + 1):
        issued.add(1 + 10 * start)
    assert [number in issued for number in (1, 11, 1 + 10 * session.RUNS_MAX)] == [False, True, True]
    assert len(list(issued.freeze())) == session.RUNS_MAX
