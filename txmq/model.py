"""The values of every layer: messages, results, topics, outcomes. No I/O, no third party."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

Offset = NewType("Offset", int)  # logical, 0-based number of a message in its partition
Position = NewType("Position", int)  # byte in a file
Lsn = NewType("Lsn", int)  # byte in the journal's endless stream
TopicPartition = tuple[str, int]  # topic, partition

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z")
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}(?:\.[A-Za-z_][A-Za-z0-9_]{0,47})?\Z")
PARTITIONS_PER_TOPIC_MAX = 10_000


def is_valid_name(name: str) -> bool:
    """Whether ``name`` may name a topic, group or resource (ASCII, 1 to 200, never a path)."""
    return _NAME.match(name) is not None


def is_valid_table(name: str) -> bool:
    """Whether ``name`` may name a marker table: letters, digits and ``_``, at most 48, or schema.table."""
    return _TABLE.match(name) is not None


def how_to_encode(name: str, found: object) -> str:
    """What makes bytes of a value or key that is none, in words."""
    if isinstance(found, str):
        return f"give {name}.encode()"
    return f"give bytes({name})" if isinstance(found, bytearray | memoryview) else f"give json.dumps({name}).encode()"


class Outcome(enum.Enum):
    """The outcome of a transaction, as durably known to the answering side."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    UNKNOWN = "unknown"


class Resolution(enum.Enum):
    """A checker's answer to a check-back."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class SendStatus(enum.Enum):
    """Where a sent message is."""

    ACKNOWLEDGED = "acknowledged"  # in the broker's journal
    SPOOLED = "spooled"  # on this host's disk
    PENDING = "pending"  # in an open transaction


class TransactionKind(enum.Enum):
    """The kind of a transaction: which side decides, and so can prove the outcome."""

    LOCAL = "local"
    LAST_RESOURCE = "last-resource"
    XA = "xa"
    HALF = "half"
    FOREIGN = "foreign"  # another transaction manager's
    SPARK = "spark"  # a driver's: one part of a batch (``query``)
    BRANCH = "branch"  # another home's: a part of one of its transactions


class Storage(enum.Enum):
    """Where a topic's messages live."""

    DISK = "disk"
    MEMORY = "memory"


class RetentionPolicy(enum.Enum):
    """What happens to a segment that is past its topic's retention."""

    DELETE = "delete"
    ARCHIVE = "archive"


class Message:
    """One message. A plain slotted class: a frozen dataclass halves the consume rate (400 k/s against 880 k/s)."""

    _VALUES = ("headers", "key", "offset", "partition", "tag", "timestamp_ms", "topic", "txid", "value")
    __slots__ = (*_VALUES, "consumer")  # the consumer that delivered it, where one did

    consumer: Any

    def __init__(
        self, topic: str, partition: int, offset: int, key: bytes | None, value: bytes | None,
        headers: Mapping[str, bytes], tag: str | None, timestamp_ms: int, txid: str | None,
    ) -> None:  # fmt: skip
        self.topic, self.partition, self.offset = topic, partition, offset
        self.key, self.value, self.headers = key, value, headers
        self.tag, self.timestamp_ms, self.txid = tag, timestamp_ms, txid

    @property
    def value_view(self) -> memoryview | None:
        """The value, read-only, and without a copy of a large one (256 KiB and more on average in its record batch).

        Valid as long as it is kept. Until ``value`` was asked for, a large message keeps the whole answer that it came
        in in memory, and so does a view of it.
        """
        return None if self.value is None else memoryview(self.value)

    def __repr__(self) -> str:
        return (
            f"Message(topic={self.topic!r}, partition={self.partition}, offset={self.offset}, "
            f"key={self.key!r}, value={len(self.value_view or b'')} bytes)"
        )

    def ack(self, connection: Any = None, *, sync: bool = False) -> None:
        """The message is dealt with; with ``sync`` that is saved when this returns. Of a consumer's messages only.

        Args:
            connection: save that in the database transaction it is in; see ``Consumer.ack``.
        """
        return self.consumer.ack(self, connection, sync=sync)  # type: ignore[no-any-return]  # a coroutine, on a loop

    def reject(self, reason: str = "rejected") -> None:
        """The message could not be dealt with: it is delivered again, or becomes a dead letter."""
        return self.consumer.reject(self, reason)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled is a plain message: its consumer stays, and so does the answer that it came in."""
        values = self.topic, self.partition, self.offset, self.key, self.value, self.headers
        return Message, (*values, self.tag, self.timestamp_ms, self.txid)

    def __copy__(self) -> Message:
        kind, values = self.__reduce__()
        copied: Message = kind(*values)
        if hasattr(self, "consumer"):
            copied.consumer = self.consumer
        return copied

    def _astuple(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in Message._VALUES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._astuple() == other._astuple()

    def __hash__(self) -> int:
        return hash((self.topic, self.partition, self.offset))


class LargeMessage(Message):
    """A message whose value stays in the answer that it came in, until it is asked for; to be taken for a ``Message``.

    Args:
        value: a view, which is kept.
    """

    __slots__ = ("_copy", "_view")

    _copy: bytes | None
    _view: memoryview | None

    def __init__(
        self, topic: str, partition: int, offset: int, key: bytes | None, value: memoryview | None,
        headers: Mapping[str, bytes], tag: str | None, timestamp_ms: int, txid: str | None,
    ) -> None:  # fmt: skip
        super().__init__(topic, partition, offset, key, None, headers, tag, timestamp_ms, txid)
        self._view = value

    @property
    def value(self) -> bytes | None:
        """The value, copied when it is first asked for."""
        view = self._view
        if view is not None:
            self._copy, self._view = bytes(view), None
        return self._copy

    @value.setter
    def value(self, value: bytes | None) -> None:
        self._copy, self._view = value, None

    @property
    def value_view(self) -> memoryview | None:
        return super().value_view if self._view is None else self._view


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where a message went. ``offset`` is None unless ``status`` is ACKNOWLEDGED."""

    topic: str
    partition: int
    offset: int | None
    status: SendStatus

    @property
    def is_success(self) -> bool:
        """Whether the message is where ``status`` says (failures raise instead)."""
        return True


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """What a producer keeps on local disk because the broker refuses it for good; ``txmq spool`` has it tried again.

    Attributes:
        content: the record batch, as it would be sent.
        messages: how many are in it.
        created_ms: when it was given to the producer, in ms since 1970.
        attempts: how often it was refused.
        reason: the last refusal.
    """

    topic: str
    partition: int
    content: bytes
    messages: int
    created_ms: int
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic's settings. ``None`` means without limit. The broker's defaults are in ``txmq.config``."""

    name: str
    partitions: int = 1
    storage: Storage = Storage.DISK
    retention_ms: int | None = None
    retention_size_bytes: int | None = None  # per partition
    retention_policy: RetentionPolicy = RetentionPolicy.DELETE
    segment_size_bytes: int = 128 << 20
    segment_age_ms: int | None = 7 * 24 * 3600 * 1000
    accept_publish: bool = True
    accept_read: bool = True


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """The readable offsets of a partition: ``start <= offset < end`` (``end`` is the high watermark)."""

    topic: str
    partition: int
    start: int
    end: int
