"""Options of the source: what is read, what is refused, and what the error says."""

from __future__ import annotations

import pytest

from txmq.errors import ConfigError
from txmq.spark.source.options import EARLIEST, LATEST, At, parse, parse_columns

BROKER = {"bootstrap": "h:1", "topic": "orders"}


def test_keys_may_be_in_any_case_as_spark_passes_them() -> None:
    options = parse({"BOOTSTRAP": "h:1", "subscribepattern": "a.*", "MAXoffsetspertrigger": "5"}, is_stream=True)
    assert (options.bootstrap, options.pattern, options.trigger_rows_max) == ("txmq://h:1", "a.*", 5)
    assert (options.takes("abc"), options.takes("cab")) == (True, False)


def test_batch_begins_at_earliest_and_stream_at_latest() -> None:
    assert parse(BROKER, is_stream=False).start == EARLIEST
    assert parse(BROKER, is_stream=False).end == LATEST
    assert parse(BROKER, is_stream=True).start == LATEST


def test_offsets_by_partition_know_the_words_of_kafkas_source() -> None:
    options = parse({**BROKER, "startingOffsets": '{"orders": {"0": 23, "1": -2, "2": -1}}'}, is_stream=False)
    assert options.start == {"orders": {0: 23, 1: EARLIEST, 2: LATEST}}


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20+00:00", 1_700_000_000_000),
        ("1970-01-01T00:00:00Z", 0),
    ],
)
def test_times_are_ms_or_iso_with_their_zone(text: str, expected_ms: int) -> None:
    assert parse({**BROKER, "startingTimestamp": text}, is_stream=False).start == At(expected_ms)


@pytest.mark.parametrize(
    ("options", "is_stream", "text"),
    [
        (
            {**BROKER, "startingOffset": "earliest"},
            False,
            "unknown option 'startingOffset'; did you mean 'startingOffsets'",
        ),
        ({**BROKER, "subscribe": "a"}, False, "topic and subscribe: give one"),
        ({"bootstrap": "h:1"}, False, "what is to be read"),
        ({"topic": "a"}, False, "where is it to be read from"),
        ({**BROKER, "path": "/x"}, False, "bootstrap and path: give one"),
        ({**BROKER, "topic": "a,,b"}, False, "option topic = 'a,,b'"),
        ({**BROKER, "topic": "a,a"}, False, "option topic"),
        ({"bootstrap": "h:1", "subscribePattern": "("}, False, "option subscribePattern"),
        (
            {**BROKER, "startingOffsets": "first"},
            False,
            "option startingOffsets = 'first': expected earliest, latest or",
        ),
        ({**BROKER, "startingOffsets": '{"orders": {"0": -3}}'}, False, "option startingOffsets"),
        ({**BROKER, "startingOffsets": '{"orders": {"x": 1}}'}, False, "option startingOffsets"),
        ({**BROKER, "startingOffsets": '{"orders": 1}'}, False, "option startingOffsets"),
        ({**BROKER, "startingOffsets": "earliest", "startingTimestamp": "1"}, False, "give one of them"),
        ({**BROKER, "startingTimestamp": "2023-11-14T22:13:20"}, False, "a time with its zone"),
        ({**BROKER, "endingOffsets": "earliest"}, False, "is no end"),
        ({**BROKER, "endingOffsets": '{"orders": {"0": -2}}'}, False, "is no end"),
        ({**BROKER, "failOnDataLoss": "maybe"}, False, "expected true or false"),
        ({**BROKER, "minPartitions": "0"}, False, "option minPartitions = '0'"),
        ({**BROKER, "timeout": "nan"}, False, "option timeout"),
        ({**BROKER, "readFrom": "follower"}, False, "leader or replica"),
        ({"path": "/data", "readFrom": "replica"}, False, "have no replica"),
        ({**BROKER, "endingOffsets": "latest"}, True, "option endingOffsets: a stream has none"),
        ({**BROKER, "path": "/x"}, True, "option path: a stream has none"),
        ({**BROKER, "maxBytesPerTrigger": "5"}, False, "option maxBytesPerTrigger: a batch has none"),
    ],
)
def test_what_is_refused_is_named(options: dict[str, str], is_stream: bool, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(options, is_stream=is_stream)
    assert text in str(caught.value)


def test_the_schema_depends_on_two_options() -> None:
    assert parse_columns(BROKER) == (None, False)
    assert parse_columns({**BROKER, "columns": "offset, key", "includeHeaders": "TRUE"}) == (("offset", "key"), True)
