"""Reports that go with another thread's decision: none is left behind, whoever comes and goes meanwhile."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import pytest

from txmq.client.transport.carried import CARRIED_MAX, CarriedCompletes, Completed
from txmq.errors import ConnectionLostError
from txmq.testing.simulated.clock import SimClock
from txmq.testing.simulated.faults import FakeReply


class Control:
    """Takes requests."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.is_away = False

    def submit_transaction(self, head: str, fields: object, body: object, deadline: float) -> FakeReply:
        """As of a connection."""
        if self.is_away:
            raise ConnectionLostError("planned")
        self.sent.append((head, fields))
        return FakeReply(b"", None)


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def completed(control: Control, counter: int = 1) -> Completed:
    return Completed(control, SimClock(), f"t-{counter}", counter, "u")


def test_nothing_is_held_where_nobody_decides(control: Control) -> None:
    carried = CarriedCompletes()
    assert not carried.is_awaited
    assert not carried.hold(completed(control))
    carried.will_decide("a")
    assert carried.is_awaited
    assert carried.take("a") == []


def test_decision_takes_what_is_held_and_another_takes_the_rest(control: Control) -> None:
    carried = CarriedCompletes()
    carried.will_decide("a")
    carried.will_decide("b")
    held = [completed(control, number) for number in range(CARRIED_MAX + 5)]
    assert all(carried.hold(one) for one in held)
    assert carried.take("a") == held[:CARRIED_MAX]
    assert carried.take("b") == held[CARRIED_MAX:]


def test_last_decision_takes_all(control: Control) -> None:
    carried = CarriedCompletes()
    carried.will_decide("a")
    held = [completed(control, number) for number in range(CARRIED_MAX + 5)]
    for one in held:
        carried.hold(one)
    assert carried.take("a") == held


def test_who_does_not_decide_leaves_it_to_another(control: Control) -> None:
    carried, one = CarriedCompletes(), completed(control)
    carried.will_decide("a")
    carried.will_decide("b")
    assert carried.hold(one)
    assert carried.leave("a") == []
    assert carried.leave("b") == [one]
    assert carried.leave("b") == []


def test_report_is_answered_by_what_carried_it(control: Control) -> None:
    one = completed(control)
    assert not one.done
    one.reply = FakeReply(b"lines", None)
    assert one.done
    assert one.result(1.0) == b"lines"
    assert control.sent == []


def test_held_report_is_sent_when_it_is_waited_for(control: Control) -> None:
    one = completed(control, 7)
    assert one.result(1.0) == b""
    assert control.sent == [("complete t-7", {"uuid": "u"})]


def test_held_report_is_sent_when_it_is_looked_at_twice(control: Control) -> None:
    one = completed(control)
    one.look()
    assert control.sent == []
    control.is_away = True
    one.look()
    assert not one.done
    control.is_away = False
    one.look()
    assert one.done
    one.look()
    assert len(control.sent) == 1


@pytest.mark.usefixtures("quick_switches")
def test_threads_take_every_report_once(control: Control) -> None:
    carried, taken, lock = CarriedCompletes(), list[int](), threading.Lock()

    def work(first: int) -> None:
        rng, me = random.Random(first), object()
        for number in range(first, first + 1500):
            carried.will_decide(me)
            found = carried.take(me) if rng.random() < 0.7 else carried.leave(me)
            one = completed(control, number)
            if not (carried.is_awaited and carried.hold(one)):
                found.append(one)
            with lock:
                taken.extend(other.counter for other in found)

    threads = [threading.Thread(target=work, args=(10_000 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [10_000 * number + one for number in range(6) for one in range(1500)]
