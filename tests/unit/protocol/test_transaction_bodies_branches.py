"""Branches of ``decide``: what this library writes is read without the JSON reader, and read alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from txmq.errors import BadRequestError
from txmq.protocol import transaction_bodies
from txmq.protocol.transaction_bodies import branches_json, encode_branch, split_branches

UUID = "ab" * 16
PLAIN: dict[str, Any] = {
    "bqual": f"{UUID}.18bcfe56800.2a", "connection": 42, "wrote": True, "marker": False, "table": "shop.txmq_marker",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"connection": 0, "wrote": False, "marker": True, "table": "t"}, {"connection": None},
        {"connection": 10**19}, {"bqual": ""}, {"bqual": "{!~" * 21},
    ],
    ids=str,
)  # fmt: skip
def test_a_branch_is_read_as_it_was_written(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = encode_branch("db", UUID, PLAIN | changes)
    expected = ([{"resource": "db", "uuid": UUID, **PLAIN, **changes}], len(entry))
    assert split_branches(entry + b"parts", 1) == expected
    monkeypatch.setattr(transaction_bodies, "_PLAIN", lambda _body, _position: None)
    assert split_branches(entry + b"parts", 1) == expected


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(PLAIN | {"table": "a.b.c"}), json.dumps(PLAIN | {"table": "x" * 49}), json.dumps(PLAIN)[:-1],
        *(json.dumps(PLAIN | {"bqual": bqual}) for bqual in ("Ä", "a b", "\x1b[2J", "b" * 65, "\ud800", 7, None)),
        *(json.dumps(PLAIN | {"connection": number}) for number in (True, -1, 1 << 64, 1.0, "1")),
        json.dumps(PLAIN).replace("42", "042"), json.dumps(PLAIN).replace("true", "1"), json.dumps(PLAIN) + "}",
    ],
)  # fmt: skip
def test_a_branch_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError):
        split_branches(f"db {UUID} {len(text)}\r\n{text}".encode(), 1)


def test_details_of_a_branch_are_kept_in_one_order() -> None:
    """The state has what the journal has, whoever wrote the request."""
    text = json.dumps(dict(reversed(PLAIN.items())))
    [branch], _ = split_branches(f"db {UUID} {len(text)}\r\n{text}\r\n".encode(), 1)
    assert list(branch.items()) == [("resource", "db"), ("uuid", UUID), *PLAIN.items()]


def test_what_an_older_broker_kept_is_told_as_json() -> None:
    kept = {"resource": "db", "uuid": UUID, **PLAIN, "bqual": "Ä", "connection": True}
    assert json.loads(branches_json([kept])) == [kept]
