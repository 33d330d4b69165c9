"""The reader: from a source to a publisher, until it is stopped.

Theory of operation. The publisher is opened first: it waits until this is the one reader, and knows what is published.
The source is opened at that position. A source whose connection ends is opened anew behind the last part that the
publisher has taken, with longer and longer pauses. ``stop`` ends the loop. The publisher then publishes what it has
taken, and its position is the one at which the next reader begins.

Every other error of source or publisher stops the reader, and is raised: nothing behind it was published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from txmq.binlog.changes import TransactionPart
from txmq.binlog.config import BinlogSettings
from txmq.binlog.errors import SourceAwayError
from txmq.binlog.position import Position, parse_gtids
from txmq.binlog.publish.published import Published
from txmq.binlog.publish.transactional import TransactionalPublisher
from txmq.binlog.source import BinlogSource
from txmq.binlog.source_settings import source_options
from txmq.client import connect
from txmq.errors import ConfigError
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Signal, until_terminated

PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
READ_S = 0.2  # the longest wait for a part before the reader looks whether it is to end


class Source(Protocol):
    """The transactions of a database behind a position. Used by one thread."""

    def current_position(self) -> Position:
        """Where the binlog ends now."""

    def prepared(self) -> list[str]:
        """XA transactions that are prepared now, as SQL names them."""

    def oldest_position(self) -> Position:
        """Where the oldest binlog begins that the server has."""

    def open(self, position: Position) -> None:
        """Check the server, and read on behind a position.

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


class Publisher(Protocol):
    """Takes parts in order (``publish``)."""

    def open(self) -> Published | None:
        """Wait until this is the one reader; what is published, None if nothing ever was."""

    def begin(self, position: Position) -> None:
        """Go on from a position; if nothing was published before, it is saved at once."""

    def publish(self, part: TransactionPart) -> None:
        """Take the next part. Raises what stopped the publisher."""

    def refuse_failed(self) -> None:
        """Raise what stopped the publisher, if anything did."""

    @property
    def position(self) -> Position:
        """Behind the last part that was taken."""

    def close(self) -> Published | None:
        """Publish what was taken, if the broker is there, and end; what is published then."""


class BinlogReader:
    """See the module's docstring. ``stop`` from any thread; the rest by one.

    Args:
        new_source: makes a source, which is not open.
        start: where a reader without a saved position begins (``source.start``).
    """

    def __init__(self, new_source: Callable[[], Source], clock: Clock, start: str = "now") -> None:
        self._new_source, self._start, self._woken = new_source, start, Signal()
        self._is_stopped = False
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

    def run(self, publisher: Publisher) -> Published | None:
        """Read and publish until ``stop``; what is published then.

        Raises:
            BinlogError: what stopped it.
        """
        try:
            published = publisher.open()
            self._publish_from(None if published is None else published.position, publisher)
        finally:
            published = publisher.close()
        return published

    def _publish_from(self, position: Position | None, publisher: Publisher) -> None:
        pause_s, has_begun = PAUSE_S_MIN, False
        while not self._is_stopped:
            source = self._new_source()
            try:
                position = position or self._first_position(source)
                source.open(position)
                if not has_begun:
                    publisher.begin(position)
                    self._log.info("reading the binlog", gtids=position.gtids)
                    has_begun = True
                while not self._is_stopped:
                    part = source.read(READ_S)
                    if part is None:
                        publisher.refuse_failed()
                        continue
                    publisher.publish(part)
                    pause_s = PAUSE_S_MIN
            except SourceAwayError as error:
                self._sparingly.warning("waiting for the database", error=str(error))
                if has_begun:
                    publisher.refuse_failed()
                    position = publisher.position
                self._woken.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            finally:
                source.close()

    def _first_position(self, source: Source) -> Position:
        current = source.current_position()
        if self._start == "now":
            if prepared := source.prepared():  # their changes lie before this position, their XA COMMIT behind it
                raise SourceAwayError(
                    f"XA transactions are prepared: {', '.join(prepared[:10])}; the first start waits for their end"
                )
            return current
        if self._start == "earliest":
            return source.oldest_position()
        try:
            parse_gtids(current.flavor, self._start)
        except ValueError as error:
            raise ConfigError(
                f"source.start = {self._start[:80]!r}: expected now, earliest or a GTID: {error}"
            ) from None
        return Position(current.flavor, self._start, server=current.server)


def read_binlog(settings: BinlogSettings) -> Published | None:
    """Read and publish until SIGTERM or Ctrl-C; what is published then.

    Raises:
        BinlogError: what stopped the reader.
        ConfigError: a setting does not fit the server.
    """
    with connect(settings.bootstrap, lazy=True) as client:
        options = source_options(settings)
        reader = BinlogReader(lambda: BinlogSource(options), client.clock, settings.source.start)
        publisher = TransactionalPublisher(client, settings, lambda: reader.is_stopped)
        with until_terminated(reader.stop):
            return reader.run(publisher)
