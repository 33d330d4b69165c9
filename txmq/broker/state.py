"""The broker's state: a fold over the journal.

The same methods move the state when a request is accepted (live) and when a journal record is redone (recovery), so
what a restart rebuilds is what the broker had. This is the *assigned* side: it moves when an entry is put into the
group commit. The durable side is the partitions' high watermarks; answers wait for their record (``core``).

Invariants:
    * ids (topics, sessions) only grow and are never reused;
    * a transaction is in ``transactions`` exactly while it is open or prepared; afterwards its session keeps the
      outcome;
    * assigned state is never undone: a journal that fails stops the broker.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from txmq.broker.decided import Decided, Decisions
from txmq.broker.in_doubt_index import InDoubtIndex
from txmq.broker.ordering import CommitOrder
from txmq.broker.queries import Queries
from txmq.broker.saved import SavedGroups
from txmq.broker.sequences import Sequences
from txmq.broker.session import ROLLED_BACK, CommittedParts, Session
from txmq.broker.transaction import Part, Transaction, TransactionState
from txmq.errors import StorageError
from txmq.log import batch as batches
from txmq.log.memory import MemoryPartition
from txmq.log.partition import Partition, Place
from txmq.model import Storage
from txmq.redo import entries
from txmq.registry.topics import Topic, Topics
from txmq.runtime.ports import Buffer

Places = dict[Partition, Place]  # where a transaction's messages begin
Write = Callable[
    [Partition, int, int, bytes | bytearray | memoryview], None
]  # (partition, segment base, position, bytes)
_BATCH = struct.Struct(">8xi5xI22xqhii")  # length, crc, producer id, epoch, sequence, count of a batch header
IN_JOURNAL = 0xFFFFFFFF


class Limits(NamedTuple):
    """The limits that shape the fold; they must not differ between two lives for the window they shape to be equal."""

    in_flight_max: int = 8
    outcomes_kept: int = 1024


class State:
    """Topics, partitions, sessions and unsettled transactions of one broker."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.topics = Topics()
        self.partitions: dict[tuple[bytes, bytes], Partition] = {}  # by name and number as they stand on the wire
        self.partitions_of: dict[int, list[Partition]] = {}
        self.sessions: dict[int, Session] = {}
        self.next_session = 1
        self.transactions: dict[tuple[int, int], Transaction] = {}  # in order of their first entry
        self.streams: dict[tuple[int, int], Transaction] = {}  # those of them that are open
        self.order = CommitOrder()
        self.prepared: InDoubtIndex[Transaction] = InDoubtIndex()  # those of them that are, in order of preparation
        self.next_order = 1
        self.payload_bytes = 0
        self.epoch = 0
        self.decisions = Decisions()
        self.saved = SavedGroups()
        self.queries = Queries()
        self.foreign: dict[str, tuple[int, int]] = {}  # xids of other transaction managers that are prepared

    # --- topics ------------------------------------------------------------------------------------------------------

    def put_topic(self, topic: Topic) -> list[Partition]:
        """Create or alter a topic; returns the partitions that are new."""
        self.topics.put(topic)
        existing = self.partitions_of.setdefault(topic.topic_id, [])
        for partition in existing:
            partition.config = topic.config
        kind = MemoryPartition if topic.config.storage is Storage.MEMORY else Partition
        added = [
            kind(topic.topic_id, topic.config.name, number, topic.config)
            for number in range(len(existing), topic.config.partitions)
        ]
        existing.extend(added)
        name = topic.config.name.encode()
        for partition in added:
            self.partitions[name, b"%d" % partition.number] = partition
        return added

    def delete_topic(self, topic_id: int) -> list[Partition]:
        """Forget a topic; its parts of unsettled transactions go with it. Returns what it was made of.

        What is held in it goes behind the forced record (``Holds.drop``).
        """
        topic = self.topics.remove(topic_id)
        removed = self.partitions_of.pop(topic_id, [])
        self.saved.forget_topic(topic_id)
        if topic is not None:
            name = topic.config.name.encode()
            for partition in removed:
                partition.is_deleted = True
                del self.partitions[name, b"%d" % partition.number]
        return removed

    def partition(self, topic_id: int, number: int) -> Partition | None:
        """Look up by id; None where the topic was deleted."""
        of_topic = self.partitions_of.get(topic_id)
        return of_topic[number] if of_topic is not None and number < len(of_topic) else None

    # --- sessions ----------------------------------------------------------------------------------------------------

    def put_session(self, session: Session) -> None:
        """Add a session."""
        self.sessions[session.number] = session
        self.next_session = max(self.next_session, session.number + 1)

    def take_session(self, number: int, epoch: int) -> None:
        """Somebody took a session over: who had it before is fenced."""
        self.sessions[number].epoch = epoch

    def end_session(self, number: int) -> None:
        """Forget a session: whatever comes in its name is refused from now on."""
        self.sessions.pop(number, None)
        for partition in self.all_partitions():
            partition.producers.pop(number, None)

    # --- transactions ------------------------------------------------------------------------------------------------

    def add_part(self, session: int, counter: int, part: Part, now_ms: int) -> Transaction:
        """A part of an undecided transaction reached the journal."""
        key = (session, counter)
        transaction = self.transactions.get(key)
        if transaction is None:
            transaction = self.transactions[key] = self.streams[key] = Transaction(session, counter, now_ms)
        transaction.add(part)
        self.payload_bytes += len(part.batch)
        return transaction

    def prepare(self, session: int, counter: int, meta: dict[str, Any]) -> Transaction:
        """All parts are there and it is prepared."""
        key = (session, counter)
        transaction = self.transactions.get(key)
        if transaction is None:
            transaction = self.transactions[key] = Transaction(session, counter, meta["prepared_ms"])
        self.streams.pop(key, None)
        transaction.prepare(meta, self.next_order)
        self.next_order += 1
        self.order.add(transaction)
        self.prepared.add(transaction.order, transaction, transaction.index_keys)
        if "xid" in meta:
            self.foreign[meta["xid"]] = key
        self.saved.hold(key, meta.get("offsets", ()), self.partition)
        return transaction

    def settle(self, session: int, counter: int, floor: int, outcome: CommittedParts | None) -> Transaction | None:
        """Committed (the placed parts) or rolled back (None): the outcome is kept, the transaction is over."""
        transaction = self.transactions.pop((session, counter), None)
        if transaction is not None:
            self.streams.pop((session, counter), None)
            self.payload_bytes -= transaction.size_bytes
            if transaction.state is TransactionState.PREPARED:
                self.order.remove(transaction)
                self.prepared.remove(transaction.order, transaction.index_keys)
                self.foreign.pop(transaction.meta.get("xid", ""), None)
                if "offsets" in transaction.meta:
                    self._settle_offsets(transaction, is_committed=outcome is not None)
        owner = self.sessions.get(session)
        if owner is not None:
            owner.keep(counter, outcome, floor, self.limits.outcomes_kept)
        return transaction

    @property
    def unsettled(self) -> int:
        """Transactions that wait for somebody: open, prepared, or decided with a branch to be told."""
        return len(self.transactions) + len(self.decisions.undone)

    def decide(
        self, session: int, counter: int, floor: int, outcome: CommittedParts, meta: dict[str, Any], places: Places
    ) -> None:
        """Committed, and branches must hear of it before readers may see it."""
        self.settle(session, counter, floor, outcome)
        self.decisions.decide((session, counter), meta, outcome, places)
        if "offsets" in meta:
            self.saved.save_of_transaction(meta["offsets"], meta["decided_ms"], self.partition)
            self.saved.hold((session, counter), meta["offsets"], self.partition)

    def _settle_offsets(self, transaction: Transaction, *, is_committed: bool) -> None:
        meta = transaction.meta
        self.saved.let_go((transaction.session, transaction.counter), meta["offsets"])
        if is_committed:
            self.saved.save_of_transaction(meta["offsets"], meta["prepared_ms"], self.partition)

    def may_load(self, decided: Decided) -> None:
        """Every branch of a decision has completed, or its messages are shown: its offsets are held no longer."""
        self.saved.let_go(decided.name, decided.meta.get("offsets", ()))

    def commit_batch(self, placed: list[tuple[int, int, CommittedParts, Places]], meta: dict[str, Any]) -> None:
        """A batch of a query is decided: its transactions (session, counter, outcome, places) are seen together.

        Where one stands behind a hold, all wait there.
        """
        together: Places = {}
        for session, counter, outcome, places in placed:
            self.settle(session, counter, 0, outcome)
            for partition, place in places.items():
                together.setdefault(partition, place)
        if placed:
            self.decisions.holds.add_behind(placed[0][:2], together)
        self.queries.committed(meta["query"], meta["batch"], meta["time_ms"])

    def accept_sequence(
        self, partition: Partition, producer: int, sequence: int, count: int, crc: int, offset: int
    ) -> None:
        """A batch with a producer id was placed."""
        known = partition.producers.get(producer)
        if known is None:
            known = partition.producers[producer] = Sequences()
        known.accept(sequence, count, crc, offset, self.limits.in_flight_max)

    def started(self, epoch: int, time_ms: int) -> None:
        """A new life of the broker began: streams that were not prepared are rolled back for good."""
        self.epoch = epoch
        for partition in self.all_partitions():
            partition.began(time_ms)
        for transaction in list(self.streams.values()):
            self.settle(transaction.session, transaction.counter, 0, ROLLED_BACK)

    # --- redo --------------------------------------------------------------------------------------------------------

    def redo(self, payload: bytes | memoryview, write: Write, touched: dict[Partition, None]) -> None:
        """Fold one journal record into the state and rewrite what it placed.

        Args:
            write: rewrites bytes in a partition's file; never skips because the file already matches.
            touched: gathers the partitions that moved.
        """
        for kind, flags, body in entries.split(payload):
            if kind == entries.RUN:
                self._redo_run(body, flags, write, touched)
            else:
                self._redo_control(kind, body, write, touched)

    def _redo_run(self, body: memoryview, flags: int, write: Write, touched: dict[Partition, None]) -> None:
        run = entries.decode_run(body)
        partition = self.partition(run.topic_id, run.partition)
        if partition is None:
            return
        write(partition, run.segment_base, run.position, run.batches)
        partition.redo(
            run.segment_base, run.position, run.base_offset, run.next_offset, run.max_timestamp_ms, len(run.batches)
        )
        touched[partition] = None
        if flags & entries.FLAG_IDEMPOTENT:
            self._redo_sequences(partition, run.batches, run.base_offset)

    def _redo_sequences(self, partition: Partition, data: Buffer, offset: int) -> None:
        position, end = 0, len(data)
        while position < end:
            length, crc, producer, _, sequence, count = _BATCH.unpack_from(data, position)
            if producer >= 0 and sequence >= 0:
                self.accept_sequence(partition, producer, sequence, count, crc, offset)
            offset += count
            position += 12 + length

    def _redo_control(self, kind: int, body: memoryview, write: Write, touched: dict[Partition, None]) -> None:
        if kind == entries.PAYLOAD:
            self._redo_payload(body)
        elif kind == entries.PREPARED:
            prepared = entries.decode_prepared(body)
            self.prepare(prepared.session, prepared.counter, json.loads(prepared.meta))
        elif kind == entries.COMMITTED:
            committed = entries.decode_committed(body)
            outcome, places = self._redo_placements(committed, write, touched)
            self.settle(committed.session, committed.counter, committed.floor, outcome)
            self.decisions.holds.add_behind((committed.session, committed.counter), places)
        elif kind == entries.DECIDED:
            decided = entries.decode_decided(body)
            outcome, places = self._redo_placements(decided, write, touched)
            meta = json.loads(decided.meta)
            self.decide(decided.session, decided.counter, decided.floor, outcome, meta, places)
        elif kind in (entries.COMPLETED, entries.SHOWN, entries.HEURISTIC, entries.FORGOTTEN):
            self._redo_decisions(kind, json.loads(bytes(body)))
        elif kind in (entries.SAVED, entries.HANDED_OVER, entries.GROUP_DELETED):
            self._redo_group(kind, json.loads(bytes(body)))
        elif kind in (entries.EPOCH_DRAWN, entries.QUERY_OPENED, entries.BATCH_COMMITTED, entries.QUERY_DELETED):
            self._redo_query(kind, body, write, touched)
        elif kind == entries.ROLLED_BACK:
            settled = entries.decode_rolled_back(body)
            self.settle(settled.session, settled.counter, settled.floor, ROLLED_BACK)
        elif kind == entries.SESSION:
            fields = json.loads(bytes(body))
            secret = fields.get("secret", "")
            self.put_session(Session(fields["session"], fields["epoch"], fields["name"], fields["time_ms"], secret))
        elif kind == entries.SESSION_TAKEN:
            fields = json.loads(bytes(body))
            self.take_session(fields["session"], fields["epoch"])
        elif kind == entries.SESSION_ENDED:
            self.end_session(entries.decode_session_ended(body))
        elif kind == entries.TOPIC:
            self.put_topic(Topic.from_json(json.loads(bytes(body))))
        elif kind == entries.TOPIC_DELETED:
            for removed in self.delete_topic(entries.decode_topic_deleted(body)):
                self.decisions.holds.drop(removed)
        elif kind == entries.LOG_START:
            moved = entries.decode_log_start(body)
            partition = self.partition(moved.topic_id, moved.partition)
            if partition is not None:
                partition.set_log_start(moved.offset)
                touched[partition] = None  # its files below may still be there
        elif kind == entries.STARTED:
            fields = json.loads(bytes(body))
            self.started(fields["epoch"], fields["time_ms"])

    def _redo_payload(self, body: memoryview) -> None:
        entry = entries.decode_payload(body)
        part = Part(entry.topic_id, entry.partition, bytearray(entry.batch), entry.count, entry.max_timestamp_ms)
        self.add_part(entry.session, entry.counter, part, 0)

    def _redo_decisions(self, kind: int, fields: dict[str, Any]) -> None:
        name, decisions = (fields["session"], fields["counter"]), self.decisions
        if kind == entries.COMPLETED:
            decided = decisions.complete(name, fields["uuid"], fields["fact"])
            if decided is not None:
                decisions.holds.applied({}, [decided.hold])
                self.may_load(decided)
        elif kind == entries.SHOWN:
            decisions.holds.applied({}, [decisions.undone[name].hold])
            self.may_load(decisions.undone[name])
        elif kind == entries.HEURISTIC:
            decisions.record(name, fields["fact"])
        else:
            decisions.forget(name)

    def _redo_group(self, kind: int, fields: dict[str, Any]) -> None:
        if kind == entries.SAVED:
            self.saved.save(fields["group"], fields["offsets"], fields["time_ms"])
        elif kind == entries.HANDED_OVER:
            self.saved.hand_over(fields["group"], fields["owned"])
        else:
            self.saved.delete(fields["group"])

    def _redo_query(self, kind: int, body: memoryview, write: Write, touched: dict[Partition, None]) -> None:
        if kind == entries.BATCH_COMMITTED:
            self._redo_batch(entries.decode_batch_committed(body), write, touched)
            return
        fields = json.loads(bytes(body))
        if kind == entries.EPOCH_DRAWN:
            self.queries.drawn(fields["epoch"])
        elif kind == entries.QUERY_OPENED:
            self.queries.open(fields["query"], fields["epoch"], fields["time_ms"])
        else:
            self.queries.delete(fields["query"])

    def _redo_batch(self, batch: entries.BatchCommitted, write: Write, touched: dict[Partition, None]) -> None:
        placed = []
        for committed in batch.transactions:
            outcome, places = self._redo_placements(committed, write, touched)
            placed.append((committed.session, committed.counter, outcome, places))
        self.commit_batch(placed, json.loads(batch.meta))

    def _redo_placements(
        self, entry: entries.Committed | entries.Decided, write: Write, touched: dict[Partition, None]
    ) -> tuple[CommittedParts, Places]:
        """Rewrite what was journaled before; runs of the same record, which come behind, bring the rest."""
        transaction = self.transactions.get((entry.session, entry.counter))
        places: Places = {}
        for place in entry.placements:
            partition = self.partition(place.topic_id, place.partition)
            if partition is None:
                continue
            places.setdefault(partition, (place.base_offset, place.segment_base, place.position))
            if place.part == IN_JOURNAL:
                continue
            part = _part_of(transaction, entry, place.part)
            batches.stamp(part.batch, place.topic_id, place.partition, place.base_offset, part.crc)
            write(partition, place.segment_base, place.position, part.batch)
            partition.redo(
                place.segment_base, place.position, place.base_offset, place.base_offset + place.count,
                part.max_timestamp_ms, len(part.batch),
            )  # fmt: skip
            touched[partition] = None
        return tuple((p.topic_id, p.partition, p.base_offset, p.count) for p in entry.placements), places

    # --- snapshot ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state, without the payloads of unsettled transactions (``prepared/`` holds those)."""
        return {
            "next_topic_id": self.topics.next_id,
            "next_session": self.next_session,
            "next_order": self.next_order,
            "epoch": self.epoch,
            "topics": [topic.to_json() for topic in self.topics],
            "partitions": [
                [p.topic_id, p.number, p.snapshot(), self._producers(p)]
                for p in self.all_partitions()
                if p.next_offset or p.log_start
            ],
            "sessions": [session.snapshot() for session in self.sessions.values()],
            "transactions": [transaction.snapshot() for transaction in self.transactions.values()],
            "decisions": self.decisions.snapshot(),
            "groups": self.saved.snapshot(),
            "generation_floor": self.saved.generation_floor,
            "queries": self.queries.snapshot(),
        }

    def all_partitions(self) -> Iterator[Partition]:
        """Every partition of every topic."""
        for of_topic in self.partitions_of.values():
            yield from of_topic

    def _producers(self, partition: Partition) -> list[list[object]]:
        if partition.config.storage is Storage.MEMORY:
            return []  # its batches are gone with the process: there is nothing that a repeated one would repeat
        return [[producer, *s.snapshot()] for producer, s in partition.producers.items() if producer in self.sessions]

    def restore(self, snapshot: dict[str, Any]) -> None:
        """The reverse of ``snapshot``; then ``attach_payload`` for every part, then ``restored``."""
        for fields in snapshot["topics"]:
            self.put_topic(Topic.from_json(fields))
        self.topics.next_id = snapshot["next_topic_id"]
        for topic_id, number, state, producers in snapshot["partitions"]:
            partition = self.partitions_of[topic_id][number]
            partition.restore(state)
            for producer, *sequences in producers:
                partition.producers[producer] = Sequences.restore(*sequences)
        for fields in snapshot["sessions"]:
            self.put_session(Session.restore(*fields))
        self.next_session, self.next_order = snapshot["next_session"], snapshot["next_order"]
        self.epoch = snapshot["epoch"]
        for fields in snapshot["transactions"]:
            transaction = Transaction.restore(*fields)
            self.transactions[transaction.session, transaction.counter] = transaction
            if transaction.state is TransactionState.OPEN:
                self.streams[transaction.session, transaction.counter] = transaction

        self.decisions.restore(snapshot["decisions"], self.partition)
        self.saved.restore(snapshot["groups"])
        self.saved.generation_floor = snapshot.get("generation_floor", 0)
        self.queries.restore(snapshot.get("queries") or Queries().snapshot())

    def attach_payload(self, transaction: Transaction, body: memoryview) -> None:
        """Give a restored transaction one of its parts back, in order."""
        entry = entries.decode_payload(body)
        part = Part(entry.topic_id, entry.partition, bytearray(entry.batch), entry.count, entry.max_timestamp_ms)
        transaction.attach(part)
        self.payload_bytes += len(part.batch)

    def restored(self) -> None:
        """All payloads are attached: derive what is derived."""
        prepared = [t for t in self.transactions.values() if t.state is TransactionState.PREPARED]
        for transaction in sorted(prepared, key=lambda t: t.order):
            self.order.add(transaction)
            self.prepared.add(transaction.order, transaction, transaction.index_keys)
            if "xid" in transaction.meta:
                self.foreign[transaction.meta["xid"]] = transaction.name
            self.saved.hold(transaction.name, transaction.meta.get("offsets", ()), self.partition)
        for decided in self.decisions.undone.values():
            if not decided.hold.is_settled:
                self.saved.hold(decided.name, decided.meta.get("offsets", ()), self.partition)
        self.decisions.holds.settled()

    def publish_recovered(self) -> None:
        """Everything in the journal is redone: readers may see it, but for what undone decisions hold."""
        for partition in self.all_partitions():
            self.decisions.holds.recovered(partition)


def _part_of(transaction: Transaction | None, entry: entries.Committed | entries.Decided, number: int) -> Part:
    if transaction is None or number >= len(transaction.parts):
        raise StorageError(
            f"the journal commits part {number} of transaction {entry.session:x}-{entry.counter:x}, which neither it "
            "nor the checkpoint holds: they do not belong together"
        )
    return transaction.parts[number]
