"""Half messages that are due for a check-back, on the wire: the answer to ``checks``.

Byte layout
    Repeats ``<txid> <attempt> <age ms> <length>\\r\\n`` and so many bytes of parts, as in the body of ``commit``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from txmq.errors import BadRequestError, RemoteProtocolError
from txmq.protocol.transaction_parts import Buffer, encode_part, split_parts

_HEAD = re.compile(rb"([!-~]{1,64}) ([1-9][0-9]{0,9}) (0|[1-9][0-9]{0,19}) (0|[1-9][0-9]{0,9})\r\n").match


class DueHalf(NamedTuple):
    """One half message.

    Attributes:
        attempt: how often it has been handed out, this time included.
        parts: topic, partition and record batch.
    """

    txid: str
    attempt: int
    age_ms: int
    parts: tuple[tuple[str, int, bytearray], ...]


def encode_half(half: DueHalf) -> bytes:
    """One half of the answer."""
    parts = b"".join(buffer for part in half.parts for buffer in encode_part(*part))
    return f"{half.txid} {half.attempt} {half.age_ms} {len(parts)}\r\n".encode() + parts


def split_halves(body: Buffer) -> list[DueHalf]:
    """Read the answer to ``checks``.

    Raises:
        RemoteProtocolError: it is not one.
    """
    found: list[DueHalf] = []
    position = 0
    while position < len(body):
        match = _HEAD(body, position)
        if match is None:
            raise RemoteProtocolError(f"no half message at byte {position} of the answer to checks")
        start = match.end()
        position = start + int(match[4])
        if position > len(body):
            raise RemoteProtocolError(f"the answer to checks is cut short: {position - len(body)} bytes are missing")
        try:
            parts = split_parts(memoryview(body)[start:position])
        except BadRequestError as error:
            raise RemoteProtocolError(f"answer to checks: {error}") from None
        named = tuple((topic.decode("ascii"), int(partition), batch) for topic, partition, batch, *_ in parts)
        found.append(DueHalf(match[1].decode("ascii"), int(match[2]), int(match[3]), named))
    return found
