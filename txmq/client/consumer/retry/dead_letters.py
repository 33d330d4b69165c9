"""Dead letters: messages that the group gave up, in the topic ``<group>.dead-letter``.

A dead letter is the message with its key, value, headers and tag, and headers that say why, from where and how often:
``txmq.dead.reason .topic .partition .offset .log .attempts .member``. If the content cannot come along,
``txmq.dead.value`` says why: ``null`` (the message had none), ``gone`` (retention removed it), ``too-large`` (with its
headers the broker would not take it; it is in the log at that offset, as long as retention leaves it there). ``batch``:
it is about a whole record batch that cannot be read, whose bytes are its value, unless they are too many; redrives
leave it out.

Invariants:
    * the dead letter is stored before the message is acknowledged: a crash in between leaves two of it, never none;
    * no message is too large for a dead letter, so none blocks its partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from txmq.client.consumer.options import DEAD_LETTERS_SUFFIX
from txmq.client.consumer.retry.topic_producer import TopicProducer
from txmq.errors import TooLargeError
from txmq.log.records import RawBatch
from txmq.model import Message, TopicPartition
from txmq.runtime.logging import Logger

if TYPE_CHECKING:
    from txmq.client.client import Client

HEADER = "txmq.dead."
VALUE = HEADER + "value"
REASON_BYTES_MAX = 1000
LogAt = Callable[[TopicPartition, int], str]  # ``AssignedPartitions.log_at``


class DeadLetters:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, client: Client, group: str, member: str, log: Logger, log_at: LogAt = lambda *_: "") -> None:
        self.topic, self._member, self._log, self._log_at = group + DEAD_LETTERS_SUFFIX, member, log, log_at
        self._producer = TopicProducer(client, self.topic, storage="disk")

    def dead_letter(self, message: Message, failures: int, reason: str) -> None:
        """Send it to the dead-letter topic.

        Raises:
            TxmqError: the broker refused, or cannot be reached.

        Durability: in the broker's journal when this returns.
        """
        self._log.warning(
            "message becomes a dead letter", topic=message.topic, partition=message.partition, offset=message.offset,
            dead_letters=self.topic,
        )  # fmt: skip
        own = self._headers((message.topic, message.partition), message.offset, failures, reason)
        if message.value is None:
            own[VALUE] = b"null"
        try:
            self._send(message.value, message.key, {**message.headers, **own}, message.tag)
        except TooLargeError:
            self._send_without_reason(message, failures, reason, own)

    def _send_without_reason(self, message: Message, failures: int, reason: str, own: dict[str, bytes]) -> None:
        short = {name: text for name, text in own.items() if name not in (HEADER + "reason", HEADER + "member")}
        try:
            self._send(message.value, message.key, {**message.headers, **short}, message.tag)
        except TooLargeError:
            self._send(b"", None, {**own, VALUE: b"too-large"}, None)
            self._log.error(
                "a dead letter is too large: it names the message, which is in the log alone", topic=message.topic,
                partition=message.partition, offset=message.offset, dead_letters=self.topic,
            )  # fmt: skip

    def dead_letter_gone(self, slot: TopicPartition, offset: int, failures: int) -> None:
        """Send a dead letter about a message whose content is gone. As ``dead_letter``."""
        reason = "its content was gone, from the retry store and from the log, before it could be dealt with"
        self._send(b"", None, {**self._headers(slot, offset, failures, reason), VALUE: b"gone"}, None)

    def dead_letter_batch(self, slot: TopicPartition, batch: RawBatch, reason: str) -> None:
        """Send a dead letter about a batch that cannot be read, with its bytes. As ``dead_letter``."""
        own = {**self._headers(slot, batch.base_offset, 1, reason), VALUE: b"batch"}
        try:
            self._send(bytes(batch.content), None, own, None)
        except TooLargeError:
            self._send(b"", None, own, None)
        self._log.error(
            "a batch that cannot be read becomes a dead letter", topic=slot[0], partition=slot[1],
            offset=batch.base_offset, messages=batch.record_count, dead_letters=self.topic, error=reason,
        )  # fmt: skip

    def _headers(self, slot: TopicPartition, offset: int, failures: int, reason: str) -> dict[str, bytes]:
        fields = {
            "reason": reason, "topic": slot[0], "partition": slot[1], "offset": offset,
            "log": self._log_at(slot, offset), "attempts": failures, "member": self._member,
        }  # fmt: skip
        return {HEADER + name: str(value).encode()[:REASON_BYTES_MAX] for name, value in fields.items()}

    def _send(self, value: bytes | None, key: bytes | None, headers: Mapping[str, bytes], tag: str | None) -> None:
        self._producer.run(lambda made: made.send(self.topic, value or b"", key=key, headers=headers, tag=tag))

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()
