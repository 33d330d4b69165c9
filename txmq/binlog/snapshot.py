"""The snapshot: rows that a database has already, read by chunks alongside the stream, at positions of its binlog.

Theory of operation. It begins at a position, when each XA transaction has ended that was prepared there: the first view
shows their rows, and the stream knows those of each that is prepared later. Then views follow one another. The reader
publishes the binlog up to the view's position (``is_due``), and ``read`` publishes chunks until the view is old. What
is read is saved with each chunk, in the same txmq transaction (``publish``). So a start finds in its position how far
the snapshot is, and takes a new view.

A table of which the key was altered, and one without a key that was cut off, is read again from its start: from then on
none of its changes is passed over.

Why it is made so. One consistent read of the whole database is exact, but it ends with its connection, and holds back
the server's purge for as long as it takes. A read in chunks between two watermarks (DBLog, Debezium) can be taken up
again, but shows changes of rows before the rows themselves. This snapshot takes many short consistent reads
(``consistent_read``): MariaDB tells the exact position of each, without a lock. What lies in the binlog between two
views is exact as well, because a change of a row that no chunk had yet is passed over (``publish/unread.py``). So it
does not matter how often it is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Final, Protocol

from txmq.binlog.config import SnapshotSettings
from txmq.binlog.consistent_read import SnapshotTable, View, literal, parameters
from txmq.binlog.decoded_changes import Row, TableName, TableSchema
from txmq.binlog.errors import BinlogError, SourceAwayError
from txmq.binlog.position import Position
from txmq.binlog.publish.published import Published
from txmq.binlog.publish.unread import Key, SnapshotState, TableProgress
from txmq.binlog.source import SourceOptions
from txmq.binlog.source.server import Server
from txmq.binlog.statements import shadowed
from txmq.errors import ConfigError
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Signal

_REPORT_S: Final = 5.0
Bar = Callable[[int | None], AbstractContextManager[Callable[[float], None]]]
"""Shows a bar of so many rows (about; None: not known) while the block runs; the function moves it on."""
CHUNK_BYTES_MAX: Final = 32 << 20  # about: of the rows that are in memory
_TABLES_MAX: Final = 50  # of one view
_COMPARED_MAX: Final = 500  # keys in one SELECT
_WAIT_S: Final = 0.5
_VIEWS_MAX: Final = 100


# --- progress ---------------------------------------------------------------------------------------------------------


class SnapshotProgress:
    """How far a snapshot is, for people: a bar, or a log line now and then. Used by one thread.

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


# --- the snapshot -----------------------------------------------------------------------------------------------------


class Rows(Protocol):
    """What takes a snapshot's rows: a publisher."""

    @property
    def position(self) -> Position:
        """After the last part that was taken."""

    @property
    def snapshot(self) -> SnapshotState | None:
        """What is left to read."""

    def publish_read(
        self, schema: TableSchema | None, rows: Sequence[Row], behind: Callable[[int], SnapshotState | None]
    ) -> None:
        """Take rows that were read at this position."""


