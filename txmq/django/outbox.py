"""The outbox of a database of Django's: ``send`` writes to it, ``relay`` takes its messages to the broker.

*Sending*. A message is a row, written at once on Django's own connection, in the transaction that Django has open, at
any depth of ``atomic()``. So it shares the fate of all other rows: a savepoint that is rolled back takes it along. All
messages of a transaction are one unit. Django has no place for what belongs to a transaction except its list of
callbacks, ``run_on_commit``: there the unit is kept, and Django ends it with the transaction, or with the savepoint in
which it began.

*The relay* runs in this process: Django's settings say how it reaches the database, and commits wake it. It has a
connection of its own: none of a pool, out of autocommit, and on SQLite one whose commits are forced, whatever the
project has chosen for its own.

Source: Django 5.2, "Database transactions", "Performing actions after commit".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from txmq.django.settings import configured
from txmq.errors import ConfigError, TransactionStateError
from txmq.outbox.outbox import Outbox, new_unit
from txmq.outbox.tables import OutboxTables
from txmq.xa.database.dialects import dialect_for
from txmq.xa.database.refusals import described, naming, place, refusal_of

if TYPE_CHECKING:
    from txmq.client import Client
    from txmq.client.relay.relay import Relay


class DjangoOutbox(Outbox):
    """The outbox of a database, which takes Django's own wrapper of a connection as well."""

    def tables(self, connection: Any) -> OutboxTables:
        """The tables; Django's cursors have one way to write a parameter, whatever their driver has."""
        if isinstance(connection, BaseDatabaseWrapper):
            return OutboxTables(self.table, dialect_for(None, connection.vendor), "%s")
        return super().tables(connection)

    def _ask(self, connection: Any, statement: str) -> Sequence[Any]:
        """Past Django's cursor: ``assertNumQueries`` counts the same whether a second has passed or not."""
        if not isinstance(connection, BaseDatabaseWrapper):
            return super()._ask(connection, statement)
        with connection.wrap_database_errors:
            return super()._ask(connection.connection, statement)


class _Unit:
    """The messages of a transaction; called when it has committed."""

    def __init__(self, alias: str, number: int | None) -> None:
        self.alias, self.number = alias, number

    def __call__(self) -> None:
        outbox_of(self.alias).wake()


def send(
    topic: str, value: Any, key: bytes | None = None, headers: Mapping[str, bytes] | None = None,
    using: str = DEFAULT_DB_ALIAS,
) -> None:  # fmt: skip
    """Write a message in the transaction that is open; a relay takes it to the broker when that has committed.

    Readers see all messages of a transaction or none of them. Messages with one key stay in order if the row that
    belongs to it is changed before the message is sent.

    Args:
        value: bytes, or what the setting ``CODEC`` takes.
        using: the alias of the database.

    Raises:
        TransactionStateError: there is no ``atomic()`` around it: the message would be committed alone.
        OutboxFullError: too many messages wait; nothing was written.
        ConfigError: topic, value or ``TXMQ`` cannot be used, or the transaction has too many messages.
        django.db.Error: as of any statement.

    Durability: that of the transaction's commit.
    """
    connection = connections[using]
    if not connection.in_atomic_block:
        raise TransactionStateError(
            f"send() to topic {topic!r:.80} outside of atomic(): its message would be committed alone; write `with "
            f"transaction.atomic(using={using!r}):` around it and the rows that belong to it, or set ATOMIC_REQUESTS"
        )
    connection.validate_no_broken_transaction()
    content = configured().encode(value)
    outbox_of(using).send(connection, topic, content, key, headers=headers, unit=_unit_of(connection).number)


def outbox_of(using: str) -> DjangoOutbox:
    """The outbox of a database.

    Raises:
        ConfigError: ``TXMQ`` is wrong, or the database is of a kind that has no outbox.
    """
    settings = configured()
    return _outbox(settings.name_of(using), connections[using].vendor, settings.rows_max, settings.unit_bytes_max)


@cache
def _outbox(name: str, vendor: str, rows_max: int, unit_bytes_max: int) -> DjangoOutbox:
    return DjangoOutbox(name, dialect=vendor, rows_max=rows_max, unit_bytes_max=unit_bytes_max)


def _unit_of(connection: Any) -> _Unit:
    if not connection.commit_on_exit:  # the project commits by hand, and Django keeps its callbacks for longer
        return _Unit(connection.alias, None)
    for _sids, callback, _robust in connection.run_on_commit:
        if isinstance(callback, _Unit):
            return callback
    unit = _Unit(connection.alias, new_unit())
    connection.on_commit(unit)
    return unit


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
