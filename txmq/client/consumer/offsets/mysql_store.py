"""Offsets in the application's own MySQL or MariaDB: saved in the transaction that holds the rows.

Theory of operation. A row per group and partition holds the generation and the offset. A new owner of a partition
first commits ``generation = mine``, then reads the offset in a new transaction: from that commit on, an older owner's
update matches no row. ``message.ack(connection)`` updates the row in the application's transaction, which commits rows
and offset together or neither: each message has its effect once, whichever process dies. Acks without a connection are
saved by the store's own connection every ``offset_save_interval``.

Invariants:
    * every update of an offset names the generation, and must match exactly one row;
    * a transaction whose ack was refused cannot commit: the block's connection is doomed, any other is rolled back and
      closed;
    * an ack is refused while an earlier message's ack is neither committed nor in the same transaction.

Sources: MariaDB, "InnoDB Lock Modes", "SET TRANSACTION" (current reads of UPDATE).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from txmq.client.consumer.offsets.store import OffsetPosition, StoredOffset
from txmq.errors import ConfigError, FencedError, StorageError, TransactionStateError, TxmqError
from txmq.model import TopicPartition
from txmq.runtime.threads import Lock
from txmq.xa.database.dbapi import Connection, driver_of, run, text
from txmq.xa.database.dialects import MYSQL, placeholder_of
from txmq.xa.database.guarded_connection import GuardedConnection, doom

T = TypeVar("T")
_Condition = tuple[str, int | str | None]  # of what is saved, and the value it is compared with
_TABLE = re.compile(r"[A-Za-z0-9_]{1,64}(?:\.[A-Za-z0-9_]{1,64})?\Z")
_IN_TRANSACTION = 1568  # ER_CANT_CHANGE_TX_CHARACTERISTICS
_NO_SUCH_TABLE = 1146  # ER_NO_SUCH_TABLE
# ``saves`` makes every match a change: MySQL counts changed rows, not matched ones.
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS @table (consumer_group {MYSQL.text} NOT NULL, topic {MYSQL.text} NOT NULL, "
    "partition_number INT UNSIGNED NOT NULL, generation BIGINT UNSIGNED NOT NULL, next_offset BIGINT UNSIGNED NULL, "
    "aside MEDIUMTEXT CHARACTER SET utf8mb4 NULL, log_history VARCHAR(2000) CHARACTER SET ascii NULL, "
    "saves BIGINT UNSIGNED NOT NULL DEFAULT 0, saved_at TIMESTAMP NULL, "
    f"PRIMARY KEY (consumer_group, topic, partition_number)){MYSQL.table_options}"
)
_ROW = "WHERE consumer_group = ? AND topic = ? AND partition_number = ?"
_LOOK = "SELECT 1 FROM @table LIMIT 1"
_FENCE = (
    "INSERT INTO @table (consumer_group, topic, partition_number, generation) VALUES @rows "
    "ON DUPLICATE KEY UPDATE generation = GREATEST(generation, VALUES(generation))"
)
_READ = "SELECT generation, next_offset, aside, log_history FROM @table @row"
_READ_MANY = (
    "SELECT topic, partition_number, generation, next_offset, aside, log_history FROM @table "
    "WHERE consumer_group = ? AND (topic, partition_number) IN (@slots)"
)
_UPDATE = (
    "UPDATE @table SET next_offset = ?, aside = ?, log_history = ?, saves = saves + 1, saved_at = NOW() "
    "@row AND generation = ?"
)


class MySQLOffsetStore:
    """See the module's docstring.

    Args:
        connect: makes a DB-API connection to the database that holds the application's rows. Give it short timeouts:
            the consumer's heartbeat waits for it.
        table: the table's name, with its schema if that is another one.

    Thread safety: any thread; several consumers may share one.
    """

    is_shared = True

    def __init__(self, connect: Callable[[], Any], *, table: str = "txmq_offset") -> None:
        if not isinstance(table, str) or _TABLE.match(table) is None:
            raise ConfigError(f"table = {table!r}: expected a name of letters, digits and _, or schema.name")
        self._connect, self._table = connect, table
        self._own: Connection | None = None
        self._placeholder = "%s"
        self._lock = Lock()

    def install(self) -> None:
        """Create the table if it is missing. Idempotent.

        Raises:
            StorageError: the database cannot be reached, or refuses.
        """
        self._ask(lambda own: self._run(own, _CREATE))

    # --- for the consumer --------------------------------------------------------------------------------------------

    def enter(self, group: str) -> None:
        """Check that the table is there.

        Raises:
            StorageError: it is not, or the database cannot be reached.
        """

        def look(own: Connection) -> None:
            self._run(own, _LOOK)
            own.rollback()  # an open transaction would keep the table's definition locked

        try:
            self._ask(look)
        except StorageError as error:
            if getattr(error.__cause__, "args", ())[:1] == (_NO_SUCH_TABLE,):
                raise StorageError(f"{error}; call install() once") from error.__cause__
            raise

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
        self._run(own, _FENCE.replace("@rows", rows), fences)
        own.commit()  # from here on the owners before us are fenced; what they committed before is read next
        slots = ", ".join(["(?, ?)"] * len(ordered))
        names = [value for slot, _ in ordered for value in slot]
        found, _ = self._run(own, _READ_MANY.replace("@slots", slots), [group, *names])
        own.rollback()  # the next look is at what is committed by then
        return {(text(topic), int(number)): _kept(*columns) for topic, number, *columns in found}

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """See ``OffsetStore``. One transaction."""

        def saved(own: Connection) -> list[TopicPartition]:
            # In one order for all, so that two members that save the same rows cannot deadlock.
            refused = [p.slot for p in sorted(positions) if self._update(own, group, p, ()) != 1]
            own.commit()
            return refused

        return self._ask(saved)

    def saved(self, group: str, slot: TopicPartition) -> StoredOffset | None:
        """See ``OffsetStoreWithTransactions``."""
        return self._ask(lambda own: self._read(own, group, slot)[1])

    def settled(self, group: str, slot: TopicPartition, connection: Any = None) -> StoredOffset | None:
        """See ``OffsetStoreWithTransactions``: reads with the row's lock, and waits a second for it."""
        if connection is not None:
            return self._found(connection, group, slot, " FOR UPDATE")[1]
        return self._ask(lambda own: self._read(own, group, slot, " FOR UPDATE")[1])

    def leave(self, group: str) -> None:
        """Close the connection; it is opened again if another consumer uses this store."""
        with self._lock:
            self._close()

    # --- in the application's transaction ----------------------------------------------------------------------------

    def save_in(
        self, connection: Any, group: str, position: OffsetPosition, above: int | None, *,
        most: int | None = None, beside: StoredOffset | None = None,
    ) -> None:  # fmt: skip
        """See ``OffsetStoreWithTransactions``.

        Raises:
            ConfigError: the connection is in autocommit: there is no transaction to save in.
        """
        try:
            if not isinstance(connection, GuardedConnection):  # that one is in a transaction
                _refuse_autocommit(connection)
            conditions = _conditions(above, most, beside)
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
            connection.rollback()
        with suppress(Exception):
            connection.close()

    def _why(
        self, connection: Any, group: str, position: OffsetPosition, conditions: Sequence[_Condition]
    ) -> TxmqError:  # fmt: skip
        (topic, partition), parameters = position.slot, (group, *position.slot)
        rows, _ = self._run(connection, _READ + " FOR UPDATE", parameters)
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

    def _read(
        self, own: Connection, group: str, slot: TopicPartition, lock: str = ""
    ) -> tuple[int, StoredOffset | None]:
        found = self._found(own, group, slot, lock)
        own.rollback()  # the next look is at what is committed by then
        return found

    def _found(self, connection: Any, group: str, slot: TopicPartition, lock: str) -> tuple[int, StoredOffset | None]:
        rows, _ = self._run(connection, _READ + lock, (group, *slot))
        if not rows:
            return 0, None
        return _kept(*rows[0])

    def _run(self, connection: Any, sql: str, parameters: Sequence[Any] = ()) -> tuple[list[Any], int]:
        sql = sql.replace("@table", self._table).replace("@row", _ROW).replace("?", self._placeholder)
        return run(connection, sql, parameters)

    def _ask(self, ask: Callable[[Connection], T]) -> T:
        """Call with the store's own connection; after an error the next call opens another one."""
        with self._lock:
            try:
                return ask(self._opened())
            except TxmqError:
                self._close()
                raise
            except Exception as error:
                self._close()
                raise StorageError(f"offset store {self._table}: {error}") from error
            except BaseException:
                self._close()
                raise

    def _opened(self) -> Connection:
        if self._own is None:
            own = self._connect()
            self._placeholder = placeholder_of(driver_of(own), MYSQL)
            run(own, MYSQL.for_resolvers)
            run(own, "SET autocommit = 0")
            self._own = own
        return self._own

    def _close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            with suppress(Exception):
                own.close()


def _kept(generation: Any, offset: Any, deferred: Any, log: Any) -> tuple[int, StoredOffset | None]:
    return int(generation), None if offset is None else StoredOffset(int(offset), _text(deferred), _text(log))


def _conditions(above: int | None, most: int | None, beside: StoredOffset | None) -> list[_Condition]:
    found: list[_Condition] = []
    if above is not None:
        found.append(("next_offset >", above))
    if most is not None:
        found.append(("COALESCE(next_offset, 0) <=", most))
    if beside is not None:
        found += [("next_offset =", beside.offset), ("aside <=>", beside.deferred)]
    return found


def _refuse_autocommit(connection: Any) -> None:
    ((autocommit,),) = run(connection, "SELECT @@autocommit")[0]
    if not int(autocommit):
        return
    try:
        # Refused in the middle of a transaction that was begun with BEGIN.
        run(connection, "SET TRANSACTION READ WRITE")
    except Exception as error:
        if error.args and error.args[0] == _IN_TRANSACTION:
            return
        raise
    raise ConfigError("the connection is in autocommit: begin a transaction, which the offset is to be saved in")


def _text(value: Any) -> str | None:
    return None if value is None else text(value) if not isinstance(value, bytes) else value.decode("utf-8")
