"""One request's answer, and what a thread waits for on a connection."""

from __future__ import annotations

from typing import Protocol

from txmq.errors import RequestTimeoutError, TxmqError
from txmq.protocol.answers import broker_error
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Signal


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


class Conversation(Protocol):
    """``Connection``, as a reply uses it."""

    address: str
    clock: Clock

    def wait(self, waiter: Waiter, deadline: float) -> None:
        """Read answers, or sleep, until the waiter is done, the connection fails or time is up."""

    def take_arrived(self) -> None:
        """Read what has arrived, without waiting."""

    def is_answered(self, waiter: Waiter) -> None:
        """A waiter's answer has come."""

    def abandon(self, opaque: bytes) -> None:
        """Give up waiting for an answer."""


class Reply(Waiter):
    """The answer to one request, as a thread waits for it."""

    __slots__ = ("_body", "_code", "_conversation", "_deadline", "_error", "opaque")

    def __init__(self, conversation: Conversation, deadline: float, opaque: bytes) -> None:
        self.done = self.nudged = False  # as ``Waiter``
        self.signal = Signal()
        self._conversation, self._deadline, self.opaque = conversation, deadline, opaque
        self._code, self._body = 0, b""
        self._error: TxmqError | None = None

    def answered(self, code: int, body: bytes) -> None:
        self._code, self._body = code, body
        self.done = True
        self._conversation.is_answered(self)

    def lost(self, error: TxmqError) -> None:
        if not self.done:
            self._error = error
            self.finish()

    def look(self) -> None:
        """Read what has arrived, without waiting."""
        if not self.done:
            self._conversation.take_arrived()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the answer and return its body.

        Args:
            timeout: seconds from now; by default until the request's own deadline.

        Raises:
            BrokerError: the broker refused; its class says why.
            ConnectionLostError, RequestTimeoutError: whether the request was executed is not known.
        """
        conversation = self._conversation
        if not self.done:
            conversation.wait(self, self._deadline if timeout is None else conversation.clock.monotonic() + timeout)
            self.look()  # a caller that comes late: its answer may have been there in time
        if not self.done:
            if timeout is None:
                conversation.abandon(self.opaque)
            raise RequestTimeoutError(f"no answer from {conversation.address} in time")
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._code != 200:
            raise broker_error(self._code, self._body)
        return self._body
