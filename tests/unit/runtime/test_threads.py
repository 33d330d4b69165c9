"""The turn that one thread has at a time: those that wait for it are woken when it is left."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

import pytest

from tests.interrupts import Strike
from txmq.runtime import threads
from txmq.runtime.clocks import OSClock
from txmq.runtime.threads import Attempt, Exclusive

CLOCK = OSClock()


def test_name_bound_before_strands_are_there_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: a module imported before ``txmq.aio`` took every caller for a thread."""
    bound, strand = threads.current_strand, object()
    monkeypatch.setattr(threads, "_watched", None)  # so that it is put back
    threads.watch_strands(lambda: strand)  # type: ignore[arg-type,return-value]
    assert bound() is strand


def test_turn_that_is_left_goes_to_each_thread_that_waits() -> None:
    turn, holder, takers = Exclusive(), Attempt(), list[bool]()

    def work() -> None:
        me = Attempt()
        takers.append(turn.take_before(CLOCK.monotonic() + 60.0, me, CLOCK))
        turn.leave(me)

    assert turn.take(holder)
    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    turn.leave(holder)
    for worker in workers:
        worker.join()
    assert takers == [True, True]
    assert turn._waiting == []


def test_waiting_thread_is_woken_when_the_turn_is_left() -> None:
    turn, holder = Exclusive(), Attempt()
    assert turn.take(holder)
    waiting = threading.Thread(target=turn._wait, args=(threading.TIMEOUT_MAX,))
    waiting.start()
    while not turn._waiting:
        pass
    turn.leave(holder)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_wait_for_a_turn_ends_with_its_deadline() -> None:
    turn, holder, me = Exclusive(), Attempt(), Attempt()
    assert turn.take(holder)
    assert not turn.take_before(CLOCK.monotonic(), me, CLOCK)
    turn.leave(me)  # not its turn
    assert not turn.take(me)
    assert turn._waiting == []


def test_interrupted_holder_of_a_turn_leaves_it() -> None:
    number, is_struck = 0, True
    while is_struck:
        number += 1
        turn, strike = Exclusive(), Strike(number, threads)
        sys.setprofile(strike)
        with suppress(KeyboardInterrupt):
            me = Attempt()
            try:
                assert turn.take_before(CLOCK.monotonic() + 60.0, me, CLOCK)
            finally:
                me.is_over = True
                turn.leave(me)
        sys.setprofile(None)
        is_struck = strike.left <= 0
        assert turn.take_before(CLOCK.monotonic() + 60.0, Attempt(), CLOCK), number
    assert number > 4
