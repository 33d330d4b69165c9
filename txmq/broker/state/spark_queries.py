"""Queries of parallel writers (Spark): the driver of each, and its newest committed batch. A fold over the journal.

A *query* writes batch after batch under one name, through restarts of its driver. Its *epoch* is the incarnation of the
driver: a number drawn when that incarnation begins. It is never handed out twice, and a later one is higher.

Invariants:
    * an epoch of a query never falls, a batch number never falls;
    * an entry leaves only by ``query delete``.
"""

from __future__ import annotations

from typing import Any

from txmq.errors import BadRequestError, FencedError, UnknownQueryError

NO_BATCH = -1


class Query:
    """One query.

    Attributes:
        batch: the newest committed one; ``NO_BATCH`` before the first.
        time_ms: when it was last opened by a new epoch, or committed.
    """

    __slots__ = ("batch", "epoch", "name", "time_ms")

    def __init__(self, name: str, epoch: int, batch: int, time_ms: int) -> None:
        self.name, self.epoch, self.batch, self.time_ms = name, epoch, batch, time_ms

    @property
    def committed_batch(self) -> int | None:
        """The newest committed batch; None before the first."""
        return None if self.batch == NO_BATCH else self.batch

    def fenced(self, epoch: int) -> FencedError:
        """The error for a former incarnation."""
        return FencedError(f"query {self.name} has a new driver (epoch {self.epoch}); epoch {epoch} is over")


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
            query = self.named[name] = Query(name, epoch, NO_BATCH, time_ms)
        query.epoch, query.time_ms = epoch, time_ms
        self.drawn(epoch)  # perhaps at another home
        return query

    def committed(self, name: str, batch: int, time_ms: int) -> None:
        """A batch is decided."""
        query = self.named[name]
        query.batch, query.time_ms = batch, time_ms

    def delete(self, name: str) -> None:
        """Forget a query."""
        self.named.pop(name, None)

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state."""
        named = [[query.name, query.epoch, query.batch, query.time_ms] for query in self.named.values()]
        return {"last_epoch": self.last_epoch, "named": named}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """The reverse of ``snapshot``."""
        self.last_epoch = snapshot["last_epoch"]
        self.named = {fields[0]: Query(*fields) for fields in snapshot["named"]}
