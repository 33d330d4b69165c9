"""The grammar of requests as one table: the arguments of every verb, and the parser that obeys it. Source:
docs/protocol.md.

Theory of operation
    ``<verb> <arguments...> [<extensions...>] [<body length>] <opaque>``: words of printable ASCII parted by single
    spaces. A verb has a fixed number of arguments; the last word is the opaque, the one before it the length of the
    body, if the verb has one; the words between are extensions, ``name=value`` or a declared bare word. The
    server's reader, the client's encoder, ``help`` and the page (a test holds it against this table) know verbs from
    here only.

    ``stats version help quit`` are typed by people and need no opaque. ``stats`` and ``help`` take one optional word,
    so their only word is that; ``*`` (or ``-``) stands for "everything" if an opaque must follow, as in
    ``stats * 7``, and is handed over as no argument.

Invariants
    * Syntax only: whether a topic, a setting or a transaction exists is the broker's business.
    * Arguments and names hold no ``=``, so an argument is never taken for an extension, nor the other way round.
    * Decimals have no sign and no leading zeros: a number has one text.
    * ``parse_line`` raises nothing but ``GrammarError``, whatever bytes it is given, and takes printable ASCII only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

LINE_SIZE_BYTES_MAX = 4096  # with its end; memcached takes 2048, HTTP servers 8190
OPAQUE_SIZE_MAX = 16
NO_OPAQUE = b"-"  # in an answer to a request that had none
ERROR_SIZE_BYTES_MAX = 1024
OFFSETS_SIZE_BYTES_MAX = 256 << 10  # what ``offsets=`` may say
GROUP_SIZE_BYTES_MAX = 256 << 10  # two texts about what is deferred, 64 KiB each, with all of it escaped
QUERY_SIZE_BYTES_MAX = 1 << 20  # some 15,000 txids
RESOURCE_SIZE_BYTES_MAX = 16 << 10  # twenty branches
USER_SIZE_BYTES_MAX = 4 << 10
UNKNOWN_VERB = "unknown verb; type: help"

_Matcher = Callable[[bytes], object]

is_opaque: _Matcher = re.compile(rb"[0-9A-Za-z]{1,16}").fullmatch
is_number: _Matcher = re.compile(rb"0|[1-9][0-9]{0,9}").fullmatch  # at most 10 digits
is_long_number: _Matcher = re.compile(rb"0|[1-9][0-9]{0,19}").fullmatch  # at most 20 digits: offsets and times
is_hex16: _Matcher = re.compile(rb"[0-9a-f]{16}").fullmatch
is_hex32: _Matcher = re.compile(rb"[0-9a-f]{32}").fullmatch
is_word: _Matcher = re.compile(rb"[!-<>-~]+").fullmatch  # printable, no space, no '='
is_text: _Matcher = re.compile(rb"[!-~]+").fullmatch  # printable, no space
is_place: _Matcher = re.compile(rb"earliest|latest|0|[1-9][0-9]{0,19}").fullmatch
is_flag: _Matcher = re.compile(rb"(?!)").fullmatch  # a bare word: no value fits
is_session: _Matcher = re.compile(rb"new|none|[0-9a-f]{1,16}\.(?:0|[1-9][0-9]{0,9})\.[0-9a-f]{32}").fullmatch

_KINDS = {
    "number": is_number, "long": is_long_number, "hex16": is_hex16, "hex32": is_hex32, "session": is_session,
    "text": is_text, "flag": is_flag,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        arguments: names of the fixed arguments; a leading ``#`` marks a decimal, ``##`` one of up to 20 digits,
            ``@`` earliest, latest or a time in ms.
        extensions: name -> kind of value, a key of ``_KINDS``; ``flag`` is a bare word.
        any_extension: also words that are not listed (topic settings).
        has_body: a length stands before the opaque.
        body_size_bytes_max: of that body, if it is less than a record batch or the parts of a transaction may
            have, else 0. A body that is read as JSON, or line by line, has a limit of its own: it costs 100 times
            its size in memory, and the loop's time, before a fault in it is found.
        number_max: of an extension that is a number.
        opaque_optional: ``stats version help quit``: the answer may carry ``-``.
        optional: a word that may stand before that opaque.
        teaches: what ``help`` says.
    """

    name: bytes
    arguments: tuple[str, ...] = ()
    extensions: dict[bytes, str] = field(default_factory=dict)
    any_extension: bool = False
    has_body: bool = False
    body_size_bytes_max: int = 0
    number_max: dict[bytes, int] = field(default_factory=dict)
    opaque_optional: bool = False
    optional: str = ""
    teaches: str = ""


