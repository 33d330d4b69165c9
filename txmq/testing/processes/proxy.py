"""A proxy in front of a broker, which can be cut: connections through it reach the broker no more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from txmq.testing.processes.broker import free_port

_HOST: Final = "127.0.0.1"
_CHUNK_BYTES = 1 << 16


class Proxy:
    """From a port of its own to ``port``. Usable as a block. One thread cuts and mends."""

    def __init__(self, port: int) -> None:
        self._to, self._port = port, free_port(_HOST)
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """For clients."""
        return f"txmq://{_HOST}:{self._port}"

    def __enter__(self) -> Self:
        self.mend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()

    def mend(self) -> None:
        """Let everybody through; nothing if it is not cut."""
        if self._listener is None:
            self._listener = socket.create_server((_HOST, self._port))
            self._start(self._accept, self._listener)

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _end(listener)
        with self._lock:
            opened, self._open = self._open, set()
        for one in opened:
            _end(one)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # cut
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection((_HOST, self._to), timeout=1.0)
                except OSError:  # the broker is away: so it is through the relay
                    near.close()
                    continue
                far.settimeout(None)
                with self._lock:
                    is_cut = self._listener is not listener
                    self._open |= set() if is_cut else {near, far}
                if is_cut:
                    _end(near)
                    _end(far)
                    return
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._start(self._carry, near, far)
                self._start(self._carry, far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                target.sendall(chunk)
        with self._lock:
            self._open -= {source, target}
        _end(source)
        _end(target)

    @staticmethod
    def _start(run: Callable[..., None], *arguments: socket.socket) -> None:
        threading.Thread(target=run, args=arguments, daemon=True).start()


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)  # close alone does not wake a thread that waits in it
    one.close()
