"""How far a reader is: position, lag, rate. From the topic of its positions, and from the server that it reads.

The reader itself is not asked: its position messages say what is published, how much that is, and when it was. In
ordered mode its spool says so, if it is on this machine, even while the broker is away.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from txmq.binlog.config import BinlogSettings
from txmq.binlog.errors import BinlogError
from txmq.binlog.position import Position
from txmq.binlog.publish.ownership import PUBLISHED
from txmq.binlog.publish.position_log import newest_position, position_at
from txmq.binlog.publish.published import Published, SpoolHeld, read_published
from txmq.binlog.publish.unread import SnapshotState
from txmq.binlog.source import BinlogSource
from txmq.binlog.source_settings import source_options
from txmq.client import Client
from txmq.client.spooling.write_ahead import WriteAheadSpool
from txmq.errors import StorageError, TxmqError, UnknownGroupError
from txmq.runtime.owner import host_name

RATE_MS = 60_000  # rates are of the last minute


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """Where the server's binlog ends.

    Args:
        position: behind its last transaction.
        bytes_behind: from the reader's file and offset on; None if that file is gone.
    """

    position: Position
    bytes_behind: int | None


@dataclass(frozen=True, slots=True)
class BinlogStatus:
    """See the module's docstring.

    Args:
        name: of the reader.
        reader: the member that publishes; None if none does, or if the broker is away.
        gtids, file, offset: what is published.
        rows, transactions: published since the first start.
        rows_per_s: in the last minute; None if the broker is away.
        lag_s: how old the newest published transaction is; 0 if the server has no newer one; None if the server does
            not answer, or nothing was published yet.
        lag_bytes: of the binlog that are not published; None likewise.
        open_rows: changes that are published of a large transaction in parts; 0 if there is none.
        parked: prepared XA transactions, with how many changes each waits.
        snapshot: of an unfinished one the rows that are read, the table that is being read, and how many are left.
        published_ms: when the newest position was written.
        spool: in ordered mode, where it is, what waits in it, and what it can hold.
    """

    name: str
    reader: str | None
    gtids: str
    file: str
    offset: int
    rows: int
    transactions: int
    rows_per_s: float | None
    lag_s: float | None
    lag_bytes: int | None
    open_rows: int
    parked: dict[str, int]
    snapshot: dict[str, Any] | None
    published_ms: int
    spool: dict[str, Any] | None

    def as_fields(self) -> dict[str, Any]:
        """By name, as JSON has it."""
        return asdict(self)


def newest_published(client: Client, settings: BinlogSettings) -> Published:
    """The newest position.

    Raises:
        BinlogError: there is none: no reader of that name has ever begun.
        TxmqError: the broker is away, and there is no spool here.
    """
    spooled = _spooled(settings) if settings.publish.mode == "ordered" else None
    try:
        found = newest_position(client, settings)
    except TxmqError as error:
        if spooled is None or not error.retriable:
            raise
        return spooled
    if spooled is not None and (found is None or _is_of(found.spool, spooled.spool)):
        return spooled
    if found is None:
        raise BinlogError(f"no reader named {settings.name!r} has published anything: start one with txmq binlog run")
    return found


def _spooled(settings: BinlogSettings) -> Published | None:
    """What the spool on this machine says; None if there is none."""
    try:
        with WriteAheadSpool(settings.spool, read_only=True) as spool:
            noted = next(spool.notes(PUBLISHED), None)
            place, rows = (
                spool.place,
                spool.summary(),
            )  # behind the position: if nothing is left, all that it covers was sent
    except StorageError:
        return None
    published = read_published(noted, f"the position in {settings.spool}") if noted is not None else None
    messages, size_bytes = sum(row[2] + row[3] for row in rows), sum(row[4] for row in rows)
    held = SpoolHeld(host_name(), place, messages, size_bytes, settings.publish.spool_bytes_max)
    return None if published is None else replace(published, spool=held)


def _is_of(written: SpoolHeld | None, here: SpoolHeld | None) -> bool:
    return written is not None and here is not None and (written.host, written.path) == (here.host, here.path)


def binlog_status(
    client: Client, settings: BinlogSettings, newest: Published, end: ServerEnd | None, now_ms: int
) -> BinlogStatus:
    """Put together what the newest position and the server say.

    Args:
        end: of the server; None if it does not answer.
    """
    position, lag_s, lag_bytes = newest.position, None, None
    if end is not None and end.position.flavor == position.flavor:
        is_level = position.gtid_set.covers(end.position.gtid_set)
        lag_bytes = 0 if is_level else end.bytes_behind
        lag_s = 0.0 if is_level else max(now_ms - newest.source_ms, 0) / 1000 if newest.source_ms else None
    try:
        reader, rate = _reader(client, settings), _rate(client, settings, newest, now_ms)
    except TxmqError as error:
        if newest.spool is None or not error.retriable:
            raise
        reader = rate = None
    return BinlogStatus(
        settings.name, reader, position.gtids, position.file, position.offset, newest.rows,
        newest.transactions, rate, lag_s, lag_bytes,
        0 if newest.open is None else newest.open.rows, {xid: rows.rows for xid, rows in newest.parked.items()},
        None if newest.snapshot is None else _snapshot(newest.snapshot), newest.published_ms,
        None if newest.spool is None else asdict(newest.spool),
    )  # fmt: skip


def server_end(settings: BinlogSettings, published: Position) -> ServerEnd:
    """Ask the server where its binlog ends.

    Raises:
        SourceError, SourceAwayError: it cannot be asked.
    """
    source = BinlogSource(source_options(settings))
    return ServerEnd(source.end(), source.bytes_behind(published))


def _snapshot(state: SnapshotState) -> dict[str, Any]:
    table = None if state.current is None else str(state.current.table)
    return {"rows": state.rows, "table": table, "tables_left": len(state.left), "tables": state.tables}


def _rate(client: Client, settings: BinlogSettings, newest: Published, now_ms: int) -> float:
    topic = settings.position_topic
    first = client.offset_for(topic, 0, now_ms - RATE_MS)
    held = client.offsets(topic, 0)
    before = position_at(client, settings, min(max(first - 1, held.start), held.end - 1))
    return round((newest.rows - (0 if before is None else before.rows)) * 1000 / RATE_MS, 1)


def _reader(client: Client, settings: BinlogSettings) -> str | None:
    try:
        rows = client.groups.describe(settings.group)["partitions"]
    except UnknownGroupError:
        return None
    owners = [row["owner"] for row in rows if row["topic"] == settings.position_topic]
    return str(owners[0]) if owners and owners[0] is not None else None
