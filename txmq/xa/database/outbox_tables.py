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
                          (the txid), state ('waiting' | 'parked' | 'recalled'), written_ms, size_bytes, reason, batches
    <table>_outbox_keys   slot ('topic-partition'), hash ('*': an unkeyed message, or more keys than are listed), id
    <table>_outbox_topics see ``outbox_topics``
    <table>_outbox_series id (always 1), series, number (the highest that was given), holder, until_ms

A parked row was refused by the broker for good. Rows behind it that share a key with it get no number; those that had
one are recalled. The number of a parked or recalled row is used up by a void before it is taken from it: what a number
stood for never changes, so that a drainer that was paused can send nothing twice.

``holder`` drains until ``until_ms``. That only keeps others from doing the same work: two that drain are no harm.

Invariants:
    * a row and its keys come in one transaction, and leave in one;
    * of two rows of one key the later one has the higher ``seq``: its INSERT came behind the commit of the other. A
      clock would not do: two rows of one millisecond, or a clock that is set back;
    * a number of a series is given once, and numbers have no gaps, also when the table was empty in between;
    * a row leaves by its id and its number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from txmq.xa.database.dbapi import Connection, run, text
from txmq.xa.database.dialects import Dialect
from txmq.xa.database.marker_table import OUTBOXED, MarkerTable, own_transaction
from txmq.xa.database.outbox_keys import ANY_KEY, HeldKeys, OutboxKey
from txmq.xa.database.outbox_schema import statements
from txmq.xa.database.outbox_topics import OutboxTopics, TopicSize
from txmq.xa.database.sqlite_turns import WriterTurn

WAITING, PARKED, RECALLED = "waiting", "parked", "recalled"
NUMBERED_MAX = 256  # from the lowest number to the highest: of so many a broker knows which row took them
OUTBOXED_KEPT_MS = 24 * 3600 * 1000  # markers, as long as rolled-back ones
REASON_LENGTH_MAX = 180
PAGE_BYTES_MAX = 4 << 20  # that are read at once, but for a row that is larger
_PAGE = 500
_RECALL_ENDS = f"state = CASE WHEN state = '{RECALLED}' THEN '{WAITING}' ELSE state END"


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A transaction that waits, numbered."""

    number: int
    id: str
    state: str
    batches: bytes


class OutboxSize(NamedTuple):
    """How much waits. ``age_ms`` is the oldest row's; 0 if none waits."""

    rows: int
    size_bytes: int
    parked: int
    age_ms: int


class Series(NamedTuple):
    """The numbering: its name, and the highest number that was given."""

    name: str
    last: int


