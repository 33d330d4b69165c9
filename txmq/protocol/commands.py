"""The client's side of a request: words and body in, buffers to send out.

A request is built as text and then read back with the broker's own parser (``grammar.parse_line``). A request
that the broker would refuse, or would understand differently (a blank inside a topic, an extension that slid into an
argument's place), raises ``LocalProtocolError`` and is not sent. The hot ``put`` and the requests of transactions have
``put_line`` and ``transaction_line``, unchecked: reading a line back costs far more than writing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from txmq.errors import LocalProtocolError, caused
from txmq.protocol.grammar import LINE_SIZE_BYTES_MAX, NO_OPAQUE, GrammarError, parse_line

Buffer = bytes | bytearray | memoryview
Word = str | int | bytes
Stated = Mapping[str, str | int]  # extensions whose words are known to be sound


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
