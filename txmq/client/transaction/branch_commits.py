"""Commits that were written to their home, and whose answers are not in yet.

Theory of operation. What is decided is told to the homes, and the block returns: the commit of a last resource, which
its database has decided, and the commits of branches, which the deciding home has decided. Whoever reads the answers
takes them: the next transaction at that home in passing (``look``), the client's resolver (``settle``), ``tx.results``,
and everything that must not come before them (``wait``). The broker places keyed parts of transactions in their order
by itself, but a plain message of the same partition would pass a commit that waits there for an earlier one. So writes
of this client wait here before they go to such a partition, and reads of this client find what was committed before
them. The same holds for messages that the deciding home has not placed yet (``homes``).

A commit says that no caller waits for its answer (``delayable``): the home lets it wait a moment for company, and it
shares a sync with the next transaction. A caller that waits after all sends it once more, and it is forced at once.

Invariants:
    * nothing here waits behind a decision: what cannot be written at once, or exceeds ``COMMITS_IN_FLIGHT_MAX``, the
      resolver writes;
    * a commit that was lost is sent again before anything else that waits;
    * an answer other than a success ends it, too, and is logged: the home has decided without its transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Protocol

from txmq.client.transaction.broker_side import BrokerTransaction
from txmq.client.transaction.refusals import LOST
from txmq.client.transport.ports import RoutedBroker, RoutedHome, Routing
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
from txmq.runtime.threads import Attempt, Lock, Turn
from txmq.xa.broker_port import Answer, was_settled

TELL_TIMEOUT_S = 30.0  # of a request; it may wait for an earlier part of the same key
COMMITS_IN_FLIGHT_MAX = 1024  # written and not answered, at one home
OPEN_MAX = 10_000  # that a home has yet to answer, before the next block with a last resource waits
_CONTRARY = (TransactionConflictError, UnknownTransactionError, FencedError, NotOwnerError)


class Committed(Protocol):
    """A part of a transaction that is committed.

    Attributes:
        broker: the conversation with its home.
        slots: the topics and partitions that it writes to.
        uuid: of the last resource that decided it: among these the home keeps the order of keys by itself; or empty.
    """

    broker: BrokerTransaction
    slots: Collection[TopicPartition]
    uuid: str

    def told(self, lines: list[PartResult], error: TxmqError | None = None) -> None:
        """The home has answered: where the parts went, or that it did not commit them."""


class WaitingPlace:
    """What the deciding home has decided, and places behind earlier transactions of the same keys.

    Attributes:
        broker, slots: see ``Committed``.
        lines: where its parts went; None before the home has said so.
    """

    uuid: str = ""

    def __init__(self, broker: BrokerTransaction, slots: set[TopicPartition], on_end: Callable[[], None]) -> None:
        self.broker = broker
        self.slots: Collection[TopicPartition] = slots
        self._on_end = on_end
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

    __slots__ = ("answer", "branch", "is_delayable", "is_open", "turn")

    def __init__(self, branch: Committed) -> None:
        self.branch, self.is_open, self.turn = branch, True, Turn()
        self.is_delayable = False  # the home was told that no caller waits for the answer
        self.answer: Answer | None = None

    def submit(self) -> None:
        """Write it. Raises as a request."""
        self.is_delayable = False
        self.answer = self.branch.broker.submit_commit(TELL_TIMEOUT_S)

    def write(self) -> None:
        """Write it if that needs no wait. Raises ConnectionLostError."""
        self.is_delayable = True
        self.answer = self.branch.broker.write_commit()

    def hurry(self) -> None:
        """Send it once more, if it is not answered: then the home lets it wait for company no longer."""
        if self.is_delayable and self.answer is not None and not self.answer.done:
            with suppress(TxmqError):
                self.submit()


class BranchCommits:
    """Those of one home. See the module's docstring. Thread safety: any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: deque[_Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, branch: Committed) -> bool:
        """Write the commit of a branch, if that needs no wait; whether it is on its way."""
        entry = _Entry(branch)
        self._open.append(entry)
        if len(self._open) <= COMMITS_IN_FLIGHT_MAX:
            try:
                entry.write()
            except TxmqError:  # the resolver writes it
                return False
        return entry.answer is not None

    def add_once(self, branch: Committed) -> None:
        """As ``add``, if that was perhaps interrupted."""
        if all(known.branch is not branch for known in list(self._open)):
            self.add(branch)

    def take_first(self) -> None:
        """Take the answers of the oldest ones: they come about in order, and the resolver looks at all."""
        while self._open:
            try:
                entry = self._open[0]
            except IndexError:  # another thread took it
                return
            if entry.answer is None or not entry.answer.done or not self._look_at(entry) or entry.is_open:
                return

    def is_written(self, branch: Committed) -> bool:
        """Whether the commit of a branch is on its way, or was answered."""
        return all(entry.branch is not branch or entry.answer is not None for entry in list(self._open))

    def holds(self, slot: TopicPartition, besides: str = "") -> bool:
        """Whether ``wait`` would wait."""
        return any(_is_waited_for(entry.branch, slot, besides) for entry in list(self._open))

    def has_decided(self, txid: str) -> bool:
        """Whether a transaction, or its part here, is committed for certain and not answered."""
        return any(entry.branch.broker.txid == txid for entry in list(self._open))

    def look(self) -> None:
        """Take the answers that are in, and write again what was lost. Without any wait."""
        is_there = True
        for number, entry in enumerate(list(self._open)):
            answer = entry.answer
            if answer.done if answer is not None else is_there and number < COMMITS_IN_FLIGHT_MAX:
                is_there = self._look_at(entry) and is_there

    def _look_at(self, entry: _Entry) -> bool:
        """Take its answer if that is in, and write it if it is not on its way; whether the home is there."""
        me = Attempt()
        try:
            if entry.turn.take(me) and entry.is_open:
                if entry.answer is not None and entry.answer.done:
                    self._take_or_lose(entry)
                if entry.is_open and entry.answer is None:
                    entry.write()
        except TxmqError:
            return False
        finally:
            me.is_over = True
            entry.turn.leave(me)
        return True

    def _take_or_lose(self, entry: _Entry) -> None:
        try:
            self._take(entry, 0.0)
        except TxmqError:  # it is written again
            return

    def look_closely(self) -> None:
        """As ``look``, of a client that does nothing else: nobody has read its connection."""
        for entry in list(self._open):
            if entry.answer is not None:
                entry.answer.look()
        self.look()

    def settle(self) -> None:
        """For the resolver: as ``look_closely``; a lost home is waited for, not long."""
        self.look_closely()
        lost = next((entry for entry in list(self._open) if entry.answer is None), None)
        if lost is not None and lost.branch.broker.is_back():
            self.look()

    def wait(self, slot: TopicPartition, deadline: float, besides: str = "") -> None:
        """Wait until those that write to a partition are answered, and write again what was lost.

        Args:
            deadline: monotonic time.
            besides: those of this last resource are not waited for.

        Raises:
            ConnectionLostError: the home is away until then.
            RequestTimeoutError: it did not answer in time.
        """
        for entry in list(self._open):
            if _is_waited_for(entry.branch, slot, besides):
                self._finish(entry, deadline)

    def wait_for(self, branch: Committed, deadline: float) -> None:
        """Wait until the commit of one branch is answered. Raises as ``wait``."""
        for entry in list(self._open):
            if entry.branch is branch:
                self._finish(entry, deadline)

    def make_room(self, deadline: float) -> None:
        """Before a block begins: wait while too many are open. Raises as ``wait``."""
        while len(self._open) >= OPEN_MAX:
            for entry in list(self._open)[:1]:
                self._finish(entry, deadline)

    def drain(self, deadline: float) -> None:
        """Before the connection ends: wait for all answers. A socket that is closed with some unread is reset."""
        with suppress(TxmqError):
            for entry in list(self._open):
                self._finish(entry, deadline)

    def _finish(self, entry: _Entry, deadline: float) -> None:
        me = Attempt()
        try:
            if not entry.turn.take_before(deadline, me, self._clock):
                raise RequestTimeoutError("a commit of this partition is not answered, and another thread waits for it")
            entry.hurry()
            while entry.is_open:
                self._try(entry, deadline)
        finally:
            me.is_over = True
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
            if branch.uuid and was_settled(error):
                log.info("transaction was resolved by another process", error=str(error))
            else:
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


def _is_waited_for(branch: Committed, slot: TopicPartition, besides: str) -> bool:
    return slot in branch.slots and not (besides and branch.uuid == besides)


class BranchHome(RoutedHome, Protocol):
    """``HomeLink``, as transactions over homes use it."""

    @property
    def home(self) -> int:
        """The home's id; 0 before the first connection."""

    @property
    def branch_commits(self) -> BranchCommits:
        """What the home has yet to answer."""


class BranchClient(RoutedBroker, Protocol):
    """A client, as transactions over homes use it."""

    @property
    def routes(self) -> Routing[BranchHome]:
        """The choice among the homes."""
