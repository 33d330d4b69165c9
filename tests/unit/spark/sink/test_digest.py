"""A batch says of its rows what a repeat says too, and other rows do not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from txmq.errors import TransactionConflictError
from txmq.spark.sink.digest import OTHER_ROWS, Attempt, Digest, check_repeat, refuse_older

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def rows(*contents: tuple[str | None, bytes | None], headers: object = None) -> Any:
    """One Arrow batch."""
    keys, values = [key for key, _ in contents], [value for _, value in contents]
    columns = {"key": pa.array(keys, pa.string()), "value": pa.array(values, pa.binary())}
    if headers is not None:
        columns["headers"] = pa.array([headers] * len(contents), HEADERS)
    return pa.record_batch(columns)


def text(*tasks: list[Any]) -> str:
    """Of a batch whose tasks had these Arrow batches."""
    digests = []
    for batches in tasks:
        digest = Digest(is_of_content=True)
        assert list(digest.watching(batches)) == batches
        digests.append(digest)
    return Digest(is_of_content=True).merged(digests).text


A, B, C = ("k", b"a"), (None, b"b"), ("k", None)


def test_rows_in_other_tasks_and_orders_have_the_same_digest() -> None:
    assert text([rows(A, B), rows(C)], [rows(A)]) == text([rows(C, A)], [], [rows(B), rows(A)])


@pytest.mark.parametrize(
    "others", [[A, B], [A, B, B], [A, B, ("k", b"")], [A, B, ("", None)], [A, B, (None, None)], [A, C, ("b", None)]]
)
def test_other_rows_have_another_digest(others: list[tuple[str | None, bytes | None]]) -> None:
    assert text([rows(*others)]) != text([rows(A, B, C)])


def test_headers_are_rows_contents_too() -> None:
    found = {text([rows(A, headers=headers)]) for headers in ([], [{"key": "h", "value": b"1"}], [{"key": "h"}])}
    assert len(found) == 3


def test_stream_says_how_many_rows() -> None:
    digest = Digest(is_of_content=False)
    digest.add(rows(A, B, C))
    assert digest.text == "3"


def test_batch_of_a_stream_below_its_newest_is_refused() -> None:
    at = Attempt("q", 1, 7, 0, 0)
    for newest in (None, 6, 7):
        refuse_older(at, newest)
    with pytest.raises(
        TransactionConflictError, match=r"batch 7 of stream q .* batch 8 is committed: .*startingOffsets"
    ):
        refuse_older(at, 8)


def test_repeat_with_other_rows_is_refused_and_says_why() -> None:
    at = Attempt("q", 1, 7, 0, 0)
    check_repeat(at, "3", "3", OTHER_ROWS)
    check_repeat(at, None, "3", OTHER_ROWS)
    with pytest.raises(TransactionConflictError, match=r"batch 7 of query q is committed with other rows \(3; .* 4\)"):
        check_repeat(at, "3", "4", OTHER_ROWS)
