"""Rows and messages side by side: one line for each pair, and for each row or message that has no partner.

Theory of operation. Both sides get an *identity*: the texts of the match terms, read as values of the column's type,
and spelled in one way (``_read_as``). Nothing is rounded on the way: "1.005" is no value of a DECIMAL(10,2), and equal
to none. Times are UTC, whatever zone the machine or the session is in. Within an identity the messages are numbered by
time and place, the rows by their order column; the n-th message belongs to the n-th row. So every message and every row
is in the result exactly once, whatever was doubled, and everything else is read from it (``findings``, ``figures``)
without reading the log again. With ``latest`` an identity has its newest message alone.

Each side is shuffled once, by identity; the sorts spill to disk. Values are dropped before the shuffle.

Columns of the result: ``id``, ``copy``; of the message ``m_partition m_offset m_key m_at m_txid m_size m_values m_in
m_earlier m_first`` (how many came before it, with ``latest``; place of the identity's first message); of the row
``r_order r_at r_txid r_key r_values r_in r_here``. ``m_in`` and ``r_in`` say whether it lies in the window: what lies
in its margins is a partner, never a finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.window import Window as Over

from txmq.errors import ConfigError
from txmq.spark.audit.spec import AuditSpec, MessageField, RowTime, Source, Term

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MAYBE_NUMBER = "txmq.maybe_number"  # metadata of a column of text that may hold numbers
_DIGITS_MAX, _INTEGER_DIGITS, _MAYBE_SCALE = 38, 20, 18
TXID_COLUMN = "transaction id"  # the name under which a row's and its message's transaction ids are compared


@dataclass(frozen=True, slots=True)
class Window:
    """The bounds of an audit. Times are ms since 1970, on the clocks that wrote them.

    Attributes:
        from_ms, to_ms: rows committed in [from, to), and messages made then; None: no limit.
        offsets: messages from these offsets on, by partition, in place of the times.
        is_live: messages that are newer than ``to_ms`` are audited too: their rows must be there already.
    """

    from_ms: int | None = None
    to_ms: int | None = None
    offsets: Mapping[int, int] | None = None
    is_live: bool = False

    @property
    def has_every_message(self) -> bool:
        """True if all messages of the topic are audited; those of a live topic that are newer do not count."""
        return self.from_ms is None and (self.to_ms is None or self.is_live)

    def holds_message(self) -> Column:
        """Whether a message (``partition``, ``offset``, ``timestamp``) is audited."""
        if self.offsets is not None:
            places = [F.lit(number) for pair in sorted(self.offsets.items()) for number in pair]
            first = F.try_element_at(F.create_map(*places), F.col("partition")) if places else F.lit(None)
            return F.col("offset") >= F.coalesce(first, F.lit(0))
        return _between(F.col("timestamp"), self.from_ms, None if self.is_live else self.to_ms)

    def holds_row(self, committed: Column) -> Column:
        """Whether a row that was committed then is audited."""
        return _between(committed, self.from_ms, self.to_ms)


def pair(messages: DataFrame, rows: DataFrame, spec: AuditSpec, window: Window) -> DataFrame:
    """Put messages and rows side by side.

    Args:
        messages: columns as ``spark.read.format("txmq")`` has them, of the audited topic.
        rows: at least ``spec.columns``.

    Raises:
        ConfigError: a column is missing, or its type is not what the spec says.
    """
    _require(rows, spec)
    sent = _messages(messages, rows, spec, window)
    left = _numbered(_newest(sent) if spec.latest else sent, ["m_at", "m_partition", "m_offset"])
    first = Over.partitionBy("id").orderBy("m_at", "m_partition", "m_offset")
    left = left.withColumn("m_first", F.first(F.struct("m_partition", "m_offset")).over(first))
    right = _numbered(_rows(rows, spec, window), ["r_order", "r_at"])
    return left.join(right, ["id", "copy"], "full_outer")


def identities(messages: DataFrame, rows: DataFrame, spec: AuditSpec) -> DataFrame:
    """The identities of messages, each once, as one column ``id``; ``rows`` tells the columns' types."""
    values = [_read_as(term.source, rows.schema[term.column]) for term in spec.match]
    return messages.select(_identity(values).alias("id")).distinct()


def row_identities(rows: DataFrame, spec: AuditSpec) -> DataFrame:
    """The identities of rows, each once, as one column ``id``."""
    values = [_spelled(rows.schema[term.column]) for term in spec.match]
    return rows.select(_identity(values).alias("id")).distinct()


def text_of(source: Source) -> Column:
    """A message's value at a place, as text; null if it is missing or not text."""
    if source.field is MessageField.TXID:
        return F.col("txid")
    if source.field is MessageField.JSON:
        return json_text(_utf8(F.col("value")), source.name)
    return _utf8(_bytes_of(source))


