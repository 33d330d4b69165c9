"""Holds what a sync's topics have to what the binlog has: each change once, none but these, in order.

Theory of operation. The binlog, read by ``decoded``, is a sequence of *units*: a change of a row is one, an update that
changes the key is two, and a statement is one for each partition of its tables' topics. An event names its unit, and
each partition must have its units in the binlog's order. Changes of an XA transaction have the place of its XA COMMIT.

A snapshot shows a row as it was at a position (``r``); of the row's changes those up to there must not come, and those
after it must. Of a row without ``r`` the first changes may be missing, as far as the snapshot reached (by its newest
row, or the reader's word on its end), if they end with no row: it was not there when it was looked for. Rows of a table
without a key are counted: it is read at one position.

Rules:
    B1 unknown: an event of no committed change; B2 twice; B3 missing; B4 order within a partition; B5 a key in two
    partitions; B6 values; B7 a snapshot's row; B8 markers around a large transaction.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tools.crash.binlog.decoded import Decoded, DecodedChange, Image
from tools.crash.binlog.tables import TABLE_NAME, key_width
from tools.crash.binlog.values import canonical, differing, plain
from txmq.binlog.event_json import ChangeEvent

Key = tuple[str, ...]  # the table, and the canonical values of its key
Place = tuple[str, int]  # topic and partition
BagRow = tuple[str, ...]  # the canonical values of a row's first columns
FINDINGS_MAX: Final = 20  # of a rule
_BAG_COLUMNS: Final = 2


@dataclass(slots=True)
class Unit:
    """A change that must be published: once, in one partition.

    Attributes:
        at: the number of its transaction in the binlog.
        order: its place among all units.
    """

    id: tuple[str, int, str]
    at: int
    order: int
    table: str
    key: Key
    before: Image | None
    after: Image | None
    place: Place | None = None
    offset: int = -1


class Step(NamedTuple):
    """What became of a key: the unit that did it, None for a statement; the row after it, None for no row."""

    at: int
    unit: Unit | None
    after: Image | None


@dataclass(slots=True)
class Line:
    """A key's life: what was there when the sync began, and all that came."""

    begin: Image | None = None
    steps: list[Step] = field(default_factory=list)
    read: list[tuple[str, ChangeEvent, int]] = field(default_factory=list)  # position, event, offset

    @property
    def now(self) -> Image | None:
        """The row at the end."""
        return self.steps[-1].after if self.steps else self.begin


class BagStep(NamedTuple):
    """What a unit, or a statement (None), has done to a table without a key: rows that came (1) and went (-1)."""

    at: int
    unit: Unit | None
    counts: Mapping[BagRow, int]


@dataclass(slots=True)
class Bag:
    """The rows of a table without a key: how often each was there when the sync began, and is now."""

    begin: Counter[BagRow] = field(default_factory=Counter)
    now: Counter[BagRow] = field(default_factory=Counter)
    steps: list[BagStep] = field(default_factory=list)
    read: Counter[BagRow] = field(default_factory=Counter)
    positions: set[str] = field(default_factory=set)


class Statement(NamedTuple):
    """A statement that must be in every partition of its tables' topics."""

    gtid: str
    at: int
    order: int
    tables: frozenset[str]


