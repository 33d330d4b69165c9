"""The door to the network: one TCP stream, never blocking except in ``wait``.

``send`` and ``receive`` do what can be done at once and say how much that was; ``wait`` sleeps until the stream can be
read or written. So a caller that holds a lock around ``send`` never sleeps with it, and whoever reads can also write.

Invariants:
    * TCP_NODELAY (requests are whole when sent) and keepalive (a peer that vanished is found out while idle) are set.
    * ``shut_down`` ends the conversation and wakes a thread in ``wait``; ``close`` only gives back this process's
      descriptor, so that after ``fork`` the other process's conversation goes on.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from itertools import islice

from txmq.runtime.ports import Buffer

RECEIVE_SIZE_BYTES = 256 << 10
_BUFFERS_PER_SEND_MAX = 512  # below every system's IOV_MAX
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Stream:
    """One connected TCP stream.

    Thread safety: one thread in ``receive``/``wait`` and one in ``send`` at a time; ``wait_writable`` and ``is_quiet``
    by any number.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._number = connected.fileno()
        self._readable = select.poll()
        self._readable.register(self._number, select.POLLIN)
        self._both = select.poll()
        self._both.register(self._number, select.POLLIN | select.POLLOUT)
        self._buffer = memoryview(bytearray(RECEIVE_SIZE_BYTES))

    def send(self, buffers: deque[Buffer]) -> int:
        """Hand over what the system takes at once; how many bytes that was. Raises OSError."""
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(islice(buffers, _BUFFERS_PER_SEND_MAX))
        except (BlockingIOError, InterruptedError):
            return 0

    def receive(self) -> memoryview | None:
        """What has arrived: a view that the next call overwrites; empty at the end of the stream; None: nothing yet."""
        try:
            size = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return None
        return self._buffer[:size]

    def wait(self, timeout: float, *, writable: bool) -> bool:
        """Sleep until there is something to read (or room to write); False if ``timeout`` seconds passed first."""
        return bool((self._both if writable else self._readable).poll(max(timeout, 0.0) * 1000))

    def wait_writable(self, timeout: float) -> bool:
        """Sleep until there is room to write; False if ``timeout`` seconds passed first."""
        poll = select.poll()
        poll.register(self._number, select.POLLOUT)
        return bool(poll.poll(max(timeout, 0.0) * 1000))

    def is_quiet(self) -> bool:
        """Whether nothing has arrived, neither bytes nor an end nor an error. Any number of threads may ask."""
        poll = select.poll()  # its own: one poll object does not let two threads in
        poll.register(self._number, select.POLLIN)
        return not poll.poll(0)

    def shut_down(self) -> None:
        """End the conversation, for every process that shares it; whoever waits wakes up."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            pass

    def close(self) -> None:
        """Give back the descriptor. Not while another thread waits: the number may be somebody else's at once."""
        self._socket.close()


def connect(host: str, port: int, timeout: float) -> Stream:
    """Connect to the first of the host's addresses that answers.

    Raises:
        OSError: none does within ``timeout`` seconds.
    """
    connected = socket.create_connection((host, port), timeout=timeout)
    try:
        if connected.getsockname() == connected.getpeername():
            # A port nobody listens on can be picked as our own and connect to itself.
            raise ConnectionRefusedError(f"{host}:{port} is this socket itself")
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError:
        connected.close()
        raise
    return Stream(connected)
