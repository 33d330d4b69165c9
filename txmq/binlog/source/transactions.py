"""Events become transaction parts. Bytes go in, parts come out; what the database says is asked through ``Catalog``.

A transaction opens with a GTID. MariaDB's flag says whether one statement follows or a group, which an XID event,
COMMIT, ROLLBACK or XA PREPARE ends; MySQL says it by BEGIN. MySQL says at the end of an XA transaction whether it is
prepared or committed in one phase: its parts are held until then. Invariants:

* a part is handed out as last only when the event that ends its transaction is there; what a crash of the server cut
  off is dropped, if none of it was handed out;
* every event is understood, known to change nothing, marked by the server as ignorable, or an error;
* what is read again after a restart, the first ``rows`` changes of the position's transaction, is counted only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from pymysqlreplication.constants import BINLOG

from txmq.binlog.decoded_changes import (
    Ddl,
    DdlKind,
    Origin,
    RowChange,
    SessionValue,
    TableName,
    TransactionPart,
    XaEnd,
    XaPrepare,
)
from txmq.binlog.errors import SourceError
from txmq.binlog.position import MariadbGtids, MysqlGtids, Position
from txmq.binlog.source.charsets import Charset
from txmq.binlog.source.events import (
    CHECKSUM_SIZE,
    HEADER,
    HEADER_SIZE,
    IGNORABLE_FLAG,
    LOAD_DATA,
    PASSED_OVER,
    QUERY_COMPRESSED,
    REFUSED,
    ROWS,
    UNREADABLE,
    StatusVariables,
    has_checksums,
    is_checked,
    mariadb_gtid,
    mysql_gtid,
    query,
    rotation,
    xa_prepare,
)
from txmq.binlog.source.options import SourceOptions
from txmq.binlog.source.rows import AbsentColumnsError, TableDecoder, TableDescription, nameless_binaries
from txmq.binlog.source.table_map import parse_table_map
from txmq.binlog.statements import Statement, What, recognise, shadowed

_STATEMENT_SHOWN_MAX: Final = 200
HELD_BYTES_MAX: Final = 256 << 20  # of the events of an XA transaction of MySQL, whose changes are held in memory
_BY_ROWS: Final = "set binlog_format=ROW for every session, then "
_DECODERS_MAX: Final = 10_000
_NO_TABLE: Final = (0xFFFFFF, 0xFFFFFFFFFFFF)  # of an event without rows, which only ends a statement


class Catalog(Protocol):
    """What the database is asked about."""

    def describe(self, table: TableName) -> TableDescription:
        """A table as it is now; what has gone since is described as a table without more."""

    def later(self, table: TableName, columns: Sequence[str], file: str, offset: int) -> TableDescription:
        """Types and generated ones of columns that have other names now than at a place in the binlog, by these."""

    def charset(self, number: int) -> Charset:
        """The character set of a collation."""

    def collation(self, number: int) -> str:
        """The name of a collation."""

    def database_collation(self, database: str) -> str:
        """The collation that a database gives to a new table; empty if it is gone."""

    def system_clock(self) -> str:
        """What the time zone SYSTEM says at two moments."""

    def changed(self, ddl: Ddl) -> None:
        """A captured table has changed: what must hold of it may hold no longer."""


@dataclass(slots=True)
class _Open:
    """The transaction that is being read."""

    gtid: str
    gtids: MariadbGtids | MysqlGtids  # with it
    server_id: int
    timestamp_ms: int
    is_standalone: bool = False
    is_void: bool = False  # its statement changes nothing
    is_undecided: bool = False  # an XA transaction of MySQL, prepared or committed
    number: int = 0  # changes that were handed out, or skipped
    bytes: int = 0
    ddl: Ddl | None = None
    xa: XaPrepare | XaEnd | None = None
    first: bool = True


class TransactionReader:
    """Cuts a stream of events into parts; ``ready`` holds those that are whole."""

    def __init__(self, options: SourceOptions, origin: Origin, position: Position, catalog: Catalog) -> None:
        self.ready: deque[TransactionPart] = deque()
        self.file, self.offset = position.file, position.offset
        self._options = options
        self._origin = origin
        self._catalog = catalog
        self._gtids = position.gtid_set
        self._partial, self._skip = position.partial, position.rows
        self._checksums = True
        self._open: _Open | None = None
        self._changes: list[RowChange] = []
        self._held: list[TransactionPart] = []  # parts of an undecided transaction
        self._held_bytes = 0
        self._savepoints: dict[str, int] = {}
        self._tables: dict[int, TableDecoder | None] = {}
        self._decoders: dict[bytes, TableDecoder | None] = {}
        self._on: dict[int, Callable[[bytes], None]] = {
            BINLOG.TABLE_MAP_EVENT: self._table_map,
            BINLOG.XID_EVENT: self._commit,
            BINLOG.QUERY_EVENT: self._query,
            QUERY_COMPRESSED: self._compressed_query,
            BINLOG.MARIADB_GTID_EVENT: self._mariadb_gtid,
            BINLOG.GTID_LOG_EVENT: self._mysql_gtid,
            BINLOG.XA_PREPARE_EVENT: self._xa_prepare,
            BINLOG.FORMAT_DESCRIPTION_EVENT: self._description,
        }
        self._timestamp = self._server_id = 0

    def feed(self, event: bytes) -> None:
        """Take one event whole, header first.

        Raises:
            SourceError: it holds what cannot be published, or is damaged.
            ColumnError: a captured column's value cannot be read.
        """
        try:
            self._feed(event)
        except UNREADABLE as error:
            raise SourceError(
                f"{self._place()}: an event of {len(event)} bytes, kind {event[4:5].hex()}, cannot be read: {error}"
            ) from error

    def _feed(self, event: bytes) -> None:
        self._timestamp, kind, self._server_id, size, position, flags = HEADER.unpack_from(event)
        if size != len(event):
            raise SourceError(f"{self.file}: an event of {size} bytes has {len(event)}")
        if kind == BINLOG.ROTATE_EVENT:
            self._rotate(event)
            return
        # A file's description always ends with a sum. MariaDB 11.8 leaves a wrong one if events should have none.
        if has_checksums(event) if kind == BINLOG.FORMAT_DESCRIPTION_EVENT else self._checksums:
            if not is_checked(event):
                raise SourceError(f"{self.file}: the event that ends at {position} is damaged (CRC32)")
            body = event[HEADER_SIZE:-CHECKSUM_SIZE]
        else:
            body = event[HEADER_SIZE:]
        if position:
            self.offset = position
        if kind in ROWS:
            self._rows(kind, body)
        elif kind in self._on:
            self._on[kind](event if kind == BINLOG.FORMAT_DESCRIPTION_EVENT else body)
        elif kind not in PASSED_OVER:
            if kind in REFUSED:
                raise SourceError(f"{self._place()}: {REFUSED[kind]}")
            if kind in LOAD_DATA:
                self._refuse_unless_skipped("LOAD DATA", _BY_ROWS)
            elif not flags & IGNORABLE_FLAG:
                raise SourceError(f"{self._place()}: an event of a kind that is not known ({kind})")

    def _refuse_unless_skipped(self, statement: str, advice: str = "") -> None:
        gtid = self._opened().gtid
        if gtid not in self._options.skipped:
            raise SourceError(
                f"{self._place()}: it changes rows by a statement ({statement!r}), without row events: {advice}start "
                f"once with --skip {gtid} and --snapshot TABLES: that passes over the statement, and reads the tables "
                "again that it has changed; rows that it took away, take away from their consumers"
            )

    def _place(self) -> str:
        transaction = "" if self._open is None else f", transaction {self._open.gtid}"
        return f"{self.file}, byte {self.offset}{transaction}"

    # --- files ---------------------------------------------------------------------------------------------------

    def _rotate(self, event: bytes) -> None:
        """The server sends one before each file, made for it: whether it has a checksum is for itself to say."""
        self.file = rotation(event[HEADER_SIZE : -CHECKSUM_SIZE if is_checked(event) else None])
        self.offset = 4

    def _description(self, event: bytes) -> None:
        self._checksums = has_checksums(event)
        self._tables.clear()
        if self._open is not None:  # the server has crashed within a transaction: it never committed
            if self._open.number > sum(len(part.changes) for part in self._held):
                raise SourceError(f"{self._place()}: a crash of the server cut it off, and part of it was handed out")
            self._forget()

    # --- transactions --------------------------------------------------------------------------------------------

    def _mariadb_gtid(self, body: bytes) -> None:
        found = mariadb_gtid(body)
        gtid = f"{found.domain}-{self._server_id}-{found.sequence}"
        gtids = self._gtids
        if not isinstance(gtids, MariadbGtids):
            raise SourceError(f"{gtid}: the position is one of MySQL")
        if found.sequence <= gtids.sequence(found.domain):
            raise SourceError(f"{gtid} stands behind {gtids} in {self.file}: SET GLOBAL gtid_strict_mode=ON")
        opened = self._begin(gtid, gtids.moved(found.domain, self._server_id, found.sequence))
        opened.is_standalone, opened.is_void = found.is_standalone, found.is_unfinished_alter
        opened.xa = XaPrepare(found.xid) if found.xid is not None else None

    def _mysql_gtid(self, body: bytes) -> None:
        gtid = mysql_gtid(body)
        gtids = self._gtids.including(gtid)
        if gtids == self._gtids:
            raise SourceError(f"{gtid} is published already, and the server sends it again in {self.file}")
        self._begin(gtid, gtids).is_standalone = True  # until BEGIN or XA START says otherwise

    def _begin(self, gtid: str, gtids: MariadbGtids | MysqlGtids) -> _Open:
        if self._open is not None:
            raise SourceError(f"{self._place()}: {gtid} begins before it has ended")
        if self._skip and gtid != self._partial:
            raise SourceError(
                f"{gtid} comes where {self._partial} was expected, of which {self._skip} changes are published: "
                "this server has its transactions in another order; read the former server, or begin anew with a "
                "snapshot"
            )
        self._open = _Open(gtid, gtids, self._server_id, self._timestamp * 1000)
        return self._open

    def _xa_prepare(self, body: bytes) -> None:
        opened = self._opened()
        xid, one_phase = xa_prepare(body)
        opened.xa = None if one_phase else XaPrepare(xid)
        self._held = [replace(part, xa=opened.xa) for part in self._held]
        self._commit(body)

    def _commit(self, _body: bytes) -> None:
        opened = self._opened()
        if self._skip:
            raise SourceError(
                f"{opened.gtid} has {self._skip} changes less than were published of it: other tables are captured now"
            )
        self._gtids, opened.is_undecided = opened.gtids, False
        self.ready += self._held
        self._hand_out(opened, self._changes, last=True)
        self._forget()

    def _forget(self) -> None:
        self._open = None
        self._changes = []
        self._held, self._held_bytes = [], 0
        self._savepoints.clear()

    def _opened(self) -> _Open:
        if self._open is None:
            raise SourceError(f"{self._place()}: an event stands outside of every transaction (no GTID)")
        return self._open

    def _hand_out(self, opened: _Open, changes: list[RowChange], *, last: bool) -> None:
        part = TransactionPart(
            opened.gtid, self._gtids, self._origin, opened.server_id, opened.timestamp_ms,
            opened.first, last, opened.number, changes, opened.ddl, opened.xa, self.file, self.offset,
        )  # fmt: skip
        if opened.is_undecided:
            self._hold(part, opened.bytes)
        else:
            self.ready.append(part)
        opened.first = False
        opened.ddl = None
        opened.number += len(changes)
        opened.bytes = 0

    def _hold(self, part: TransactionPart, size: int) -> None:
        self._held.append(part)
        self._held_bytes += size
        if self._held_bytes > HELD_BYTES_MAX:
            raise SourceError(
                f"{self._place()}: an XA transaction of more than {HELD_BYTES_MAX} bytes cannot be published: MySQL "
                "says at its end what it is. Begin anew after it (source.start), with a dump, and make them smaller"
            )

    # --- rows ----------------------------------------------------------------------------------------------------

    def _table_map(self, body: bytes) -> None:
        described = body[8:]
        if described in self._decoders:
            self._tables[int.from_bytes(body[:6], "little")] = self._decoders[described]
            return
        if len(self._decoders) >= _DECODERS_MAX:
            self._decoders.clear()
        decoder = self._decoders[described] = self._decoder(described)
        self._tables[int.from_bytes(body[:6], "little")] = decoder

    def _decoder(self, described: bytes) -> TableDecoder | None:
        database_size = described[0]
        database = described[1 : 1 + database_size].decode()
        at = database_size + 3
        table = TableName(database, described[at : at + described[at - 1]].decode())
        if not self._captures(table):
            return None
        description = self._catalog.describe(table)
        if not description.is_table:
            return None
        table_map = parse_table_map(described, self._origin.flavor, self._catalog.charset)
        nameless = nameless_binaries(table_map, description) if self._origin.flavor == "mariadb" else []
        if nameless:
            later = self._catalog.later(table, nameless, self.file, self.offset)
            description = replace(description, types=description.types | later.types)
        return TableDecoder(table_map, description)

    def _with_later_names(self, decoder: TableDecoder, error: AbsentColumnsError) -> TableDecoder:
        """Of a table that was renamed since, or whose columns were: MariaDB 11.8 leaves generated ones out.

        Raises:
            AbsentColumnsError: they are not generated, or nobody knows.
        """
        later = TableDescription()
        if not error.is_known:
            later = self._catalog.later(decoder.schema.table, error.names, self.file, self.offset)
        if not later.generated.issuperset(error.names):
            raise error
        known = decoder.with_generated(later.generated)
        self._decoders |= {described: known for described, one in self._decoders.items() if one is decoder}
        return known

    def _captures(self, table: TableName) -> bool:
        base = shadowed(table)
        if base is not None and (base == table or self._options.captures(base)):
            return False
        return self._options.captures(table)

    def _rows(self, kind: int, body: bytes) -> None:
        opened = self._opened()
        op, has_more, compressed = ROWS[kind]
        number = int.from_bytes(body[:6], "little")
        try:
            decoder = self._tables[number]
        except KeyError:
            if number in _NO_TABLE:
                return
            raise SourceError(f"{self._place()}: rows without a table map ({number})") from None
        if decoder is None:
            return
        at = 8 + (int.from_bytes(body[8:10], "little") if has_more else 0)
        is_partial = kind == BINLOG.PARTIAL_UPDATE_ROWS_EVENT
        try:
            changes = decoder.changes(op, body, at, compressed=compressed, is_partial=is_partial)
        except AbsentColumnsError as error:
            decoder = self._tables[number] = self._with_later_names(decoder, error)
            changes = decoder.changes(op, body, at, compressed=compressed, is_partial=is_partial)
        if self._skip:
            changes = self._unpublished(opened, changes)
        kept = self._changes
        kept += changes
        opened.bytes += len(body)
        if len(kept) >= self._options.rows_max or opened.bytes >= self._options.bytes_max:
            self._hand_out_full(opened)

    def _unpublished(self, opened: _Open, changes: list[RowChange]) -> list[RowChange]:
        skipped = min(self._skip, len(changes))
        self._skip -= skipped
        opened.number += skipped
        opened.first = False
        opened.ddl = None
        return changes[skipped:]

    def _hand_out_full(self, opened: _Open) -> None:
        rows_max = self._options.rows_max
        while len(self._changes) >= rows_max:
            changes, self._changes = self._changes[:rows_max], self._changes[rows_max:]
            self._hand_out(opened, changes, last=False)
        if opened.bytes >= self._options.bytes_max and self._changes:
            changes, self._changes = self._changes, []
            self._hand_out(opened, changes, last=False)

    def _undo(self, opened: _Open, number: int) -> None:
        """Take back the changes from ``number`` on."""
        if self._held and number < opened.number:
            self._take_back(opened)
        if number < opened.number:
            raise SourceError(
                f"{self._place()}: it was rolled back (to a savepoint) before changes that are handed out already; "
                f"raise the rows and bytes of a part above {self._options.rows_max} and {self._options.bytes_max}"
            )
        del self._changes[number - opened.number :]

    def _take_back(self, opened: _Open) -> None:
        """Parts that are held have been handed out to nobody."""
        changes = [change for part in self._held for change in part.changes]
        opened.first, opened.number = self._held[0].first, opened.number - len(changes)
        self._changes = changes + self._changes
        self._held, self._held_bytes = [], 0

    # --- statements ----------------------------------------------------------------------------------------------

    def _compressed_query(self, body: bytes) -> None:
        self._query(body, compressed=True)

    def _query(self, body: bytes, *, compressed: bool = False) -> None:
        opened = self._opened()
        if body.endswith(b"\0COMMIT"):  # of every transaction of tables without transactions
            self._commit(body)
            return
        found = query(body, compressed=compressed)
        text = self._text(found.statement, found.status.charset)
        statement = recognise(text, found.database, found.status.sql_mode(self._origin.flavor))
        self._statement(opened, statement, text, found.status)
        if opened.is_standalone and self._open is opened:
            self._commit(body)

    def _text(self, statement: bytes, charset: int | None) -> str:
        try:
            return statement.decode() if charset is None else self._catalog.charset(charset).decode(statement)
        except ValueError:
            return statement.decode("utf-8", "backslashreplace")  # a comment's bytes, or a value's: names are checked

    def _statement(self, opened: _Open, statement: Statement, text: str, status: StatusVariables) -> None:
        what = statement.what
        if what is What.COMMIT:
            self._commit(b"")
        elif what is What.BEGIN or text.startswith("XA START"):
            opened.is_standalone, opened.is_undecided = False, what is not What.BEGIN
        elif what is What.ROLLBACK:
            self._undo(opened, 0)
            self._commit(b"")
        elif what is What.SAVEPOINT:
            self._savepoints[statement.name] = opened.number + len(self._changes)
        elif what is What.ROLLBACK_TO:
            if statement.name not in self._savepoints:
                raise SourceError(f"{self._place()}: a rollback to the savepoint {statement.name}, which is not known")
            self._undo(opened, self._savepoints[statement.name])
        elif what is What.XA_END:
            opened.xa = statement.xa
        elif what is What.DDL and statement.ddl is not None:
            self._ddl(opened, statement.ddl, status)
        elif what is What.DML and (statement.ddl is None or self._concerns(statement.ddl)):
            self._refuse_unless_skipped(text[:_STATEMENT_SHOWN_MAX], _BY_ROWS if statement.ddl is None else "")

    def _ddl(self, opened: _Open, ddl: Ddl, status: StatusVariables) -> None:
        if opened.is_void or ddl.kind is DdlKind.OTHER:
            return
        self._decoders.clear()  # the tables' keys are asked for anew
        if ddl.kind is DdlKind.RENAME:
            ddl = replace(ddl, moved=tuple(pair for pair in ddl.moved if not self._is_view(pair[1])))
        if self._concerns(ddl):
            read = tuple(filter(self._captures, ddl.read))  # another one is of no interest
            is_named = ddl.kind is not DdlKind.DATABASE
            foreign = frozenset(table for table in ddl.changed if is_named and not self._captures(table))
            session = self._session(opened.gtid, ddl, status)
            if session is None:
                return
            collation = self._catalog.database_collation(ddl.changed[0].database) if ddl.kind is DdlKind.CREATE else ""
            opened.ddl = replace(ddl, read=read, foreign=foreign, session=session, collation=collation)
            self._catalog.changed(ddl)

    def _is_view(self, table: TableName) -> bool:
        return self._captures(table) and not self._catalog.describe(table).is_table

    def _session(self, gtid: str, ddl: Ddl, status: StatusVariables) -> Mapping[str, SessionValue] | None:
        """The session in which a statement was run; None if that is not known, and it is passed over."""
        catalog = self._catalog
        try:
            return status.session(self._origin.flavor, self._timestamp, catalog.collation, catalog.system_clock)
        except ValueError as error:
            if gtid in self._options.skipped:
                return None
            raise SourceError(
                f"{self._place()}: {ddl.statement[:_STATEMENT_SHOWN_MAX]!r} cannot be run again: {error}; start once "
                f"with --skip {gtid}: that passes over it, and give the copies' tables the form that it gives this one"
            ) from error

    def _concerns(self, ddl: Ddl) -> bool:
        """Whether a captured table is changed."""
        return ddl.kind is DdlKind.DATABASE or any(map(self._captures, ddl.changed))