class Checker:
    """See the module's docstring: ``take`` each event by partition in the order of offsets, then ``findings``.

    Args:
        binlog: all of it, from the server's first day.
        begin: the server's position when the sync was set up; nothing happened before its first start.
        partitions: of each topic.
        prefix: of the topics' names, before the table's.
        complete: the position at which the snapshot was: its last view may have had no row.
    """

    def __init__(
        self, binlog: Iterable[Decoded], begin: str, partitions: Mapping[str, int], prefix: str, complete: str = ""
    ) -> None:
        self._partitions, self._prefix, self._complete = partitions, prefix, complete
        self._units: dict[tuple[str, int, str], Unit] = {}
        self._statements: dict[str, Statement] = {}
        self._transactions: list[int] = []  # their sequence numbers
        self._gtids: list[str] = []
        self._lines: dict[Key, Line] = defaultdict(Line)
        self._bags: dict[str, Bag] = defaultdict(Bag)
        self._by_table: dict[str, set[Key]] = defaultdict(set)
        self._last: dict[Place, int] = {}
        self._key_at: dict[tuple[str, bytes], int] = {}
        self._seen: dict[str, Counter[Place]] = defaultdict(Counter)
        self._markers: dict[str, dict[Place, list[int | None]]] = defaultdict(lambda: defaultdict(lambda: [None, None]))
        self._found: dict[str, list[str]] = defaultdict(list)
        self._order = 0
        self.counts: Counter[str] = Counter()
        self._begin = _sequence(begin)
        for transaction in binlog:
            self._add(transaction)

    # --- what the binlog has -----------------------------------------------------------------------------------------

    def _add(self, transaction: Decoded) -> None:
        at = len(self._transactions)
        self._transactions.append(_sequence(transaction.gtid))
        self._gtids.append(transaction.gtid)
        is_new = self._transactions[-1] > self._begin
        if transaction.statement:
            self._add_statement(transaction, at, is_new=is_new)
        for change in transaction.changes:
            for half, key, before, after in halves(change):
                self._order += 1
                unit = Unit((change.gtid, change.row, half), at, self._order, change.table, key, before, after)
                if key_width(change.table):
                    self._step(unit.key, change.table, at, unit, after, is_new=is_new)
                else:
                    counts = Counter({_bag_row(image): 1 for image in (after,) if image is not None})
                    counts.subtract(_bag_row(image) for image in (before,) if image is not None)
                    self._count(change.table, at, unit, counts, is_new=is_new)
                if is_new:
                    self._units[unit.id] = unit
                    self.counts["xa"] += change.gtid != transaction.gtid

    def _add_statement(self, transaction: Decoded, at: int, *, is_new: bool) -> None:
        text = transaction.statement
        tables = [found[0] for found in TABLE_NAME.finditer(text)]
        words = text.upper().split()
        if words[0] in ("TRUNCATE", "DROP") or words[:3] == ["CREATE", "OR", "REPLACE"]:
            for table in tables:
                self._empty(table, at, is_new=is_new)
        elif len(tables) > 1 and "RENAME" in words:
            for old, new in zip(tables[::2], tables[1::2], strict=True):
                self._move(old, new, at, is_new=is_new)
        if is_new and tables:
            self._order += 1
            self._statements[transaction.gtid] = Statement(transaction.gtid, at, self._order, frozenset(tables))

    def _step(self, key: Key, table: str, at: int, unit: Unit | None, after: Image | None, *, is_new: bool) -> None:
        line = self._lines[key]
        self._by_table[table].add(key)
        if is_new:
            line.steps.append(Step(at, unit, after))
        else:
            line.begin = after

    def _count(self, table: str, at: int, unit: Unit | None, counts: Mapping[BagRow, int], *, is_new: bool) -> None:
        bag = self._bags[table]
        bag.now.update(counts)
        if is_new:
            bag.steps.append(BagStep(at, unit, counts))
        else:
            bag.begin.update(counts)

    def _empty(self, table: str, at: int, *, is_new: bool) -> None:
        if bag := self._bags.get(table):
            self._count(table, at, None, {row: -count for row, count in bag.now.items()}, is_new=is_new)
        for key in self._by_table[table]:
            if self._lines[key].now is not None:
                self._step(key, table, at, None, None, is_new=is_new)

    def _move(self, old: str, new: str, at: int, *, is_new: bool) -> None:
        if bag := self._bags.get(old):
            self._count(new, at, None, dict(bag.now), is_new=is_new)
            self._empty(old, at, is_new=is_new)
        for key in list(self._by_table[old]):
            row = self._lines[key].now
            if row is not None:
                self._step(key, old, at, None, None, is_new=is_new)
                self._step((new, *key[1:]), new, at, None, row, is_new=is_new)

    # --- what the topics have ----------------------------------------------------------------------------------------

    def take(self, place: Place, offset: int, key: bytes, event: ChangeEvent) -> None:
        """The next event of a partition."""
        self.counts[event.op] += 1
        gtid, row = str(event.source.get("gtid")), int(event.source.get("row", 0))
        where = f"{event.op} {event.table} {key[:60]!r}, transaction {gtid}, row {row}, {place[0]}-{place[1]}@{offset}"
        if event.op in ("ddl", "t"):
            self._take_statement(place, gtid, where)
            return
        if event.op in ("begin", "end"):
            self._take_marker(place, offset, gtid, event, where)
            return
        partition = self._key_at.setdefault((place[0], key.lower()), place[1])  # one row to a table's collation
        if partition != place[1]:
            self._add_finding("B5", f"the key is also in partition {partition}: {where}")
        if event.op == "r":
            self._take_read(gtid, event, offset, where)
        else:
            self._take_change(place, offset, (gtid, row, event.op), event, where)

    def _take_change(
        self, place: Place, offset: int, id_: tuple[str, int, str], event: ChangeEvent, where: str
    ) -> None:
        unit = self._units.get(id_)
        if unit is None or unit.table != event.table.name:
            self._add_finding("B1", f"the binlog has no such change: {where}")
            return
        if unit.place is not None:
            self._add_finding("B2", f"also at {unit.place[0]}-{unit.place[1]}@{unit.offset}: {where}")
            return
        unit.place, unit.offset = place, offset
        self._require_order(place, unit.order, where)
        for image, row in ((unit.before, event.before), (unit.after, event.after)):
            if (image is None) != (row is None):
                self._add_finding("B6", f"before or after is missing: {where}")
            elif image is not None and row is not None and (wrong := differing(image, row)):
                self._add_finding("B6", f"{', '.join(wrong)}: {where}")

    def _take_read(self, gtid: str, event: ChangeEvent, offset: int, where: str) -> None:
        table = event.table.name
        row = list((event.after or {}).values())
        if not key_width(table):
            bag = self._bags[table]
            bag.read[tuple(map(plain, row[:_BAG_COLUMNS]))] += 1
            bag.positions.add(gtid)
            return
        line = self._lines.get((table, *map(plain, row[: key_width(table)])))
        if line is None:
            self._add_finding("B1", f"the binlog has no such row: {where}")
            return
        line.read.append((gtid, event, offset))

    def _take_statement(self, place: Place, gtid: str, where: str) -> None:
        statement = self._statements.get(gtid)
        if statement is None:
            self._add_finding("B1", f"the binlog has no such statement: {where}")
            return
        self._seen[gtid][place] += 1
        if self._seen[gtid][place] > 1:
            self._add_finding("B2", where)
        self._require_order(place, statement.order, where)

    def _take_marker(self, place: Place, offset: int, gtid: str, event: ChangeEvent, where: str) -> None:
        marks, side = self._markers[gtid][place], event.op == "end"
        if marks[side] is not None:
            self._add_finding("B2", where)
        marks[side] = offset

    def _require_order(self, place: Place, order: int, where: str) -> None:
        if order < self._last.get(place, 0):
            self._add_finding("B4", f"behind what is later in the binlog: {where}")
        self._last[place] = max(order, self._last.get(place, 0))

    def changed_last(self, key: Key) -> str:
        """The newest transaction that has changed a row, by the binlog; empty if none has since the sync began."""
        wanted = folded(key)
        steps = [step for name in self._by_table[key[0]] if folded(name) == wanted for step in self._lines[name].steps]
        return self._gtids[max(step.at for step in steps)] if steps else ""

    # --- the verdict -------------------------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        """What is wrong, the rule first; call it once, at the end."""
        reads = [position for line in self._lines.values() for position, _, _ in line.read]
        reads += [position for bag in self._bags.values() for position in bag.positions]
        reached = max(self._index_at(position) for position in [self._complete, *reads])
        for key, line in self._lines.items():
            self._judge(key, line, reached)
        for table, bag in self._bags.items():
            self._judge_bag(table, bag, reached)
        for statement in self._statements.values():
            self._judge_statement(statement)
        units: dict[str, list[Unit]] = {gtid: [] for gtid in self._markers}
        for unit in self._units.values():
            if unit.place is not None and self._gtids[unit.at] in units:
                units[self._gtids[unit.at]].append(unit)
        for gtid, marks in self._markers.items():
            self._judge_markers(gtid, marks, units[gtid])
        self.counts["units"], self.counts["statements"] = len(self._units), len(self._statements)
        return [
            f"{rule} {text}"
            for rule, texts in sorted(self._found.items())
            for text in [*texts[:FINDINGS_MAX], *([f"... {len(texts)} in all"] if len(texts) > FINDINGS_MAX else [])]
        ]

    def _judge(self, key: Key, line: Line, reached: int) -> None:
        """One key: what the snapshot has of it, and its changes after that."""
        if len(line.read) > 1:
            self._add_finding("B7", f"{key}: read {len(line.read)} times by the snapshot")
        if line.read:
            self._judge_read(key, line)
            return
        firsts = [number for number, step in enumerate(line.steps) if step.unit is not None and step.unit.place]
        first = firsts[0] if firsts else len(line.steps)
        missed = [n for n, step in enumerate(line.steps[:first]) if step.unit is not None and step.at <= reached]
        behind = missed[-1] + 1 if missed else 0
        for step in line.steps[behind:]:
            self._require_found(step)
        states = [line.begin if not behind else line.steps[behind - 1].after]
        states += [step.after for step in line.steps[behind:first]]
        if None not in states:
            self._add_finding("B7", f"{key}: the row was there, and the snapshot does not have it")

    def _judge_read(self, key: Key, line: Line) -> None:
        position, event, offset = line.read[0]
        at = self._index_at(position)
        state = line.begin
        for step in line.steps:
            if step.at <= at:
                state = step.after
                if step.unit is not None and step.unit.place is not None:
                    self._add_finding("B7", f"{key}: {step.unit.id} was published, and the snapshot's row has it")
            else:
                self._require_found(step)
                if step.unit is not None and -1 < step.unit.offset < offset:
                    self._add_finding("B7", f"{key}: the snapshot's row stands behind {step.unit.id}")
        width = key_width(key[0])
        stamp = None if event.after is None else event.after.get("stamp")
        if state is None or canonical(state[width]) != plain(stamp):
            self._add_finding("B7", f"{key}: the snapshot's row is not that of {position}")

    def _judge_bag(self, table: str, bag: Bag, reached: int) -> None:
        missed = [step.at for step in bag.steps if step.at <= reached and step.unit is not None and not step.unit.place]
        at = max([self._index_at(position) for position in bag.positions] or missed, default=-1)
        state = bag.begin.copy()
        for step in bag.steps:
            if step.at > at:
                self._require_found(step)
                continue
            state.update(step.counts)
            if step.unit is not None and step.unit.place is not None:
                self._add_finding("B7", f"{table}: {step.unit.id} was published, and the snapshot's rows have it")
        if +state != bag.read:
            self._add_finding(
                "B7", f"{table}: read {bag.read.total()} rows, at {sorted(bag.positions)}: not those of then"
            )

    def _require_found(self, step: Step | BagStep) -> None:
        if step.unit is not None and step.unit.place is None:
            unit = step.unit
            self._add_finding("B3", f"{unit.id} of {unit.table} {unit.key[1:]}, committed by {self._gtids[unit.at]}")

    def _judge_statement(self, statement: Statement) -> None:
        for table in statement.tables:
            topic = f"{self._prefix}{table}"
            for partition in range(self._partitions.get(topic, 1)):
                if not self._seen[statement.gtid][topic, partition]:
                    self._add_finding("B3", f"the statement of {statement.gtid} is not in {topic}-{partition}")

    def _judge_markers(self, gtid: str, marks: Mapping[Place, Sequence[int | None]], units: Sequence[Unit]) -> None:
        for topic in {place[0] for place in marks} | {unit.place[0] for unit in units if unit.place}:
            for partition in range(self._partitions[topic]):
                if None in marks.get((topic, partition), (None, None)):
                    self._add_finding("B8", f"{gtid}: begin or end is not in {topic}-{partition}")
        for unit in units:
            assert unit.place is not None
            begin, end = marks.get(unit.place, (None, None))
            if begin is not None and end is not None and not begin < unit.offset < end:
                self._add_finding("B8", f"{unit.id} is not between the markers of {gtid}")

    def _index_at(self, gtids: str) -> int:
        """The last transaction that a position has."""
        return bisect_right(self._transactions, _sequence(gtids)) - 1

    def _add_finding(self, rule: str, text: str) -> None:
        self._found[rule].append(text)


def folded(key: Key) -> Key:
    """One name of a row that may have several to its table's collation."""
    return tuple(map(str.lower, key))


def _sequence(gtids: str) -> int:
    """The number of a transaction; of a position, which has no gaps, that of its last one."""
    return int(re.split("[-:]", gtids)[-1] or 0)


def halves(change: DecodedChange) -> Iterator[tuple[str, Key, Image | None, Image | None]]:
    """The messages that a change is: op, key, before, after."""
    old, new = _key_of(change.table, change.before), _key_of(change.table, change.after)
    if change.op == "u" and old is not None and new is not None and old != new:
        yield "d", old, change.before, None
        yield "c", new, None, change.after
    else:
        key = new if new is not None else old
        assert key is not None
        yield change.op, key, change.before, change.after


def _bag_row(image: Image) -> BagRow:
    return tuple(map(canonical, image[:_BAG_COLUMNS]))


def _key_of(table: str, image: Image | None) -> Key | None:
    if image is None:
        return None
    width = key_width(table) or len(image)
    return table, *map(canonical, image[:width])
