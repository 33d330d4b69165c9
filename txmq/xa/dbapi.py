"""What txmq uses of PEP 249, as types, and how a driver is found from one of its connections.

Source: PEP 249. No driver is imported here: the module of the application's own connection is looked up, so that
any driver works that the application has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from txmq.errors import ConfigError


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
        """End the session; what is not committed is undone."""


def driver_of(connection: Connection) -> ModuleType:
    """The DB-API module that a connection (or a subclass of its class) comes from.

    Raises:
        ConfigError: no class of it belongs to a module with ``paramstyle`` and ``connect``.
    """
    for cls in type(connection).__mro__:
        module = sys.modules.get(cls.__module__.partition(".")[0])
        if module is not None and hasattr(module, "paramstyle") and hasattr(module, "connect"):
            return module
    raise ConfigError(f"connect= must return a DB-API connection, not {type(connection).__qualname__}")


def run(connection: Connection, operation: str, parameters: Sequence[Any] = ()) -> tuple[list[Any], int]:
    """Run one statement on a cursor of its own.

    Returns:
        The rows it gave, and the number of rows it changed.
    """
    cursor = connection.cursor()
    try:
        # Without parameters none are passed: format drivers would read a "%" otherwise.
        cursor.execute(operation, tuple(parameters)) if parameters else cursor.execute(operation)
        rows = list(cursor.fetchall()) if cursor.description is not None else []
        if rows and isinstance(rows[0], Mapping):  # an application may have chosen such cursors for its connections
            rows = [tuple(row.values()) for row in rows]
        return rows, cursor.rowcount
    finally:
        cursor.close()


def text(value: object) -> str:
    """A value of a text column: some connections hand out bytes."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
