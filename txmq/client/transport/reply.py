"""One request's answer, and what a thread waits for on a connection."""

from __future__ import annotations

from typing import Protocol

from txmq.errors import RequestTimeoutError, TxmqError, broker_error
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Signal


class Pending(Protocol):
    """Who is told about the answer to one request; called by whichever thread reads."""

    def answered(self, code: int, body: bytes) -> None:
        """The broker's answer."""

    def lost(self, error: TxmqError) -> None:
        """There will be none; whether the request was executed is not known."""


class Waiter:
    """Something one thread can wait for.

    Attributes:
        done: it has happened.
        nudged: the thread is to come back and look what else there is to do; it resets this itself.
    """

    __slots__ = ("__weakref__", "done", "nudged", "signal")

    def __init__(self) -> None:
        self.done = self.nudged = False
        self.signal = Signal()

    def nudge(self) -> None:
        """Have the thread come back from ``Connection.wait``."""
        self.nudged = True
        self.signal.set()

    def finish(self) -> None:
        """It has happened."""
        self.done = True
        self.signal.set()


class Conversation(Protocol):
    """``Connection``, as a reply uses it."""

    address: str
    clock: Clock

    def wait(self, waiter: Waiter, deadline: float) -> None:
        """Read answers, or sleep, until the waiter is done, the connection fails or time is up."""

    def is_answered(self, waiter: Waiter) -> None:
        """The waiter's answer has come."""

    def abandon(self, opaque: bytes) -> None:
        """Nobody waits for this answer any more."""


class Reply(Waiter):
    """One request's answer, to be waited for."""

    __slots__ = ("_body", "_code", "_conversation", "_deadline", "_error", "opaque")

    def __init__(self, conversation: Conversation, deadline: float, opaque: bytes) -> None:
        self.done = self.nudged = False  # as ``Waiter``
        self.signal = Signal()
        self._conversation, self._deadline, self.opaque = conversation, deadline, opaque
        self._code, self._body = 0, b""
        self._error: TxmqError | None = None

    def answered(self, code: int, body: bytes) -> None:
        """See ``Pending``."""
        self._code, self._body = code, body
        self.done = True
        self._conversation.is_answered(self)

    def lost(self, error: TxmqError) -> None:
        """See ``Pending``."""
        if not self.done:
            self._error = error
            self.finish()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the answer; its body.

        Args:
            timeout: seconds from now; by default what the request was given.

        Raises:
            BrokerError: the broker refused; its class says why.
            ConnectionLostError, RequestTimeoutError: whether the request was executed is not known.
        """
        conversation = self._conversation
        if not self.done:
            conversation.wait(self, self._deadline if timeout is None else conversation.clock.monotonic() + timeout)
        if not self.done:
            if timeout is None:
                conversation.abandon(self.opaque)
            raise RequestTimeoutError(f"no answer from {conversation.address} in time")
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._code != 200:
            raise broker_error(self._code, self._body)
        return self._body
