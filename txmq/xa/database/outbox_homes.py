"""The numberings of an outbox: one for each home of a cluster, or a lone broker's (``outbox_tables``).

Theory of operation. Each home has a numbering of its own, so that one that is away holds up no row of another. A broker
that is alone has the first one; that of its rows which are left when it founds a cluster goes on as its home's
(``adopt``).

The first numbering is *retired* as soon as there are homes: its place stays, with a name that every broker refuses. An
older txmq, which knows no homes and would send the rows of all of them to any, drains by that name, and so nothing.

``holder`` drains until ``until_ms``. That only keeps others from doing the same work: two that drain are no harm.

Invariants:
    * a name of a series belongs to one home, for ever;
    * the highest number that was given never falls, except for a new name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, Self

from txmq.xa.database.dbapi import Connection, run, text
from txmq.xa.database.dialects import Dialect
from txmq.xa.database.marker_table import own_transaction
from txmq.xa.database.outbox_topics import OutboxTopics
from txmq.xa.database.sqlite_turns import WriterTurn
from txmq.xid import NO_HOME, home_word

WAITING, PARKED, RECALLED = "waiting", "parked", "recalled"
LONE = ""  # the home of a row that was written for a broker without a registry
RECALL_ENDS = f"state = CASE WHEN state = '{RECALLED}' THEN '{WAITING}' ELSE state END"
_LOOKED_AT_MAX = 500  # rows of a lone broker, for which it was
_FIRST, _LEFT = 1, 2  # the id of the first numbering; and its id from when it is retired until it is adopted
_RETIRED, NUMBER_MAX = "retired", (1 << 63) - 1  # no name of a series; behind that number none can be given
_HOME = re.compile(r"[0-9a-f]{16}\Z")


class Series(NamedTuple):
    """The numbering: its name, and the highest number that was given."""

    name: str
    last: int


class OutboxNumberings:
    """The statements for the numbering of one home. Has no connection of its own and keeps no state.

    Attributes:
        home: 16 hex digits, or LONE.
        topics: what the database knows of them.
    """

    home = LONE

    def __init__(self, table: str, dialect: Dialect, placeholder: str, place: WriterTurn | None = None) -> None:
        self.marker, self.name = table, f"{table}_outbox"
        self.keys, self.series_table = f"{table}_outbox_keys", f"{table}_outbox_series"
        self.dialect, self.place, self._mark = dialect, place, placeholder
        self.topics = OutboxTopics(table, dialect, placeholder)

    def at(self, home: str) -> Self:
        """The same tables, for the rows of another home.

        Raises:
            ValueError: it is none.
        """
        if home != LONE and not _HOME.match(home):
            raise ValueError(f"not a home: {home[:40]!r}")
        found = copy(self)
        found.home = home
        return found

    @property
    def _ours(self) -> str:
        return f"home = '{self.home}'"

    @property
    def _series_id(self) -> int:
        return _signed(int(self.home, 16)) if self.home else _FIRST

    def begin(self, connection: Connection, series: str) -> None:
        """Make sure that the home has a numbering: rows that were left to it as a lone broker's, or a new one.

        Args:
            series: the name of a new one. Raises as drivers do, also if another process was faster: to be called again.
        """
        with own_transaction(connection, self.dialect, self.place):
            is_there = self._has_series(connection, self._series_id)
            if self.home != LONE:
                self.retire_first(connection)
                if self._lone_home(connection) == self.home:
                    self._adopt(connection, with_numbers=not is_there)
                    is_there = self._has_series(connection, self._series_id)
            if not is_there:
                self._add_series(connection, self._series_id, series, 0)

    def retire_first(self, connection: Connection) -> None:
        """There are homes: nothing is numbered any more as a lone broker's. In the transaction that is open."""
        retired = f"WHERE id = {_FIRST} AND series <> '{_RETIRED}'"
        if self._run(connection, f"SELECT 1 FROM {self.series_table} {retired}"):  # noqa: S608
            _, count = self._counted(connection, f"UPDATE {self.series_table} SET id = {_LEFT} {retired}")  # noqa: S608
            if count:
                self._add_series(connection, _FIRST, _RETIRED, NUMBER_MAX)

    def _add_series(self, connection: Connection, series_id: int, series: str, number: int) -> None:
        self._run(
            connection,
            f"INSERT INTO {self.series_table} (id, series, number, holder, until_ms) VALUES (?, ?, ?, '', 0)",  # noqa: S608
            (series_id, series, number),
        )

    def _has_series(self, connection: Connection, series_id: int) -> bool:
        return bool(self._run(connection, f"SELECT 1 FROM {self.series_table} WHERE id = ?", (series_id,)))  # noqa: S608

    def _lone_home(self, connection: Connection) -> str | None:
        """The home that was a lone broker when rows were written for it; None if there are none, or none tells."""
        rows = self._run(
            connection,
            f"SELECT id FROM {self.name} WHERE home = '{LONE}' ORDER BY seq LIMIT {_LOOKED_AT_MAX}",  # noqa: S608
        )
        ids = [text(row_id) for (row_id,) in rows]
        known = (home for row_id in ids if (home := home_word(row_id)) != f"{NO_HOME:016x}")
        return next(known, None) or self._home_of_slots(connection, ids)

    def _home_of_slots(self, connection: Connection, ids: Sequence[str]) -> str | None:
        """The same by the partitions of these rows, if the database knows their homes."""
        if not ids:
            return None
        marks = ", ".join("?" * len(ids))
        slots = self._run(connection, f"SELECT DISTINCT slot FROM {self.keys} WHERE id IN ({marks})", ids)  # noqa: S608
        known = self.topics.newest(connection)
        for (slot,) in slots:
            topic, _, partition = text(slot).rpartition("-")
            homes = known[topic].homes if topic in known else ()
            if int(partition) < len(homes):
                return f"{homes[int(partition)]:016x}"
        return None

    def _adopt(self, connection: Connection, *, with_numbers: bool) -> None:
        """Take over rows that were written for a lone broker, which is this home; the numbers they have stay true."""
        if with_numbers:
            self._run(
                connection,
                f"UPDATE {self.series_table} SET id = ?, holder = '', until_ms = 0 WHERE id = {_LEFT}",  # noqa: S608
                (self._series_id,),
            )
        unless = "" if with_numbers else " AND number = 0"
        self._run(connection, f"UPDATE {self.name} SET {self._ours} WHERE home = '{LONE}'{unless}")  # noqa: S608

    def series(self, connection: Connection) -> Series:
        """The numbering. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            ((name, last),) = self._run(
                connection,
                f"SELECT series, number FROM {self.series_table} WHERE id = {self._series_id}",  # noqa: S608
            )
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
                f"WHERE id = {self._series_id} AND "
                f"(holder = ? OR until_ms < {now} OR until_ms > {now} + {int(lease_ms)})",
                (holder, holder),
            )
            rows = self._run(connection, f"SELECT holder FROM {self.series_table} WHERE id = {self._series_id}")  # noqa: S608
        return bool(rows) and text(rows[0][0]) == holder

    def let_go(self, connection: Connection, holder: str) -> None:
        """Give the turn to drain away. Own transaction."""
        with own_transaction(connection, self.dialect, self.place):
            self._run(
                connection,
                f"UPDATE {self.series_table} SET holder = '', until_ms = 0 WHERE id = {self._series_id} AND holder = ?",  # noqa: S608
                (holder,),
            )

    def begin_series(self, connection: Connection, series: str, former: str) -> bool:
        """Number anew, in a series that no broker knows: for an operator who goes on behind a restored one.

        Args:
            former: the one that was found wrong; False, and nothing is done, if another one has begun since.
        """
        with own_transaction(connection, self.dialect, self.place):
            begin = f"UPDATE {self.series_table} SET series = ?, number = 0, holder = '', until_ms = 0"  # noqa: S608
            given = (series, self._series_id, former)
            _, count = self._counted(connection, f"{begin} WHERE id = ? AND series = ?", given)
            if count:
                self._run(
                    connection,
                    f"UPDATE {self.name} SET number = 0, {RECALL_ENDS} WHERE {self._ours} AND number > 0",  # noqa: S608
                )
        return count == 1

    def _run(self, connection: Connection, operation: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._counted(connection, operation, parameters)[0]

    def _counted(
        self, connection: Connection, operation: str, parameters: Sequence[Any] = ()
    ) -> tuple[list[tuple[Any, ...]], int]:
        written = operation if self._mark == "?" else operation.replace("?", self._mark)
        return run(connection, written, parameters)


def _signed(home: int) -> int:
    """A home's id as a database's number of 64 bits."""
    return home - (1 << 64) if home >> 63 else home