def json_text(text: Column, path: str) -> Column:
    """What JSON has at a path, as text; null if it has nothing there.

    ``get_json_object`` would read a number with a point as a double: a DECIMAL of 20 digits loses the last ones.
    """
    return F.try_variant_get(F.try_parse_json(text), path, "string")


def committed_at(rows: DataFrame, row_time: RowTime | None) -> Column:
    """When a row was committed, as a timestamp; null if no column gives it.

    Raises:
        ConfigError: a column of numbers without a unit, or a unit for a column without numbers.
    """
    if row_time is None:
        return F.lit(None).cast("timestamp")
    column, kind = F.col(row_time.column), rows.schema[row_time.column].dataType
    if isinstance(kind, T.NumericType):
        if row_time.unit is None:
            raise ConfigError(f"{row_time.column} holds numbers: say of what, such as {row_time.column}:ms")
        return F.timestamp_micros((column * (1_000_000 // row_time.unit.value)).cast("bigint"))
    if row_time.unit is not None:
        raise ConfigError(f"{row_time.column} holds no numbers but {kind.simpleString()}: leave the unit away")
    if isinstance(kind, T.TimestampNTZType):  # UTC, whatever zone the session is in
        return _in_utc(column)
    return column.try_cast("timestamp")


def _messages(messages: DataFrame, rows: DataFrame, spec: AuditSpec, window: Window) -> DataFrame:
    def values(terms: Sequence[Term]) -> list[Column]:
        return [_read_as(term.source, rows.schema[term.column]) for term in terms]

    # What is no value of the column's type is shown as it is, and equal to nothing.
    compared = [F.coalesce(value, text_of(term.source))
                for term, value in zip(spec.compare, values(spec.compare), strict=True)]  # fmt: skip
    compared += [F.col("txid")] if spec.row_txid else []
    size = text_of(spec.transaction_size).try_cast("int") if spec.transaction_size else F.lit(None).cast("int")
    return messages.select(
        _identity(values(spec.match)).alias("id"),
        F.col("partition").alias("m_partition"),
        F.col("offset").alias("m_offset"),
        F.col("key").alias("m_key"),
        F.col("timestamp").alias("m_at"),
        F.col("txid").alias("m_txid"),
        size.alias("m_size"),
        _array(compared).alias("m_values"),
        F.lit(0).cast("long").alias("m_earlier"),
        F.col("value").isNull().alias("m_ends"),
        F.coalesce(window.holds_message(), F.lit(True)).alias("m_in"),
    )


def _rows(rows: DataFrame, spec: AuditSpec, window: Window) -> DataFrame:
    def values(terms: Sequence[Term]) -> list[Column]:
        return [_spelled(rows.schema[term.column]) for term in terms]

    committed = committed_at(rows, spec.row_time)
    txid = F.col(spec.row_txid).cast("string") if spec.row_txid else F.lit(None).cast("string")
    compared = values(spec.compare) + ([txid] if spec.row_txid else [])
    order = F.col(spec.order) if spec.order else F.lit(None).cast("long")
    return rows.select(
        _identity(values(spec.match)).alias("id"),
        order.alias("r_order"),
        committed.alias("r_at"),
        txid.alias("r_txid"),
        (F.col(spec.row_key) if spec.row_key else F.lit(None).cast("string")).alias("r_key"),
        _array(compared).alias("r_values"),
        # A row without a time is a partner of what is read; missing it can be called only where everything is read.
        F.coalesce(window.holds_row(committed), F.lit(window.has_every_message)).alias("r_in"),
        F.lit(True).alias("r_here"),
    )


def _newest(sent: DataFrame) -> DataFrame:
    """The last message of each identity, unless it says by a value of null that the row is gone."""
    of_partition = Over.partitionBy("id", "m_partition").orderBy(F.desc("m_offset"))
    of_all = Over.partitionBy("id").orderBy(F.desc_nulls_last("m_at"), F.desc("m_partition"))
    every = Over.partitionBy("id")
    known = sent.filter("id is not null").withColumn("m_earlier", F.count("*").over(every) - 1)
    last = known.withColumn("n", F.row_number().over(of_partition)).filter("n = 1")
    last = last.withColumn("n", F.row_number().over(of_all)).filter("n = 1 and not m_ends").drop("n")
    return last.unionByName(sent.filter("id is null"))


def _numbered(side: DataFrame, order: Sequence[str]) -> DataFrame:
    return side.withColumn("copy", F.row_number().over(Over.partitionBy("id").orderBy(*order)))


def _identity(values: Sequence[Column]) -> Column:
    """One value as it is; several as a JSON array, so that no two lists look alike. Null if one of them is."""
    if len(values) == 1:
        return values[0]
    complete = values[0].isNotNull()
    for value in values[1:]:
        complete = complete & value.isNotNull()
    return F.when(complete, F.to_json(F.array(*values)))


def _array(values: Sequence[Column]) -> Column:
    return F.array(*values) if values else F.lit(None).cast("array<string>")


def _read_as(source: Source, column: T.StructField) -> Column:
    """A message's value as one of the column's type, spelled as ``_spelled`` does; null if it is none."""
    kind, text = column.dataType, text_of(source)
    if isinstance(kind, T.BinaryType):
        if source.field in (MessageField.KEY, MessageField.HEADER):
            return F.hex(_bytes_of(source))
        return F.upper(text)
    if isinstance(kind, T.StringType):
        return _number_or_text(text) if MAYBE_NUMBER in column.metadata else text
    if isinstance(kind, T.IntegralType):
        number = _exact(text, T.DecimalType(_INTEGER_DIGITS, 0))
        if source.field is MessageField.JSON:  # BOOLEAN is a number in MySQL and SQLite
            number = F.coalesce(number, text.try_cast("boolean").cast("int").cast("decimal(20,0)"))
        return number.cast("string")
    if isinstance(kind, T.DecimalType):
        return _exact(text, kind).cast("string")
    if isinstance(kind, T.FractionalType):
        return _without_sign_of_zero(text.try_cast("double").cast(kind))
    if isinstance(kind, T.DateType):
        day, moment = text.try_cast("date"), text.try_cast("timestamp")
        return F.when(F.coalesce(moment == day.cast("timestamp"), F.lit(True)), day).cast("string")
    if isinstance(kind, T.TimestampNTZType):
        return text.try_cast("timestamp").cast("string")
    return text.try_cast(kind).cast("string")


def _spelled(column: T.StructField) -> Column:
    kind, value = column.dataType, F.col(column.name)
    if isinstance(kind, T.BinaryType):
        return F.hex(value)
    if isinstance(kind, T.StringType):
        return _number_or_text(value) if MAYBE_NUMBER in column.metadata else value
    if isinstance(kind, T.FractionalType) and not isinstance(kind, T.DecimalType):
        return _without_sign_of_zero(value)
    if isinstance(kind, T.TimestampNTZType):
        return _in_utc(value).cast("string")
    return value.cast("string")


def _exact(text: Column, kind: T.DecimalType) -> Column:
    """A text as a decimal, if it is one without rounding."""
    number = text.try_cast(kind)
    is_plain = F.trim(text).rlike(rf"^[+-]?\d*(\.\d{{0,{kind.scale}}}0*)?$")
    wide = text.try_cast(T.DecimalType(_DIGITS_MAX, _DIGITS_MAX - (kind.precision - kind.scale)))
    has_exponent = F.lower(text).contains("e")
    return F.when(is_plain | (has_exponent & (wide == number)), number)


def _number_or_text(text: Column) -> Column:
    """Of a column that holds what it was given: numbers that are equal are spelled alike, other text is as it is."""
    number = _exact(text, T.DecimalType(_DIGITS_MAX, _MAYBE_SCALE)).cast("string")
    return F.coalesce(F.regexp_replace(number, r"\.?0+$", ""), text)


def _without_sign_of_zero(number: Column) -> Column:
    return F.when(number == 0, F.lit("0.0")).otherwise(number.cast("string"))


def _in_utc(column: Column) -> Column:
    """A time without a zone, whatever zone the session is in."""
    return F.concat(column.cast("string"), F.lit("Z")).try_cast("timestamp")


def _bytes_of(source: Source) -> Column:
    if source.field is MessageField.KEY:
        return F.col("key")
    wanted = F.filter(F.col("headers"), lambda header: header["key"] == source.name)
    return F.try_element_at(wanted, F.lit(1))["value"]


def _utf8(column: Column) -> Column:
    return F.try_validate_utf8(column.cast("string"))


def _between(at: Column, from_ms: int | None, to_ms: int | None) -> Column:
    inside = F.lit(True)
    if from_ms is not None:
        inside = inside & (at >= F.timestamp_millis(F.lit(from_ms)))
    if to_ms is not None:
        inside = inside & (at < F.timestamp_millis(F.lit(to_ms)))
    return inside


def _require(rows: DataFrame, spec: AuditSpec) -> None:
    there = set(rows.columns)
    for name in spec.columns:
        if name not in there:
            raise ConfigError(f"the table has no column {name!r}; it has {', '.join(sorted(there))}")