_STREAMED = {b"offsets": "number", b"parts": "number", b"bytes": "long", b"crc": "number"}
_STREAMED_MAX = {b"offsets": OFFSETS_SIZE_BYTES_MAX}
_TABLE = (
    Verb(
        b"hello", ("#protocol", "client"), {b"session": "session", b"home": "hex16", b"replica": "flag"},
        teaches="introduce a client; session=new|none|<hex>.<epoch>.<secret>; replica: it may read a copy",
    ),
    Verb(b"end", ("##counter",), teaches="the session is over; counter: of its newest transaction, or 0: end 0 1"),
    Verb(b"meta", ("topic",), teaches="describe a topic, or all with *"),
    Verb(
        b"put", ("topic", "#partition"), {b"raw": "flag", b"key": "text", b"tx": "text", b"id": "number"},
        has_body=True, teaches="one record batch, or with raw a plain value: put orders 0 raw 5 1",
    ),
    Verb(
        b"get", ("topic", "#partition", "##offset", "#max-bytes"), {b"wait": "number", b"log": "text"},
        teaches="read whole batches from an offset: get orders 0 0 65536 1",
    ),
    Verb(
        b"offset", ("topic", "#partition", "@when"), {b"log": "flag"},
        teaches="earliest, latest or a time in ms: offset orders 0 latest 1",
    ),
    Verb(
        b"prepare", ("txid", "kind"),
        {
            b"resource": "text", b"uuid": "hex32", b"table": "text", b"group": "text", b"xid": "text",
            b"query": "text", b"epoch": "long", b"batch": "long", b"task": "number", b"attempt": "number",
            b"of": "text", b"held": "flag", b"homes": "text", b"deadline": "long", b"floor": "long", **_STREAMED,
        }, has_body=True, number_max=_STREAMED_MAX,
        teaches="store a transaction's messages until it is decided",
    ),
    Verb(
        b"commit", ("txid",),
        {
            b"delayable": "flag", b"heuristic": "text", b"homes": "text", b"floor": "long", b"outbox": "hex32",
            b"name": "text", b"after": "text", **_STREAMED,
        }, has_body=True, number_max=_STREAMED_MAX,
        teaches="decide a local transaction, or settle a prepared one; outbox: a page of a database's outbox, after "
        "the one before",
    ),
    Verb(
        b"decide", ("txid",), {b"branches": "number", b"homes": "text", b"floor": "long", **_STREAMED}, has_body=True,
        number_max=_STREAMED_MAX,
        teaches="commit messages together with branches that are prepared in databases",
    ),
    Verb(
        b"complete", ("txid",),
        {b"uuid": "hex32", b"branch": "text", b"of": "text", b"for": "text", b"heuristic": "text", b"reason": "text"},
        teaches="one branch of a decided transaction has committed",
    ),
    Verb(
        b"rollback", ("txid",),
        {
            b"heuristic": "text", b"floor": "long", b"hazard": "text", b"resource": "text", b"uuid": "hex32",
            b"kind": "text",
        }, teaches="roll a transaction back",
    ),
    Verb(
        b"outcome", ("txid",),
        {b"fence": "flag", b"owner": "flag", b"branch": "text", b"of": "text", b"for": "text", b"uuid": "hex32"},
        teaches="what became of a transaction, or of its branch in a database (uuid); fence: roll an absent one back; "
        "owner: is it connected?",
    ),
    Verb(
        b"recover", (),
        {
            b"state": "text", b"uuid": "hex32", b"xid": "text", b"txid": "text", b"after": "text", b"limit": "number",
        },
        teaches="list transactions in doubt, oldest first",
    ),
    Verb(b"parts", ("txid",), {b"after": "number"}, teaches="the messages of a prepared transaction"),
    Verb(
        b"token", ("uuid", "token"), {b"after": "hex32", b"adopted": "flag"},
        teaches="the fencing token that was drawn in a database, after the one before",
    ),
    Verb(
        b"outbox", ("uuid",), {b"forget": "flag"},
        teaches="the newest page of an outbox; forget: drop what is known of it",
    ),
    Verb(b"forget", ("txid",), teaches="forget a heuristic outcome"),
    Verb(
        b"checks", ("group",), {b"limit": "number", b"wait": "number"},
        teaches="half messages of a producer group that wait for an answer",
    ),
    Verb(
        b"topic", ("action", "name"), any_extension=True,
        teaches="create, alter, describe, delete, list: topic create orders partitions=4 1",
    ),
    Verb(
        b"group", ("action", "group"),
        {
            b"member": "text", b"topics": "text", b"strategy": "text", b"timeout": "number", b"view": "number",
            b"wait": "number", b"order": "long", b"alone": "flag", b"create": "flag", b"more": "flag", b"grant": "long",
            b"incarnation": "text",
        }, has_body=True, body_size_bytes_max=GROUP_SIZE_BYTES_MAX,
        teaches="join, heartbeat, elsewhere, leave, save, describe, list, reset, delete: group describe billing 0 1",
    ),
    Verb(
        b"query", ("action", "query"), {b"epoch": "long", b"batch": "long", b"digest": "text"}, has_body=True,
        body_size_bytes_max=QUERY_SIZE_BYTES_MAX,
        teaches="epoch, open, commit, abort, list, delete: batches of parallel writers: query list * 0 1",
    ),
    Verb(
        b"resource", ("action", "resource"), has_body=True, body_size_bytes_max=RESOURCE_SIZE_BYTES_MAX,
        teaches="report, list: what resolvers see in databases: resource list * 0 1",
    ),
    Verb(
        b"cluster", ("action",), {b"home": "text", b"reason": "text"},
        teaches="describe, homes: who leads what; retire: a home is lost for ever: cluster describe 1",
    ),
    Verb(
        b"follow", ("home", "##lsn"),
        {b"replica": "hex32", b"chain": "number", b"forced": "long", b"folded": "long", b"wait": "number"},
        teaches="a piece of the home's journal, for a replica",
    ),
    Verb(
        b"auth", ("mechanism",), has_body=True, body_size_bytes_max=USER_SIZE_BYTES_MAX,
        teaches="log in: scram-sha-256 (twice), plain, external: auth external 0 1",
    ),
    Verb(
        b"user", ("action", "user"), has_body=True, body_size_bytes_max=USER_SIZE_BYTES_MAX,
        teaches="add, passwd, remove, list: who is known here: user list * 0 1",
    ),
    Verb(
        b"acl", ("action", "user"),
        {
            b"may": "text", b"topic": "text", b"group": "text", b"resource": "text", b"broker": "text",
            b"cluster": "flag",
        },
        teaches="grant, revoke, list: acl grant shop may=read,write topic=orders* 1",
    ),
    Verb(
        b"quota", ("action", "kind", "name"),
        {b"bytes_per_s": "long", b"requests_per_s": "long", b"connections_max": "long", b"unsettled_max": "long"},
        teaches="set, remove, list: limits of a user or a topic: quota set user shop requests_per_s=100 1",
    ),
    Verb(b"ping", teaches="is the broker there? ping 1"),
    Verb(b"stats", opaque_optional=True, optional="item", teaches="figures; stats help lists the items"),
    Verb(b"version", opaque_optional=True, teaches="name and version"),
    Verb(b"help", opaque_optional=True, optional="verb", teaches="this text, or help <verb>"),
    Verb(b"quit", opaque_optional=True, teaches="close the connection"),
)  # fmt: skip
VERBS: dict[bytes, Verb] = {verb.name: verb for verb in _TABLE}


