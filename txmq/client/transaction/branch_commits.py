"""Commits of branches that were written to their home, and whose answers are not in yet.

Theory of operation. The decision of a transaction over homes is its deciding home's answer; the other homes are told
(``commit`` of their branch) and the block returns. Whoever reads the answers takes them: the next transaction at that
home in passing (``look``), ``tx.results``, and everything that must not come before them (``wait``): the broker places
keyed parts of transactions in their order by itself, but a plain message of the same key would pass a branch that is
not placed. So a producer waits here before it writes to a partition of such a branch. The same holds for messages that
the deciding home has not placed yet (``homes``). A home lets a lone commit wait for company, so that it shares a sync
with the next transaction; a caller that waits sends it once more, and it is forced at once.

Invariants:
    * a commit that was lost is sent again before anything else that waits;
    * an answer other than a success ends it, too, and is logged: the home has decided without its transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from txmq.client.transaction.broker_side import LOST, BrokerTransaction
from txmq.client.transport.ports import Broker, RoutedBroker, Routing
from txmq.errors import (
    FencedError,
    NotOwnerError,
    RequestTimeoutError,
    TransactionConflictError,
    TxmqError,
    UnknownTransactionError,
)
from txmq.model import TopicPartition
from txmq.protocol.parts import PartResult, parse_result_lines
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, Turn, watch_forks
from txmq.xa.broker_port import Answer

TELL_TIMEOUT_S = 30.0  # of a request; it may wait for an earlier part of the same key
_CONTRARY = (TransactionConflictError, UnknownTransactionError, FencedError, NotOwnerError)


class Committed(Protocol):
    """A part of a transaction that is committed.

    Attributes:
        broker: the conversation with its home.
        slots: the topics and partitions that it writes to.
    """

    broker: BrokerTransaction
    slots: set[TopicPartition]

    def told(self, lines: list[PartResult], error: TxmqError | None = None) -> None:
        """The home has answered: where the parts went, or that it did not commit them."""


class WaitingPlace:
    """What the deciding home has decided, and places behind earlier transactions of the same keys.

    Attributes:
        broker, slots: see ``Committed``.
        lines: where its parts went; None before the home has said so.
    """

    def __init__(self, broker: BrokerTransaction, slots: set[TopicPartition], on_end: Callable[[], None]) -> None:
        self.broker, self.slots, self._on_end = broker, slots, on_end
        self.lines: Sequence[PartResult] | None = None
        self._lock = Lock()
        self._is_over = False

    def told(self, lines: list[PartResult], error: TxmqError | None = None) -> None:
        """See ``Committed``."""
        with self._lock:
            self.lines, is_end = lines, self._is_over
        if is_end:
            self._on_end()

    def over(self) -> None:
        """The block has ended: the home may drop the outcome once it has told the place."""
        with self._lock:
            is_end, self._is_over = self.lines is not None, True
        if is_end:
            self._on_end()


class _Entry:
    """A commit, and its answer to come; None if it was not written, or lost.

    ``turn`` belongs to the thread that takes the answer: an answer has one waiter.
    """

    __slots__ = ("answer", "branch", "is_hurried", "is_open", "turn")

    def __init__(self, branch: Committed) -> None:
        self.branch, self.is_open, self.turn = branch, True, Turn()
        self.is_hurried = False
        self.answer: Answer | None = None

    def submit(self) -> None:
        """Write it. Raises as a request."""
        self.answer = self.branch.broker.submit_commit(TELL_TIMEOUT_S)

    def hurry(self) -> None:
        """Send it once more, if it is not answered: then the home lets it wait for company no longer."""
        if self.answer is not None and not self.answer.done and not self.is_hurried:
            self.is_hurried = True
            with suppress(TxmqError):
                self.submit()


class BranchCommits:
    """Those of one home. See the module's docstring. Thread safety: any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: deque[_Entry] = deque()
        watch_forks(self)

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, branch: Committed) -> None:
        """Write the commit of a branch, if the home is there."""
        entry = _Entry(branch)
        self._open.append(entry)
        with suppress(TxmqError):
            entry.submit()

    def is_written(self, branch: Committed) -> bool:
        """Whether the commit of a branch is on its way, or was answered."""
        return all(entry.branch is not branch or entry.answer is not None for entry in list(self._open))

    def holds(self, slot: TopicPartition) -> bool:
        """Whether a commit that is not answered writes to a partition."""
        return any(slot in entry.branch.slots for entry in list(self._open))

    def look(self) -> None:
        """Take the answers that are in, and write again what was lost. Without a wait for answers."""
        for entry in list(self._open):
            me = object()
            try:
                if entry.turn.take(me):
                    self._look_at(entry)
            finally:
                entry.turn.leave(me)

    def _look_at(self, entry: _Entry) -> None:
        with suppress(TxmqError):
            if entry.is_open and entry.answer is not None and entry.answer.done:
                self._take(entry, 0.0)
        with suppress(TxmqError):
            if entry.is_open and entry.answer is None:
                entry.submit()

    def wait(self, slot: TopicPartition, deadline: float) -> None:
        """Wait until those that write to a partition are answered, and write again what was lost.

        Args:
            deadline: monotonic time.

        Raises:
            ConnectionLostError: the home is away until then.
            RequestTimeoutError: it did not answer in time.
        """
        for entry in list(self._open):
            if slot in entry.branch.slots:
                self._finish(entry, deadline)

    def wait_for(self, branch: Committed, deadline: float) -> None:
        """Wait until the commit of one branch is answered. Raises as ``wait``."""
        for entry in list(self._open):
            if entry.branch is branch:
                self._finish(entry, deadline)

    def _finish(self, entry: _Entry, deadline: float) -> None:
        me = object()
        try:
            if not entry.turn.take_before(deadline, me, self._clock):
                raise RequestTimeoutError("a commit of this partition is not answered, and another thread waits for it")
            entry.hurry()
            while entry.is_open:
                self._try(entry, deadline)
        finally:
            entry.turn.leave(me)

    def _try(self, entry: _Entry, deadline: float) -> None:
        try:
            if entry.answer is None:
                entry.submit()
            self._take(entry, max(deadline - self._clock.monotonic(), 0.0))
        except LOST:
            if self._clock.monotonic() >= deadline:
                raise
            entry.branch.broker.pause()

    def _take(self, entry: _Entry, timeout_s: float) -> None:
        """Take one answer, and forget the commit."""
        branch, answer = entry.branch, entry.answer
        assert answer is not None
        try:
            lines, contrary = parse_result_lines(answer.result(timeout_s)), None
        except RequestTimeoutError:
            raise
        except _CONTRARY as error:
            lines, contrary = [], error
            log = get_logger(txid=branch.broker.txid)
            log.error("heuristic: a home did not commit its part of a transaction", error=str(error))
        except TxmqError:
            entry.answer = None
            raise
        try:
            self._open.remove(entry)
        finally:  # also if an interrupt strikes behind it
            entry.is_open = False
            branch.told(lines, contrary)

    def forked(self) -> None:
        """In a forked child: the parent tells its own."""
        self._open = deque()


class BranchHome(Broker, Protocol):
    """``HomeLink``, as transactions over homes use it."""

    @property
    def branch_commits(self) -> BranchCommits:
        """What the home has yet to answer."""


class BranchClient(RoutedBroker, Protocol):
    """A client, as transactions over homes use it."""

    @property
    def routes(self) -> Routing[BranchHome]:
        """The choice among the homes."""
