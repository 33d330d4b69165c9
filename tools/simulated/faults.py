"""Planned mishaps of a simulated broker, and its answers.

A lost answer turns the clock by ``LOST_AFTER_S``, so that deadlines pass without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from tools.simulated.clock import SimClock
from tools.simulated.stand_in import AnyClass
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


class Reply(Protocol):
    """``Answer``, and whether the request was written."""

    @property
    def done(self) -> bool:
        """See ``Answer``."""

    def look(self) -> None:
        """See ``Answer``."""

    def sent(self) -> Self:
        """Itself; raises if the connection ended before the request."""

    def result(self, timeout: float | None = None) -> bytes:
        """See ``Answer``."""


class GivenReply(AnyClass):
    """An answer that is there, or a mishap in its place."""

    def __init__(self, answer: bytes | BaseException, *, is_lost_unsent: bool = False) -> None:
        self._answer, self._is_lost_unsent = answer, is_lost_unsent

    @property
    def done(self) -> bool:
        """See ``Answer``."""
        return True

    def look(self) -> None:
        """See ``Answer``."""

    def sent(self) -> Self:
        """See ``Reply``."""
        if self._is_lost_unsent:
            raise ConnectionLostError("planned")
        return self

    def result(self, timeout: float | None = None) -> bytes:
        """See ``Answer``."""
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


class WatchedReply:
    """An answer; ``before`` is called with the time that somebody is about to wait for it."""

    def __init__(self, reply: Reply, before: Callable[[float | None], object]) -> None:
        self._reply, self._before = reply, before

    @property
    def done(self) -> bool:
        """See ``Answer``."""
        return self._reply.done

    def look(self) -> None:
        """See ``Answer``."""

    def sent(self) -> Self:
        """See ``Reply``."""
        self._reply.sent()
        return self

    def result(self, timeout: float | None = None) -> bytes:
        """See ``Answer``."""
        self._before(timeout)
        return self._reply.result()


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

    def reply(self, execute: Callable[[], Reply]) -> HeldReply:
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


class HeldReply:
    """An answer that comes later.

    Args:
        execute: carries the request out.
        wait: somebody waits, so many seconds.
    """

    def __init__(self, execute: Callable[[], Reply], wait: Callable[[float], None]) -> None:
        self._execute, self._wait = execute, wait
        self._made: Reply | None = None

    @property
    def done(self) -> bool:
        """See ``Answer``."""
        return self._made is not None and self._made.done

    def look(self) -> None:
        """See ``Answer``."""

    def sent(self) -> Self:
        """See ``Reply``."""
        return self

    def let_go(self) -> None:
        """Carry it out, and answer."""
        self._made = self._execute()

    def fail(self, error: TxmqError) -> None:
        """It is not carried out, and this is what the client sees."""
        self._made = GivenReply(error)

    def result(self, timeout: float | None = None) -> bytes:
        """The answer's body; in vain the wait turns the clock."""
        if self._made is None:
            self._wait(timeout or 0.0)
        if self._made is None:
            raise RequestTimeoutError("planned")
        return self._made.result(timeout)
