"""The application's side of the outbox: messages written in the transaction that is open, on its own connection.

Theory of operation. ``send`` is an INSERT. It begins nothing and commits nothing: the message exists if the transaction
of the application commits, together with its rows. A relay takes it to the broker. Who writes needs no broker, no
client and no topics.

A *unit* is what readers see all or none of: the messages of one call, or of one ``transaction``. DB-API does not tell
where a transaction begins, so that two calls on a bare connection are two units, unless ``unit=`` joins them.

Sources: PEP 249; each driver's own word for an open transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from txmq.errors import ConfigError, OutboxFullError, TransactionStateError
from txmq.model import is_valid_name
from txmq.outbox.tables import DEFAULT_TABLE, NewRow, OutboxTables
from txmq.runtime.os_clock import OSClock, OSRandom
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import Lock
from txmq.xa.database.dbapi import Connection, innermost, run
from txmq.xa.database.dialects import Dialect

UNIT_ROWS_MAX: Final = 10_000
ROWS_MAX: Final = 1_000_000
LOOK_EVERY_S: Final = 1.0
_MYSQL_IN_TRANSACTION: Final = 1568  # characteristics cannot be changed while a transaction is in progress
_POSTGRESQL_IDLE: Final = 0
Message = tuple[str, bytes] | tuple[str, bytes, bytes | None]
"""Topic and value, perhaps a key."""


_RANDOM: Final[Random] = OSRandom()


def new_unit() -> int:
    """A unit that nobody has: 63 random bits."""
    return _RANDOM.bits(63)


class Outbox:
    """An outbox: its tables, and what is written there.

    Args:
        name: for operators and the broker's lists; of one database there may be several.
        table: name of the table for messages; those beside it are named after it.
        dialect: ``sqlite``, ``mysql`` or ``postgresql``; None to tell by the driver.
        rows_max: beyond so many rows that wait ``send`` refuses more.

    Thread safety: any thread, each with a connection of its own.
    """

    def __init__(
        self, name: str = "default", *, table: str = DEFAULT_TABLE, dialect: str | None = None,
        rows_max: int = ROWS_MAX, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        if not is_valid_name(name):
            raise ConfigError(f"outbox name {name[:80]!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
        self.name, self.table, self.rows_max, self._dialect = name, table, rows_max, dialect
        self._clock: Clock = clock or OSClock()
        self._lock, self._looked = Lock(), float("-inf")

    def tables(self, connection: Connection) -> OutboxTables:
        """The tables, as this connection's driver sees them."""
        return OutboxTables.on(connection, self.table, self._dialect)

    def install(self, connection: Connection) -> None:
        """Create what is missing of the tables, and commit. Idempotent.

        Raises:
            ConfigError: tables of these names are others.
            the driver's error: the user may not create tables.
        """
        tables = self.tables(connection)
        tables.create(connection, f"{_RANDOM.bits(128):032x}")
        connection.commit()

    def send(
        self, connection: Connection, topic: str, value: bytes, key: bytes | None = None, *,
        headers: Mapping[str, bytes] | None = None, unit: int | None = None,
    ) -> None:  # fmt: skip
        """Write a message in the transaction that is open on the connection; it leaves when that has committed.

        Args:
            key: messages with one key stay in the order of their ids: change the row that belongs to it first.
            unit: of ``new_unit``, for messages that readers are to see together; None: it stands alone.

        Raises:
            TransactionStateError: no transaction is open: the message would be committed alone.
            OutboxFullError: too many messages wait; nothing was written.
            ConfigError: topic or value cannot be sent.
            the driver's error: as of any statement.

        Durability: that of the application's COMMIT.
        """
        self._write(connection, [_row(topic, value, key, headers)], unit)

    def send_many(self, connection: Connection, messages: Sequence[Message], *, unit: int | None = None) -> None:
        """Write several as one unit. Raises and durability: as ``send``."""
        self._write(connection, [_row(*message) for message in messages], new_unit() if unit is None else unit)

    @contextmanager
    def transaction(self, connection: Connection) -> Iterator[OutboxTransaction]:
        """A transaction of the application, begun and committed here; its messages are one unit, written last.

        Raises:
            TransactionStateError: a transaction is open already.
        """
        tables = self.tables(connection)
        if _is_open(connection, tables.dialect):
            raise TransactionStateError(f"outbox {self.name!r}: a transaction is open on this connection already")
        begin = begin_statement(connection, tables.dialect)
        if begin:
            run(connection, begin)
        transaction = OutboxTransaction()
        try:
            yield transaction
            if transaction.rows:
                self._look(connection, tables)
                tables.insert(connection, transaction.rows, new_unit())
            connection.commit()
        except BaseException:
            with suppress(Exception):  # the connection is lost, and with it the transaction: the first error says so
                connection.rollback()
            raise

    def _write(self, connection: Connection, rows: Sequence[NewRow], unit: int | None) -> None:
        if len(rows) > UNIT_ROWS_MAX:
            raise ConfigError(f"{len(rows)} messages are more than the {UNIT_ROWS_MAX} of a unit")
        tables = self.tables(connection)
        if commits_alone(connection, tables.dialect):
            raise TransactionStateError(
                f"outbox {self.name!r}: no transaction is open on this connection, the message would be committed "
                "alone: begin one, or write in `with outbox.transaction(connection):`"
            )
        self._look(connection, tables)
        tables.insert(connection, rows, unit)

    def _look(self, connection: Connection, tables: OutboxTables) -> None:
        """Refuse more if too many wait; asked once a second."""
        with self._lock:
            now = self._clock.monotonic()
            if now - self._looked < LOOK_EVERY_S:
                return
            self._looked = now
        if tables.count_above(connection, self.rows_max):
            self._looked = float("-inf")
            raise OutboxFullError(f"outbox {self.name!r}: more than {self.rows_max} messages wait: does a relay run?")


