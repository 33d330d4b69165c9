"""The publisher, in its two modes: parts into batches, by the reader's thread, and batches out, by a second one.

Theory of operation. The reader's thread makes steps of the parts (``change_messages``) and adds them to a batch. A
second thread takes the batch, commits it, and takes the next one, which has been gathered meanwhile. So a batch is as
large as a commit takes long: small and soon with few changes, large with many. While a commit has to wait, both threads
wait: the reader when the batch is full.

The messages of a batch are numbered by *epochs*, some hundred changes of the binlog's order each, in the header
``txmq.epoch``. A partition has them in order, and a transaction's messages appear all at once. So a reader that has
seen an epoch, and reads each partition as far as it then ends, has all of it and of those before
(``apply.partition_queues``). The position holds the last number, through all kills.

The transactional publisher publishes a batch as one txmq transaction, with the position message and the
acknowledgement of the one before it. If the broker is away, it is waited for (``position_log``).

The ordered publisher puts a batch, and what is then published, into the spool of an ordered producer on this machine,
in one synced transaction of the spool (``write_ahead``). So a start goes on exactly after what the spool has taken, and
nothing is read again. The spool is sent by the producer: once, and in order in each partition, whatever is killed. The
reader goes on while the broker is away, until the spool is full. Then it waits, as it does for the first change of a
table whose topic is not known here. Which reader may send is a question of ``ownership``.

The changes of a prepared XA transaction wait in the parked topic, or in ordered mode in notes of the spool, which are
written with the position after the prepare and dropped with the position after its end. They are read back at its end.

Invariants:
    * batches are committed one after another, in order, each once;
    * a batch holds whole steps, and is committed with what is then published;
    * an error of the second thread is raised in the first one;
    * transactional: a transaction of the source is seen all or none, unless it comes in parts;
    * ordered: messages of a partition are appended, and sent, in the order of the binlog; a message that the broker
      refuses stops the reader, and those after it in its partition wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from txmq.binlog.config import BinlogSettings
from txmq.binlog.decoded_changes import Row, TableSchema, TransactionPart
from txmq.binlog.errors import BinlogError
from txmq.binlog.event_json import EventEncoder
from txmq.binlog.position import Position
from txmq.binlog.publish.change_messages import (
    KEY_HEADER,
    PARTITION_HEADER,
    TOPIC_HEADER,
    Batch,
    Gathering,
    Outgoing,
    Parked,
    Step,
    parked_key,
)
from txmq.binlog.publish.ownership import PUBLISHED, Ownership, SentEpochs, refuse_spooled
from txmq.binlog.publish.position_log import BrokerWait, PositionCommits, PositionLog, newest_position
from txmq.binlog.publish.published import ParkedRows, Published, read_published
from txmq.binlog.publish.topics import Topics, placing_of
from txmq.binlog.publish.unread import SnapshotState, Unread
from txmq.client import Client
from txmq.client.producer.core import Record, TopicRef
from txmq.client.spooling.ordered_producer import OrderedOptions
from txmq.client.spooling.write_ahead import Note, SpoolBatch, WriteAheadProducer
from txmq.errors import RequestTimeoutError, SpoolFullError, TransactionStateError, TxmqError, UnknownTopicError, anew
from txmq.log import records
from txmq.model import Message, TopicPartition
from txmq.runtime.clocks import OSRandom
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Condition, Signal, start_daemon

_WAIT_S = 30.0  # for messages of another home's partition to appear
_ENVELOPE = {TOPIC_HEADER, PARTITION_HEADER, KEY_HEADER}
IDLE_S = 1.0  # a position without messages waits so long for messages
CLOSE_S = 10.0
BATCH_SIZE_BYTES = 256 << 10  # a batch of the spool is one of the log
_FULL_S = 0.05  # a full spool is looked at this often
_TOPIC_S = 5.0


# --- changes of prepared XA transactions ------------------------------------------------------------------------------


class ParkedTopic:
    """The parked topic, in which only the reader writes.

    Args:
        flush: publishes what is gathered: it may hold the changes that must be read.
    """

    def __init__(self, client: Client, topic: str, clock: Clock, flush: Callable[[], None]) -> None:
        self._client, self._topic, self._clock, self._flush = client, topic, clock, flush

    def read(self, xid: str, rows: ParkedRows) -> Iterator[Outgoing]:
        """The changes of a prepared transaction, in order, each with its destination.

        Raises:
            BinlogError: they are not all there.
            TxmqError: the broker is away.
        """
        self._flush()
        key, left, offset = parked_key(xid, rows.gtid), rows.rows, rows.offset
        deadline = self._clock.monotonic() + _WAIT_S
        while left:
            messages = self._client.fetch(self._topic, 0, offset, timeout=1.0)
            for message in messages:
                if message.key == key and left:
                    left -= 1
                    yield opened(message)
            if messages:
                offset = messages[-1].offset + 1
            elif self._clock.monotonic() > deadline:
                raise BinlogError(
                    f"{left} of {rows.rows} changes of the prepared transaction {xid} are missing in {self._topic}, "
                    f"from offset {rows.offset} on: were they deleted?"
                )


class ParkedNotes:
    """The changes that an ordered reader keeps as notes in its spool.

    Args:
        notes: gives those of a name.
        flush: as for ``ParkedTopic``.
    """

    def __init__(self, notes: Callable[[str], Iterator[bytes]], topic: str, flush: Callable[[], None]) -> None:
        self._notes, self._topic, self._flush = notes, topic, flush

    def read(self, xid: str, rows: ParkedRows) -> Iterator[Outgoing]:
        """As ``ParkedTopic.read``."""
        self._flush()
        left = rows.rows
        for content in self._notes(note_name(xid, rows.gtid)):
            left -= 1
            yield opened(records.decode(bytearray(content), self._topic, 0)[0])
        if left:
            raise BinlogError(f"{left} of {rows.rows} changes of the prepared transaction {xid} are not in the spool")


def note_name(xid: str, gtid: str) -> str:
    """The name of the notes that have a prepared transaction's changes."""
    return f"parked {xid} {gtid}"


