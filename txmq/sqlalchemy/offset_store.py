"""Offsets of a consumer in the transaction of a session: ``message.ack(session)``.

Theory of operation. The store is ``txmq.DatabaseOffsetStore``. Its statements in the application's transaction go
through SQLAlchemy's own Connection, which the session has for its transaction, and which begins one if none is begun.
An AsyncSession's is awaited in the caller's task.

A transaction whose ack was refused loses its connection (``Connection.invalidate``): SQLAlchemy refuses every further
statement and the COMMIT, until the session is rolled back.

Source: SQLAlchemy 2.0 and 2.1, "Session API", "Dealing with Disconnects".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from sqlalchemy import Connection, MetaData, TextClause, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from txmq.client.consumer.offsets import database_store
from txmq.client.consumer.offsets.database_store import DEFAULT_TABLE
from txmq.client.consumer.offsets.offset_store import FrameworkConnection
from txmq.errors import ConfigError
from txmq.runtime.threads import current_strand
from txmq.sqlalchemy.sessions import Bind, bind_of, sync_session, unscoped, would_autocommit
from txmq.sqlalchemy.tables import offset_table_in
from txmq.xa.database.dialects import MYSQL, dialect_for
from txmq.xa.database.strand_connection import waited

_STATEMENTS_MAX = 100


class DatabaseOffsetStore(database_store.DatabaseOffsetStore):
    """A ``txmq.DatabaseOffsetStore`` that takes sessions of SQLAlchemy in ``message.ack``.

    They may be a Session or an AsyncSession, a scoped one of either, a Connection or an AsyncConnection; and
    connections of drivers, as ever. The asynchronous ones are for consumers of ``txmq.aio``.

    Args:
        metadata: the application's, which gets the table: ``create_all`` makes it, and Alembic finds it.
        connect: makes a connection of a synchronous driver to the same database, for the store alone. Give it short
            timeouts: the consumer's heartbeat waits for it.
        table: the table's name, with its schema if that is not the metadata's.
        bind: the engine of the rows, if sessions have several.

    Attributes:
        offsets: the table.

    Raises:
        ConfigError: a name is wrong, or the metadata has a table of this name.

    Thread safety: any thread, each with a session of its own.
    """

    def __init__(
        self, metadata: MetaData, connect: Callable[[], Any], *, table: str = DEFAULT_TABLE, bind: Bind | None = None
    ) -> None:  # fmt: skip
        if metadata.schema and "." not in table:
            table = f"{metadata.schema}.{table}"
        super().__init__(connect, table=table)
        self._bind = bind
        try:
            self.offsets = offset_table_in(metadata, table)
        except InvalidRequestError as error:
            raise ConfigError(f"the metadata has a table {table}: give table=, one for each store") from error

    @property
    def _to_install(self) -> str:
        return "its table is missing, or another one: call create_all() of the metadata, or run Alembic"

    def connection_of(self, given: Any) -> Any:
        """See ``OffsetStoreWithTransactions``; the connection of a session's transaction is asked for when it is used.

        Raises:
            ConfigError: an asynchronous one outside of an event loop; the session has ``binds``, and the store no
                ``bind=``.
        """
        found = unscoped(given)
        if not isinstance(found, Session | AsyncSession | Connection | AsyncConnection):
            return super().connection_of(found)
        if isinstance(found, AsyncSession | AsyncConnection) and current_strand() is None:
            raise ConfigError(
                f"{type(found).__qualname__} is asynchronous: a consumer of txmq.aio takes it, await message.ack(...)"
            )
        if isinstance(found, Connection | AsyncConnection):
            return _Lent(found, lambda: found, found.dialect.name)
        bind = bind_of(sync_session(found), self._bind, self.offsets, "DatabaseOffsetStore(..., bind=engine)")
        return _Lent(found, lambda: found.connection(bind_arguments={"bind": bind}), bind.dialect.name)


class _Lent(FrameworkConnection):
    """The Connection of a transaction of SQLAlchemy's.

    Args:
        owner: whose it is.
        connect: gives it, or what has to be awaited for it.
        name: of SQLAlchemy's dialect.
    """

    def __init__(
        self, owner: Session | AsyncSession | Connection | AsyncConnection, connect: Callable[[], Any], name: str
    ) -> None:  # fmt: skip
        kind = MYSQL.name if name == "mariadb" else name
        super().__init__(dialect_for(None, kind), "?", is_of_loop=isinstance(owner, AsyncSession | AsyncConnection))
        self._connect = connect

    def own(self) -> Any:
        """SQLAlchemy's."""
        return waited(self._connect())

    def cursor(self) -> Any:
        """A cursor, as DB-API has it."""
        return _Cursor(self.own())

    def would_autocommit(self) -> bool:
        """Whether the engine is in autocommit."""
        own = self.own()
        return bool(waited(own.run_sync(would_autocommit))) if self.is_of_loop else would_autocommit(own)

    def doom(self, error: BaseException) -> None:
        """End the connection: until the session is rolled back everything is refused, its COMMIT too."""
        waited(self.own().invalidate(error))


class _Cursor:
    """A statement, and its result."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._result: Any = None

    def execute(self, operation: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement."""
        values = {f"p{number}": value for number, value in enumerate(parameters)}
        self._result = waited(self._connection.execute(_statement(operation), values))

    def fetchall(self) -> Any:
        """All rows."""
        return self._result.fetchall()

    def close(self) -> None:
        """Let go of the result."""
        if self._result is not None:
            self._result.close()

    @property
    def description(self) -> Any:
        """None if the statement gives no rows."""
        return self._result.returns_rows or None

    @property
    def rowcount(self) -> int:
        """Rows that the statement has changed."""
        return int(self._result.rowcount)


@lru_cache(_STATEMENTS_MAX)
def _statement(operation: str) -> TextClause:
    """With names for its parameters, whose types the database tells."""
    numbers = count()
    return text(re.sub(r"\?", lambda _: f":p{next(numbers)}", operation))