_LETTERS = "abcdefghijklmnopqrstuvwxyz-"


def _checks(verb: Verb) -> tuple[_Matcher, ...]:
    kinds = {"": is_word, "#": is_number, "##": is_long_number, "@": is_place}
    return tuple(kinds[name.rstrip(_LETTERS)] for name in verb.arguments)


_CHECKS = {verb.name: _checks(verb) for verb in _TABLE}
_EXTENSIONS = {verb.name: {name: _KINDS[kind] for name, kind in verb.extensions.items()} for verb in _TABLE}


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
    words = line.split(b" ")
    name = words[0]
    verb = VERBS.get(name)
    if verb is None:
        raise GrammarError(UNKNOWN_VERB)
    if verb.opaque_optional:
        return _parse_short(verb, words)
    end, length = len(words) - 1, None
    opaque = words[end]
    if not end or not is_opaque(opaque):
        raise GrammarError(f"the line ends with an opaque of 1 to 16 letters and digits: {usage(verb)}")
    if verb.has_body:
        end -= 1
        if not end or not is_number(words[end]):
            raise GrammarError(f"the body's length stands before the opaque: {usage(verb)}", opaque)
        length = int(words[end])
    checks = _CHECKS[name]
    start = 1 + len(checks)
    if end < start:
        raise GrammarError(f"arguments are missing: {usage(verb)}", opaque)
    arguments = words[1:start]
    for number, fits in enumerate(checks):
        if not fits(arguments[number]):
            raise GrammarError(f"{verb.arguments[number].lstrip('#@')} is malformed: {usage(verb)}", opaque)
    extensions = _parse_extensions(verb, words[start:end], opaque) if end > start else None
    return Parsed(name, arguments, extensions, length, opaque)


