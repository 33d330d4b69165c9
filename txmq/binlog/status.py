"""How far reader and applier are: position, lag, rate. From the topic of the positions, and from both databases.

The reader itself is not asked: its position messages say what is published, how much that is, and when it was. In
ordered mode its spool says so, if it is on this machine, even while the broker is away. Nor is the applier asked: its
offsets are in the target.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from txmq.binlog.apply.accepted_events import applied_topics
from txmq.binlog.apply.target import connector
from txmq.binlog.config import ApplySettings, BinlogSettings
from txmq.binlog.errors import BinlogError
from txmq.binlog.position import Position
from txmq.binlog.publish.ownership import PUBLISHED
from txmq.binlog.publish.position_log import newest_position
from txmq.binlog.publish.published import Published, SpoolHeld, read_published
from txmq.binlog.publish.syncs import SyncStatus, owner_of, sync_status
from txmq.binlog.source import BinlogSource
from txmq.binlog.source.options import source_options
from txmq.client import Client, DatabaseOffsetStore
from txmq.client.spooling.write_ahead import WriteAheadSpool
from txmq.errors import StorageError, TxmqError
from txmq.model import TopicPartition
from txmq.runtime.caller import host_name

ANSWERS = "answers"
_NOT_THERE = ((1146,), (1049,))  # ER_NO_SUCH_TABLE; MySQL's ER_BAD_DB_ERROR for a table in no database


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """Where the server's binlog ends.

    Args:
        position: after its last transaction.
        bytes_behind: from the reader's file and offset on; None if that file is gone.
    """

    position: Position
    bytes_behind: int | None


@dataclass(frozen=True, slots=True)
class BinlogStatus:
    """How far the reader is.

    Args:
        sync: what is published, and by which reader.
        lag_s: how old the newest published transaction is; 0 if the server has no newer one; None if the server does
            not answer, or nothing was published yet.
        lag_bytes: of the binlog that are not published; None likewise.
    """

    sync: SyncStatus
    lag_s: float | None
    lag_bytes: int | None

    def as_fields(self) -> dict[str, Any]:
        """By name, as JSON has it."""
        return asdict(self.sync) | {"lag_s": self.lag_s, "lag_bytes": self.lag_bytes}


@dataclass(frozen=True, slots=True)
class PartitionApplied:
    """How far a partition is applied.

    Args:
        offset: of the first message that is not; None if none is.
        start, end: of what the topic holds.
        lag: messages that are not applied.
    """

    topic: str
    partition: int
    offset: int | None
    start: int
    end: int
    lag: int


@dataclass(frozen=True, slots=True)
class ApplierStatus:
    """How far the applier is.

    Args:
        group: its consumer group.
        applier: the member that applies; None if none does.
        lag: messages that are not applied; None if the target or the broker does not answer.
        lag_s: how long ago the oldest of them was published; 0 if there is none; None likewise.
        target: "answers", or why the offsets are not known.
        partitions: in the order of their names; none if the offsets are not known.
    """

    group: str
    applier: str | None
    lag: int | None
    lag_s: float | None
    target: str
    partitions: tuple[PartitionApplied, ...] = ()

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
            # Read after the position: if nothing is left, all that it covers was sent.
            place, rows = spool.place, spool.summary()
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
    return BinlogStatus(sync_status(client, settings, newest, now_ms), lag_s, lag_bytes)


def server_end(settings: BinlogSettings, published: Position) -> ServerEnd:
    """Ask the server where its binlog ends.

    Raises:
        SourceError, SourceAwayError: it cannot be asked.
    """
    source = BinlogSource(source_options(settings))
    return ServerEnd(source.end(), source.bytes_behind(published))


# --- the applier -----------------------------------------------------------------------------------------------------


def applier_status(client: Client, settings: BinlogSettings, now_ms: int) -> ApplierStatus | None:
    """Put together what the target and the broker say; None if the file says nothing of a target."""
    if settings.apply == ApplySettings():
        return None
    group, applier = settings.apply_group, None
    try:
        topics = applied_topics(client, settings)
        applier = next(filter(None, (owner_of(client, group, topic) for topic in topics)), None)
        partitions = tuple(_applied(client, settings, topics))
        lag_s = max((now_ms - _published_ms(client, one) for one in partitions if one.lag), default=0) / 1000
    except TxmqError as error:
        return ApplierStatus(group, applier, None, None, str(error))
    return ApplierStatus(group, applier, sum(one.lag for one in partitions), max(lag_s, 0.0), ANSWERS, partitions)


def _applied(client: Client, settings: BinlogSettings, topics: list[str]) -> list[PartitionApplied]:
    slots = [(topic, number) for topic in topics for number in range(client.topics.known(topic).config.partitions)]
    found = []
    for slot, offset in zip(slots, _saved(settings, slots), strict=True):
        held = client.offsets(*slot)
        found.append(PartitionApplied(*slot, offset, held.start, held.end, held.end - (offset or held.start)))
    return found


def _saved(settings: BinlogSettings, slots: list[TopicPartition]) -> list[int | None]:
    """The offsets that the target has."""
    store, group = DatabaseOffsetStore(connector(settings.apply), table=settings.offset_table), settings.apply_group
    try:
        store.enter(group)
        saved = [store.saved(group, slot) for slot in slots]
    except StorageError as error:
        if getattr(error.__cause__, "args", ())[:1] in _NOT_THERE:
            return [None] * len(slots)  # no applier has begun there
        raise
    finally:
        store.leave(group)
    return [None if one is None else one.offset for one in saved]


def _published_ms(client: Client, partition: PartitionApplied) -> int:
    """When the first message was published that is not applied."""
    first = max(partition.offset or 0, partition.start)
    return client.fetch(partition.topic, partition.partition, first, max_bytes=1)[0].timestamp_ms
