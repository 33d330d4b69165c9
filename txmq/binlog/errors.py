"""The errors of binlog sync. Each says what to correct; after it the reader stops and has passed over no change."""

from __future__ import annotations

from txmq.errors import TxmqError


class BinlogError(TxmqError):
    """Base of the errors of binlog sync."""


class SourceError(BinlogError):
    """The database cannot be read as asked, or its binlog holds what cannot be published; the text says more."""


class SourceAwayError(BinlogError):
    """The connection to the database ended or could not be made. Open it anew from the last published position."""

    retriable: bool = True


class ColumnError(BinlogError):
    """A column's value cannot be published exactly.

    Attributes:
        table: ``database.table``.
        column: the column's name.
    """

    def __init__(self, table: str, column: str, reason: str) -> None:
        super().__init__(f"{table}: column {column}: {reason}")
        self.table, self.column = table, column


class ReaderFencedError(BinlogError):
    """Another reader of the same name has taken over: it goes on where this one stopped. Nothing is published twice."""


class TargetError(BinlogError):
    """The target cannot take the changes as asked; the text says what to correct."""


class TargetAwayError(BinlogError):
    """The connection to the target ended or could not be made, or its transaction was rolled back. Try it again."""

    retriable: bool = True


class ConflictError(BinlogError):
    """The target's rows are not what a change presupposes: a row is missing, or another one is in its place.

    Attributes:
        table: ``database.table`` at the source.
        event: the change, as its message says it.
    """

    def __init__(self, table: str, reason: str, event: str) -> None:
        super().__init__(
            f"{table}: {reason}: {event}. Nothing of it was applied. Correct the target and start again, or let "
            'apply.on_conflict = "overwrite" make the row what the change says'
        )
        self.table, self.event = table, event
