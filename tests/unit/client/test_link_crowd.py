"""Many threads on one link: who reads for them waits until those it woke are awake."""

from __future__ import annotations

import socket
import threading

from tests.unit.client.test_link_threads import DEADLINE_S, answer, is_woken, listed
from txmq.client.link import CROWD_WAITING, CROWD_WOKEN, Link, Reply
from txmq.runtime.net import TcpStream
from txmq.runtime.os_clock import OSClock


def _led(link: Link, own: Reply, answered: list[Reply], broker: socket.socket) -> threading.Thread:
    """A thread that waits for ``own`` and reads the others' answers; back when those are told."""
    link._followers.pop(own)
    broker.sendall(answer(*answered))
    leader = threading.Thread(target=own.result)
    leader.start()
    assert answered[0].signal.wait(DEADLINE_S)
    return leader


def test_in_a_crowd_the_leader_steps_down_until_all_it_woke_are_awake() -> None:
    ours, broker = socket.socketpair()
    with ours, broker:
        link = Link(TcpStream(ours), OSClock(), "broker")
        replies = listed(link, 2 * CROWD_WOKEN + CROWD_WAITING)
        answered, others, own = replies[:CROWD_WOKEN], replies[CROWD_WOKEN:-1], replies[-1]
        leader = _led(link, own, answered, broker)
        for reply in answered[1:]:  # each wakes the next when it leaves
            assert link._leader is None
            link._pass_on()
            assert is_woken(reply)
        link._pass_on()  # the last of them calls somebody to lead: the latest in the list
        woken = [reply for reply in others if is_woken(reply)]
        if woken:  # the leader had not got into the list yet
            link._pass_on()
        broker.sendall(answer(own))
        leader.join(DEADLINE_S)
        assert not leader.is_alive()


def test_in_no_crowd_it_reads_on() -> None:
    ours, broker = socket.socketpair()
    with ours, broker:
        link = Link(TcpStream(ours), OSClock(), "broker")
        *answered, own = listed(link, CROWD_WOKEN + 1)
        leader = _led(link, own, answered, broker)
        broker.sendall(answer(own))
        leader.join(DEADLINE_S)
        assert not leader.is_alive()
        assert link._leader is None
