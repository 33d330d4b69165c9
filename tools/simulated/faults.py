"""Planned mishaps of a simulated broker, and its answers.

A lost answer turns the clock by ``LOST_AFTER_S``, so that deadlines pass without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from tools.simulated.clock import SimClock
from txmq.errors import ConnectionLostError, RequestTimeoutError, TxmqError

LOST_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned mishap: the request is executed, or not, and then ``error`` is what the client sees."""

    error: TxmqError
    is_executed: bool = False


def lost(*, is_executed: bool) -> Fault:
    """The connection ends before, or after, the execution."""
    return Fault(ConnectionLostError("planned"), is_executed)


class FakeReply:
    """An answer that is there already, or the mishap in its place.

    Attributes:
        done: see ``Answer``.
        is_lost_unsent: the connection ended before the request.
    """

    def __init__(self, body: bytes, error: TxmqError | None, *, is_lost_unsent: bool = False) -> None:
        self._body, self._error, self.is_lost_unsent = body, error, is_lost_unsent
        self.done = True

    def look(self) -> None:
        """See ``Answer``."""

    def sent(self) -> Self:
        """Itself; raises if the connection ended before the request."""
        if self.is_lost_unsent:
            raise ConnectionLostError("planned")
        return self

    def result(self, timeout: float | None = None) -> bytes:
        """The answer's body."""
        if self._error is not None:
            raise self._error
        return self._body


class Holding:
    """Requests of some transactions, which are not carried out before ``let_go``.

    Attributes:
        txids: the transactions.
        replies: the answers to come.
        answers_waits: it lets go as soon as somebody waits for one.
    """

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self.txids: set[str | int] = set()
        self.replies: list[HeldReply] = []
        self.answers_waits = False

    def reply(self, execute: Callable[[], FakeReply]) -> HeldReply:
        """Hold a request."""
        self.replies.append(HeldReply(execute, self._wait))
        return self.replies[-1]

    def _wait(self, timeout: float) -> None:
        if self.answers_waits:
            self.let_go()
        else:
            self._clock.advance(timeout)

    def let_go(self) -> None:
        """Carry out what was held, in order."""
        self.txids.clear()
        replies, self.replies = self.replies, []
        for reply in replies:
            reply.let_go()


class HeldReply(FakeReply):
    """An answer that comes later.

    Args:
        execute: carries the request out.
        wait: somebody waits, so many seconds.
    """

    def __init__(self, execute: Callable[[], FakeReply], wait: Callable[[float], None]) -> None:
        super().__init__(b"", None)
        self.done, self._execute, self._wait = False, execute, wait

    def let_go(self) -> None:
        """Carry it out, and answer."""
        made = self._execute()
        self._body, self._error, self.done = made._body, made._error, True  # noqa: SLF001

    def fail(self, error: TxmqError) -> None:
        """It is not carried out, and this is what the client sees."""
        self._error, self.done = error, True

    def result(self, timeout: float | None = None) -> bytes:
        """The answer's body; in vain the wait turns the clock."""
        if not self.done:
            self._wait(timeout or 0.0)
        if not self.done:
            raise RequestTimeoutError("planned")
        return super().result(timeout)
