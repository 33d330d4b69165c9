"""A connection that a framework holds for the application, in the transaction that the framework has open.

``txmq.sqlalchemy`` and ``txmq.django`` have one class each: statements go through the framework, which so begins its
transaction, knows of its failures, and lets its own listeners see them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from txmq.xa.database.dialects import Dialect
from txmq.xa.database.loop_connection import LoopConnection


class FrameworkConnection(ABC):
    """See the module's docstring; for ``dbapi.run``.

    Args:
        dialect: of the database.
        placeholder: how a parameter is written, whatever the driver's own way is.
        is_of_loop: its calls are awaited, in the strand that makes them.

    Thread safety: the framework's.
    """

    def __init__(self, dialect: Dialect, placeholder: str, *, is_of_loop: bool = False) -> None:
        self.dialect, self.placeholder, self.is_of_loop = dialect, placeholder, is_of_loop

    @abstractmethod
    def cursor(self) -> Any:
        """A cursor, as DB-API has it."""

    @abstractmethod
    def would_autocommit(self) -> bool:
        """Whether a statement would be committed by itself."""

    @abstractmethod
    def doom(self, error: BaseException) -> None:
        """See to it that the open transaction does not commit, whatever the application does."""


def is_of_loop(connection: Any) -> bool:
    """Whether the connection is used by the strands of its loop, each call in the caller's own task."""
    return isinstance(connection, LoopConnection) or (
        isinstance(connection, FrameworkConnection) and connection.is_of_loop
    )
