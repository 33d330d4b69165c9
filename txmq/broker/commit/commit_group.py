"""A group commit in the making: everything the broker accepted since the last one was sealed.

One group becomes one journal record. Its items stand in the order in which they were accepted; batches for one
partition are gathered in a *run* (one header for all of them) until something else is placed in that partition, so that
redo, which goes through the items in order, writes every partition front to back.
"""

from __future__ import annotations

from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.state.decisions import BranchPart
from txmq.broker.state.visibility import VisibilityBarrier
from txmq.log.partition import Partition
from txmq.model import Lsn
from txmq.protocol.answers import Reply
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.redo.record_format import FileHeader
from txmq.runtime.ports import Buffer

Answer = tuple[ClientConnection, bytes, Reply]  # of which connection, to which opaque
JOINED_SIZE_BYTES_MAX: Final = 256 << 10  # of bytes that are copied so as to be written at once
NOT_WRITTEN: Final = Lsn(1 << 63)


class Run:
    """Consecutive batches in one segment of one partition.

    Attributes:
        idempotent: whether some batch carries a producer id (recovery then looks at the batches' headers).
    """

    __slots__ = (
        "base_offset",
        "buffers",
        "idempotent",
        "max_timestamp_ms",
        "next_offset",
        "partition",
        "position",
        "segment_base",
    )

    def __init__(self, partition: Partition, segment_base: int, position: int, base_offset: int) -> None:
        self.partition, self.segment_base, self.position = partition, segment_base, position
        self.base_offset = self.next_offset = base_offset
        self.max_timestamp_ms = -1
        self.idempotent = False
        self.buffers: list[Buffer] = []

    def add(self, batch: bytearray, count: int, max_timestamp_ms: int) -> None:
        """One more batch at the end."""
        self.buffers.append(batch)
        self.next_offset += count
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = max_timestamp_ms


