"""Whether a database refuses, or does not answer: what somebody must correct, and what comes back by itself.

A driver tells by a number (MySQL, MariaDB), by an SQLSTATE (PostgreSQL), or in words: libpq has no SQLSTATE for a login
that was refused, and SQLite has none at all. A framework's error has the driver's as its cause.

Invariants:
    * what is not surely a refusal is none: who waits for a database that is there at last loses nothing;
    * what is told is one line, and has no password: drivers name the user, connectors of ours the server (``naming``).

Sources: MariaDB, "Error Codes"; PostgreSQL 15, appendix A and section 20.1 (words of refused logins); PEP 249.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from txmq.runtime.backoff import Backoff
from txmq.xa.database.dbapi import is_error, is_of_class
from txmq.xa.database.dialects import code_of, sqlstate

ASK_AGAIN_S: Final = Backoff(1.0, 30.0)
"""Pauses of what goes on and is refused: passwords are changed while it runs, and servers count wrong ones."""


class Refusal(Enum):
    """What a database refuses."""

    LOGIN = "user or password are refused: correct them where the connection is opened, or at the server"
    DATABASE = "there is no such database: create it, or correct its name where the connection is opened"
    TABLE = "a table is missing, or another one"
    PRIVILEGE = "the user lacks a privilege: grant it"
    CALL = "the connection cannot be opened or used like this: correct the program"


# Wrong, from a host or by a plugin that is not allowed, expired, locked, without TLS, too many errors from a host.
_MYSQL_LOGIN: Final = (1045, 1129, 1130, 1251, 1524, 1698, 1820, 1862, 2059, 3118, 3159, 4151)
_OF_MYSQL: Final = {
    **dict.fromkeys(_MYSQL_LOGIN, Refusal.LOGIN),
    **dict.fromkeys((1046, 1049), Refusal.DATABASE),
    **dict.fromkeys((1054, 1146), Refusal.TABLE),
    **dict.fromkeys((1044, 1142, 1143, 1227, 1370), Refusal.PRIVILEGE),
}
_OF_POSTGRESQL: Final = {
    "28": Refusal.LOGIN, "3D000": Refusal.DATABASE, "3F000": Refusal.TABLE, "42P01": Refusal.TABLE,
    "42703": Refusal.TABLE, "42501": Refusal.PRIVILEGE,
}  # fmt: skip
_IN_WORDS: Final = (
    (r"authentication failed|no pg_hba\.conf entry|no password supplied", Refusal.LOGIN),
    (r'role "[^"]*" (does not exist|is not permitted to log in)', Refusal.LOGIN),
    (r'database "[^"]*" does not exist', Refusal.DATABASE),
    (r"permission denied for|readonly database", Refusal.PRIVILEGE),
    (r"no such (table|column)", Refusal.TABLE),
    (r"unable to open database file|file is not a database", Refusal.DATABASE),
)
_OF_PROGRAMS: Final = (TypeError, ValueError, LookupError, AttributeError, ImportError)
_OF_CALLS: Final = ("ProgrammingError", "NotSupportedError")
_CLOSED: Final = re.compile(r"closed|no active connection")  # a ProgrammingError of sqlite3, a ValueError of aiosqlite
_PLACE: Final = {
    "user": ("user",), "database": ("database", "db", "dbname", "name"), "server": ("host", "unix_socket"),
    "port": ("port",),
}  # fmt: skip


def refusal_of(error: BaseException) -> Refusal | None:
    """What the database refuses; None: it does not answer, or has failed for a moment."""
    chain = [error] if error.__cause__ is None else [error, error.__cause__]
    said = next((found for one in chain if (found := _said(one)) is not None), None)
    return said or (Refusal.CALL if any(map(_is_of_a_call, chain)) else None)


def _said(error: BaseException) -> Refusal | None:
    state, number = sqlstate(error) or "", code_of(error)
    known = _OF_POSTGRESQL.get(state) or _OF_POSTGRESQL.get(state[:2]) or _OF_MYSQL.get(number or 0)
    if known is not None or not is_error(error):
        return known
    return next((refusal for pattern, refusal in _IN_WORDS if re.search(pattern, str(error))), None)


def _is_of_a_call(error: BaseException) -> bool:
    if _CLOSED.search(str(error)):
        return False
    return any(is_of_class(error, name) for name in _OF_CALLS) if is_error(error) else isinstance(error, _OF_PROGRAMS)


def described(error: BaseException) -> str:
    """What a driver says, in one line, and which server it was."""
    number, words = code_of(error), str(error)
    if number is not None and len(error.args) > 1:
        words = f"{error.args[1]} ({number})"
    return "; ".join([" ".join(words.split()) or type(error).__name__, *filter(None, getattr(error, "__notes__", ()))])


def place(fields: Mapping[str, Any]) -> str:
    """Which user, database and server a driver's arguments, or Django's settings, name; nothing that may be secret."""
    given = {key.lower(): value for key, value in fields.items()}
    found = {what: next((given[key] for key in keys if given.get(key)), None) for what, keys in _PLACE.items()}
    return ", ".join(f"{what} {value}" for what, value in found.items() if value is not None)


def naming(connect: Callable[[], Any], fields: Mapping[str, Any]) -> Callable[[], Any]:
    """``connect``, whose errors say which server was asked."""

    def opened() -> Any:
        try:
            return connect()
        except Exception as error:
            error.add_note(place(fields))
            raise

    return opened
