"""Change events: the JSON that stands in the topics, and the key of each. docs/binlog.md describes it; it is stable.

Values are written as ``decoded_changes.py`` holds them; bytes in base64, and ``source.binary`` names those columns.
Numbers are exact: a BIGINT may be above 2^53, and needs a reader that does not round.

The key is the JSON array of the key columns' values; without a key, of one string: a checksum of the row.
An update that changes the key becomes ``d`` under the old key and ``c`` under the new one, in that order, because both
may be of different partitions; each has the header ``txmq.rekey`` with the other one's key.
"""

from __future__ import annotations

import hmac
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from txmq.binlog.decoded_changes import (
    ABSENT,
    SESSION_VARIABLES,
    ColumnKind,
    Ddl,
    DdlKind,
    Op,
    Row,
    RowChange,
    TableName,
    TableSchema,
    TransactionPart,
)
from txmq.binlog.position import Position

OP_HEADER: Final = "txmq.op"
SCHEMA_HEADER: Final = "txmq.schema"
REKEY_HEADER: Final = "txmq.rekey"
EPOCH_HEADER: Final = "txmq.epoch"
TRUNCATE: Final = "t"
DDL: Final = "ddl"
BEGIN: Final = "begin"
END: Final = "end"
STATEMENT_FIELDS: Final = (
    "ddl",
    "kind",
    "database",
    "emptied",
    "moved",
    "concerned",
    "read",
    "session",
    "collation",
    "topics",
)


class EventMessage(NamedTuple):
    """One message: ``headers`` are shared by many, and never changed."""

    table: TableName
    key: bytes
    value: bytes
    headers: Mapping[str, bytes]


class _TableJson:
    """What is the same in all events of one schema."""

    __slots__ = ("headers", "key", "names", "source", "stored")

    def __init__(self, schema: TableSchema) -> None:
        self.names = [column.name for column in schema.columns]
        self.key = schema.key
        stored = [place for place, column in enumerate(schema.columns) if not column.is_generated]
        self.stored = stored if len(stored) < len(self.names) else None  # None: all are
        described: dict[str, Any] = {"db": schema.table.database, "table": schema.table.name, "schema": schema.tag}
        binary = [column.name for column in schema.columns if column.kind is ColumnKind.BINARY]
        if binary:
            described["binary"] = binary
        self.source = _dumps(described)[1:-1]
        self.headers = {op: {OP_HEADER: op.encode(), SCHEMA_HEADER: schema.tag.encode()} for op in map(str, Op)}

    def row(self, row: Row | None) -> str:
        if row is None:
            return "null"
        values = zip(self.names, row, strict=True)
        return _dumps(dict(values) if self.stored is None else {name: one for name, one in values if one is not ABSENT})

    def message_key(self, row: Row, text: str) -> bytes:
        if not self.key:  # generated values are in some images of a row, and not in others
            if self.stored is not None:
                text = _dumps({self.names[place]: row[place] for place in self.stored})
            return f'["{blake2b(text.encode(), digest_size=16).hexdigest()}"]'.encode()
        return _dumps([row[place] for place in self.key]).encode()