class CommitGroup:
    """The entries of one journal record in the making, and the answers that wait for it.

    Attributes:
        items: entries (bytes) and runs, in order of acceptance.
        placed: everything to be written to partition files once the record is durable, in order per partition.
        puts: answers of plain puts: released when written or durable, as ``sync`` says.
        waiters: answers released when the record is durable.
        needs_sync: True if some answer needs the sync whatever ``sync`` says.
        is_awaited: True if a reader came after its seal that waits for it, or for an older one.
        patient: how many of its requests, with one item and one waiter each, may wait for others
            (``journal_schedule``).
        waiting_reads: reads that wait until it is in the partition files (``Context.unapplied``).
        ended_barriers: messages that readers may see once the record is synced (``visibility``).
        branch_parts: parts of other homes' transactions that it places: those homes are told once it is durable.
        deleted: partitions whose files go once the record is durable.
        unlinked: segment files that retention drops once the record is durable.
        clock_ms: when the segments began that it begins; 0 if it begins none.
        is_checkpointed: the leader took a checkpoint at its end (``ReceivedGroup``).
        end_lsn: where its record ends in the journal; ``NOT_WRITTEN`` before it is written.
    """

    __slots__ = (
        "branch_parts",
        "clock_ms",
        "delayable",
        "deleted",
        "end_lsn",
        "ended_barriers",
        "is_awaited",
        "is_checkpointed",
        "items",
        "journaled_runs",
        "message_count",
        "needs_sync",
        "open_runs",
        "placed",
        "puts",
        "size_bytes",
        "unlinked",
        "waiters",
        "waiting_reads",
        "written_waiters",
    )

    def __init__(self) -> None:
        self.items: list[bytes | Run] = []
        self.placed: list[Run] = []
        self.open_runs: dict[Partition, Run] = {}
        self.journaled_runs: dict[Partition, Run] = {}
        self.puts: list[Answer] = []
        self.written_waiters: list[Answer] = []
        self.waiters: list[Answer] = []
        self.waiting_reads: list[tuple[ClientConnection, Request]] = []
        self.ended_barriers: list[VisibilityBarrier] = []
        self.branch_parts: list[BranchPart] = []
        self.deleted: list[Partition] = []
        self.unlinked: list[tuple[Partition, list[str]]] = []
        self.size_bytes = self.message_count = self.delayable = self.clock_ms = 0
        self.needs_sync = self.is_awaited = self.is_checkpointed = False
        self.end_lsn = NOT_WRITTEN

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write and no answer waiting."""
        return not (self.items or self.waiters or self.written_waiters or self.puts)

    @property
    def may_be_delayed(self) -> bool:
        """Whether everything in it may wait for company."""
        return 0 < self.delayable == len(self.items) == len(self.waiters) and not (self.written_waiters or self.puts)

    def has_polls(self) -> bool:
        """Whether a reader waits for messages of a partition that it places some in."""
        return any(run.partition.waiters for run in self.placed)

    def add_entry(self, entry: bytes) -> None:
        """Add a control entry; it follows everything accepted before it."""
        self.items.append(entry)
        self.size_bytes += len(entry)

    def insert_entry(self, at: int, entry: bytes) -> None:
        """Add a control entry before the items from number ``at`` on."""
        self.items.insert(at, entry)
        self.size_bytes += len(entry)

    def place(
        self, partition: Partition, count: int, size: int, max_timestamp_ms: int, now_ms: int
    ) -> tuple[int, int, int]:
        """Give messages the next place in their partition (``Partition.place``).

        Segments that begin in one group begin at one time, which its record states: who redoes it knows their age.
        """
        clock_ms = self.clock_ms or now_ms
        segment_base, position, base_offset = partition.place(count, size, max_timestamp_ms, clock_ms)
        if not (position or self.clock_ms):
            self.clock_ms = clock_ms
            self.size_bytes += entries.CLOCK_SIZE_BYTES
        return segment_base, position, base_offset

    def run_at(self, partition: Partition, segment_base: int, position: int, base_offset: int) -> Run:
        """The partition's open run, or a new one if there is none or the segment rolled."""
        open_run = self.open_runs.get(partition)
        if open_run is not None and open_run.segment_base == segment_base:
            return open_run
        run = Run(partition, segment_base, position, base_offset)
        self.journaled_runs.pop(partition, None)
        self.open_runs[partition] = run
        self.items.append(run)
        self.placed.append(run)
        self.size_bytes += entries.RUN_OVERHEAD_BYTES
        return run

    def journaled_run_at(
        self, partition: Partition, segment_base: int, position: int, base_offset: int, size: int
    ) -> Run:
        """The run for bytes that an earlier record holds: the partition's last one if it is such a one and not long.

        The next batch that comes with this record starts a new run.
        """
        self.open_runs.pop(partition, None)
        run = self.journaled_runs.get(partition)
        if run is None or run.segment_base != segment_base or position + size - run.position > JOINED_SIZE_BYTES_MAX:
            run = self.journaled_runs[partition] = Run(partition, segment_base, position, base_offset)
            self.placed.append(run)
        return run

    def payload(self) -> bytes:
        """The record's payload. Runs' buffers are joined here and kept joined for the partition files."""
        pieces: list[Buffer] = [entries.encode_clock(self.clock_ms)] if self.clock_ms else []
        for item in self.items:
            if isinstance(item, bytes):
                pieces.append(item)
                continue
            joined = item.buffers[0] if len(item.buffers) == 1 else b"".join(item.buffers)
            item.buffers = [joined]
            pieces.append(_run_header(item, len(joined)))
            pieces.append(joined)
        return b"".join(pieces)


class ReceivedGroup(CommitGroup):
    """Records that the leader of the home has sent to a replica: they go into its journal as they are.

    Args:
        begins: the header of the journal file that begins with them; None if they belong into the one that is written.
        records: whole, one after the other; may be empty if a file begins.
        chain, epoch: of the journal after them.
        payloads: of those that are groups.
    """

    __slots__ = ("begins", "chain", "epoch", "payloads", "records")

    def __init__(
        self, begins: FileHeader | None, records: bytes, chain: int, epoch: int, payloads: list[bytes]
    ) -> None:
        super().__init__()
        self.begins, self.records, self.chain, self.epoch = begins, records, chain, epoch
        self.payloads = payloads
        self.size_bytes, self.needs_sync = len(records), True


def _run_header(run: Run, size: int) -> bytes:
    partition = run.partition
    return entries.run_header(
        partition.topic_id, partition.number, run.segment_base, run.position, run.base_offset, run.next_offset,
        run.max_timestamp_ms, size, idempotent=run.idempotent,
    )  # fmt: skip
