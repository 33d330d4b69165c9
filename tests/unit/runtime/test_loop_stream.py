"""A TCP stream that the event loop reads, against a socket of the test's own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from txmq.runtime import loop_stream
from txmq.runtime.loop_stream import LoopStream
from txmq.runtime.strands import Host

LONG_S = 60.0


def _on_loop(scenario: Callable[[Host, socket.socket], Awaitable[None]]) -> None:
    async def main() -> None:
        host = Host()
        with socket.create_server(("127.0.0.1", 0)) as server:
            await scenario(host, server)
        await host.close()

    asyncio.run(main())


def _connect(address: tuple[str, int], timeout: float) -> LoopStream:
    return loop_stream.connect(*address, timeout)


async def _connected(host: Host, server: socket.socket) -> tuple[LoopStream, socket.socket]:
    stream = await host.run(partial(_connect, server.getsockname(), LONG_S))
    return stream, server.accept()[0]


def test_bytes_and_the_end_are_read_by_the_loop() -> None:
    async def scenario(host: Host, server: socket.socket) -> None:
        stream, peer = await _connected(host, server)
        read, has_ended = bytearray(), asyncio.Event()

        def take() -> None:
            arrived = stream.receive()
            assert arrived is not None
            read.extend(arrived)
            if not arrived:
                stream.close()
                stream.close()
                has_ended.set()

        stream.serve(take, lambda: None)
        with peer:
            peer.sendall(b"hello")
            peer.shutdown(socket.SHUT_WR)
            await has_ended.wait()
        assert read == b"hello"

    _on_loop(scenario)


def test_what_was_gathered_in_one_turn_is_written_once() -> None:
    async def scenario(host: Host, server: socket.socket) -> None:
        stream, peer = await _connected(host, server)
        written = list[int]()
        stream.serve(lambda: None, lambda: written.append(stream.send([b"one piece"])))
        for _ in range(3):
            stream.gather()
        assert written == []
        await asyncio.sleep(0)
        assert written == [9]
        with peer:
            assert peer.recv(100) == b"one piece"
        stream.gather()
        stream.close()
        await asyncio.sleep(0)
        assert written == [9]

    _on_loop(scenario)


def test_strand_waits_for_room_in_a_full_socket() -> None:
    async def scenario(host: Host, server: socket.socket) -> None:
        stream, peer = await _connected(host, server)
        rewritten = asyncio.Event()
        stream.serve(lambda: None, rewritten.set)
        assert stream.wait_writable(0.0)
        while stream.send([bytes(1 << 20)]) == 1 << 20:
            pass
        assert not await host.run(lambda: stream.wait_writable(0.001))
        waits = asyncio.create_task(host.run(lambda: stream.wait_writable(LONG_S)))
        with peer:
            peer.setblocking(False)

            async def drain() -> None:
                while await host.loop.sock_recv(peer, 1 << 20):
                    pass

            draining = asyncio.create_task(drain())
            await rewritten.wait()
            assert await waits
            stream.close()
            await draining

    _on_loop(scenario)


def test_forked_child_that_closes_leaves_the_loop_of_its_parent() -> None:
    async def scenario(host: Host, server: socket.socket) -> None:
        stream, peer = await _connected(host, server)
        arrived = asyncio.Event()
        stream.serve(arrived.set, lambda: None)
        child = os.fork()
        if child == 0:
            stream.close()
            os._exit(0)
        os.waitpid(child, 0)
        with peer:
            peer.sendall(b"hello")
            async with asyncio.timeout(LONG_S):
                await arrived.wait()
        stream.close()

    _on_loop(scenario)


def test_port_without_listener_is_refused() -> None:
    async def scenario(host: Host, server: socket.socket) -> None:
        address = server.getsockname()
        server.close()
        with pytest.raises(OSError, match="Connect call failed"):
            await host.run(partial(_connect, address, LONG_S))

    _on_loop(scenario)


def test_attempt_that_is_not_answered_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(host: Host, server: socket.socket) -> None:
        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(host.loop, "sock_connect", never)
        with pytest.raises(TimeoutError, match="timed out after"):
            await host.run(partial(_connect, server.getsockname(), 0.001))

    _on_loop(scenario)
