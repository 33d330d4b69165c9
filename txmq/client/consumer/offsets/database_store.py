"""Offsets in the application's own database: saved in the transaction that holds the rows.

Theory of operation. A row per group and partition holds the generation and the offset. A new owner of a partition
first commits ``generation = mine``, then reads the offset in a new transaction: from that commit on, an older owner's
update matches no row. ``message.ack(connection)`` updates the row in the application's transaction, which commits rows
and offset together or neither: each message has its effect once, whichever process dies. Acks without a connection are
saved by the store's own connection every ``offset_save_interval``. ``connection_of`` says which connections are taken;
the stores of ``txmq.sqlalchemy`` and ``txmq.django`` take sessions and aliases as well.

Invariants:
    * every update of an offset names the generation, and must match exactly one row;
    * a transaction whose ack was refused cannot commit: the block's connection is doomed, any other is rolled back and
      closed, by its framework if it has one;
    * an ack is refused while an earlier message's ack is neither committed nor in the same transaction.

Sources: MariaDB, "InnoDB Lock Modes", "SET TRANSACTION" (current reads of UPDATE); PostgreSQL 15, section 13.2; SQLite,
"Transaction" (one writer at a time).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from txmq.client.consumer.offsets.offset_store import FrameworkConnection, OffsetPosition, StoredOffset
from txmq.errors import (
    ConfigError,
    FencedError,
    OffsetStoreAwayError,
    StorageError,
    TransactionStateError,
    TxmqError,
    anew,
)
from txmq.model import TopicPartition
from txmq.outbox.outbox import would_autocommit
from txmq.runtime.clocks import OSClock
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, current_strand
from txmq.xa.database.dbapi import Connection, driver_of, run, text
from txmq.xa.database.dialects import MYSQL, POSTGRESQL, SQLITE, Dialect, dialect_for, placeholder_of
from txmq.xa.database.guarded_connection import GuardedConnection, behind_guard, doom
from txmq.xa.database.refusals import ASK_AGAIN_S, Refusal, described, refusal_of
from txmq.xa.database.strand_connection import ThreadConnection, driver_name, on_loop

T = TypeVar("T")
DEFAULT_TABLE: Final = "txmq_offset"
_STORES: Final = {
    "sqlalchemy": "txmq.sqlalchemy.DatabaseOffsetStore(...)", "django": "txmq.django.offset_store()",
}  # fmt: skip
_Condition = tuple[str, int | str | None]  # of what is saved, and the value it is compared with
_TABLE = re.compile(r"[A-Za-z0-9_]{1,64}(?:\.[A-Za-z0-9_]{1,64})?\Z")


@dataclass(frozen=True, slots=True)
class _Words:
    """What the databases call differently.

    Attributes:
        aside: column type for any text.
        newer: what a new owner's INSERT does where there is a row.
        slots: what stands before a list of slots.
        equals: whether two values are equal, or both are NULL.
        locks: after a SELECT: it waits for transactions that hold the row. SQLite's BEGIN IMMEDIATE has waited.
    """

    aside: str
    newer: str
    equals: str
    locks: str = " FOR UPDATE"
    slots: str = ""


_ON_CONFLICT = "ON CONFLICT (consumer_group, topic, partition_number) DO UPDATE SET generation"
_WORDS = {
    MYSQL.name: _Words(
        "MEDIUMTEXT CHARACTER SET utf8mb4",
        "ON DUPLICATE KEY UPDATE generation = GREATEST(generation, VALUES(generation))", "<=>",
    ),
    POSTGRESQL.name: _Words(
        "TEXT", f"{_ON_CONFLICT} = GREATEST(@table.generation, EXCLUDED.generation)", "IS NOT DISTINCT FROM"
    ),
    SQLITE.name: _Words("TEXT", f"{_ON_CONFLICT} = MAX(generation, excluded.generation)", "IS", "", "VALUES "),
}  # fmt: skip
# ``saves`` makes every match a change: MySQL counts changed rows, not matched ones.
_CREATE = (
    "CREATE TABLE IF NOT EXISTS @table (consumer_group @text NOT NULL, topic @text NOT NULL, "
    "partition_number INTEGER NOT NULL, generation BIGINT NOT NULL, next_offset BIGINT, aside @aside, "
    "log_history VARCHAR(2000), saves BIGINT DEFAULT 0 NOT NULL, saved_ms BIGINT, "
    "PRIMARY KEY (consumer_group, topic, partition_number))@options"
)
_ROW = "WHERE consumer_group = ? AND topic = ? AND partition_number = ?"
_LOOK = "SELECT 1 FROM @table LIMIT 1"
_FENCE = "INSERT INTO @table (consumer_group, topic, partition_number, generation) VALUES @rows @newer"
_READ = "SELECT generation, next_offset, aside, log_history FROM @table @row"
_READ_MANY = (
    "SELECT topic, partition_number, generation, next_offset, aside, log_history FROM @table "
    "WHERE consumer_group = ? AND (topic, partition_number) IN (@slots)"
)
_UPDATE = (
    "UPDATE @table SET next_offset = ?, aside = ?, log_history = ?, saves = saves + 1, saved_ms = @now_ms "
    "@row AND generation = ?"
)


class DatabaseOffsetStore:
    """See the module's docstring.

    Args:
        connect: makes a DB-API connection to the database that holds the application's rows. Give it short timeouts:
            the consumer's heartbeat waits for it.
        table: the table's name, with its schema if that is another one.
        dialect: ``sqlite``, ``mysql`` or ``postgresql``; None to tell by the driver.

    Thread safety: any thread; several consumers may share one.
    """

    is_shared = True

    def __init__(
        self, connect: Callable[[], Any], *, table: str = DEFAULT_TABLE, dialect: str | None = None
    ) -> None:  # fmt: skip
        if not isinstance(table, str) or _TABLE.match(table) is None:
            raise ConfigError(f"table = {table!r}: expected a name of letters, digits and _, or schema.name")
        self._connect, self._table = connect, table
        self._own: ThreadConnection | None = None  # SQLite's belongs to one thread, and a consumer has several
        self._dialect_name = dialect
        self._lock = Lock()
        self._clock: Clock = OSClock()
        self._refused: StorageError | None = None  # since it was asked last
        self._refusals, self._again_at = 0, 0.0

    def install(self) -> None:
        """Create the table if it is missing. Idempotent.

        Raises:
            StorageError: the database cannot be reached, or refuses.
        """

        def create(own: Connection) -> None:
            with self._transaction(own) as dialect:
                for statement in dialect.installing:
                    run(own, statement)
                self._run(own, _CREATE)

        self._ask(create, is_anew=True)

    # --- for the consumer --------------------------------------------------------------------------------------------

    def enter(self, group: str) -> None:
        """Check that the table is there.

        Raises:
            OffsetStoreAwayError: the database does not answer.
            StorageError: it refuses: user, password, table or privilege; the text says what to correct.
        """

        def look(own: Connection) -> None:
            self._run(own, _LOOK)
            own.rollback()  # an open transaction would keep the table's definition locked

        self._ask(look, is_anew=True)

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """See ``OffsetStore``. Waits a second for a transaction of the former owner that holds the row."""
        newest, found = self._ask(lambda own: self._loaded(own, group, [(slot, generation)]))[slot]
        if newest != generation:
            raise FencedError(
                f"{self._table} knows generation {newest} of {slot[0]}-{slot[1]} in group {group!r}, not {generation}: "
                "another owner is newer. If the broker's clock went back: delete the group's rows there"
            )
        return found

    def load_many(
        self, group: str, wanted: Sequence[tuple[TopicPartition, int]]
    ) -> Mapping[TopicPartition, StoredOffset | None]:
        """See ``OffsetStoreOfMany``. Two statements, each in a transaction of its own."""
        loaded = self._ask(lambda own: self._loaded(own, group, wanted))
        return {slot: loaded[slot][1] for slot, generation in wanted if loaded[slot][0] == generation}

    def _loaded(
        self, own: Connection, group: str, wanted: Sequence[tuple[TopicPartition, int]]
    ) -> dict[TopicPartition, tuple[int, StoredOffset | None]]:
        """The newest generation of each, and what is saved."""
        ordered = sorted(wanted)  # for all, so that two members that load the same rows cannot deadlock
        rows = ", ".join(["(?, ?, ?, ?)"] * len(ordered))
        fences = [value for slot, generation in ordered for value in (group, *slot, generation)]
        with self._transaction(own):
            self._run(own, _FENCE.replace("@rows", rows), fences)
        # From here on the owners before us are fenced; what they committed before is read next.
        slots = _WORDS[self._dialect(own).name].slots + ", ".join(["(?, ?)"] * len(ordered))
        names = [value for slot, _ in ordered for value in slot]
        found, _ = self._run(own, _READ_MANY.replace("@slots", slots), [group, *names])
        own.rollback()  # the next look is at what is committed by then
        return {(text(topic), int(number)): _kept(*columns) for topic, number, *columns in found}

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """See ``OffsetStore``. One transaction."""

        def saved(own: Connection) -> list[TopicPartition]:
            # In one order for all, so that two members that save the same rows cannot deadlock.
            with self._transaction(own):
                return [p.slot for p in sorted(positions) if self._update(own, group, p, ()) != 1]

        return self._ask(saved)

    def saved(self, group: str, slot: TopicPartition) -> StoredOffset | None:
        """See ``OffsetStoreWithTransactions``."""
        return self._ask(lambda own: self._read(own, group, slot)[1])

    def settled(self, group: str, slot: TopicPartition, connection: Any = None) -> StoredOffset | None:
        """See ``OffsetStoreWithTransactions``: reads with the row's lock, and waits a second for it."""
        if connection is not None:
            return self._found(connection, group, slot, is_locked=True)[1]

        def settled(own: Connection) -> StoredOffset | None:
            with self._transaction(own):
                return self._found(own, group, slot, is_locked=True)[1]

        return self._ask(settled)

    def leave(self, group: str) -> None:
        """Close the connection; it is opened again if another consumer uses this store."""
        with self._lock:
            self._close()

    # --- in the application's transaction ----------------------------------------------------------------------------

    def connection_of(self, given: Any) -> Any:
        """See ``OffsetStoreWithTransactions``: a driver's connection, synchronous or asynchronous, or a block's.

        Raises:
            ConfigError: it is a session or a framework's connection, or an asynchronous one outside of an event loop.
        """
        asynchronous = driver_name(given)
        if asynchronous and current_strand() is None:
            raise ConfigError(
                f"{asynchronous} is an asynchronous driver: a consumer of txmq.aio takes its connections, await "
                "message.ack(connection)"
            )
        if asynchronous:
            return on_loop(given)
        package = type(given).__module__.partition(".")[0]
        if package in _STORES and not hasattr(given, "driver_connection"):
            raise ConfigError(
                f"{type(given).__qualname__} of {package} is acknowledged in by a consumer with offset_store = "
                f"{_STORES[package]}"
            )
        return given

    def save_in(
        self, connection: Any, group: str, position: OffsetPosition, above: int | None, *,
        most: int | None = None, beside: StoredOffset | None = None,
    ) -> None:  # fmt: skip
        """See ``OffsetStoreWithTransactions``.

        Raises:
            ConfigError: the connection is in autocommit: there is no transaction to save in.
        """
        try:
            if self._would_autocommit(connection):
                raise ConfigError(
                    "the connection is in autocommit: begin a transaction, which the offset is to be saved in"
                )
            conditions = _conditions(above, most, beside, _WORDS[self._dialect(connection).name].equals)
            if self._update(connection, group, position, conditions) != 1:
                raise self._why(connection, group, position, conditions)
        except BaseException as error:
            self.doom(connection, error)
            raise

    def doom(self, connection: Any, error: BaseException) -> None:
        """See ``OffsetStoreWithTransactions``: a block's connection fails its block, any other is closed."""
        if doom(connection, error):
            return
        with suppress(Exception):
            if isinstance(connection, FrameworkConnection):
                connection.doom(error)
                return
            try:
                connection.rollback()
            finally:  # also if the task is cancelled once more meanwhile
                connection.close()

    def _would_autocommit(self, connection: Any) -> bool:
        if isinstance(connection, GuardedConnection):
            return False  # a block's own is in a transaction
        if isinstance(connection, FrameworkConnection):
            return connection.would_autocommit()
        return would_autocommit(connection, self._dialect(connection))

    def _why(
        self, connection: Any, group: str, position: OffsetPosition, conditions: Sequence[_Condition]
    ) -> TxmqError:  # fmt: skip
        (topic, partition), parameters = position.slot, (group, *position.slot)
        rows, _ = self._run(connection, _READ + "@locks", parameters)
        newest, *found = rows[0] if rows else (0, None, None)
        if newest != position.generation:
            return FencedError(
                f"{topic}-{partition} is somebody else's in group {group!r}: generation {newest}, not "
                f"{position.generation}; the transaction is rolled back"
            )
        expected = " and ".join(f"{sql} {value!r}" for sql, value in conditions)
        return TransactionStateError(
            f"offset {position.offset} of {topic}-{partition}: {found} is saved there, expected {expected}. An earlier "
            "message's transaction was rolled back, or this one's committed all the same? This one is rolled back, too"
        )

    # --- SQL ---------------------------------------------------------------------------------------------------------

    def _update(
        self, connection: Any, group: str, position: OffsetPosition, conditions: Sequence[_Condition]
    ) -> int:  # fmt: skip
        sql = _UPDATE + "".join(f" AND {condition} ?" for condition, _ in conditions)
        named = (group, *position.slot, position.generation)
        parameters: list[Any] = [position.offset, position.deferred, position.log, *named]
        return self._run(connection, sql, [*parameters, *(value for _, value in conditions)])[1]

    def _read(self, own: Connection, group: str, slot: TopicPartition) -> tuple[int, StoredOffset | None]:
        found = self._found(own, group, slot)
        own.rollback()  # the next look is at what is committed by then
        return found

    def _found(
        self, connection: Any, group: str, slot: TopicPartition, *, is_locked: bool = False
    ) -> tuple[int, StoredOffset | None]:
        rows, _ = self._run(connection, _READ + "@locks" * is_locked, (group, *slot))
        if not rows:
            return 0, None
        return _kept(*rows[0])

    @contextmanager
    def _transaction(self, own: Connection) -> Iterator[Dialect]:
        """A transaction of the store's own, which waits a second for others; after an error the connection goes."""
        dialect = self._dialect(own)
        if dialect.begin:
            run(own, dialect.begin)
        for statement in dialect.resolving:
            run(own, statement)
        yield dialect
        own.commit()

    def _dialect(self, connection: Any) -> Dialect:
        if isinstance(connection, FrameworkConnection):
            return connection.dialect
        return dialect_for(driver_of(behind_guard(connection)), self._dialect_name)

    def _run(self, connection: Any, sql: str, parameters: Sequence[Any] = ()) -> tuple[list[Any], int]:
        dialect = self._dialect(connection)
        if isinstance(connection, FrameworkConnection):
            mark = connection.placeholder
        else:
            mark = placeholder_of(driver_of(behind_guard(connection)), dialect)
        return run(connection, _said(sql, self._table, dialect).replace("?", mark), parameters)

    def _ask(self, ask: Callable[[Connection], T], *, is_anew: bool = False) -> T:
        """Call with the store's own connection, in its thread; after an error the next call opens another one.

        What the database refuses is not asked again for a while.

        Args:
            is_anew: ask all the same: somebody may have corrected it.
        """
        with self._lock:
            if self._refused is not None and not is_anew and self._clock.monotonic() < self._again_at:
                raise anew(self._refused)
            try:
                found = self._opened().call(ask)
            except TxmqError:
                self._close()
                raise
            except Exception as error:
                self._close()
                raise self._described(error) from error
            except BaseException:
                self._close()
                raise
            self._refused, self._refusals = None, 0
            return found

    def _described(self, error: Exception) -> StorageError:
        refusal = refusal_of(error)
        if refusal is None:
            return OffsetStoreAwayError(f"offset store {self._table}: {described(error)}")
        correct = self._to_install if refusal is Refusal.TABLE else refusal.value
        self._refused = StorageError(f"offset store {self._table}: {correct}: {described(error)}")
        self._again_at = self._clock.monotonic() + ASK_AGAIN_S.after(self._refusals)
        self._refusals += 1
        return anew(self._refused)

    @property
    def _to_install(self) -> str:
        return "its table is missing, or another one: call install() of the store once"

    def _opened(self) -> ThreadConnection:
        if self._own is None:
            self._own = ThreadConnection(self._connect)
            self._own.call(self._prepare)
        return self._own

    def _prepare(self, own: Connection) -> None:
        dialect = self._dialect(own)
        if dialect.name == MYSQL.name:
            run(own, dialect.for_resolvers)
            run(own, "SET autocommit = 0")
        elif why := dialect.why_not_idle(own):
            raise ConfigError(f"offset store {self._table}: connect= gives a connection that cannot be used: {why}")

    def _close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            with suppress(Exception):
                own.close()