def opened(message: Message) -> Outgoing:
    """A parked change with its destination."""
    headers = message.headers
    topic, partition = headers[TOPIC_HEADER].decode(), int(headers[PARTITION_HEADER])
    kept = [(name, value) for name, value in headers.items() if name not in _ENVELOPE]
    return topic, partition, headers[KEY_HEADER], message.value or b"", kept, message.timestamp_ms


# --- what both publishers have ----------------------------------------------------------------------------------------


class BatchingPublisher(ABC):
    """What both publishers have. Used by one thread.

    Args:
        is_stopped: the reader must end: its thread waits for nothing then, and the second one not for long.
        unread: says which changes are passed over while a snapshot is unfinished.
    """

    def __init__(
        self, client: Client, settings: BinlogSettings, is_stopped: Callable[[], bool], unread: Unread | None = None
    ) -> None:  # fmt: skip
        self._unread = unread
        self._client, self._settings = client, settings
        self._clock, self._publish = client.clock, settings.publish
        self._is_stopped, self._gives_up = is_stopped, False
        self._run, self._number = f"{OSRandom().bits(64):016x}", 0
        self._own_wait = BrokerWait(self._clock, is_stopped)  # of the reader's thread
        self._wait = BrokerWait(self._clock, self._ends_waits)
        self._placing = placing_of(settings.publish.by)
        self._published: Published | None = None
        self._gathering: Gathering | None = None
        self._changed, self._ended = Condition(), Signal()
        self._batch = Batch(0.0)
        self._in_flight: Batch | None = None
        self._is_closing = self._is_flushed = False
        self._failure: BaseException | None = None

    def _ends_waits(self) -> bool:
        return self._gives_up or (self._gathering is None and self._is_stopped())

    def _next_id(self) -> str:
        self._number += 1
        return f"{self._run}-{self._number}"

    # --- what the two differ in --------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> Published | None:
        """Wait until this is the one reader; what is published, None if nothing ever was, or if the reader is stopped.

        Raises:
            BinlogError: the positions are gone.
        """

    @abstractmethod
    def _commit(self, batch: Batch) -> None:
        """Publish a batch and set ``_published``, however long that takes."""

    @abstractmethod
    def _parked(self) -> tuple[Parked, int]:
        """Where the changes of prepared XA transactions are; and ``parked_end`` of ``Gathering``."""

    @abstractmethod
    def _made(self, topic: str) -> int:
        """Make a topic that is missing; how many partitions it has."""

    @abstractmethod
    def _leave(self) -> None:
        """End what ``open`` began; nothing is committed any more."""

    # --- the reader's thread -----------------------------------------------------------------------------------------

    def begin(self, position: Position, snapshot: SnapshotState | None = None) -> None:
        """Go on from a position; if nothing was published before, it is saved at once.

        Args:
            snapshot: what one has to read that begins here; None: go on with the saved one, if there is one.
        """
        self._tell_moved()
        parked, parked_end = self._parked()
        begin = self._published or Published("", position)
        if snapshot is not None:
            begin = replace(begin, snapshot=snapshot)
        self._gathering = Gathering(
            self._settings, Topics(self._publish, self._settings.name, self._make, self._topic_names),
            EventEncoder(self._settings.name, self._settings.statement_key), parked, begin, parked_end, self._unread,
        )  # fmt: skip
        if self._published is None:
            first = Batch(0.0)
            first.add(Step([], 0, 0, position, None, {}, 0, 0, snapshot))
            self._commit(first)
        start_daemon("txmq-binlog", self._work)

    def _tell_moved(self) -> None:
        published = self._published
        if published is not None and published.rows and published.placing != self._placing:
            get_logger().warning(
                "changes of a row may get another partition from here on: let consumers read what is published before "
                "they read on",
                was=published.placing or "of an older version", now=self._placing,
            )  # fmt: skip

    @property
    def position(self) -> Position:
        """After the last part that was taken."""
        return self._open_gathering.position

    @property
    def snapshot(self) -> SnapshotState | None:
        """What a snapshot has still to read after what was taken."""
        return self._open_gathering.snapshot

    def publish(self, part: TransactionPart) -> None:
        """Take the next part; waits while as much as fits a transaction must be published before it.

        Raises:
            BinlogError: it cannot be published; nothing of it is.
            TxmqError: publishing failed for good, or, with a retriable error, the reader is stopped.
        """
        for step in self._open_gathering.steps(part, self._clock.now_ms()):
            self._add(step)

    def publish_read(
        self, schema: TableSchema | None, rows: Sequence[Row], behind: Callable[[int], SnapshotState | None]
    ) -> None:
        """Take rows that a snapshot has read at this position; raises as ``publish``.

        Args:
            schema: of their table; None if there are no rows.
            behind: what the snapshot has still to read after so many of them.
        """
        gathering = self._open_gathering
        if schema is None or not rows:
            self._add(gathering.skip_step(behind(0)))
            return
        for step in gathering.read_steps(schema, rows, behind, self._clock.now_ms()):
            self._add(step)

    def _add(self, step: Step) -> None:
        limits = self._publish.transaction_rows_max, self._publish.transaction_bytes_max
        with self._changed:
            while self._failure is None and not self._batch.has_room(step, *limits):
                self._wait_for_change()
            self.refuse_failed()
            if self._batch.last is None:
                self._batch.begun_at = self._clock.monotonic()
            self._batch.add(step)
            self._changed.notify_all()

    def _wait_for_change(self) -> None:
        if self._is_stopped():
            raise RequestTimeoutError("the reader ends: what is not published is read again at the next start")
        self._changed.wait(IDLE_S)

    def flush(self) -> None:
        """Wait until all that was taken is published."""
        with self._changed:
            self._is_flushed = True
            self._changed.notify_all()
            while self._failure is None and (self._batch.last is not None or self._in_flight is not None):
                self._wait_for_change()
            self._is_flushed = False
            self.refuse_failed()

    def close(self) -> Published | None:
        """Publish what was taken, if the broker is there, and leave the group; what is published then."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._gathering is not None and not self._ended.wait(CLOSE_S):
            self._gives_up = True
            self._ended.wait(CLOSE_S)
        self._gives_up = True
        self._leave()
        return self._published

    @property
    def _open_gathering(self) -> Gathering:
        if self._gathering is None:
            raise TransactionStateError("the publisher has not begun")
        return self._gathering

    def refuse_failed(self) -> None:
        """Raise what stopped the publishing thread, if anything did."""
        failure = self._failure
        if isinstance(failure, TxmqError):
            raise anew(failure)
        if failure is not None:
            raise failure

    def _make(self, topic: str) -> int:
        partitions = self._made(topic)
        crash_point("binlog.topic.made")
        return partitions

    def _topic_names(self) -> list[str]:
        return self._own_wait.answer(lambda: [topic.name for topic in self._client.topics.list()])

    # --- the publishing thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._takes_batch():
                assert self._in_flight is not None
                self._commit(self._in_flight)
                with self._changed:
                    self._in_flight = None
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  raised in the reader's thread
            self._fail(error)
        finally:
            self._ended.set()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _takes_batch(self) -> bool:
        """Wait for a batch that is due; False at the end."""
        with self._changed:
            while True:
                wait_s = self._due_in()
                if wait_s <= 0.0:
                    break
                if self._is_closing and self._batch.last is None:
                    return False
                self._changed.wait(wait_s)
            self._in_flight, self._batch = self._batch, Batch(0.0)
            self._changed.notify_all()
            return True

    def _due_in(self) -> float:
        batch = self._batch
        if batch.last is None:
            return IDLE_S
        is_full = batch.rows >= self._publish.transaction_rows_max // 2
        if self._is_closing or self._is_flushed or is_full:
            return 0.0
        linger_s = self._publish.linger_ms / 1000 if batch.messages else IDLE_S
        return batch.begun_at + linger_s - self._clock.monotonic()


# --- transactional ----------------------------------------------------------------------------------------------------


class TransactionalPublisher(BatchingPublisher):
    """Changes and position are one txmq transaction. Arguments and threads: as ``BatchingPublisher``."""

    def __init__(
        self, client: Client, settings: BinlogSettings, is_stopped: Callable[[], bool], unread: Unread | None = None
    ) -> None:  # fmt: skip
        super().__init__(client, settings, is_stopped, unread)
        self._commits = PositionCommits(client, self._publish, self._wait, lambda: self._gives_up)
        self._log: PositionLog | None = None

    def open(self) -> Published | None:
        settings = self._settings
        # Before this one joins the group: it would take the place of an ordered reader of the same machine.
        self._own_wait.answer(lambda: refuse_spooled(settings, newest_position(self._client, settings)))
        log = self._own_wait.answer(lambda: PositionLog(self._client, settings, self._ends_waits))
        self._log = log
        self._published = self._own_wait.answer(log.take)
        refuse_spooled(settings, self._published)
        return self._published

    def _parked(self) -> tuple[Parked, int]:
        topic = self._settings.parked_topic
        end = self._own_wait.answer(lambda: self._client.offsets(topic, 0).end)
        return ParkedTopic(self._client, topic, self._clock, self.flush), end

    def _made(self, topic: str) -> int:
        def made() -> int:
            self._client.topics.ensure(topic, self._publish.partitions)
            return self._client.topics.known(topic).config.partitions

        return self._own_wait.answer(made)

    def _commit(self, batch: Batch) -> None:
        log = self._log
        assert log is not None
        before, now_ms = self._published, self._clock.now_ms()
        messages, epoch = batch.numbered(before, now_ms, self._settings.parked_topic)
        published = batch.published(before, self._next_id(), now_ms, self._placing, epoch)
        self._commits.commit(log, "" if before is None else before.id, published, messages)
        self._published = published
        crash_point("binlog.position.read")

    def _leave(self) -> None:
        if self._log is not None:
            self._log.close()


# --- ordered ----------------------------------------------------------------------------------------------------------


class OrderedPublisher(BatchingPublisher):
    """Changes go through the spool, with their position. Arguments and threads: as ``BatchingPublisher``."""

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
