"""Values become bytes as the outbox was told."""

from __future__ import annotations

import pytest

from txmq.errors import ConfigError
from txmq.outbox.outbox import Codec, encoder_of


@pytest.mark.parametrize(
    ("codec", "value", "wanted"),
    [(None, b"a", b"a"), ("json", {"é": [1, None]}, '{"é":[1,null]}'.encode()), (str.encode, "a", b"a")],
)
def test_codec_makes_bytes(codec: Codec, value: object, wanted: bytes) -> None:
    assert encoder_of(codec)(value) == wanted


def test_codec_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected"):
        encoder_of("yaml")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [object(), {1: {2}}])
def test_value_that_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        encoder_of("json")(value)
