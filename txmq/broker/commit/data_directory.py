"""One data directory: journal, partition files, checkpoints, and how a broker comes back from them.

```
group -> payload -> journal.append -> journal.sync -> answers -> partition files (not synced) -> watermarks
                         |                                             |
                     redo after a crash <----- checkpoint: files synced, state written, journal released
```

The order journal, sync, reply is the commit pipeline's (``commit/pipeline.py``); this module is each step of it.

Checkpoint at lsn L: the state as of the group that ended at L; taken when that group was sealed, written when it was
applied and every file it touched was synced. Payloads of unsettled transactions move to one file, ``prepared/<lsn>``,
and are referenced from then on (``commit/prepared_payloads.py``). The journal is released up to the older of the two
kept checkpoints, and a payload file goes when neither refers to it, so that recovery may fall back to the older one.

Invariants:
    * partition bytes are written only after their record is forced (``apply``), or again from it (``recover``);
    * redo rewrites and never skips because a file already matches;
    * so the partition files never hold more than journal and checkpoint know: where they do, an older journal was put
      back, or its end is damaged; the broker refuses to start, and nothing is removed;
    * a failed write or sync is never retried, but where space or descriptors lack while applying: the record is safe in
      the journal.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from txmq.broker.commit.commit_group import CommitGroup, ReceivedGroup
from txmq.broker.commit.prepared_payloads import PayloadFiles
from txmq.broker.commit.redo import Placed, Redo, RedoEffects, RedoSegments, restore
from txmq.broker.commit.retention import Removals
from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.broker.state.frozen_state import FrozenState
from txmq.broker.state.state import Limits, State
from txmq.broker.state.transaction import Transaction
from txmq.config import BrokerSettings
from txmq.errors import ConfigError, InvariantError, JournalFullError, StorageError, caused
from txmq.log.file_cache import FileCache
from txmq.log.partition import Partition, segment_base
from txmq.model import Lsn, RetentionPolicy
from txmq.redo import checkpoint, directory_identity, entries, recovery, replica_identity
from txmq.redo.journal import Journal
from txmq.redo.journal_files import Settings as JournalSettings
from txmq.redo.journal_files import list_bases, size_bytes
from txmq.redo.record_format import FileHeader
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Clock, Disk, Lock, Random

_NOT_PINNED = Lsn(0)
_SHOWN_MAX = 10
HELD_UP_BYTES_MAX: Final = 16 << 20
# Resources that the system lacks now and may have later. Without a descriptor nothing was written at all.
_LACKING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})


def is_lacking(error: BaseException) -> bool:
    """Whether the system lacks space or descriptors, which it may have again later."""
    return isinstance(error, OSError) and error.errno in _LACKING


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint on its way; ``lsn`` and ``chain`` are known once its group is written. It is written once.

    ``unfiled``: transactions with parts that are in no file yet; ``parts``: how many they have. More may arrive before
    they are written, and those belong to the journal after this checkpoint. Two lists: a pair for each transaction
    would be a new object, as in ``frozen_state``.
    ``filed``: session, counter and file of each transaction all of whose parts are in a file. Where payloads are is no
    part of the state: it is this directory's affair.
    """

    state: FrozenState
    epoch: int
    unfiled: list[Transaction]
    parts: list[int]
    filed: list[int]
    lsn: Lsn = _NOT_PINNED
    chain: int = 0


