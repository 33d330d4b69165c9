"""The binlog of one server as transaction parts.

It never connects again by itself: after ``SourceAwayError`` the caller opens it anew, from the last published position.
"""

from __future__ import annotations

from txmq.binlog.decoded_changes import TransactionPart
from txmq.binlog.errors import SourceError
from txmq.binlog.position import MariadbGtids, Position
from txmq.binlog.source.connection import DumpConnection
from txmq.binlog.source.options import SERVER_ID_MAX, SourceOptions
from txmq.binlog.source.server import Server
from txmq.binlog.source.transactions import TransactionReader


class BinlogSource:
    """A reader of a server's binlog, as one of its replicas. One thread only.

    Args:
        options: which server, and what of it.
    """

    def __init__(self, options: SourceOptions) -> None:
        if not 1 <= options.server_id <= SERVER_ID_MAX:
            raise SourceError(f"a server id is from 1 to {SERVER_ID_MAX}, not {options.server_id}")
        self._options = options
        self._server = Server(options)
        self._connection: DumpConnection | None = None
        self._reader: TransactionReader | None = None

    @property
    def file(self) -> str:
        """The binlog file that is being read."""
        return "" if self._reader is None else self._reader.file

    @property
    def offset(self) -> int:
        """The byte after the last event that was read."""
        return 0 if self._reader is None else self._reader.offset

    def current_position(self) -> Position:
        """Where the binlog ends now: from here on a first start reads that publishes nothing of before.

        Raises:
            SourceError: the server cannot be read as asked.
            SourceAwayError: it cannot be reached.
        """
        self._server.check()
        return self._server.end_position()

    def oldest_position(self) -> Position:
        """Where the oldest binlog begins that the server has.

        Raises:
            SourceError: the server cannot be read as asked.
            SourceAwayError: it cannot be reached.
        """
        self._server.check()
        return self._server.oldest_position()

    def end(self) -> Position:
        """As ``current_position``, but its GTIDs may be of a moment later than file and offset: it costs little."""
        self._server.check()
        return self._server.end_position(is_exact=False)

    def file_borders(self) -> list[MariadbGtids]:
        """What stands before each file of MariaDB's binlog; of MySQL's nothing is told. After ``current_position``."""
        return self._server.file_borders()

    def prepared(self) -> list[str]:
        """XA transactions that are prepared now, as SQL names them. After ``current_position``; raises as it does."""
        return self._server.prepared()

    def bytes_behind(self, position: Position) -> int | None:
        """Bytes of the binlog after a position; None if they cannot be counted. Raises as ``current_position``."""
        return self._server.bytes_behind(position)

    def open(self, position: Position) -> None:
        """Check the server, connect, and read from ``position`` on.

        Raises:
            SourceError: the server cannot be read as asked, or not from there.
            SourceAwayError: it cannot be reached.
        """
        self.close()
        self._server.check()
        self._server.check_position(position)
        first_file = self._server.first_file() if position.flavor == "mysql" and not position.gtids else ""
        self._reader = TransactionReader(self._options, self._server.origin, position, self._server)
        self._connection = DumpConnection(self._options, position, first_file)

    def read(self, timeout: float) -> TransactionPart | None:
        """The next part; None if none is whole within ``timeout`` seconds.

        Raises:
            SourceError: the binlog holds what cannot be published.
            ColumnError: a captured column's value cannot be read exactly.
            SourceAwayError: the connection ended; ``open`` again.
        """
        reader, connection = self._reader, self._connection
        if reader is None or connection is None:
            raise SourceError("the source is not open")
        while not reader.ready:
            event = connection.read(timeout)
            if event is None:
                return None
            reader.feed(event)
        return reader.ready.popleft()

    def close(self) -> None:
        """End the connection; harmless twice."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._reader = None
