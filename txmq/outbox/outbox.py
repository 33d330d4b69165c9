"""The application's side of the outbox: messages written in the transaction that is open, on its own connection.

Theory of operation. ``send`` is an INSERT. It begins nothing and commits nothing: the message exists if the transaction
of the application commits, together with its rows. A relay takes it to the broker. Writing needs no broker, no client
and no topics.

A *unit* is what readers see all or none of: the messages of one call, or of one ``transaction``. DB-API does not tell
where a transaction begins, so that two calls on a bare connection are two units, unless ``unit=`` joins them.

Sources: PEP 249; Python, "sqlite3, Transaction control"; MariaDB, "OK_Packet" (server status); each driver's own word
for an open transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any, Final, Literal

from txmq.errors import ConfigError, OutboxFullError, TransactionStateError
from txmq.model import how_to_encode, is_valid_name
from txmq.outbox.tables import DEFAULT_TABLE, NewRow, OutboxTables
from txmq.runtime.clocks import OSClock, OSRandom
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import Lock, watch_forks
from txmq.xa.database.dbapi import Connection, driver_of_class, innermost, is_integrity_error, run
from txmq.xa.database.dialects import SQLITE, Dialect, code_of, sqlstate
from txmq.xa.database.strand_connection import LoopConnection, ThreadConnection, driver_name

Codec = Literal["json"] | Callable[[Any], bytes] | None
"""``"json"``, a function of the application's, or None: values are bytes already."""

UNIT_ROWS_MAX: Final = 10_000
UNIT_BYTES_MAX: Final = 60 << 20  # a broker's ``transaction_size_bytes_max`` is 64 MiB, with what frames them
ROWS_MAX: Final = 1_000_000
UNITS_MAX: Final = 1000  # whose messages an outbox adds up: as many transactions of one process may be open at a time
INSTALL_TRIES: Final = 3  # the services of a deployment begin together
LOOK_EVERY_S: Final = 1.0
LOOK_AGAIN_S: Final = 0.01  # after a transaction that must not count: its level is asked 100 times a second at most
_MYSQL_IN_TRANSACTION: Final = 1568  # characteristics cannot be changed while a transaction is in progress
_MYSQL_IN_TRANSACTION_FLAG: Final = 1  # of the server's status, which each of its answers has
_POSTGRESQL_IDLE: Final = 0
_POSTGRESQL_EXISTS: Final = ("23505", "42P07")  # unique_violation, duplicate_table
_SQLITE_LEGACY: Final = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL
Message = tuple[str, bytes] | tuple[str, bytes, bytes | None]
_RANDOM: Final[Random] = OSRandom()


def encoder_of(
    codec: Codec, json_encoder: type[json.JSONEncoder] | None = None, setting: str = 'codec="json"'
) -> Callable[[Any], Any]:
    """What a value goes through before it is written.

    Args:
        json_encoder: writes what JSON has no word for; None: that is refused.
        setting: what an application sets to have JSON made of its values.

    Raises:
        ConfigError: there is no such codec.
    """
    if codec is None:
        return partial(_as_it_is, setting=setting)
    if codec == "json":
        return partial(as_json, json_encoder=json_encoder)
    if callable(codec):
        return codec
    raise ConfigError(f'codec={codec!r}: expected "json", a function of the value that gives bytes, or None')


def _as_it_is(value: Any, setting: str) -> bytes:
    if not isinstance(value, bytes):
        raise ConfigError(
            f"the value of a message is bytes, not {type(value).__name__}: {how_to_encode('value', value)}, or have "
            f"JSON made of every value: {setting}"
        )
    return value


