"""The tables of an outbox: transactions whose messages wait in the database until a broker has them.

Theory of operation. A transaction that the broker could not prepare puts its messages here, in its own database
transaction: rows, marker and messages commit together. A drainer numbers what is committed (one commit of its own),
sends it in the order of the numbers, and deletes what the broker has placed.

Order needs no flag and no lock. A row of ``<table>_outbox_keys`` stands for each key that waits, and the marker of a
later transaction gets in only if none of its own keys stands there (``MarkerTable.insert_committed``). Who changed the
same row of the application before us has committed, since we waited for its lock: so its keys are seen. Keys are taken
away only when the broker has placed the messages, durably: what is prepared then comes behind them, and what was
prepared before and has no marker yet still finds the keys.

Tables::

    <table>_outbox        seq (primary key, given by the database in the order of the INSERTs), number (0: none), id
                          (the txid), state ('waiting' | 'parked' | 'recalled'), written_ms, size_bytes, reason,
                          batches, home
    <table>_outbox_keys   slot ('topic-partition'), hash ('*': an unkeyed message, or more keys than are listed), id
    <table>_outbox_topics see ``outbox_topics``
    <table>_outbox_series id (a home's; 1: a lone broker's, ``outbox_homes``), series, number (the highest that was
                          given), holder, until_ms

Invariants:
    * a row and its keys come in one transaction, and leave in one;
    * of two rows of one key the later one has the higher ``seq``: its INSERT came behind the commit of the other. A
      clock would not do: two rows of one millisecond, or a clock that is set back;
    * numbers, and how rows leave: see ``outbox_series``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from txmq.xa.database.dbapi import Connection, is_error, run, text
from txmq.xa.database.dialects import Dialect
from txmq.xa.database.marker_table import (
    ENCLOSED,
    EXPIRED_SIZE,
    OUTBOXED,
    MarkerTable,
    are_literals,
    is_literal,
    own_transaction,
)
from txmq.xa.database.outbox_homes import LONE, PARKED, WAITING
from txmq.xa.database.outbox_keys import ANY_KEY, OutboxKey
from txmq.xa.database.outbox_schema import additions, indexes, statements
from txmq.xa.database.outbox_series import OutboxSeries
from txmq.xa.database.outbox_topics import TopicSize
from txmq.xa.database.sqlite_turns import WriterTurn
from txmq.xa.database.statement import Statement

OUTBOXED_KEPT_MS = 24 * 3600 * 1000  # markers, as long as rolled-back ones
_ENCLOSED_PAGE = 2000
_NOW = "@@timestamp * 1000"  # of the statement, as cheap as it comes


class OutboxSize(NamedTuple):
    """How much waits. ``age_ms`` is the oldest row's; 0 if none waits."""

    rows: int
    size_bytes: int
    parked: int
    age_ms: int


