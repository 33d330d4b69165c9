"""The part of PEP 249 that txmq uses, as types; and finds a driver from one of its connections.

Source: PEP 249. No driver is imported here: the module of the application's own connection is looked up, so that
any driver works that the application has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import iscoroutine, iscoroutinefunction
from types import ModuleType
from typing import Any, Protocol

from txmq.errors import ConfigError
from txmq.runtime.call_limits import CallLimit
from txmq.runtime.caller import silence
from txmq.xa.database.strand_connection import ASYNCHRONOUS, LoopConnection, ThreadConnection, of_driver

_INNER = ("__wrapped__", "driver_connection")
_WRAPPERS_MAX = 8
_CLASSES_MAX = 64
_ADVICE = "give a connection of a DB-API one (sqlite3, MySQLdb, psycopg): txmq.aio uses it in a thread"


class Cursor(Protocol):
    """A DB-API cursor."""

    @property
    def rowcount(self) -> int:
        """Rows the last statement changed."""

    def execute(self, operation: str, parameters: Sequence[Any] = ..., /) -> Any:
        """Run one statement."""

    def fetchone(self) -> Any:
        """The next row, or None."""

    def fetchall(self) -> Any:
        """All rows left."""

    def close(self) -> None:
        """Let go of the result."""


class Connection(Protocol):
    """A DB-API connection."""

    def cursor(self) -> Any:
        """A new cursor."""

    def commit(self) -> None:
        """End the transaction."""

    def rollback(self) -> None:
        """Undo the transaction."""

    def close(self) -> None:
        """End the session; uncommitted work is undone."""


def innermost(connection: Any) -> Any:
    """The driver's own connection in wrappers of tracing or of a pool, as far as they tell.

    Sources: wrapt, ``ObjectProxy.__wrapped__``; SQLAlchemy, ``PoolProxiedConnection.driver_connection``.
    """
    cls: type = type(connection)
    if isinstance(connection, LoopConnection) or driver_of_class(cls) is not None:
        return connection
    for _ in range(_WRAPPERS_MAX):
        inner = next((found for name in _INNER if _is_connection(found := getattr(connection, name, None))), connection)
        if inner is connection:
            break
        connection = inner
    return connection


def driver_of(connection: Any) -> ModuleType | None:
    """The DB-API module that a connection comes from.

    Found by the class of the connection or of the one that it wraps; or by its attribute ``Error``, which a wrapper
    passes on. None if neither tells.

    Raises:
        ConfigError: it is no connection, or one of an asynchronous driver.
    """
    if isinstance(connection, LoopConnection):
        return connection.driver
    cls: type = type(connection)
    known = driver_of_class(cls)
    if known is not None:
        return known
    if not _is_connection(connection):
        found = of_driver(connection)
        if iscoroutine(found):
            found.close()  # nobody awaits it
            raise ConfigError(f"connect= is a coroutine function, as of an asynchronous driver: {_ADVICE}")
        _require_synchronous(found)
        raise ConfigError(f"a DB-API connection is needed, not {type(found).__qualname__}")
    inner = innermost(connection)
    _require_synchronous(inner)
    for one in (*type(inner).__mro__, getattr(connection, "Error", None)):
        module = _module_of(one) if isinstance(one, type) else None
        if module is not None:
            return module
    return None


@lru_cache(maxsize=_CLASSES_MAX)
def driver_of_class(cls: type) -> ModuleType | None:
    """The DB-API module whose own connections are of this class; None: the class alone does not tell.

    Asked for each message of an outbox: to look at a connection's attributes takes 30 us.
    """
    if not _is_connection(cls) or _is_asynchronous(cls, cls) or any(hasattr(cls, name) for name in _INNER):
        return None
    return next((module for one in cls.__mro__ if (module := _module_of(one)) is not None), None)


def _require_synchronous(found: Any) -> None:
    if _is_asynchronous(found, type(found)):
        raise ConfigError(f"{type(found).__module__} is an asynchronous driver: {_ADVICE}")


def _is_asynchronous(found: Any, cls: type) -> bool:
    """What is known by name, and what has coroutine functions: not all of those have (asyncmy, asyncpg's pool)."""
    has_coroutines = any(iscoroutinefunction(getattr(found, name, None)) for name in ("commit", "execute", "close"))
    return has_coroutines or cls.__module__.partition(".")[0] in ASYNCHRONOUS


def may_change_threads(connection: Any) -> bool:
    """Whether a connection may be used by one thread after another. sqlite3 binds most of its own to theirs."""
    if isinstance(connection, ThreadConnection):
        return True
    driver = driver_of(connection)
    return driver is not None and "sqlite" not in driver.__name__ and getattr(driver, "threadsafety", 0) >= 1


def limit_of(connection: Any) -> CallLimit:
    """A limit for the calls on a connection; without effect where no socket is found, as with SQLite."""
    return CallLimit(descriptor_of(connection))


def descriptor_of(connection: Any) -> Callable[[], int] | None:
    """What tells the descriptor of a connection's socket; None if it has none, as with SQLite."""
    inner = innermost(of_driver(connection))
    for found in (inner, getattr(inner, "_sock", None)):  # PyMySQL does not tell its own
        descriptor: Callable[[], int] | None = getattr(found, "fileno", None)
        if callable(descriptor):
            return descriptor
    return None


def _is_connection(found: Any) -> bool:
    return all(callable(getattr(found, name, None)) for name in ("cursor", "commit", "rollback", "close"))


def _module_of(cls: type) -> ModuleType | None:
    name = cls.__module__
    while name:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "paramstyle") and hasattr(module, "connect"):
            return module
        name = name.rpartition(".")[0]
    return None


def is_error(error: BaseException) -> bool:
    """Whether a driver raised it: PEP 249 names the classes, whatever module they are of."""
    return is_of_class(error, "Error")


def is_integrity_error(error: BaseException) -> bool:
    """Whether a row is there already."""
    return is_of_class(error, "IntegrityError")


def is_of_class(error: BaseException, name: str) -> bool:
    """Whether its class, or one that this comes from, has a name."""
    return any(cls.__name__ == name for cls in type(error).__mro__)


def run(connection: Connection, operation: str, parameters: Sequence[Any] = ()) -> tuple[list[Any], int]:
    """Run one statement on a cursor of its own.

    Returns:
        The rows it gave, and the number of rows it changed.
    """
    if isinstance(connection, ThreadConnection):
        return connection.call(run, operation, parameters)
    cursor = connection.cursor()
    try:
        # Without parameters none are passed: format drivers would read a "%" otherwise.
        cursor.execute(operation, tuple(parameters)) if parameters else cursor.execute(operation)
        rows = list(cursor.fetchall()) if cursor.description is not None else []
        if rows and isinstance(rows[0], Mapping):  # an application may have chosen such cursors for its connections
            rows = [tuple(row.values()) for row in rows]
        count = cursor.rowcount
    except BaseException:
        with suppress(Exception):  # what is half read cannot be closed: Ctrl-C would become the driver's error
            cursor.close()
        raise
    cursor.close()
    return rows, count


def silence_copy(connection: Any) -> None:
    """In a forked child: the driver, letting go of its copy of a connection, must not send the server a good-bye."""
    descriptor = getattr(connection, "fileno", None)  # SQLite's have none, and say nothing
    if descriptor is not None:
        with suppress(Exception):  # closed before
            silence(descriptor())


def text(value: object) -> str:
    """A value of a text column: some connections hand out bytes."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
