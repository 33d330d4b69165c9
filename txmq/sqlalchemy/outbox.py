"""An outbox whose tables are in the application's metadata, and that takes sessions.

Sources: SQLAlchemy 2.0 and 2.1, "Session API", "Asynchronous I/O"; Python's sqlite3, "Transaction control".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Dialect, MetaData, bindparam, event, false, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError
from sqlalchemy.sql.expression import TextClause

from txmq.errors import ConfigError, TransactionStateError
from txmq.outbox.codec import Codec, encoder_of
from txmq.outbox.outbox import ROWS_MAX, UNIT_BYTES_MAX, new_uuid
from txmq.outbox.outbox import Outbox as PlainOutbox
from txmq.outbox.tables import DEFAULT_TABLE, NewRow, OutboxTables, encoded_headers
from txmq.sqlalchemy.session_messages import Place, SessionMessages
from txmq.sqlalchemy.sessions import AnySession, Bind, bind_of, sync_session, would_autocommit
from txmq.sqlalchemy.tables import NowMs, tables_in
from txmq.xa.database.dialects import dialect_for


class Outbox(PlainOutbox):
    """An outbox for sessions of SQLAlchemy: a ``txmq.Outbox``, as relays and commands take it.

    ``metadata.create_all`` makes its tables with the application's.

    Args:
        metadata: the application's: ``Base.metadata``, ``db.metadata``, ``SQLModel.metadata``.
        name: for operators and the broker's lists; of one database there may be several.
        table: name of the table for messages; the others are named after it.
        codec: what makes bytes of values: ``"json"``, a function, or None if they are bytes.
        rows_max: beyond so many rows that wait a commit with messages is refused.
        unit_bytes_max: of a transaction's keys, values and headers: ``transaction_size_bytes_max`` of the brokers, at
            most.

    Attributes:
        messages, parked, relay: the tables.

    Raises:
        ConfigError: a name or the codec is wrong, or the metadata has tables of these names.

    Thread safety: any thread, each with a session of its own.
    """

    def __init__(
        self, metadata: MetaData, name: str = "default", *, table: str = DEFAULT_TABLE, codec: Codec = None,
        rows_max: int = ROWS_MAX, unit_bytes_max: int = UNIT_BYTES_MAX,
    ) -> None:  # fmt: skip
        if not isinstance(metadata, MetaData):
            raise ConfigError(
                f"metadata is a MetaData, not {type(metadata).__name__}: give Base.metadata, db.metadata or "
                "SQLModel.metadata"
            )
        if metadata.schema and "." not in table:
            table = f"{metadata.schema}.{table}"
        super().__init__(name, table=table, rows_max=rows_max, unit_bytes_max=unit_bytes_max)
        self._encode = encoder_of(codec, setting='Outbox(..., codec="json")')
        try:
            self.messages, self.parked, self.relay = tables_in(metadata, table)
        except InvalidRequestError as error:
            raise ConfigError(f"the metadata has a table {table} or one beside it: give table=, one each") from error
        self._statements: dict[tuple[str, int], TextClause] = {}
        event.listen(metadata, "after_create", self._after_create)

    def tables(self, connection: Any) -> OutboxTables:
        """The tables, as SQLAlchemy's connection or one of a driver sees them."""
        if isinstance(connection, Connection):
            dialect = connection.dialect.name
            return OutboxTables(self.table, dialect_for(None, "mysql" if dialect == "mariadb" else dialect), "?")
        return super().tables(connection)

    def install(self, connection: Any) -> None:
        """Create what is missing of the tables. Idempotent.

        Args:
            connection: SQLAlchemy's, whose transaction the caller commits (in a migration of Alembic:
                ``op.get_bind()``), or a DB-API one, which is committed.

        Raises:
            ConfigError: tables of these names are others.
            the driver's error: the user may not create tables.
        """
        if not isinstance(connection, Connection):
            super().install(connection)
            return
        tables = (self.messages, self.parked, self.relay)
        self.messages.metadata.create_all(connection, tables=list(tables))
        for table in tables:
            try:
                connection.execute(select(table).where(false()))
            except DBAPIError as error:
                raise ConfigError(
                    f"table {table} is not an outbox's ({error.orig}): rename it, or give the outbox another table="
                ) from error
        self._insert_relay_row(connection)

    def send(  # type: ignore[override]  # sessions in place of DB-API connections
        self, session: AnySession, topic: str, value: Any, key: bytes | None = None, *,
        headers: Mapping[str, bytes] | None = None, bind: Bind | None = None,
    ) -> None:  # fmt: skip
        """Send a message when the session's transaction commits; one that is rolled back, or its savepoint, takes it
        along. Nothing is awaited and nothing asked: the message is written by the commit, after the flush. Begins a
        transaction if none is begun. All messages of a transaction are one unit.

        Args:
            session: a Session or AsyncSession, or a scoped one.
            key: messages with one key stay in the order of their transactions, if these lock a common row.
            bind: the engine whose rows the message belongs to, if the session has several.

        Raises:
            ConfigError: topic or value cannot be sent; the session has ``binds`` and none is named.
            TransactionStateError: the session's transaction takes no more messages.

        The commit raises OutboxFullError if too many messages wait, and TransactionStateError on an engine in
        autocommit; it has not happened then.

        Durability: that of the session's COMMIT.
        Thread safety: the session's.
        """
        found = sync_session(session)
        place = Place(self, bind_of(found, bind, self.messages, "send(..., bind=engine)"))
        if not found.in_transaction():
            if not found.autobegin:
                raise TransactionStateError(f"outbox {self.name!r}: the session has autobegin=False: begin() it first")
            found.begin()
        SessionMessages.of(found).add(found, place, topic, self._encode(value), key, headers)

    def send_many(  # type: ignore[override]
        self, session: AnySession, messages: Sequence[tuple[str, Any] | tuple[str, Any, bytes | None]], *,
        bind: Bind | None = None,
    ) -> None:  # fmt: skip
        """Send several, as ``send`` does."""
        for message in messages:
            self.send(session, *message, bind=bind)

    # --- for the commit ----------------------------------------------------------------------------------------------

    def require_room(self, connection: Connection) -> None:
        """Refuse a connection on which the message would commit alone, or a table that is full.

        Raises:
            TransactionStateError: it is in autocommit.
            OutboxFullError: too many messages wait.
        """
        if would_autocommit(connection):
            raise TransactionStateError(
                f"outbox {self.name!r}: the engine is in AUTOCOMMIT, the message would commit alone: give the session "
                "an engine with transactions"
            )
        self._look(connection, self.tables(connection))

    def _ask(self, connection: Any, statement: str) -> Sequence[Any]:
        if isinstance(connection, Connection):
            return connection.exec_driver_sql(statement).all()
        return super()._ask(connection, statement)

    def write(self, connection: Connection, rows: list[NewRow], unit: int) -> None:
        """Write messages in the open transaction, by one statement."""
        values: dict[str, Any] = {"unit": unit}
        for number, row in enumerate(rows):
            columns = (row.topic, row.key, row.value, encoded_headers(row.headers))
            values.update(zip(_names(number), columns, strict=True))
        connection.execute(self._statement(connection.dialect, len(rows)), values)

    def _statement(self, dialect: Dialect, count: int) -> TextClause:
        """An INSERT of so many rows.

        As text, which is compiled once: SQLAlchemy compiles ``insert().values([...])`` anew each time, for 0.3 ms.
        """
        known = self._statements.get((dialect.name, count))
        if known is None:
            known = self._statements[dialect.name, count] = self._new_statement(dialect, count)
        return known

    def _new_statement(self, dialect: Dialect, count: int) -> TextClause:
        _, unit, *of_message, _ = self.messages.c
        parameters, rows = [bindparam("unit", type_=unit.type)], list[str]()
        for number in range(count):
            names = _names(number)
            rows.append(f"(:unit, {', '.join(f':{name}' for name in names)}, {NowMs().compile(dialect=dialect)})")
            parameters += [bindparam(name, type_=one.type) for name, one in zip(names, of_message, strict=True)]
        table = dialect.identifier_preparer.format_table(self.messages)
        columns = ", ".join(column.name for column in self.messages.c if column.name != "id")
        statement = f"INSERT INTO {table} ({columns}) VALUES {', '.join(rows)}"  # noqa: S608
        return text(statement).bindparams(*parameters)

    def _after_create(self, _metadata: MetaData, connection: Connection, **_: Any) -> None:
        """Of whichever tables: one that failed half-way may have made the relay's, and lost its row."""
        if inspect(connection).has_table(self.relay.name, schema=self.relay.schema):
            self._insert_relay_row(connection)

    def _insert_relay_row(self, connection: Connection) -> None:
        """Insert it if it is missing; another process may do so at the same time."""
        if connection.execute(select(self.relay.c.id)).first():
            return
        row = {"id": 1, "uuid": new_uuid(), "home": "", "ids": "", "until_ms": 0}
        with suppress(IntegrityError), connection.begin_nested():
            connection.execute(insert(self.relay).values(row))


def _names(number: int) -> tuple[str, str, str, str]:
    """The parameters of a row of an INSERT."""
    return f"topic{number}", f"key{number}", f"value{number}", f"headers{number}"
