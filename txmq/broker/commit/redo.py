"""Redo: a checkpoint's content becomes the state again, and the journal's records after it are folded into that.

Theory of operation. ``restore`` makes a state of a checkpoint and its payloads. From there ``Redo`` moves it by the
methods that moved it live (``state``), so what a restart rebuilds is what the broker had; and what records placed is
written into the segment files once more.

``RedoSegments`` opens each segment once, however many there are and in whatever order records name them. As long as the
descriptor cache takes more files without closing a written one, bytes go straight to their file: the page cache is the
best place for them. Beyond that, each record would open a file and sync another one to close it. So bytes for further
segments are gathered, and written segment by segment when enough are there, or when redo is over.

Invariants:
    * bytes are rewritten whatever a file holds already; nothing is skipped because it matches;
    * the bytes of a segment are written in the order in which they came;
    * at most ``GATHERED_BYTES_MAX`` and one run are gathered.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final, NamedTuple

from txmq.broker.commit.prepared_payloads import PayloadFiles
from txmq.broker.state import principals
from txmq.broker.state.decisions import Name
from txmq.broker.state.producer_sequences import Sequences
from txmq.broker.state.session import ROLLED_BACK, BrokerSession, CommittedParts
from txmq.broker.state.spark_queries import Queries
from txmq.broker.state.state import Limits, Places, State
from txmq.broker.state.transaction import PreparedPart, Transaction, TransactionState
from txmq.broker.state.visibility import VisibilityBarrier
from txmq.errors import StorageError
from txmq.log import batch as batches
from txmq.log.file_cache import FileCache
from txmq.log.partition import Partition
from txmq.redo import entries
from txmq.redo.checkpoint import Checkpoint
from txmq.runtime.ports import Buffer

GATHERED_BYTES_MAX: Final = 64 << 20  # as much as there is journal between two checkpoints, by default
_BATCH = struct.Struct(">8xi5xI22xqhii")  # length, crc, producer id, epoch, sequence, count of a batch header


def restore(state: State, checkpoint: Checkpoint, payloads: PayloadFiles) -> None:
    """The state of a checkpoint, into an empty one.

    Raises:
        CorruptRecordError: the payload of a transaction is missing or damaged.
    """
    snapshot = json.loads(checkpoint.state)
    state.limits = Limits(snapshot["in_flight_max"], snapshot["outcomes_kept"])
    state.life = snapshot["life"]
    _restore_topics(state, snapshot)
    for fields in snapshot["sessions"]:
        state.put_session(BrokerSession.restore(*fields))
    state.issued_sessions.restore(snapshot["issued_sessions"])
    state.next_session, state.next_order = snapshot["next_session"], snapshot["next_order"]
    state.epoch = snapshot["epoch"]
    file_of = checkpoint.file_of()
    for fields in snapshot["transactions"]:
        transaction = Transaction.restore(file_of.get((fields[0], fields[1]), checkpoint.lsn), *fields)
        state.transactions[transaction.name] = transaction
        if transaction.state is TransactionState.OPEN:
            state.streams[transaction.name] = transaction
    for transaction, payload in payloads.read(state.transactions.values()):
        _attach(state, transaction, payload)
    state.decisions.restore(snapshot["decisions"], state.partition)
    state.branch_parts.restore(snapshot.get("branch_parts", ()), state.decisions.barriers)
    state.saved.restore(snapshot["groups"])
    state.saved.generation_floor = snapshot.get("generation_floor", 0)
    state.queries.restore(snapshot.get("queries") or Queries().snapshot())
    state.registration.restore(snapshot.get("registration"))
    state.fencing_tokens.restore(snapshot.get("fencing_tokens", ()))
    state.outbox_chains.restore(snapshot.get("outbox_chains", ()))
    state.principals.restore(snapshot.get("principals"))
    _derive(state)


def _restore_topics(state: State, snapshot: dict[str, Any]) -> None:
    for fields in snapshot["topics"]:
        state.redo_topic(fields)
    state.topics.next_id = snapshot["next_topic_id"]
    for topic_id, number, frozen, producers in snapshot["partitions"]:
        partition = state.partitions_of[topic_id][number]
        partition.restore(frozen)
        for producer, *sequences in producers:
            state.sequences.keep(producer, partition, Sequences.restore(*sequences))


def _attach(state: State, transaction: Transaction, entry: entries.Payload) -> None:
    part = PreparedPart(entry.topic_id, entry.partition, bytearray(entry.batch), entry.count, entry.max_timestamp_ms)
    transaction.attach(part)
    state.payload_bytes += len(part.batch)


def _derive(state: State) -> None:
    """What follows from the rest, and is not in a checkpoint."""
    for session in state.sessions.values():
        state.sequences.take(session.number, session.user)
    for transaction in state.transactions.values():
        state.share(transaction.session, transaction.state is TransactionState.OPEN, transaction.size_bytes)
    in_doubt = [t for t in state.transactions.values() if t.state is not TransactionState.OPEN]
    for transaction in sorted(in_doubt, key=lambda t: t.order):
        state.list_in_doubt(transaction)
    for decided in state.decisions.incomplete.values():
        state.owe(decided.name[0], 1)
        decided.is_placed = decided.name not in state.transactions
        if decided.is_placed and not decided.barrier.is_ended:
            state.saved.hold(decided.name, decided.meta.get("offsets", ()), state.partition)
    for part in state.branch_parts.held.values():
        state.saved.hold(part.name, part.offsets, state.partition)
    state.decisions.barriers.restored()


class RedoSegments:
    """Writes segments again, each opened once. ``finish`` must be called at the end."""

    def __init__(self, files: FileCache) -> None:
        self._files = files
        self._gathered: dict[str, list[tuple[int, Buffer]]] = {}
        self._bytes = 0

    def write(self, path: str, position: int, data: Buffer) -> None:
        """Write, now or later; ``data`` must not change until then."""
        gathered = self._gathered.get(path)
        if gathered is None:
            if self._files.is_open(path) or self._files.takes(1):
                self._files.write(path, position, data)
                return
            gathered = self._gathered[path] = []
        gathered.append((position, data))
        self._bytes += len(data)
        if self._bytes >= GATHERED_BYTES_MAX:
            self.finish()

    def finish(self) -> None:
        """Write what is gathered."""
        for path, pieces in self._gathered.items():
            for position, data in _joined(pieces):
                self._files.write(path, position, data)
        self._gathered, self._bytes = {}, 0


def _joined(pieces: list[tuple[int, Buffer]]) -> list[tuple[int, Buffer]]:
    """Those that follow each other in the file in one."""
    found: list[tuple[int, list[Buffer]]] = []
    end = -1
    for position, data in pieces:
        if position == end:
            found[-1][1].append(data)
        else:
            found.append((position, [data]))
        end = position + len(data)
    return [(position, b"".join(buffers)) for position, buffers in found]


class Placed(NamedTuple):
    """Batches that a record places: ``data`` belongs at ``position`` of a segment."""

    partition: Partition
    segment_base: int
    position: int
    base_offset: int
    data: Buffer


class RedoEffects:
    """What records ask for beside the state. This class: nobody reads, and nobody looks into files, before the end."""

    def __init__(self, state: State) -> None:
        self._state = state

    def placed(self, placed: Placed) -> None:
        """The partition has moved; bytes belong into its file."""

    def log_start_moved(self, partition: Partition, dropped: list[int]) -> None:
        """Segments, by their base offsets, are below the log start now."""

    def user_removed(self, user: str) -> None:
        """Connections in that name are nobody's from now on."""

    def deleted(self, partitions: list[Partition]) -> None:
        """A topic was deleted."""
        for partition in partitions:
            self._state.decisions.barriers.drop(partition)

    def ended(self, barrier: VisibilityBarrier) -> None:
        """Readers may see the messages of a decision."""
        self._state.decisions.barriers.applied({}, [barrier])

    def checkpoint(self) -> None:
        """The leader took a checkpoint at the end of this record."""