def create_statement(dialect: Dialect, table: str = DEFAULT_TABLE) -> str:
    """What makes the table if it is missing."""
    return _said(_CREATE, table, dialect)


def _said(sql: str, table: str, dialect: Dialect) -> str:
    words = _WORDS[dialect.name]
    for name, said in (
        ("@newer", words.newer), ("@table", table), ("@row", _ROW), ("@locks", words.locks), ("@aside", words.aside),
        ("@text", dialect.text), ("@now_ms", dialect.now_ms), ("@options", dialect.table_options),
    ):  # fmt: skip
        sql = sql.replace(name, said)
    return sql


def _kept(generation: Any, offset: Any, deferred: Any, log: Any) -> tuple[int, StoredOffset | None]:
    return int(generation), None if offset is None else StoredOffset(int(offset), _text(deferred), _text(log))


def _conditions(above: int | None, most: int | None, beside: StoredOffset | None, equals: str) -> list[_Condition]:
    found: list[_Condition] = []
    if above is not None:
        found.append(("next_offset >", above))
    if most is not None:
        found.append(("COALESCE(next_offset, 0) <=", most))
    if beside is not None:
        found += [("next_offset =", beside.offset), (f"aside {equals}", beside.deferred)]
    return found


def _text(value: Any) -> str | None:
    return None if value is None else text(value) if not isinstance(value, bytes) else value.decode("utf-8")