@dataclass(slots=True)
class Recovered:
    """A data directory that is open, and its journal folded.

    Attributes:
        incarnation: of the directory.
        records, journal_bytes: that were folded.
    """

    identity: BrokerIdentity
    state: State
    store: Store
    records: int
    journal_bytes: int
    notes: list[str]
    incarnation: int = 0

    def make_known(self) -> list[int]:
        """Before the registry may hear of this start: the next one shows it, whatever becomes of this.

        Returns:
            the starts by which the registry may know this directory, the newest last.

        Durability: forced when this returns. Raises OSError.
        """
        led = self.state.registration.starts
        return [*led, *replica_identity.add_start(self.store.disk, self.identity.start, frozenset(led))]

    def lead(self, epoch: int, now_ms: int, *, is_member: bool) -> None:
        """Begin a home epoch, before anything is answered under it: so neither it nor the life is ever used again.

        Args:
            epoch: the journal's, or a higher one that a registry gave out (``is_member``).

        Durability: forced when this returns; the record is the epoch's first.

        Raises:
            OSError, JournalFullError: as ``open_store``.
            InvariantError: something was appended since recovery.
        """
        journal, settings, who = self.store.journal, self.store.settings, self.identity
        if journal.has_grown:
            raise InvariantError("a record is in the journal that belongs to no epoch")
        limits = Limits(settings.in_flight_max, settings.outcomes_kept)
        journal.raise_epoch(epoch)
        fields = {
            "epoch": epoch, "replica": who.replica, "start": f"{who.start:032x}", "time_ms": now_ms,
            "limits": limits._asdict(), "format": entries.FORMAT, "is_member": is_member,
        }  # fmt: skip
        _append(journal, entries.json_entry(entries.LED, fields))
        journal.sync()
        self.state.led(epoch, who.start, now_ms, limits, is_member=is_member)
        if is_member:
            try:
                replica_identity.drop_start(self.store.disk, who.start)
            except OSError as error:  # for want of space it stays, and the journal alone may be put back unnoticed
                if not is_lacking(error):
                    raise


