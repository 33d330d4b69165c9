"""The turn that one thread has at a time: those that wait for it are woken when it is left."""

from __future__ import annotations

import threading

from txmq.runtime.os_clock import OSClock
from txmq.runtime.threads import Turn

CLOCK = OSClock()


def test_turn_that_is_left_goes_to_each_thread_that_waits() -> None:
    turn, holder, takers = Turn(), object(), list[bool]()

    def work() -> None:
        me = object()
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
    turn, holder = Turn(), object()
    assert turn.take(holder)
    waiting = threading.Thread(target=turn._wait, args=(threading.TIMEOUT_MAX,))
    waiting.start()
    while not turn._waiting:
        pass
    turn.leave(holder)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_wait_for_a_turn_ends_with_its_deadline() -> None:
    turn, holder, me = Turn(), object(), object()
    assert turn.take(holder)
    assert not turn.take_before(CLOCK.monotonic(), me, CLOCK)
    turn.leave(me)  # not its turn
    assert not turn.take(me)
    assert turn._waiting == []
