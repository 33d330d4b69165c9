"""One request's answer, and what a thread waits for on a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from txmq.errors import RequestTimeoutError, TxmqError
from txmq.protocol.answers import broker_error
from txmq.runtime.threads import Signal

if TYPE_CHECKING:
    from txmq.client.transport.connection import Connection


class Pending(Protocol):
    """Receives the answer to one request; called by the thread that reads."""

    def answered(self, code: int, body: bytes) -> None:
        """The answer has come."""

    def lost(self, error: TxmqError) -> None:
        """No answer will come; whether the request was executed is not known."""


class Waiter:
    """Something one thread can wait for.

    Attributes:
        done: the wait is over.
        nudged: the thread has to come back from waiting and look again; it resets this itself.
    """

    __slots__ = ("__weakref__", "done", "nudged", "signal")

    def __init__(self) -> None:
        self.done = self.nudged = False
        self.signal = Signal()

    def nudge(self) -> None:
        """Make the thread come back from ``Connection.wait``."""
        self.nudged = True
        self.signal.set()

    def finish(self) -> None:
        """End the wait."""
        self.done = True
        self.signal.set()


class Reply(Waiter):
    """The answer to one request, as a thread waits for it."""

    __slots__ = ("_body", "_code", "_connection", "_deadline", "_error", "opaque")

    def __init__(self, connection: Connection, deadline: float, opaque: bytes) -> None:
        self.done = self.nudged = False  # as ``Waiter``
        self.signal = Signal()
        self._connection, self._deadline, self.opaque = connection, deadline, opaque
        self._code, self._body = 0, b""
        self._error: TxmqError | None = None

    def answered(self, code: int, body: bytes) -> None:
        self._code, self._body = code, body
        self.done = True
        self._connection.is_answered(self)

    def lost(self, error: TxmqError) -> None:
        if not self.done:
            self._error = error
            self.finish()

    def look(self) -> None:
        """Read what has arrived, without waiting."""
        if not self.done:
            self._connection.take_arrived()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the answer and return its body.

        Args:
            timeout: seconds from now; by default until the request's own deadline.

        Raises:
            BrokerError: the broker refused; its class says why.
            ConnectionLostError, RequestTimeoutError: whether the request was executed is not known.
        """
        connection = self._connection
        if not self.done:
            connection.wait(self, self._deadline if timeout is None else connection.clock.monotonic() + timeout)
            if not self.done:
                self.look()  # a caller that comes late: its answer may have been there in time
        if not self.done:
            if timeout is None:
                connection.abandon(self.opaque)
            raise RequestTimeoutError(f"no answer from {connection.address} in time")
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._code != 200:
            raise broker_error(self._code, self._body)
        return self._body
