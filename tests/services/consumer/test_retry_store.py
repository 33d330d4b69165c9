"""Deferred messages, against a real broker: the partition moves on, restarts, kill -9, takeover, the end."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import txmq
from txmq.client.consumer.consumer import ConsumerOptions
from txmq.model import Message

from .retrying import GROUP, LATER, NOW, TOPIC, bad, kept, listening, saved


def run(client: txmq.Client, store: Path | None, options: ConsumerOptions, failures: int, count: int) -> list[bytes]:
    """Listen, with so many failures of ``bad``, until that many messages were delivered; their values."""
    delivered = itertools.count(1)

    def fails(message: Message) -> bool:
        return bad(message) and next(delivered) <= failures

    path = str(store) if store is not None else None
    with listening(client, path, options, fails, max_retries=1, threads=1) as found:
        found.wait(count)
    return found.values


def test_deferred_message_lets_the_partition_go_on_and_comes_later(client: txmq.Client, tmp_path: Path) -> None:
    store = tmp_path / "retry"
    assert run(client, store, LATER, 99, 4) == [b"one", b"bad", b"bad", b"two"]
    assert saved(client) == (3, [[1, 2]])
    assert kept(store) == [b"bad"]
    assert run(client, store, LATER, 0, 1) == [b"bad"]
    assert saved(client) == (3, None)
    assert kept(store) == []


@pytest.mark.parametrize("has_store", [True, False])
def test_another_host_takes_over_what_was_deferred(client: txmq.Client, tmp_path: Path, has_store: bool) -> None:
    run(client, tmp_path / "lost", LATER, 99, 4)
    assert run(client, tmp_path / "new" if has_store else None, LATER, 0, 1) == [b"bad"]
    assert saved(client) == (3, None)
    # the first host comes back with its old row: it is not delivered once more
    client.producer().send(TOPIC, b"three")
    assert run(client, tmp_path / "lost", NOW, 0, 1) == [b"three"]
    assert kept(tmp_path / "lost") == []


def test_after_limit_it_is_dead_letter_with_where_and_why(client: txmq.Client, tmp_path: Path) -> None:
    seen = run(client, tmp_path / "retry", NOW, 99, 7)
    assert seen.count(b"bad") == 5  # 1 + max_retries, and deferred_retries
    assert saved(client) == (3, None)
    (dead,) = client.browse(f"{GROUP}.dead-letter")
    assert (dead.value, dead.key, dead.headers["txmq.dead.attempts"]) == (b"bad", b"k", b"5")
    assert (dead.headers["txmq.dead.topic"], dead.headers["txmq.dead.offset"]) == (TOPIC.encode(), b"1")
    assert b"cannot" in dead.headers["txmq.dead.reason"]


def test_a_reset_of_the_group_keeps_what_is_deferred(client: txmq.Client, tmp_path: Path) -> None:
    run(client, tmp_path / "retry", LATER, 99, 4)
    client.groups.reset(GROUP, [[TOPIC, 0, 2]])
    assert saved(client) == (2, [[1, 2]])
