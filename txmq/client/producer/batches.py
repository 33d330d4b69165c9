"""The values that ``core`` decides about: batches, and the queue of a partition's unfinished batches."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from txmq.errors import DeliveryUnknownError, RequestTimeoutError, TxmqError
from txmq.log.records import Headers

SEQUENCE_MASK = 0x7FFFFFFF
RECORD_OVERHEAD_BYTES = 32  # of a record and of each header, at most: lengths, deltas, attributes
BATCH_OVERHEAD_BYTES = 128  # header of the batch and its request's line

Record = tuple[bytes | None, bytes, Headers, int]  # key, value, headers, timestamp in ms


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
