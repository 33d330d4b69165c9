"""What a batch says of its rows, so that a repeat can be told from other rows under the same number.

Theory of operation. Spark cuts a repeated batch into other tasks and orders its rows otherwise, so a digest is a sum
over rows: their number, and the sum of a CRC32 of each row, modulo 2^64. Each task adds up its own.

A stream says the number alone. A micro-batch that Spark repeats after a crash is computed anew, and a row that holds a
random number is another one then; but a checkpoint that lacks the newest micro-batch plans other offsets, and with them
another number of rows.

    <rows>                  of a stream, and where there is none
    <rows>-<16 hex digits>  of ``df.write`` with ``queryId``
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from txmq.errors import TransactionConflictError
from txmq.runtime.logging import get_logger
from txmq.spark.sink.rows import COLUMNS, as_bytes

OTHER_ROWS = "leave it out if it was a repeat, or give other rows a batchId of their own"
OTHER_STREAM = (
    "give the stream its newest checkpoint; or an empty one, and begin at the first offsets that are not written "
    "(startingOffsets)"
)
_MASK = (1 << 64) - 1


class Attempt(NamedTuple):
    """A writer: one attempt of one task of a batch of a query, in an incarnation of its driver."""

    query: str
    epoch: int
    batch: int
    task: int
    attempt: int


class Digest:
    """Adds up rows. ``is_of_content``: their contents too, not only their number."""

    __slots__ = ("content", "is_of_content", "rows")

    def __init__(self, rows: int = 0, content: int = 0, *, is_of_content: bool) -> None:
        self.rows, self.content, self.is_of_content = rows, content, is_of_content

    def watching(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches, added up as they pass."""
        for batch in batches:
            self.add(batch)
            yield batch

    def add(self, batch: Any) -> None:
        """The rows of one Arrow batch."""
        self.rows += batch.num_rows
        if self.is_of_content and batch.num_rows:
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            listed = [_listed(name, columns[name]) for name in COLUMNS if name in columns]
            self.content = (self.content + sum(map(_crc, zip(*listed, strict=True)))) & _MASK

    def merged(self, others: Iterable[Digest]) -> Digest:
        """The sum of this one and others."""
        found = Digest(self.rows, self.content, is_of_content=self.is_of_content)
        for other in others:
            found.rows += other.rows
            found.content = (found.content + other.content) & _MASK
        return found

    @property
    def text(self) -> str:
        """As the broker keeps it."""
        return f"{self.rows}-{self.content:016x}" if self.is_of_content and self.rows else str(self.rows)


def check_repeat(attempt: Attempt, known: str | None, now: str, advice: str) -> None:
    """A batch is committed, and comes again: are these its rows?

    Args:
        known: the digest that it was committed with; None: not kept any more, and a warning is logged.
        now: the digest of the rows that came.
        advice: what the caller may do.

    Raises:
        TransactionConflictError: they are others, and were not written.
    """
    if known is None:
        get_logger(query=attempt.query, batch=attempt.batch, rows=now).warning(
            "a batch is committed and was not written again; what its rows were is not kept any more"
        )
    elif known != now:
        raise TransactionConflictError(
            f"batch {attempt.batch} of query {attempt.query} is committed with other rows ({known}; these are {now}), "
            f"so these were not written: {advice}"
        )


def refuse_older(attempt: Attempt, newest: int | None) -> None:
    """A stream's batch is its newest, or a new one.

    Raises:
        TransactionConflictError: it is below ``newest``; says what to do.
    """
    if newest is not None and attempt.batch < newest:
        raise TransactionConflictError(
            f"batch {attempt.batch} of stream {attempt.query} is to be written, and batch {newest} is committed: the "
            f"checkpoint is an older copy; {OTHER_STREAM}"
        )


def _listed(name: str, column: Any) -> list[bytes | None]:
    if name in ("key", "value", "topic"):
        return as_bytes(column)
    return [None if one is None else repr(one).encode() for one in column.to_pylist()]


def _crc(row: tuple[bytes | None, ...]) -> int:
    crc = 0
    for one in row:
        crc = zlib.crc32(b"-" if one is None else b"%d:%b" % (len(one), one), crc)
    return crc
