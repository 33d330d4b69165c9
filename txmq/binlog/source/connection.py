"""The connection over which a server sends its binlog. It never connects again by itself: the library's own reader
would, and from the position that it was made with.

mysql-replication carries on the dialogue that makes a replica of us (capabilities, heartbeats, registration, the dump
command with GTIDs of either kind); the packets after it are read here.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pymysql
from pymysql.connections import Connection
from pymysqlreplication import BinLogStreamReader

from txmq.binlog.errors import BinlogError, SourceAwayError, SourceError
from txmq.binlog.position import Position
from txmq.binlog.source.options import SourceOptions
from txmq.binlog.source.packets import Packets

_RECEIVE_BYTES = 256 << 10
_WAIT_S_MIN = 0.0001  # 0 would make the socket a non-blocking one, whose errors are others
_HEARTBEATS_PER_SILENCE = 5
_REFUSED = frozenset({1044, 1045, 1049, 1227, 1698, 4031})  # access denied, no such privilege, wrong host


class _Connection(Connection):  # type: ignore[misc]  # the library has no types
    def stream(self) -> Any:
        """The socket, when all replies were read."""
        return self._sock


class _Dump(BinLogStreamReader):  # type: ignore[misc]
    def begin(self) -> Any:
        """Connect and ask for the binlog; the socket on which it comes."""
        self._BinLogStreamReader__connect_to_stream()
        return self._stream_connection.stream()


class DumpConnection:
    """A stream of events from a position on. One thread only.

    Args:
        options: which server.
        position: from which on.
        first_file: where a server of MySQL's flavor begins if ``position`` is empty.

    Raises:
        SourceError: the server refuses.
        SourceAwayError: it cannot be reached.
    """

    def __init__(self, options: SourceOptions, position: Position, first_file: str = "") -> None:
        self._silence_s_max = options.silence_s_max
        self._silent_s = 0.0
        self._packets = Packets()
        from_start = position.flavor == "mysql" and not position.gtids  # the library takes "" for "the end"
        self._dump = _Dump(
            _arguments(options) | {"read_timeout": options.silence_s_max},
            options.server_id,
            blocking=True,
            is_mariadb=position.flavor == "mariadb",
            auto_position=None if from_start else position.gtids,
            log_file=first_file if from_start else None,
            log_pos=4 if from_start else None,
            resume_stream=from_start,
            slave_heartbeat=options.silence_s_max / _HEARTBEATS_PER_SILENCE,
            report_slave=replica_name(options.name),
            pymysql_wrapper=_Connection,
            enable_logging=False,
        )
        try:
            self._socket = self._dump.begin()
        except (pymysql.MySQLError, OSError, RuntimeError) as error:
            self.close()
            raise _refusal(error) from error

    def read(self, timeout: float) -> bytes | None:
        """The next event; None if there is none within ``timeout`` seconds.

        Raises:
            SourceAwayError: the connection has ended, or nothing came for too long; heartbeats count.
            SourceError: the server refuses to go on.
        """
        event = self._packets.next()
        while event is None:
            try:
                self._socket.settimeout(max(timeout, _WAIT_S_MIN))
                data = self._socket.recv(_RECEIVE_BYTES)
            except TimeoutError:
                self._silent_s += timeout
                if self._silent_s >= self._silence_s_max:
                    raise SourceAwayError(f"the server is silent for {self._silent_s:g} s") from None
                return None
            except OSError as error:
                raise SourceAwayError(f"the connection to the server has ended: {error}") from error
            if not data:
                raise SourceAwayError("the server has closed the connection")
            self._silent_s = 0.0
            self._packets.feed(data)
            event = self._packets.next()
        return event

    def close(self) -> None:
        """End the connection; harmless twice."""
        with suppress(pymysql.MySQLError, OSError, AttributeError):
            self._dump.close()


def replica_name(name: str) -> str:
    """Under which the server lists this replica."""
    return f"txmq-binlog-{name}"[:60]


def _arguments(options: SourceOptions) -> dict[str, Any]:
    """What PyMySQL takes. A text that is a password goes in Latin-1 there; the server, and MySQLdb, mean UTF-8."""
    found = options.connect_arguments() | {"password": options.password.encode()}
    if found.pop("ssl_mode", None) is not None:
        found["ssl"] = found["ssl"] | {"check_hostname": True, "verify_mode": "required"}
    return found


def _refusal(error: Exception) -> BinlogError:
    code = error.args[0] if error.args else 0
    if code in _REFUSED:
        return SourceError(f"the server refuses to send its binlog: {error}")
    return SourceAwayError(f"the server cannot be reached: {error}")
