"""Offsets of a consumer in the transaction that Django has open: ``message.ack("default")`` in ``atomic()``.

The store is ``txmq.DatabaseOffsetStore``, whose statements in that transaction go through Django's own cursors. One
whose ack was refused loses its connection: Django lets its ``atomic()`` blocks end, and the database has rolled back.

Source: Django 5.2, "Database transactions"; ``BaseDatabaseWrapper.close`` within ``atomic()``.
"""

from __future__ import annotations

from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionProxy

from txmq.client.consumer.offsets.database_store import DatabaseOffsetStore
from txmq.client.consumer.offsets.offset_store import FrameworkConnection
from txmq.django.outbox import connector, refuse_memory
from txmq.errors import ConfigError
from txmq.runtime.threads import current_strand
from txmq.xa.database.dialects import dialect_for

_BUSY_TIMEOUT_MS = 1000  # of SQLite: the consumer's heartbeat waits for the store


def offset_store(using: str = DEFAULT_DB_ALIAS) -> DatabaseOffsetStore:
    """Where a consumer keeps its offsets, so that ``message.ack`` takes the database's alias or its connection.

    ``client.consumer(group, topics, offset_store=offset_store())``; ``manage.py migrate`` makes its table. Consumers of
    ``txmq.aio`` cannot use it: Django's connections belong to threads.

    Raises:
        ConfigError: the database is of a kind that has no offsets, or is SQLite's in memory.
    """
    refuse_memory(using)
    return _DjangoOffsetStore(using)


class _DjangoOffsetStore(DatabaseOffsetStore):
    def __init__(self, using: str) -> None:
        self._using, opened = using, connector(using)
        is_sqlite = dialect_for(None, connections[using].vendor).name == "sqlite"

        def connect() -> Any:
            own = opened()
            if is_sqlite:
                own.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
            return own

        super().__init__(connect, dialect=connections[using].vendor)

    @property
    def _to_install(self) -> str:
        return f"its table is missing: manage.py migrate --database {self._using}"

    def connection_of(self, given: Any) -> Any:
        """See ``OffsetStoreWithTransactions``.

        Raises:
            ConfigError: it is that of another database, or is used on an event loop.
        """
        alias = given.alias if isinstance(given, BaseDatabaseWrapper | ConnectionProxy) else given
        if not isinstance(alias, str):
            return super().connection_of(given)
        if alias != self._using:
            raise ConfigError(
                f"ack({alias!r:.80}): this consumer's offsets are in database {self._using!r}, "
                f"offset_store({alias!r:.80}) has them there"
            )
        if current_strand() is not None:
            raise ConfigError("Django's connections are used in threads: take a consumer of txmq, not of txmq.aio")
        return _Lent(connections[alias])


class _Lent(FrameworkConnection):
    """Django's wrapper of a connection."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(dialect_for(None, wrapper.vendor), "%s")
        self._wrapper = wrapper

    def cursor(self) -> Any:
        """Django's, which has one way to write a parameter, whatever its driver has."""
        return self._wrapper.cursor()

    def would_autocommit(self) -> bool:
        """Whether no ``atomic()`` is around it, in a project that does not commit by itself."""
        return bool(self._wrapper.get_autocommit())

    def doom(self, error: BaseException) -> None:
        """End the connection; another one is opened after the outermost ``atomic()``."""
        self._wrapper.close()