class EventEncoder:
    """Makes the messages of transaction parts and of snapshots.

    Args:
        name: of the sync, as ``source.name`` shows it.
        statement_key: the secret of which the codes of statements are made; empty: they have none.
    """

    def __init__(self, name: str, statement_key: str = "") -> None:
        self._name, self._statement_key = _dumps(name), statement_key
        self._tables: dict[int, tuple[TableSchema, _TableJson]] = {}

    def changes(
        self, part: TransactionPart, now_ms: int, judged: Sequence[RowChange | None] | None = None
    ) -> Iterator[EventMessage]:
        """The messages of a part's row changes, in order; one change makes two if it changes the row's key.

        Args:
            judged: what is published in the place of each change, None for nothing; all changes by default.
        """
        before, behind = self._source(part), f'"ts_ms":{now_ms}}}'
        transaction = f'"transaction":{{"id":{_dumps(part.gtid)},"total_order":'
        for number, change in enumerate(part.changes if judged is None else judged, part.number):
            if change is None:
                continue
            table = self._table(change.schema)
            ending = f'"source":{{{before},"row":{number},{table.source}}},{transaction}{number + 1}}},{behind}'
            yield from _messages(change, table, ending)

    def snapshot_row(self, schema: TableSchema, row: Row, position: Position, now_ms: int) -> EventMessage:
        """The message of a row that a snapshot read: ``op`` is ``r``; ``position`` is where the stream goes on."""
        table = self._table(schema)
        text = table.row(row)
        source = (
            f'"connector":"txmq","name":{self._name},"server_id":0,"gtid":{_dumps(position.gtids)},'
            f'"file":{_dumps(position.file)},"pos":{position.offset},"ts_ms":{now_ms},"snapshot":true,"row":0'
        )
        value = f'{{"op":"r","before":null,"after":{text},"source":{{{source},{table.source}}},"ts_ms":{now_ms}}}'
        return EventMessage(schema.table, table.message_key(row, text), value.encode(), table.headers["r"])

    def statement(
        self, part: TransactionPart, table: TableName, topics: Mapping[str, int], now_ms: int
    ) -> EventMessage:  # fmt: skip
        """The message of a part's statement for one of its tables: ``t`` for TRUNCATE, else ``ddl``.

        The key is the table's name: what goes to every partition is sent to each by number.

        Args:
            topics: those that have this statement, each with its partitions.
        """
        ddl = part.ddl
        if ddl is None:
            raise ValueError(f"transaction {part.gtid} has no statement")
        op = TRUNCATE if ddl.kind is DdlKind.TRUNCATE else DDL
        fields: dict[str, Any] = {
            "ddl": ddl.statement, "kind": ddl.kind, "additive": ddl.additive, "database": ddl.database,
            "emptied": ddl.emptied, "moved": ddl.moved, "concerned": ddl.concerned, "read": ddl.read,
            "session": dict(ddl.session), "collation": ddl.collation, "topics": dict(topics),
        }  # fmt: skip
        if self._statement_key:
            fields["code"] = statement_code(self._statement_key, {"gtid": part.gtid}, fields)
        return self._other(part, op, table, fields, now_ms)

    def marker(self, part: TransactionPart, op: str, table: TableName, rows: int | None, now_ms: int) -> EventMessage:
        """The marker of a transaction of several parts: ``begin`` before its first change, ``end`` after its last.

        Args:
            rows: how many changes it has, at the end.
        """
        return self._other(part, op, table, {"rows": rows}, now_ms)

    def _other(
        self, part: TransactionPart, op: str, table: TableName, fields: Mapping[str, Any], now_ms: int
    ) -> EventMessage:
        source = f'{self._source(part)},"row":{part.number},"db":{_dumps(table.database)},"table":{_dumps(table.name)}'
        value = (
            f'{{"op":"{op}",{_dumps(fields)[1:-1]},"source":{{{source}}},"transaction":{{"id":{_dumps(part.gtid)}}},'
            f'"ts_ms":{now_ms}}}'
        )
        key = _dumps([table.database, table.name]).encode()
        return EventMessage(table, key, value.encode(), {OP_HEADER: op.encode()})

    def _source(self, part: TransactionPart) -> str:
        return (
            f'"connector":"txmq","name":{self._name},"server_id":{part.server_id},"gtid":{_dumps(part.gtid)},'
            f'"file":{_dumps(part.file)},"pos":{part.offset},"ts_ms":{part.timestamp_ms},"snapshot":false'
        )

    def _table(self, schema: TableSchema) -> _TableJson:
        found = self._tables.get(id(schema))
        if found is None or found[0] is not schema:
            if len(self._tables) >= _TABLES_MAX:
                self._tables.clear()
            found = self._tables[id(schema)] = (schema, _TableJson(schema))  # holds the schema: its id stays its own
        return found[1]


@dataclass(frozen=True, slots=True)
class ChangeEvent:
    """An event as a consumer sees it.

    Args:
        op: ``c``, ``u``, ``d``, ``r``; ``t`` and ``ddl``; ``begin`` and ``end``.
        table: which one; of a marker, the table by whose topic it was sent.
        before: the row before the change; bytes in binary columns.
        after: the row after the change.
        source: the event's ``source``, as JSON has it.
        fields: the whole event, as JSON has it: ``ddl``, ``kind``, ``rows`` and others stand there.
    """

    op: str
    table: TableName
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    source: Mapping[str, Any]
    fields: Mapping[str, Any]


