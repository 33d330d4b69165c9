"""Threads that share a link: nobody who waits is forgotten when another one stops reading."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from txmq.client.link import Link, Waiter
from txmq.runtime.net import Stream
from txmq.runtime.os_clock import OSClock

DEADLINE_S = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Stream, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Stream(ours), theirs


def test_a_follower_that_was_done_when_it_was_called_to_lead_passes_the_call_on(
    ends: tuple[Stream, socket.socket],
) -> None:
    stream, broker = ends
    clock = OSClock()
    link = Link(stream, clock, "broker")
    first, second = (link.request(clock.monotonic() + DEADLINE_S, "ping") for _ in range(2))
    # The leader of this moment has read the first one's answer; the call to lead goes to the first, who sleeps still.
    link._followers[first] = None
    assert link._reading.acquire(blocking=False)
    woken: list[bytes] = []
    waiting = threading.Thread(target=lambda: woken.append(second.result()))
    waiting.start()
    wait_until_listed(link, second)
    first.answered(200, b"")
    link._step_down()
    assert link._reading.acquire(blocking=False)  # so that the first finds nothing to lead, and has it as it was
    link._reading.release()
    link._follow(first, clock.monotonic())
    broker.sendall(b"result 200 0 %b\r\n" % second.opaque)
    waiting.join(DEADLINE_S / 2)
    assert woken == [b""]


def wait_until_listed(link: Link, waiter: Waiter) -> None:
    deadline = OSClock().monotonic() + DEADLINE_S
    while waiter not in link._followers:
        assert OSClock().monotonic() < deadline


def test_many_threads_may_look_whether_a_stream_is_quiet_while_one_waits(ends: tuple[Stream, socket.socket]) -> None:
    stream, peer = ends
    waiting = threading.Thread(target=lambda: stream.wait(DEADLINE_S, writable=False))
    waiting.start()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(2000):
                assert stream.is_quiet()
        except BaseException as error:  # noqa: BLE001  told below
            failures.append(error)

    looking = [threading.Thread(target=look) for _ in range(4)]
    for thread in looking:
        thread.start()
    for thread in looking:
        thread.join(DEADLINE_S)
    peer.sendall(b"x")
    waiting.join(DEADLINE_S)
    assert failures == []
    assert not stream.is_quiet()
