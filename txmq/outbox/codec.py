"""From what an application sends to the bytes of a message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from txmq.errors import ConfigError

Codec = Literal["json"] | Callable[[Any], bytes] | None
"""``"json"``, a function of the application's, or None: values are bytes already."""


def encoder_of(codec: Codec) -> Callable[[Any], Any]:
    """What a value goes through before it is written.

    Raises:
        ConfigError: there is no such codec.
    """
    if codec is None:
        return lambda value: value
    if codec == "json":
        return _json
    if callable(codec):
        return codec
    raise ConfigError(f'codec={codec!r}: expected "json", a function of the value that gives bytes, or None')


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the value of a message is not JSON: {error}") from error
