"""Answers: the broker's encoders and the client's reader.

Byte layout
    ``result <code> <length> <opaque>\\r\\n<body>`` with code 200 or 400 to 599. The body is empty or lines of text, the
    last one ended too: in a terminal the next answer begins on a line of its own. That of an error is
    ``<error-name> <text>\\n``.
    ``value <length> <opaque>\\r\\n<record batches>``, whose code is 200; they are binary, and have no end of their own.

Theory of operation
    ``AnswerReader.feed`` mirrors ``RequestReader.feed``: whole answers out, only the unfinished one is kept, and what
    it was given may be overwritten afterwards. It is strict, because a client that guesses where an answer ends
    acknowledges the wrong message. Answers that arrived whole before a fault count: they are handed out, ``failure`` is
    set, and the next ``feed`` raises; a fault with nothing before it raises at once.

Invariants
    * A declared length allocates nothing; bodies grow with what arrives, in amortised linear time.
    * Text from outside in an error (names, values) leaves as printable ASCII: a log line stays one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from typing import NamedTuple

from txmq.errors import BrokerError, RemoteProtocolError
from txmq.protocol.grammar import ERROR_SIZE_BYTES_MAX
from txmq.protocol.requests import Violation

Answer = tuple[int, bytes, bytes, bool]
"""(code, opaque, body, is_value)"""

BODY_SIZE_BYTES_MAX = 64 << 20  # longest answer a reader takes by default; a get may ask for several batches of 16 MiB
_LINE_SIZE_BYTES_MAX = 64  # the longest, "result 200 <10 digits> <16 of opaque>\r\n", has 40
_NEWLINE = 10
_OUTSIDE_PRINTABLE = re.compile(r"[^ -~]")


# --- written by the broker -------------------------------------------------------------------------------------------


class Records(NamedTuple):
    """A reply that is binary: record batches, parts, half messages."""

    content: bytes


Reply = bytes | int | Records | BrokerError | Violation
"""An answer: the text of a 200, the offset of a put, binary content, or a refusal."""


def encode(opaque: bytes, reply: Reply) -> bytes:
    """The answer to one request."""
    if isinstance(reply, bytes):
        return result(200, opaque, reply)
    if isinstance(reply, int):
        line = b"%d\n" % reply
        return b"result 200 %d %b\r\n%b" % (len(line), opaque, line)
    if isinstance(reply, Records):
        return value_header(len(reply.content), opaque) + reply.content
    return violation(reply) if isinstance(reply, Violation) else error(reply, opaque)


def encode_all(replies: list[tuple[bytes, Reply]]) -> bytes:
    """The answers to several requests, one after the other.

    Hot for puts: how long an offset's line is is found out when that changes.
    """
    pieces: list[bytes] = []
    size = low = high = 0
    for opaque, reply in replies:
        if type(reply) is int:
            if not low <= reply < high:
                size = len(b"%d\n" % reply)
                low, high = 10 ** (size - 2) if reply else 0, 10 ** (size - 1)
            pieces.append(b"result 200 %d %b\r\n%d\n" % (size, opaque, reply))
        else:
            pieces.append(encode(opaque, reply))
    return b"".join(pieces)


def size_of(reply: Reply) -> int:
    """How long an answer's body is; of a line alone, as good as nothing."""
    if isinstance(reply, Records):
        return len(reply.content)
    return len(reply) if isinstance(reply, bytes) else 0


def result(code: int, opaque: bytes, body: bytes = b"") -> bytes:
    """A whole ``result`` answer. A body whose last line has no end gets it here."""
    if not body or body[-1] == _NEWLINE:
        return b"result %d %d %b\r\n%b" % (code, len(body), opaque, body)
    return b"result %d %d %b\r\n%b\n" % (code, len(body) + 1, opaque, body)


def value_header(length: int, opaque: bytes) -> bytes:
    """The line before ``length`` bytes of record batches."""
    return b"value %d %b\r\n" % (length, opaque)


def error(exception: BrokerError, opaque: bytes) -> bytes:
    """The answer to a request that is refused; the connection stays open."""
    return result(exception.code, opaque, _error_body(exception.wire_name, str(exception)))


def violation(violation: Violation) -> bytes:
    """The answer to a request that broke the protocol."""
    return result(violation.code, violation.opaque, _error_body(violation.error_name, violation.text))


def _error_body(name: str, text: str) -> bytes:
    text = text[:ERROR_SIZE_BYTES_MAX]
    body = f"{name} {_OUTSIDE_PRINTABLE.sub(_escaped, text)}".encode("ascii")
    if len(body) >= ERROR_SIZE_BYTES_MAX:  # with its line end
        body = body[: ERROR_SIZE_BYTES_MAX - 4] + b"..."
    return body


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


