"""The grammar of requests as one table: what every verb takes. Source: docs/protocol.md.

``<verb> <arguments...> [<extensions...>] [<body length>] <opaque>``: single spaces, printable ASCII, unsigned decimals
without leading zeros. A test holds this table against the page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

LINE_SIZE_BYTES_MAX = 4096
OPAQUE_SIZE_MAX = 16
NO_OPAQUE = b"-"
ERROR_SIZE_BYTES_MAX = 1024

_PRINTABLE = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\Z")
_OPAQUE = re.compile(rb"[0-9A-Za-z]{1,16}\Z")
_SHORT = re.compile(rb"(?:0|[1-9][0-9]{0,9})\Z")
_LONG = re.compile(rb"(?:0|[1-9][0-9]{0,19})\Z")
_HEX = re.compile(rb"[0-9a-f]{32}\Z")
_NAME = re.compile(rb"[!-<>-~]+\Z")  # printable, no space, no '='

is_printable = _PRINTABLE.match
is_opaque = _OPAQUE.match
is_number = _SHORT.match  # at most 10 digits
is_long_number = _LONG.match  # at most 20 digits: offsets and times
is_hex32 = _HEX.match
is_word = _NAME.match


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        arguments: names of the fixed arguments, in order; a leading ``#`` marks a decimal, ``##`` one of up to 20 digits.
        extensions: name -> kind of value: ``flag`` (a bare word), ``number``, ``long``, ``hex32``, ``text``.
        any_extension: also words that are not listed (topic settings).
        has_body: a length stands before the opaque.
        opaque_optional: ``stats version help quit``: at most one word before it, the answer may carry ``-``.
    """

    name: bytes
    arguments: tuple[str, ...] = ()
    extensions: dict[bytes, str] = field(default_factory=dict)
    any_extension: bool = False
    has_body: bool = False
    opaque_optional: bool = False
    teaches: str = ""


_STREAMED = {b"parts": "number", b"bytes": "number", b"crc": "number"}
_TABLE = (
    Verb(b"hello", ("#protocol", "client"), {b"session": "text"}, teaches="introduce a client; session=new|none|<id>.<epoch>"),
    Verb(b"meta", ("topic",), teaches="describe a topic, or all with *"),
    Verb(
        b"put", ("topic", "#partition"), {b"raw": "flag", b"key": "text", b"tx": "text"}, has_body=True,
        teaches="one record batch, or with raw a plain value: put orders 0 raw 5 1",
    ),
    Verb(
        b"get", ("topic", "#partition", "##offset", "#max-bytes"), {b"wait": "number"},
        teaches="read whole batches from an offset: get orders 0 0 65536 1",
    ),
    Verb(b"offset", ("topic", "#partition", "when"), teaches="earliest, latest or a time in ms: offset orders 0 latest 1"),
    Verb(
        b"prepare", ("txid", "kind"),
        {b"resource": "text", b"uuid": "hex32", b"deadline": "long", b"floor": "long", **_STREAMED}, has_body=True,
        teaches="store a transaction's messages until it is decided",
    ),
    Verb(b"commit", ("txid",), {b"floor": "long", **_STREAMED}, has_body=True, teaches="decide or settle a transaction"),
    Verb(b"rollback", ("txid",), {b"floor": "long"}, teaches="roll a transaction back"),
    Verb(b"outcome", ("txid",), {b"fence": "flag"}, teaches="what became of a transaction; fence: roll an absent one back"),
    Verb(
        b"recover", (), {b"uuid": "hex32", b"after": "text", b"limit": "number"},
        teaches="list prepared transactions, oldest first",
    ),
    Verb(b"topic", ("action", "name"), any_extension=True, teaches="create, alter, describe, delete, list: topic create orders partitions=4 1"),
    Verb(b"ping", teaches="is the broker there? ping 1"),
    Verb(b"stats", opaque_optional=True, teaches="figures; stats help lists the items"),
    Verb(b"version", opaque_optional=True, teaches="name and version"),
    Verb(b"help", opaque_optional=True, teaches="this text, or help <verb>"),
    Verb(b"quit", opaque_optional=True, teaches="close the connection"),
)  # fmt: skip
VERBS: dict[bytes, Verb] = {verb.name: verb for verb in _TABLE}


class GrammarError(ValueError):
    """A line that breaks the grammar; ``opaque`` is ``-`` where none could be read."""

    def __init__(self, text: str, opaque: bytes = NO_OPAQUE) -> None:
        super().__init__(text)
        self.opaque = opaque


