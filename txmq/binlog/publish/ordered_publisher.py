"""The ordered publisher: changes go through the spool of an ordered producer, with their position.

Theory of operation. A batch (``batching``), and what is then published, are one synced transaction of the spool on this
machine (``write_ahead``). So a start goes on exactly after what the spool has taken, and nothing is read again. The
spool is sent by the producer: once, and in order in each partition, whatever is killed. The reader goes on while the
broker is away, until the spool is full. Then it waits, as it does for the first change of a table whose topic is not
known here.

The changes of prepared XA transactions are notes in the spool. They are written with the position after the prepare,
and dropped with the position after its end.

Which reader may send is a question of ``ownership``.

Invariants:
    * messages of a partition are appended, and sent, in the order of the binlog;
    * a message that the broker refuses stops the reader, and those after it in its partition wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from txmq.binlog.config import BinlogSettings
from txmq.binlog.errors import BinlogError
from txmq.binlog.position import Position
from txmq.binlog.publish.batching import CLOSE_S, BatchingPublisher
from txmq.binlog.publish.change_messages import Batch, Outgoing, Parked, parked_key
from txmq.binlog.publish.ownership import PUBLISHED, Ownership, SentEpochs
from txmq.binlog.publish.parked_xa_changes import ParkedNotes, note_name
from txmq.binlog.publish.published import Published, read_published
from txmq.binlog.publish.unread import SnapshotState, Unread
from txmq.client import Client
from txmq.client.producer.core import Record, TopicRef
from txmq.client.spooling.ordered_producer import OrderedOptions
from txmq.client.spooling.write_ahead import Note, SpoolBatch, WriteAheadProducer
from txmq.errors import RequestTimeoutError, SpoolFullError, TransactionStateError, TxmqError, UnknownTopicError
from txmq.log import records
from txmq.model import TopicPartition
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Sparingly, get_logger

BATCH_SIZE_BYTES = 256 << 10  # a batch of the spool is one of the log
_FULL_S = 0.05  # a full spool is looked at this often
_TOPIC_S = 5.0


class OrderedPublisher(BatchingPublisher):
    """See the module's docstring. Used by one thread. The arguments are those of ``BatchingPublisher``."""

    def __init__(
        self, client: Client, settings: BinlogSettings, is_stopped: Callable[[], bool], unread: Unread | None = None
    ) -> None:  # fmt: skip
        super().__init__(client, settings, is_stopped, unread)
        self._compression = None if self._publish.compression == "none" else self._publish.compression
        self._producer: WriteAheadProducer | None = None
        self._ownership: Ownership | None = None
        self._topic_refs: dict[str, TopicRef] = {}
        self._sparingly = Sparingly(get_logger(spool=settings.spool), client.clock)

    # --- the reader's thread -----------------------------------------------------------------------------------------

    def open(self) -> Published | None:
        options = OrderedOptions(compression=self._compression, spool_size_bytes_max=self._publish.spool_bytes_max)
        producer = self._producer = WriteAheadProducer(self._client, self._settings.spool, options)
        sent = self._sent = SentEpochs(producer)
        self._ownership = Ownership(self._client, self._settings, producer, sent, self._run, self._ends_early)
        noted = next(producer.notes(PUBLISHED), None)
        self._refuse_strange(producer, is_noted=noted is not None)
        if noted is None:
            self._published = self._ownership.adopt()
        else:
            self._published = read_published(noted, f"the position in {self._settings.spool}")
            self._ownership.resume()
        if self._published is not None:
            sent.appended(self._published.epoch)
        return self._published

    def _ends_early(self) -> bool:
        return self._gathering is None and self._is_stopped()

    def _refuse_strange(self, producer: WriteAheadProducer, *, is_noted: bool) -> None:
        path = self._settings.spool
        if kept := producer.parked():
            raise BinlogError(
                f"the spool {path} has a message aside, which its partition lacks: topic {kept[0].topic}, partition "
                f"{kept[0].partition}: {kept[0].reason} (txmq spool show {path} --parked)"
            )
        if producer.spooled and not is_noted:
            raise BinlogError(f"the spool {path} has messages of another producer: set publish.spool")

    def begin(self, position: Position, snapshot: SnapshotState | None = None) -> None:
        super().begin(position, snapshot)
        assert self._ownership is not None
        self._ownership.hold(self._current, self._fail)

    def _current(self) -> Published:
        assert self._published is not None
        return self._published

    def _parked(self) -> tuple[Parked, int]:
        return ParkedNotes(self._opened.notes, self._settings.parked_topic, self.flush), 0

    @property
    def _opened(self) -> WriteAheadProducer:
        if self._producer is None:
            raise TransactionStateError("the publisher is not open")
        return self._producer

    def _made(self, topic: str) -> int:
        producer, partitions = self._opened, self._publish.partitions

        def made() -> TopicRef:
            deadline = self._clock.monotonic() + _TOPIC_S
            try:
                return producer.topic_ref(topic, deadline)
            except UnknownTopicError:
                self._client.topics.ensure(topic, partitions)
                return producer.topic_ref(topic, deadline)

        topic_ref = self._topic_refs[topic] = self._own_wait.answer(made)
        return topic_ref.partitions

    # --- the second thread -------------------------------------------------------------------------------------------

    def _commit(self, batch: Batch) -> None:
        before, producer, now_ms = self._published, self._opened, self._clock.now_ms()
        messages, epoch = batch.numbered(before, now_ms, self._settings.parked_topic)
        published = batch.published(before, self._next_id(), now_ms, self._placing, epoch)
        ended = _parked_names(before) - _parked_names(published)
        notes = [Note(PUBLISHED, 0, published.to_json()), *self._parked_notes(batch, before, published)]
        batches = list(self._batches(messages))
        while True:
            try:
                producer.append(batches, notes, sorted(ended))
                self._sent.appended(epoch)
                break
            except SpoolFullError as error:
                self._wait_for_room(producer, error)
        self._published = published
        crash_point("binlog.spool.appended")

    def _wait_for_room(self, producer: WriteAheadProducer, error: SpoolFullError) -> None:
        if not producer.spooled:
            raise BinlogError(f"a batch does not fit the empty spool: raise publish.spool_bytes_max ({error})")
        if self._gives_up:
            raise RequestTimeoutError("the spool is full: what it has not taken is read again at the next start")
        self._sparingly.warning("the spool is full: waiting for the broker", waiting=producer.spooled)
        self._clock.sleep(_FULL_S)

    def _batches(self, messages: Sequence[Outgoing]) -> Iterator[SpoolBatch]:
        """The messages as batches of one partition each."""
        of_partitions: defaultdict[TopicPartition, list[Record]] = defaultdict(list)
        parked = self._settings.parked_topic
        for topic, partition, key, value, headers, now_ms in messages:
            if topic != parked:
                of_partitions[topic, partition].append((key, value, headers, now_ms))
        for where, of_one in of_partitions.items():
            for some in _chunks(of_one):
                content = bytes(records.encode(some, compression=self._compression))
                yield SpoolBatch(where, content, len(some), self._topic_ref(where[0]).topic_id)

    def _topic_ref(self, topic: str) -> TopicRef:
        if topic not in self._topic_refs:  # of parked changes alone, in this run
            self._made(topic)
        return self._topic_refs[topic]

    def _parked_notes(self, batch: Batch, before: Published | None, published: Published) -> Iterator[Note]:
        """The changes of transactions that are prepared after the batch."""
        names = {parked_key(xid, rows.gtid): note_name(xid, rows.gtid) for xid, rows in published.parked.items()}
        known = {} if before is None else before.parked
        numbers = {parked_key(xid, rows.gtid): rows.rows for xid, rows in known.items()}
        for topic, _, key, value, headers, now_ms in batch.messages:
            if topic == self._settings.parked_topic and key in names:
                assert key is not None
                numbers[key] = numbers.get(key, 0) + 1
                yield Note(names[key], numbers[key], bytes(records.encode([(key, value, headers, now_ms)])))

    # --- ends --------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        ownership, producer = self._ownership, self._producer
        if ownership is not None:
            ownership.end()
            if producer is not None and ownership.is_ours and self._failure is None and self._published is not None:
                with suppress(TxmqError):  # the broker is away: the spool is sent at the next start
                    producer.flush(CLOSE_S)
                    ownership.release(self._published)
            ownership.close()
        if producer is not None:
            producer.close()


def _parked_names(published: Published | None) -> set[str]:
    return set() if published is None else {note_name(xid, rows.gtid) for xid, rows in published.parked.items()}


def _chunks(messages: Sequence[Record]) -> Iterator[list[Record]]:
    chunk, size = list[Record](), 0
    for message in messages:
        more = len(message[0] or b"") + len(message[1])
        if chunk and size + more > BATCH_SIZE_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(message)
        size += more
    yield chunk
