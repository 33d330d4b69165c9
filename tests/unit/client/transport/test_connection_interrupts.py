"""A KeyboardInterrupt at every step of a request: no lock stays taken, and nobody else waits for ever."""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import pytest

from tests.interrupts import Strike
from tests.unit.client.scripted import scripted_broker
from txmq.client.transport import connection as link_module
from txmq.client.transport import reconnecting as connection_module
from txmq.client.transport.connection import Connection, Waiter
from txmq.client.transport.reconnecting import AnyBroker, ReconnectingConnection
from txmq.errors import ConnectionLostError, TxmqError
from txmq.runtime.clocks import OSClock
from txmq.runtime.net import TcpStream
from txmq.runtime.ports import Buffer

DEADLINE_S = 20.0
STEPS = 80  # more than a request or a connection has
ANSWER = b"result 200 0 %b\r\n"


@pytest.mark.parametrize("number", range(1, STEPS))
def test_an_interrupt_anywhere_leaves_no_lock_and_no_thread_behind(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "SLEEP_S_MAX", 0.01)
    ours, broker = socket.socketpair()
    link = Connection(TcpStream(ours), OSClock(), "broker")
    other = link.request(link.clock.monotonic() + DEADLINE_S, "ping")
    broker.sendall(ANSWER % other.opaque + ANSWER % b"2")
    sys.setprofile(Strike(number, link_module))
    with suppress(KeyboardInterrupt, ConnectionLostError):
        link.request(link.clock.monotonic() + DEADLINE_S, "ping").result()
    sys.setprofile(None)
    assert not link._sending.locked()
    assert not link._leading.locked()
    assert link._leader is None or link.failure is not None
    with suppress(OSError):  # where the link is shut down
        broker.sendall(ANSWER % other.opaque)
    with suppress(ConnectionLostError):
        assert other.result(timeout=DEADLINE_S) == b""
    ours.close()
    broker.close()


def test_request_held_back_at_its_senders_interrupt_never_goes_out() -> None:
    class Interrupting(deque[Sequence[Buffer]]):
        def append(self, buffers: Sequence[Buffer]) -> None:
            super().append(buffers)
            raise KeyboardInterrupt

    ours, broker = socket.socketpair()
    link = Connection(TcpStream(ours), OSClock(), "broker")
    link._woken.append(Waiter())
    link._out = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        link.request(link.clock.monotonic() + DEADLINE_S, "ping")
    link._pass_on()
    assert broker.recv(100) == b""
    ours.close()
    broker.close()


@pytest.mark.parametrize("number", range(1, STEPS))
def test_an_interrupt_while_connecting_lets_the_next_one_connect(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = scripted_broker(monkeypatch)
    connection = ReconnectingConnection(AnyBroker([("host", 1)]), "test", broker.clock, 5.0)
    sys.setprofile(Strike(number, connection_module))
    with suppress(KeyboardInterrupt, TxmqError):
        connection.connect_with_session(broker.clock.now + 5.0)
    sys.setprofile(None)
    assert connection.connect_with_session(broker.clock.now + 5.0)[1].id in (1, 2)
