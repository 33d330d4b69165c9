"""The door to the network: one TCP stream, never blocking except in ``wait``.

``send`` does what can be done at once and says how much that was; ``receive`` and ``wait`` may sleep. So a caller that
holds a lock around ``send`` never sleeps with it, and the reading thread can also write.

The socket itself blocks, for ``SLEEP_S_MAX`` at most, and every call that must not carries MSG_DONTWAIT. So waiting for
an answer and reading it is one system call: poll before it would be another one, and a second hand-over
of the interpreter's lock if many threads share the stream.

Invariants:
    * TCP_NODELAY (requests are whole when sent) and keepalive are set: a peer that vanished, or a connection that a
      middle box has forgotten, is found out within ``VANISHED_S``, idle or not.
    * ``shut_down`` ends the conversation and wakes a thread in ``wait``; ``close`` only gives back this process's
      descriptor, so that after ``fork`` the other process's conversation goes on.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from txmq.runtime.ports import Buffer

RECEIVE_SIZE_BYTES = 256 << 10
SLEEP_S_MAX = 0.5  # one ``receive`` sleeps no longer, whatever it is asked for
BUFFERS_PER_SEND_MAX = 512  # below every system's IOV_MAX
ANSWERED_MAX = 1024  # names whose last address is remembered
_DONT_WAIT = socket.MSG_DONTWAIT
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
VANISHED_S = 30  # the sum: a peer that answers nothing for so long is gone


class TcpStream:
    """One connected TCP stream.

    Thread safety: one thread in ``receive``/``wait`` and one in ``send`` at a time; ``wait_writable`` and ``is_quiet``
    by any number.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setblocking(True)
        seconds, rest = divmod(SLEEP_S_MAX, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6)))
        self._number = connected.fileno()
        self._readable = select.poll()
        self._readable.register(self._number, select.POLLIN)
        self._both = select.poll()
        self._both.register(self._number, select.POLLIN | select.POLLOUT)
        self._quiet_polls = deque[select.poll]()  # not in use
        self._buffer = memoryview(bytearray(RECEIVE_SIZE_BYTES))

    @property
    def server_certificate(self) -> bytes | None:
        """See ``Stream``."""
        return None

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Hand over what the system takes at once; how many bytes that was. Raises OSError.

        Args:
            buffers: at least one; of more than ``BUFFERS_PER_SEND_MAX`` only the first are looked at.
        """
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0], _DONT_WAIT)
            return self._socket.sendmsg(buffers[:BUFFERS_PER_SEND_MAX], (), _DONT_WAIT)
        except (BlockingIOError, InterruptedError):
            return 0

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """The bytes that arrive within ``timeout`` seconds: a view that the next call overwrites; empty at the
        stream's end.

        Returns:
            None if nothing has come, which may be after ``SLEEP_S_MAX``. Raises OSError.
        """
        flags = 0
        if timeout < SLEEP_S_MAX:
            if timeout > 0 and not self._readable.poll(timeout * 1000):
                return None
            flags = _DONT_WAIT
        try:
            size = self._socket.recv_into(self._buffer, 0, flags)
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
        try:
            poll = self._quiet_polls.pop()  # for this call alone: one poll object does not let two threads in
        except IndexError:
            poll = select.poll()
            poll.register(self._number, select.POLLIN)
        is_quiet = not poll.poll(0)
        self._quiet_polls.append(poll)
        return is_quiet

    def shut_down(self) -> None:
        """End the conversation, for every process that shares it; a waiting thread wakes up."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            pass

    def close(self) -> None:
        """Give back the descriptor. Not while another thread waits: the number may be another file's at once."""
        self._socket.close()


class TcpSocket(Protocol):
    """What ``keep_alive`` needs of a socket; uvloop's is no ``socket.socket``."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None:
        """As ``socket.socket.setsockopt``."""


def keep_alive(tcp_socket: TcpSocket, unacknowledged_s: float = 0.0) -> None:
    """Find out while idle whether the peer's machine is still there.

    Args:
        tcp_socket: a connection.
        unacknowledged_s: how long what was sent may wait for the peer's system to take it, ``VANISHED_S`` at least;
            0 leaves that to this system (15 minutes on Linux). A peer that is there and does not read ends, too.
    """
    tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = dict(_KEEPALIVE)
    if unacknowledged_s:
        options["TCP_USER_TIMEOUT"] = round(max(unacknowledged_s, VANISHED_S) * 1000)
    for name, value in options.items():
        if hasattr(socket, name):
            tcp_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


Found = tuple[int, int, int, str, Any]  # as ``socket.getaddrinfo`` lists the addresses of a name
_answered: dict[tuple[str, int], Any] = {}  # the address at which a name was connected to last


def in_turn(host: str, port: int, found: Sequence[Found], timeout: float) -> Iterator[tuple[Found, float]]:
    """A name's addresses in the order in which to try them, each with the seconds that it may take.

    The one that answered last comes first; each has an equal share of the time that is left when its turn comes.
    """
    deadline, known = time.monotonic() + timeout, _answered.get((host, port))
    ordered = sorted(found, key=lambda one: one[4] != known)
    for number, one in enumerate(ordered):
        yield one, max((deadline - time.monotonic()) / (len(ordered) - number), 0.001)


def answered(host: str, port: int, found: Found) -> None:
    """This address of a name was connected to."""
    if len(_answered) >= ANSWERED_MAX:
        _answered.clear()
    _answered[host, port] = found[4]


def connect(host: str, port: int, timeout: float) -> TcpStream:
    """Connect to one of the host's addresses; those that do not answer cost their share of the time (``in_turn``).

    Raises:
        OSError: none does within ``timeout`` seconds.
    """
    return adopt(connected_socket(host, port, timeout))


def connected_socket(host: str, port: int, timeout: float) -> socket.socket:
    """As ``connect``, for a socket."""
    failure = OSError(f"{host} has no address")
    for one, seconds in in_turn(host, port, socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), timeout):
        attempt = socket.socket(*one[:3])
        try:
            attempt.settimeout(seconds)
            attempt.connect(one[4])
        except OSError as error:
            attempt.close()
            failure = error
        except BaseException:
            attempt.close()
            raise
        else:
            answered(host, port, one)
            return attempt
    raise failure


def adopt(connected: socket.socket) -> TcpStream:
    """A stream of a socket that is connected; the socket is closed if it cannot be one.

    Raises:
        OSError: it is connected to itself, or lost already.
    """
    try:
        if connected.getsockname() == connected.getpeername():
            # A port without a listener can be picked as our own and connect to itself.
            raise ConnectionRefusedError("the port is this socket itself")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connected, VANISHED_S)
    except OSError:
        connected.close()
        raise
    return TcpStream(connected)
