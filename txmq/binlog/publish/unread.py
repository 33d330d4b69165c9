"""What a snapshot has still to read, and which changes are passed over for it.

Theory of operation. A snapshot reads table after table, and a table by its key. It reads at positions of the binlog
(``consistent_read.py``), and between two of them the reader publishes the binlog as ever. A row that is not
read yet has been published by nobody: its change is passed over, for the snapshot will read what the change has made. A
row that is read has been published as ``r``: its change follows. So each row is ``r`` once, and then its later changes,
in order.

A table that is read ``again`` is one of which consumers may know rows already: none of its changes is passed over.

Invariants:
    * a statement that ends, renames or empties a table is applied to the state with the statement's own event;
    * values only: keys are compared by ``Compare``, for their order is the database's.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from txmq.binlog.decoded_changes import Ddl, Row, RowChange, TableName, Value

Key = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class TableProgress:
    """How far a table is read.

    Args:
        table: its name.
        key: name and type of the columns by which it is read in chunks; none if it is read in one go.
        after: the last row's values of them; none if no row is read.
        rows: how many are.
        again: consumers may know rows that are not read.
    """

    table: TableName
    key: tuple[tuple[str, str], ...] = ()
    after: Key = ()
    rows: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """What a snapshot has still to read: ``current`` from its key on, and ``left`` whole.

    Args:
        left: tables of which nothing is read, in their order.
        current: the table that is being read; None between two.
        tables: how many the snapshot has.
        rows: how many it has read.
        again: consumers may know rows of all of them.
    """

    left: tuple[TableName, ...]
    current: TableProgress | None = None
    tables: int = 0
    rows: int = 0
    again: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether consumers may know a row of these tables."""
        return self.rows > 0 or self.again

    def behind(self, ddl: Ddl) -> SnapshotState:
        """The state after a statement."""
        left = tuple(name for table in self.left if (name := _name_behind(table, ddl)) is not None)
        current = self.current
        name = None if current is None else _name_behind(current.table, ddl)
        followed = None if current is None or name is None else replace(current, table=name)
        return replace(self, left=left, current=followed)

    def to_fields(self) -> dict[str, Any]:
        """As JSON has it."""
        current = self.current
        return {
            "left": self.left,
            "current": None if current is None else {
                "table": current.table, "key": current.key, "after": [_shown(value) for value in current.after],
                "rows": current.rows, "again": current.again,
            },
            "tables": self.tables, "rows": self.rows, "again": self.again,
        }  # fmt: skip

    @classmethod
    def from_fields(cls, fields: Any) -> SnapshotState:
        """Read what ``to_fields`` gave, from JSON."""
        found = fields["current"]
        current = None if found is None else TableProgress(
            TableName(*found["table"]), tuple((name, kind) for name, kind in found["key"]),
            tuple(_read(value) for value in found["after"]), found["rows"], found["again"],
        )  # fmt: skip
        left = tuple(TableName(*table) for table in fields["left"])
        return cls(left, current, fields["tables"], fields["rows"], fields["again"])


def _name_behind(table: TableName, ddl: Ddl) -> TableName | None:
    """What a table is called after a statement; None if from there on all its rows come by the binlog."""
    if table in ddl.emptied or TableName(table.database, "") in ddl.emptied:
        return None
    for old, new in ddl.moved:
        if table == old:
            table = new
    return table


Compare = Callable[[TableProgress, Sequence[Key]], list[bool]]
"""Whether each key is read: not past ``after`` in the order of the table's key."""


class Unread:
    """Passes over the changes of rows that a snapshot has still to read."""

    def __init__(self, compare: Compare) -> None:
        self._compare = compare

    def judged(self, state: SnapshotState, changes: Sequence[RowChange]) -> list[RowChange | None]:
        """The changes, with None for each that is passed over.

        An update that moves a row's key over the border of what is read is the insert or the delete that it is on the
        side of the rows that are read.
        """
        rows: list[tuple[TableName, dict[str, Value] | None]] = []
        for change in changes:
            schema, names = change.schema, [column.name for column in change.schema.columns]
            for row in (change.before, change.after):
                rows.append((schema.table, None if row is None else dict(zip(names, row, strict=True))))
        told = self._are_read(state, rows)
        return [
            _judged(change, before=told[2 * place], after=told[2 * place + 1]) for place, change in enumerate(changes)
        ]

    def are_read(self, state: SnapshotState, rows: Sequence[tuple[TableName, dict[str, Value]]]) -> list[bool]:
        """Whether each row is read."""
        return self._are_read(state, rows)

    def _are_read(self, state: SnapshotState, rows: Sequence[tuple[TableName, dict[str, Value] | None]]) -> list[bool]:
        current, left = state.current, () if state.again else frozenset(state.left)
        told = [row is not None and table not in left for table, row in rows]
        if state.again or current is None or current.again:
            return told
        names = [name for name, _ in current.key]
        places: list[int] = []
        keys: list[Key] = []
        for place, (table, row) in enumerate(rows):
            if row is not None and table == current.table and all(name in row for name in names):
                places.append(place)
                keys.append(tuple(row[name] for name in names))
        if not current.after:
            compared = [False] * len(keys)
        else:
            compared = self._compare(current, keys) if keys else []
        for place, is_read in zip(places, compared, strict=True):
            told[place] = is_read
        return told


def _judged(change: RowChange, *, before: bool, after: bool) -> RowChange | None:
    """``before``, ``after``: the row is there, and is read."""
    if not before and not after:
        return None
    if change.op != "u" or (before and after):
        return change
    schema = change.schema
    return RowChange("d", schema, change.before, None) if before else RowChange("c", schema, None, change.after)


def row_key(names: Sequence[str], row: Row, key: Sequence[str]) -> Key:
    """The values of some columns of a row."""
    return tuple(row[names.index(name)] for name in key)


def _shown(value: Value) -> Any:
    return {"base64": b64encode(value).decode()} if isinstance(value, bytes) else value


def _read(value: Any) -> Value:
    return b64decode(value["base64"]) if isinstance(value, dict) else value
