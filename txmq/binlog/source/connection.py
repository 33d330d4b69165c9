"""The connection over which a server sends its binlog, and the events cut from its bytes.

It never connects again by itself: the library's own reader would, and from the position that it was made with.
mysql-replication carries on the dialogue that makes a replica of us (capabilities, heartbeats, registration, the dump
command with GTIDs of either kind); the packets after it are read here.

    length 3 | number 1 | bytes        a packet of 16 MiB - 1 bytes goes on in the next one

A packet holds an event after a zero byte, or an error (255), or the end of the stream (254).

Source: MySQL 8.0, "Protocol: MySQL Packets", "Protocol: COM_BINLOG_DUMP".
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import pymysql
from pymysql.connections import Connection
from pymysqlreplication import BinLogStreamReader

from txmq.binlog.errors import BinlogError, SourceAwayError, SourceError
from txmq.binlog.position import Position
from txmq.binlog.source.events import EVENT_BYTES_MAX
from txmq.binlog.source.options import SourceOptions

_FULL: Final = 0xFFFFFF
_FATAL_READING: Final = 1236  # ER_MASTER_FATAL_ERROR_READING_BINLOG
_RECEIVE_BYTES = 256 << 10
_WAIT_S_MIN = 0.0001  # 0 would make the socket a non-blocking one, whose errors are others
_HEARTBEATS_PER_SILENCE = 5
_REFUSED = frozenset({1044, 1045, 1049, 1227, 1698, 4031})  # access denied, no such privilege, wrong host


# --- packets ----------------------------------------------------------------------------------------------------------


class Packets:
    """Bytes in, events out. It holds at most what was fed and ``EVENT_BYTES_MAX``."""

    __slots__ = ("_at", "_data", "_more", "_parts", "_wanted")

    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._more: list[bytes] = []  # fed, and not enough yet for the packet that was asked for
        self._wanted = 0
        self._parts: list[bytes] = []  # of an event of several packets

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        self._more.append(data)

    def next(self) -> bytes | None:
        """The next event, header first; None if it is not whole yet.

        Raises:
            SourceError: the server refuses to go on, or an event is too large.
            SourceAwayError: the server ended the stream.
        """
        while True:
            packet = self._packet()
            if packet is None:
                return None
            if len(packet) == _FULL or self._parts:
                self._parts.append(packet)
                if sum(map(len, self._parts)) > EVENT_BYTES_MAX:
                    raise SourceError(
                        f"an event has more than {EVENT_BYTES_MAX} bytes: a row that large is not published"
                    )
                if len(packet) == _FULL:
                    continue
                packet, self._parts = b"".join(self._parts), []
            if not packet or packet[0]:
                raise _error(packet)
            return packet[1:]

    def _packet(self) -> bytes | None:
        data, at = self._data, self._at
        start = at + 4
        behind = start + (data[at] | data[at + 1] << 8 | data[at + 2] << 16) if len(data) >= start else start
        if behind > len(data) or len(data) < start:
            if len(data) - at + sum(map(len, self._more)) < max(behind - at, self._wanted):
                self._wanted = behind - at
                return None
            if not self._more:
                return None
            self._data, self._at, self._more, self._wanted = b"".join([data[at:], *self._more]), 0, [], 0
            return self._packet()
        self._at = behind
        return data[start:behind]


def _error(packet: bytes) -> BinlogError:
    if packet[:1] != b"\xff":
        return SourceAwayError("the server has ended the stream of events")
    code, text = int.from_bytes(packet[1:3], "little"), packet[3:].decode("utf-8", "replace")
    if text.startswith("#"):
        text = text[6:]
    if code != _FATAL_READING:
        return SourceAwayError(f"the server has ended the stream of events: {text} ({code})")
    if "purged" in text or "Could not find GTID state" in text or "missing the GTID" in text:
        text += "; what lies between the position and the oldest binlog is lost here: begin anew with a snapshot"
    return SourceError(f"the server does not send its binlog from this position: {text}")


# --- the connection ---------------------------------------------------------------------------------------------------


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
