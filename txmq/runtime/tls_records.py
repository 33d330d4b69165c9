"""Where the records of a TLS conversation end: OpenSSL keeps what it has of one, and does not say so.

Source: RFC 8446, 5.1: a header of five bytes, whose last two are the length of what follows.
"""

from __future__ import annotations

from typing import Final

_HEADER_SIZE_BYTES: Final = 5


class RecordBounds:
    """Follows one side of a conversation from its first byte on."""

    __slots__ = ("_header", "_missing_bytes")

    def __init__(self) -> None:
        self._header = b""  # what there is of an unfinished one
        self._missing_bytes = 0  # of the body of an unfinished record

    def is_within(self, arrived: memoryview) -> bool:
        """Whether a record is begun and not complete, after these bytes from the network."""
        at, size = self._missing_bytes, len(arrived)
        while at < size:
            end = at + _HEADER_SIZE_BYTES - len(self._header)
            header = self._header + arrived[at:end]
            if len(header) < _HEADER_SIZE_BYTES:
                self._header, at = header, size
            else:
                self._header, at = b"", end + (header[3] << 8 | header[4])
        self._missing_bytes = at - size
        return at > size or bool(self._header)
