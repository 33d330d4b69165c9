"""Checks of arguments: numbers, choices, names. A refusal is a ConfigError with the argument and what is expected.

NaN is in no range, and True is no number. All public calls use these checks, so all refuse in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable

from txmq.errors import ConfigError
from txmq.model import is_valid_name

WAIT_S_MAX = 86_400.0
TRANSACTION_S_MAX = 900.0  # the broker's default transaction_timeout_ms_max
_NUMBERS = (int, float)  # each block asks; a union would be made anew each time


def require_number(name: str, value: object, low: float, high: float) -> None:
    """Require a number from ``low`` to ``high``; a whole one if both of these are."""
    kinds = int if isinstance(low, int) and isinstance(high, int) else _NUMBERS
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        what = "a whole number" if kinds is int else "a number"
        raise ConfigError(f"{name} = {value!r}: expected {what} from {low} to {high}")


def require_wait(value: object, name: str = "timeout") -> None:
    """Require seconds to wait, 0 included; None stands for the caller's default."""
    if value is not None:
        require_number(name, value, 0.0, WAIT_S_MAX)


def require_transaction_timeout(value: object) -> None:
    """Require seconds until a transaction must be decided."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not 0 < value <= TRANSACTION_S_MAX:
        raise ConfigError(f"timeout = {value!r}: expected seconds, more than 0 and at most {TRANSACTION_S_MAX:.0f}")


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Require one of the choices."""
    known = sorted(choices)
    if value not in known:
        raise ConfigError(f"{name} = {value!r}: expected {', '.join(known)}")


def require_name(name: str, value: object) -> None:
    """Require a name for a topic, group or member."""
    if not isinstance(value, str) or not is_valid_name(value):
        raise ConfigError(f"{name} = {value!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")


def require_kind(name: str, value: object, kind: type, expected: str) -> None:
    """Require an object of a class."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} = {value!r}: expected {expected}")


def require_function(name: str, value: object, expected: str) -> None:
    """Require what can be called."""
    if not callable(value):
        raise ConfigError(f"{name} = {value!r}: expected {expected}")


def require_selector(value: object) -> None:
    """Require a ``PartitionSelector``."""
    if not callable(getattr(value, "select", None)):
        raise ConfigError(f"partition_selector = {value!r}: expected a PartitionSelector")


def require_path(name: str, value: object) -> None:
    """Require a path or None."""
    if value is not None and not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise ConfigError(f"{name} = {value!r}: expected a path")
