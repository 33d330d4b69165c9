"""Check a message before it is sent: key, value, headers, tag and size.

The tag travels as a header of its own (``TAG_HEADER``), before the application's.
"""

from __future__ import annotations

from collections.abc import Mapping

from txmq.client.producer.batches import RECORD_OVERHEAD_BYTES
from txmq.errors import LocalProtocolError, TooLargeError
from txmq.log.records import TAG_HEADER, TXID_HEADER, Headers
from txmq.model import how_to_encode

BATCH_OVERHEAD_BYTES = 1024  # header, request line, and what compression may add

Content = tuple[bytes | None, bytes, Mapping[str, bytes] | None, str | None]  # key, value, headers, tag


def checked_content(message: Content, size_bytes_max: int) -> tuple[bytes | None, bytes, Headers]:
    """Check key, value, headers and tag of a message; key, value and headers as they are stored.

    They are ``bytes`` and ``str`` themselves, no subclasses: a batch is encoded when it is sent, and one that cannot be
    encoded then would hold up all after it.

    Raises:
        TypeError, TooLargeError, LocalProtocolError: nothing was sent.
    """
    key, value, headers, tag = message
    if not isinstance(value, bytes):
        raise TypeError(f"a value is bytes, not {type(value).__name__}: {how_to_encode('value', value)}")
    if key is not None and not isinstance(key, bytes):
        raise TypeError(f"a key is bytes or None, not {type(key).__name__}: {how_to_encode('key', key)}")
    key, value = None if key is None else bytes(key), bytes(value)
    size = len(value) + (0 if key is None else len(key)) + BATCH_OVERHEAD_BYTES
    stored = _stored_headers(headers, tag) if headers or tag is not None else ()
    for name, content in stored:
        size += 4 * len(name) + len(content) + RECORD_OVERHEAD_BYTES
    if size > size_bytes_max:
        raise TooLargeError(f"a message of about {size} bytes is over the limit of {size_bytes_max}; nothing was sent")
    return key, value, stored


def _stored_headers(headers: Mapping[str, bytes] | None, tag: str | None) -> Headers:
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"a tag is a str or None, not {type(tag).__name__}")
    stored = [] if tag is None else [(TAG_HEADER, _encoded("a tag", tag))]
    if headers is not None and not isinstance(headers, Mapping):
        raise TypeError(f"headers map str to bytes, and are no {type(headers).__name__}")
    for name, content in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise TypeError("headers map str to bytes")
        plain = _encoded("a header's name", name).decode()
        if plain in (TAG_HEADER, TXID_HEADER):
            raise LocalProtocolError(
                f"the header {plain!r} is txmq's own" + (": use tag=" if plain == TAG_HEADER else "")
            )
        stored.append((plain, bytes(content)))
    return stored


def _encoded(what: str, text: str) -> bytes:
    try:
        return str.encode(text)
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise LocalProtocolError(f"{what} is {text[:80]!r}: expected text that UTF-8 can carry") from error
