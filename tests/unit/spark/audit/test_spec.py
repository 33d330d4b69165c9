"""How an audit is spelled, and what is refused."""

from __future__ import annotations

import pytest

from txmq.errors import ConfigError
from txmq.spark.audit.spec import (
    AuditSpec,
    MessageField,
    RowTime,
    Source,
    Term,
    TimeUnit,
    parse_row_time,
    parse_source,
    parse_term,
    parse_terms,
)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("key", Source(MessageField.KEY)),
        (" txid ", Source(MessageField.TXID)),
        ("header:trace-id", Source(MessageField.HEADER, "trace-id")),
        ("json:$.id", Source(MessageField.JSON, "$.id")),
        ("json: $.order.lines[0].id", Source(MessageField.JSON, "$.order.lines[0].id")),
    ],
)
def test_a_source_is_a_place_in_a_message(text: str, source: Source) -> None:
    assert parse_source(text) == source
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "value",
        "key:x",
        "txid:1",
        "header",
        "header:",
        "json",
        "json:id",
        "json:$",
        "json:$..id",
        "json:$['a']",
        "KEY",
    ],
)
def test_what_is_no_place_in_a_message_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_source(text)


def test_terms_are_columns_and_sources() -> None:
    assert parse_term("id=key") == Term("id", Source(MessageField.KEY))
    assert parse_terms(["a = key, b = json:$.b", "c = txid"]) == (
        Term("a", Source(MessageField.KEY)), Term("b", Source(MessageField.JSON, "$.b")),
        Term("c", Source(MessageField.TXID)),
    )  # fmt: skip
    assert str(parse_term("b=json:$.b")) == "b = json:$.b"


@pytest.mark.parametrize(
    "text", ["id", "= key", "i d = key", "id; drop table x = key", "`id` = key", "1d = key", "id ="]
)
def test_a_term_that_could_not_stand_in_sql_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_term(text)


def test_a_time_of_numbers_has_a_unit() -> None:
    assert parse_row_time("created") == RowTime("created")
    assert parse_row_time("created:ms") == RowTime("created", TimeUnit.MILLISECONDS)
    for text in ("created:", "created:ns", "a b:ms"):
        with pytest.raises(ConfigError):
            parse_row_time(text)


def test_the_columns_that_are_read_are_those_that_are_named() -> None:
    spec = AuditSpec(
        "t", parse_terms(["id = key"]), parse_terms(["amount = json:$.a", "id = json:$.id"]), order="version",
        row_time=RowTime("created"), row_txid="txid",
    )  # fmt: skip
    assert spec.columns == ("id", "amount", "version", "created", "txid")


def test_a_spec_that_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="which row belongs to which message"):
        AuditSpec("t", ())
    with pytest.raises(ConfigError, match="settle_ms = -1"):
        AuditSpec("t", parse_terms(["id = key"]), settle_ms=-1)
    with pytest.raises(ConfigError, match="another topic"):
        AuditSpec("t", parse_terms(["id = key"]), together=("t",))
