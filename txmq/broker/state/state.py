"""The broker's state: a fold over the journal.

The same methods move the state when a request is accepted (live) and when a journal record is redone (recovery), so
what a restart rebuilds is what the broker had. This is the *assigned* side: it moves when an entry is put into the
group commit. The durable side is the partitions' high watermarks; answers wait for their record (``core``).

Invariants:
    * ids (topics, sessions) only grow and are never reused;
    * a transaction is in ``transactions`` exactly while it is open, prepared or placing; afterwards its session keeps
      the outcome;
    * assigned state is never undone: a journal that fails stops the broker.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from txmq.broker.state.broker_identity import Registration
from txmq.broker.state.commit_order import CommitOrder
from txmq.broker.state.decisions import BranchPart, BranchParts, Name, XADecision, XADecisions
from txmq.broker.state.fencing_tokens import FencingTokens
from txmq.broker.state.frozen_state import PACKED_MAX, FrozenState, Packed, packed
from txmq.broker.state.group_offsets import SavedGroups
from txmq.broker.state.in_doubt_index import InDoubtIndex
from txmq.broker.state.outbox_chains import OutboxChains
from txmq.broker.state.principals import Principals
from txmq.broker.state.producer_sequences import Sequences, SequenceTable
from txmq.broker.state.session import ROLLED_BACK, BrokerSession, CommittedParts, IssuedSessions, Kept, count_for
from txmq.broker.state.spark_queries import Queries
from txmq.broker.state.transaction import PreparedPart, Transaction, TransactionState, home_group_key
from txmq.log.history import NO_LIFE
from txmq.log.memory_partition import new_partition
from txmq.log.partition import LogPosition, Partition
from txmq.model import Storage
from txmq.registry.cluster_metadata import PlacedTopic
from txmq.registry.topics import Topic, Topics

Places = dict[Partition, LogPosition]  # where a transaction's messages begin
_OF_A_DECISION: Final = ("decided_ms", "client", "branches", "homes", "offsets")
_MEMORY: Final = Storage.MEMORY  # Python 3.11 looks a member up three times as long as a global name


class Limits(NamedTuple):
    """The limits that shape the fold. Each start states its own in the journal: what came before is folded under those
    of its time.
    """

    in_flight_max: int = 8
    outcomes_kept: int = 1024


class State:
    """Topics, partitions, sessions and unsettled transactions of one broker.

    Args:
        home: matters only to a broker with a registry.

    Attributes:
        partitions: those that this home owns, by name and number as they stand on the wire.
        partitions_of: the same by topic id and number.
        placed: by topic id, the homes of all its partitions. A broker that is alone has none: it owns every partition.
    """

    def __init__(self, limits: Limits | None = None, home: int = 0) -> None:
        self.limits, self.home = limits or Limits(), home
        self.sessions: dict[int, BrokerSession] = {}
        self.registration, self.topics, self.principals = Registration(), Topics(), Principals(self.sessions)
        self.partitions: dict[tuple[bytes, bytes], Partition] = {}
        self.partitions_of: dict[int, dict[int, Partition]] = {}
        self.placed: dict[int, PlacedTopic] = {}
        self.next_session = self.next_order = 1
        self.issued_sessions = IssuedSessions()
        self.fences_of = Counter[str]()  # by database, how many ``BrokerSession.fences`` there are
        self.sequences = SequenceTable(self.sessions, self.principals.sequences)
        self.outcomes_over = 0  # of all sessions, what they keep beyond ``Limits.outcomes_kept``
        self.transactions: dict[tuple[int, int], Transaction] = {}  # in order of their first entry
        self.streams: dict[tuple[int, int], Transaction] = {}  # those of them that are open
        self.order = CommitOrder()
        # Those of them that are prepared, in order of preparation, and those that are decided and wait for their place.
        self.prepared: InDoubtIndex[Transaction] = InDoubtIndex()
        self.payload_bytes, self.epoch, self.life = 0, 0, NO_LIFE
        self.decisions, self.branch_parts = XADecisions(), BranchParts()
        self.saved, self.queries = SavedGroups(), Queries()
        self.fencing_tokens, self.outbox_chains = FencingTokens(), OutboxChains()
        self.foreign: dict[str, tuple[int, int]] = {}  # xids of other transaction managers that are prepared

    def new_topic_id(self) -> int:
        """One more than the highest that this broker has ever had (``Ids``)."""
        return self.topics.next_id

    def new_session_number(self) -> int:
        """One more than the highest that this broker has ever had (``Ids``)."""
        return self.next_session

    # --- topics ------------------------------------------------------------------------------------------------------

    def put_topic(self, topic: Topic) -> list[Partition]:
        """Create or alter a topic, all of whose partitions are here; returns the partitions that are new."""
        return self._put_topic(topic, range(topic.config.partitions))

    def place_topic(self, placed: PlacedTopic) -> list[Partition]:
        """The same for a topic whose partitions have homes."""
        self.placed[placed.topic.topic_id] = placed
        return self._put_topic(placed.topic, [n for n, home in enumerate(placed.homes) if home == self.home])

    def redo_topic(self, fields: dict[str, Any]) -> None:
        """Create or alter a topic as an entry, or a checkpoint, says."""
        if "homes" in fields:
            self.place_topic(PlacedTopic.from_json(fields))
        else:
            self.put_topic(Topic.from_json(fields))

    def topic_fields(self, topic: Topic) -> dict[str, object]:
        """A topic as it is told to clients; with version and homes, if it has them."""
        return (self.placed.get(topic.topic_id) or topic).to_json()

    def _put_topic(self, topic: Topic, numbers: Iterable[int]) -> list[Partition]:
        self.topics.put(topic)
        existing = self.partitions_of.setdefault(topic.topic_id, {})
        for partition in existing.values():
            partition.config = topic.config
        name, added = topic.config.name.encode(), list[Partition]()
        for number in numbers:
            if number not in existing:
                partition = new_partition(topic.topic_id, topic.config.name, number, topic.config, self.life)
                existing[number] = self.partitions[name, b"%d" % number] = partition
                added.append(partition)
        return added

    def delete_topic(self, topic_id: int) -> list[Partition]:
        """Forget a topic; its parts of unsettled transactions go with it. Returns its partitions.

        Its barriers go when the record is durable (``VisibilityBarriers.drop``).
        """
        topic = self.topics.remove(topic_id)
        self.placed.pop(topic_id, None)
        removed = list(self.partitions_of.pop(topic_id, {}).values())
        self.saved.forget_topic(topic_id)
        if topic is not None:
            self.principals.unmade("topic", topic.config.name)
            name = topic.config.name.encode()
            for partition in removed:
                partition.is_deleted = True
                for producer in partition.producers:
                    self.sequences.forget(producer, partition)
                self.partitions.pop((name, b"%d" % partition.number), None)
        return removed

    def partition(self, topic_id: int, number: int) -> Partition | None:
        """Look up by id; None if the topic was deleted, or another home has the partition."""
        of_topic = self.partitions_of.get(topic_id)
        return of_topic.get(number) if of_topic is not None else None

    # --- sessions ----------------------------------------------------------------------------------------------------

    def put_session(self, session: BrokerSession) -> None:
        """Add a session."""
        self.sessions[session.number] = session
        count_for(self.principals.sessions, session.user, 1)
        self._count_fences(session, 1)
        self.outcomes_over += session.recount(self.limits.outcomes_kept)
        self.next_session = max(self.next_session, session.number + 1)
        self.issued_sessions.add(session.number)

    def take_session(self, number: int, epoch: int, user: str = "") -> None:
        """A client took a session over: its former holder is fenced. One that was nobody's is the user's now."""
        self.sessions[number].take(epoch, user, self.principals.unsettled)
        if user:
            count_for(self.principals.sessions, user, 1)
            self.sequences.take(number, user)
            for transaction in self.transactions.values():
                if transaction.session == number:
                    self.share(number, transaction.state is TransactionState.OPEN, transaction.size_bytes)

    def end_session(self, number: int) -> None:
        """Forget a session: requests in its name are refused from now on."""
        session = self.sessions.pop(number, None)
        if session is not None:
            session.is_ended = True
            count_for(self.principals.sessions, session.user, -1)
            self._count_fences(session, -1)
            self.sequences.release(session)
            self.outcomes_over -= session.over

    def close_session(self, number: int) -> None:
        """A session's client is done with it: it sends no batch any more, and its outcomes may be asked for."""
        session = self.sessions[number]
        session.close()
        self.sequences.release(session)

    def rest_sessions(self, numbers: Iterable[int]) -> None:
        """Clients have been away for a while."""
        for number in numbers:
            session = self.sessions[number]
            self._count_fences(session, -1)
            session.rest()
            self.outcomes_over += session.recount(self.limits.outcomes_kept)
            self._count_fences(session, 1)

    def fence(self, number: int, counter: int, uuid: str) -> None:
        """No decision of that transaction with a branch in the database is accepted any more."""
        session = self.sessions.get(number)
        if session is not None:
            session.fence(counter, uuid)
            self.fences_of[uuid] += 1

    def _count_fences(self, session: BrokerSession, sign: int) -> None:
        for uuids in session.fences.values():
            for uuid in uuids:
                self.fences_of[uuid] += sign
                if not self.fences_of[uuid]:
                    del self.fences_of[uuid]

    # --- transactions ------------------------------------------------------------------------------------------------

    def add_part(self, session: int, counter: int, part: PreparedPart, now_ms: int) -> Transaction:
        """A part of an undecided transaction reached the journal."""
        key = (session, counter)
        transaction = self.transactions.get(key)
        if transaction is None:
            transaction = self.transactions[key] = self.streams[key] = Transaction(session, counter, now_ms)
            self.share(session, 1, 0)
        transaction.add(part)
        self.payload_bytes += len(part.batch)
        self.share(session, 0, len(part.batch))
        return transaction

    def share(self, session: int, streams: int, size_bytes: int) -> None:
        """So much more is the user's whose session it is."""
        owner = self.sessions.get(session)
        if owner is not None and owner.user:
            count_for(self.principals.streams, owner.user, streams)
            count_for(self.principals.payload_bytes, owner.user, size_bytes)

    def prepare(self, session: int, counter: int, meta: dict[str, Any]) -> Transaction:
        """All parts are there and it is prepared."""
        transaction = self._closed(session, counter, meta)
        transaction.prepare(meta, self.next_order)
        self.next_order += 1
        self.list_in_doubt(transaction)
        return transaction

    def await_place(self, session: int, counter: int, meta: dict[str, Any]) -> Transaction:
        """All parts are there and it is decided; its messages wait for their place."""
        transaction = self._closed(session, counter, meta)
        if transaction.state is TransactionState.PREPARED:
            self._unlist(transaction)
        transaction.await_place(meta, self.next_order)
        self.next_order += 1
        self.list_in_doubt(transaction)
        if "branches" in meta:
            stated: dict[str, Any] = {key: meta[key] for key in _OF_A_DECISION if key in meta}
            self.decisions.decide(transaction.name, stated, (), None)
            self.owe(session, 1)
        return transaction

    def _closed(self, session: int, counter: int, meta: dict[str, Any]) -> Transaction:
        """The transaction, which gets no more parts."""
        key = (session, counter)
        transaction = self.transactions.get(key)
        if transaction is None:
            transaction = self.transactions[key] = Transaction(session, counter, meta["prepared_ms"])
        if self.streams.pop(key, None) is not None:
            self.share(session, -1, 0)
        return transaction

    def list_in_doubt(self, transaction: Transaction) -> None:
        """A transaction is prepared, or waits for its place; call in order."""
        self.order.add(transaction)
        self.prepared.add(transaction.order, transaction, transaction.index_keys)
        meta = transaction.meta
        if "xid" in meta:
            self.foreign[meta["xid"]] = transaction.name
        if "offsets" in meta:
            self.saved.hold(transaction.name, meta["offsets"], self.partition)
        self.owe(transaction.session, 1)

    def _unlist(self, transaction: Transaction) -> None:
        meta = transaction.meta
        self.owe(transaction.session, -1)
        self.order.remove(transaction)
        self.prepared.remove(transaction.order, transaction.index_keys)
        self.foreign.pop(meta.get("xid", ""), None)
        if "offsets" in meta:
            self.saved.let_go(transaction.name, meta["offsets"])

    def owe(self, session: int, more: int) -> None:
        """So many more of a session's transactions are unsettled."""
        owner = self.sessions.get(session)
        if owner is not None:
            owner.owe(more, self.principals.unsettled)

    def settle(self, session: int, counter: int, floor: int, outcome: Kept) -> Transaction | None:
        """Committed (the placed parts) or rolled back: the outcome is kept, the transaction is over."""
        transaction = self.transactions.pop((session, counter), None)
        if transaction is not None:
            self.share(session, -1 if self.streams.pop((session, counter), None) else 0, -transaction.size_bytes)
            self.payload_bytes -= transaction.size_bytes
            if transaction.state is not TransactionState.OPEN:
                self._unlist(transaction)
                if isinstance(outcome, tuple) and "offsets" in transaction.meta:
                    meta = transaction.meta
                    self.saved.save_of_transaction(meta["offsets"], meta["prepared_ms"], self.partition)
        owner = self.sessions.get(session)
        if owner is not None:
            self.outcomes_over += owner.keep(counter, outcome, floor, self.limits.outcomes_kept)
        return transaction

    def commit(
        self, session: int, counter: int, floor: int, outcome: CommittedParts, places: Places
    ) -> BranchPart | XADecision | None:
        """Committed, and its messages are placed; readers may see them, unless a barrier holds them.

        Returns:
            The part of another home's transaction, or the decision with branches, whose messages that were.
        """
        transaction, name = self.settle(session, counter, floor, outcome), (session, counter)
        decided = self.decisions.incomplete.get(name)
        if decided is not None:
            if self.decisions.place(decided, outcome, places):
                self.owe(session, -1)
            elif decided.has_rows_to_come:
                self.saved.hold(name, decided.meta.get("offsets", ()), self.partition)
            return decided
        if transaction is None or not transaction.is_branch:
            self.decisions.barriers.add_behind(name, places)
            return None
        part = self.branch_parts.placed(name, transaction.meta, places, self.decisions.barriers)
        self.saved.hold(name, part.offsets, self.partition)
        return part

    @property
    def unsettled(self) -> int:
        """How many transactions are open, prepared, placing, decided with an incomplete branch, or not reported yet."""
        return len(self.transactions) + len(self.decisions.incomplete) + len(self.branch_parts.unreported)

    def waits_for(self, home: int) -> bool:
        """Whether parts here wait for another home: to decide, or to be told that they are placed."""
        return self.prepared.count(home_group_key(home)) > 0 or self.branch_parts.must_be_reported(home)

    def decide(
        self, session: int, counter: int, floor: int, outcome: CommittedParts, meta: dict[str, Any], places: Places
    ) -> None:
        """Committed; branches must hear of it, those in databases before readers may see the messages."""
        self.settle(session, counter, floor, outcome)
        self._decide((session, counter), meta, outcome, places)
        if "offsets" in meta:
            self.saved.save_of_transaction(meta["offsets"], meta["decided_ms"], self.partition)
            if meta["branches"]:
                self.saved.hold((session, counter), meta["offsets"], self.partition)

    def _decide(self, name: Name, meta: Mapping[str, Any], outcome: CommittedParts, places: Places) -> None:
        self.decisions.decide(name, meta, outcome, places)
        self.owe(name[0], 1)

    def complete(self, name: Name, uuid: str, fact: dict[str, Any] | None) -> XADecision | None:
        """A database's branch has completed; the decision, if that was the last of them."""
        decided = self.decisions.complete(name, uuid, fact)
        if decided is not None:
            self._owe_if_over(name)
            self.may_load(decided)
        return decided

    def complete_home(self, name: Name, txid: str, fact: dict[str, Any] | None) -> None:
        """Another home has placed its part of a transaction that was decided here, or is given up (``fact``)."""
        self.decisions.complete_home(name, txid, fact)
        self._owe_if_over(name)

    def _owe_if_over(self, name: Name) -> None:
        if name not in self.decisions.incomplete:
            self.owe(name[0], -1)

    def may_load(self, decided: XADecision) -> None:
        """Every database of a decision has committed, or its messages are shown: its offsets are held no longer."""
        if decided.is_placed:
            self.saved.let_go(decided.name, decided.meta.get("offsets", ()))

    def show_part(self, name: Name) -> BranchPart | None:
        """Readers may see a part of another home's transaction. Returns it if it was held."""
        part = self.branch_parts.shown(name)
        if part is not None:
            self.saved.let_go(name, part.offsets)
        return part

    def report_part(self, name: Name, fact: dict[str, Any] | None = None) -> BranchPart | None:
        """The home that decided knows that a part is placed, or is given up (``fact``), and readers may see it.

        Returns:
            The part, if it was held.
        """
        part = self.show_part(name)
        self.branch_parts.reported(name)
        if fact is not None:
            self.decisions.record(name, fact)
        return part

    def commit_batch(self, placed: list[tuple[int, int, CommittedParts, Places]], meta: dict[str, Any]) -> None:
        """A batch of a query is decided: its transactions (session, counter, outcome, places) are seen together.

        If one is above a barrier, all wait there.
        """
        together: Places = {}
        for session, counter, outcome, places in placed:
            transaction = self.settle(session, counter, 0, outcome)
            if transaction is not None and "homes" in transaction.meta:
                stated = {"decided_ms": meta["time_ms"], "client": transaction.meta["client"], "branches": []}
                self._decide(transaction.name, {**stated, "homes": transaction.meta["homes"]}, outcome, {})
            for partition, place in places.items():
                together.setdefault(partition, place)
        if placed:
            self.decisions.barriers.add_behind(placed[0][:2], together)
        self.queries.committed(meta["query"], meta["batch"], meta["digest"], meta["time_ms"])

    def accept_sequence(
        self, partition: Partition, producer: int, sequence: int, count: int, crc: int, offset: int
    ) -> None:
        """A batch with a producer id was placed."""
        known = partition.producers.get(producer) or self.sequences.keep(producer, partition, Sequences())
        known.accept(sequence, count, crc, offset, self.limits.in_flight_max)

    def led(self, epoch: int, start: int, time_ms: int, limits: Limits, *, is_member: bool) -> None:
        """A process leads the home from now on: streams that were not prepared are rolled back for good."""
        is_first, self.epoch, self.limits = self.life == NO_LIFE, epoch, limits
        self.life = f"{(start + epoch) % (1 << 64):016x}"  # no two of one journal are alike, whatever was drawn
        self.outcomes_over += sum(session.recount(limits.outcomes_kept) for session in self.sessions.values())
        if is_member:
            self.registration.led(epoch, start)
        for partition in self.all_partitions():
            partition.began(epoch)
            partition.live(self.life)
        self.saved.started(time_ms, self.partition, is_first=is_first)
        for transaction in list(self.streams.values()):
            self.settle(transaction.session, transaction.counter, 0, ROLLED_BACK)

    # --- snapshot ----------------------------------------------------------------------------------------------------

    def freeze(self) -> FrozenState:
        """A copy, without the payloads of unsettled transactions (``prepared/`` holds those).

        On the event loop, so it only copies references, and makes no object for each; its writer formats them.
        """
        return FrozenState(
            numbers={
                "next_topic_id": self.topics.next_id, "next_session": self.next_session,
                "next_order": self.next_order, "epoch": self.epoch, **self.limits._asdict(),
            }, life=self.life,
            topics=list(self.topics),
            placed=dict(self.placed),
            partitions=self._freeze_partitions(),
            sessions=packed(self.sessions[number].freeze() for number in sorted(self.sessions)),
            issued_sessions=packed(self.issued_sessions.freeze()),
            transactions=packed(transaction.freeze() for transaction in self.transactions.values()),
            incomplete=packed(self.decisions.freeze()),
            barriers=packed(self.decisions.freeze_barriers()),
            heuristics=packed(self.decisions.freeze_heuristics()),
            branch_parts=packed(self.branch_parts.freeze()),
            groups=self.saved.freeze(),
            generation_floor=self.saved.generation_floor,
            queries=self.queries.snapshot(),
            registration=self.registration.snapshot(),
            fencing_tokens=packed(self.fencing_tokens.freeze()),
            outbox_chains=packed(self.outbox_chains.freeze()),
            principals=self.principals.freeze(),
        )  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        """The same, JSON-able: what ``restore`` takes."""
        return self.freeze().plain()

    def all_partitions(self) -> Iterator[Partition]:
        """Every partition that this home owns."""
        for of_topic in self.partitions_of.values():
            yield from of_topic.values()

    def _freeze_partitions(self) -> Packed:
        known, fields = self.sessions, list[Any]()
        found = deque([fields])
        for of_topic in self.partitions_of.values():
            for partition in of_topic.values():
                frozen = partition.freeze()
                if not (frozen[0] or frozen[1]):  # log start, next offset: nothing was ever placed
                    continue
                if len(fields) >= PACKED_MAX:
                    fields = []
                    found.append(fields)
                fields += (partition.topic_id, partition.number)
                fields += frozen
                if partition.config.storage is not _MEMORY:  # else gone with the process, nothing can be repeated
                    for number, sequences in partition.producers.items():
                        if number in known:
                            fields += (number, sequences.next, sequences.recent)
                fields.append(None)
        return found

    def publish_recovered(self) -> None:
        """Everything in the journal is redone: readers may see it, except above barriers."""
        for partition in self.all_partitions():
            self.decisions.barriers.recovered(partition)
