"""The session of the source in the target: a statement is run in it, as a replica runs it.

Of what an older or another server does not tell, the target's own default must not decide: ``_UNTOLD`` says what the
source then means. A variable that the target does not have is left out if it says what holds there without it.

Source: MariaDB, "Replication and Binary Log System Variables"; MySQL, "Replication and Variables".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from txmq.binlog.decoded_changes import SYSTEM_CLOCK, SessionValue
from txmq.xa.database.dbapi import run

_UNTOLD: Final[dict[str, SessionValue]] = {
    "character_set_collations": "",  # MariaDB 11.2 and later
    "default_collation_for_utf8mb4": "utf8mb4_general_ci",  # MySQL 8 and later
}
_WITHOUT: Final[dict[str, SessionValue]] = {
    "character_set_collations": "", "check_constraint_checks": 1, "default_table_encryption": 0, "sql_if_exists": 0,
    "sql_require_primary_key": 0,
}  # fmt: skip
_LOCALE: Final = "en_US"  # of the number 0


class OtherSessionError(Exception):
    """The target cannot have the source's session."""


def enter_session(connection: Any, session: Mapping[str, SessionValue]) -> None:
    """Set the variables of the source's session; those that the connection has as they are stay untouched.

    Raises:
        OtherSessionError: the target has no such variable, or its machine another time zone.
        Exception: the driver's own.
    """
    wanted = dict(session)
    clock = wanted.pop("system_clock", None)
    if clock is not None and clock != (found := _text(run(connection, SYSTEM_CLOCK)[0][0][0])):
        raise OtherSessionError(
            f"it was run in the time zone SYSTEM, whose clock says {clock}, and {found} in the target: give both "
            "servers one default_time_zone"
        )
    names = sorted({*wanted, *_UNTOLD})
    place = ", ".join(["%s"] * len(names))
    shown = run(connection, f"SHOW SESSION VARIABLES WHERE variable_name IN ({place})", names)[0]
    held = {_text(name): _text(value) for name, value in shown}
    for name in names:
        value = wanted.get(name, _UNTOLD.get(name))
        if name not in held:
            if name in wanted and value != _WITHOUT.get(name):
                raise OtherSessionError(f"it was run with {name} = {value}, which the target does not have")
        elif held[name] not in _shown(name, value):
            run(connection, f"SET SESSION {name} = %s", (value,))


def _shown(name: str, value: SessionValue | None) -> tuple[str, ...]:
    """How the server shows a value."""
    if name == "timestamp":
        return ()
    if name == "lc_time_names" and value == 0:
        return (_LOCALE,)
    return (str(value), "ON") if value == 1 else (str(value), "OFF") if value == 0 else (str(value),)


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
