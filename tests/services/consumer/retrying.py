"""What tests of retries share: a listener in a thread, and what the group has saved."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import txmq
from tests.services.consumer.consuming import WAIT_S
from txmq.client.consumer.consumer import Consumer, ConsumerOptions
from txmq.client.consumer.retry.retry_store import RetryStore
from txmq.errors import UnknownGroupError
from txmq.model import Message
from txmq.testing.eventually import eventually

TOPIC, GROUP = "orders", "billing"
NOW = ConsumerOptions(retry_delay=0.0, deferred_delay=0.0, deferred_retries=3)
LATER = ConsumerOptions(retry_delay=0.0, deferred_delay=3600.0)
IN_ORDER = ConsumerOptions(retry_delay=0.0, deferred_delay=3600.0, keep_key_order=True)


class Listening:
    """A consumer and what its listener saw."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.seen: list[Message] = []

    @property
    def values(self) -> list[bytes]:
        """In the order of delivery."""
        return [message.value or b"" for message in self.seen]

    def wait(self, count: int) -> None:
        """Until so many were delivered."""
        eventually(lambda: len(self.seen) >= count, lambda: f"{count} deliveries, {self.values} so far")


@contextmanager
def listening(
    client: txmq.Client, store: str | None, options: ConsumerOptions, fails: Callable[[Message], bool],
    max_retries: int = 0, threads: int = 2,
) -> Iterator[Listening]:  # fmt: skip
    """A member of the group, whose listener fails where it is told."""
    consumer = client.consumer(GROUP, [TOPIC], max_retries=max_retries, retry_store=store, options=options)
    found = Listening(consumer)

    def handle(message: Message) -> None:
        found.seen.append(message)
        if fails(message):
            raise ValueError("cannot")

    thread = threading.Thread(target=lambda: consumer.run(handle, threads=threads))
    thread.start()
    try:
        yield found
    finally:
        consumer.close()
        thread.join(WAIT_S)


def clear(client: txmq.Client) -> None:
    """Make a broker that tests share as good as new."""
    for topic in client.topics.list():
        client.topics.delete(topic.name)
    with suppress(UnknownGroupError):
        client.groups.delete(GROUP)


def kept(path: Path) -> list[bytes | None]:
    """The values in a file of deferred messages."""
    with closing(RetryStore(path)) as store:
        return [row.message.value for row in store.read()]


def never(_message: Message) -> bool:
    """Nothing fails."""
    return False


def bad(message: Message) -> bool:
    """What is bad fails always."""
    return (message.value or b"").startswith(b"bad")


def saved(client: txmq.Client, partition: int = 0) -> tuple[int | None, list[list[int]] | None]:
    """The group's offset, and offsets with failures of what is deferred."""
    try:
        row = client.groups.describe(GROUP)["partitions"][partition]
    except UnknownGroupError:
        return None, None
    text = row["deferred"]
    return row["offset"], [found[:2] for found in json.loads(text)] if text else None
