"""What a producer decides: batches, sequences, retries, deadlines. Sans-I/O and deterministic.

Theory of operation. Each partition has one queue of batches, in the order in which the application sent them, numbered
by one dense sequence. ``poll`` gives out what may be sent now, at most ``in_flight_max`` unanswered batches for each
partition. The shell sends those at once and in this order on one connection, and reports what became of them:
``answered``, ``refused``, or ``disconnected`` for all.

A batch's sequence is the number of messages before it in the queue, so it is fixed when all batches before it are. The
batch is *uncertain* from the moment it is given out until the broker answers:

* Lost connection: all batches in flight wait again, keep their sequences, and are sent again in order. The broker
  answers those that it has as duplicates.
* Certain refusal: neither this batch nor any after it was stored (those after it follow a gap and are refused with
  ``sequence``). The partition stalls until the rest in flight is answered, then goes on from its head. A refused batch
  that is tried again keeps its number; if it is dropped, the batches after it are renumbered.
* "Unavailable" and "internal error" refuse, but do not say whether the batch was stored; neither does any refusal of a
  batch whose earlier transmission is uncertain. The batch is tried again.
* Deadline: a batch that was certainly never stored is withdrawn, and its error says so. An uncertain one ends as
  unknown for the caller, and is still sent until its outcome is known, because the numbers of all later batches follow
  its own.
* Another session: its numbers begin at 0, so what is uncertain stays unknown. It is reported, and never sent again.
* ``not-owner``, the partition is another home's, or ``stale-topic``, another topic has the name: nothing was stored,
  and nothing more of it is sent here. Once the rest in flight is answered, the shell takes its batches elsewhere
  (``take_returned``, ``adopt``). One that may have been stored before stays unknown.
* Away: a batch that was never given out and is movable may go to any other partition (``movable``, ``withdraw``).
* ``sequence`` without a refusal before it: the topic was created anew under its name (numbers begin at 0), or the
  broker contradicts the core; then another session is requested.

Invariants:
    * Batches of a partition are stored in queue order, each at most once.
    * A batch is finished (``take_finished``) exactly once, as stored at an offset or with an error.
    * An error that says "nothing was stored" is true.
    * All queues together hold at most ``buffer_size_bytes`` (the shell waits before it adds) and one message.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from typing import NamedTuple

from txmq.errors import (
    BrokerError,
    DeliveryUnknownError,
    FencedError,
    NotOwnerError,
    OtherSessionError,
    RequestTimeoutError,
    SequenceError,
    StaleTopicError,
    TxmqError,
    UnavailableError,
    UnknownTopicError,
)
from txmq.log import records
from txmq.log.records import Headers
from txmq.runtime.backoff import Backoff

SEQUENCE_MASK = 0x7FFFFFFF
RECORD_OVERHEAD_BYTES = 32  # of a record and of each header, at most: lengths, deltas, attributes
BATCH_OVERHEAD_BYTES = 128  # header of the batch and its request's line

Record = tuple[bytes | None, bytes, Headers, int]  # key, value, headers, timestamp in ms
BACKOFF_S = Backoff(0.02, 1.0)
NEVER = float("inf")
MOVED = "its partition is another home's, or another topic has the name"
DEADLINE_SPREAD_S = 1.0  # messages share a batch, and so its outcome, only if their deadlines are this close


class TopicRef(NamedTuple):
    """The topic that a message's partition was chosen for.

    Attributes:
        topic_id: 0 if any topic of the name will do: of a lone broker, and if no broker has told the id.
        partitions: how many it had.
    """

    topic_id: int
    partitions: int


ANY_TOPIC = TopicRef(0, 0)


class BatchState(enum.Enum):
    """The state of a batch in its queue."""

    WAITING = "waiting"
    IN_FLIGHT = "in flight"
    DONE = "done"  # stored; kept while one before it is not
    GONE = "gone"  # no longer in its queue


@dataclass(frozen=True, slots=True)
class ProducerLimits:
    """Settings of a producer.

    Attributes:
        linger_s: how long a batch waits for more messages before it is sent.
        batch_size_bytes: a batch is closed when it would grow over this.
        buffer_size_bytes: all unfinished batches together.
        in_flight_max: unanswered batches a partition; the session's own limit counts as well.
        compression: "gzip", "lz4", "zstd" or None.
    """

    linger_s: float = 0.0
    batch_size_bytes: int = 256 << 10
    buffer_size_bytes: int = 64 << 20
    in_flight_max: int = 8
    compression: str | None = None


class Batch:
    """Messages that share a partition, a request and an outcome.

    Attributes:
        content: the record batch, once it is closed; its sequence is written when it is given out.
        transmission: how often it was given out; tells late answers apart.
        was_uncertain: whether it was uncertain before the present transmission.
        base_offset, error: the outcome; exactly one of them is set once it is finished.
        is_movable: its messages were given a partition in turn: any other would do until the batch is given out.
        owner: for the shell.
    """

    __slots__ = (
        "base_offset", "content", "count", "created_at", "deadline", "error", "is_finished", "is_movable",
        "is_uncertain", "owner", "queue", "records", "refusal", "sequence", "size_bytes", "state", "transmission",
        "was_uncertain",
    )  # fmt: skip

    def __init__(self, queue: BatchQueue, created_at: float, deadline: float) -> None:
        self.queue, self.created_at, self.deadline = queue, created_at, deadline
        self.records: list[Record] = []
        self.content: bytearray | None = None
        self.count, self.size_bytes = 0, BATCH_OVERHEAD_BYTES
        self.state = BatchState.WAITING
        self.sequence = self.transmission = 0
        self.is_uncertain = self.was_uncertain = self.is_finished = self.is_movable = False
        self.base_offset: int | None = None
        self.error: TxmqError | None = None
        self.refusal: TxmqError | None = None  # the reason why it waits again
        self.owner: object = None


class BatchQueue:
    """The unfinished batches of one partition, in order.

    Attributes:
        topic_ref: the topic that the batches' partition was chosen for.
        base_sequence: the sequence of the queue's first message.
        open: the last batch of the queue while messages may still join it.
        stalled: a batch was refused; nothing is sent until the rest in flight is answered.
        in_flight_max: 1 after a guess at the sequence, until the broker has taken it; 0 for the core's limit. A broker
            that lost what it had acknowledged (sync = never) would refuse the first and take the second.
        not_before: back-off; monotonic time.
    """

    __slots__ = (
        "backoff_s", "base_sequence", "batches", "in_flight", "in_flight_max", "not_before", "open",
        "partition", "stalled", "topic", "topic_bytes", "topic_ref",
    )  # fmt: skip

    def __init__(self, topic: str, partition: int) -> None:
        self.topic, self.partition, self.topic_bytes = topic, partition, topic.encode("ascii")
        self.batches: deque[Batch] = deque()
        self.open: Batch | None = None
        self.base_sequence = self.in_flight = 0
        self.stalled = False
        self.in_flight_max = 0
        self.not_before = self.backoff_s = 0.0
        self.topic_ref = ANY_TOPIC

    def bind_topic(self, topic_ref: TopicRef) -> bool:
        """Send to this topic from now on; False if unfinished batches are for another one of that name."""
        if self.topic_ref.topic_id not in (0, topic_ref.topic_id):
            if self.batches:
                return False
            self.base_sequence = self.in_flight_max = 0  # the other topic knows no producer yet
        self.topic_ref = topic_ref
        return True


def unknown(batch: Batch, why: str) -> DeliveryUnknownError:
    """The error of a batch that may or may not be stored."""
    queue = batch.queue
    return DeliveryUnknownError(
        f"whether {batch.count} message(s) for {queue.topic}-{queue.partition} were stored is not known: {why}"
    )


def not_sent(batch: Batch, reason: TxmqError | None) -> TxmqError:
    """The error of a batch that was not sent in time."""
    queue = batch.queue
    text = f"{batch.count} message(s) for {queue.topic}-{queue.partition} were not sent in time, nothing was stored"
    if reason is None:
        return RequestTimeoutError(text)
    return type(reason)(f"{text}: {reason}")


class ProducerCore:
    """The decisions; see the module's docstring. All times are monotonic seconds and come from the caller."""

    def __init__(self, limits: ProducerLimits) -> None:
        self.limits = limits
        self.buffered_bytes = 0
        self.unfinished = 0  # batches whose callers wait
        self.needs_session = False  # the session contradicts itself: the shell opens another one
        self.needs_connection = False  # the connection is not bound to the session: the shell makes another one
        self._in_flight_max = limits.in_flight_max
        self._producer: tuple[int, int] | None = None  # session id and epoch that the sequences count in
        self._is_connected = False
        self._queues: dict[tuple[str, int], BatchQueue] = {}
        self._active: dict[BatchQueue, None] = {}  # those with batches
        self._finished: list[Batch] = []
        self.returned: dict[BatchQueue, BrokerError] = {}  # those whose batches belong elsewhere
        self.expires_at = float("inf")  # no deadline of an unfinished batch is earlier

    # --- what the application sends ----------------------------------------------------------------------------------

    def append(self, topic: str, partition: int, record: Record, now: float, deadline: float) -> tuple[Batch, int]:
        """Add one message; returns its batch and its number in the batch."""
        queue = self.queue_of(topic, partition)
        key, value, headers, _ = record
        size = len(value) + RECORD_OVERHEAD_BYTES + (len(key) if key is not None else 0)
        for name, content in headers:
            size += 4 * len(name) + len(content) + RECORD_OVERHEAD_BYTES
        batch = queue.open
        if (
            batch is None
            or batch.size_bytes + size > self.limits.batch_size_bytes
            or not -DEADLINE_SPREAD_S < deadline - batch.deadline < DEADLINE_SPREAD_S
        ):
            batch = queue.open = self._new_batch(queue, now, deadline)
        batch.records.append(record)
        batch.count += 1
        batch.size_bytes += size
        batch.deadline = max(batch.deadline, deadline)
        self.buffered_bytes += size
        return batch, batch.count - 1

    def add(self, topic: str, partition: int, content: bytearray, count: int, now: float, deadline: float) -> Batch:
        """Add an encoded batch."""
        queue = self.queue_of(topic, partition)
        queue.open = None
        batch = self._new_batch(queue, now, deadline)
        batch.content, batch.count = content, count
        batch.size_bytes += len(content)
        self.buffered_bytes += len(content)
        return batch

    def close_open(self) -> None:
        """Close the open batches, so that those that linger are sent (flush)."""
        for queue in self._active:
            queue.open = None

    def unfinished_batches(self) -> list[Batch]:
        """All batches whose callers wait."""
        return [batch for queue in self._active for batch in queue.batches if not batch.is_finished]

    def queue_of(self, topic: str, partition: int) -> BatchQueue:
        """The queue of a partition."""
        queue = self._queues.get((topic, partition))
        if queue is None:
            queue = self._queues[topic, partition] = BatchQueue(topic, partition)
        return queue

    def has_unfinished(self, topic: str, partition: int) -> bool:
        """Whether anything is queued for a partition; a hint for callers without the lock."""
        queue = self._queues.get((topic, partition))
        return queue is not None and bool(queue.batches)

    def _new_batch(self, queue: BatchQueue, now: float, deadline: float) -> Batch:
        batch = Batch(queue, now, deadline)
        queue.batches.append(batch)
        self._active[queue] = None
        self.expires_at = min(self.expires_at, deadline)
        self.unfinished += 1
        self.buffered_bytes += batch.size_bytes
        return batch

    # --- what goes on the wire ---------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Batch]:
        """The batches that may be sent now, in order; they are in flight from here on."""
        if not self._is_connected or self.needs_session or self.needs_connection:
            return []
        sendable: list[Batch] = []
        for queue in self._active:
            if queue.in_flight < self._in_flight_max:
                self._poll_queue(queue, now, sendable)
        return sendable

    def _poll_queue(self, queue: BatchQueue, now: float, sendable: list[Batch]) -> None:
        if queue.stalled and not queue.in_flight:
            queue.stalled = False
        if queue.stalled or now < queue.not_before:
            return
        sequence = queue.base_sequence
        in_flight_max = queue.in_flight_max or self._in_flight_max
        for batch in queue.batches:
            if queue.in_flight >= in_flight_max:
                return
            if batch.state is BatchState.WAITING:
                if batch is queue.open:
                    if now < batch.created_at + self.limits.linger_s:
                        return
                    queue.open = None
                self._give_out(batch, sequence)
                queue.in_flight += 1
                sendable.append(batch)
            sequence = (sequence + batch.count) & SEQUENCE_MASK

    def _give_out(self, batch: Batch, sequence: int) -> None:
        assert self._producer is not None
        if batch.content is None:
            batch.content = records.encode(batch.records, compression=self.limits.compression)
            batch.records = []
        if batch.is_uncertain and sequence != batch.sequence:
            raise AssertionError(f"an uncertain batch of sequence {batch.sequence} would become {sequence}")
        if not batch.is_uncertain:
            records.set_sequence(batch.content, *self._producer, sequence)
        batch.was_uncertain = batch.is_uncertain
        batch.sequence, batch.is_uncertain, batch.state = sequence, True, BatchState.IN_FLIGHT
        batch.transmission += 1

    def next_wakeup(self) -> float:
        """When ``poll`` or ``expire`` has something to do without any event; infinity if never."""
        wakeup = self.expires_at
        if not self._is_connected:
            return wakeup
        for queue in self._active:
            if queue.batches and not queue.in_flight:
                lingers = queue.batches[0] is queue.open
                due = queue.batches[0].created_at + self.limits.linger_s if lingers else 0.0
                wakeup = min(wakeup, max(due, queue.not_before))
            elif (
                queue.open is not None
                and queue.in_flight < (queue.in_flight_max or self._in_flight_max)
                and not queue.stalled
            ):
                wakeup = min(wakeup, queue.open.created_at + self.limits.linger_s)
        return wakeup

    # --- what became of it -------------------------------------------------------------------------------------------

    def answered(self, batch: Batch, base_offset: int) -> None:
        """The broker stored it, now or before; that holds for an answer to any of its transmissions."""
        if batch.state in (BatchState.DONE, BatchState.GONE):
            return
        queue = batch.queue
        # No call up to the end: a KeyboardInterrupt strikes at calls, so that it finds this done or not begun.
        if batch.state is BatchState.IN_FLIGHT:
            queue.in_flight -= 1
        batch.state, batch.is_uncertain = BatchState.DONE, False
        queue.backoff_s, queue.in_flight_max = 0.0, 0
        if not batch.is_finished:  # otherwise it ended as "unknown" before
            batch.is_finished, batch.base_offset, batch.error = True, base_offset, None
            self.unfinished -= 1
            self._finished += (batch,)
        self._drop_done(queue)

    def _drop_done(self, queue: BatchQueue) -> None:
        """Take what the broker has stored from the front. A KeyboardInterrupt strikes between two of them, or not."""
        while queue.batches and queue.batches[0].state is BatchState.DONE:
            head = queue.batches[0]
            queue.base_sequence = (queue.base_sequence + head.count) & SEQUENCE_MASK
            del queue.batches[0]
            head.state = BatchState.GONE
            self.buffered_bytes -= head.size_bytes
            if queue.open is head:
                queue.open = None
            if not queue.batches:
                del self._active[queue]

    def refused(self, batch: Batch, transmission: int, error: BrokerError, now: float) -> None:
        """The broker refused this transmission."""
        if batch.state is not BatchState.IN_FLIGHT or transmission != batch.transmission:
            return
        batch.queue.in_flight -= 1
        batch.state = BatchState.WAITING
        if isinstance(error, FencedError | OtherSessionError):
            # Not stored by this transmission: the numbers stand, and another session or connection is needed.
            batch.is_uncertain = batch.was_uncertain
            self.needs_session |= isinstance(error, FencedError)
            self.needs_connection |= isinstance(error, OtherSessionError)
        elif isinstance(error, SequenceError):
            self._refused_sequence(batch)
        elif isinstance(error, UnknownTopicError):
            self._refused_with_topic(batch, error)
        elif isinstance(error, NotOwnerError | StaleTopicError):
            self._refused_by_stranger(batch, error)
        elif batch.was_uncertain or isinstance(error, UnavailableError) or type(error) is BrokerError:
            self._try_again(batch, error, now)
        else:
            self._refused_for_certain(batch, error, now)

    def _refused_sequence(self, batch: Batch) -> None:
        """Expected after a gap that a refusal left. Anywhere else the broker's numbers contradict the core's."""
        queue = batch.queue
        if queue.stalled:
            return
        if batch is queue.batches[0] and not batch.was_uncertain and queue.base_sequence:
            # A topic that was created anew knows no producer yet; if that is not the reason, 0 is refused as well.
            self._not_stored_from(batch)
            queue.base_sequence, queue.stalled, queue.in_flight_max = 0, True, 1
        else:
            batch.is_uncertain = batch.was_uncertain
            self.needs_session = True

    def _refused_with_topic(self, batch: Batch, error: BrokerError) -> None:
        """The partition does not exist, or no longer, and with it went the numbers that the broker knew."""
        queue, was_uncertain = batch.queue, batch.was_uncertain
        self._not_stored_from(batch)
        queue.stalled = True
        if batch is queue.batches[0]:
            queue.base_sequence = 0
        self._remove(batch)
        self._finish(batch, unknown(batch, "its topic is gone") if was_uncertain else error)

    def _refused_by_stranger(self, batch: Batch, error: BrokerError) -> None:
        # Those after it follow a gap. One before it may have been accepted by a home that was the owner until then.
        for other in _from(batch):
            if other.state is BatchState.IN_FLIGHT or other is batch:
                other.is_uncertain = other.was_uncertain
        self.returned[batch.queue] = batch.refusal = error
        batch.queue.stalled, batch.queue.not_before = True, NEVER
        if batch.was_uncertain:
            self._remove(batch)
            self._finish(batch, unknown(batch, MOVED))

    def _refused_for_certain(self, batch: Batch, error: BrokerError, now: float) -> None:
        self._not_stored_from(batch)
        batch.queue.stalled = True
        if error.retriable and now < batch.deadline:
            self._try_again(batch, error, now)
        else:
            self._remove(batch)
            self._finish(batch, error)

    def _not_stored_from(self, batch: Batch) -> None:
        """Neither this batch nor any after it was stored: the sequence has a gap here."""
        for other in _from(batch):
            other.is_uncertain = False

    def _try_again(self, batch: Batch, error: TxmqError, now: float) -> None:
        queue = batch.queue
        batch.refusal = error
        queue.stalled = True
        queue.backoff_s = BACKOFF_S.following(queue.backoff_s)
        queue.not_before = now + queue.backoff_s

    def disconnected(self) -> None:
        """The connection is lost: no batch in flight will be answered on it."""
        self._is_connected = False
        for queue in list(self._active):
            self._drop_done(queue)  # an interrupt may have left it
            queue.stalled, queue.in_flight = False, 0
            queue.not_before = NEVER if queue in self.returned else 0.0
            for batch in queue.batches:
                if batch.state is BatchState.IN_FLIGHT:
                    batch.state = BatchState.WAITING

    def connected(self, session: int, epoch: int, in_flight_max: int) -> None:
        """A connection is bound to this session; all unanswered batches are sent again, in order."""
        self._is_connected = True
        self.needs_session = self.needs_connection = False
        self._in_flight_max = min(self.limits.in_flight_max, in_flight_max)
        if self._producer == (session, epoch):
            return
        self._producer = (session, epoch)
        for queue in list(self._queues.values()):
            queue.base_sequence = queue.in_flight_max = 0
            for batch in list(queue.batches):
                if batch.is_uncertain or batch.state is BatchState.DONE:
                    self._remove(batch)
                    self._finish(batch, unknown(batch, "its session ended before the answer came"))

    # --- what goes elsewhere -----------------------------------------------------------------------------------------

    def separate(self, topic: str, partition: int, *, is_movable: bool) -> None:
        """Let the next message join no batch of the other kind."""
        queue = self.queue_of(topic, partition)
        if queue.open is not None and queue.open.is_movable != is_movable:
            queue.open = None

    def movable(self) -> list[Batch]:
        """Batches that may go to another partition."""
        return [batch for batch in self.unfinished_batches() if batch.is_movable and not batch.transmission]

    def withdraw(self, batches: Iterable[Batch]) -> None:
        """Let go of batches that another core adopts."""
        for batch in batches:
            self._remove(batch)
            self.unfinished -= 1

    def adopt(self, topic: str, partition: int, batches: Iterable[Batch]) -> None:
        """Add batches that another core let go, after those that are there; none of them was stored."""
        queue = self.queue_of(topic, partition)
        queue.open = None
        for batch in batches:
            batch.queue, batch.state = queue, BatchState.WAITING
            queue.batches.append(batch)
            self._active[queue] = None
            self.expires_at = min(self.expires_at, batch.deadline)
            self.unfinished += 1
            self.buffered_bytes += batch.size_bytes

    def due_returned(self) -> list[BatchQueue]:
        """Queues whose batches can be taken to another home: nothing of them is in flight."""
        return [queue for queue in self.returned if not queue.in_flight]

    def take_returned(self, queue: BatchQueue) -> list[Batch]:
        """Let go of a returned queue's batches, in order; those that may be stored end as unknown."""
        del self.returned[queue]
        for batch in list(queue.batches):
            if batch.is_uncertain:
                self._remove(batch)
                self._finish(batch, unknown(batch, MOVED))
        taken = [batch for batch in queue.batches if not batch.is_finished]
        self.withdraw(taken)
        for batch in list(queue.batches):
            self._remove(batch)
        queue.base_sequence, queue.stalled, queue.not_before = 0, False, 0.0
        return taken

    def fail_returned(self, queue: BatchQueue, error: TxmqError) -> None:
        """End a returned queue's batches: no home takes them, so none of them was stored."""
        taken = self.take_returned(queue)
        self.unfinished += len(taken)
        for batch in taken:
            self._finish(batch, error)

    def keep_returned(self, queue: BatchQueue, now: float, error: TxmqError | None = None) -> None:
        """Try a returned queue here once more, after a back-off: no other home is known, because of ``error``."""
        refusal = self.returned.pop(queue)
        queue.not_before = 0.0
        if queue.batches:
            self._try_again(queue.batches[0], error or refusal, now)

    # --- the end -----------------------------------------------------------------------------------------------------

    def expire(self, now: float, reason: TxmqError | None = None) -> None:
        """Finish what is past its deadline; ``reason`` says why nothing could be sent, if that is known."""
        if now < self.expires_at:
            return
        for queue in list(self._active):
            for batch in _overdue(queue, now):
                if batch.is_uncertain or batch.state is BatchState.IN_FLIGHT:
                    self._finish(batch, unknown(batch, "no answer came in time"))
                else:
                    self._remove(batch)
                    self._finish(batch, batch.refusal or not_sent(batch, reason))
        self.expires_at = min((batch.deadline for batch in self.unfinished_batches()), default=NEVER)

    def abort(self, reason: str) -> None:
        """Finish all batches: the producer is closed. Uncertain ones are not sent again."""
        for queue in list(self._active):
            for batch in list(queue.batches):
                error = unknown(batch, reason) if batch.is_uncertain else RequestTimeoutError(f"not sent: {reason}")
                self._remove(batch)
                self._finish(batch, error)

    def take_finished(self) -> list[Batch]:
        """The batches finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, batch: Batch, error: TxmqError) -> None:
        if batch.is_finished:  # it ended as "unknown" before
            return
        batch.is_finished, batch.error = True, error
        self.unfinished -= 1
        self._finished.append(batch)

    def _remove(self, batch: Batch) -> None:
        queue = batch.queue
        if batch.state is BatchState.IN_FLIGHT:
            queue.in_flight -= 1
        batch.state = BatchState.GONE
        self.buffered_bytes -= batch.size_bytes
        if queue.batches[0] is batch:
            queue.batches.popleft()
        else:
            queue.batches.remove(batch)
        if queue.open is batch:
            queue.open = None
        if not queue.batches:
            del self._active[queue]


def _from(batch: Batch) -> Iterator[Batch]:
    """A batch and those after it."""
    return dropwhile(lambda other: other is not batch, batch.queue.batches)


def _overdue(queue: BatchQueue, now: float) -> list[Batch]:
    return [batch for batch in queue.batches if not batch.is_finished and batch.deadline <= now]