class Parsed(NamedTuple):
    """One line, taken apart; ``length`` is None for verbs without a body."""

    verb: bytes
    arguments: list[bytes]
    extensions: dict[bytes, bytes] | None
    length: int | None
    opaque: bytes


def parse_line(line: bytes) -> Parsed:
    """Take one line apart, without its end.

    Raises:
        GrammarError: the text says how the verb is written.
    """
    return parse_words(line.split(b" "))


def usage(verb: Verb) -> str:
    """One line: how the verb is written."""
    words = [verb.name.decode()]
    words += [f"<{name.lstrip('#')}>" for name in verb.arguments]
    words += [
        f"[{name.decode()}]" if kind == "flag" else f"[{name.decode()}=...]" for name, kind in verb.extensions.items()
    ]
    if verb.any_extension:
        words.append("[setting=value...]")
    if verb.has_body:
        words.append("<length>")
    if verb.opaque_optional:
        words.append("[verb]" if verb.name == b"help" else "[item]" if verb.name == b"stats" else "")
    words.append("[opaque]" if verb.opaque_optional else "<opaque>")
    return " ".join(filter(None, words))


def help_text(name: str | None = None) -> str:
    """What ``help`` answers: all verbs, or one."""
    chosen = [verb for verb in _TABLE if name in (None, verb.name.decode())]
    if not chosen:
        return f"no verb {name!r}; type: help\n"
    return "".join(f"{usage(verb)}\n    {verb.teaches}\n" for verb in chosen)


def parse_words(words: list[bytes]) -> Parsed:
    """``parse_line`` for a line that is split already."""
    verb = VERBS.get(words[0])
    if verb is None:
        raise GrammarError("unknown verb; type: help")
    if verb.opaque_optional:
        return _parse_short(verb, words)
    opaque = words[-1]
    if not is_opaque(opaque) or len(words) < 2:
        raise GrammarError(f"the line ends with an opaque of 1 to 16 letters and digits: {usage(verb)}")
    rest = words[1:-1]
    length: int | None = None
    if verb.has_body:
        if not rest or not is_number(rest[-1]):
            raise GrammarError(f"the body's length stands before the opaque: {usage(verb)}", opaque)
        length = int(rest.pop())
    count = len(verb.arguments)
    if len(rest) < count:
        raise GrammarError(f"arguments are missing: {usage(verb)}", opaque)
    arguments = rest[:count]
    _check_arguments(verb, arguments, opaque)
    extensions = _extensions(verb, rest[count:], opaque) if len(rest) > count else None
    return Parsed(verb.name, arguments, extensions, length, opaque)


def _parse_short(verb: Verb, words: list[bytes]) -> Parsed:
    rest = words[1:]
    takes_word = verb.name in (b"stats", b"help")
    opaque = rest.pop() if len(rest) == (2 if takes_word else 1) else NO_OPAQUE
    if len(rest) > takes_word or (opaque != NO_OPAQUE and not is_opaque(opaque)):
        raise GrammarError(f"too many words: {usage(verb)}")
    if any(not is_word(word) for word in rest):
        raise GrammarError(f"not a word: {usage(verb)}", opaque)
    return Parsed(verb.name, [] if rest in ([b"*"], [b"-"]) else rest, None, None, opaque)


def _check_arguments(verb: Verb, arguments: list[bytes], opaque: bytes) -> None:
    for name, value in zip(verb.arguments, arguments, strict=True):
        if name.startswith("##"):
            fits = is_long_number(value)
        elif name.startswith("#"):
            fits = is_number(value)
        else:
            fits = is_word(value)
        if not fits:
            raise GrammarError(f"{name.lstrip('#')} is malformed: {usage(verb)}", opaque)


_KINDS = {
    "number": is_number,
    "long": is_long_number,
    "hex32": is_hex32,
    "text": is_printable,
}


def _extensions(verb: Verb, words: list[bytes], opaque: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for word in words:
        name, equals, value = word.partition(b"=")
        kind = verb.extensions.get(name)
        if kind is None and verb.any_extension and equals:
            kind = "text"
        if kind is None:
            raise GrammarError(f"unknown extension: {usage(verb)}", opaque)
        if name in found:
            raise GrammarError("an extension stands twice", opaque)
        if bool(equals) == (kind == "flag") or (equals and not _KINDS[kind](value)) or not is_word(name):
            raise GrammarError(f"extension {name.decode('ascii', 'replace')[:40]} is malformed", opaque)
        found[name] = value
    return found
