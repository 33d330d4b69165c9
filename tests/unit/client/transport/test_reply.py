"""A reply's signal, which it has only if its thread comes to sleep."""

from __future__ import annotations

import socket

from txmq.client.transport.connection import Connection
from txmq.client.transport.reply import Reply
from txmq.runtime.net import TcpStream
from txmq.runtime.os_clock import OSClock

from .test_connection_threads import DEADLINE_S, Sleepless, answer, ends, somebody_reading

__all__ = ["ends"]  # a fixture


def test_lone_caller_makes_no_signal(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, broker = ends
    link = Connection(stream, OSClock(), "broker")
    reply = link.request(link.clock.monotonic() + DEADLINE_S, "ping")
    broker.sendall(answer(reply))
    assert reply.result() == b""
    assert reply.signal is None


def test_answer_before_the_signal_is_made_is_seen_behind_it(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, broker = ends
    link = Connection(stream, OSClock(), "broker")

    class Hurried(Reply):
        """The answer comes while it makes its signal: there was none to be set."""

        def may_sleep(self) -> None:
            broker.sendall(answer(self))
            link._exchange(0.0)
            super().may_sleep()
            self.signal = Sleepless()  # type: ignore[assignment]

    reply = Hurried(link, link.clock.monotonic() + DEADLINE_S, b"1")
    link._pending[b"1"] = reply, 0.0
    with somebody_reading(link):
        link._follow(reply, link.clock.monotonic() + DEADLINE_S)
    assert reply.done
