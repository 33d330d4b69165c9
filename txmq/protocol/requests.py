"""Requests: the server's reader, bytes of one connection in, requests out; the client's encoder, words in, buffers out.

Theory of operation
    ``RequestReader.feed`` takes whatever a read brought and returns every request that is now whole. It does not touch
    what it was given after it returns (the server reads all connections into one buffer); of a connection only the
    unfinished request is kept: its line (less than 4 KiB), or its body so far.

        IDLE --part of a line--> LINE --line end--> BODY --last byte--> IDLE        any of them --violation--> DEAD

    A ``Violation`` that ``closes`` is the last item ever returned: the requests before it are served, it is answered,
    and the connection is closed. A dead reader ignores whatever else arrives. One that does not (a body larger than its
    verb takes) is told as soon as its line is read; its body is read past, kept nowhere, and what follows is served.

    The client builds a ``request`` as text and then reads it back with the broker's own parser
    (``grammar.parse_line``). A request that the broker would refuse, or would understand differently (a blank inside a
    topic, an extension that slid into an argument's place), raises ``LocalProtocolError`` and is not sent. The hot
    ``put`` and the requests of transactions have ``put_line`` and ``transaction_line``, unchecked: reading a line back
    costs far more than writing it.

Invariants
    * Items do not depend on how the stream was cut into reads, errors and their texts included (only 429 does, see
      below): what is wrong first in the stream is what is told.
    * An unknown verb in a well-formed line is refused, and the next line is read: a person types. In capitals (HTTP,
      SSH) it is another protocol.
    * What may be a body is never read as requests: a line of an unknown verb (a newer peer's) that ends as if one
      followed ends the connection.
    * Nothing is waited for that cannot become a line of a request: such a beginning, a byte that is not printable
      (TLS, zero bytes) or a line of 4 KiB ends the connection at once, not at the end of the line.
    * A declared length allocates nothing; bodies grow with the bytes that arrive.
    * Bodies that span reads count against one ``ByteBudget`` of the process, beyond the first 4 KiB of each connection,
      which are its own: a flood of large bodies does not refuse another client's small request. If the budget is used
      up the connection gets 429 and is closed rather than paused: paused connections would each hold part of a body,
      and none of them could finish and give its bytes back.
    * Whole requests belong to the caller and no longer count. ``close`` gives back what an unfinished one holds.
    * Empty lines between requests are skipped (as RFC 9112, section 2.2, has it): a person who types a value in
      telnet ends it with
      Enter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from txmq.errors import BadRequestError, BrokerError, LocalProtocolError, OverloadedError, TooLargeError, caused
from txmq.protocol.grammar import (
    LINE_SIZE_BYTES_MAX,
    NO_OPAQUE,
    UNKNOWN_VERB,
    VERBS,
    GrammarError,
    Parsed,
    parse_line,
    too_large,
)
from txmq.runtime.ports import Buffer

RequestFields = dict[bytes, bytes] | None
Request = tuple[bytes, list[bytes], RequestFields, bytearray | None, bytes]
"""(verb, arguments, extensions, body, opaque). A plain tuple: making a named one costs more."""

OWN_BYTES = 4096  # of an unfinished body, kept without asking the budget
# The two requests that come by the hundred thousand, in one match each: 2 us less than by the table, of the 20 that a
# local transaction costs the broker. Everything else goes through the table, which takes the same and more.
_PLAIN_PUT = re.compile(
    rb"put ([!-<>-~]{1,200}+) (0|[1-9][0-9]{0,9}+) (?:id=([1-9][0-9]{0,9}+) )?"
    rb"(0|[1-9][0-9]{0,9}+) ([0-9A-Za-z]{1,16}+)\r?\n"
).match  # fmt: skip
_PLAIN_COMMIT = re.compile(
    rb"commit ([!-<>-~]{1,200}+) (delayable )?(?:floor=(0|[1-9][0-9]{0,19}+) )?"
    rb"(0|[1-9][0-9]{0,9}+) ([0-9A-Za-z]{1,16}+)\r?\n"
).match  # fmt: skip
_UNPRINTABLE = re.compile(rb"[^ -~]").search
# As a verb is written: no other protocol begins with one and a blank, but for answers of our own.
_WORD = re.compile(rb"(?!(?:result|value)\Z)[a-z]+").fullmatch
_UNKNOWN_REQUEST = re.compile(rb"(?!(?:result|value)(?: |\Z))[a-z]+(?: [!-~]+)*+").fullmatch
_MAY_HAVE_BODY = re.compile(rb" [1-9][0-9]{0,9} [0-9A-Za-z]{1,16}\Z").search
Word = str | int | bytes
Stated = Mapping[str, str | int]  # extensions whose words are known to be sound


class Violation(NamedTuple):
    """The request broke the protocol: answer this and close, unless it says otherwise."""

    code: int
    error_name: str
    text: str
    opaque: bytes
    closes: bool = True


class ByteBudget:
    """Bytes of unfinished bodies over all connections of a process. One thread only."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def reserve(self, size: int) -> bool:
        """Take ``size`` bytes; False, and nothing taken, where they are not there."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        """Give ``size`` bytes back."""
        self.used -= size


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection."""

    request_size_bytes_max: int = 16 << 20
    batch_size_bytes_max: int = 16 << 20


