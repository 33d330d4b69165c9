"""Ctrl-C while a thread takes an answer for others: they are told in the next round."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from tests.interrupts import Strike
from tools.simulated.clock import SimClock
from txmq.client.producer import core as core_module
from txmq.client.producer import sender as sender_module
from txmq.client.producer.core import ProducerLimits
from txmq.client.producer.sender import Sender
from txmq.client.transport.connection import Waiter
from txmq.client.transport.reconnecting import ReconnectingConnection


class _Connection:
    """A connection that keeps what is put, and waits for nobody."""

    failure, has_unsent, used_at = None, False, 0.0

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def put(self, reply: Any, *_: object) -> None:
        self.replies.append(reply)

    def wait(self, waiter: Waiter, deadline: float) -> None:
        """Nothing comes."""


class _Sender(Sender):
    def _drive_in_background(self, deadline: float) -> None:
        """By the test."""


def test_interrupted_telling_goes_on_in_next_round() -> None:
    number, is_struck = 0, True
    while is_struck:
        number += 1
        connection, session = _Connection(), SimpleNamespace(id=1, epoch=1, in_flight_max=8)
        ready = SimpleNamespace(connect_with_session=lambda _, got=(connection, session): got, close=lambda: None)
        sender = _Sender(cast("ReconnectingConnection", ready), SimClock(), ProducerLimits())
        completions = [sender.add_async("t", 0, bytearray(200), 1, 60.0, is_movable=False) for _ in range(2)]
        waiters = [completion.waiter() for completion in completions]
        sender.step(Waiter(), 1.0)  # connects
        sender.step(Waiter(), 1.0)  # sends
        strike = Strike(number, sender_module, core_module)
        sys.setprofile(strike)
        with suppress(KeyboardInterrupt):
            for offset in (1, 0):  # the second one finishes both
                connection.replies[offset].answered(200, b"%d" % offset)
        sys.setprofile(None)
        is_struck = strike.left <= 0
        for offset, reply in enumerate(list(connection.replies)):  # as they come again on the next connection
            reply.answered(200, b"%d" % offset)
        assert [waiter.done for waiter in waiters] == [True, True], number
        sender.close()
        assert [completion.futures[0][1].result(0).offset for completion in completions] == [0, 1], number
    assert number > 10
