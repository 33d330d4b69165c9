"""Carries out the reads and lookups that the core asks for.

From the page cache at once, in a reader thread where the disk would block; and only for a connection that may be given
an answer now (``answer_budget``): else the read waits with the connection, which holds nothing for it meanwhile. A read
that is over a quota of bytes waits for its turn (``throttle``), and holds nothing either.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Lookup, Read
from txmq.broker.core import Core
from txmq.broker.shell.answer_budget import OWN_BYTES
from txmq.broker.shell.connection import Connection
from txmq.broker.shell.throttle import Throttle
from txmq.log.file_cache import FileCache
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock

log = get_logger()


class DelayedRead:
    """A read that is over a quota."""

    __slots__ = ("_core", "_read")

    def __init__(self, core: Core, read: Read) -> None:
        self._core, self._read = core, read

    @property
    def is_gone(self) -> bool:
        """See ``throttle.Waiter``."""
        return self._read.client.gone

    def may_go_on(self) -> None:
        """See ``throttle.Waiter``."""
        self._core.context.reads.append(self._read)


class Reads:
    """See the module's docstring.

    Args:
        throttle, clock: for quotas.
        in_loop: calls in the event loop, from any thread.
        flush: hands answers to the sockets.
    """

    def __init__(
        self, core: Core, files: FileCache, throttle: Throttle, clock: Clock, in_loop: Callable[..., None],
        flush: Callable[[], None],
    ) -> None:  # fmt: skip
        self._core, self._files, self._in_loop, self._flush = core, files, in_loop, flush
        self._throttle, self._clock = throttle, clock
        self._threads = ThreadPoolExecutor(2, "txmq-reader")

    def close(self) -> None:
        """No more reads; what is under way is not waited for."""
        self._threads.shutdown(wait=False)

    def read(self, read: Read) -> None:
        """Read, and answer, as soon as the connection may be given an answer."""
        connection = read.client.shell
        if read.client.gone or not isinstance(connection, Connection):
            return
        if self._throttle.is_on:
            size = self._throttle.readable_bytes(
                DelayedRead(self._core, read), read.client.user, read.partition.topic.encode(), read.size_bytes_max,
                self._clock.monotonic(),
            )  # fmt: skip
            if not size:
                return
            read = read._replace(size_bytes_max=size)
        if not connection.may_read(read):
            return
        try:
            data = read.partition.read(self._files, read.offset, read.size_bytes_max, nowait=True)
        except Exception as error:  # noqa: BLE001  a damaged segment must not end the conversation of others
            self._failed(read.client, read.opaque, error)
            return
        if data is not None:
            self._took(read, len(data))
            self._core.was_read(read, data)
            if len(data) > OWN_BYTES:
                connection.send()  # it counts before the next one is read
            return
        connection.reserve(read.size_bytes_max)
        self._took(read, read.size_bytes_max)
        job = self._threads.submit(read.partition.read, self._files, read.offset, read.size_bytes_max, nowait=False)
        job.add_done_callback(lambda done: self._in_loop(self._read_done, connection, read, done))

    def _read_done(self, connection: Connection, read: Read, done: Future[Any]) -> None:
        connection.reserve(-read.size_bytes_max)
        error = done.exception()
        if error is not None:
            self._failed(read.client, read.opaque, error)
        else:
            self._took(read, len(done.result()) - read.size_bytes_max)
            self._core.was_read(read, done.result())
        self._flush()

    def _took(self, read: Read, size: int) -> None:
        if self._throttle.is_on:
            self._throttle.took(read.client.user, read.partition.topic.encode(), size, self._clock.monotonic())

    def look_up(self, lookup: Lookup) -> None:
        """Find the offset for a time, and answer."""
        job = self._threads.submit(lookup.partition.offset_for, self._files, lookup.time_ms)
        job.add_done_callback(lambda done: self._in_loop(self._look_up_done, lookup, done))

    def _look_up_done(self, lookup: Lookup, done: Future[int]) -> None:
        error = done.exception()
        if error is not None:
            self._failed(lookup.client, lookup.opaque, error)
        else:
            self._core.was_looked_up(lookup, done.result())
        self._flush()

    def _failed(self, client: ClientConnection, opaque: bytes, error: BaseException) -> None:
        log.error("a read failed", connection=client.number, error=str(error), kind=type(error).__name__)
        self._core.could_not(client, opaque, error)
