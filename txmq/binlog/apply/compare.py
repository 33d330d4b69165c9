"""The comparison of source and target, table by table: checksums of chunks, and the rows that differ.

Theory of operation. A table is cut into chunks by the source's key. Both databases sum each chunk, by SQL that is the
same for both (``RowSums``); if the sums are not the same, the columns' sums of its rows are read from both and compared
here. A row that only the target has is found in the chunk into whose range it falls; the last chunk has no end. A table
without a key is one chunk, and rows are compared by how often each is there.

Each column has an expression that gives its value as hexadecimal text, or NULL. Two values have the same text if, and
only if, they are the same value of the column's type. A row's sum is the SHA-256 of these texts; a chunk's is the sum
of its rows' as numbers, so that equal rows count as often as they are there.

A chunk is a range of the key, ``low < key <= high``. The key's columns are compared in the order in which the database
sorts them, and are read in a form that can be compared with them again.

While changes are on their way, source and target differ: a chunk that differs is looked at again until it is the same,
or until ``settle_s`` is over. A row counts as different if it was so at every look.

Source: MariaDB 10.11, "HEX", "SHA2", "ORDER BY" (ENUM and SET sort by number).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from txmq.binlog.apply.target import (
    STRICT,
    TARGET,
    TargetColumn,
    TargetTable,
    TargetTables,
    as_binlog_error,
    connector,
    json_as_text,
    open_session,
    quoted,
    read_table,
)
from txmq.binlog.config import BinlogSettings
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import TargetError
from txmq.runtime.ports import Clock
from txmq.xa.database.dbapi import run

Key = tuple[Any, ...]
_BY_NUMBER = frozenset({"enum", "set", "bit"})
_BYTES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_NUMBERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "year"})
CHUNK_ROWS = 2000
DIFFERENCES_MAX = 1000  # of a table; more are counted only
LOOK_AGAIN_S = 0.2
SOURCE = "the source"
_TABLES = (
    "SELECT table_schema, table_name, COALESCE(table_rows, 0) FROM information_schema.tables "
    "WHERE table_type = 'BASE TABLE' ORDER BY table_schema, table_name"
)
_Rows = dict[tuple[str, ...], tuple[Any, ...]]


# --- checksums --------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A range of keys; None: without end on that side."""

    low: Key | None
    high: Key | None


class RowSums:
    """The statements about one table.

    Args:
        table: of the source; the target has its columns and its key.
    """

    def __init__(self, table: TargetTable) -> None:
        columns = {column.name: column for column in table.columns}
        self.columns = [column.name for column in table.columns]
        self.key = [columns[name] for name in table.key]
        self._texts = [_text(column) for column in table.columns]
        row = ",".join(f"IFNULL({text},'-')" for text in self._texts)
        self._row = f"SHA2(CONCAT_WS('#',{row}),256)"
        self._sorted = ",".join(_sorted(column) for column in self.key)

    def chunk_sum(self, name: str, chunk: Chunk) -> tuple[str, Key]:
        """The statement that gives a chunk's number of rows and its sum."""
        where, parameters = self._range(chunk)
        halves = ",".join(
            f"COALESCE(SUM(CAST(CONV(SUBSTR(sums.row_sum,{start},15),16,10) AS DECIMAL(30))),0)" for start in (1, 17)
        )
        inner = f"SELECT {self._row} AS row_sum FROM {name}{where}"  # noqa: S608 - names are quoted
        return f"SELECT COUNT(*),{halves} FROM ({inner}) sums", parameters  # noqa: S608 - as above

    def chunk_end(self, name: str, low: Key | None, rows: int) -> tuple[str, Key]:
        """The statement that gives the key of the last of so many rows above ``low``."""
        where, parameters = self._range(Chunk(low, None))
        keys = ",".join(_read(column) for column in self.key)
        sql = f"SELECT {keys} FROM {name}{where} ORDER BY {self._sorted} LIMIT 1 OFFSET {rows - 1}"  # noqa: S608 - as above
        return sql, parameters

    def chunk_rows(self, name: str, chunk: Chunk) -> tuple[str, Key]:
        """The statement that gives the rows of a chunk: the key as people read it, and a sum of each column."""
        where, parameters = self._range(chunk)
        keys = [
            f"CAST({quoted(column.name)} AS CHAR)" if not _is_bytes(column) else _text(column) for column in self.key
        ]
        sums = [f"SHA2({text},256)" for text in self._texts]
        return f"SELECT {','.join(keys + sums)} FROM {name}{where}", parameters  # noqa: S608 - as above

    def row_counts(self, name: str) -> str:
        """The statement that gives each different row's sum, and how often it is there."""
        return f"SELECT {self._row} AS row_sum, COUNT(*) FROM {name} GROUP BY row_sum"  # noqa: S608 - as above

    def _range(self, chunk: Chunk) -> tuple[str, Key]:
        conditions, parameters = [], list[Any]()
        if chunk.low is not None:
            condition, values = self._above(chunk.low)
            conditions.append(condition)
            parameters += values
        if chunk.high is not None:
            condition, values = self._above(chunk.high)
            conditions.append(f"NOT ({condition})")
            parameters += values
        return (" WHERE " + " AND ".join(f"({one})" for one in conditions)) if conditions else "", tuple(parameters)

    def _above(self, key: Key) -> tuple[str, Sequence[Any]]:
        """A condition on the first column that an index serves, and the order of all columns."""
        names = [_sorted(column) for column in self.key]
        exact = []
        parameters: list[Any] = []
        for place, name in enumerate(names):
            exact.append(" AND ".join([f"{before} = %s" for before in names[:place]] + [f"{name} > %s"]))
            parameters += key[: place + 1]
        return " OR ".join(f"({one})" for one in exact), parameters


