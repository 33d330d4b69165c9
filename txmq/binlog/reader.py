"""The reader: from a source to a publisher, until it is stopped.

Theory of operation. The publisher is opened first: it waits until this is the one reader, and knows what is published.
The source is opened at that position. A source whose connection ends is opened anew after the last part that the
publisher has taken, with longer and longer pauses. ``stop`` ends the loop. The publisher then publishes what it has
taken, and its position is the one at which the next reader begins.

While a snapshot is unfinished, the source is read up to the position of its view. Then the view's rows are published,
and the source is opened again.

A reader that knows nothing of before begins where no XA transaction is prepared (``UnpreparedSearch``). The rows of an
XA transaction stand in the binlog at its prepare: a reader that begins between prepare and XA COMMIT would have to
publish rows that it has not read. So the binlog is read from a first position on. A transaction that ends without
having been prepared after that position was prepared at every position before its end. The first position holds if
there is none, and none is listed (XA RECOVER) that was prepared before. Else it is the first one after the last of them
at which all that was prepared has ended.

Every other error of source or publisher stops the reader, and is raised: nothing after it was published.

Invariant: the server writes prepare and end into its binlog before it lists what they say. So whoever lists first, and
then reads to the binlog's end, has the prepare of everything that is listed, and the end of everything that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Protocol

from txmq.binlog.config import BinlogSettings
from txmq.binlog.consistent_read import ViewEndedError
from txmq.binlog.decoded_changes import TransactionPart, XaEnd, XaPrepare
from txmq.binlog.errors import SourceAwayError
from txmq.binlog.position import GtidSet, Position, parse_gtids
from txmq.binlog.publish.published import Published
from txmq.binlog.publish.publisher import BatchingPublisher, OrderedPublisher, TransactionalPublisher
from txmq.binlog.publish.unread import Unread
from txmq.binlog.snapshot import Bar, Snapshot
from txmq.binlog.source import BinlogSource
from txmq.binlog.source.options import captures, source_options
from txmq.client import Client, connect
from txmq.errors import ConfigError, TxmqError
from txmq.runtime.backoff import Backoff
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Signal, until_terminated
from txmq.xid import xid_sql

PAUSE_S = Backoff(0.1, 5.0)
PREPARED_S = 0.5  # between two looks whether prepared XA transactions have ended
LISTED_S = 0.1  # a prepare is in the binlog before it is on disk, and listed after that
READ_S = 0.2  # the longest wait for a part before the reader looks whether it must end


# --- where a first reader begins --------------------------------------------------------------------------------------


class UnpreparedSearch:
    """Finds a position at which no XA transaction is prepared. No I/O.

    Args:
        first: no position before it is wanted.
    """

    def __init__(self, first: Position) -> None:
        self._found: Position | None = first
        self._prepared, self._open = set[str](), set[str]()
        self.read: GtidSet = first.gtid_set

    def take(self, part: TransactionPart) -> None:
        """The next part of the binlog."""
        self.read = part.gtids
        if isinstance(part.xa, XaPrepare):
            xid = xid_sql(part.xa.xid)
            self._prepared.add(xid)
            self._open.add(xid)
        elif isinstance(part.xa, XaEnd):
            xid = xid_sql(part.xa.xid)
            self._open.discard(xid)
            if xid not in self._prepared:
                self._found = None
            if self._found is None and not self._open:
                self._found = part.after

    def waits_for(self, listed: Iterable[str]) -> list[str]:
        """Those that must end before a position is found; none once it is.

        Args:
            listed: what was prepared before the last part was read.
        """
        earlier = [xid for xid in listed if xid not in self._prepared]
        return earlier or ([] if self._found is not None else sorted(self._open))

    @property
    def found(self) -> Position | None:
        """The position, if nothing is waited for."""
        return self._found


# --- the reader -------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """The transactions of a database after a position. Used by one thread."""

    def current_position(self) -> Position:
        """Where the binlog ends now."""

    def prepared(self) -> list[str]:
        """XA transactions that are prepared now, as SQL names them."""

    def oldest_position(self) -> Position:
        """Where the oldest binlog begins that the server has."""

    def open(self, position: Position) -> None:
        """Check the server, and read on after a position.

        Raises:
            SourceAwayError: there is no connection.
            SourceError: the server cannot be read from there.
        """

    def read(self, timeout: float) -> TransactionPart | None:
        """The next part; None if there is none within ``timeout`` seconds.

        Raises:
            SourceAwayError: the connection ended.
            SourceError, ColumnError: what comes next cannot be published.
        """

    def close(self) -> None:
        """End the connection."""


class BinlogReader:
    """See the module's docstring. ``stop`` from any thread; the rest by one.

    Args:
        new_source: makes a source, which is not open.
        start: where a reader without a saved position begins (``source.start``), if it takes no snapshot.
        snapshot: takes one; None: none is ever taken.
    """

    def __init__(
        self, new_source: Callable[[], Source], clock: Clock, start: str = "now", snapshot: Snapshot | None = None
    ) -> None:  # fmt: skip
        self._new_source, self._start, self._snapshot, self._woken = new_source, start, snapshot, Signal()
        self._is_stopped, self._pause_s = False, PAUSE_S.first
        self._log = get_logger()
        self._sparingly = Sparingly(self._log, clock)

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._is_stopped

    def stop(self) -> None:
        """End in order: publish what was read, save the position."""
        self._is_stopped = True
        self._woken.set()

    def run(self, publisher: BatchingPublisher) -> Published | None:
        """Read and publish until ``stop``; what is published then.

        Raises:
            BinlogError: what stopped it.
        """
        try:
            self._publish_from(publisher.open(), publisher)
        except TxmqError as error:
            if not (self._is_stopped and error.retriable):
                raise
        finally:
            published = publisher.close()
            if self._snapshot is not None:
                self._snapshot.close()
        return published

    def _publish_from(self, published: Published | None, publisher: BatchingPublisher) -> None:
        has_begun = False
        while not self._is_stopped:
            source = self._new_source()
            try:
                if not has_begun:
                    has_begun = self._begin(published, source, publisher)
                elif not self._is_due(publisher):
                    source.open(publisher.position)
                self._read(source, publisher)
            except ViewEndedError as error:
                self._log.info("a table was altered: a new view is taken", reason=str(error))
            except SourceAwayError as error:
                if self.is_stopped:
                    break
                self._sparingly.warning("waiting for the database", error=str(error))
                if has_begun:
                    publisher.refuse_failed()
                self._woken.wait(self._pause_s)
                self._pause_s = PAUSE_S.following(self._pause_s)
            finally:
                source.close()

    def _begin(self, published: Published | None, source: Source, publisher: BatchingPublisher) -> bool:
        """Open source and publisher, with a snapshot if one begins; False if the reader was stopped meanwhile."""
        position = state = None
        if self._snapshot is not None:
            position, state = self._snapshot.beginning(
                published,
                lambda is_whole: self._snapshot_position(source) if is_whole else self._unprepared_position(source),
            )
        if published is not None:
            position = published.position
        position = position or self._first_position(source)
        if self._is_stopped:
            return False
        source.open(position)
        publisher.begin(position, state)
        if state is not None:
            crash_point("binlog.snapshot.begun")
        self._log.info("reading the binlog", gtids=position.gtids)
        return True

    def _is_due(self, publisher: BatchingPublisher) -> bool:
        return self._snapshot is not None and self._snapshot.is_due(publisher)

    def _read(self, source: Source, publisher: BatchingPublisher) -> None:
        """Publish what the source has, until the reader is stopped; or up to the snapshot's view, and its rows."""
        while not self._is_stopped:
            if self._snapshot is not None and self._snapshot.is_over(publisher):
                self.stop()
            elif self._is_due(publisher):
                if self._snapshot is not None:
                    self._snapshot.read(publisher)
                return
            else:
                self._read_part(source, publisher)

    def _read_part(self, source: Source, publisher: BatchingPublisher) -> None:
        part = source.read(READ_S)
        if part is None:
            publisher.refuse_failed()
            return
        publisher.publish(part)
        self._pause_s = PAUSE_S.first

    def _snapshot_position(self, source: Source) -> Position:
        """Where a snapshot of all tables begins: its first view shows what is prepared here, and has ended by then."""
        position = source.current_position()
        self._woken.wait(LISTED_S)
        left = source.prepared()
        while left and not self._is_stopped:
            self._wait_for(left)
            prepared = source.prepared()
            left = [xid for xid in left if xid in prepared]
        return position

    def _unprepared_position(self, source: Source) -> Position:
        """Where a reader begins that takes no snapshot of all tables."""
        first = source.current_position()
        search = UnpreparedSearch(first)
        source.open(first)
        self._woken.wait(LISTED_S)
        while not self._is_stopped:
            listed, end = source.prepared(), source.current_position().gtid_set
            while not search.read.covers(end) and not self._is_stopped:
                if (part := source.read(READ_S)) is not None:
                    search.take(part)
            if left := search.waits_for(listed):
                self._wait_for(left)
            elif search.found is not None:
                return search.found
        return first

    def _wait_for(self, prepared: list[str]) -> None:
        self._sparingly.warning("waiting for prepared XA transactions: commit or roll back each", xids=prepared)
        self._woken.wait(PREPARED_S)

    def _first_position(self, source: Source) -> Position:
        if self._start == "now":
            return self._unprepared_position(source)
        current = source.current_position()
        if self._start == "earliest":
            return source.oldest_position()
        try:
            parse_gtids(current.flavor, self._start)
        except ValueError as error:
            raise ConfigError(
                f"source.start = {self._start[:80]!r}: expected now, earliest or a GTID: {error}"
            ) from None
        return Position(current.flavor, self._start, server=current.server)