def _parse_short(verb: Verb, words: list[bytes]) -> Parsed:
    rest = words[1:]
    places = 1 if verb.optional else 0
    opaque = rest.pop() if len(rest) == places + 1 else NO_OPAQUE
    if len(rest) > places:
        raise GrammarError(f"too many words: {usage(verb)}")
    if opaque is not NO_OPAQUE and not is_opaque(opaque):
        raise GrammarError(f"the opaque has 1 to 16 letters and digits: {usage(verb)}")
    if not all(is_word(word) for word in rest):
        raise GrammarError(f"not a word: {usage(verb)}", opaque)
    return Parsed(verb.name, [] if rest in ([b"*"], [b"-"]) else rest, None, None, opaque)


def _parse_extensions(verb: Verb, words: list[bytes], opaque: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    kinds = _EXTENSIONS[verb.name]
    for word in words:
        name, equals, value = word.partition(b"=")
        fits = kinds.get(name)
        if fits is None and verb.any_extension and equals and is_word(name):
            fits = is_text
        if fits is None:
            raise GrammarError(f"unknown extension: {usage(verb)}", opaque)
        if name in found:
            raise GrammarError("an extension stands twice", opaque)
        if not fits(value) if equals else fits is not is_flag:
            raise GrammarError(f"extension {name.decode('ascii', 'replace')[:40]} is malformed", opaque)
        found[name] = value
    return found


def too_large(parsed: Parsed) -> str:
    """Why the line's body is more than its verb takes, before the broker's limits are asked; empty if it is not."""
    verb, length = VERBS[parsed.verb], parsed.length or 0
    if verb.body_size_bytes_max and length > verb.body_size_bytes_max:
        return f"a body of {length} bytes: {parsed.verb.decode()} takes at most {verb.body_size_bytes_max}"
    stated = parsed.extensions or {}
    for name, most in verb.number_max.items():
        if int(stated.get(name, 0)) > most:
            return f"{name.decode()}={int(stated[name])}: at most {most}"
    return ""


def usage(verb: Verb) -> str:
    """One line: how the verb is written."""
    words = [verb.name.decode()]
    words += [f"<{name.lstrip('#@')}>" for name in verb.arguments]
    words += [
        f"[{name.decode()}]" if kind == "flag" else f"[{name.decode()}=...]" for name, kind in verb.extensions.items()
    ]
    if verb.any_extension:
        words.append("[setting=value...]")
    if verb.has_body:
        words.append("<length>")
    if verb.optional:
        words.append(f"[{verb.optional}]")
    words.append("[opaque]" if verb.opaque_optional else "<opaque>")
    return " ".join(words)


def help_text(name: str | None = None) -> str:
    """What ``help`` answers: all verbs, or one."""
    chosen = [verb for verb in _TABLE if name in (None, verb.name.decode())]
    if not chosen:
        return f"no verb {name!r}; type: help\n"
    return "".join(f"{usage(verb)}\n    {verb.teaches}\n" for verb in chosen)
