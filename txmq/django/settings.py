"""The setting ``TXMQ``: one dict, in which everything may be missing.

==============  ======================================================================================================
BOOTSTRAP       where the brokers are, as ``txmq.connect`` takes it: for ``manage.py txmq_relay``
NAME            names the outbox in the brokers' lists, together with the database's alias; by default the alias alone
CODEC           what makes bytes of a value: ``"json"``, a callable, the dotted path of one; by default values are bytes
ROWS_MAX        beyond so many messages that wait ``send`` refuses more
UNIT_BYTES_MAX  of a transaction's messages; ``transaction_size_bytes_max`` of the brokers, at most
DURABILITY      ``"weak"`` lets relays work on a server that may lose commits in a power loss: then the line may stop
==============  ======================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.utils.module_loading import import_string

from txmq.addresses import is_ensemble, parse_bootstrap, parse_ensemble
from txmq.client.relay.database_side import Durability
from txmq.config_sources import near_miss
from txmq.errors import ConfigError
from txmq.model import is_valid_name
from txmq.outbox.outbox import ROWS_MAX, UNIT_BYTES_MAX, encoder_of

KEYS: Final = ("BOOTSTRAP", "NAME", "CODEC", "ROWS_MAX", "UNIT_BYTES_MAX", "DURABILITY")
DURABILITIES: Final[tuple[Durability, ...]] = ("forced", "weak")
SETTING: Final = 'TXMQ = {"CODEC": "json"} in the settings'
AS_IS: Final = encoder_of(None, setting=SETTING)


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``TXMQ`` says."""

    bootstrap: str | None = None
    name: str | None = None
    encode: Callable[[Any], Any] = AS_IS
    rows_max: int = ROWS_MAX
    unit_bytes_max: int = UNIT_BYTES_MAX
    durability: Durability = "forced"

    def name_of(self, alias: str) -> str:
        """The name of a database's outbox."""
        return alias if self.name is None else f"{self.name}-{alias}"


def configured() -> Settings:
    """The project's settings.

    Raises:
        ConfigError: they are wrong; ``manage.py check`` says so as well.
    """
    given = getattr(settings, "TXMQ", {})
    for problem in problems(given):
        raise ConfigError(problem)
    return Settings(
        given.get("BOOTSTRAP"),
        given.get("NAME"),
        _encoder(given.get("CODEC")),
        given.get("ROWS_MAX", ROWS_MAX),
        given.get("UNIT_BYTES_MAX", UNIT_BYTES_MAX),
        given.get("DURABILITY", "forced"),
    )


def problems(given: Any) -> list[str]:
    """What is wrong with the setting, each with what would be right."""
    if not isinstance(given, Mapping):
        return [f"TXMQ is a {type(given).__name__}: expected a dict"]
    unknown = [_unknown(key) for key in given if key not in KEYS]
    found = (_problem(key, given[key]) for key in KEYS if given.get(key) is not None)
    return unknown + [problem for problem in found if problem]


def _unknown(key: Any) -> str:
    hint = near_miss(str(key).upper(), KEYS) or f"known are {', '.join(KEYS)}"
    return f"TXMQ has an unknown key {str(key)[:80]!r}; {hint}"


def _problem(key: str, value: Any) -> str | None:
    shown = f"TXMQ[{key!r}] = {value!r:.200}"
    if key == "BOOTSTRAP":
        return _problem_of_address(value)
    if key == "NAME":
        return None if isinstance(value, str) and is_valid_name(value) else f"{shown}: expected A-Z a-z 0-9 . _ -"
    if key == "DURABILITY":
        return None if value in DURABILITIES else f"{shown}: expected one of {', '.join(DURABILITIES)}"
    if key in ("ROWS_MAX", "UNIT_BYTES_MAX"):
        return None if type(value) is int and value > 0 else f"{shown}: expected a number, at least 1"
    try:
        _encoder(value)
    except (ImportError, ConfigError) as error:
        return f"{shown}: expected 'json', a callable, or the dotted path of one: {error}"
    return None


def _problem_of_address(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"TXMQ['BOOTSTRAP'] is a {type(value).__name__}: expected text such as txmq://broker1:8123"
    try:
        parse_ensemble(value, "bootstrap") if is_ensemble(value) else parse_bootstrap(value)
    except ConfigError as error:
        return f"TXMQ['BOOTSTRAP']: {error}"
    return None


def _encoder(given: Any) -> Callable[[Any], Any]:
    codec = import_string(given) if isinstance(given, str) and given != "json" else given
    return encoder_of(codec, DjangoJSONEncoder, SETTING)
