"""The door to the network for strands: a TCP stream that the event loop reads (port ``Stream``).

``TcpStream`` or ``TlsStream`` does the system calls, which never block here. The loop says when there is something to
read (``serve``), and when there is room to write.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from txmq.runtime import caller, net, strands
from txmq.runtime.ports import Buffer, Stream

if TYPE_CHECKING:
    from txmq.runtime.tls import ClientTls


class LoopStream:
    """One connected TCP stream; see the module's docstring. Used by one loop's thread."""

    def __init__(self, host: strands.Host, number: int, tcp: Stream) -> None:
        self._host, self._number = host, number
        self._process = caller.current_process()
        self._tcp = tcp
        self._write: Callable[[], None] | None = None
        self._waiting: list[asyncio.Future[None]] = []  # for room
        self._is_full = self._gathers = False
        host.stream_opened(self)

    @property
    def server_certificate(self) -> bytes | None:
        """See ``Stream``."""
        return self._tcp.server_certificate

    def serve(self, read: Callable[[], None], write: Callable[[], None]) -> None:
        """From now on call ``read`` when bytes or the end have arrived, and ``write`` when there is room again."""
        self._write = write
        self._host.loop.add_reader(self._number, self._host.call, read)

    def gather(self) -> None:
        """Call ``write`` soon, after what is ready to run now."""
        if not self._gathers:
            self._gathers = True
            self._host.loop.call_soon(self._write_gathered)

    def _write_gathered(self) -> None:
        self._gathers = False
        if self._number >= 0 and self._write is not None:
            self._host.call(self._write)

    def send(self, buffers: Sequence[Buffer]) -> int:
        """See ``Stream``."""
        taken = self._tcp.send(buffers)
        if taken < sum(map(len, buffers)) and not self._is_full:
            self._is_full = True
            self._host.loop.add_writer(self._number, self._has_room)
        return taken

    def _has_room(self) -> None:
        self._host.loop.remove_writer(self._number)
        self._is_full = False
        waiting, self._waiting = self._waiting, []
        for waits in waiting:
            if not waits.done():
                waits.set_result(None)
        if self._write is not None:
            self._host.call(self._write)

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """What has arrived; see ``Stream``."""
        return self._tcp.receive(0.0)

    def wait(self, timeout: float, *, writable: bool) -> bool:
        """Whether there is something to read (or room to write) now; see ``Stream``."""
        return self._tcp.wait(0.0, writable=writable)

    def wait_writable(self, timeout: float) -> bool:
        """See ``Stream``."""
        if not self._is_full:
            return True
        room = self._host.loop.create_future()
        self._waiting.append(room)
        strands.required().wait_for(asyncio.wait((room,), timeout=timeout))
        return room.done()

    def is_quiet(self) -> bool:
        """See ``Stream``."""
        return self._tcp.is_quiet()

    def shut_down(self) -> None:
        """See ``Stream``; the loop reads the end then."""
        self._tcp.shut_down()

    def close(self) -> None:
        """See ``Stream``."""
        if self._number < 0:
            return
        loop, number = self._host.loop, self._number
        self._number = -1
        if self._process == caller.current_process() and not loop.is_closed():  # a forked child shares the loop's epoll
            loop.remove_reader(number)
            loop.remove_writer(number)
        self._tcp.close()
        self._host.stream_closed(self)


def connect(host: str, port: int, timeout: float, tls: ClientTls | None = None) -> LoopStream:
    """As ``net.connect`` or ``ClientTls.connect``, in a strand."""
    strand = strands.required()
    loop = strand.host.loop
    until = loop.time() + timeout
    connected = strand.wait_for(_connect(loop, host, port, until, timeout))
    number = connected.fileno()
    if tls is None:
        return LoopStream(strand.host, number, net.adopt(connected))
    return LoopStream(strand.host, number, strand.wait_for(tls.adopt_on(loop, connected, host, until)))


async def _connect(
    loop: asyncio.AbstractEventLoop, host: str, port: int, until: float, timeout: float
) -> socket.socket:
    late = TimeoutError(f"timed out after {timeout:g} s")
    failure: OSError = late
    try:
        async with asyncio.timeout_at(until):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise late from None
    for one, seconds in net.in_turn(host, port, found, until - loop.time()):
        attempt = socket.socket(*one[:3])
        try:
            attempt.setblocking(False)
            async with asyncio.timeout(seconds):
                await loop.sock_connect(attempt, one[4])
        except OSError as error:
            attempt.close()
            failure = late if isinstance(error, TimeoutError) else error
        except BaseException:
            attempt.close()
            raise
        else:
            net.answered(host, port, one)
            return attempt
    raise failure
