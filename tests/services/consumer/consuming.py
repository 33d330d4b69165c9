"""What tests of consumers share: waiting, and taking messages."""

from __future__ import annotations

from txmq.client.consumer.consumer import Consumer
from txmq.model import Message
from txmq.testing.eventually import WITHIN_S, eventually

WAIT_S = WITHIN_S


def take(consumer: Consumer, count: int) -> list[Message]:
    """So many messages, each acknowledged."""
    found: list[Message] = []

    def is_enough() -> bool:
        for message in consumer.poll(timeout=0.2):
            message.ack()
            found.append(message)
        return len(found) >= count

    eventually(is_enough, lambda: f"{len(found)} of {count} messages", WAIT_S)
    return found


def delivered(consumer: Consumer, count: int) -> list[Message]:
    """So many messages, not acknowledged."""
    found: list[Message] = []

    def is_enough() -> bool:
        found.extend(consumer.poll(count, timeout=0.2))
        return len(found) >= count

    eventually(is_enough, lambda: f"{len(found)} of {count} messages", WAIT_S)
    return found


def values(messages: list[Message]) -> list[bytes]:
    """In the order of arrival."""
    return [message.value or b"" for message in messages]
