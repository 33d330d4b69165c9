"""What a message is made of is checked before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from txmq.client.producer.headers import checked_headers
from txmq.errors import LocalProtocolError


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ((None, "v", None, None), "a value is bytes, not str"),
        (("k", b"v", None, None), "a key is bytes or None, not str"),
        ((None, b"v", None, b"x"), "a tag is a str or None, not bytes"),
        ((None, b"v", None, 7), "a tag is a str or None, not int"),
        ((None, b"v", {"a": "x"}, None), "headers map str to bytes"),
        ((None, b"v", [("a", b"x")], None), "headers map str to bytes, and are no list"),
    ],
)
def test_value_of_another_type_is_a_type_error_with_advice(message: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        checked_headers(message, 1 << 20)


def test_a_tag_that_no_text_can_carry_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="tag="):
        checked_headers((None, b"v", None, "\ud800"), 1 << 20)
