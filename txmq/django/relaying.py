"""A relay in this process: Django's settings say how it reaches the database, and commits wake it.

The relay has a connection of its own: none of a pool, out of autocommit, and on SQLite one whose commits are forced,
whatever the project has chosen for its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.db import DEFAULT_DB_ALIAS, Error, connections

from txmq.django.sending import outbox_of
from txmq.django.settings import configured
from txmq.errors import ConfigError
from txmq.xa.database.refusals import described, naming, place, refusal_of

if TYPE_CHECKING:
    from txmq.client import Client
    from txmq.client.relay.relay import Relay


def relay(client: Client, using: str = DEFAULT_DB_ALIAS) -> Relay:
    """Take a database's messages to the broker, in a thread of this process, until ``close``; usable as a block.

    Any number of processes may run one: one of them works, the others stand by. Begin it after ``fork``, in the worker.
    A database that does not answer is waited for.

    Raises:
        ConfigError: the database has no outbox yet, refuses, or is SQLite's in memory; ``TXMQ`` is wrong.
    """
    require_outbox(using)
    return client.relay(outbox_of(using), connect=connector(using), durability=configured().durability)


def require_outbox(using: str) -> None:
    """Refuse a database without the tables, if it answers. Raises as ``relay``."""
    refuse_memory(using)
    connection = connections[using]
    tables = outbox_of(using).tables(connection)
    try:
        with connection.cursor() as cursor:
            is_there = tables.relay in connection.introspection.table_names(cursor)
        is_there = is_there and tables.peek(connection) is not None
    except Error as error:
        refusal = refusal_of(error)
        if refusal is None:
            return
        error.add_note(place(connection.settings_dict))
        raise ConfigError(f"database {using!r}: {refusal.value}: {described(error)}") from error
    if not is_there:
        raise ConfigError(f"database {using!r} has no outbox yet: manage.py migrate --database {using}")


def refuse_memory(using: str) -> None:
    """Refuse a database that no connection of our own sees.

    Raises:
        ConfigError: it is SQLite's in memory.
    """
    if is_in_memory(using):
        raise ConfigError(
            f"database {using!r} is in memory, which no other connection sees: give it a file (NAME of TEST)"
        )


def is_in_memory(using: str) -> bool:
    """Whether it is SQLite's in memory, as in most tests of a project."""
    connection = connections[using]
    return connection.vendor == "sqlite" and bool(connection.is_in_memory_db())


def connector(using: str) -> Callable[[], Any]:
    """What opens a connection of the driver's, as Django would, for a relay alone."""
    template = connections[using]

    def connect() -> Any:
        own = template.copy()
        own.settings_dict["OPTIONS"].pop("pool", None)
        own.connect()
        if own.vendor == "sqlite":
            own.connection.execute("PRAGMA synchronous = FULL")
        own.set_autocommit(False)
        return own.connection

    return naming(connect, template.settings_dict)
