"""A partition's changes of one table, as few statements: the net change of each row, by its key.

Theory of operation. Of all changes of a row only two things count: whether the row was there before the first one, and
what it is after the last one. So a batch becomes two statements for a table: one deletes the rows that were there, one
inserts what there is now. Deletion comes first, so that a value of a unique key is free before it is taken.

The number of rows that the first statement deletes must be what the changes say, and the second one must meet no row
of the same key. A row that is inserted and deleted again must not be there: it is deleted, and none may be found. If
one of this fails, source and target differ, and the caller applies the changes one by one.

A table without a key has rows that are told apart by all their values: of each there are more after the changes, or
fewer, or as many. Those of which there are fewer are deleted one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from txmq.binlog.apply.tables import Row, TargetColumn, TargetTable, json_as_text, quoted
from txmq.binlog.changes import Op

ROWS_MAX = 1000
Item = TypeVar("Item")


class RowEvent(NamedTuple):
    """A change of a row, as its event says."""

    op: str
    before: Row | None
    after: Row | None


class OutOfStepError(Exception):
    """The changes contradict each other, or the target's rows: they are applied one by one, to find the row."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement.

    Args:
        rows: how many it must change; None: any number. With REPLACE, a row that is replaced counts, too.
        is_lenient: it writes a value that strict mode refuses though the source has it: an ENUM's error value.
    """

    sql: str
    parameters: tuple[Any, ...]
    rows: int | None = None
    is_lenient: bool = False


@dataclass(slots=True)
class _Net:
    was_there: bool | None  # None: not known, of a snapshot's row
    row: Row | None


def statements(
    table: TargetTable, events: Sequence[RowEvent], *, overwrites: bool = False, rows_max: int = ROWS_MAX
) -> Iterator[Statement]:
    """The statements that bring a table from before the first event to after the last one.

    Args:
        overwrites: rows are deleted if they are there, and replace what has their keys.
        rows_max: of one statement.

    Raises:
        OutOfStepError: the events cannot follow one another.
    """
    for event in events:
        for row in (event.before, event.after):
            if row is not None:
                table.require_columns(row)
    verb = "REPLACE" if overwrites else "INSERT"
    if not table.key:
        gone, come = _net_rows(table, events)
        for row in gone:
            yield _delete_whole(table, row)
        yield from _inserts(table, come, verb, rows_max)
        return
    nets = _nets(table, events, overwrites=overwrites)
    yield from _deletes(table, nets, rows_max)
    yield from _inserts(table, [net.row for net in nets.values() if net.row is not None], verb, rows_max)


def _net_rows(table: TargetTable, events: Iterable[RowEvent]) -> tuple[list[Row], list[Row]]:
    """The rows of a table without a key that go, and those that come."""
    rows: dict[tuple[Any, ...], Row] = {}
    counts = Counter[tuple[Any, ...]]()
    for event in events:
        for row, more in ((event.before, -1), (event.after, 1)):
            if row is not None:
                values = table.values_of(row)
                rows[values] = row
                counts[values] += more
    gone = [rows[values] for values, count in counts.items() for _ in range(-count)]
    return gone, [rows[values] for values, count in counts.items() for _ in range(count)]


def _nets(table: TargetTable, events: Iterable[RowEvent], *, overwrites: bool) -> dict[tuple[Any, ...], _Net]:
    nets: dict[tuple[Any, ...], _Net] = {}
    for event in events:
        old = None if event.before is None else table.key_of(event.before)
        new = None if event.after is None else table.key_of(event.after)
        if old is not None and old != new:
            _change(nets, old, None, was_there=True, overwrites=overwrites)
        if new is not None:
            was_there = None if event.op == Op.READ else old == new
            _change(nets, new, event.after, was_there=was_there, overwrites=overwrites)
    return nets


def _change(
    nets: dict[tuple[Any, ...], _Net], key: tuple[Any, ...], row: Row | None, *, was_there: bool | None,
    overwrites: bool,
) -> None:  # fmt: skip
    net = nets.get(key)
    if net is None:
        nets[key] = _Net(was_there, row)
        return
    if was_there is not None and was_there != (net.row is not None) and not overwrites:
        raise OutOfStepError(f"{key}: two changes that cannot follow one another")
    net.row = row


def _deletes(table: TargetTable, nets: dict[tuple[Any, ...], _Net], rows_max: int) -> Iterator[Statement]:
    there = [key for key, net in nets.items() if net.was_there]
    perhaps = [key for key, net in nets.items() if net.was_there is None]
    passing = [key for key, net in nets.items() if net.was_there is False and net.row is None]
    for keys, rows in ((there, 1), (perhaps, None), (passing, 0)):
        for some in _chunks(keys, rows_max):
            where, parameters = key_condition(table, some)
            sql = f"DELETE FROM {table.sql} WHERE {where}"  # noqa: S608 - names are quoted, values are parameters
            yield Statement(sql, parameters, None if rows is None else rows * len(some))


def key_condition(table: TargetTable, keys: Sequence[tuple[Any, ...]]) -> tuple[str, tuple[Any, ...]]:
    """A condition that holds for the rows of these keys, and its parameters."""
    names = [quoted(name) for name in table.key]
    parameters = tuple([value for key in keys for value in key])
    if len(names) == 1:
        return f"{names[0]} IN ({_marks(len(keys))})", parameters
    one = "(" + " AND ".join(f"{name} = %s" for name in names) + ")"
    return " OR ".join([one] * len(keys)), parameters


def _inserts(table: TargetTable, rows: Sequence[Row], verb: str, rows_max: int) -> Iterator[Statement]:
    names = ",".join(quoted(column.name) for column in table.stored)
    one = f"({_marks(len(table.stored))})"
    strict = [row for row in rows if not _has_error_value(table, row)]
    for group, is_lenient in ((strict, False), ([row for row in rows if _has_error_value(table, row)], True)):
        for some in _chunks(group, rows_max):
            sql = f"{verb} INTO {table.sql} ({names}) VALUES {','.join([one] * len(some))}"
            values = tuple([value for row in some for value in table.values_of(row)])
            yield Statement(sql, values, len(some), is_lenient)


def _chunks(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _has_error_value(table: TargetTable, row: Row) -> bool:
    return any(row[column.name] == "" for column in table.enums)


def _delete_whole(table: TargetTable, row: Row) -> Statement:
    conditions = " AND ".join(_is_value(column) for column in table.stored)
    sql = f"DELETE FROM {table.sql} WHERE {conditions} LIMIT 1"  # noqa: S608 - as above
    return Statement(sql, table.values_of(row), 1)


def _is_value(column: TargetColumn) -> str:
    """A comparison by bytes: collations take different texts for equal."""
    name = quoted(column.name)
    if column.is_text:
        return f"CAST(CONVERT({name} USING utf8mb4) AS BINARY) <=> CAST(%s AS BINARY)"
    if column.type == "json":  # of MySQL; MariaDB's is text
        return f"{json_as_text(name)} <=> {json_as_text('%s')}"
    return f"HEX({name}) <=> HEX(%s)" if column.is_opaque else f"{name} <=> %s"


def _marks(count: int) -> str:
    return ",".join(["%s"] * count)
