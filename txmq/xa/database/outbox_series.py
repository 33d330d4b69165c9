"""The rows of an outbox that one home is to get: numbered, sent in that order, and taken away (``outbox_tables``).

Theory of operation. Rows of one key are in one partition, and so at one home, unless the topic has grown, and the key
has moved to a partition of another home. Then the later row gets no number before the earlier one has left.

A parked row was refused by the broker for good. Rows behind it that share a key with it get no number; those that had
one are recalled. The number of a parked or recalled row is used up by a void before it is taken from it: what a number
stood for never changes, so that a drainer that was paused can send nothing twice.

Invariants:
    * a number of a series is given once, and numbers have no gaps, also when the table was empty in between;
    * a row leaves by its place, its number and its id, and its keys with it;
    * a row is numbered for its own home alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from txmq.errors import TxmqError
from txmq.runtime.crashpoints import crash_point
from txmq.xa.database.dbapi import Connection, text
from txmq.xa.database.marker_table import Condition, own_transaction, reading, written_out
from txmq.xa.database.mysql_server import rows_of
from txmq.xa.database.outbox_homes import LONE, NUMBER_MAX, PARKED, RECALL_ENDS, RECALLED, WAITING, OutboxNumberings
from txmq.xa.database.outbox_keys import ANY_KEY, HeldKeys, OutboxKey

NUMBERED_MAX = 256  # from the lowest number to the highest: of so many a broker knows which row took them
REASON_LENGTH_MAX = 180
PAGE_BYTES_MAX = 4 << 20  # that are read at once, but for a row that is larger
_PAGE = 500


class SeriesChangedError(TxmqError):
    """An operator has numbered the outbox anew meanwhile: compared again in the next round."""


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A transaction that waits, numbered; ``seq`` is its place in the table."""

    seq: int
    number: int
    id: str
    state: str
    batches: bytes


