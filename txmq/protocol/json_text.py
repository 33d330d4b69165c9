"""JSON as a peer sent it: read without trusting it.

``json`` raises ``ValueError`` for what is no JSON (also for a number of over 4300 digits), and ``RecursionError`` for
what is nested deeper than the interpreter's stack: a thousand brackets are. It also takes half of a character (an
escape of U+D800), which makes a string that nothing can write again, neither the journal nor an answer.

Invariants
    * ``read_json`` raises nothing, whatever bytes it is given, and ``json_object`` nothing but RemoteProtocolError.
"""

from __future__ import annotations

import json
from typing import Any

from txmq.errors import RemoteProtocolError

Buffer = bytes | bytearray | memoryview
Fields = dict[str, Any]  # an object, as ``docs/protocol.md`` lists its fields
FieldsList = list[Fields]


def read_json(text: Buffer) -> Any:
    """The value; None if it is no JSON, or nested too deeply."""
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError):
        return None


def json_object(body: Buffer) -> Fields:
    """An answer of the broker that is a JSON object.

    Raises:
        RemoteProtocolError: it is none.
    """
    value = read_json(body)
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"not a JSON object: {bytes(body[:80])!r}")
    return value


def is_whole(text: str) -> bool:
    """Whether a string read from JSON is one of whole characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