class Store:
    """The files of one broker.

    Attributes:
        unapplied_bytes: of groups that are held up.
        lacking: why groups are held up; None if none is.
        journal_lacking: why the journal waits; None if it does not.
        kept_from: replicas need the journal from here on; None if there are none.

    Thread safety: calls of four kinds may run at the same time: one that changes the journal (``write``, ``force``,
    ``end_checkpoint``), one that applies, one of a checkpoint's two (``sync_files``, ``write_checkpoint``) or of
    ``removals``, and ``journal.prepare_next``.
    """

    def __init__(
        self, disk: Disk, journal: Journal, files: FileCache, lock: Lock, settings: BrokerSettings,
        checkpoint_lsn: Lsn, payloads: PayloadFiles,
    ) -> None:  # fmt: skip
        self.disk, self.journal, self.files, self.settings = disk, journal, files, settings
        self._lock = lock
        self._payloads = payloads
        self.removals = Removals(disk, files)
        self._unapplied: deque[CommitGroup] = deque()
        self._making_room = 0  # so many of them, from the front, have let go early of what they let go of
        self.unapplied_bytes = 0
        self.lacking: OSError | None = None
        self.journal_lacking: OSError | None = None
        self.checkpoint_lsn = checkpoint_lsn
        self.kept_from: Lsn | None = None

    # --- the path of a group -----------------------------------------------------------------------------------------

    def write(self, group: CommitGroup) -> None:
        """Append the group's record. Durability: none before ``force``."""
        if group.items:
            _append(self.journal, group.payload())
        elif isinstance(group, ReceivedGroup):
            _append_received(self.journal, group)

    def force(self) -> None:
        """Force everything written. Durability: all records so far are on disk when this returns."""
        if self.journal.durable_lsn != self.journal.next_lsn:
            self.journal.sync()

    def apply(self, group: CommitGroup) -> list[CommitGroup]:
        """Write a forced group's batches to the partition files, after any that could not be written yet.

        Returns:
            the groups that are applied now, in order; empty while space or descriptors are lacking.

        Raises:
            OSError: the disk failed otherwise; the broker must stop.
        """
        if not self._unapplied:
            try:
                self._apply_one(group)
            except OSError as error:
                if not is_lacking(error):
                    raise
                self.lacking = error.with_traceback(None)
            else:
                return [group]
        self._unapplied.append(group)
        self.unapplied_bytes += group.size_bytes
        return self.apply_pending()

    def apply_pending(self) -> list[CommitGroup]:
        """Try again what a full disk held up."""
        done: list[CommitGroup] = []
        while self._unapplied:
            group = self._unapplied[0]
            try:
                self._apply_one(group)
            except OSError as error:
                if not is_lacking(error):
                    raise
                self.lacking = error.with_traceback(None)
                self._make_room()
                return done
            self._unapplied.popleft()
            self._making_room = max(0, self._making_room - 1)
            self.unapplied_bytes -= group.size_bytes
            done.append(group)
        self.lacking = None
        return done

    def _make_room(self) -> None:
        """Remove the files that later groups let go of: else the removal that frees the disk would wait for free space.

        The records of those groups are durable. Each removal is repeated in its turn, because groups before it may
        write such a file again. One early removal is enough: else each attempt would leave something to remove, and
        each removal would be a reason to try again at once. Segments are archived only in their turn, when they are
        whole.
        """
        if not self.removals.is_empty:
            return
        first, self._making_room = self._making_room, len(self._unapplied)
        for group in islice(self._unapplied, first, None):
            for partition, paths in group.unlinked:
                if partition.config.retention_policy is RetentionPolicy.DELETE:
                    self.removals.queue_segments(partition, paths)
            if group.deleted:
                self.removals.queue_partitions(group.deleted)

    @property
    def has_unapplied(self) -> bool:
        """Whether want of space or descriptors holds something up."""
        return bool(self._unapplied)

    def is_full(self, free_bytes: int, free_bytes_min: int = 0) -> bool:
        """Whether new messages must be refused: space is short, the journal waits, or much is held up in memory."""
        is_short = free_bytes < self.unapplied_bytes + free_bytes_min
        return is_short or self.unapplied_bytes >= HELD_UP_BYTES_MAX or self.journal_lacking is not None

    def _apply_one(self, group: CommitGroup) -> None:
        crash_point("broker.apply.before")
        for run in group.placed:
            data = run.buffers[0] if len(run.buffers) == 1 else b"".join(run.buffers)
            self.files.write(run.partition.segment_path(run.segment_base), run.position, data)
        for partition, paths in group.unlinked:
            self.removals.queue_segments(partition, paths)
        if group.deleted:
            self.removals.queue_partitions(group.deleted)
        crash_point("broker.apply.done")

    # --- checkpoint --------------------------------------------------------------------------------------------------

    @property
    def checkpoint_due_lsn(self) -> Lsn:
        """Where enough journal has gathered since the last one."""
        return Lsn(self.checkpoint_lsn + self.settings.checkpoint_interval_bytes)

    def begin_checkpoint(self, state: State) -> PendingCheckpoint:
        """Copy the state as of the newest group; what is assigned later is in no copy."""
        self._payloads.leave_sparse(state.transactions.values())
        unfiled, filed = list[Transaction](), list[int]()
        for transaction in state.transactions.values():
            if transaction.file_parts < len(transaction.parts):
                unfiled.append(transaction)
            elif transaction.file:
                filed += (transaction.session, transaction.counter, transaction.file)
        return PendingCheckpoint(state.freeze(), state.epoch, unfiled, [len(t.parts) for t in unfiled], filed)

    def sync_files(self) -> None:
        """Sync the partition files, when everything up to ``pending.lsn`` is forced and applied."""
        crash_point("checkpoint.before")
        self.files.sync_dirty()
        crash_point("checkpoint.files_synced")

    def write_checkpoint(self, pending: PendingCheckpoint, give_way: Callable[[], None]) -> None:
        """Write the checkpoint, after ``sync_files``. Durability: when this returns, recovery starts at its lsn.

        Args:
            give_way: called between pieces of work of about a millisecond.

        Raises:
            OSError: nothing is left of it, and the older checkpoint holds; for want of space it may be tried again.
        """
        self._payloads.write(pending.unfiled, pending.parts, pending.lsn)
        crash_point("checkpoint.payloads_written")
        content = checkpoint.Checkpoint(
            pending.lsn, pending.chain, pending.epoch, pending.state.encode(give_way),
            checkpoint.encode_payload_files(pending.filed, give_way),
        )  # fmt: skip
        checkpoint.write(self.disk, content, node_id=self.journal.node_id)
        self.checkpoint_lsn = pending.lsn
        crash_point("checkpoint.written")

    def end_checkpoint(self, pending: PendingCheckpoint) -> None:
        """Release what the two kept checkpoints do not need."""
        lsn = checkpoint.oldest_kept_lsn(self.disk)
        if self.kept_from is not None:
            lsn = min(lsn, max(self.kept_from, Lsn(self.journal.next_lsn - self.settings.replica_journal_bytes_max)))
        self.journal.release(lsn)
        self._payloads.release({*pending.filed[2::3], pending.lsn})
        crash_point("checkpoint.released")

    def close(self) -> None:
        """Let go of everything; syncs nothing."""
        self.files.close()
        self.journal.close()
        self._lock.release()