# --- read by the client ----------------------------------------------------------------------------------------------

_LINE = re.compile(
    rb"(?:result (200|[45][0-9][0-9])|value) (0|[1-9][0-9]{0,9}) ([0-9A-Za-z]{1,16}|-)\r\n"
).match  # fmt: skip
# The beginning of such a line, so that a peer that is no broker is found out before a line end arrives.
_BEGINNING = re.compile(
    rb"r|re|res|resu|resul|result|result |result (?:2|20|200|[45][0-9]{0,2})|v|va|val|valu|value|value "
    rb"|(?:result (?:200|[45][0-9][0-9])|value) (?:(?:0|[1-9][0-9]{0,9})(?: (?:-|[0-9A-Za-z]{1,16})?\r?)?)?"
).fullmatch
_CODES = {b"200": 200, None: 200}


class AnswerReader:
    """Reads one connection's answers; see the module's docstring.

    Attributes:
        failure: the error that ended the connection, or None.
    """

    __slots__ = ("_body", "_body_size_bytes_max", "_head", "_line", "_missing", "failure")

    def __init__(self, body_size_bytes_max: int = BODY_SIZE_BYTES_MAX) -> None:
        self.failure: RemoteProtocolError | None = None
        self._body_size_bytes_max = body_size_bytes_max
        self._line = b""
        self._head: tuple[int, bytes, bool] | None = None  # code, opaque, is_value of the answer whose body is arriving
        self._body = BytesIO()
        self._missing = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether part of an answer has arrived."""
        return self._head is not None or self._line != b""

    def feed(self, data: bytes | bytearray | memoryview) -> list[Answer]:
        """Take in what was read, return the answers that are whole.

        Raises:
            RemoteProtocolError: the peer sent something that is no answer; the connection is of no more use.
        """
        if self.failure is not None:
            raise self.failure
        answers: list[Answer] = []
        if self._head is not None:
            taken = self._continue_body(data, answers)
            if taken == len(data):
                return answers
            data = memoryview(data)[taken:]
        if self._line:
            chunk = b"".join((self._line, data))
            self._line = b""
        else:
            chunk = bytes(data)
        self._read(chunk, answers)
        if not answers:
            self._require_sound()
        return answers

    def _require_sound(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _read(self, chunk: bytes, answers: list[Answer]) -> None:
        position, size, append, size_max = 0, len(chunk), answers.append, self._body_size_bytes_max
        while position < size:
            match = _LINE(chunk, position)
            if match is None:
                self._keep_line(chunk[position:])
                return
            code, length, opaque = match.groups()
            start = match.end()
            end = start + int(length)
            if end - start > size_max:
                self.failure = RemoteProtocolError(f"an answer of {end - start} bytes is over the limit of {size_max}")
                return
            number = _CODES.get(code) or int(code)
            if end > size:
                self._head, self._missing = (number, opaque, code is None), end - size
                self._body = BytesIO()
                self._body.write(memoryview(chunk)[start:])
                return
            append((number, opaque, chunk[start:end], code is None))
            position = end

    def _keep_line(self, tail: bytes) -> None:
        """Keep the beginning of an answer's line; anything else is a fault, at its first wrong byte."""
        if _BEGINNING(tail[:_LINE_SIZE_BYTES_MAX]) is None:
            self.failure = RemoteProtocolError(f"the peer does not speak txmq's protocol: {tail[:40]!r}")
        else:
            self._line = tail

    def _continue_body(self, data: bytes | bytearray | memoryview, answers: list[Answer]) -> int:
        assert self._head is not None
        piece = memoryview(data)[: self._missing]
        self._body.write(piece)
        self._missing -= len(piece)
        if not self._missing:
            code, opaque, is_value = self._head
            answers.append((code, opaque, self._body.getvalue(), is_value))  # no copy: the buffer becomes the bytes
            self._head, self._body = None, BytesIO()
        return len(piece)


# --- errors ----------------------------------------------------------------------------------------------------------


def _by_wire_name(kind: type[BrokerError]) -> Iterator[tuple[str, type[BrokerError]]]:
    yield kind.wire_name, kind
    for narrower in kind.__subclasses__():
        yield from _by_wire_name(narrower)


_BY_WIRE_NAME = dict(reversed([*_by_wire_name(BrokerError)]))  # of two with one name the broader one


def broker_error(code: int, body: bytes) -> BrokerError:
    """Turn an error answer into its exception.

    Args:
        code: the answer's code, 400 to 599.
        body: ``<wire-name> <text>\\n`` in UTF-8.
    """
    text = body.decode("utf-8", "replace").removesuffix("\n")
    name, _, rest = text.partition(" ")
    return _BY_WIRE_NAME[name](rest) if name in _BY_WIRE_NAME else BrokerError(f"{code} {text}")