class Snapshot:
    """See the module's docstring. Used by one thread.

    Args:
        options: which server, and which tables are captured.
        named: whether ``mode`` names a table.
        is_stopped: the reader must end.
        bar: shows how far it is; without one, log lines do.
    """

    def __init__(
        self, options: SourceOptions, settings: SnapshotSettings, named: Callable[[TableName], bool], clock: Clock,
        is_stopped: Callable[[], bool], bar: Bar | None = None,
    ) -> None:  # fmt: skip
        self._options, self._settings, self._named = options, settings, named
        self._clock, self._is_stopped = clock, is_stopped
        self._server = Server(options)
        self._view: View | None = None
        self._pause = Signal()
        self._log = get_logger()
        self._progress = SnapshotProgress(clock, bar)

    def is_over(self, publisher: Rows) -> bool:
        """Whether the reader must end with the snapshot, which is complete."""
        return self._settings.mode == "only" and publisher.snapshot is None

    def close(self) -> None:
        """End the view, and show nothing more."""
        self._progress.close()
        self._end_view()

    def _end_view(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.close()

    # --- its beginning -----------------------------------------------------------------------------------------------

    def beginning(
        self, published: Published | None, first_position: Callable[[bool], Position]
    ) -> tuple[Position | None, SnapshotState | None]:
        """Position and state of a snapshot that begins now; None for each that another says: what is saved, or else
        ``source.start``.

        Args:
            first_position: where a snapshot, of all tables or not, begins if nothing is published.

        Raises:
            BinlogError, ConfigError: it cannot be taken as asked.
        """
        mode, unfinished = self._settings.mode, None if published is None else published.snapshot
        if unfinished is not None:
            if mode == "never":
                raise BinlogError(
                    "a snapshot is unfinished: changes of rows that it has not read were passed over, in "
                    f"{len(unfinished.left)} tables or more. Start with --snapshot initial: it goes on"
                )
            self._go_on(unfinished)
            return None, None
        if mode == "never" or (published is not None and not self._settings.tables):
            return None, None
        is_whole = not self._settings.tables
        # Before the tables are listed: a later one is in the stream.
        position = first_position(is_whole) if published is None else None
        tables = self._tables()
        if self._settings.tables and not tables:
            raise ConfigError(f"snapshot.mode = {self._settings.mode!r}: no captured table has such a name")
        self._log.info("beginning a snapshot", tables=len(tables))
        self._progress.begin(0, sum(tables.values()))
        return position, SnapshotState(tuple(tables), None, len(tables), 0, published is not None)

    def _go_on(self, state: SnapshotState) -> None:
        listed, current = self._tables(), state.current
        expected = sum(listed.get(table, 0) for table in state.left)
        if current is not None:
            expected += max(listed.get(current.table, 0) - current.rows, 0)
        self._log.info("going on with the snapshot", rows=state.rows, tables_left=len(state.left))
        self._progress.begin(state.rows, state.rows + expected)

    def _tables(self) -> dict[TableName, int]:
        """The tables that the snapshot has, each with its rows, about."""
        rows = self._server.rows(
            "SELECT table_schema, table_name, COALESCE(table_rows, 0) FROM information_schema.tables WHERE table_type "
            "IN ('BASE TABLE', 'SYSTEM VERSIONED') ORDER BY table_schema, table_name"
        )
        tables = {TableName(str(row[0]), str(row[1])): int(row[2]) for row in rows}
        return {table: count for table, count in tables.items() if self._captures(table) and self._named(table)}

    def _captures(self, table: TableName) -> bool:
        base = shadowed(table)
        return self._options.captures(table) and (base is None or not (base == table or self._options.captures(base)))

    # --- views -------------------------------------------------------------------------------------------------------

    def is_due(self, publisher: Rows) -> bool:
        """Whether the stream has reached the view: its rows are next. Takes one if there is none.

        Raises:
            SourceError, SourceAwayError: none can be taken.
        """
        state = publisher.snapshot
        if state is None:
            return False
        position = publisher.position
        if self._view is None:
            self._view = self._taken(state, position)
            crash_point("binlog.snapshot.viewed")
        here, there = position.gtid_set, self._view.position.gtid_set
        return not position.rows and here.covers(there)

    def _taken(self, state: SnapshotState, position: Position) -> View:
        """A view that has all that is published: the binlog has a transaction a moment before the tables have it."""
        self._server.check()
        self._server.check_position(position)
        current = () if state.current is None else (state.current.table,)
        for _ in range(_VIEWS_MAX):
            view = View(self._options, [*current, *state.left[:_TABLES_MAX]], self._server)
            if view.position.gtid_set.covers(position.gtid_set):
                return view
            view.close()
            self._pause.wait(_WAIT_S / _VIEWS_MAX)
        raise SourceAwayError(f"the database is at {view.position.gtids}, and {position.gtids} is published")

    def compare(self, progress: TableProgress, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is not after ``progress.after``, by the database (``unread.Compare``).

        Raises:
            SourceAwayError: the connection ended.
        """
        if self._view is None:
            raise SourceAwayError("no view is open")
        try:
            return self._compared(self._view, progress, keys)
        except SourceAwayError:
            self._end_view()  # the next one has another connection
            raise

    def _compared(self, view: View, progress: TableProgress, keys: Sequence[Key]) -> list[bool]:
        row = ", ".join(literal(kind) for _, kind in progress.key)
        border = parameters(progress.key, progress.after)
        told: list[bool] = []
        for first in range(0, len(keys), _COMPARED_MAX):
            some = keys[first : first + _COMPARED_MAX]
            values = [value for key in some for value in (*parameters(progress.key, key), *border)]
            (found,) = view.ask(f"SELECT {', '.join([f'({row}) <= ({row})'] * len(some))}", *values)
            told += map(bool, found)
        return told

    # --- rows --------------------------------------------------------------------------------------------------------

    def read(self, publisher: Rows) -> None:
        """Publish chunks of the view until it is old, or all is read; then end it.

        Raises:
            ViewEndedError: a table was altered: a new view is due.
            SourceError, SourceAwayError: the database refuses, or is away.
        """
        end = self._clock.monotonic() + self._settings.view_ms_max / 1000
        try:
            while self._clock.monotonic() < end and not self._is_stopped():
                state = publisher.snapshot
                if state is None or not self._read_of(state, publisher):
                    break
        finally:
            self._end_view()
        crash_point("binlog.snapshot.left")

    def _read_of(self, state: SnapshotState, publisher: Rows) -> bool:
        """Publish a chunk, or a table that has no key; False if the view has no more."""
        current, view = state.current, self._view
        if current is None and not state.left:
            self._end(state, publisher)
            return False
        assert view is not None
        name = state.left[0] if current is None else current.table
        table = view.table(name)
        left = tuple(one for one in state.left if one != name)
        behind = replace(state, left=left, current=None)
        if table is None or not self._captures(name):
            publisher.publish_read(None, (), lambda _: behind)
            return True
        if current is None or current.key != table.key or not table.key:
            if current is not None:
                self._log.warning("a table is read again from its start", table=str(name))
            current = TableProgress(name, table.key, again=current is not None)
        limit = max(min(self._settings.chunk_rows, CHUNK_BYTES_MAX // max(table.row_bytes, 1)), 1)
        if table.key:
            self._read_chunk(view, table, limit, current, behind, publisher)
        else:
            self._read_whole(view, table, limit, current, behind, publisher)
        return True

    def _read_chunk(
        self, view: View, table: SnapshotTable, limit: int, current: TableProgress, behind: SnapshotState,
        publisher: Rows,
    ) -> None:  # fmt: skip
        rows = view.chunk(table, limit, current.after)
        crash_point("binlog.snapshot.read")
        places = [table.names.index(name) for name, _ in table.key]

        def state(count: int) -> SnapshotState | None:
            done = replace(behind, rows=behind.rows + count)
            if count == len(rows) < limit:
                return done
            after = tuple(rows[count - 1][place] for place in places)
            return replace(done, current=replace(current, after=after, rows=current.rows + count))

        publisher.publish_read(table.schema, rows, state)
        self._tell(state(len(rows)), table, current.rows + len(rows))

    def _read_whole(
        self, view: View, table: SnapshotTable, limit: int, current: TableProgress, behind: SnapshotState,
        publisher: Rows,
    ) -> None:  # fmt: skip
        done, is_last = 0, False
        for rows in view.whole(table, limit):
            crash_point("binlog.snapshot.read")
            first, done, is_last = done, done + len(rows), len(rows) < limit

            def state(count: int, first: int = first, end: int = done if is_last else -1) -> SnapshotState:
                read = replace(behind, rows=behind.rows + first + count)
                if first + count == end:  # with the last rows, so that they cannot come again
                    return read
                return replace(read, current=replace(current, rows=first + count, again=True))

            publisher.publish_read(table.schema, rows, state)
            self._tell(state(len(rows)), table, done)
            if self._is_stopped():
                return
        if not is_last:
            publisher.publish_read(None, (), lambda _: replace(behind, rows=behind.rows + done))

    def _end(self, state: SnapshotState, publisher: Rows) -> None:
        gtids = publisher.position.gtids
        publisher.publish_read(None, (), lambda _: None)
        self._progress.end(state, gtids)

    def _tell(self, state: SnapshotState | None, table: SnapshotTable, rows: int) -> None:
        if state is not None:
            self._progress.tell(state, table, rows)
