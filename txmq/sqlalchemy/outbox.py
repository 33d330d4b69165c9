"""An outbox whose tables are in the application's metadata, and that takes sessions.

Sources: SQLAlchemy 2.0 and 2.1, "Session API", "Asynchronous I/O"; Python's sqlite3, "Transaction control".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Dialect, Engine, MetaData, bindparam, event, false, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.sql.expression import TextClause

from txmq.errors import ConfigError, TransactionStateError
from txmq.outbox.outbox import (
    ROWS_MAX,
    UNIT_BYTES_MAX,
    Codec,
    OutboxTransaction,
    encoder_of,
    new_row,
    new_unit,
    new_uuid,
    require_unit,
)
from txmq.outbox.outbox import Outbox as PlainOutbox
from txmq.outbox.tables import DEFAULT_TABLE, ROWS_PER_STATEMENT, NewRow, OutboxTables, encoded_headers
from txmq.sqlalchemy.sessions import AnySession, Bind, bind_of, sync_session, would_autocommit
from txmq.sqlalchemy.tables import NowMs, tables_in
from txmq.xa.database.dialects import dialect_for

_KEY: Final = "txmq.outbox"
Headers = Mapping[str, bytes]


class Place(NamedTuple):
    """Where a message is written: the outbox, and the engine or connection."""

    outbox: Outbox
    bind: Engine | Connection


class SessionMessages:
    """What the open transactions of a session keep for its COMMIT.

    A message is kept under the innermost savepoint of its session, or the transaction. A savepoint that is released
    hands its messages to what is around it; what ends otherwise drops them. When the transaction commits, the session
    is flushed, and all that is kept is written: so the ids of messages are taken after the locks of the rows. Later
    listeners may still send, and the last flush may call more of them: what comes after the write is written at once.

    The listeners are those of the class ``Session``, so that every session has them before its first message. One added
    by a send within a commit would not be called for that commit any more.

    Invariants:
        * ``kept`` names open transactions only, the outermost first;
        * the messages of a transaction that go to one table have one unit;
        * a row that was written is kept no more, so that a COMMIT that failed and is called again writes it once.

    Source: SQLAlchemy 2.0 and 2.1, ``SessionEvents``, ``SessionTransaction``: ``before_commit`` and ``after_commit``
    are called for savepoints, too, ``before_commit`` before the last flush; ``after_soft_rollback`` is not called for a
    savepoint whose flush failed.

    Made for one transaction of a session, and gone with it.

    Thread safety: the session's.
    """

    def __init__(self) -> None:
        self._kept: dict[SessionTransaction, dict[Place, OutboxTransaction]] = {}
        self._units: dict[Place, int] = {}
        self._written: Counter[Place] = Counter()
        self._written_bytes: Counter[Place] = Counter()
        self._is_late = False

    @classmethod
    def of(cls, session: Session) -> SessionMessages:
        """Those of the session's open transaction."""
        found: SessionMessages | None = session.info.get(_KEY)
        if found is None:
            found = session.info[_KEY] = cls()
        return found

    def add(
        self, session: Session, place: Place, topic: str, value: bytes, key: bytes | None, headers: Headers | None
    ) -> None:  # fmt: skip
        """Keep a message, or write it if the COMMIT that is running has no later moment for it.

        Raises:
            TransactionStateError: the transaction takes no more.
            ConfigError: it cannot be sent, or there are too many.
        """
        transaction = session.get_nested_transaction() or session.get_transaction()
        if transaction is None or not transaction.is_active:
            raise TransactionStateError(
                f"outbox {place.outbox.name!r}: the session's transaction has ended or was rolled back, the message "
                "would be lost: call rollback() of the session (or of the savepoint) first, then send"
            )
        row, kept = new_row(topic, value, key, headers), list(self._kept_for(place))
        require_unit(
            1 + self._written[place] + sum(len(messages.rows) for messages in kept),
            row.size_bytes + self._written_bytes[place] + sum(messages.size_bytes for messages in kept),
            place.outbox.unit_bytes_max,
        )
        self._kept.setdefault(transaction, {}).setdefault(place, OutboxTransaction()).add([row], row.size_bytes)
        if self._is_late and _is_committing(session):
            self._write(session, transaction)

    def before_commit(self, session: Session, transaction: SessionTransaction) -> None:
        """Flush, then write what is kept; what comes later is written at once."""
        if session.in_nested_transaction():
            self._is_late = True  # a savepoint that is open commits first: see ``ended``
            return
        if self._kept:
            session.flush()
            self._write(session, transaction)
        self._is_late = True

    def hand_over(self, savepoint: SessionTransaction) -> None:
        """A savepoint was released: its messages are those of the transaction around it."""
        outer = savepoint.parent
        while outer is not None and not outer.nested and outer.parent is not None:
            outer = outer.parent  # a flush has a transaction of its own
        if outer is None:
            return
        around = self._kept.setdefault(outer, {})
        for place, messages in self._kept.pop(savepoint, {}).items():
            around.setdefault(place, OutboxTransaction()).add(messages.rows, messages.size_bytes)

    def ended(self, session: Session, savepoint: SessionTransaction) -> None:
        """A savepoint has ended; its messages were handed over, or are dropped."""
        self._kept.pop(savepoint, None)
        transaction = session.get_transaction()
        is_last = self._is_late and _is_committing(session) and not session.in_nested_transaction()
        if is_last and transaction is not None:
            self._write(session, transaction)

    def committed(self) -> None:
        """The transaction is committed: relays look at once.

        Raises:
            TransactionStateError: messages were not written.
        """
        left = sum(len(messages.rows) for kept in self._kept.values() for messages in kept.values())
        if left:
            raise TransactionStateError(
                f"the session has committed its rows without {left} messages that were sent too late: send before "
                "the commit, or in a listener of before_commit"
            )
        for outbox in {place.outbox for place in self._written}:
            outbox.wake()

    def _write(self, session: Session, transaction: SessionTransaction) -> None:
        for place, messages in self._kept.get(transaction, {}).items():
            if not messages.rows:
                continue
            unit = self._units.setdefault(place, new_unit())
            connection = session.connection(bind_arguments={"bind": place.bind})
            place.outbox.require_room(connection)
            while some := messages.rows[:ROWS_PER_STATEMENT]:
                place.outbox.write(connection, some, unit)
                size_bytes = sum(row.size_bytes for row in some)
                messages.size_bytes -= size_bytes
                del messages.rows[: len(some)]
                self._written[place] += len(some)
                self._written_bytes[place] += size_bytes

    def _kept_for(self, place: Place) -> Iterator[OutboxTransaction]:
        return (kept[place] for kept in self._kept.values() if place in kept)


def _is_committing(session: Session) -> bool:
    """Whether ``commit`` or ``prepare`` of the session's transaction is running, rather than a savepoint's.

    Both call the same listeners, which are told the session only.
    """
    return getattr(session.get_transaction(), "_current_fn", None) is not None


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    transaction = session.get_transaction()
    if transaction is not None and (_is_committing(session) or not session.in_nested_transaction()):
        SessionMessages.of(session).before_commit(session, transaction)


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    messages: SessionMessages | None = session.info.get(_KEY)
    if messages is None:
        return
    savepoint = session.get_nested_transaction()
    if savepoint is not None:
        messages.hand_over(savepoint)
    else:
        messages.committed()


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    messages: SessionMessages | None = session.info.get(_KEY)
    if messages is None:
        return
    if transaction.parent is None:
        del session.info[_KEY]
    else:
        messages.ended(session, transaction)


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
