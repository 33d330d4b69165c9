"""What a message is made of is checked before anything is sent."""

from __future__ import annotations

import enum
from typing import Any, Literal

import pytest

from txmq.client.client import Client
from txmq.client.partitioner import checked
from txmq.client.producer.producer import checked_content
from txmq.errors import LocalProtocolError


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ((None, "v", None, None), "a value is bytes, not str: give value.encode()"),
        (("k", b"v", None, None), "a key is bytes or None, not str: give key.encode()"),
        ((None, b"v", None, b"x"), "a tag is a str or None, not bytes"),
        ((None, b"v", None, 7), "a tag is a str or None, not int"),
        ((None, b"v", {"a": "x"}, None), "headers map str to bytes"),
        ((None, b"v", [("a", b"x")], None), "headers map str to bytes, and are no list"),
    ],
)
def test_value_of_another_type_is_a_type_error_with_advice(message: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        checked_content(message, 1 << 20)


def test_a_tag_that_no_text_can_carry_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="a tag is"):
        checked_content((None, b"v", None, "\ud800"), 1 << 20)


class Name(enum.StrEnum):
    SHOP = "shop"


class Older(str, enum.Enum):  # noqa: UP042  as programs have it that are older than StrEnum
    TENANT = "tenant"


class Token(bytes):
    pass


class Place(int, enum.Enum):
    SECOND = 1


def test_subclasses_of_str_and_bytes_are_stored_as_plain_ones() -> None:
    message = (Token(b"k"), Token(b"v"), {Name.SHOP: Token(b"1"), Older.TENANT: b"2"}, Name.SHOP)
    content = checked_content(message, 1 << 20)
    assert content == (b"k", b"v", [("tag", b"shop"), ("shop", b"1"), ("tenant", b"2")])
    key, value, headers = content
    assert {type(part) for part in (key, value, *(content for _, content in headers))} == {bytes}
    assert {type(name) for name, _ in headers} == {str}


def test_a_partition_of_an_enumeration_is_its_number() -> None:
    assert str(checked(Place.SECOND, "t", 2)) == "1"


def test_a_header_that_no_text_can_carry_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="a header's name is"):
        checked_content((None, b"v", {"\ud800": b"x"}, None), 1 << 20)


@pytest.mark.parametrize("way", ["send", "send_async"])
@pytest.mark.parametrize("headers", [{Name.SHOP: b"1"}, {"shop": Token(b"1")}, {"\ud800": b"1"}])
def test_an_odd_header_holds_up_no_other_message(
    client: Client, headers: dict[str, bytes], way: Literal["send", "send_async"]
) -> None:
    producer = client.producer()
    try:
        producer.send("t", b"odd", headers=headers, partition=0)
        is_stored = True
    except LocalProtocolError:
        is_stored = False
    if way == "send":
        producer.send("t", b"next", partition=0)
    else:
        producer.send_async("t", b"next", partition=0).result(10)
    found = [message.value for message in client.browse("t") if message.partition == 0]
    assert found == ([b"odd", b"next"] if is_stored else [b"next"])