class OutboxSeries(OutboxNumberings):
    """The statements for the rows of one home. Has no connection of its own and keeps no state.

    Attributes:
        takes_packets: several statements may be sent to a connection in one text (``mysql_server.rows_of``).
    """

    takes_packets = False

    def number(
        self, connection: Connection, limit: int = NUMBERED_MAX, without: Collection[frozenset[str]] = ()
    ) -> int:
        """Number committed rows that wait and have none, behind no parked row of their keys; how many.

        Own transaction; drainers wait for each other, writers for none of them.

        Args:
            without: rows for all topics of one of these are left to others, with what waits behind them.
        """
        with own_transaction(connection, self.dialect, self.place):
            last = self._lock_numbers(connection)
            ((oldest,),) = self._run(
                connection,
                f"SELECT MIN(number) FROM {self.name} WHERE {self._ours} AND number > 0",  # noqa: S608
            )
            room = NUMBERED_MAX - (0 if oldest is None else last + 1 - int(oldest))
            found = self._unhindered(connection, min(limit, room), without)
            if found:
                crash_point("client.outbox.chosen")
            self._give(connection, [(seq, number) for number, seq in enumerate(found, last + 1)])
        return len(found)

    def has_waiting(self, connection: Connection) -> bool:
        """Whether a row waits that is not kept back, or has a number. Own transaction."""
        waiting = f"{self._ours} AND (number > 0 OR state = '{WAITING}')"
        with reading(connection, self.dialect):
            return bool(self._run(connection, f"SELECT 1 FROM {self.name} WHERE {waiting} LIMIT 1"))  # noqa: S608

    def take(
        self, connection: Connection, series: str, limit: int, drained: Sequence[OutboxRow]
    ) -> list[OutboxRow] | None:
        """Take away what the broker has placed, then number rows and read them, in one commit. Own transaction.

        Args:
            series: whose numbers.

        Returns:
            The rows, which have come to the end of the numbers; None if some are kept back, or wait for another home,
            so that rows may be behind them (``number``).

        Raises:
            SeriesChangedError: there is another series by now; nothing was done.
        """
        statements = self._deletion(drained) if drained else []
        at = len(statements)
        statements += [(statement, []) for statement in (self._look, *self._others, self._page(limit))]
        with self._for_packets(connection):
            # Read behind the numbers, which are locked: nobody else gives any until this commits.
            looked = self._each(connection, statements)
            ((name, last, oldest, is_kept),), *others, page = looked[at:]
            if text(name) != series:
                raise SeriesChangedError("the outbox was numbered anew")
            found = list[tuple[int, str, bytes]]()
            is_end = not is_kept and not any(others)
            if is_end:
                room = NUMBERED_MAX - (0 if oldest is None else int(last) + 1 - int(oldest))
                found = self._chosen(connection, page[: max(room, 0)])
            numbers = range(int(last) + 1, int(last) + 1 + len(found))
            given = [(seq, number) for (seq, _, _), number in zip(found, numbers, strict=True)]
            if drained or given:
                crash_point("client.outbox.chosen")
            self._end(connection, self._numbering(given))
        if not is_end:
            return None
        return [
            OutboxRow(seq, number, row_id, WAITING, batches)
            for (seq, row_id, batches), number in zip(found, numbers, strict=True)
        ]

    @property
    def _look(self) -> str:
        """What locks the numbers, and tells them."""
        locking = "" if self.dialect.name == "sqlite" else " FOR UPDATE"
        return (
            f"SELECT series, number, (SELECT MIN(number) FROM {self.name} WHERE {self._ours} AND number > 0), "  # noqa: S608
            f"EXISTS (SELECT 1 FROM {self.name} WHERE state IN ('{PARKED}', '{RECALLED}')) "
            f"FROM {self.series_table} WHERE id = {self._series_id}{locking}"
        )

    def _page(self, limit: int) -> str:
        """What reads the oldest rows without a number, and those of their messages that are not large."""
        small = PAGE_BYTES_MAX // max(int(limit), 1)  # a page of them can be read with the look at their sizes
        return (
            f"SELECT seq, id, size_bytes, CASE WHEN size_bytes <= {small} THEN batches END FROM {self.name} "  # noqa: S608
            f"WHERE {self._ours} AND number = 0 AND state = '{WAITING}' ORDER BY seq LIMIT {int(limit)}"
        )

    @contextmanager
    def _for_packets(self, connection: Connection) -> Iterator[None]:
        """As ``own_transaction``; where packets are taken, ``_end`` has committed."""
        if not self.takes_packets:
            with own_transaction(connection, self.dialect, self.place):
                yield
            return
        try:
            yield
        except BaseException:
            with suppress(Exception):
                connection.rollback()
            raise

    def _each(self, connection: Connection, statements: Sequence[Condition]) -> list[list[tuple[Any, ...]]]:
        """The rows of each statement, in one packet if the connection takes that."""
        if self.takes_packets:
            return rows_of(connection, [written_out(statement) for statement in statements])
        return [self._run(connection, *statement) for statement in statements]

    def _end(self, connection: Connection, statements: Sequence[str]) -> None:
        """Run the last statements, with COMMIT in one packet if the connection takes that."""
        if self.takes_packets:
            rows_of(connection, [*statements, "COMMIT"])
        else:
            for statement in statements:
                self._run(connection, statement)

    def _chosen(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, str, bytes]]:
        """Place, id and messages of the rows of a page; fewer if they are large."""
        found, large, room = list[tuple[int, str, Any]](), list[int](), PAGE_BYTES_MAX
        for seq, row_id, size, batches in rows:
            if found and int(size) > room:
                break
            room -= int(size)
            found.append((int(seq), text(row_id), batches))
            if batches is None:
                large.append(int(seq))
        if large:
            places = ", ".join(map(str, large))
            read = dict(self._run(connection, f"SELECT seq, batches FROM {self.name} WHERE seq IN ({places})"))  # noqa: S608
            found = [(seq, row_id, read[seq] if it is None else it) for seq, row_id, it in found]
        return [(seq, row_id, bytes(batches)) for seq, row_id, batches in found]

    def _give(self, connection: Connection, numbers: Sequence[tuple[int, int]]) -> None:
        """Give rows, by their place, these numbers, which come next."""
        for statement in self._numbering(numbers):
            self._run(connection, statement)

    def _numbering(self, numbers: Sequence[tuple[int, int]]) -> list[str]:
        """The statements that give rows, by their place, these numbers, which come next.

        Raises:
            OverflowError: there are none behind the highest one: a numbering that is retired.
        """
        if not numbers:
            return []
        if numbers[-1][1] > NUMBER_MAX:
            raise OverflowError(f"number {numbers[-1][1]} of an outbox")
        cases = " ".join(f"WHEN {seq} THEN {number}" for seq, number in numbers)
        return [
            f"UPDATE {self.name} SET number = CASE seq {cases} ELSE number END "  # noqa: S608
            f"WHERE seq IN ({', '.join(str(seq) for seq, _ in numbers)})",
            f"UPDATE {self.series_table} SET number = {numbers[-1][1]} WHERE id = {self._series_id}",  # noqa: S608
        ]

    def _lock_numbers(self, connection: Connection) -> int:
        """Keep others from numbering and parking until this transaction ends; the highest number."""
        locking = "" if self.dialect.name == "sqlite" else " FOR UPDATE"
        ((last,),) = self._run(
            connection,
            f"SELECT number FROM {self.series_table} WHERE id = {self._series_id}{locking}",  # noqa: S608
        )
        return int(last)

    def _unhindered(
        self, connection: Connection, limit: int, without: Collection[frozenset[str]] = ()
    ) -> list[int]:  # fmt: skip
        """Rows to be numbered, oldest first."""
        held, has_others = self._held(connection), self._has_others(connection)
        found, after = list[int](), 0
        while len(found) < limit:
            page = self._run(
                connection,
                f"SELECT seq FROM {self.name} WHERE {self._ours} AND number = 0 AND state = '{WAITING}' AND seq > ? "  # noqa: S608
                f"ORDER BY seq LIMIT {_PAGE}",
                (after,),
            )
            places = [int(seq) for (seq,) in page]
            others = self._behind_others(connection, places) if has_others else set[int]()
            keys = self._keys_by(connection, "seq", places) if held or others or without else {}
            for place in places:
                theirs = keys.get(place, ())
                if place in others or held.hold(theirs, place) or (without and _is_among(without, theirs)):
                    held.add(keys[place], place)
                elif len(found) < limit:
                    found.append(place)
                after = place
            if len(page) < _PAGE:
                break
        return found

    def _has_others(self, connection: Connection) -> bool:
        """Whether anything waits for another home."""
        return any(self._run(connection, statement) for statement in self._others)

    @property
    def _others(self) -> list[str]:
        """What finds a row that waits for another home; a lone broker has none."""
        if self.home == LONE:
            return []
        return [f"SELECT 1 FROM {self.name} WHERE home {side} '{self.home}' LIMIT 1" for side in "<>"]  # noqa: S608

    def _behind_others(self, connection: Connection, places: Sequence[int]) -> set[int]:
        """Rows of which a key has moved here, and waits for its former home: behind those no order would be kept."""
        if not places:
            return set()
        within = f"o.home = '{self.home}' AND o.seq >= ? AND o.seq <= ?", (places[0], places[-1])
        slots = self._run(
            connection,
            f"SELECT DISTINCT k.slot FROM {self.name} o JOIN {self.keys} k ON k.id = o.id "  # noqa: S608
            f"WHERE {within[0]} AND k.hash <> '{ANY_KEY}'",
            within[1],
        )
        before = (
            f"EXISTS (SELECT 1 FROM {self.keys} p JOIN {self.name} b ON b.id = p.id WHERE p.hash = k.hash "  # noqa: S608
            f"AND {{}} AND b.home <> '{self.home}' AND b.seq < o.seq)"
        )
        found = set[int]()
        for topic in sorted({OutboxKey(text(slot), ANY_KEY).topic for (slot,) in slots}):
            first, end = f"{topic}-", f"{topic}."  # the dot comes next behind the hyphen
            longer = f"{topic}-%-%"  # a topic whose name begins so
            rows = self._run(
                connection,
                f"SELECT DISTINCT o.seq FROM {self.name} o JOIN {self.keys} k ON k.id = o.id "  # noqa: S608
                f"WHERE {within[0]} AND k.hash <> '{ANY_KEY}' "
                "AND k.slot >= ? AND k.slot < ? AND k.slot NOT LIKE ? AND ("
                f"{before.format('p.slot >= ? AND p.slot < k.slot AND p.slot NOT LIKE ?')} OR "
                f"{before.format('p.slot > k.slot AND p.slot < ? AND p.slot NOT LIKE ?')})",
                (*within[1], first, end, longer, first, longer, end, longer),
            )
            found |= {int(seq) for (seq,) in rows}
        return found

    def _held(self, connection: Connection) -> HeldKeys:
        """The keys of rows that stay for now."""
        held = HeldKeys()
        rows = self._run(
            connection,
            f"SELECT k.slot, k.hash, o.seq FROM {self.name} o JOIN {self.keys} k ON k.id = o.id "  # noqa: S608
            f"WHERE o.home = '{self.home}' AND o.state IN ('{PARKED}', '{RECALLED}')",
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
                f"WHERE o.home = '{self.home}' AND o.{column} >= ? AND o.{column} <= ?",
                (places[0], places[-1]),
            )
            for place, slot, key in rows:
                found.get(int(place), []).append(OutboxKey(text(slot), text(key)))
        return found

    def has_older(self, connection: Connection, until_ms: int) -> bool:
        """Whether a row of the home that was written until then can be sent, or is on its way. Own transaction."""
        older = f"SELECT 1 FROM {self.name} WHERE written_ms <= ? AND {{}} LIMIT 1"  # noqa: S608
        with own_transaction(connection, self.dialect, self.place):
            if self._run(connection, older.format(f"{self._ours} AND number > 0"), (until_ms,)):
                return True
            first = self._unhindered(connection, 1)
            return bool(first and self._run(connection, older.format("seq = ?"), (until_ms, first[0])))

    def numbers(self, connection: Connection) -> dict[int, str]:
        """The id of the row with each number that was given and not used up. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            rows = self._run(
                connection,
                f"SELECT number, id FROM {self.name} WHERE {self._ours} AND number > 0 ORDER BY number",  # noqa: S608
            )
        return {int(number): text(row_id) for number, row_id in rows}

    def numbered(self, connection: Connection, after: int, limit: int, series: str | None = None) -> list[OutboxRow]:
        """Rows with numbers behind ``after``, in order; fewer if they are large. Own transaction.

        Args:
            series: whose numbers; None for those that there are.

        Raises:
            SeriesChangedError: the numbers are of another series by now.
        """
        with own_transaction(connection, self.dialect, self.place):
            sizes = self._run(
                connection,
                f"SELECT number, size_bytes FROM {self.name} WHERE {self._ours} AND number > ? "  # noqa: S608
                f"ORDER BY number LIMIT {int(limit)}",
                (after,),
            )
            upto, room = after, PAGE_BYTES_MAX
            for number, size in sizes:
                if upto > after and int(size) > room:
                    break
                upto, room = int(number), room - int(size)
            rows = self._run(
                connection,
                f"SELECT seq, number, id, state, batches FROM {self.name} "  # noqa: S608
                f"WHERE {self._ours} AND number > ? AND number <= ? ORDER BY number",
                (after, upto),
            )
            # Read behind the rows: they are of this series, or of one before it.
            ((name,),) = self._run(
                connection,
                f"SELECT series FROM {self.series_table} WHERE id = {self._series_id}",  # noqa: S608
            )
        if series is not None and text(name) != series:
            raise SeriesChangedError("the outbox was numbered anew")
        return [
            OutboxRow(int(seq), int(number), text(row_id), text(state), bytes(batches))
            for seq, number, row_id, state, batches in rows
        ]

    def delete(self, connection: Connection, drained: Sequence[OutboxRow]) -> None:
        """Take away what the broker has placed, with its keys. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            for statement in self._deletion(drained):
                self._run(connection, *statement)

    def _deletion(self, drained: Sequence[OutboxRow]) -> list[Condition]:
        """The statements that take away what the broker has placed, with its keys."""
        places = ", ".join(str(row.seq) for row in drained)  # by which they are found
        rows = ", ".join(f"({row.seq}, {row.number}, ?)" for row in drained)
        condition = f"o.seq IN ({places}) AND (o.seq, o.number, o.id) IN ({self.dialect.row_values}{rows})"
        ids = [row.id for row in drained]
        statements = self.dialect.delete_with_keys(self.name, self.keys, f"{condition} AND o.{self._ours}")
        return [(statement, ids) for statement in statements]

    def park(self, connection: Connection, row: OutboxRow, reason: str) -> bool:
        """Keep a row that the broker refuses for good, and recall numbered ones behind it of its keys. Own transaction.

        Their numbers are to be used up by voids (``voided``).

        Returns:
            False if it has another number by now, or is gone.
        """
        with own_transaction(connection, self.dialect, self.place):
            return self._keep_back(connection, row, PARKED, reason)

    def recall(self, connection: Connection, row: OutboxRow, reason: str) -> frozenset[str]:
        """Leave a numbered row, and those behind it of its keys, to who may send it: their numbers go to voids.

        Own transaction.

        Returns:
            Its topics; none if it has another number by now, or is gone.
        """
        with own_transaction(connection, self.dialect, self.place):
            if not self._keep_back(connection, row, RECALLED, reason):
                return frozenset()
            slots = self._run(connection, f"SELECT slot FROM {self.keys} WHERE id = ?", (row.id,))  # noqa: S608
        return frozenset(OutboxKey(text(slot), ANY_KEY).topic for (slot,) in slots)

    def _keep_back(self, connection: Connection, row: OutboxRow, state: str, reason: str) -> bool:
        self._lock_numbers(connection)
        _, count = self._counted(
            connection,
            f"UPDATE {self.name} SET state = '{state}', reason = ? WHERE id = ? AND number = ?",  # noqa: S608
            (reason.encode("ascii", "replace").decode()[:REASON_LENGTH_MAX], row.id, row.number),
        )
        if count and row.number:
            self._recall_behind(connection, row.number)
        return count == 1

    def _recall_behind(self, connection: Connection, number: int) -> None:
        """Rows behind a numbered one of its keys, and those behind them: their numbers are to be used up, too."""
        later = self._run(
            connection,
            f"SELECT number FROM {self.name} WHERE {self._ours} AND number > ? AND state = '{WAITING}' ORDER BY number",  # noqa: S608
            (number,),
        )
        places, held = [number, *(int(at) for (at,) in later)], HeldKeys()
        keys = self._keys_by(connection, "number", places)
        held.add(keys[number], number)
        for at in places[1:]:
            if held.hold(keys[at], at):
                held.add(keys[at], at)
                self._run(
                    connection,
                    f"UPDATE {self.name} SET state = '{RECALLED}' WHERE {self._ours} AND number = ?",  # noqa: S608
                    (at,),
                )

    def park_waiting(self, connection: Connection, row_id: str, reason: str) -> bool:
        """As ``park``, for an operator; False if no such row waits."""
        found = f"SELECT number FROM {self.name} WHERE id = ? AND state = '{WAITING}'"  # noqa: S608
        while True:
            with own_transaction(connection, self.dialect, self.place):
                rows = self._run(connection, found, (row_id,))
            if not rows:
                return False
            if self.park(connection, OutboxRow(0, int(rows[0][0]), row_id, WAITING, b""), reason):
                return True

    def voided(self, connection: Connection, row: OutboxRow) -> None:
        """The broker has a void for the row's number: it has none any more. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            change = f"UPDATE {self.name} SET number = 0, {RECALL_ENDS} WHERE id = ? AND number = ?"  # noqa: S608
            self._run(connection, change, (row.id, row.number))


def _is_among(without: Collection[frozenset[str]], keys: Collection[OutboxKey]) -> bool:
    topics = {key.topic for key in keys}
    return any(these <= topics for these in without)
