"""What a grant covers, and which words are grants."""

from __future__ import annotations

import pytest

from txmq.errors import BadRequestError
from txmq.protocol.grants import ADMINISTRATOR, OPERATIONS, Grant, allows, read_grants

UUID = "0123456789abcdef" * 2


def test_a_grant_covers_its_operation_kind_and_name_only() -> None:
    grant = Grant("read", "topic", "orders")
    assert grant.covers("read", "topic", "orders")
    assert not grant.covers("write", "topic", "orders")
    assert not grant.covers("read", "group", "orders")
    assert not grant.covers("read", "topic", "orders2")
    assert not grant.covers("read", "topic", "order")


def test_a_star_covers_every_name_that_begins_so() -> None:
    assert Grant("read", "topic", "orders*").covers("read", "topic", "orders.eu")
    assert Grant("read", "topic", "orders*").covers("read", "topic", "orders")
    assert not Grant("read", "topic", "orders*").covers("read", "topic", "order")
    assert Grant("settle", "resource", "*").covers("settle", "resource", UUID)


def test_an_administrator_may_do_everything() -> None:
    assert all(ADMINISTRATOR.covers(may, kind, "any") for kind, all_of in OPERATIONS.items() for may in all_of)


def test_without_grants_nothing_is_allowed() -> None:
    assert not allows([], "read", "topic", "orders")
    assert allows([Grant("read", "topic", "a"), Grant("write", "topic", "b")], "write", "topic", "b")


def test_words_are_read_as_grants() -> None:
    assert read_grants("read,write,read", "topic", "a*") == [
        Grant("read", "topic", "a*"),
        Grant("write", "topic", "a*"),
    ]
    assert read_grants("settle", "resource", UUID) == [Grant("settle", "resource", UUID)]


@pytest.mark.parametrize(
    ("may", "kind", "name"),
    [
        ("", "topic", "a"), ("read,", "topic", "a"), ("settle", "topic", "a"), ("write", "group", "g"),
        ("read", "topic", "a*b"), ("read", "topic", "**"), ("read", "topic", "-a"), ("settle", "resource", UUID[1:]),
        ("settle", "resource", "0*"), ("describe", "broker", "*"), ("read", "broker", "all"),
    ],
)  # fmt: skip
def test_other_words_are_refused(may: str, kind: str, name: str) -> None:
    with pytest.raises(BadRequestError):
        read_grants(may, kind, name)
