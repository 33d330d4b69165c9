"""Tables of settings: the fields of a frozen dataclass, each with its allowed values and its line of help.

A field is made by ``number``, ``decimal``, ``word``, ``flag`` or ``names``; ``settings_of`` reads the table, ``check``
refuses a value that is out of range, ``check_all`` those of a whole table. The table drives the file's keys, flags, and
the page of documentation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from txmq.errors import ConfigError

Kind = type[bool] | type[int] | type[float] | type[str] | type[tuple[str, ...]]


def number(default: int | None, low: int, high: int, text: str, *, section: str, none: str | None = None) -> Any:
    """A field with an integer."""
    return dataclasses.field(
        default=default, metadata={"low": low, "high": high, "help": text, "section": section, "none": none}
    )


def decimal(default: float, low: float, high: float, text: str, *, section: str) -> Any:
    """A field with a decimal number."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "help": text, "section": section})


def word(default: str, text: str, *, section: str, choices: tuple[str, ...] = (), form: str = "text") -> Any:
    """A field with a text.

    Args:
        form: what the text looks like, for people.
    """
    metadata = {"choices": choices, "help": text, "section": section, "form": form}
    return dataclasses.field(default=default, metadata=metadata)


def flag(default: bool, text: str, *, section: str) -> Any:
    """A field that is true or false."""
    return dataclasses.field(default=default, metadata={"help": text, "section": section})


def names(default: tuple[str, ...], text: str, *, section: str, form: str) -> Any:
    """A field with a list of texts."""
    return dataclasses.field(default=default, metadata={"help": text, "section": section, "form": form})


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of a table."""

    name: str
    kind: Kind
    default: Any
    help: str
    section: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    none: str | None = None  # what "none" means, if it is allowed
    form: str = "text"

    @property
    def allowed(self) -> str:
        """The allowed values, for people."""
        if self.kind is bool:
            return "true or false"
        if self.choices:
            return ", ".join(self.choices[:-1]) + " or " + self.choices[-1]
        if self.kind in (str, tuple):
            return self.form
        span = f"{self.low:,} to {self.high:,}".replace(",", "_")
        return span if self.none is None else f"{span}, or none ({self.none})"


_KINDS: dict[str, tuple[Kind, bool]] = {
    "bool": (bool, False), "int": (int, False), "float": (float, False), "str": (str, False), "int | None": (int, True),
    "tuple[str, ...]": (tuple, False),
}  # fmt: skip


def settings_of(table: type[Any]) -> dict[str, Setting]:
    """The settings of a dataclass by name, in order; fields made otherwise are passed over."""
    return {
        field.name: Setting(field.name, _KINDS[str(field.type)][0], field.default, **field.metadata)
        for field in dataclasses.fields(table)
        if field.metadata
    }


def parse_value(setting: Setting, text: str) -> object:
    """Read a value given as text. Text that cannot be read is returned, and refused with the settings."""
    text = text.strip()
    if setting.none is not None and text == "none":
        return None
    if setting.kind is bool:
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower(), text)
    if setting.kind is str:
        return text
    try:
        return setting.kind(text) if text.isascii() and len(text) <= 40 else text
    except ValueError:
        return text


def check(setting: Setting, value: object, place: str = "") -> None:
    """Refuse a value that is out of range.

    Args:
        place: stands before the setting's name, such as ``source.``.

    Raises:
        ConfigError: names the setting, the value and what is allowed.
    """
    if value is None and setting.none is not None:
        return
    if setting.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right_type = type(value) is setting.kind
    in_range = right_type and (not setting.choices or value in setting.choices)
    if in_range and setting.low is not None and setting.high is not None:
        in_range = setting.low <= value <= setting.high  # type: ignore[operator]
    if in_range and isinstance(value, tuple):
        in_range = all(isinstance(one, str) for one in value)
    if not in_range:
        is_quoted = isinstance(value, str) and type(parse_value(setting, value)) is setting.kind is not str
        hint = ", without quotes" if is_quoted else ""
        raise ConfigError(f"{place}{setting.name} = {str(value)[:80]!r}: expected {setting.allowed}{hint}")


def check_all(table: Any, place: str = "") -> None:
    """Refuse the first value of a table that is out of range. Raises as ``check``."""
    for setting in settings_of(type(table)).values():
        check(setting, getattr(table, setting.name), place)
