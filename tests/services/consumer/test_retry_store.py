"""Deferred messages, against a real broker: the partition moves on, restarts, kill -9, takeover, the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from txmq.client.consumer.consumer import ConsumerOptions
from txmq.client.consumer.retry.file_store import RetryStore
from txmq.model import Message
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

TOPIC, GROUP, WAIT_S = "orders", "billing", 60.0
NOW = ConsumerOptions(retry_delay=0.0, deferred_delay=0.0, deferred_retries=3)
LATER = ConsumerOptions(retry_delay=0.0, deferred_delay=3600.0)


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client of a broker with three messages in one partition."""
    with txmq.connect(broker.address) as made:
        made.topics.create(TOPIC)
        for value in (b"one", b"bad", b"two"):
            made.producer().send(TOPIC, value, key=b"k")
        yield made


def deferred(client: txmq.Client) -> tuple[int | None, object]:
    """What the group has saved: the offset, and offsets with failures of what is deferred."""
    body = client.control.call("group", "describe", GROUP, timeout=5.0, body=[b""])
    rows = json.loads(body)["partitions"]
    text = rows[0]["deferred"]
    return rows[0]["offset"], [row[:2] for row in json.loads(text)] if text else None


def run(client: txmq.Client, store: Path | None, options: ConsumerOptions, fails: int, count: int) -> list[bytes]:
    """A listener to which ``bad`` fails so often; what it saw, once that is ``count`` messages."""
    seen: list[bytes] = []

    def handle(message: Message) -> None:
        seen.append(message.value or b"")
        if message.value == b"bad" and seen.count(b"bad") <= fails:
            raise ValueError("cannot")

    path = str(store) if store is not None else None
    consumer = client.consumer(GROUP, [TOPIC], max_retries=1, retry_store=path, options=options)
    thread = threading.Thread(target=lambda: consumer.run(handle))
    thread.start()
    eventually(lambda: len(seen) >= count, f"{count} deliveries")
    consumer.close()
    thread.join(WAIT_S)
    return seen


def test_deferred_message_lets_the_partition_go_on_and_comes_later(client: txmq.Client, tmp_path: Path) -> None:
    store = tmp_path / "retry"
    assert run(client, store, LATER, 99, 4) == [b"one", b"bad", b"bad", b"two"]
    assert deferred(client) == (3, [[1, 2]])
    assert [row.message.value for row in RetryStore(store).read()] == [b"bad"]
    assert run(client, store, LATER, 0, 1) == [b"bad"]
    assert deferred(client) == (3, None)
    assert RetryStore(store).read() == []


@pytest.mark.parametrize("has_store", [True, False])
def test_another_host_takes_over_what_was_deferred(client: txmq.Client, tmp_path: Path, has_store: bool) -> None:
    run(client, tmp_path / "lost", LATER, 99, 4)
    assert run(client, tmp_path / "new" if has_store else None, LATER, 0, 1) == [b"bad"]
    assert deferred(client) == (3, None)
    # the first host comes back with its old row: it is not delivered once more
    client.producer().send(TOPIC, b"three")
    assert run(client, tmp_path / "lost", NOW, 0, 1) == [b"three"]
    assert RetryStore(tmp_path / "lost").read() == []


def test_after_limit_it_is_dead_letter_with_where_and_why(client: txmq.Client, tmp_path: Path) -> None:
    seen = run(client, tmp_path / "retry", NOW, 99, 7)
    assert seen.count(b"bad") == 5  # 1 + max_retries, and deferred_retries
    assert deferred(client) == (3, None)
    (dead,) = client.browse(f"{GROUP}.dead-letter")
    assert (dead.value, dead.key, dead.headers["txmq.dead.attempts"]) == (b"bad", b"k", b"5")
    assert (dead.headers["txmq.dead.topic"], dead.headers["txmq.dead.offset"]) == (TOPIC.encode(), b"1")
    assert b"cannot" in dead.headers["txmq.dead.reason"]


def test_a_reset_of_the_group_keeps_what_is_deferred(client: txmq.Client, tmp_path: Path) -> None:
    run(client, tmp_path / "retry", LATER, 99, 4)
    client.groups.reset(GROUP, [[TOPIC, 0, 2]])
    assert deferred(client) == (2, [[1, 2]])