def _text(column: TargetColumn) -> str:
    name = quoted(column.name)
    if column.type == "enum":
        return f"CONCAT(HEX(CONVERT({name} USING utf8mb4)),'.',{name}+0)"  # the error value is no empty member
    if column.is_text:
        return f"HEX(CONVERT({name} USING utf8mb4))"
    if column.type in ("float", "double"):
        return f"HEX(CAST({name}+0e0 AS CHAR))"  # as text a FLOAT has six digits
    if column.type == "json":
        return f"HEX({json_as_text(name)})"
    return f"HEX({name})" if _is_bytes(column) else f"HEX(CAST({name} AS CHAR))"


def _sorted(column: TargetColumn) -> str:
    return f"{quoted(column.name)}+0" if column.type in _BY_NUMBER else quoted(column.name)


def _read(column: TargetColumn) -> str:
    """A key's value in a form that the driver hands back as it was."""
    name = quoted(column.name)
    if column.type in _BY_NUMBER or column.is_text or column.type in _BYTES | _NUMBERS:
        return _sorted(column)
    return f"{name}+0e0" if column.type in ("float", "double") else f"CAST({name} AS CHAR)"


def _is_bytes(column: TargetColumn) -> bool:
    return column.type in _BYTES or column.is_opaque or column.type == "bit"


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that is not the same.

    Args:
        key: the values of its key, as text; of a table without one the row's checksum.
        kind: ``missing`` in the target, ``surplus`` there, or ``different``.
        columns: those that differ.
    """

    key: tuple[str, ...]
    kind: str
    columns: tuple[str, ...] = ()


@dataclass(slots=True)
class TableComparison:
    """What was found of one table.

    Args:
        rows: of the source.
        differences: at most ``DIFFERENCES_MAX``; ``differing`` is how many there are.
        problem: why it could not be compared.
    """

    table: str
    rows: int = 0
    differing: int = 0
    differences: list[RowDifference] = field(default_factory=list)
    problem: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether both sides were compared, and are the same."""
        return not self.differing and self.problem is None

    def as_fields(self) -> dict[str, Any]:
        """By name, as JSON has it."""
        return asdict(self) | {"is_equal": self.is_equal}

    def add(self, found: Sequence[RowDifference]) -> None:
        """Count differences, and keep the first ones."""
        self.differing += len(found)
        self.differences += found[: DIFFERENCES_MAX - len(self.differences)]