def read_event(value: bytes) -> ChangeEvent:
    """Read a message's value.

    Raises:
        ValueError: it is no change event.
    """
    found: Any = json.loads(value)
    source = found.get("source") if isinstance(found, dict) else None
    if not isinstance(source, dict) or not isinstance(found.get("op"), str):
        raise ValueError(f"not a change event: {value[:80]!r}")  # noqa: TRY004 - bytes that say something else
    binary = source.get("binary", ())
    rows = [_with_bytes(found.get(side), binary) for side in ("before", "after")]
    table = TableName(str(source.get("db", "")), str(source.get("table", "")))
    return ChangeEvent(found["op"], table, rows[0], rows[1], source, found)


def _with_bytes(row: dict[str, Any] | None, binary: list[str]) -> dict[str, Any] | None:
    if row is None or not binary:
        return row
    decoded = {name: b64decode(row[name], validate=True) for name in binary if row.get(name) is not None}
    return row | decoded


def statement_code(key: str, source: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """The code of a statement of this transaction, tables and topics: proof that its writer knows the key."""
    said = [source["gtid"], *(fields[name] for name in STATEMENT_FIELDS)]
    text = json.dumps(said, sort_keys=True).encode()
    return hmac.digest(key.encode(), text, "sha256").hex()


def read_statement(event: ChangeEvent) -> Ddl:
    """The statement of an event ``ddl`` or ``t``.

    Raises:
        ValueError: it is malformed.
    """
    fields = event.fields
    text, database, kind, topics = (fields.get(name) for name in ("ddl", "database", "kind", "topics"))
    if not (isinstance(text, str) and isinstance(database, str) and isinstance(kind, str)):
        raise ValueError("a statement without its text, database or kind")  # noqa: TRY004 - bytes that say it
    if not (isinstance(topics, dict) and all(type(count) is int and count > 0 for count in topics.values())):
        raise ValueError("a statement without topics and their partitions")
    session, collation = fields.get("session"), fields.get("collation")
    if not (isinstance(session, dict) and isinstance(collation, str) and all(map(_is_said, session, session.values()))):
        raise ValueError(f"a session with what is not known: {session!r:.200}, {collation!r:.80}")
    moved = [tuple(map(_table_name, _list(pair, 2))) for pair in _list(fields.get("moved"))]
    emptied, concerned, read = (
        tuple(map(_table_name, _list(fields.get(name)))) for name in ("emptied", "concerned", "read")
    )
    return Ddl(
        DdlKind(kind), text, database, emptied, tuple((old, new) for old, new in moved), concerned, read,
        fields.get("additive") is True, session=session, collation=collation,
    )  # fmt: skip


def _is_said(name: object, value: object) -> bool:
    """Whether a session may say this: a variable that is known, and a value that needs no quotes."""
    if isinstance(value, str):
        return name in SESSION_VARIABLES and _SAID.fullmatch(value) is not None
    return name in SESSION_VARIABLES and type(value) in (int, float)


_SAID: Final = re.compile(r"[\w +:/.,=-]*")


def _list(found: object, size: int | None = None) -> list[Any]:
    if not isinstance(found, list) or (size is not None and len(found) != size):
        raise ValueError(f"no list of tables: {found!r:.80}")
    return found


def _table_name(found: object) -> TableName:
    database, name = _list(found, 2)
    if not (isinstance(database, str) and isinstance(name, str)):
        raise ValueError(f"no table: {found!r:.80}")  # noqa: TRY004 - bytes that say it
    return TableName(database, name)


_TABLES_MAX: Final = 10_000


def _base64(value: object) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    raise TypeError(f"no value of a row: {value!r}")


_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_base64).encode


def _messages(change: RowChange, table: _TableJson, ending: str) -> Iterator[EventMessage]:
    name, before, after = change.schema.table, table.row(change.before), table.row(change.after)
    old = None if change.before is None else table.message_key(change.before, before)
    new = None if change.after is None else table.message_key(change.after, after)
    if old is None or new is None or old == new:
        value = f'{{"op":"{change.op}","before":{before},"after":{after},{ending}'.encode()
        key = new if new is not None else old
        yield EventMessage(name, key or b"[]", value, table.headers[change.op])
        return
    deleted = f'{{"op":"d","before":{before},"after":null,{ending}'.encode()
    created = f'{{"op":"c","before":null,"after":{after},{ending}'.encode()
    yield EventMessage(name, old, deleted, table.headers["d"] | {REKEY_HEADER: new})
    yield EventMessage(name, new, created, table.headers["c"] | {REKEY_HEADER: old})