def as_json(value: Any, json_encoder: type[json.JSONEncoder] | None = None) -> bytes:
    """JSON as an outbox writes it.

    Raises:
        ConfigError: the value is none.
    """
    try:
        return json.dumps(value, cls=json_encoder, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the value of a message is not JSON: {error}") from error


"""Topic and value, perhaps a key."""


def new_unit() -> int:
    """A unit that nobody has: 63 random bits."""
    return _RANDOM.bits(63)


def new_uuid() -> str:
    """The name of an outbox that is new."""
    return f"{_RANDOM.bits(128):032x}"


class Outbox:
    """An outbox: its tables, and what is written there. On an event loop: ``txmq.aio.Outbox``.

    Args:
        name: for operators and the broker's lists; of one database there may be several.
        table: name of the table for messages; the others are named after it.
        dialect: ``sqlite``, ``mysql`` or ``postgresql``; None to tell by the driver.
        rows_max: beyond so many rows that wait ``send`` refuses more.
        unit_bytes_max: of a unit's keys, values and headers: ``transaction_size_bytes_max`` of the brokers, at most.

    Thread safety: any thread, each with a connection of its own.
    """

    def __init__(
        self, name: str = "default", *, table: str = DEFAULT_TABLE, dialect: str | None = None,
        rows_max: int = ROWS_MAX, unit_bytes_max: int = UNIT_BYTES_MAX, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        if not is_valid_name(name):
            raise ConfigError(f"outbox name {name[:80]!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
        self.name, self.table, self._dialect = name, table, dialect
        self.rows_max, self.unit_bytes_max = rows_max, unit_bytes_max
        self._clock: Clock = clock or OSClock()
        self._lock, self._looked = Lock(), float("-inf")
        self._wakes: tuple[Callable[[], None], ...] = ()
        self._tables: dict[ModuleType, OutboxTables] = {}
        self._joined: dict[
            int, tuple[int, int]
        ] = {}  # of units that the caller has named: rows and bytes, the newest last
        watch_forks(self)

    def forked(self) -> None:
        """In a forked child: its relays are the parent's, and so was the thread that had the lock."""
        self._lock, self._wakes = Lock(), ()

    def tables(self, connection: Connection) -> OutboxTables:
        """The tables, as this connection's driver sees them."""
        driver = connection.driver if isinstance(connection, LoopConnection) else driver_of_class(type(connection))
        known = None if driver is None else self._tables.get(driver)
        if known is not None:
            return known
        asynchronous = driver_name(connection)
        if asynchronous:
            raise ConfigError(f"{asynchronous} is an asynchronous driver: use txmq.aio.Outbox, and await its calls")
        tables = OutboxTables.on(connection, self.table, self._dialect)
        if driver is not None:
            self._tables[driver] = tables
        return tables

    # --- relays of this process --------------------------------------------------------------------------------------

    def add_relay(self, wake: Callable[[], None]) -> None:
        """A relay of this process has begun: ``wake`` says that messages were committed."""
        with self._lock:
            self._wakes = (*self._wakes, wake)

    def remove_relay(self, wake: Callable[[], None]) -> None:
        """It has ended."""
        with self._lock:
            self._wakes = tuple(one for one in self._wakes if one != wake)

    def wake(self) -> None:
        """Messages were committed: this process's relays look now. ``transaction`` does that by itself."""
        for wake in self._wakes:
            wake()

    # --- messages ----------------------------------------------------------------------------------------------------

    def install(self, connection: Connection) -> None:
        """Create what is missing of the tables, and commit. Idempotent.

        Raises:
            ConfigError: tables of these names are others.
            the driver's error: the user may not create tables.

        Durability: as of any commit on this connection.
        """
        tables = self.tables(connection)
        for left in reversed(range(INSTALL_TRIES)):
            try:
                tables.create(connection, new_uuid())
                connection.commit()
                return
            except Exception as error:
                if not left or not (_came_second(error) or tables.dialect.rolls_back(connection, error)):
                    raise
                connection.rollback()

    def send(
        self, connection: Connection, topic: str, value: bytes, key: bytes | None = None, *,
        headers: Mapping[str, bytes] | None = None, unit: int | None = None,
    ) -> None:  # fmt: skip
        """Write a message in the transaction that is open on the connection; it leaves when that has committed.

        Args:
            key: messages with one key stay in the order of their ids: change the row that belongs to it first.
            unit: 63 random bits (``secrets.randbits(63)``), for messages of this transaction that readers see together;
                None: it stands alone.

        Raises:
            TransactionStateError: no transaction is open: the message would be committed alone.
            OutboxFullError: too many messages wait; nothing was written.
            ConfigError: topic or value cannot be sent, or its unit has too many messages.
            the driver's error: as of any statement.

        Durability: that of the application's COMMIT.
        """
        self._write(connection, [new_row(topic, value, key, headers)], unit)

    def send_many(self, connection: Connection, messages: Sequence[Message], *, unit: int | None = None) -> None:
        """Write several as one unit, of 10,000 at most. Raises and durability: as ``send``.

        Args:
            messages: (topic, value) or (topic, value, key).
        """
        self._write(connection, [new_row(*message) for message in messages], unit, is_unit=True)

    @contextmanager
    def transaction(self, connection: Connection) -> Iterator[OutboxTransaction]:
        """A transaction of the application, begun and committed here; its messages are one unit, written last.

        Raises:
            TransactionStateError: a transaction is open already.
            OutboxFullError, ConfigError: as ``send``; everything is rolled back.
            the driver's error: of a statement, or of the commit, whose outcome it tells as ever.

        Durability: that of a commit on this connection; then relays of this process are woken.
        """
        tables = self.tables(connection)
        if is_open(connection, tables.dialect):
            raise TransactionStateError(
                f"outbox {self.name!r}: a transaction is open on this connection already (many drivers begin one "
                "with any statement, a SELECT too): commit it or roll it back first, or write in it with "
                "outbox.send(connection, ...)"
            )
        bounds, transaction = Bounds(connection, tables.dialect), OutboxTransaction(self.unit_bytes_max)
        try:
            bounds.begin()
            yield transaction
            if transaction.rows:
                self._look(connection, tables)
                tables.insert(connection, transaction.rows, new_unit())
            bounds.end("COMMIT")
        except BaseException:
            with suppress(Exception):  # the connection is lost, and with it the transaction: the first error says so
                bounds.end("ROLLBACK")
            raise
        if transaction.rows:
            self.wake()

    def _write(
        self, connection: Connection, rows: Sequence[NewRow], unit: int | None, *, is_unit: bool = False
    ) -> None:  # fmt: skip
        count, size_bytes = len(rows), sum(row.size_bytes for row in rows)
        require_unit(count, size_bytes, self.unit_bytes_max)
        tables = self.tables(connection)
        if would_autocommit(connection, tables.dialect):
            raise TransactionStateError(
                f"outbox {self.name!r}: no transaction is open on this connection, the message would be committed "
                "alone: begin one, or write in `with outbox.transaction(connection):`"
            )
        if unit is not None:
            count, size_bytes = self._require_room_in(unit, count, size_bytes, connection, tables)
        self._look(connection, tables)
        tables.insert(connection, rows, new_unit() if unit is None and is_unit else unit)
        if unit is not None:
            self._note_joined(unit, count, size_bytes)

    def _require_room_in(
        self, unit: int, rows: int, size_bytes: int, connection: Connection, tables: OutboxTables
    ) -> tuple[int, int]:
        """What a unit has with these; the database is asked only if it is too much: savepoints may have taken back."""
        had = self._joined.get(unit, (0, 0))
        try:
            require_unit(had[0] + rows, had[1] + size_bytes, self.unit_bytes_max)
        except ConfigError:
            had = tables.size_of_unit(connection, unit)
            require_unit(had[0] + rows, had[1] + size_bytes, self.unit_bytes_max)
        return had[0] + rows, had[1] + size_bytes

    def _note_joined(self, unit: int, rows: int, size_bytes: int) -> None:
        with self._lock:
            self._joined.pop(unit, None)
            self._joined[unit] = rows, size_bytes
            if len(self._joined) > UNITS_MAX:
                del self._joined[next(iter(self._joined))]

    def _look(self, connection: Any, tables: OutboxTables) -> None:
        """Refuse more if too many wait; asked once a second."""
        now = self._clock.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now  # two threads may look at once, which does no harm
        ask = partial(self._ask, connection)
        if tables.is_serializable(ask):  # what it reads there makes writers wait for it, and fail: another one looks
            self._looked = now - LOOK_EVERY_S + LOOK_AGAIN_S
            return
        if tables.count_above(ask, self.rows_max):
            self._looked = float("-inf")
            raise OutboxFullError(f"outbox {self.name!r}: more than {self.rows_max} messages wait: does a relay run?")

    def _ask(self, connection: Any, statement: str) -> Sequence[Any]:
        """The rows of a statement that the application has not asked for."""
        return run(connection, statement)[0]


def _came_second(error: Exception) -> bool:
    """Whether another one has made the same thing meanwhile: IF NOT EXISTS looks at what is committed."""
    return is_integrity_error(error) or sqlstate(error) in _POSTGRESQL_EXISTS


class OutboxTransaction:
    """A transaction of the application: what it sends is written before its COMMIT."""

    def __init__(self, unit_bytes_max: int = UNIT_BYTES_MAX) -> None:
        self.rows: list[NewRow] = []
        self.size_bytes, self._unit_bytes_max = 0, unit_bytes_max

    def add(self, rows: Iterable[NewRow], size_bytes: int) -> None:
        """Take messages that were looked at."""
        self.rows.extend(rows)
        self.size_bytes += size_bytes

    def send(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None
    ) -> None:
        """Send a message when the transaction commits.

        Raises:
            ConfigError: topic or value cannot be sent, or there are too many.
        """
        row = new_row(topic, value, key, headers)
        require_unit(len(self.rows) + 1, self.size_bytes + row.size_bytes, self._unit_bytes_max)
        self.add([row], row.size_bytes)


def require_unit(rows: int, size_bytes: int, unit_bytes_max: int) -> None:
    """Refuse a unit that is too large for a broker: no reader could see it whole.

    Raises:
        ConfigError: it has too many messages, or bytes.
    """
    if rows > UNIT_ROWS_MAX:
        raise ConfigError(f"{rows} messages are more than the {UNIT_ROWS_MAX} of a unit: commit in between")
    if size_bytes > unit_bytes_max:
        raise ConfigError(
            f"{size_bytes} bytes of messages are more than the {unit_bytes_max} of a unit: commit in between, or raise "
            "transaction_size_bytes_max of the brokers and unit_bytes_max of the outbox"
        )


def new_row(topic: str, value: bytes, key: bytes | None = None, headers: Mapping[str, bytes] | None = None) -> NewRow:
    """A message, to be written.

    Raises:
        ConfigError: topic or value cannot be sent.
    """
    if not is_valid_name(topic):
        raise ConfigError(f"topic {topic[:80]!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
    for what, found in (("value", value), ("key", key)):
        if not isinstance(found, bytes) and (found is not None or what == "value"):
            kind = type(found).__name__
            raise ConfigError(f"the {what} of a message is bytes, not {kind}: {how_to_encode(what, found)}")
    return NewRow(topic, key, value, tuple((headers or {}).items()))


# --- is a transaction open? -------------------------------------------------------------------------------------------


def would_autocommit(connection: Any, dialect: Dialect) -> bool:
    """Whether a statement would be committed by itself, as far as the driver tells: no transaction is open, and the
    driver begins none."""
    return begin_statement(connection, dialect) != "" and not is_open(connection, dialect)


def begin_statement(connection: Any, dialect: Dialect) -> str:
    """What begins a transaction on the connection; empty if the driver does so by itself."""
    if isinstance(connection, ThreadConnection):
        return connection.call(begin_statement, dialect)
    inner = innermost(connection)
    if dialect.name == SQLITE.name:
        mode = _sqlite_autocommit(inner)
        by_itself = mode is False or (mode is None and getattr(inner, "isolation_level", "") is not None)
        return "" if by_itself else dialect.begin
    if dialect.name == "mysql":
        known = getattr(inner, "get_autocommit", None)
        is_on = known() if known is not None else int(run(connection, "SELECT @@autocommit")[0][0][0])
        return "BEGIN" if is_on else ""
    return "BEGIN" if getattr(inner, "autocommit", False) else ""


class Bounds:
    """Begin and end of a transaction that will write."""

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self._connection = connection
        self._statement = begin_statement(connection, dialect)
        if dialect.name == SQLITE.name and _sqlite_mode_of(connection) is None:
            self._statement = dialect.begin  # one that reads first could not write if another has written meanwhile

    def begin(self) -> None:
        """Begin, if the driver does not by itself."""
        if self._statement:
            run(self._connection, self._statement)

    def end(self, word: str) -> None:
        """COMMIT or ROLLBACK; what a statement has begun a statement ends.

        In autocommit ``commit`` of psycopg2 does nothing, nor does that of sqlite3 since Python 3.12.
        """
        if self._statement:
            run(self._connection, word)
        else:
            getattr(self._connection, word.lower())()


def let_commit_commit(connection: Any, dialect: Dialect) -> None:
    """Let ``commit`` of a connection of ours end what BEGIN has begun: not so in autocommit of some drivers."""
    if isinstance(connection, ThreadConnection):
        connection.call(let_commit_commit, dialect)
        return
    inner = innermost(connection)
    if dialect.name == SQLITE.name and _sqlite_autocommit(inner) is not None:
        inner.autocommit = True  # ends the transaction that autocommit=False keeps open
        inner.autocommit = _SQLITE_LEGACY
    elif hasattr(inner, "get_transaction_status") and not isinstance(inner, LoopConnection):  # psycopg2
        inner.autocommit = False


def is_open(connection: Any, dialect: Dialect) -> bool:
    """Whether a transaction is open, as far as the driver tells."""
    inner = innermost(connection)
    if dialect.name == SQLITE.name:
        return bool(getattr(inner, "in_transaction", False)) and _sqlite_mode_of(connection) is not False
    if dialect.name == "mysql":
        return _is_open_in_mysql(connection, inner)
    info, ask = getattr(inner, "info", None), getattr(inner, "get_transaction_status", None)
    if info is None and ask is None:
        return True  # its wrapper hides it
    status = ask() if ask is not None else info.transaction_status  # type: ignore[union-attr]
    return int(status) != _POSTGRESQL_IDLE


def _is_open_in_mysql(connection: Any, inner: Any) -> bool:
    status = getattr(inner, "server_status", None)
    if isinstance(status, int):
        return bool(status & _MYSQL_IN_TRANSACTION_FLAG)
    try:
        run(connection, "SET TRANSACTION READ WRITE")  # refused within one, by MariaDB and by MySQL
    except Exception as error:
        if code_of(error) == _MYSQL_IN_TRANSACTION:
            return True
        raise
    return False


def _sqlite_mode_of(connection: Any) -> bool | None:
    if isinstance(connection, ThreadConnection):
        return connection.call(_sqlite_mode_of)
    return _sqlite_autocommit(innermost(connection))


def _sqlite_autocommit(inner: Any) -> bool | None:
    """``autocommit`` of Python 3.12: False, a transaction is open all the time; True, ``commit`` does nothing. None: as
    with older Pythons a transaction is begun before a statement that writes, unless ``isolation_level`` is None."""
    found = getattr(inner, "autocommit", None)
    return found if isinstance(found, bool) else None
