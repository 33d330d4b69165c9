"""What a sink is told is checked before a row is written; errors name what is wrong and what is expected."""

from __future__ import annotations

import pytest
from pyspark.sql import types

from txmq.errors import ConfigError
from txmq.spark.sink.options import SinkOptions, check_columns, parse_options

_HEADER = types.StructType().add("key", types.StringType()).add("value", types.BinaryType())
_TYPES = {
    "int": types.IntegerType(), "bigint": types.LongType(), "binary": types.BinaryType(), "string": types.StringType(),
    "map": types.MapType(types.StringType(), types.BinaryType()), "headers": types.ArrayType(_HEADER),
}  # fmt: skip
BOOTSTRAP = {"bootstrap": "txmq://h:1"}


def schema(columns: str) -> types.StructType:
    """``name type, name type``."""
    made = types.StructType()
    for column in columns.split(", "):
        name, kind = column.split(" ")
        made.add(name, _TYPES[kind])
    return made


def test_the_defaults() -> None:
    assert parse_options(BOOTSTRAP, is_streaming=True) == SinkOptions("txmq://h:1", None, None, 60.0, None, None)


def test_options_in_any_case() -> None:
    given = {**BOOTSTRAP, "TOPIC": "t", "queryid": "job", "BatchId": "7", "compression": "zstd", "Timeout": "2.5"}
    assert parse_options(given, is_streaming=False) == SinkOptions("txmq://h:1", "t", "zstd", 2.5, "job", 7)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "bootstrap is missing"),
        ({"bootstrap": "h:1"}, "expected txmq://HOST"),
        ({"topik": "t"}, "no option 'topik'; did you mean topic?"),
        ({"zzz": "t"}, "no option 'zzz'; known: bootstrap"),
        ({"path": "/x"}, "no option 'path'"),
        ({"topic": "../x"}, "option topic = '../x'"),
        ({"compression": "snappy"}, "option compression = 'snappy'"),
        ({"timeout": "soon"}, "option timeout = 'soon'"),
        ({"timeout": "0"}, "option timeout = '0'"),
        ({"queryId": "q"}, "go together"),
        ({"batchId": "1"}, "go together"),
        ({"queryId": "q", "batchId": "-1"}, "option batchId = '-1'"),
        ({"queryId": "a b", "batchId": "1"}, "option queryId = 'a b'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], text: str) -> None:
    given = options if "bootstrap" in options or not options else {**BOOTSTRAP, **options}
    with pytest.raises(ConfigError) as caught:
        parse_options(given, is_streaming=False)
    assert text in str(caught.value)


def test_a_stream_has_its_own_query() -> None:
    with pytest.raises(ConfigError, match="a streaming query has its own"):
        parse_options({**BOOTSTRAP, "queryId": "q", "batchId": "1"}, is_streaming=True)
    parse_options({**BOOTSTRAP, "checkpointLocation": "/x"}, is_streaming=True)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ("value int", "column value is int: expected binary or string"),
        ("key bigint, value binary", "column key is bigint"),
        ("key binary", "column value is missing; the rows have key"),
        ("value binary, partition bigint", "column partition is bigint: expected int"),
        ("value binary, topic int", "column topic is int: expected string"),
        ("value binary, headers map", "column headers is map<string,binary>"),
        ("value binary, offset bigint", "column 'offset' is not written to a topic: select value, key"),
        ("value binary, value string", "two columns have the same name"),
    ],
)
def test_rows_that_are_no_messages_are_refused(columns: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_columns(schema(columns), parse_options({**BOOTSTRAP, "topic": "t"}, is_streaming=False))
    assert text in str(caught.value)


def test_a_topic_is_an_option_or_a_column() -> None:
    options = parse_options(BOOTSTRAP, is_streaming=False)
    with pytest.raises(ConfigError, match="where to"):
        check_columns(schema("value binary"), options)
    check_columns(schema("topic string, key string, value string, partition int, headers headers"), options)
