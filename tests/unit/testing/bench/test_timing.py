"""What the benches share: the clockwork around the work, and the little arithmetic."""

from __future__ import annotations

import threading

import pytest

from txmq.log.batch import HEADER
from txmq.testing.bench.loads import end_of
from txmq.testing.bench.model import amount, latencies
from txmq.testing.bench.raw import batch_of, chunked, message_of, percentile
from txmq.testing.bench.timing import in_threads, timed


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert [percentile(range(1, 101), percent) for percent in (0, 50, 99, 100)] == [1, 51, 100, 100]
    assert latencies([0.001]) == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "p99.9": 1.0}


def test_every_piece_of_work_is_done_and_timed_once() -> None:
    done: list[None] = []
    assert len(timed(lambda: done.append(None), 7)) == len(done) == 7


def test_threads_share_the_work_and_each_makes_its_own() -> None:
    done, made = [], []

    def make() -> object:
        made.append(threading.get_ident())
        return lambda: done.append(threading.get_ident())

    rate, taken = in_threads(make, 4, 40)  # type: ignore[arg-type]
    assert rate > 0
    assert len(taken) == 40
    assert len(done) == 44  # one each before the clock starts
    assert set(done) == set(made)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_failure_in_thread_is_raised_and_no_thread_is_left(fails_at: int) -> None:
    calls, before = iter(range(1, 1000)), set(threading.enumerate())

    def work() -> None:
        if next(calls) >= fails_at:
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        in_threads(lambda: work, 2, 1_000_000)
    assert set(threading.enumerate()) <= before  # somebody else's may end meanwhile


def test_a_batch_has_the_size_that_was_asked_for() -> None:
    assert len(message_of(200)) == 200
    assert batch_of(130) == message_of(200)
    assert [(len(chunk), count) for chunk, count in chunked([b"ab"] * 5, 2)] == [(4, 2), (4, 2), (2, 1)]


def test_end_of_raw_batches_is_offset_behind_last_one() -> None:
    batch = bytearray(batch_of(10))
    fields = list(HEADER.unpack_from(batch))
    fields[0], fields[-1] = 41, 3
    second = bytearray(batch)
    HEADER.pack_into(second, 0, *fields)
    assert end_of(bytes(batch + second)) == 44


@pytest.mark.parametrize(("value", "text"), [(1234567.8, "1,234,568"), (1234.5, "1234"), (0.07071, "0.0707")])
def test_figures_have_three_digits_or_their_whole_part(value: float, text: str) -> None:
    assert amount(value) == text