class OutboxTables:
    """The statements on one database's tables. Has no connection of its own and keeps no state.

    Attributes:
        row_bytes_max: of a row's messages; None if the server does not limit them.
        topics: what the database knows of them.
    """

    row_bytes_max: int | None = None

    def __init__(self, table: str, dialect: Dialect, placeholder: str, place: WriterTurn | None = None) -> None:
        self.marker, self.name = table, f"{table}_outbox"
        self.keys, self.series_table = f"{table}_outbox_keys", f"{table}_outbox_series"
        self.dialect, self.place, self._mark = dialect, place, placeholder
        self.topics = OutboxTopics(table, dialect, placeholder)

    @classmethod
    def beside(cls, marker: MarkerTable) -> OutboxTables:
        """Those of a marker table, for the same driver."""
        return cls(marker.name, marker.dialect, marker.mark, marker.place)

    # --- installation ------------------------------------------------------------------------------------------------

    def create(self, connection: Connection, series: str) -> None:
        """Create missing tables and the row of the series. Databases commit the former by themselves."""
        with own_transaction(connection, self.dialect, self.place):
            for statement in statements(self.marker, self.dialect):
                run(connection, statement)
        with own_transaction(connection, self.dialect, self.place):
            if not self._run(connection, f"SELECT 1 FROM {self.series_table} WHERE id = 1"):  # noqa: S608
                self._run(
                    connection,
                    f"INSERT INTO {self.series_table} (id, series, number, holder, until_ms) VALUES (1, ?, 0, '', 0)",  # noqa: S608
                    (series,),
                )

    def is_there(self, connection: Connection) -> bool:
        """Whether the tables can be read; the driver's error if they cannot. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            for table in (self.name, self.keys, self.topics.name):
                self._run(connection, f"SELECT 1 FROM {table} WHERE 1 = 0")  # noqa: S608
            return bool(self._run(connection, f"SELECT 1 FROM {self.series_table} WHERE id = 1"))  # noqa: S608

    def tell_topics(self, connection: Connection, topics: Mapping[str, TopicSize]) -> None:
        """Write down what is newer than what stands there. Own transaction; none if nothing is."""
        with own_transaction(connection, self.dialect, self.place):
            known = self.topics.newest(connection)
            self.topics.tell(connection, [(name, size) for name, size in topics.items() if known.get(name) != size])

    # --- writers -----------------------------------------------------------------------------------------------------

    def add(self, connection: Connection, row_id: str, batches: bytes, keys: Collection[OutboxKey]) -> None:
        """Put a transaction's messages beside its rows, in the transaction that is open."""
        self._run(
            connection,
            f"INSERT INTO {self.name} (number, id, state, written_ms, size_bytes, reason, batches) "  # noqa: S608
            f"VALUES (0, ?, '{WAITING}', {self.dialect.now_ms}, ?, '', ?)",
            (row_id, len(batches), batches),
        )
        for key in sorted(keys):
            self._run(
                connection,
                f"INSERT INTO {self.keys} (slot, hash, id) VALUES (?, ?, ?)",  # noqa: S608
                (key.slot, key.hash, row_id),
            )

    def nobody_waits(self, keys: Collection[OutboxKey]) -> tuple[str, list[str]]:
        """A condition that no message of these keys waits, as SQL with its parameters; for the marker's INSERT.

        See ``OutboxKey.collides``. A key is looked for in every slot of its topic.
        """
        conditions, parameters = list[str](), list[str]()
        whole = sorted({key.slot for key in keys if key.hash == ANY_KEY})
        for slot in whole:
            conditions.append("(slot = ?)")
            parameters.append(slot)
        keyed = [key for key in keys if key.hash != ANY_KEY]
        for topic in sorted({key.topic for key in keyed}):
            hashes = sorted({key.hash for key in keyed if key.topic == topic})
            conditions.append(f"(hash IN ({', '.join('?' * len(hashes))}) AND slot >= ? AND slot < ?)")
            parameters += [*hashes, f"{topic}-", f"{topic}."]  # the dot comes next behind the hyphen
        slots = sorted({key.slot for key in keyed})
        if slots:
            conditions.append(f"(hash = '{ANY_KEY}' AND slot IN ({', '.join('?' * len(slots))}))")
            parameters += slots
        if not conditions:
            return "1 = 1", []
        return f"NOT EXISTS (SELECT 1 FROM {self.keys} WHERE {' OR '.join(conditions)})", parameters  # noqa: S608

    # --- drainers ----------------------------------------------------------------------------------------------------

    def series(self, connection: Connection) -> Series:
        """The numbering. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            ((name, last),) = self._run(connection, f"SELECT series, number FROM {self.series_table} WHERE id = 1")  # noqa: S608
        return Series(text(name), int(last))

    def hold(self, connection: Connection, holder: str, lease_ms: int) -> bool:
        """Take, or keep, the turn to drain; False if another has it. Own transaction.

        A turn that ends later than a lease from now was given before the clock was set back.
        """
        now = self.dialect.now_ms
        with own_transaction(connection, self.dialect, self.place):
            self._run(
                connection,
                f"UPDATE {self.series_table} SET holder = ?, until_ms = {now} + {int(lease_ms)} "  # noqa: S608
                f"WHERE id = 1 AND (holder = ? OR until_ms < {now} OR until_ms > {now} + {int(lease_ms)})",
                (holder, holder),
            )
            rows = self._run(connection, f"SELECT holder FROM {self.series_table} WHERE id = 1")  # noqa: S608
        return bool(rows) and text(rows[0][0]) == holder

    def number(self, connection: Connection, limit: int = NUMBERED_MAX) -> int:
        """Number committed rows that wait and have none, behind no parked row of their keys; how many.

        Own transaction; drainers wait for each other, writers for none of them.
        """
        with own_transaction(connection, self.dialect, self.place):
            last = self._lock_numbers(connection)
            ((oldest,),) = self._run(connection, f"SELECT MIN(number) FROM {self.name} WHERE number > 0")  # noqa: S608
            room = NUMBERED_MAX - (0 if oldest is None else last + 1 - int(oldest))
            found = self._unhindered(connection, min(limit, room))
            if found:
                pairs = [word for number, seq in enumerate(found, last + 1) for word in (seq, number)]
                self._run(
                    connection,
                    f"UPDATE {self.name} SET number = CASE seq {'WHEN ? THEN ? ' * len(found)}ELSE number END "  # noqa: S608
                    f"WHERE seq IN ({', '.join('?' * len(found))})",
                    [*pairs, *found],
                )
                self._run(
                    connection,
                    f"UPDATE {self.series_table} SET number = ? WHERE id = 1",  # noqa: S608
                    (last + len(found),),
                )
        return len(found)

    def _lock_numbers(self, connection: Connection) -> int:
        """Keep others from numbering and parking until this transaction ends; the highest number."""
        locking = "" if self.dialect.name == "sqlite" else " FOR UPDATE"
        ((last,),) = self._run(connection, f"SELECT number FROM {self.series_table} WHERE id = 1{locking}")  # noqa: S608
        return int(last)

    def _unhindered(self, connection: Connection, limit: int) -> list[int]:
        """Rows to be numbered, oldest first."""
        held = self._held(connection)
        found, after = list[int](), 0
        while len(found) < limit:
            page = self._run(
                connection,
                f"SELECT seq FROM {self.name} WHERE number = 0 AND state = '{WAITING}' AND seq > ? "  # noqa: S608
                f"ORDER BY seq LIMIT {_PAGE}",
                (after,),
            )
            places = [int(seq) for (seq,) in page]
            keys = self._keys_by(connection, "seq", places) if held else {}
            for place in places:
                if held.hold(keys.get(place, ()), place):
                    held.add(keys[place], place)
                elif len(found) < limit:
                    found.append(place)
                after = place
            if len(page) < _PAGE:
                break
        return found

    def _held(self, connection: Connection) -> HeldKeys:
        """The keys of rows that stay for now."""
        held = HeldKeys()
        rows = self._run(
            connection,
            f"SELECT k.slot, k.hash, o.seq FROM {self.name} o JOIN {self.keys} k ON k.id = o.id "  # noqa: S608
            f"WHERE o.state IN ('{PARKED}', '{RECALLED}')",
        )
        for slot, key, seq in rows:
            held.add([OutboxKey(text(slot), text(key))], int(seq))
        return held

    def _keys_by(self, connection: Connection, column: str, places: Sequence[int]) -> dict[int, list[OutboxKey]]:
        """The keys of rows by ``seq`` or ``number``, for places in order; others in between do not matter."""
        found: dict[int, list[OutboxKey]] = {place: [] for place in places}
        if places:
            rows = self._run(
                connection,
                f"SELECT o.{column}, k.slot, k.hash FROM {self.name} o JOIN {self.keys} k ON k.id = o.id "  # noqa: S608
                f"WHERE o.{column} >= ? AND o.{column} <= ?",
                (places[0], places[-1]),
            )
            for place, slot, key in rows:
                found.get(int(place), []).append(OutboxKey(text(slot), text(key)))
        return found

    def numbers(self, connection: Connection) -> dict[int, str]:
        """The id of the row with each number that was given and not used up. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            rows = self._run(connection, f"SELECT number, id FROM {self.name} WHERE number > 0 ORDER BY number")  # noqa: S608
        return {int(number): text(row_id) for number, row_id in rows}

    def numbered(self, connection: Connection, after: int, limit: int) -> list[OutboxRow]:
        """Rows with numbers behind ``after``, in order; fewer if they are large. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            sizes = self._run(
                connection,
                f"SELECT number, size_bytes FROM {self.name} WHERE number > ? ORDER BY number LIMIT {int(limit)}",  # noqa: S608
                (after,),
            )
            upto, room = after, PAGE_BYTES_MAX
            for number, size in sizes:
                if upto > after and int(size) > room:
                    break
                upto, room = int(number), room - int(size)
            rows = self._run(
                connection,
                f"SELECT number, id, state, batches FROM {self.name} "  # noqa: S608
                "WHERE number > ? AND number <= ? ORDER BY number",
                (after, upto),
            )
        return [OutboxRow(int(number), text(row_id), text(state), bytes(it)) for number, row_id, state, it in rows]

    def delete(self, connection: Connection, drained: Sequence[OutboxRow]) -> None:
        """Take away what the broker has placed, with its keys. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            known = self._run(
                connection,
                f"SELECT number, id FROM {self.name} WHERE number IN ({', '.join('?' * len(drained))})",  # noqa: S608
                [row.number for row in drained],
            )
            there = {(int(number), text(row_id)) for number, row_id in known}
            gone = [row.id for row in drained if (row.number, row.id) in there]
            for table in (self.name, self.keys) if gone else ():
                self._run(connection, f"DELETE FROM {table} WHERE id IN ({', '.join('?' * len(gone))})", gone)  # noqa: S608

    def park(self, connection: Connection, row: OutboxRow, reason: str) -> None:
        """Keep a row that the broker refuses for good, and recall numbered ones behind it of its keys. Own transaction.

        Their numbers are to be used up by voids (``voided``).
        """
        reason = reason.encode("ascii", "replace").decode()[:REASON_LENGTH_MAX]
        with own_transaction(connection, self.dialect, self.place):
            self._lock_numbers(connection)
            self._run(
                connection,
                f"UPDATE {self.name} SET state = '{PARKED}', reason = ? WHERE id = ? AND number = ?",  # noqa: S608
                (reason, row.id, row.number),
            )
            if row.number:
                self._recall_behind(connection, row.number)

    def _recall_behind(self, connection: Connection, number: int) -> None:
        """Rows behind a numbered one of its keys, and those behind them: their numbers are to be used up, too."""
        later = self._run(
            connection,
            f"SELECT number FROM {self.name} WHERE number > ? AND state = '{WAITING}' ORDER BY number",  # noqa: S608
            (number,),
        )
        places, held = [number, *(int(at) for (at,) in later)], HeldKeys()
        keys = self._keys_by(connection, "number", places)
        held.add(keys[number], number)
        for at in places[1:]:
            if held.hold(keys[at], at):
                held.add(keys[at], at)
                self._run(connection, f"UPDATE {self.name} SET state = '{RECALLED}' WHERE number = ?", (at,))  # noqa: S608

    def park_waiting(self, connection: Connection, row_id: str, reason: str) -> bool:
        """As ``park``, for an operator; False if no such row waits."""
        with own_transaction(connection, self.dialect, self.place):
            found = f"SELECT number FROM {self.name} WHERE id = ? AND state = '{WAITING}'"  # noqa: S608
            rows = self._run(connection, found, (row_id,))
        for (number,) in rows:
            self.park(connection, OutboxRow(int(number), row_id, WAITING, b""), reason)
        return bool(rows)

    def voided(self, connection: Connection, row: OutboxRow) -> None:
        """The broker has a void for the row's number: it has none any more. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            change = f"UPDATE {self.name} SET number = 0, {_RECALL_ENDS} WHERE id = ? AND number = ?"  # noqa: S608
            self._run(connection, change, (row.id, row.number))

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

    def begin_series(self, connection: Connection, series: str) -> None:
        """Number anew, in a series that no broker knows: for an operator who goes on behind a restored one."""
        with own_transaction(connection, self.dialect, self.place):
            begin = f"UPDATE {self.series_table} SET series = ?, number = 0, holder = '', until_ms = 0"  # noqa: S608
            self._run(connection, f"{begin} WHERE id = 1", (series,))
            self._run(connection, f"UPDATE {self.name} SET number = 0, {_RECALL_ENDS} WHERE number > 0")  # noqa: S608

    def size(self, connection: Connection) -> OutboxSize:
        """How much waits. Own transaction."""
        now = self.dialect.now_ms
        with own_transaction(connection, self.dialect, self.place):
            ((rows, size, parked, age),) = self._run(
                connection,
                f"SELECT COUNT(*), COALESCE(SUM(size_bytes), 0), "  # noqa: S608
                f"COALESCE(SUM(CASE WHEN state = '{PARKED}' THEN 1 ELSE 0 END), 0), "
                f"COALESCE({now} - MIN(written_ms), 0) FROM {self.name}",
            )
        return OutboxSize(int(rows), int(size), int(parked), max(int(age), 0))

    def listed(self, connection: Connection, limit: int) -> list[tuple[str, str, int, int, int, str]]:
        """Id, state, number, size, age in ms and reason of the oldest rows. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            rows = self._run(
                connection,
                f"SELECT id, state, number, size_bytes, {self.dialect.now_ms} - written_ms, reason "  # noqa: S608
                f"FROM {self.name} ORDER BY seq LIMIT {int(limit)}",
            )
        return [
            (text(row_id), text(state), int(number), int(size), int(age), text(reason))
            for row_id, state, number, size, age, reason in rows
        ]

    def waits(self, connection: Connection, row_id: str) -> bool:
        """Whether a transaction's messages are here. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            return bool(self._run(connection, f"SELECT 1 FROM {self.name} WHERE id = ?", (row_id,)))  # noqa: S608

    def delete_expired_markers(self, connection: Connection) -> int:
        """Remove outboxed markers 24 h after they were written, once their messages have gone. Own transaction."""
        expired = self._run(
            connection,
            f"SELECT txid FROM {self.marker} WHERE outcome = '{OUTBOXED}' "  # noqa: S608
            f"AND written_ms < {self.dialect.now_ms} - {OUTBOXED_KEPT_MS} "
            f"AND NOT EXISTS (SELECT 1 FROM {self.name} WHERE {self.name}.id = {self.marker}.txid) LIMIT {_PAGE}",
        )
        connection.rollback()
        if expired:
            marks, delete = ", ".join("?" * len(expired)), self.dialect.delete.format(table=self.marker)
            with own_transaction(connection, self.dialect, self.place):
                self._run(
                    connection,
                    f"{delete} WHERE outcome = '{OUTBOXED}' AND txid IN ({marks})",
                    [text(txid) for (txid,) in expired],
                )
        return len(expired)

    def _run(self, connection: Connection, operation: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._counted(connection, operation, parameters)[0]

    def _counted(
        self, connection: Connection, operation: str, parameters: Sequence[Any] = ()
    ) -> tuple[list[tuple[Any, ...]], int]:
        written = operation if self._mark == "?" else operation.replace("?", self._mark)
        return run(connection, written, parameters)
