"""A name with several addresses: which is tried when, and for how long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from txmq.runtime import loop_stream, net
from txmq.runtime.strands import Host

TIMEOUT_S = 60.0
_KEEPALIVE = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")


class _Name:
    """The name ``broker``: two addresses at which nobody answers, and one of a server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: socket.socket) -> None:
        self.address = server.getsockname()
        self.is_silent = False
        self.tried: list[tuple[str, float | None]] = []  # with the seconds that the attempt may take
        connect = socket.socket.connect

        def attempt(made: socket.socket, address: tuple[str, int]) -> None:
            self.tried.append((address[0], made.gettimeout()))
            if address != self.address or self.is_silent:
                raise TimeoutError("timed out")
            connect(made, address)

        monkeypatch.setattr(socket.socket, "connect", attempt)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: self.found())
        monkeypatch.setattr(net, "_answered", {})

    def found(self) -> list[net.Found]:
        """As ``socket.getaddrinfo``."""
        addresses = [("127.0.0.2", 1), ("127.0.0.3", 1), self.address]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Name]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield _Name(monkeypatch, server)


def test_addresses_of_a_name_share_the_time(name: _Name) -> None:
    net.connect("broker", 1, TIMEOUT_S).close()
    assert [host for host, _ in name.tried] == ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
    seconds = [allowed for _, allowed in name.tried if allowed is not None]
    assert seconds[0] == pytest.approx(TIMEOUT_S / 3, rel=0.01)  # what it left is the others'
    assert sum(seconds[:2]) < TIMEOUT_S


def test_address_that_answered_last_is_tried_first(name: _Name) -> None:
    for _ in range(2):
        net.connect("broker", 1, TIMEOUT_S).close()
    assert [host for host, _ in name.tried][3:] == ["127.0.0.1"]
    net.connect("broker", 2, TIMEOUT_S).close()  # another name
    assert len(name.tried) == 7


def test_name_whose_addresses_are_all_silent_fails(name: _Name) -> None:
    name.is_silent = True
    with pytest.raises(TimeoutError):
        net.connect("broker", 1, TIMEOUT_S)


def test_connection_that_nobody_acknowledges_ends_as_idle_ones_do(name: _Name) -> None:
    """Found: what was sent over a connection that a middle box had forgotten was sent again for 15 minutes."""
    stream = net.connect("broker", 1, TIMEOUT_S)
    options = [stream._socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) for option in _KEEPALIVE]
    idle_s, interval_s, count, unacknowledged_ms = options
    assert idle_s + interval_s * count == net.VANISHED_S == unacknowledged_ms / 1000
    stream.close()


def test_event_loop_tries_them_in_the_same_way(name: _Name) -> None:
    async def scenario() -> None:
        loop, host = asyncio.get_running_loop(), Host()
        tried: list[str] = []
        connect = loop.sock_connect

        async def attempt(made: socket.socket, address: tuple[str, int]) -> None:
            tried.append(address[0])
            if address != name.address:
                raise TimeoutError("timed out")
            made.setblocking(False)
            await connect(made, address)

        async def found(*_: object, **__: object) -> list[net.Found]:
            return name.found()

        loop.sock_connect, loop.getaddrinfo = attempt, found  # type: ignore[method-assign, assignment]
        for _ in range(2):
            stream = await host.run(partial(loop_stream.connect, "broker", 1, TIMEOUT_S))
            stream.close()
        assert tried == ["127.0.0.2", "127.0.0.3", "127.0.0.1", "127.0.0.1"]

    asyncio.run(scenario())