class OutboxTransaction:
    """A transaction of the application: what it sends is written before its COMMIT."""

    def __init__(self) -> None:
        self.rows: list[NewRow] = []

    def send(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None
    ) -> None:
        """Send a message when the transaction commits.

        Raises:
            ConfigError: topic or value cannot be sent, or there are too many.
        """
        if len(self.rows) == UNIT_ROWS_MAX:
            raise ConfigError(f"a unit has {UNIT_ROWS_MAX} messages at most")
        self.rows.append(_row(topic, value, key, headers))


def _row(topic: str, value: bytes, key: bytes | None = None, headers: Mapping[str, bytes] | None = None) -> NewRow:
    if not is_valid_name(topic):
        raise ConfigError(f"topic {topic[:80]!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
    for what, found in (("value", value), ("key", key)):
        if not isinstance(found, bytes) and (found is not None or what == "value"):
            raise ConfigError(f"the {what} of a message is bytes, not {type(found).__name__}")
    return NewRow(topic, key, value, tuple((headers or {}).items()))


# --- is a transaction open? -------------------------------------------------------------------------------------------


def commits_alone(connection: Any, dialect: Dialect) -> bool:
    """Whether a statement would be committed by itself, as far as the driver tells: no transaction is open, and the
    driver begins none."""
    return begin_statement(connection, dialect) != "" and not _is_open(connection, dialect)


def begin_statement(connection: Any, dialect: Dialect) -> str:
    """What begins a transaction on the connection; empty if the driver does so by itself."""
    inner = innermost(connection)
    if dialect.name == "sqlite":
        by_itself = getattr(inner, "autocommit", -1) is False or (
            getattr(inner, "isolation_level", "") is not None and getattr(inner, "autocommit", -1) is not True
        )
        return "" if by_itself else "BEGIN IMMEDIATE"
    if dialect.name == "mysql":
        known = getattr(inner, "get_autocommit", None)
        is_on = known() if known is not None else int(run(connection, "SELECT @@autocommit")[0][0][0])
        return "BEGIN" if is_on else ""
    return "BEGIN" if getattr(inner, "autocommit", False) else ""


def _is_open(connection: Any, dialect: Dialect) -> bool:
    """Whether a transaction is open."""
    inner = innermost(connection)
    if dialect.name == "sqlite":
        return bool(getattr(inner, "in_transaction", False))
    if dialect.name == "mysql":
        try:
            run(connection, "SET TRANSACTION READ WRITE")  # refused within one, by MariaDB and by MySQL
        except Exception as error:
            if error.args and error.args[0] == _MYSQL_IN_TRANSACTION:
                return True
            raise
        return False
    info, ask = getattr(inner, "info", None), getattr(inner, "get_transaction_status", None)
    if info is None and ask is None:
        return True  # its wrapper hides it
    status = info.transaction_status if info is not None else ask()  # type: ignore[misc]
    return int(status) != _POSTGRESQL_IDLE