class OutboxTables(OutboxSeries):
    """The statements on one database's tables. Has no connection of its own and keeps no state.

    Attributes:
        row_bytes_max: of a row's messages; None if the server does not limit them.
    """

    row_bytes_max: int | None = None

    def __init__(self, marker: str, dialect: Dialect, placeholder: str, place: WriterTurn | None = None) -> None:
        super().__init__(marker, dialect, placeholder, place)
        self._added_row = (
            f"INSERT INTO {self.name} (number, id, state, written_ms, size_bytes, reason, batches, home) "  # noqa: S608
            f"VALUES (0, %s, '{WAITING}', {_NOW}, %s, '', %s, %s)"
        )
        self._added_keys = f"INSERT INTO {self.keys} (slot, hash, id) VALUES "  # noqa: S608

    @classmethod
    def beside(cls, marker: MarkerTable) -> OutboxTables:
        """Those of a marker table, for the same driver."""
        return cls(marker.name, marker.dialect, marker.mark, marker.place)

    # --- installation ------------------------------------------------------------------------------------------------

    def create(self, connection: Connection, series: str) -> None:
        """Create missing tables and columns, and a lone broker's numbering. DDL may commit by itself."""
        with own_transaction(connection, self.dialect, self.place):
            for statement in statements(self.marker, self.dialect):
                run(connection, statement)
        for addition in additions(self.marker, self.dialect):
            if not self._has_columns(connection, addition.table, addition.column):
                with own_transaction(connection, self.dialect, self.place):
                    run(connection, addition.statement)
        with own_transaction(connection, self.dialect, self.place):
            for statement in indexes(self.marker, self.dialect):
                run(connection, statement)
        self.begin(connection, series)

    def _has_columns(self, connection: Connection, table: str, columns: str) -> bool:
        try:
            with own_transaction(connection, self.dialect, self.place):
                self._run(connection, f"SELECT {columns} FROM {table} WHERE 1 = 0")  # noqa: S608
        except Exception as error:
            if not is_error(error):
                raise
            return False
        return True

    def is_there(self, connection: Connection) -> bool:
        """Whether the tables can be read; the driver's error if they cannot. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            for columns, table in (("home", self.name), ("hash", self.keys), ("homes", self.topics.name)):
                self._run(connection, f"SELECT {columns} FROM {table} WHERE 1 = 0")  # noqa: S608
            return bool(self._run(connection, f"SELECT 1 FROM {self.series_table} LIMIT 1"))  # noqa: S608

    def tell_topics(self, connection: Connection, topics: Mapping[str, TopicSize]) -> None:
        """Write down what is newer than what stands there. Own transaction; none if nothing is."""
        with own_transaction(connection, self.dialect, self.place):
            known = self.topics.newest(connection)
            self.topics.tell(connection, [(name, size) for name, size in topics.items() if known.get(name) != size])
            if any(size.homes for size in topics.values()):
                self.retire_first(connection)

    # --- writers -----------------------------------------------------------------------------------------------------

    def add(
        self, connection: Connection, row_id: str, batches: bytes, keys: Collection[OutboxKey], home: str = LONE
    ) -> None:
        """Put a transaction's messages for one home beside its rows, in the transaction that is open."""
        # A driver may write bytes as text, which MySQL and MariaDB convert to the connection's character set.
        is_hex = self.dialect.name == "mysql"
        self._run(
            connection,
            f"INSERT INTO {self.name} (number, id, state, written_ms, size_bytes, reason, home, batches) "  # noqa: S608
            f"VALUES (0, ?, '{WAITING}', {self.dialect.now_ms}, ?, '', ?, {_in_hex(batches) if is_hex else '?'})",
            (row_id, len(batches), home, *(() if is_hex else (batches,))),
        )
        for key in sorted(keys):
            self._run(
                connection,
                f"INSERT INTO {self.keys} (slot, hash, id) VALUES (?, ?, ?)",  # noqa: S608
                (key.slot, key.hash, row_id),
            )

    def added(self, row_id: str, batches: bytes, keys: Collection[OutboxKey], home: str) -> list[Statement]:
        """The statements of ``add``, to be sent together with others; MySQL and MariaDB.

        Raises:
            ValueError: an id, a home or a key is not what it is called.
        """
        words = [row_id]
        for key in keys:
            words += key
        if not are_literals(words) or (home != LONE and not is_literal(home)):
            raise ValueError(f"not to be written into SQL: {', '.join(repr(word[:80]) for word in words[:8])}")
        row = Statement(self._added_row, (f"'{row_id}'", str(len(batches)), _in_hex(batches), f"'{home}'"))
        if not keys:
            return [row]
        literals = list[str]()
        for slot, key_hash in sorted(keys):
            literals += (f"'{slot}'", f"'{key_hash}'", f"'{row_id}'")
        rows = ", ".join(["(%s, %s, %s)"] * len(keys))
        return [row, Statement(self._added_keys + rows, tuple(literals))]

    def withdraw(self, connection: Connection, row_ids: Sequence[str]) -> None:
        """Take rows away that were added in the transaction that is open, with their keys."""
        for table in (self.name, self.keys):
            for row_id in row_ids:
                self._run(connection, f"DELETE FROM {table} WHERE id = ?", (row_id,))  # noqa: S608

    def nobody_waits(self, keys: Collection[OutboxKey]) -> tuple[str, list[str]]:
        """A condition that no message of these keys waits, as SQL with its parameters; for the marker's INSERT.

        See ``OutboxKey.collides``. A key is looked for in every slot of its topic.
        """
        among, parameters = self._among(keys)
        if not among:
            return "1 = 1", []
        return f"NOT EXISTS (SELECT 1 FROM {self.keys} WHERE {among})", parameters  # noqa: S608

    def last_ahead(self, connection: Connection, keys: Collection[OutboxKey], until: int | None = None) -> int | None:
        """The place of the last row that waits with one of these keys; in the transaction that is open.

        Args:
            until: rows behind that place do not matter.
        """
        among, parameters = self._among(keys)
        if not among:
            return None
        within = "" if until is None else f" AND o.seq <= {int(until)}"
        ((last,),) = self._run(
            connection,
            f"SELECT MAX(o.seq) FROM {self.keys} k JOIN {self.name} o ON o.id = k.id WHERE ({among}){within}",  # noqa: S608
            parameters,
        )
        return None if last is None else int(last)

    def _among(self, keys: Collection[OutboxKey]) -> tuple[str, list[str]]:
        """What finds the rows of ``keys`` that collide with these keys; empty if there are none."""
        conditions, parameters = list[str](), list[str]()
        whole = sorted({key.slot for key in keys if key.hash == ANY_KEY})
        for slot in whole:
            conditions.append("(slot = ?)")
            parameters.append(slot)
        keyed = [key for key in keys if key.hash != ANY_KEY]
        for topic in sorted({key.topic for key in keyed}):
            hashes = sorted({key.hash for key in keyed if key.topic == topic})
            conditions.append(
                f"(hash IN ({', '.join('?' * len(hashes))}) AND slot >= ? AND slot < ? AND slot NOT LIKE ?)"
            )
            # The dot comes next behind the hyphen; between them are topics, too, whose names begin so.
            parameters += [*hashes, f"{topic}-", f"{topic}.", f"{topic}-%-%"]
        slots = sorted({key.slot for key in keyed})
        if slots:
            conditions.append(f"(hash = '{ANY_KEY}' AND slot IN ({', '.join('?' * len(slots))}))")
            parameters += slots
        return " OR ".join(conditions), parameters

    # --- operators ---------------------------------------------------------------------------------------------------

    def release(self, connection: Connection, row_id: str) -> bool:
        """Let a parked row wait for its turn again; False if it is not parked, or its number is not used up."""
        with own_transaction(connection, self.dialect, self.place):
            _, count = self._counted(
                connection,
                f"UPDATE {self.name} SET state = '{WAITING}', reason = '' "  # noqa: S608
                f"WHERE id = ? AND state = '{PARKED}' AND number = 0",
                (row_id,),
            )
        return count == 1

    def size(self, connection: Connection) -> OutboxSize:
        """How much waits for the home. Own transaction."""
        now = self.dialect.now_ms
        with own_transaction(connection, self.dialect, self.place):
            ((rows, size, parked, age),) = self._run(
                connection,
                f"SELECT COUNT(*), COALESCE(SUM(size_bytes), 0), "  # noqa: S608
                f"COALESCE(SUM(CASE WHEN state = '{PARKED}' THEN 1 ELSE 0 END), 0), "
                f"COALESCE({now} - MIN(written_ms), 0) FROM {self.name} WHERE home = ?",
                (self.home,),
            )
        return OutboxSize(int(rows), int(size), int(parked), max(int(age), 0))

    def older(self, connection: Connection, until_ms: int) -> int:
        """How many rows wait, for all homes, that were written until then, by the database's clock. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            written = f"SELECT COUNT(*) FROM {self.name} WHERE written_ms <= ?"  # noqa: S608
            ((count,),) = self._run(connection, written, (until_ms,))
        return int(count)

    def homes(self, connection: Connection) -> list[str]:
        """Those for which messages wait. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            rows = self._run(connection, f"SELECT DISTINCT home FROM {self.name} ORDER BY home")  # noqa: S608
        return [text(home) for (home,) in rows]

    def listed(self, connection: Connection, limit: int) -> list[tuple[str, str, int, int, int, str, str]]:
        """Id, state, number, size, age in ms, reason and home of the oldest rows. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            rows = self._run(
                connection,
                f"SELECT id, state, number, size_bytes, {self.dialect.now_ms} - written_ms, reason, home "  # noqa: S608
                f"FROM {self.name} ORDER BY seq LIMIT {int(limit)}",
            )
        return [
            (text(row_id), text(state), int(number), int(size), int(age), text(reason), text(home))
            for row_id, state, number, size, age, reason, home in rows
        ]

    def waits(self, connection: Connection, txid: str) -> bool:
        """Whether a transaction's messages are here. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            return bool(self._run(connection, f"SELECT 1 FROM {self.name} WHERE id >= ? AND id < ?", _rows_of(txid)))  # noqa: S608

    def delete_expired_markers(self, connection: Connection) -> int:
        """Remove outboxed markers 24 h after they were written, once their messages have gone, at most EXPIRED_SIZE.

        Own transaction. How many.
        """
        old = f"outcome = '{OUTBOXED}' AND written_ms < {self.dialect.now_ms} - {OUTBOXED_KEPT_MS}"
        return len(self._delete_markers(connection, OUTBOXED, old, EXPIRED_SIZE))

    def delete_enclosed_markers(self, connection: Connection, kept_ms: int, after: str) -> str | None:
        """Remove a page of enclosed markers so long behind their deadline, once their messages have gone.

        Own transaction.

        Args:
            after: where the page begins.

        Returns:
            Where the next page begins; None if there is none.
        """
        old = f"outcome = '{ENCLOSED}' AND deadline_ms < {self.dialect.now_ms} - {int(kept_ms)} AND txid > ?"
        found = self._delete_markers(connection, ENCLOSED, old, _ENCLOSED_PAGE, (after,))
        return found[-1] if len(found) == _ENCLOSED_PAGE else None

    def _delete_markers(
        self, connection: Connection, outcome: str, condition: str, limit: int, parameters: Sequence[str] = ()
    ) -> list[str]:
        end = f"{self.marker}.txid || '.'" if self.dialect.name != "mysql" else f"CONCAT({self.marker}.txid, '.')"
        # Looked for first, without locks: a DELETE by anything but the key would wait for every open transaction.
        expired = self._run(
            connection,
            f"SELECT txid FROM {self.marker} WHERE {condition} "  # noqa: S608
            f"AND NOT EXISTS (SELECT 1 FROM {self.name} WHERE {self.name}.id >= {self.marker}.txid "
            f"AND {self.name}.id < {end}) ORDER BY txid LIMIT {limit}",
            parameters,
        )
        connection.rollback()
        found = [text(txid) for (txid,) in expired]
        if found:
            marks, delete = ", ".join("?" * len(found)), self.dialect.delete.format(table=self.marker)
            with own_transaction(connection, self.dialect, self.place):
                self._run(connection, f"{delete} WHERE outcome = '{outcome}' AND txid IN ({marks})", found)
        return found


def row_id(txid: str, number: int) -> str:
    """The id of a transaction's row for one of its homes, which are numbered from 0."""
    return f"{txid}-{number:x}" if number else txid


def _in_hex(batches: bytes) -> str:
    return f"X'{batches.hex()}'"


def _rows_of(txid: str) -> tuple[str, str]:
    """The first of a transaction's row ids, and what is behind the last one: the dot comes next behind the hyphen."""
    return txid, f"{txid}."
