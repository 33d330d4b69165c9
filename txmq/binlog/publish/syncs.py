"""What a broker knows of syncs: from their topics of positions, and from the groups that hold these.

No database is asked, so how far the binlog is ahead is not known here (``binlog.status`` says that). A reader is not
asked either: each position that it writes says what is published then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from txmq.binlog.config import NAME_LENGTH_MAX, POSITIONS, BinlogSettings
from txmq.binlog.publish.position_log import newest_position, position_at
from txmq.binlog.publish.published import Published, SpoolHeld
from txmq.client import Client
from txmq.errors import TxmqError, UnknownGroupError

RATE_MS = 60_000  # rates are of the last minute


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """What is published, and by which reader.

    Args:
        name: of the reader.
        reader: the member that publishes; None if none does, or if the broker is away.
        gtids, file, offset: what is published.
        rows, transactions: published since the first start.
        rows_per_s: in the last minute; None if the broker is away.
        delay_s: how old the newest published transaction was when it was published; None if nothing was published yet.
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
    delay_s: float | None
    open_rows: int
    parked: dict[str, int]
    snapshot: dict[str, Any] | None
    published_ms: int
    spool: SpoolHeld | None


def syncs(client: Client, now_ms: int) -> dict[str, SyncStatus | TxmqError]:
    """Each sync by its name, or the error that its positions cannot be read for.

    Raises:
        TxmqError: the broker is away.
    """
    topics = {topic.name for topic in client.topics.list()}
    found: dict[str, SyncStatus | TxmqError] = {}
    for topic in sorted(topics):
        name = topic.removesuffix(POSITIONS)
        if name in ("", topic) or len(name) > NAME_LENGTH_MAX:
            continue
        settings = BinlogSettings(name=name)
        if settings.parked_topic not in topics:
            continue
        try:
            newest = newest_position(client, settings)
            if newest is not None:
                found[name] = sync_status(client, settings, newest, now_ms)
        except TxmqError as error:
            found[name] = error
    return found


def sync_status(client: Client, settings: BinlogSettings, newest: Published, now_ms: int) -> SyncStatus:
    """Put together what the newest position says, and what the broker adds.

    Raises:
        TxmqError: the broker is away, and the position is not a spool's.
    """
    try:
        reader, rate = (
            owner_of(client, settings.group, settings.position_topic),
            _rate(client, settings, newest, now_ms),
        )
    except TxmqError as error:
        if newest.spool is None or not error.retriable:
            raise
        reader = rate = None
    position, source_ms = newest.position, newest.source_ms
    return SyncStatus(
        settings.name, reader, position.gtids, position.file, position.offset, newest.rows, newest.transactions, rate,
        max(newest.published_ms - source_ms, 0) / 1000 if source_ms else None,
        0 if newest.open is None else newest.open.rows, {xid: rows.rows for xid, rows in newest.parked.items()},
        _snapshot(newest), newest.published_ms, newest.spool,
    )  # fmt: skip


def owner_of(client: Client, group: str, topic: str) -> str | None:
    """The member of a group that has the topic's partition 0; None if none has.

    Raises:
        TxmqError: the broker is away.
    """
    try:
        rows = client.groups.describe(group)["partitions"]
    except UnknownGroupError:
        return None
    return next((row["owner"] for row in rows if (row["topic"], row["partition"]) == (topic, 0)), None)


def _snapshot(newest: Published) -> dict[str, Any] | None:
    if (state := newest.snapshot) is None:
        return None
    table = None if state.current is None else str(state.current.table)
    return {"rows": state.rows, "table": table, "tables_left": len(state.left), "tables": state.tables}


def _rate(client: Client, settings: BinlogSettings, newest: Published, now_ms: int) -> float:
    topic = settings.position_topic
    first = client.offset_for(topic, 0, now_ms - RATE_MS)
    held = client.offsets(topic, 0)
    before = position_at(client, settings, min(max(first - 1, held.start), held.end - 1))
    return round((newest.rows - (0 if before is None else before.rows)) * 1000 / RATE_MS, 1)
