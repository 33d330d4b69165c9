"""A source whose binlog is made from a seed, and what must stand in the topics when all of it is published.

``expected`` is written without the publisher's code: it goes over the script once and says which events there are, in
which order.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import txmq
from txmq.binlog.decoded_changes import (
    Column,
    ColumnKind,
    Ddl,
    DdlKind,
    Origin,
    Row,
    RowChange,
    TableName,
    TableSchema,
    TransactionPart,
    XaEnd,
    XaPrepare,
)
from txmq.binlog.errors import SourceAwayError
from txmq.binlog.position import MariadbGtids, Position
from txmq.xid import Xid

DOMAIN, SERVER = 0, 1
ORIGIN = Origin("mariadb", "a-server")
PART_ROWS = 20  # changes of a part of a large transaction
COLUMNS = (Column("id", ColumnKind.INTEGER, "bigint"), Column("text", ColumnKind.TEXT, "varchar(40)"))
TABLES = [TableSchema(TableName("shop", name), COLUMNS, (0,)) for name in ("orders", "stock", "customer$")]


def part(
    sequence: int, changes: list[RowChange] | None = None, *, number: int = 0, first: bool = True, last: bool = True,
    ddl: Ddl | None = None, xa: XaPrepare | XaEnd | None = None,
) -> TransactionPart:  # fmt: skip
    """A part of transaction ``0-1-<sequence>``."""
    done = sequence if last else sequence - 1
    return TransactionPart(
        f"{DOMAIN}-{SERVER}-{sequence}", MariadbGtids({DOMAIN: (SERVER, done)}), ORIGIN, SERVER, 1_000_000 + sequence,
        first, last, number, changes or [], ddl, xa, "binlog.000001", 100 * sequence,
    )  # fmt: skip


def parts_of(sequence: int, changes: list[RowChange], xa: XaPrepare | None = None) -> list[TransactionPart]:
    """A transaction in parts of at most ``PART_ROWS``."""
    cuts = range(0, max(len(changes), 1), PART_ROWS)
    return [
        part(sequence, changes[cut : cut + PART_ROWS], number=cut, first=cut == 0, last=cut == cuts[-1], xa=xa)
        for cut in cuts
    ]


class Script:
    """Transactions made from a seed: small and large ones, with statements and XA in between."""

    def __init__(self, seed: int, count: int) -> None:
        self._random = random.Random(seed)
        self._rows: dict[TableName, dict[int, str]] = defaultdict(dict)
        self._values = 0
        self.transactions: list[list[TransactionPart]] = []
        prepared: list[tuple[Xid, int]] = []
        while len(self.transactions) < count:
            sequence, draw = len(self.transactions) + 1, self._random.random()
            if draw < 0.08:
                xid = Xid(1, b"xa-%d" % sequence, b"b")
                prepared.append((xid, sequence))
                many = self._random.choice((0, 3, 3 * PART_ROWS))
                self.transactions.append(parts_of(sequence, self._changes(many, of_xa=sequence), XaPrepare(xid)))
            elif prepared and draw < 0.16:
                xid, _ = prepared.pop(self._random.randrange(len(prepared)))
                self.transactions.append([part(sequence, xa=XaEnd(xid, self._random.random() < 0.7))])
            elif draw < 0.20:
                self.transactions.append([self._statement(sequence)])
            elif draw < 0.25:
                self.transactions.append([part(sequence)])  # nothing of it is captured
            else:
                size = self._random.choice((1, 1, 2, 5, 4 * PART_ROWS + 3))
                self.transactions.append(parts_of(sequence, self._changes(size)))

    def _statement(self, sequence: int) -> TransactionPart:
        table = self._random.choice(TABLES).table
        kind = self._random.choice((DdlKind.ALTER, DdlKind.TRUNCATE))
        text = f"{kind} TABLE {table} /* {sequence} */"
        return part(sequence, ddl=Ddl(kind, text, "shop", concerned=(table,), additive=True))

    def _changes(self, count: int, of_xa: int = 0) -> list[RowChange]:
        return [self._change(self._random.choice(TABLES), of_xa) for _ in range(count)]

    def _change(self, schema: TableSchema, of_xa: int) -> RowChange:
        self._values += 1
        value = f"v{self._values}"
        if of_xa:  # rows that nothing else touches while they are prepared
            return RowChange("c", schema, None, (1_000_000 + self._values, value))
        rows = self._rows[schema.table]
        key = self._random.randrange(40)
        before: Row | None = (key, rows[key]) if key in rows else None
        if before is None:
            rows[key] = value
            return RowChange("c", schema, None, (key, value))
        if self._random.random() < 0.3:
            del rows[key]
            return RowChange("d", schema, before, None)
        moved = self._random.randrange(40, 80)
        if self._random.random() < 0.2 and moved not in rows:
            del rows[key]
            rows[moved] = value
            return RowChange("u", schema, before, (moved, value))
        rows[key] = value
        return RowChange("u", schema, before, (key, value))

    @property
    def end(self) -> str:
        """The position after all of it."""
        return f"{DOMAIN}-{SERVER}-{len(self.transactions)}"


class ScriptedSource:
    """Hands out a script, beginning after a position.

    Args:
        ended: called when all of it was taken.
        away_after: the connection ends after so many parts; 0: never.
    """

    def __init__(self, script: Script, ended: Callable[[], None], away_after: int = 0) -> None:
        self._script, self._ended, self._away_after = script, ended, away_after
        self._left: Iterator[TransactionPart] = iter(())

    def current_position(self) -> Position:
        """See ``reader.Source``."""
        return Position("mariadb", "")

    def prepared(self) -> list[str]:
        """See ``reader.Source``."""
        return []

    def oldest_position(self) -> Position:
        """See ``reader.Source``."""
        return Position("mariadb", "")

    def open(self, position: Position) -> None:
        """See ``reader.Source``."""
        published = position.gtid_set
        assert isinstance(published, MariadbGtids)
        self._left = self._behind(published.sequence(DOMAIN), position.rows)

    def _behind(self, sequence: int, skipped: int) -> Iterator[TransactionPart]:
        given = 0
        for transaction in self._script.transactions[sequence:]:
            for one in transaction:
                if skipped and one.number + len(one.changes) <= skipped:
                    continue
                if self._away_after and given == self._away_after:
                    raise SourceAwayError("the script says so")
                given += 1
                yield one
            skipped = 0

    def read(self, timeout: float) -> TransactionPart | None:
        """See ``reader.Source``."""
        found = next(self._left, None)
        if found is None:
            self._ended()
        return found

    def close(self) -> None:
        """See ``reader.Source``."""


class Told(NamedTuple):
    """An event, as far as its place in the order is concerned."""

    topic: str
    op: str
    gtid: str
    row: int
    key: str


def topic_name(name: str, table: TableName) -> str:
    """As the setting ``publish.topic`` says."""
    return f"{name}.{table.database}.{table.name.replace('$', '_u24_')}"


def expected(script: Script, name: str) -> list[Told]:
    """The row events that must be there, in the order of the binlog."""
    found: list[Told] = []
    prepared: dict[Xid, list[Told]] = {}
    for transaction in script.transactions:
        told = [one for piece in transaction for one in _told(piece, name)]
        xa = transaction[0].xa
        if isinstance(xa, XaPrepare):
            prepared[xa.xid] = told
        elif isinstance(xa, XaEnd):
            held = prepared.pop(xa.xid)
            found += held if xa.committed else []
        else:
            found += told
    return found


def _told(piece: TransactionPart, name: str) -> Iterator[Told]:
    for row, change in enumerate(piece.changes, piece.number):
        topic = topic_name(name, change.schema.table)
        sides = [side for side in (change.before, change.after) if side is not None]
        keys = [json.dumps([side[0]]) for side in sides]
        if len(set(keys)) == 1:
            yield Told(topic, change.op, piece.gtid, row, keys[0])
        else:
            yield Told(topic, "d", piece.gtid, row, keys[0])
            yield Told(topic, "c", piece.gtid, row, keys[1])


def statements(script: Script, name: str) -> dict[tuple[str, str], str]:
    """The statements that must be in every partition: gtid by topic and op."""
    return {
        (topic_name(name, table), one.gtid): "t" if one.ddl.kind is DdlKind.TRUNCATE else "ddl"
        for transaction in script.transactions
        for one in transaction
        if one.ddl is not None
        for table in one.ddl.tables
    }


def require_published(client: txmq.Client, script: Script, name: str) -> None:
    """The topics hold what the script says: each event once, in the order of the binlog in every partition."""
    wanted = expected(script, name)
    order = {told: number for number, told in enumerate(wanted)}
    assert len(order) == len(wanted)
    read: list[Told] = []
    markers: dict[tuple[str, int], list[tuple[str, str]]] = defaultdict(list)
    for topic in sorted({told.topic for told in wanted} | {topic for topic, _ in statements(script, name)}):
        newest: dict[int, int] = defaultdict(lambda: -1)
        for message in client.browse(topic):
            event: dict[str, Any] = json.loads(message.value or b"")
            source = event["source"]
            if event["op"] in "cud":
                told = Told(topic, event["op"], source["gtid"], source["row"], (message.key or b"").decode())
                assert order[told] > newest[message.partition], f"{told} is out of order"
                newest[message.partition] = order[told]
                read.append(told)
            else:
                markers[topic, message.partition].append((event["op"], source["gtid"]))
    assert sorted(read) == sorted(wanted), (sorted(set(read) - set(wanted))[:5], sorted(set(wanted) - set(read))[:5])
    _require_in_all(client, markers, script, name)


def _require_in_all(
    client: txmq.Client, markers: dict[tuple[str, int], list[tuple[str, str]]], script: Script, name: str
) -> None:
    """Statements and markers stand once in every partition, and each begin has its end."""
    said = statements(script, name)
    for topic in {topic for topic, _ in markers}:
        found = [markers[topic, number] for number in range(client.topics.describe(topic).partitions)]
        assert all(one == found[0] for one in found), topic
        told = {(topic, gtid): op for op, gtid in found[0] if op in ("t", "ddl")}
        assert told == {key: op for key, op in said.items() if key[0] == topic}
        begun = [gtid for op, gtid in found[0] if op == "begin"]
        assert begun == [gtid for op, gtid in found[0] if op == "end"]
        assert len(set(begun)) == len(begun)
