"""Partial updates of MySQL's JSON: what diffs make of a document, and what are none."""

from __future__ import annotations

import pytest

from txmq.binlog.source.events import UNREADABLE
from txmq.binlog.source.json_binary import INSERT, REMOVE, REPLACE, patched

DOCUMENT = '{"b": 1.50, "aa": [1, {"x y": 1e0}], "a \\"b.[1]": null}'
SEVEN = b"\x05\x07\x00"


def diff(operation: int, path: str, value: bytes = b"") -> bytes:
    raw = path.encode()
    found = bytes([operation, len(raw)]) + raw
    return found if operation == REMOVE else found + bytes([len(value)]) + value


@pytest.mark.parametrize(
    ("diffs", "document"),
    [
        (b"", DOCUMENT),
        (diff(REPLACE, "$.b", SEVEN), DOCUMENT.replace("1.50", "7")),
        (diff(REPLACE, '$.aa[1]."x y"', SEVEN), DOCUMENT.replace("1e0", "7")),
        (diff(REPLACE, '$."a \\"b.[1]"', b"\x0c\x01z"), DOCUMENT.replace("null", '"z"')),
        (diff(REMOVE, "$.aa"), '{"b": 1.50, "a \\"b.[1]": null}'),
        (diff(REMOVE, "$.aa[0]"), DOCUMENT.replace("1, {", "{")),
        (diff(INSERT, "$.aa[1]", SEVEN), DOCUMENT.replace("[1, ", "[1, 7, ")),
        (diff(INSERT, "$.aa[2]", SEVEN), DOCUMENT.replace("}]", "}, 7]")),
        (diff(INSERT, "$.c", SEVEN) + diff(REMOVE, "$.b"), '{"c": 7, ' + DOCUMENT.removeprefix('{"b": 1.50, ')),
        (b"\x00\x01$\xfc" + (132).to_bytes(2, "little") + b"\x0c\x81\x01" + b"x" * 129, f'"{"x" * 129}"'),
    ],
)
def test_diffs_change_what_they_name_and_nothing_else(diffs: bytes, document: str) -> None:
    assert patched(DOCUMENT, diffs) == document


@pytest.mark.parametrize(
    "diffs",
    [
        diff(REPLACE, "$.none", SEVEN), diff(REMOVE, "$.aa[7]"), diff(INSERT, "$.b.c", SEVEN), diff(3, "$.b", SEVEN),
        diff(REPLACE, "b", SEVEN), diff(REPLACE, "$.b", b"\x0d"), diff(REPLACE, "$.b", SEVEN)[:-1], b"\x00\xff",
    ],
)  # fmt: skip
def test_diffs_that_do_not_fit_are_refused(diffs: bytes) -> None:
    with pytest.raises(UNREADABLE):
        patched(DOCUMENT, diffs)