class Joins(NamedTuple):
    """The cluster that a directory joins, and the home of it that it copies.

    Attributes:
        copied_home: None: it is a home of its own.
        first_file: the header of the first file of that home's journal; None for a directory that has a journal.
    """

    cluster: int
    copied_home: int | None = None
    first_file: FileHeader | None = None


def open_store(
    disk: Disk, clock: Clock, random: Random, settings: BrokerSettings, *, is_member: bool = False,
    joins: Joins | None = None, files_lock: AbstractContextManager[Any] | None = None,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> Recovered:  # fmt: skip
    """Open (or create) a data directory and recover it.

    Newest good checkpoint, then redo of the journal after it; idempotent at every step, also when it dies itself. When
    this returns, all that was acknowledged is in the state and in the partition files (not synced: the journal is). A
    broker that is alone leads its home then; one with a registry appends nothing before that lets it lead.

    Args:
        is_member: the broker has a registry.
        joins: what an empty directory joins; None: it is alone. A copy leads nothing.

    Raises:
        DirectoryInUseError: another process holds it; or it is another home's.
        ConfigError: the directory belongs to a cluster, and the broker has no registry; or it is a copy, and must not
            be, or the reverse.
        CorruptRecordError: damage that a torn tail does not explain; nothing was changed.
        OSError, JournalFullError: for want of space or descriptors (``is_lacking``) the same call may be repeated.
    """
    lock = disk.lock(directory_identity.LOCK_PATH)
    try:
        is_copy = joins is not None and joins.copied_home is not None
        if joins is not None and joins.copied_home is not None:
            replica = replica_identity.load_or_create_copy(disk, random)
            node = directory_identity.load_or_copy(
                disk, directory_identity.Node(joins.cluster, joins.copied_home, clock.now_ms())
            )
            if joins.first_file is not None and not list_bases(disk):
                recovery.create(disk, joins.first_file, JournalSettings(joins.first_file.file_size_bytes)).close()
        else:
            _refuse_copy(disk)
            cluster = None if joins is None else joins.cluster
            node = directory_identity.load_or_create(disk, random, clock, cluster)
            replica = replica_identity.load_or_create(disk, random)
        start = random.bits(replica_identity.START_BITS)
        return _Opening(disk, node, replica, clock, settings, files_lock or nullcontext(), on_progress).run(
            lock, start, is_member=is_member or is_copy
        )
    except BaseException:
        lock.release()
        raise


def _refuse_copy(disk: Disk) -> None:
    replica = replica_identity.load(disk)
    if replica is not None and replica.catching_up is not None:
        raise ConfigError("the data directory is a copy of a home, which may lack messages: start it with --replica-of")


class _Opening:
    def __init__(
        self, disk: Disk, node: directory_identity.Node, replica: replica_identity.Replica, clock: Clock,
        settings: BrokerSettings, files_lock: AbstractContextManager[Any], on_progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._disk, self._clock, self._settings, self._on_progress = disk, clock, settings, on_progress
        self._node, self._replica, self._is_copy = node, replica, replica.catching_up is not None
        self._files = FileCache(disk, settings.open_files_max, lock=files_lock)
        self._state = State(home=self._node.node_id)
        self._touched: dict[Partition, None] = {}
        self._redoing = Redo(self._state, _Rewriting(self._state, self._rewrite, self._touched))
        self._redo_segments = RedoSegments(self._files)
        self._rewritten: dict[str, bool] = {}  # segment files, and whether their beginning is there
        self._notes: list[str] = []
        self._records = self._bytes = 0
        self._checkpoint_lsn = Lsn(0)
        self._payloads = PayloadFiles(disk)

    def run(self, lock: Lock, start: int, *, is_member: bool) -> Recovered:
        with ExitStack() as undone:
            undone.callback(self._files.close)
            journal = self._recover_journal()
            undone.callback(journal.close)
            self._redo_segments.finish()
            recovered = self._recovered(journal, lock, start, is_member)
            if not is_member:
                recovered.lead(journal.epoch, self._clock.now_ms(), is_member=False)
            undone.pop_all()
            return recovered

    def _recovered(self, journal: Journal, lock: Lock, start: int, is_member: bool) -> Recovered:
        if self._state.registration.epoch and not is_member:
            raise ConfigError(
                f"the data directory belongs to cluster {self._node.cluster_id:016x}: start the broker with --registry"
            )
        store = Store(self._disk, journal, self._files, lock, self._settings, self._checkpoint_lsn, self._payloads)
        self._clean_up(store)
        self._state.publish_recovered()
        name = self._settings.broker_name or f"{self._node.node_id:016x}"
        who = BrokerIdentity(self._node.cluster_id, self._node.node_id, name, self._replica.number, start)
        return Recovered(
            who, self._state, store, self._records, self._bytes, self._notes, self._replica.incarnation
        )  # fmt: skip

    def _recover_journal(self) -> Journal:
        newest, note = checkpoint.load_newest(self._disk, node_id=self._node.node_id)
        if note:
            self._notes.append(note)
        if newest is None and note:
            raise StorageError(f"no checkpoint can be read ({note}); the journal alone may not reach back far enough")
        if newest is None:
            self._refuse_orphans()
            lsn, chain, epoch = Lsn(0), 0, 0
        else:
            self._checkpoint_lsn, lsn, chain, epoch = newest.lsn, newest.lsn, newest.chain, newest.epoch
            restore(self._state, newest, self._payloads)
        return recovery.open_journal(
            self._disk, node_id=self._node.node_id, from_lsn=lsn, from_chain=chain, epoch=epoch + 1,
            file_size_bytes=self._settings.journal_file_size_bytes, on_record=self._redo,
            has_own_marks=not self._is_copy,
        )  # fmt: skip

    def _refuse_orphans(self) -> None:
        """A broker that begins at nothing would remove the messages of topics it does not know."""
        if not list_bases(self._disk) and (names := self._disk.list_directory("log")):
            raise StorageError(
                f"log/{names[0]} holds messages, but neither checkpoint/ nor journal/ says whose: restore both, or "
                "move log/ away to begin anew"
            )

    def _redo(self, _lsn: Lsn, _end: Lsn, payload: bytes | memoryview) -> None:
        self._redoing.record(payload)
        self._records += 1
        self._bytes += len(payload)
        if self._records % 1000 == 0:
            self._on_progress(f"{self._records} journal records redone")

    def _rewrite(self, placed: Placed) -> None:
        path = placed.partition.segment_path(placed.segment_base)
        if path not in self._rewritten:
            self._rewritten[path] = placed.position == 0 or self._disk.exists(path)
        self._redo_segments.write(path, placed.position, placed.data)

    def _clean_up(self, store: Store) -> None:
        """Finish what a crash cut off between a journaled log start or deletion and its unlinks."""
        deleted, unknown = self._unknown_topics()
        below_start: dict[Partition, list[str]] = {}
        for partition in self._state.partitions.values():
            below_start[partition], more = self._unknown_segments(partition)
            unknown += more
        if unknown and not self._is_copy:  # a copy may have been cut: what is missing in its journal comes again
            raise StorageError(_more_than_the_journal(unknown))
        for directory in deleted:
            store.removals.drop_topic(directory)
        for partition in self._touched:
            directory = f"log/{partition.topic_id}/{partition.number}"
            # A process that was killed leaves entries that are seen and may not be on disk: the next checkpoint, which
            # lets go of the journal that could make the files again, syncs them.
            self._files.distrust(directory)
            self._files.distrust("archive" + directory[len("log") :])
            doomed = below_start.get(partition, [])
            for path in doomed:
                if not self._rewritten.get(path, True):
                    self._files.unlink(path)  # archived before the crash, and taken out of the archive since
            store.removals.drop_segments(partition, doomed)

    def _unknown_topics(self) -> tuple[list[str], list[str]]:
        """Directories of topics whose deletion is journaled, and of those that no record names."""
        deleted, unknown = list[str](), list[str]()
        for name in self._disk.list_directory("log"):
            if not (name.isascii() and name.isdecimal()):
                raise StorageError(f"log/{name}: not a topic's directory; move it away")
            if self._state.topics.with_id(int(name)) is None:
                (deleted if int(name) < self._state.topics.next_id else unknown).append(f"log/{name}")
        return deleted, unknown

    def _unknown_segments(self, partition: Partition) -> tuple[list[str], list[str]]:
        """Segments below the log start, and what is on disk of messages that no record names.

        What is no segment, or cannot be read, is left alone: its partition's readers are told.
        """
        known = {partition.segment_path(segment.base_offset): segment for segment in partition.segments}
        below_start, unknown = list[str](), list[str]()
        directory = f"log/{partition.topic_id}/{partition.number}"
        with suppress(NotADirectoryError):
            for name in self._disk.list_directory(directory):
                path, base = f"{directory}/{name}", segment_base(name)
                if base is None:
                    continue
                if path not in known:
                    (below_start if base < partition.log_start else unknown).append(path)
                elif known[path] is partition.segments[-1] and self._is_longer(path, known[path].size_bytes):
                    unknown.append(f"{path} from byte {known[path].size_bytes} on")
        return below_start, unknown

    def _is_longer(self, path: str, size: int) -> bool:
        try:
            return size_bytes(self._disk, path) > size
        except OSError as error:
            if is_lacking(error):
                raise
            return False


class _Rewriting(RedoEffects):
    """Of a start: bytes go into the files again, and files that are let go of are looked for at its end."""

    def __init__(self, state: State, rewrite: Callable[[Placed], None], touched: dict[Partition, None]) -> None:
        super().__init__(state)
        self._rewrite, self._touched = rewrite, touched

    def placed(self, placed: Placed) -> None:
        self._rewrite(placed)
        self._touched[placed.partition] = None

    def log_start_moved(self, partition: Partition, _dropped: list[int]) -> None:
        self._touched[partition] = None  # its files below may still be there


def _more_than_the_journal(unknown: list[str]) -> str:
    shown = ", ".join(unknown[:_SHOWN_MAX]) + (f" and {len(unknown) - _SHOWN_MAX} more" * (len(unknown) > _SHOWN_MAX))
    return (
        f"log/ holds messages that journal/ and checkpoint/ do not know: {shown}. Either these two are older than log/ "
        "(put all three back as they were at one time), or the journal's end is damaged (docs/operations.md)"
    )


def _append_received(journal: Journal, group: ReceivedGroup) -> None:
    """Append what the leader has sent.

    Raises:
        OSError: there is no room, or no descriptor, for the file that it begins; the same call may be repeated.
    """
    if group.begins is not None:
        try:
            journal.begin_verbatim(group.begins)
        except JournalFullError as error:
            raise caused(OSError(errno.ENOSPC, str(error)), error) from error
        group.begins = None
    if group.records:
        journal.append_verbatim(group.records, group.chain, group.epoch)


def _append(journal: Journal, payload: bytes) -> None:
    """Append; on a full disk with the ballast."""
    try:
        journal.append(payload)
    except JournalFullError:
        # Nothing was written. New messages are refused by now, so what is left are decisions: they get the ballast.
        journal.use_ballast()
        journal.append(payload)