class Redo:
    """See the module's docstring."""

    def __init__(self, state: State, effects: RedoEffects) -> None:
        self._state, self._effects = state, effects
        self._clock_ms = 0  # of the record

    def record(self, payload: bytes | memoryview) -> None:
        """Fold one journal record into the state and rewrite what it placed."""
        self._clock_ms = 0
        for kind, flags, body in entries.split(payload):
            if kind == entries.RUN:
                self._redo_run(body, flags)
            else:
                self._redo_control(kind, body)

    def _redo_run(self, body: memoryview, flags: int) -> None:
        run = entries.decode_run(body)
        partition = self._state.partition(run.topic_id, run.partition)
        if partition is None:
            return
        partition.redo(
            run.segment_base, run.position, run.base_offset, run.next_offset, run.max_timestamp_ms, len(run.batches),
            self._clock_ms,
        )  # fmt: skip
        self._effects.placed(Placed(partition, run.segment_base, run.position, run.base_offset, run.batches))
        if flags & entries.FLAG_IDEMPOTENT:
            self._redo_sequences(partition, run.batches, run.base_offset)

    def _redo_sequences(self, partition: Partition, data: Buffer, offset: int) -> None:
        position, end = 0, len(data)
        while position < end:
            length, crc, producer, _, sequence, count = _BATCH.unpack_from(data, position)
            if producer >= 0 and sequence >= 0:
                self._state.accept_sequence(partition, producer, sequence, count, crc, offset)
            offset += count
            position += 12 + length

    def _redo_control(self, kind: int, body: memoryview) -> None:
        if kind == entries.CLOCK:
            self._clock_ms = entries.decode_clock(body)
        elif kind == entries.PAYLOAD:
            self._redo_payload(body)
        elif kind == entries.PREPARED:
            prepared = entries.decode_prepared(body)
            self._state.prepare(prepared.session, prepared.counter, json.loads(prepared.meta))
        elif kind == entries.COMMITTED:
            committed = entries.decode_committed(body)
            outcome, places = self._redo_placements(committed)
            self._state.commit(committed.session, committed.counter, committed.floor, outcome, places)
        elif kind == entries.PLACE_AWAITED:
            awaited = entries.decode_prepared(body)
            self._state.await_place(awaited.session, awaited.counter, json.loads(awaited.meta))
        elif kind == entries.DECIDED:
            decided = entries.decode_decided(body)
            outcome, places = self._redo_placements(decided)
            meta = json.loads(decided.meta)
            self._state.decide(decided.session, decided.counter, decided.floor, outcome, meta, places)
        elif kind in (entries.COMPLETED, entries.SHOWN, entries.REPORTED, entries.HEURISTIC, entries.FORGOTTEN):
            self._redo_decisions(kind, json.loads(bytes(body)))
        elif kind in (entries.SAVED, entries.HANDED_OVER, entries.GROUP_DELETED):
            self._redo_group(kind, json.loads(bytes(body)))
        elif kind in (entries.EPOCH_DRAWN, entries.QUERY_OPENED, entries.BATCH_COMMITTED, entries.QUERY_DELETED):
            self._redo_query(kind, body)
        elif kind in (entries.TOKEN_DRAWN, entries.OUTBOX_CHAIN):
            self._redo_database(kind, json.loads(bytes(body)))
        elif kind in principals.KINDS:
            self._redo_principals(kind, json.loads(bytes(body)))
        elif kind == entries.ROLLED_BACK:
            settled = entries.decode_rolled_back(body)
            self._state.settle(settled.session, settled.counter, settled.floor, ROLLED_BACK)
        elif kind in (entries.SESSION, entries.SESSION_TAKEN, entries.SESSIONS_AT_REST, entries.FENCED):
            self._redo_session(kind, json.loads(bytes(body)))
        elif kind == entries.SESSION_ENDED:
            self._state.end_session(entries.decode_session_ended(body))
        elif kind == entries.SESSION_CLOSED:
            self._state.close_session(entries.decode_session_ended(body))
        elif kind == entries.TOPIC:
            self._state.redo_topic(json.loads(bytes(body)))
        elif kind == entries.TOPIC_DELETED:
            self._effects.deleted(self._state.delete_topic(entries.decode_topic_deleted(body)))
        elif kind == entries.LOG_START:
            self._redo_log_start(entries.decode_log_start(body))
        elif kind == entries.CHECKPOINT:
            self._effects.checkpoint()
        elif kind == entries.LED:
            self._redo_led(json.loads(bytes(body)))
        elif kind == entries.HOME_RETIRED:
            fields = json.loads(bytes(body))
            self._state.registration.retired[int(fields["home"], 16)] = fields["reason"]

    def _redo_log_start(self, moved: entries.LogStart) -> None:
        partition = self._state.partition(moved.topic_id, moved.partition)
        if partition is not None:
            before = [segment.base_offset for segment in partition.segments]
            partition.set_log_start(moved.offset)
            kept = {segment.base_offset for segment in partition.segments}
            self._effects.log_start_moved(partition, [base for base in before if base not in kept])

    def _redo_principals(self, kind: int, fields: dict[str, Any]) -> None:
        if kind == entries.USER_REMOVED:
            self._effects.user_removed(fields["user"])
        self._state.principals.fold(kind, fields)

    def _redo_led(self, fields: dict[str, Any]) -> None:
        epoch, known = fields["epoch"], fields["format"]
        if known != entries.FORMAT:
            raise StorageError(
                f"epoch {epoch} of the journal has entries of format {known}, this txmq reads {entries.FORMAT}: upgrade"
            )
        start, limits = int(fields["start"], 16), Limits(**fields["limits"])
        self._state.led(epoch, start, fields["time_ms"], limits, is_member=fields["is_member"])

    def _redo_session(self, kind: int, fields: dict[str, Any]) -> None:
        if kind == entries.SESSION:
            secret = fields.get("secret", "")  # an older broker gave none
            number, epoch, name, time_ms = (fields[word] for word in ("session", "epoch", "name", "time_ms"))
            self._state.put_session(BrokerSession(number, epoch, name, time_ms, secret, fields.get("user", "")))
        elif kind == entries.SESSION_TAKEN:
            self._state.take_session(fields["session"], fields["epoch"], fields.get("user", ""))
        elif kind == entries.FENCED:
            self._state.fence(fields["session"], fields["counter"], fields["uuid"])
        else:
            self._state.rest_sessions(fields["sessions"])

    def _redo_database(self, kind: int, fields: dict[str, Any]) -> None:
        if kind == entries.TOKEN_DRAWN:
            self._state.fencing_tokens.drawn(fields["uuid"], fields["token"])
        else:
            self._state.outbox_chains.fold(fields)
            if fields["last"] is None:
                self._state.principals.unmade("outbox", fields["uuid"])

    def _redo_payload(self, body: memoryview) -> None:
        entry = entries.decode_payload(body)
        part = PreparedPart(
            entry.topic_id, entry.partition, bytearray(entry.batch), entry.count, entry.max_timestamp_ms
        )
        self._state.add_part(entry.session, entry.counter, part, 0)

    def _redo_decisions(self, kind: int, fields: dict[str, Any]) -> None:
        name, decisions = (fields["session"], fields["counter"]), self._state.decisions
        if kind in (entries.SHOWN, entries.REPORTED):
            self._redo_shown(kind, name, fields.get("fact"))
        elif kind == entries.COMPLETED and "branch" in fields:
            self._state.complete_home(name, fields["branch"], fields.get("fact"))
        elif kind == entries.COMPLETED:
            decided = self._state.complete(name, fields["uuid"], fields["fact"])
            if decided is not None:
                self._effects.ended(decided.barrier)
        elif kind == entries.HEURISTIC:
            decisions.record(name, fields["fact"])
        else:
            decisions.forget(name)

    def _redo_shown(self, kind: int, name: Name, fact: dict[str, Any] | None) -> None:
        decided = self._state.decisions.incomplete.get(name)
        if decided is not None:
            self._effects.ended(decided.barrier)
            self._state.may_load(decided)
            return
        part = self._state.show_part(name) if kind == entries.SHOWN else self._state.report_part(name, fact)
        if part is not None and part.barrier is not None:
            self._effects.ended(part.barrier)

    def _redo_group(self, kind: int, fields: dict[str, Any]) -> None:
        if kind == entries.SAVED:
            self._state.saved.save(fields["group"], fields["offsets"], fields["time_ms"])
        elif kind == entries.HANDED_OVER:
            self._state.saved.hand_over(fields["group"], fields["owned"], self._state.placed)
        else:
            self._state.saved.delete(fields["group"])
            self._state.principals.unmade("group", fields["group"])

    def _redo_query(self, kind: int, body: memoryview) -> None:
        if kind == entries.BATCH_COMMITTED:
            self._redo_batch(entries.decode_batch_committed(body))
            return
        fields = json.loads(bytes(body))
        if kind == entries.EPOCH_DRAWN:
            self._state.queries.drawn(fields["epoch"])
        elif kind == entries.QUERY_OPENED:
            self._state.queries.open(fields["query"], fields["epoch"], fields["time_ms"])
        else:
            self._state.queries.delete(fields["query"])
            self._state.principals.unmade("query", fields["query"])

    def _redo_batch(self, batch: entries.BatchCommitted) -> None:
        placed = []
        for committed in batch.transactions:
            outcome, places = self._redo_placements(committed)
            placed.append((committed.session, committed.counter, outcome, places))
        self._state.commit_batch(placed, json.loads(batch.meta))

    def _redo_placements(self, entry: entries.Committed | entries.Decided) -> tuple[CommittedParts, Places]:
        """Rewrite what was journaled before; runs of the same record, which come later, bring the rest."""
        transaction = self._state.transactions.get((entry.session, entry.counter))
        places: Places = {}
        for place in entry.placements:
            partition = self._state.partition(place.topic_id, place.partition)
            if partition is None:
                continue
            places.setdefault(partition, (place.base_offset, place.segment_base, place.position))
            if place.part == entries.IN_JOURNAL:
                continue
            part = _part_of(transaction, entry, place.part)
            batches.stamp(part.batch, place.topic_id, place.partition, place.base_offset, part.crc)
            partition.redo(
                place.segment_base, place.position, place.base_offset, place.base_offset + place.count,
                part.max_timestamp_ms, len(part.batch), self._clock_ms,
            )  # fmt: skip
            self._effects.placed(Placed(partition, place.segment_base, place.position, place.base_offset, part.batch))
        return tuple((p.topic_id, p.partition, p.base_offset, p.count) for p in entry.placements), places


def _part_of(transaction: Transaction | None, entry: entries.Committed | entries.Decided, number: int) -> PreparedPart:
    if transaction is None or number >= len(transaction.parts):
        raise StorageError(
            f"the journal commits part {number} of transaction {entry.session:x}-{entry.counter:x}, which neither it "
            "nor the checkpoint holds: they do not belong together"
        )
    return transaction.parts[number]
