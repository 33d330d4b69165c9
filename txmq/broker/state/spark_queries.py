"""Queries of parallel writers (Spark): the driver of each, and its committed batches. A fold over the journal.

A *query* writes batch after batch under one name, through restarts of its driver. Its *epoch* is the incarnation of the
driver: a number drawn when that incarnation begins. It is never handed out twice, and a later one is higher.

The numbers of committed batches are kept as intervals, because a job may write its batches in any order, and leave
numbers out. With each of the newest is kept what its writer said of its rows (*digest*), so that other rows under the
same number can be told from a repeat.

Invariants:
    * an epoch of a query never falls;
    * a committed number stays committed, or is below ``floor``: what is there is not known any more, and refused;
    * an entry leaves only by ``query delete``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from txmq.errors import BadRequestError, FencedError, TransactionConflictError, UnknownQueryError

INTERVALS_MAX = 1000
"""Of one query: a job that counts its batches up has one."""
DIGESTS_MAX = 1000
"""Of one query: the batches committed last."""


class Query:
    """One query.

    Attributes:
        time_ms: when it was last opened by a new epoch, or committed.
        intervals: numbers of committed batches, first and last of each run, in order.
        digests: of the batches committed last, by number, in the order of their commits.
        floor: what was committed below this number is not known any more.
    """

    __slots__ = ("digests", "epoch", "floor", "intervals", "name", "time_ms")

    def __init__(
        self,
        name: str,
        epoch: int,
        time_ms: int,
        intervals: Iterable[Sequence[int]] = (),
        digests: Iterable[tuple[int, str]] = (),
        floor: int = 0,
    ) -> None:
        self.name, self.epoch, self.time_ms, self.floor = name, epoch, time_ms, floor
        self.intervals = [(first, last) for first, last in intervals]
        self.digests = dict(digests)

    @property
    def newest(self) -> int | None:
        """The committed batch with the highest number; None before the first."""
        return self.intervals[-1][1] if self.intervals else None

    def has(self, batch: int) -> bool:
        """Whether a batch is committed.

        Raises:
            TransactionConflictError: that is not known any more.
        """
        if batch < self.floor:
            raise TransactionConflictError(
                f"batch {batch} of query {self.name}: of more than {INTERVALS_MAX} runs of numbers only those from "
                f"{self.floor} on are kept, so nobody knows whether it is committed; look into the topic, and write it "
                "under the name of another query if it is not there"
            )
        at = bisect_right(self.intervals, batch, key=lambda interval: interval[0])
        return at > 0 and batch <= self.intervals[at - 1][1]

    def commit(self, batch: int, digest: str | None, time_ms: int) -> None:
        """A batch is decided that was not committed."""
        at = bisect_right(self.intervals, batch, key=lambda interval: interval[0])
        first, last, start, end = batch, batch, at, at
        if at and self.intervals[at - 1][1] == batch - 1:
            first, start = self.intervals[at - 1][0], at - 1
        if at < len(self.intervals) and self.intervals[at][0] == batch + 1:
            last, end = self.intervals[at][1], at + 1
        self.intervals[start:end] = [(first, last)]
        if len(self.intervals) > INTERVALS_MAX:
            self.floor = self.intervals.pop(0)[1] + 1
        if digest is not None:
            self.digests[batch] = digest
            if len(self.digests) > DIGESTS_MAX:
                del self.digests[next(iter(self.digests))]
        self.time_ms = time_ms

    def fenced(self, epoch: int) -> FencedError:
        """The error for a former incarnation."""
        return FencedError(f"query {self.name} has a new driver (epoch {self.epoch}); epoch {epoch} is over")

    def snapshot(self) -> list[Any]:
        """What ``Query`` takes, JSON-able."""
        intervals, digests = (
            [list(interval) for interval in self.intervals],
            [list(one) for one in self.digests.items()],
        )
        return [self.name, self.epoch, self.time_ms, intervals, digests, self.floor]


class Queries:
    """All of them, by name."""

    def __init__(self) -> None:
        self.named: dict[str, Query] = {}
        self.last_epoch = 0

    def drawn(self, epoch: int) -> None:
        """An epoch was handed out."""
        self.last_epoch = max(self.last_epoch, epoch)

    def known(self, name: str) -> Query:
        """The query of a name.

        Raises:
            UnknownQueryError: it was not opened.
        """
        query = self.named.get(name)
        if query is None:
            raise UnknownQueryError(f"query {name} was never opened here, or was deleted")
        return query

    def at_epoch(self, name: str, epoch: int) -> Query:
        """The query, if ``epoch`` is the incarnation of its driver that writes now.

        Raises:
            UnknownQueryError: it was not opened.
            FencedError: a later incarnation has opened it.
            BadRequestError: this incarnation has not opened it.
        """
        query = self.known(name)
        if epoch < query.epoch:
            raise query.fenced(epoch)
        if epoch > query.epoch:
            raise BadRequestError(f"query {name} is at epoch {query.epoch}: open it with epoch {epoch} first")
        return query

    def open(self, name: str, epoch: int, time_ms: int) -> Query:
        """A driver's incarnation begins to write."""
        query = self.named.get(name)
        if query is None:
            query = self.named[name] = Query(name, epoch, time_ms)
        query.epoch, query.time_ms = epoch, time_ms
        self.drawn(epoch)  # perhaps at another home
        return query

    def committed(self, name: str, batch: int, digest: str | None, time_ms: int) -> None:
        """A batch is decided."""
        self.named[name].commit(batch, digest, time_ms)

    def delete(self, name: str) -> None:
        """Forget a query."""
        self.named.pop(name, None)

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"last_epoch": self.last_epoch, "named": [query.snapshot() for query in self.named.values()]}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """The reverse of ``snapshot``."""
        self.last_epoch = snapshot["last_epoch"]
        self.named = {fields[0]: Query(*fields) for fields in snapshot["named"]}