class Comparer:
    """See the module's docstring. Usable as a block; used by one thread.

    Args:
        captures: which tables of the source are compared.
        settle_s: for how long a chunk that differs is looked at again.
        chunk_rows: rows of a chunk.
    """

    def __init__(
        self, settings: BinlogSettings, captures: Callable[[TableName], bool], clock: Clock, *, settle_s: float = 5.0,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:  # fmt: skip
        self._captures, self._clock, self._settle_s, self._chunk_rows = captures, clock, settle_s, chunk_rows
        self._names = TargetTables(settings.apply.database)
        with ExitStack() as opened:
            self._source, self._target = (
                opened.enter_context(closing(open_session(connector(place, is_patient=True), STRICT, side)))
                for place, side in ((settings.source, SOURCE), (settings.apply, TARGET))
            )
            for connection in (self._source, self._target):
                run(connection, "SET SESSION autocommit = 1")  # each look is at what is committed by then
            self._opened = opened.pop_all()

    def __enter__(self) -> Comparer:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def tables(self) -> list[tuple[TableName, int]]:
        """The tables to compare, each with its rows, about.

        Raises:
            TargetError, TargetAwayError: the source cannot be asked.
        """
        rows = self._ask(self._source, _TABLES)
        named = [(TableName(str(database), str(name)), int(count)) for database, name, count in rows]
        return [(name, count) for name, count in named if self._captures(name)]

    def compare(self, name: TableName, advance: Callable[[float], None] = lambda _: None) -> TableComparison:
        """Compare a table.

        Args:
            advance: called with the number of rows of each chunk that was compared.

        Raises:
            TargetError, TargetAwayError: a database cannot be asked.
        """
        found = TableComparison(str(name))
        try:
            table = read_table(self._source, name)
            other = read_table(self._target, self._names.name(name))
        except TargetError as error:
            found.problem = str(error)
            return found
        found.problem = _problem(table, other)
        if found.problem is None:
            sides = _Sides(RowSums(table), table.sql, other.sql)
            if not table.key:
                found.rows = self._compare_whole(found, sides)
                advance(found.rows)
                return found
            for chunk in self._chunks(sides):
                rows = self._compare_chunk(found, sides, chunk)
                found.rows += rows
                advance(rows)
        return found

    def _chunks(self, sides: _Sides) -> Iterator[Chunk]:
        low: Key | None = None
        while True:
            ends = self._ask(self._source, *sides.sums.chunk_end(sides.source, low, self._chunk_rows))
            if not ends:
                yield Chunk(low, None)
                return
            yield Chunk(low, tuple(ends[0]))
            low = tuple(ends[0])

    def _compare_chunk(self, found: TableComparison, sides: _Sides, chunk: Chunk) -> int:
        (source,) = self._ask(self._source, *sides.sums.chunk_sum(sides.source, chunk))
        (target,) = self._ask(self._target, *sides.sums.chunk_sum(sides.target, chunk))
        if source != target:
            found.add(self._settled(lambda: self._differing(sides, chunk)))
        return int(source[0])

    def _differing(self, sides: _Sides, chunk: Chunk) -> dict[tuple[str, ...], RowDifference]:
        width = len(sides.sums.key)
        source = _by_key(self._ask(self._source, *sides.sums.chunk_rows(sides.source, chunk)), width)
        target = _by_key(self._ask(self._target, *sides.sums.chunk_rows(sides.target, chunk)), width)
        found = {}
        for key in source.keys() | target.keys():
            mine, its = source.get(key), target.get(key)
            if mine == its:
                continue
            kind = "missing" if its is None else "surplus" if mine is None else "different"
            columns = () if mine is None or its is None else tuple(
                name for name, one, other in zip(sides.sums.columns, mine, its, strict=True) if one != other
            )  # fmt: skip
            found[key] = RowDifference(key, kind, columns)
        return found

    def _compare_whole(self, found: TableComparison, sides: _Sides) -> int:
        found.add(self._settled(lambda: self._counted(sides)))
        ((rows,),) = self._ask(self._source, f"SELECT COUNT(*) FROM {sides.source}")  # noqa: S608 - names are quoted
        return int(rows)

    def _counted(self, sides: _Sides) -> dict[tuple[str, ...], RowDifference]:
        counts = [
            Counter({str(row_sum): int(count) for row_sum, count in self._ask(connection, sides.sums.row_counts(name))})
            for connection, name in ((self._source, sides.source), (self._target, sides.target))
        ]
        lists = {"missing": counts[0] - counts[1], "surplus": counts[1] - counts[0]}
        return {(one,): RowDifference((one,), kind) for kind, sums in lists.items() for one in sums}

    def _settled(self, look: Callable[[], dict[tuple[str, ...], RowDifference]]) -> list[RowDifference]:
        """The rows that differ at every look, until the time is over."""
        end = self._clock.monotonic() + self._settle_s
        found = look()
        while found and self._clock.monotonic() < end:
            self._clock.sleep(LOOK_AGAIN_S)
            again = look()
            found = {key: again[key] for key in found if key in again}
        return [found[key] for key in sorted(found)]

    def _ask(self, connection: Any, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            return run(connection, sql if parameters else sql.replace("%%", "%"), parameters)[0]
        except Exception as error:
            raise as_binlog_error(error, SOURCE if connection is self._source else TARGET) from error


@dataclass(frozen=True, slots=True)
class _Sides:
    sums: RowSums
    source: str
    target: str


def _by_key(rows: Sequence[Sequence[Any]], width: int) -> _Rows:
    return {tuple(map(str, row[:width])): tuple(row[width:]) for row in rows}


def _problem(table: TargetTable, other: TargetTable) -> str | None:
    mine, its = ([column.name for column in one.columns] for one in (table, other))
    if set(mine) != set(its):
        return f"columns differ: {', '.join(mine)} at the source, {', '.join(its)} in the target"
    if table.key != other.key:
        return f"keys differ: {', '.join(table.key) or 'none'} at the source, {', '.join(other.key) or 'none'} there"
    return None
