"""Parts of binlog transactions into messages, and into batches of them that one txmq transaction publishes.

Theory of operation. ``steps`` turns a part into steps: messages, and what is published with them. Nearly every part is
one step. ``Batch`` takes whole steps until one more would be too many. What a batch publishes is said by its last step.

A large transaction comes in several parts. Each topic that has a change of it gets a begin marker before the first
one, and an end marker after the last, in every partition. A statement (DDL) goes to every partition of its tables'
topics. The changes of a prepared XA transaction go to the parked topic, each with its destination in its headers. At XA
COMMIT they are taken from there, and at XA ROLLBACK forgotten.

While a snapshot is unfinished, the changes of rows that it has still to read are passed over (``unread``). Its rows are
steps as well, each with how far the snapshot then is.

No I/O but that of ``Topics`` and ``Parked``.

Invariants:
    * what is published goes on where the former step ended: a part with another number is refused;
    * a step is in one batch, and all batches are published in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from txmq.binlog.config import BinlogSettings
from txmq.binlog.decoded_changes import (
    Ddl,
    DdlKind,
    Op,
    Row,
    RowChange,
    TableName,
    TableSchema,
    TransactionPart,
    XaEnd,
    XaPrepare,
)
from txmq.binlog.errors import BinlogError, SourceError
from txmq.binlog.event_json import (
    BEGIN,
    END,
    EPOCH_HEADER,
    OP_HEADER,
    REKEY_HEADER,
    EventEncoder,
    EventMessage,
    read_event,
)
from txmq.binlog.position import Position
from txmq.binlog.publish.published import OpenTransaction, ParkedRows, Published
from txmq.binlog.publish.topics import Topics
from txmq.binlog.publish.unread import SnapshotState, Unread
from txmq.log.records import Headers
from txmq.xid import xid_sql

Outgoing = tuple[str, int, bytes | None, bytes, Headers, int]  # topic, partition, key, value, headers, timestamp ms
TOPIC_HEADER, PARTITION_HEADER, KEY_HEADER = "txmq.to-topic", "txmq.to-partition", "txmq.to-key"
MESSAGE_SIZE_BYTES_MAX = 15 << 20  # the broker's request_size_bytes_max is 16 MiB unless it was changed
_OVERHEAD_BYTES = 100  # of a record
EPOCH_ROWS_MAX, EPOCH_BYTES_MAX = 500, 1 << 20  # by one message more
_ENDED_MAX = 100  # that a killed server may have had between its binlog and its tables
_FRESH_BYTES_MAX = 32 << 20  # of parked rows that are kept in memory until their XA COMMIT


class Parked(Protocol):
    """The parked topic."""

    def read(self, xid: str, rows: ParkedRows) -> Iterator[Outgoing]:
        """The changes of a prepared transaction, in order, each with its destination."""


class Step(NamedTuple):
    """What is published together, and where that leads.

    Args:
        rows: how many changes, or rows of a snapshot.
        transactions: 1 if it ends one.
        snapshot: what one has still to read after it.
    """

    messages: list[Outgoing]
    size_bytes: int
    rows: int
    at: TransactionPart | Position
    open: OpenTransaction | None
    parked: Mapping[str, ParkedRows]
    transactions: int
    source_ms: int
    snapshot: SnapshotState | None = None
    ended: tuple[str, ...] = ()


class Batch:
    """The messages of one txmq transaction: whole steps."""

    __slots__ = ("begun_at", "last", "messages", "rows", "size_bytes", "transactions")

    def __init__(self, begun_at: float) -> None:
        self.messages: list[Outgoing] = []
        self.size_bytes = self.rows = self.transactions = 0
        self.last: Step | None = None
        self.begun_at = begun_at

    def has_room(self, step: Step, rows_max: int, bytes_max: int) -> bool:
        """Whether a step still fits; one that is too large by itself fits an empty batch."""
        return not self.messages or (
            self.rows + step.rows <= rows_max and self.size_bytes + step.size_bytes <= bytes_max
        )

    def add(self, step: Step) -> None:
        """Append a step."""
        self.messages += step.messages
        self.size_bytes += step.size_bytes
        self.rows += step.rows
        self.transactions += step.transactions
        self.last = step

    def published(self, before: Published | None, id_: str, now_ms: int, placing: str, epoch: int) -> Published:
        """What is published when this batch is. The arguments are those of ``Published``."""
        last = self.last
        assert last is not None
        rows, transactions = (0, 0) if before is None else (before.rows, before.transactions)
        position = last.at if isinstance(last.at, Position) else last.at.after
        return Published(
            id_, position, last.open, last.parked, rows + self.rows, transactions + self.transactions, last.source_ms,
            now_ms, last.snapshot, ended=last.ended, placing=placing, epoch=epoch, sent=epoch,
        )  # fmt: skip

    def numbered(self, before: Published | None, now_ms: int, parked_topic: str) -> tuple[list[Outgoing], int]:
        """The messages, each with its epoch as a header, and the last epoch. What is parked is in none.

        Hot: once for each message.

        Args:
            before: what was published before this batch.
        """
        # From the clock on: where positions were deleted, and topics were not, later messages have higher numbers.
        epoch = now_ms if before is None or not before.epoch else before.epoch + 1
        header, found, rows, size = (EPOCH_HEADER, str(epoch).encode()), list[Outgoing](), 0, 0
        for one in self.messages:
            topic, partition, key, value, headers, made_ms = one
            if topic == parked_topic:
                found.append(one)
                continue
            found.append((topic, partition, key, value, (*headers, header), made_ms))
            rows += 1
            size += len(value)
            if (rows >= EPOCH_ROWS_MAX or size >= EPOCH_BYTES_MAX) and not _is_half(headers):
                epoch, rows, size = epoch + 1, 0, 0
                header = EPOCH_HEADER, str(epoch).encode()
        return found, epoch


class Gathering:
    """See the module's docstring. Used by one thread.

    Args:
        begin: what is published.
        parked_end: no change that is parked from now on stands before this offset of the parked topic.
        unread: says which changes are passed over while a snapshot is unfinished.
    """

    def __init__(
        self, settings: BinlogSettings, topics: Topics, events: EventEncoder, parked: Parked, begin: Published,
        parked_end: int, unread: Unread | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._topics, self._events, self._parked = settings, topics, events, parked
        self._at: TransactionPart | Position = begin.position
        self._open, self._parked_rows, self._parked_end = begin.open, dict(begin.parked), parked_end
        self._unread, self._snapshot, self._source_ms = unread, begin.snapshot, begin.source_ms
        self._ended = begin.ended
        self._fresh: dict[str, list[Outgoing]] = {}
        self._fresh_bytes = 0

    @property
    def position(self) -> Position:
        """After the last step."""
        return self._at if isinstance(self._at, Position) else self._at.after

    @property
    def snapshot(self) -> SnapshotState | None:
        """What a snapshot has still to read."""
        return self._snapshot

    def steps(self, part: TransactionPart, now_ms: int) -> Iterator[Step]:
        """The steps of a part, in order: each must be taken before the next one is made.

        Raises:
            BinlogError: the part cannot be published; nothing of it is.
            TxmqError: a topic cannot be made, or the parked topic not be read; the call may be repeated if the error
                is retriable.
        """
        self._require_next(part)
        if isinstance(part.xa, XaEnd):
            yield from self._xa_end(part, part.xa, now_ms)
            return
        snapshot = self._snapshot
        if isinstance(part.xa, XaPrepare):
            messages = self._parked_messages(part, xid_sql(part.xa.xid), now_ms)
        else:
            if snapshot is not None and part.ddl is not None:
                snapshot = snapshot.behind(part.ddl)
            messages = self._messages(part, now_ms, self._judged(snapshot, part.changes))
        done = part.number + len(part.changes)
        is_open = not part.last
        self._open = OpenTransaction(part.gtid, self._open_topics, done) if is_open else None
        self._at, self._snapshot, self._source_ms = part, snapshot, part.timestamp_ms
        yield self._step(part, messages, len(part.changes), part, self._parked_rows)

    def read_steps(
        self, schema: TableSchema, rows: Sequence[Row], behind: Callable[[int], SnapshotState | None], now_ms: int
    ) -> Iterator[Step]:
        """The steps of rows that a snapshot has read at this position.

        Args:
            behind: what it has still to read after so many of the rows.
        """
        place, position = self._topics.place(schema.table, self.position.gtids), self.position
        publish, messages, size, first = self._settings.publish, list[Outgoing](), 0, 0
        for number, row in enumerate(rows):
            of, key, value, headers = self._events.snapshot_row(schema, row, position, now_ms)
            if len(value) > MESSAGE_SIZE_BYTES_MAX:
                raise _too_large(of, "a row of a snapshot", len(value))
            grown = size + len(key) + len(value) + _OVERHEAD_BYTES
            if messages and (grown > publish.transaction_bytes_max or len(messages) >= publish.transaction_rows_max):
                yield self._read_step(messages, number - first, behind(number))
                messages, grown, first = [], grown - size, number
            size = grown
            messages.append((place.topic, place.partition_of(key), key, value, tuple(headers.items()), now_ms))
        yield self._read_step(messages, len(rows) - first, behind(len(rows)))

    def skip_step(self, snapshot: SnapshotState | None) -> Step:
        """A step without rows: a table is gone, or has none."""
        return self._read_step([], 0, snapshot)

    def _read_step(self, messages: list[Outgoing], rows: int, snapshot: SnapshotState | None) -> Step:
        self._snapshot = snapshot
        return Step(
            messages,
            _size(messages),
            rows,
            self._at,
            self._open,
            self._parked_rows,
            0,
            self._source_ms,
            snapshot,
            self._ended,
        )

    def _judged(self, snapshot: SnapshotState | None, changes: Sequence[RowChange]) -> Sequence[RowChange | None]:
        if snapshot is None or self._unread is None or not changes:
            return changes
        return self._unread.judged(snapshot, changes)

    def _step(
        self, part: TransactionPart, messages: list[Outgoing], rows: int, at: TransactionPart | Position,
        parked: Mapping[str, ParkedRows],
    ) -> Step:  # fmt: skip
        open_ = self._open
        ends = 0 if open_ is not None else 1
        return Step(
            messages, _size(messages), rows, at, open_, parked, ends, part.timestamp_ms, self._snapshot, self._ended
        )

    @property
    def _open_topics(self) -> Mapping[str, TableName]:
        return {} if self._open is None else self._open.topics

    def _require_next(self, part: TransactionPart) -> None:
        open_ = self._open
        done = open_.rows if open_ is not None and open_.gtid == part.gtid else 0
        if open_ is not None and open_.gtid != part.gtid:
            raise SourceError(
                f"the server went on with transaction {part.gtid}, but of {open_.gtid} only {open_.rows} changes are "
                "published: is it another server, or was its binlog rewritten?"
            )
        if not isinstance(part.xa, XaEnd) and part.number != done:
            raise SourceError(
                f"transaction {part.gtid} went on at change {part.number}, and {done} are published: nothing was sent"
            )

    # --- rows and statements -----------------------------------------------------------------------------------------

    def _messages(self, part: TransactionPart, now_ms: int, changes: Sequence[RowChange | None]) -> list[Outgoing]:
        messages: list[Outgoing] = []
        if part.ddl is not None:
            self._add_ddl(messages, part, part.ddl, now_ms)
        is_whole = part.first and part.last
        if not is_whole and part.first:
            self._open = OpenTransaction(part.gtid)
        self._add_rows(messages, part, now_ms, changes, has_markers=not is_whole)
        if not is_whole and part.last:
            self._add_end_markers(messages, part, part.number + len(part.changes), now_ms)
        return messages

    def _add_rows(
        self, messages: list[Outgoing], part: TransactionPart, now_ms: int, changes: Sequence[RowChange | None], *,
        has_markers: bool,
    ) -> None:  # fmt: skip
        """Hot: once for each change."""
        table: TableName | None = None
        add = messages.append
        for of, key, value, headers in self._events.changes(part, now_ms, changes):
            if of is not table:
                place = self._topics.place(of, part.gtid)
                table, topic, where = of, place.topic, place.partition_of
                if has_markers:
                    self._add_begin_markers(messages, part, topic, of, now_ms)
            if len(value) > MESSAGE_SIZE_BYTES_MAX:
                raise _too_large(of, f"a change of transaction {part.gtid}", len(value))
            add((topic, where(key), key, value, tuple(headers.items()), now_ms))

    def _add_ddl(self, messages: list[Outgoing], part: TransactionPart, ddl: Ddl, now_ms: int) -> None:
        if self._settings.publish.ddl == "stop" and self._may_contradict(ddl):
            raise BinlogError(
                f'stopped before transaction {part.gtid}, as publish.ddl = "stop" says: {ddl.statement[:200]}; start '
                'again with publish.ddl = "pass" when consumers can take what follows'
            )
        concerned = self._topics.concerned(ddl.captured, part.gtid)
        partitions = {topic: self._topics.partitions(topic) for topic in concerned}
        for topic, table in concerned.items():
            self._add_to_all(messages, topic, self._events.statement(part, table, partitions, now_ms), now_ms)

    def _may_contradict(self, ddl: Ddl) -> bool:
        """Whether consumers may know a table otherwise than it is after a statement."""
        if ddl.additive or ddl.kind in (DdlKind.TRUNCATE, DdlKind.OTHER):
            return False
        return ddl.kind is not DdlKind.CREATE or self._topics.any_exists(ddl.changed)  # OR REPLACE

    def _add_begin_markers(
        self, messages: list[Outgoing], part: TransactionPart, topic: str, table: TableName, now_ms: int
    ) -> None:
        open_ = self._open
        assert open_ is not None
        if topic not in open_.topics:
            self._open = OpenTransaction(open_.gtid, {**open_.topics, topic: table}, open_.rows)
            self._add_to_all(messages, topic, self._events.marker(part, BEGIN, table, None, now_ms), now_ms)

    def _add_end_markers(self, messages: list[Outgoing], part: TransactionPart, rows: int, now_ms: int) -> None:
        assert self._open is not None
        for topic, table in self._open.topics.items():
            self._add_to_all(messages, topic, self._events.marker(part, END, table, rows, now_ms), now_ms)

    def _add_to_all(self, messages: list[Outgoing], topic: str, event: EventMessage, now_ms: int) -> None:
        headers = tuple(event.headers.items())
        for partition in range(self._topics.partitions(topic)):
            messages.append((topic, partition, event.key, event.value, headers, now_ms))

    # --- XA ----------------------------------------------------------------------------------------------------------

    def _parked_messages(self, part: TransactionPart, xid: str, now_ms: int) -> list[Outgoing]:
        messages: list[Outgoing] = []
        self._add_rows(messages, part, now_ms, part.changes, has_markers=False)
        if part.first:
            self._ended = tuple(ended for ended in self._ended if ended != xid)
            self._forget_fresh(xid)
            self._fresh[xid] = []
        known = ParkedRows(part.gtid, self._parked_end, 0) if part.first else self._parked_rows[xid]
        rows = ParkedRows(known.gtid, known.offset, known.rows + len(messages))
        self._parked_rows = {**self._parked_rows, xid: rows}
        self._parked_end += len(messages)
        self._keep_fresh(xid, messages)
        topic = self._settings.parked_topic
        return [(topic, 0, parked_key(xid, part.gtid), *_enveloped(one)) for one in messages]

    def _keep_fresh(self, xid: str, messages: list[Outgoing]) -> None:
        kept = self._fresh.get(xid)
        if kept is None:
            return  # its first changes are in the parked topic alone
        kept += messages
        self._fresh_bytes += _size(messages)
        while self._fresh_bytes > _FRESH_BYTES_MAX:
            self._forget_fresh(next(iter(self._fresh)))

    def _forget_fresh(self, xid: str) -> list[Outgoing] | None:
        kept = self._fresh.pop(xid, None)
        if kept is not None:
            self._fresh_bytes -= _size(kept)
        return kept

    def _xa_end(self, part: TransactionPart, end: XaEnd, now_ms: int) -> Iterator[Step]:
        xid = xid_sql(end.xid)
        rows = self._parked_rows.get(xid)
        if rows is None and end.committed and xid not in self._ended and not self._will_be_shown:
            raise SourceError(
                f"transaction {part.gtid} is the XA COMMIT of {xid}, which was prepared before this reader's first "
                "position, or in a server that died before its binlog had it: its changes were not read; begin again "
                "with a snapshot"
            )
        fresh = self._forget_fresh(xid)
        left = {known: parked for known, parked in self._parked_rows.items() if known != xid}
        if rows is None or not end.committed or rows.rows == 0:
            self._end_parked(part, xid if end.committed else None, left)
            yield self._step(part, [], 0, part, left)
            return
        if fresh is not None and len(fresh) == rows.rows:
            found: Iterable[Outgoing] = fresh
        else:
            found = self._parked.read(xid, rows)
        yield from self._committed(part, xid, rows, found, left, now_ms)

    def _end_parked(self, part: TransactionPart, committed: str | None, left: Mapping[str, ParkedRows]) -> None:
        """A prepared transaction has ended: all of it is in this step, or nothing will be."""
        self._parked_rows, self._open, self._at = dict(left), None, part
        if committed is not None and committed not in self._ended:
            self._ended = (*self._ended, committed)[-_ENDED_MAX:]

    @property
    def _will_be_shown(self) -> bool:
        """Whether the first view of a snapshot of all tables will have what is committed here."""
        return self._snapshot is not None and not (self._snapshot.has_begun or self._settings.snapshot.tables)

    def _committed(
        self, part: TransactionPart, xid: str, rows: ParkedRows, found: Iterable[Outgoing],
        left: Mapping[str, ParkedRows], now_ms: int,
    ) -> Iterator[Step]:  # fmt: skip
        """The changes of an XA transaction that was committed, again in steps if there are many."""
        done = self._open.rows if self._open is not None else 0
        self._open = self._open or OpenTransaction(part.gtid)
        for chunk in _chunks(found, done, self._settings.publish.transaction_rows_max):
            messages: list[Outgoing] = []
            is_whole = rows.rows == len(chunk)
            for one in self._read_of(chunk):
                if not is_whole and one[0] not in self._open_topics:
                    self._add_begin_markers(messages, part, one[0], read_event(one[3]).table, now_ms)
                messages.append((*one[:5], now_ms))
            done += len(chunk)
            if done < rows.rows:
                self._open = OpenTransaction(part.gtid, self._open_topics, done)
                yield self._step(part, messages, len(chunk), self.position, self._parked_rows)
                continue
            if not is_whole:
                self._add_end_markers(messages, part, rows.rows, now_ms)
            self._end_parked(part, xid, left)
            yield self._step(part, messages, len(chunk), part, left)

    def _read_of(self, messages: list[Outgoing]) -> list[Outgoing]:
        """Those of rows that a snapshot has read. Half of an update that changed a key is then a change by itself."""
        snapshot, unread = self._snapshot, self._unread
        if snapshot is None or unread is None:
            return messages
        events = [read_event(one[3]) for one in messages]
        told = unread.are_read(snapshot, [(event.table, dict(event.after or event.before or {})) for event in events])
        return [
            (*one[:4], [header for header in one[4] if header[0] != REKEY_HEADER], one[5])
            for one, is_read in zip(messages, told, strict=True)
            if is_read
        ]


def _is_half(headers: Headers) -> bool:
    """Whether it is the first of the two messages of a change of a key: none is between them."""
    named = dict(headers)
    return REKEY_HEADER in named and named[OP_HEADER] == Op.DELETE.encode()


def parked_key(xid: str, gtid: str) -> bytes:
    """The key of a parked change: an xid may be prepared again once it was rolled back."""
    return f"{xid} {gtid}".encode()


def _enveloped(one: Outgoing) -> tuple[bytes, Headers, int]:
    topic, partition, key, value, headers, now_ms = one
    to = [(TOPIC_HEADER, topic.encode()), (PARTITION_HEADER, str(partition).encode()), (KEY_HEADER, key or b"")]
    return value, [*headers, *to], now_ms


def _size(messages: Iterable[Outgoing]) -> int:
    return sum([len(key or b"") + len(value) + _OVERHEAD_BYTES for _, _, key, value, _, _ in messages])


def _chunks(found: Iterable[Outgoing], skipped: int, size: int) -> Iterator[list[Outgoing]]:
    chunk: list[Outgoing] = []
    for number, one in enumerate(found):
        if number < skipped:
            continue
        if len(chunk) == size:
            yield chunk
            chunk = []
        chunk.append(one)
    yield chunk


def _too_large(table: TableName, what: str, size: int) -> BinlogError:
    return BinlogError(
        f"{table}: {what} is an event of {size} bytes, over the limit of "
        f"{MESSAGE_SIZE_BYTES_MAX}: source.exclude the table, or store such values elsewhere"
    )