class RequestReader:
    """See the module's docstring. One per connection."""

    __slots__ = ("_budget", "_dead", "_limit", "_line", "_missing", "_pending", "_put_limit", "_reserved")

    def __init__(self, limits: Limits, budget: ByteBudget) -> None:
        self._limit, self._budget = limits.request_size_bytes_max, budget
        self._put_limit = min(limits.batch_size_bytes_max, limits.request_size_bytes_max)
        self._line = b""  # the unfinished line
        self._pending: tuple[Parsed, bytearray] | None = None  # the request whose body is arriving
        self._missing = 0  # bytes of that body, or of one that is read past
        self._reserved = 0  # bytes it has taken from the budget
        self._dead = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished."""
        return not (self._line or self._missing or self._pending)

    def close(self) -> None:
        """Give back what the unfinished request holds; nothing is read any more."""
        self._line, self._pending, self._missing, self._dead = b"", None, 0, True
        self._release()

    def feed(self, data: Buffer) -> list[Request | Violation]:
        """Take in bytes, return what is whole; ``data`` is used only during the call."""
        found: list[Request | Violation] = []
        if self._dead:
            return found
        if self._missing:
            taken = self._grow_body(data, found)
            data = memoryview(data)[taken:]
        if self._line:
            chunk = b"".join((self._line, data))
            self._line = b""
        else:
            chunk = bytes(data)
        position, size = 0, len(chunk)
        while position < size:
            position = self._plain(chunk, position, found) or self._next(chunk, position, found)
        return found

    def _plain(self, chunk: bytes, position: int, found: list[Request | Violation]) -> int:
        """Take a plain ``put`` or ``commit`` that is whole; returns its end, 0 if there is none."""
        match = _PLAIN_PUT(chunk, position)
        if match is not None:
            topic, partition, topic_id, length, opaque = match.groups()
            verb, arguments, given, limit = b"put", [topic, partition], None, self._put_limit
            if topic_id is not None:
                given = {b"id": topic_id}
        else:
            match = _PLAIN_COMMIT(chunk, position)
            if match is None:
                return 0
            txid, delayable, floor, length, opaque = match.groups()
            verb, arguments, given, limit = b"commit", [txid], None, self._limit
            if floor is not None:
                given = {b"floor": floor}
            if delayable is not None:
                given = {b"delayable": b"", **(given or {})}
        start = match.end()
        end = start + int(length)
        if end > len(chunk) or end - start > limit:
            return 0
        found.append((verb, arguments, given, bytearray(chunk[start:end]), opaque))
        return end

    def _next(self, chunk: bytes, position: int, found: list[Request | Violation]) -> int:
        """Take the request, or the beginning of one, at ``position``; returns where to go on."""
        line_end = chunk.find(b"\n", position, position + LINE_SIZE_BYTES_MAX)
        if line_end < 0:
            self._keep_line(chunk[position:], found)
            return len(chunk)
        line = chunk[position:line_end].removesuffix(b"\r")
        if not line:
            return line_end + 1
        try:
            parsed = parse_line(line)  # which takes nothing that is not printable
        except GrammarError as error:
            if _UNPRINTABLE(line):
                self._keep_line(chunk[position:], found)
                return len(chunk)
            is_unknown = _UNKNOWN_REQUEST(line) and line.partition(b" ")[0] not in VERBS
            if is_unknown and not _MAY_HAVE_BODY(line):
                found.append(Violation(BadRequestError.code, BadRequestError.wire_name, str(error), NO_OPAQUE, False))
                return line_end + 1
            self._violate(found, BadRequestError(str(error)), error.opaque)
            return len(chunk)
        return self._take_body(parsed, chunk, line_end + 1, found)

    def _keep_line(self, rest: bytes, found: list[Request | Violation]) -> None:
        """Keep a line that has no end yet, unless it can never become a request; tell what is wrong first in it."""
        wrong = _UNPRINTABLE(rest, 0, LINE_SIZE_BYTES_MAX)
        sound_end = min(len(rest), LINE_SIZE_BYTES_MAX) if wrong is None else wrong.start()
        verb, space, _ = rest[:sound_end].partition(b" ")
        if space and verb not in VERBS and not _WORD(verb):
            self._violate(found, BadRequestError(UNKNOWN_VERB))
        elif wrong is not None and rest[sound_end:LINE_SIZE_BYTES_MAX] != b"\r":  # a last \r: half of the line's end
            self._violate(found, BadRequestError(f"byte 0x{rest[sound_end]:02x} in a line: printable ASCII only"))
        elif len(rest) >= LINE_SIZE_BYTES_MAX:
            self._violate(found, BadRequestError(f"a line is at most {LINE_SIZE_BYTES_MAX} bytes"))
        else:
            self._line = rest

    def _take_body(self, parsed: Parsed, chunk: bytes, start: int, found: list[Request | Violation]) -> int:
        verb, arguments, extensions, length, opaque = parsed
        if length is None:
            found.append((verb, arguments, extensions, None, opaque))
            return start
        if length > self._limit:
            error = TooLargeError(f"a body of {length} bytes is over request_size_bytes_max {self._limit}")
            self._violate(found, error, opaque)
            return len(chunk)
        refusal = self._refusal(parsed, length)
        if refusal is not None:
            found.append(refusal)
            self._missing = length
            return start + self._grow_body(memoryview(chunk)[start:], found)
        end = start + length
        if end <= len(chunk):
            found.append((verb, arguments, extensions, bytearray(chunk[start:end]), opaque))
            return end
        self._pending, self._missing = (parsed, bytearray()), length
        self._grow_body(memoryview(chunk)[start:], found)
        return len(chunk)

    def _refusal(self, parsed: Parsed, length: int) -> Violation | None:
        text = too_large(parsed)
        if parsed.verb == b"put" and length > self._put_limit:
            text = f"a batch of {length} bytes is over batch_size_bytes_max {self._put_limit}"
        if not text:
            return None
        error = TooLargeError(text)
        return Violation(error.code, error.wire_name, text, parsed.opaque, closes=False)

    def _grow_body(self, data: Buffer, found: list[Request | Violation]) -> int:
        """Take up to the missing bytes of the pending body, or read past those of a refused one; returns how many."""
        piece = memoryview(data)[: self._missing]
        if self._pending is None:
            self._missing -= len(piece)
            return len(piece)
        parsed, body = self._pending
        if not self._reserve(len(body) + len(piece)):
            text = "the broker holds too many unfinished requests; try again later"
            self._violate(found, OverloadedError(text), parsed.opaque)
            return len(data)
        body += piece
        self._missing -= len(piece)
        if not self._missing:
            self._pending = None
            self._release()
            found.append((parsed.verb, parsed.arguments, parsed.extensions, body, parsed.opaque))
        return len(piece)

    def _reserve(self, body_size: int) -> bool:
        wanted = max(0, body_size - OWN_BYTES) - self._reserved
        if not self._budget.reserve(wanted):
            return False
        self._reserved += wanted
        return True

    def _release(self) -> None:
        self._budget.release(self._reserved)
        self._reserved = 0

    def _violate(self, found: list[Request | Violation], error: BrokerError, opaque: bytes = NO_OPAQUE) -> None:
        self.close()
        found.append(Violation(error.code, error.wire_name, str(error), opaque))


def request(
    verb: str,
    *arguments: Word,
    extensions: Mapping[str, Word | None] | None = None,
    body: Sequence[Buffer] | None = None,
    opaque: bytes = b"",
) -> list[Buffer]:
    """Encode any request.

    Args:
        verb: a verb of docs/protocol.md.
        arguments: its words; numbers are written as decimals.
        extensions: ``name=value`` words; None as value means a bare word (``raw``, ``fence``).
        body: buffers that make up the body; None for verbs without one.
        opaque: the token; empty for the verbs that need none.

    Returns:
        The line, then the body's buffers, to be sent in this order.

    Raises:
        LocalProtocolError: the protocol cannot carry it.
    """
    head = [_word(verb), *(_word(argument) for argument in arguments)]
    given = {_word(name): b"" if value is None else _word(value) for name, value in (extensions or {}).items()}
    flags = {_word(name) for name, value in (extensions or {}).items() if value is None}
    words = [*head, *(name if name in flags else name + b"=" + value for name, value in given.items())]
    length = None if body is None else sum(memoryview(buffer).nbytes for buffer in body)
    if length is not None:
        words.append(b"%d" % length)
    if opaque:
        words.append(opaque)
    line = b" ".join(words)
    _check(line, head, given, length, opaque or NO_OPAQUE)
    return [line + b"\r\n", *(body or ())]


def put_line(topic: bytes, partition: int, length: int, opaque: bytes, topic_id: int = 0) -> bytes:
    """The line of a plain ``put``, with a topic's id unless it is 0.

    Unchecked: topic (``is_valid_name``) and token are known to be sound.
    """
    if topic_id:
        return b"put %b %d id=%d %d %b\r\n" % (topic, partition, topic_id, length, opaque)
    return b"put %b %d %d %b\r\n" % (topic, partition, length, opaque)


def transaction_line(head: str, extensions: Stated, length: int | None, opaque: bytes) -> bytes:
    """The line of a transaction's request. Unchecked: the token and every word are known to be sound.

    Args:
        head: the verb, the text of a ``TxId``, and what other arguments there are.
        extensions: numbers, hex, and names that are valid (``is_valid_name``).
        length: of the body; None for verbs without one.
    """
    line = f"{head} "
    for name, value in extensions.items():
        line += f"{name}={value} "
    if length is not None:
        line += f"{length} "
    return line.encode("ascii") + opaque + b"\r\n"


def _word(value: Word) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int):
        return b"%d" % value
    try:
        return value.encode("ascii")
    except UnicodeEncodeError as error:
        raise caused(LocalProtocolError(f"{value[:40]!r} is not ASCII"), error) from error


def _check(line: bytes, head: list[bytes], given: dict[bytes, bytes], length: int | None, opaque: bytes) -> None:
    if len(line) + 2 > LINE_SIZE_BYTES_MAX:
        raise LocalProtocolError(f"a line of {len(line) + 2} bytes is longer than {LINE_SIZE_BYTES_MAX}")
    try:
        parsed = parse_line(line)
    except GrammarError as error:
        raise caused(LocalProtocolError(str(error)), error) from error
    meant = ([] if head[1:] == [b"*"] and parsed.arguments == [] else head[1:], given, length, opaque)
    if (parsed.arguments, parsed.extensions or {}, parsed.length, parsed.opaque) != meant:
        raise LocalProtocolError(f"{line[:80]!r} would be read in another way than it was meant")
