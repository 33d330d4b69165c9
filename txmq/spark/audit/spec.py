"""The terms of an audit, and the checks it can make: values and their spelling, without Spark.

A *match* says which row belongs to which message: a list of ``COLUMN = SOURCE``, where SOURCE is a place in it:

    key              the message's key, as text
    header:NAME      a header, as text
    json:$.PATH      a field of a value that is JSON
    txid             the transaction that sent it

A row and a message belong together if all terms are equal, after the message's text was read as the column's type
(so "042" is 42 if the column is a number). Each row has one message and each message one row: where an identity is
there several times on both sides, the first belongs to the first.

Invariants:
    * nothing is guessed: a column, a unit of time or an identity that cannot be known is an error or an unmade check.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from txmq.errors import ConfigError

SETTLE_MS = 30_000
SETTLE_MS_MAX = 24 * 3600 * 1000


class Kind(enum.Enum):
    """The kinds of findings; the value is the name in every result."""

    MISSING = "missing"  # a row without message
    PHANTOM = "phantom"  # a message without row
    DUPLICATE = "duplicate"  # a message whose row has one already
    LATE = "late"  # its row was committed longer ago than the margin: late, or sent again
    DIFFERS = "differs"  # row and message say different things
    OUT_OF_ORDER = "out-of-order"  # after a message of the same key with a higher order value
    GAP = "gap"  # offsets that cannot be read
    TORN = "torn"  # a transaction of which only a part is visible
    IN_DOUBT = "in-doubt"  # a transaction that waits for its outcome, longer than the margin


class MessageField(enum.Enum):
    """A part of a message."""

    KEY = "key"
    HEADER = "header"
    JSON = "json"
    TXID = "txid"


@dataclass(frozen=True, slots=True)
class Source:
    """One value of a message; ``name`` is the header's name or the JSON path."""

    field: MessageField
    name: str = ""

    def __str__(self) -> str:
        return f"{self.field.value}:{self.name}" if self.name else self.field.value


@dataclass(frozen=True, slots=True)
class Term:
    """A column of the row and its source in the message."""

    column: str
    source: Source

    def __str__(self) -> str:
        return f"{self.column} = {self.source}"


class TimeUnit(enum.Enum):
    """Of a column of numbers that holds times since 1970; the value is how many make a second."""

    SECONDS = 1
    MILLISECONDS = 1_000
    MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class RowTime:
    """The column that says when a row was committed; ``unit`` if it holds numbers."""

    column: str
    unit: TimeUnit | None = None


@dataclass(frozen=True, slots=True)
class AuditSpec:
    """Topic, table and the terms of their comparison.

    Attributes:
        topic: whose messages.
        match: which row belongs to which message.
        compare: what else must be equal.
        order: a column that grows with each change of a key: the messages of a key must come in its order.
        row_time: when rows were committed. Without it the audit covers the whole table, and knows no latencies.
        row_txid: a column with the transaction id (``tx.txid``) that wrote the row: torn transactions are found by it.
        transaction_size: the source, in each message, of the number of its transaction's messages in the topic.
        together: topics in which the transactions of ``topic`` have messages too, and the reverse.
        settle_ms: how long a message may take, and how far clocks may differ.
        row_key: a column with the key that the row's message has: it is shown where there is no message.
        latest: the table has the newest state of each thing: the row is held against its newest message alone. A
            message whose value is null says that the row is gone.
    """

    topic: str
    match: tuple[Term, ...]
    compare: tuple[Term, ...] = ()
    order: str | None = None
    row_time: RowTime | None = None
    row_txid: str | None = None
    transaction_size: Source | None = None
    together: tuple[str, ...] = ()
    settle_ms: int = SETTLE_MS
    row_key: str | None = None
    latest: bool = False

    def __post_init__(self) -> None:
        if not self.match:
            raise ConfigError("match: nothing says which row belongs to which message; expected COLUMN = SOURCE")
        if not 0 <= self.settle_ms <= SETTLE_MS_MAX:
            raise ConfigError(f"settle_ms = {self.settle_ms}: expected 0 to {SETTLE_MS_MAX}")
        if self.latest and (self.order or self.transaction_size or self.together):
            raise ConfigError("latest: of the newest messages alone neither an order nor a whole transaction is known")
        if self.topic in self.together:
            raise ConfigError(f"together = {self.topic!r}: expected another topic than the one that is audited")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the row that the audit needs, each once."""
        time = self.row_time.column if self.row_time else None
        terms = [term.column for term in (*self.match, *self.compare)]
        wanted = [*terms, self.order, time, self.row_txid, self.row_key]
        return tuple(dict.fromkeys(name for name in wanted if name is not None))


_UNITS = {"s": TimeUnit.SECONDS, "ms": TimeUnit.MILLISECONDS, "us": TimeUnit.MICROSECONDS}
_COLUMN = re.compile(r"[^\W\d]\w{0,63}\Z")
_JSON_PATH = re.compile(r"\$(\.[^.\[\]'\"\\]{1,200}|\[\d{1,6}\]){1,20}\Z")
_EXPECTED = "expected key, header:NAME, json:$.FIELD or txid"


def parse_source(text: str) -> Source:
    """Read ``key``, ``header:NAME``, ``json:$.PATH`` or ``txid``.

    Raises:
        ConfigError: says what is expected.
    """
    word, _, name = text.strip().partition(":")
    field = next((field for field in MessageField if field.value == word.strip()), None)
    name = name.strip()
    if field is None or bool(name) != (field in (MessageField.HEADER, MessageField.JSON)):
        raise ConfigError(f"{text.strip()!r} is no place in a message: {_EXPECTED}")
    if field is MessageField.JSON and not _JSON_PATH.match(name):
        raise ConfigError(f"{name!r} is no path in JSON: expected $.field, $.field.field or $.field[0]")
    return Source(field, name)


def parse_term(text: str) -> Term:
    """Read ``COLUMN = SOURCE``.

    Raises:
        ConfigError: says what is expected.
    """
    column, equals, source = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r}: expected COLUMN = SOURCE, such as: id = json:$.id")
    return Term(checked_column(column.strip()), parse_source(source))


def parse_terms(texts: Sequence[str]) -> tuple[Term, ...]:
    """Read several, each also of the form ``a = key, b = json:$.b``. Raises as ``parse_term``."""
    return tuple(parse_term(part) for text in texts for part in text.split(","))


def parse_row_time(text: str) -> RowTime:
    """Read ``COLUMN`` or ``COLUMN:s|ms|us``.

    Raises:
        ConfigError: says what is expected.
    """
    column, colon, unit = text.partition(":")
    if colon and unit not in _UNITS:
        raise ConfigError(f"{text!r}: expected COLUMN, or COLUMN:s, :ms or :us if it holds numbers since 1970")
    return RowTime(checked_column(column), _UNITS[unit] if colon else None)


def checked_column(name: str) -> str:
    """A column's or table's name: letters, digits and ``_``; anything else cannot be written into SQL unseen.

    Raises:
        ConfigError: it is not one.
    """
    if not _COLUMN.match(name):
        raise ConfigError(f"{name[:80]!r} is no name of a column: expected letters, digits and _")
    return name
