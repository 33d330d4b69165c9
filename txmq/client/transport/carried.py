"""Branches that have committed, reported with the decision of another thread in place of a request of their own.

Theory of operation. Nobody waits for the answer to ``complete``. While another thread of the process prepares a branch
in the same database, its ``decide`` is about to be sent over the same session: it takes the reports of those that have
committed meanwhile along (``done=``). A lone caller sends its own.

Invariants:
    * what is held, some thread takes: it is held only while there is a decider, and a decider takes it when it decides,
      or sends it when it does not; what stays all the same (an interrupt) the resolver sends (``look``);
    * a report is answered when it is journaled: by the answer to the decision that took it, or to its own request.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Protocol

from txmq.errors import TxmqError
from txmq.protocol.commands import Stated
from txmq.runtime.ports import Buffer, Clock

CARRIED_MAX = 32  # with one decision, so that they fit a line
_TIMEOUT_S = 2.0  # no outcome depends on its answer


class _Answer(Protocol):
    @property
    def done(self) -> bool: ...

    def look(self) -> None: ...

    def result(self, timeout: float | None = None) -> bytes: ...


class _Control(Protocol):
    def submit_transaction(self, head: str, fields: Stated, body: list[Buffer] | None, deadline: float) -> _Answer: ...


class Completed:
    """The report of one branch; as an answer, that of whatever request has carried it.

    Attributes:
        counter: of its transaction, in the session.
        reply: to that request; None while it is held.
    """

    __slots__ = ("_clock", "_control", "_is_overdue", "_txid", "_uuid", "counter", "reply")

    def __init__(self, control: _Control, clock: Clock, txid: str, counter: int, uuid: str) -> None:
        self._control, self._clock, self._txid, self.counter, self._uuid = control, clock, txid, counter, uuid
        self.reply: _Answer | None = None
        self._is_overdue = False

    @property
    def done(self) -> bool:
        """Whether ``result`` need not wait."""
        reply = self.reply
        return reply is not None and reply.done

    def look(self) -> None:
        """Read what has arrived, without waiting; what is still held when this is asked again is sent."""
        reply = self.reply
        if reply is not None:
            reply.look()
        elif self._is_overdue:
            with suppress(TxmqError):
                self.send()
        self._is_overdue = True

    def send(self) -> _Answer:
        """Send a request of its own. Raises TxmqError: nothing was sent."""
        until = self._clock.monotonic() + _TIMEOUT_S
        reply = self._control.submit_transaction(f"complete {self._txid}", {"uuid": self._uuid}, None, until)
        self.reply = reply
        return reply

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the answer; if it is held, send it."""
        reply = self.reply
        return (self.send() if reply is None else reply).result(timeout)


class CarriedCompletes:
    """Those of one session and one database. Thread safety: any thread, by operations that are one step each."""

    __slots__ = ("_deciders", "_held")

    def __init__(self) -> None:
        self._deciders: set[object] = set()
        self._held: deque[Completed] = deque()

    def will_decide(self, decider: object) -> None:
        """From now on reports are held for this decision, until ``take`` or ``leave``."""
        self._deciders.add(decider)

    @property
    def is_awaited(self) -> bool:
        """Whether some thread is about to decide."""
        return bool(self._deciders)

    def hold(self, completed: Completed) -> bool:
        """Whether a decision to come takes it; otherwise the caller sends it."""
        self._held.append(completed)
        # Appended first, looked second: a decider that leaves meanwhile takes it, or is not seen here.
        if self._deciders:
            return True
        try:
            self._held.remove(completed)
        except ValueError:  # taken meanwhile
            return True
        return False

    def take(self, decider: object) -> list[Completed]:
        """Those that the decision carries, now that it is sent; beyond CARRIED_MAX, to be sent alone."""
        self._deciders.discard(decider)
        return self._taken(CARRIED_MAX) if self._held else []

    def leave(self, decider: object) -> list[Completed]:
        """There will be no decision: those that no other one takes, to be sent alone."""
        if decider not in self._deciders:
            return []
        self._deciders.discard(decider)
        return self._taken(0)

    def _taken(self, most: int) -> list[Completed]:
        taken: list[Completed] = []
        with suppress(IndexError):  # another thread took the last
            while self._held and (len(taken) < most or not self._deciders):
                taken.append(self._held.popleft())
        return taken
