"""What callers may give: numbers, choices, names. A refusal is a ConfigError that says which, and what is expected.

NaN is in no range, and True is no number. One place, so that every public call refuses the same in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable

from txmq.errors import ConfigError
from txmq.model import is_valid_name

WAIT_S_MAX = 86_400.0
TRANSACTION_S_MAX = 900.0  # the broker's default transaction_timeout_ms_max


def require_number(name: str, value: object, low: float, high: float) -> None:
    """A number from ``low`` to ``high``; whole, where both of these are."""
    kinds = int if isinstance(low, int) and isinstance(high, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        what = "a whole number" if kinds is int else "a number"
        raise ConfigError(f"{name} = {value!r}: expected {what} from {low} to {high}")


def require_wait(value: object, name: str = "timeout") -> None:
    """Seconds to wait, maybe none; what a caller that gives None means is its own default."""
    if value is not None:
        require_number(name, value, 0.0, WAIT_S_MAX)


def require_transaction_timeout(value: object) -> None:
    """Seconds until a transaction must be decided."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= TRANSACTION_S_MAX:
        raise ConfigError(f"timeout = {value!r}: expected seconds, more than 0 and at most {TRANSACTION_S_MAX:.0f}")


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """One of some texts."""
    known = sorted(choices)
    if value not in known:
        raise ConfigError(f"{name} = {value!r}: expected {', '.join(known)}")


def require_name(name: str, value: object) -> None:
    """What may name a topic, group or member."""
    if not isinstance(value, str) or not is_valid_name(value):
        raise ConfigError(f"{name} = {value!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")


def require_kind(name: str, value: object, kind: type, expected: str) -> None:
    """An object of a class."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} = {value!r}: expected {expected}")


def require_selector(value: object) -> None:
    """What chooses partitions."""
    if not callable(getattr(value, "select", None)):
        raise ConfigError(f"partition_selector = {value!r}: expected a PartitionSelector")


def require_path(name: str, value: object) -> None:
    """A path, or None."""
    if value is not None and not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise ConfigError(f"{name} = {value!r}: expected a path")
