"""The server's packets, cut from the bytes of its connection.

    length 3 | number 1 | bytes        a packet of 16 MiB - 1 bytes goes on in the next one

A packet holds an event after a zero byte, or an error (255), or the end of the stream (254). Source: MySQL 8.0,
"Protocol: MySQL Packets", "Protocol: COM_BINLOG_DUMP".
"""

from __future__ import annotations

from typing import Final

from txmq.binlog.errors import BinlogError, SourceAwayError, SourceError
from txmq.binlog.source.events import EVENT_BYTES_MAX

_FULL: Final = 0xFFFFFF
_FATAL_READING: Final = 1236  # ER_MASTER_FATAL_ERROR_READING_BINLOG


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