def publisher_of(
    client: Client, settings: BinlogSettings, is_stopped: Callable[[], bool], unread: Unread | None = None
) -> BatchingPublisher:
    """The publisher that ``publish.mode`` names."""
    kind = OrderedPublisher if settings.publish.mode == "ordered" else TransactionalPublisher
    return kind(client, settings, is_stopped, unread)


def read_binlog(settings: BinlogSettings, bar: Bar | None = None, *, skipped: Collection[str] = ()) -> Published | None:
    """Read and publish until SIGTERM or Ctrl-C; what is published then.

    Args:
        bar: shows how far a snapshot is; without one, log lines do.
        skipped: ids of transactions whose changes without row events are passed over.

    Raises:
        BinlogError: what stopped the reader.
        ConfigError: a setting does not fit the server.
    """
    with connect(settings.bootstrap, lazy=True) as client:
        options, snapshot = replace(source_options(settings), skipped=frozenset(skipped)), settings.snapshot
        named = captures(snapshot.tables or settings.source.tables, ())
        reader: BinlogReader
        tables = Snapshot(options, snapshot, named, client.clock, lambda: reader.is_stopped, bar)
        reader = BinlogReader(lambda: BinlogSource(options), client.clock, settings.source.start, tables)
        publisher = publisher_of(client, settings, lambda: reader.is_stopped, Unread(tables.compare))
        with until_terminated(reader.stop):
            return reader.run(publisher)
