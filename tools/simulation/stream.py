"""The simulated network as the real client sees it: port ``Stream`` of ``txmq.runtime.net``, over a ``Link``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from txmq.runtime.ports import Buffer

from .broker import Broker, Link
from .threads import Host, Task, pause, required_task


class SimStream:
    """One connection of a task's host to the broker."""

    server_certificate = None

    def __init__(self, host: Host) -> None:
        self._host = host
        self._link: Link | None = None
        self._arrived = bytearray()
        self._taken = b""
        self._is_ended = False
        self._waiter: Task | None = None
        host.on_death.append(self._cut)

    def open(self, broker: Broker) -> None:
        """Connect, or ConnectionRefusedError."""
        self._link = broker.connect(self._receive, self._lost, self._host.name)
        if self._link is None:
            raise ConnectionRefusedError("nobody listens")

    def _receive(self, data: bytes) -> None:
        self._arrived += data
        self._wake()

    def _lost(self) -> None:
        self._is_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()

    def _cut(self) -> None:
        if self._link is not None:
            self._link.cut()

    # --- the port ---

    @property
    def now(self) -> float:
        """Simulated seconds."""
        return self._host.world.now

    def send_all(self, data: bytes) -> None:
        """All of it, as ``socket.sendall``."""
        while data:
            data = data[self.send(deque([data])) :]

    def send(self, buffers: deque[Buffer]) -> int:
        """All of it, or as much as the system takes."""
        self._host.require_alive()
        assert self._link is not None
        if self._is_ended:
            raise BrokenPipeError("simulated")
        data = b"".join(buffers)
        rng = self._host.world.rng
        if rng.random() < 0.05:
            data = data[: rng.randint(0, len(data))]
        if data:
            self._link.write(data)
            if rng.random() < 0.02 and not self._link.broker.healing:
                self._host.world.meet("link lost")
                self._host.world.after(rng.uniform(0, 0.01), self._link.cut)
        return len(data)

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """What arrives in time; empty at the end of the stream; None: nothing."""
        self._host.require_alive()
        self._sleep(timeout)
        if self._arrived:
            self._taken, self._arrived = bytes(self._arrived), bytearray()
            return memoryview(self._taken)
        return memoryview(b"") if self._is_ended else None

    def wait(self, timeout: float, *, writable: bool) -> bool:
        """Sleep until there is something to read; room to write there is soon."""
        self._sleep(min(timeout, 0.001) if writable else timeout)
        return writable or bool(self._arrived) or self._is_ended

    def _sleep(self, timeout: float) -> None:
        if timeout > 0 and not self._arrived and not self._is_ended:
            task = required_task()
            self._waiter = task
            try:
                task.park(timeout)
            finally:
                self._waiter = None

    def wait_writable(self, timeout: float) -> bool:
        """There is room soon."""
        pause(min(timeout, 0.001))
        return True

    def is_quiet(self) -> bool:
        """Whether nothing has arrived, not even an end."""
        return not self._arrived and not self._is_ended

    def shut_down(self) -> None:
        """End the conversation."""
        self._is_ended = True
        self._cut()
        self._wake()

    def close(self) -> None:
        """Nothing is held."""


class Network:
    """``net.connect`` of a world.

    Args:
        broker: the one that there is.
        others: brokers by the names of their hosts, if there are several.
    """

    def __init__(self, broker: Broker, others: Mapping[str, Broker] | None = None) -> None:
        self._broker, self._others = broker, others or {}

    def connect(self, host: str, _port: int, timeout: float) -> SimStream:
        """Connect to a broker."""
        stream = SimStream(required_task().host)
        self.open(stream, host, timeout)
        return stream

    def open(self, stream: SimStream, host: str, timeout: float) -> None:
        """Connect a stream; it takes a moment."""
        pause(min(timeout, self._broker.world.rng.uniform(0.0001, 0.003)))
        stream.open(self._others.get(host, self._broker))
