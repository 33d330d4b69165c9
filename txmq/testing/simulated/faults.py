"""Planned mishaps of a simulated broker, and its answers.

A lost answer turns the clock by ``LOST_AFTER_S``, so that deadlines pass without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

from txmq.errors import ConnectionLostError, TxmqError

LOST_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned mishap: the request is executed, or not, and then ``error`` is what the client sees."""

    error: TxmqError
    is_executed: bool = False


def lost(*, is_executed: bool) -> Fault:
    """The connection ends before, or behind, the execution."""
    return Fault(ConnectionLostError("planned"), is_executed)


class FakeReply:
    """An answer that is there already, or the mishap in its place."""

    def __init__(self, body: bytes, error: TxmqError | None) -> None:
        self._body, self._error = body, error

    done = True

    def result(self, timeout: float | None = None) -> bytes:
        """The answer's body."""
        if self._error is not None:
            raise self._error
        return self._body
