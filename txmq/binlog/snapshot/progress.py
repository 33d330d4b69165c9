"""How far a snapshot is, for people: a bar, or a log line now and then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Final

from txmq.binlog.publish.unread import SnapshotState
from txmq.binlog.snapshot.tables import SnapshotTable
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock

_REPORT_S: Final = 5.0
Bar = Callable[[int | None], AbstractContextManager[Callable[[float], None]]]
"""Shows a bar of so many rows (about; None: not known) while the block runs; the function moves it on."""


class SnapshotProgress:
    """See the module's docstring. Used by one thread.

    Args:
        bar: None: log lines say how far it is.
    """

    def __init__(self, clock: Clock, bar: Bar | None) -> None:
        self._clock, self._bar = clock, bar
        self._log = get_logger()
        self._shown = ExitStack()
        self._advance: Callable[[float], None] = lambda _: None
        self._begun_at = self._reported_at = clock.monotonic()
        self._begun_rows = self._reported_rows = 0  # what former runs have read, and what was reported last

    def begin(self, rows: int, expected: int) -> None:
        """A snapshot goes on that has read some rows, of about so many."""
        self.close()
        self._begun_at = self._reported_at = self._clock.monotonic()
        self._begun_rows = self._reported_rows = rows
        if self._bar is not None:
            self._advance = self._shown.enter_context(self._bar(expected or None))
            self._advance(rows)

    def tell(self, state: SnapshotState, table: SnapshotTable, rows: int) -> None:
        """More rows were read, ``rows`` of this table by now."""
        now = self._clock.monotonic()
        if self._bar is not None:
            self._advance(state.rows - self._reported_rows)
            self._reported_rows = state.rows
        elif now >= self._reported_at + _REPORT_S:
            rate = round((state.rows - self._reported_rows) / (now - self._reported_at))
            self._reported_at, self._reported_rows = now, state.rows
            self._log.info(
                "reading the snapshot", table=str(table.schema.table), rows_of_table=rows, rows_expected=table.rows,
                rows=state.rows, rows_per_s=rate, tables_left=len(state.left), tables=state.tables,
            )  # fmt: skip

    def end(self, state: SnapshotState, gtids: str) -> None:
        """All is read, the last of it at a position."""
        self.close()
        seconds = max(self._clock.monotonic() - self._begun_at, 0.001)
        rate = round((state.rows - self._begun_rows) / seconds)
        self._log.info("the snapshot is complete", rows=state.rows, tables=state.tables, rows_per_s=rate, gtids=gtids)

    def close(self) -> None:
        """Take the bar away; harmless twice."""
        self._shown.close()
        self._advance = lambda _: None
