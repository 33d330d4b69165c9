"""From what an application sends to the bytes of a message."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from txmq.errors import ConfigError
from txmq.model import how_to_encode

Codec = Literal["json"] | Callable[[Any], bytes] | None
"""``"json"``, a function of the application's, or None: values are bytes already."""


def encoder_of(
    codec: Codec, json_encoder: type[json.JSONEncoder] | None = None, setting: str = 'codec="json"'
) -> Callable[[Any], Any]:
    """What a value goes through before it is written.

    Args:
        json_encoder: writes what JSON has no word for; None: that is refused.
        setting: what an application sets to have JSON made of its values.

    Raises:
        ConfigError: there is no such codec.
    """
    if codec is None:
        return partial(_as_it_is, setting=setting)
    if codec == "json":
        return partial(as_json, json_encoder=json_encoder)
    if callable(codec):
        return codec
    raise ConfigError(f'codec={codec!r}: expected "json", a function of the value that gives bytes, or None')


def _as_it_is(value: Any, setting: str) -> bytes:
    if not isinstance(value, bytes):
        raise ConfigError(
            f"the value of a message is bytes, not {type(value).__name__}: {how_to_encode('value', value)}, or have "
            f"JSON made of every value: {setting}"
        )
    return value


def as_json(value: Any, json_encoder: type[json.JSONEncoder] | None = None) -> bytes:
    """JSON as an outbox writes it.

    Raises:
        ConfigError: the value is none.
    """
    try:
        return json.dumps(value, cls=json_encoder, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the value of a message is not JSON: {error}") from error
