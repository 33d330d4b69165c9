"""``retry_store="topic"``: contents of messages that are deferred, copied into the topic ``<group>.retry``.

For containers without a disk. A copy has the message's key, value, headers and tag, and headers that say where it
came from and how often it had failed. No consumer reads the topic: the group's saved offset (``deferred``) decides what
is deferred and names each copy, so a copy that it does not name means nothing. Contents are read from the message's own
partition, and from the copy if retention has removed the message.

Invariants:
    * a message is acknowledged to the group only after its copy is in the broker's journal;
    * nothing is lost with the host; a process that dies between copy and saved offset leaves a copy without a name, and
      its message is delivered again from its own partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from txmq.client.consumer.retry.retry_store import Stored
from txmq.client.consumer.retry.topic_producer import TopicProducer
from txmq.errors import OffsetOutOfRangeError, TooLargeError, UnknownTopicError
from txmq.model import Message, SendResult
from txmq.runtime.threads import Future

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.producer.producer import Producer

SUFFIX = ".retry"
RETENTION_MS = 30 * 24 * 3600 * 1000  # if the topic is created here; an operator may alter it
HEADER = "txmq.retry."


class RetryTopic:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, client: Client, group: str, member: str) -> None:
        self._client, self.topic, self._member = client, group + SUFFIX, member
        self._producer = TopicProducer(client, self.topic, storage="disk", retention_ms=RETENTION_MS)

    def put(self, rows: Sequence[Stored]) -> list[int | None] | None:
        """Send copies; where in the topic each is, None for one that is too large: it is in the log alone.

        Raises:
            TxmqError: the broker refused, or cannot be reached.

        Durability: in the broker's journal when this returns.
        """
        futures = self._producer.run(lambda made: [self._sent(made, row) for row in rows])
        return [None if future is None else _offset(future) for future in futures]

    def _sent(self, producer: Producer, row: Stored) -> Future[SendResult] | None:
        message = row.message
        try:
            future = producer.send_async(
                self.topic, message.value or b"", key=message.key, tag=message.tag, partition=0,
                headers={**message.headers, **self._origin(row)},
            )  # fmt: skip
        except TooLargeError:
            return None
        return future

    def _origin(self, row: Stored) -> dict[str, bytes]:
        message = row.message
        fields = {
            "topic": message.topic, "partition": message.partition, "offset": message.offset,
            "timestamp": message.timestamp_ms, "txid": message.txid or "", "attempts": row.attempts,
            "reason": row.reason[:1000], "member": self._member, "null": int(message.value is None), "log": row.log,
        }  # fmt: skip
        return {HEADER + name: str(value).encode() for name, value in fields.items()}

    def read(self, topic: str, partition: int, offset: int, copy: int, log: str) -> Message | None:
        """The message that a copy is of; None where it is gone, or one of the topics is another one by now.

        Raises:
            TxmqError: the broker cannot be reached.
        """
        try:
            found = self._client.fetch(self.topic, 0, copy)
        except (OffsetOutOfRangeError, UnknownTopicError):
            return None
        message = original(found[0]) if found and found[0].headers.get(HEADER + "log") == log.encode() else None
        return message if message is not None and _place(message) == (topic, partition, offset) else None

    def update(self, row: Stored) -> None:
        """Do nothing: the group's saved offset has the number of failures."""

    def remove(self, group: str, topic: str, partition: int, offset: int) -> bool:
        """Do nothing: a copy that the group does not name goes with retention."""
        return False

    def partition(self, group: str, topic: str, partition: int) -> dict[int, Stored]:
        """Return nothing: contents are read one by one."""
        return {}

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()


def _offset(future: Future[SendResult]) -> int | None:
    try:
        return future.result().offset
    except TooLargeError:
        return None


def original(copy: Message) -> Message | None:
    """The message that a copy is of; None if it is not a copy."""
    fields = {name.removeprefix(HEADER): text for name, text in copy.headers.items() if name.startswith(HEADER)}
    try:
        place = fields["topic"].decode(), int(fields["partition"]), int(fields["offset"])
        timestamp_ms, txid = int(fields["timestamp"]), fields["txid"].decode() or None
        value = None if int(fields["null"]) else copy.value
    except (KeyError, ValueError):
        return None
    headers: Mapping[str, bytes] = {n: text for n, text in copy.headers.items() if not n.startswith(HEADER)}
    return Message(*place, copy.key, value, headers, copy.tag, timestamp_ms, txid)


def _place(message: Message) -> tuple[str, int, int]:
    return message.topic, message.partition, message.offset
