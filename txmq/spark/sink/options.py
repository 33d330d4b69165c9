"""The options of a sink, and the columns of its rows. Checked before the first row is written.

Columns mean what they mean to Spark's Kafka sink: ``value`` (binary or string; null allowed), and where they are there
``key`` (binary or string), ``topic`` (string; the option ``topic`` goes before it), ``partition`` (int; null: by key)
and ``headers`` (array of key and value).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txmq.client.bootstrap import bootstrap_of
from txmq.errors import ConfigError
from txmq.log.compression import CODECS
from txmq.model import is_valid_name

TIMEOUT_S, TIMEOUT_S_MAX = 60.0, 86_400.0
BATCH_ID_MAX = (1 << 63) - 1
OPTIONS = ("bootstrap", "topic", "compression", "timeout", "queryId", "batchId")
_BY_SPARK = frozenset({"checkpointlocation"})  # handed on by Spark; its own
_HEADERS = "array<struct<key:string,value:binary>>"
COLUMNS: dict[str, frozenset[str]] = {
    "value": frozenset({"binary", "string"}),
    "key": frozenset({"binary", "string"}),
    "topic": frozenset({"string"}),
    "partition": frozenset({"int"}),
    "headers": frozenset({_HEADERS}),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What ``df.write.format("txmq")`` was given.

    Attributes:
        bootstrap: address of the broker.
        topic: where every row goes; None if the rows say.
        compression: of the record batches.
        timeout_s: how long a task or the driver waits for a broker that is away.
        query: name of the writing job, if it may be run again; None: no other job writes under the same name.
        batch: which of the query's batches it is.
    """

    bootstrap: str
    topic: str | None
    compression: str | None
    timeout_s: float
    query: str | None
    batch: int | None


def parse_options(options: Mapping[str, str], *, is_streaming: bool) -> SinkOptions:
    """Read the options; keys in any case.

    Raises:
        ConfigError: names the option, its value, what is expected.
    """
    given = {name.lower(): value for name, value in options.items()}
    _refuse_unknown(given)
    bootstrap = given.get("bootstrap", "")
    if not bootstrap:
        raise ConfigError('option bootstrap is missing: .option("bootstrap", "txmq://HOST:PORT")')
    bootstrap_of(bootstrap)
    query, batch = given.get("queryid"), given.get("batchid")
    if is_streaming and (query or batch):
        raise ConfigError("options queryId and batchId are for df.write: a streaming query has its own")
    if (query is None) != (batch is None):
        raise ConfigError("options queryId and batchId go together: which batch, of whose, is not to be written twice?")
    return SinkOptions(
        bootstrap,
        _name(given.get("topic"), "topic"),
        _compression(given.get("compression", "none")),
        _timeout(given.get("timeout")),
        _name(query, "queryId"),
        _batch(batch),
    )


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in OPTIONS}
    for name in given:
        if name not in known and name not in _BY_SPARK:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {known[near[0]]}?" if near else f"; known: {', '.join(OPTIONS)}"
            raise ConfigError(f"the sink has no option {name[:80]!r}{hint}")


def _name(text: str | None, option: str) -> str | None:
    if text is not None and not is_valid_name(text):
        raise ConfigError(f"option {option} = {text[:80]!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
    return text


def _compression(text: str) -> str | None:
    if text not in ("none", *CODECS):
        raise ConfigError(f"option compression = {text[:80]!r}: expected none or one of {', '.join(CODECS)}")
    return None if text == "none" else text


def _timeout(text: str | None) -> float:
    try:
        seconds = TIMEOUT_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= TIMEOUT_S_MAX:
        raise ConfigError(f"option timeout = {str(text)[:80]!r}: expected seconds, more than 0 and up to 86400")
    return seconds


def _batch(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) <= BATCH_ID_MAX):
        raise ConfigError(f"option batchId = {text[:80]!r}: expected a number of 0 to {BATCH_ID_MAX}")
    return int(text)


def check_columns(schema: Any, options: SinkOptions) -> None:
    """Refuse rows that are no messages.

    Args:
        schema: a ``StructType``.

    Raises:
        ConfigError: names the column, its type, what is expected.
    """
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    if len(types) != len(schema.fields):
        raise ConfigError("two columns have the same name")
    for name, found in types.items():
        if name not in COLUMNS:
            raise ConfigError(f"column {name[:80]!r} is not written to a topic: select {', '.join(COLUMNS)} only")
        if found not in COLUMNS[name]:
            raise ConfigError(f"column {name} is {found[:200]}: expected {' or '.join(sorted(COLUMNS[name]))}")
    if "value" not in types:
        raise ConfigError(f"column value is missing; the rows have {', '.join(types) or 'no column'}")
    if options.topic is None and "topic" not in types:
        raise ConfigError("where to? give the option topic, or a column topic")
