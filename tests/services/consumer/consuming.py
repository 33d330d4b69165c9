"""What tests of consumers share: waiting, and taking messages."""

from __future__ import annotations

import time

from txmq.client.consumer.consumer import Consumer
from txmq.model import Message

WAIT_S = 60.0


def take(consumer: Consumer, count: int) -> list[Message]:
    """So many messages, each acknowledged."""
    found: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        for message in consumer.poll(timeout=0.2):
            message.ack()
            found.append(message)
    return found


def delivered(consumer: Consumer, count: int) -> list[Message]:
    """So many messages, not acknowledged."""
    found: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        found += consumer.poll(count, timeout=0.2)
    return found


def values(messages: list[Message]) -> list[bytes]:
    """In the order of arrival."""
    return [message.value or b"" for message in messages]
