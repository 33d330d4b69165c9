"""The retry store: what was put is on disk, once, bounded; and what the group's saved offset says about it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.open_files import open_files
from txmq.client.consumer.consumed_partition import DEFERRED_MESSAGES_MAX, ConsumedPartition, Waiting
from txmq.client.consumer.retry.deferred import deferred_text, parsed
from txmq.client.consumer.retry.retry_store import RetryStore, Stored
from txmq.errors import StorageError
from txmq.model import Message
from txmq.protocol.group_rows import DEFERRED_SIZE_MAX


def stored(offset: int, group: str = "g", value: bytes = b"v", failures: int = 3) -> Stored:
    """A row."""
    message = Message("t", 1, offset, b"\x00k", value, {"h": b"\xff"}, "tag", 17, "tx")
    return Stored(group, message, failures, "why")


def test_what_was_put_is_there_for_whoever_opens_file_next(tmp_path: Path) -> None:
    first = RetryStore(tmp_path / "r")
    assert first.put([stored(4)])
    assert first.put([stored(2)])
    second = RetryStore(tmp_path / "r")  # no close before: as after a death
    assert second.read("g") == [stored(2), stored(4)]
    assert second.partition("g", "t", 1) == {2: stored(2), 4: stored(4)}
    assert second.partition("g", "t", 0) == {}
    assert second.read("other") == []
    first.close()
    second.close()


def test_messages_are_their_owners_alone(tmp_path: Path) -> None:
    store = RetryStore(tmp_path / "r")
    store.put([stored(4)])
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    store.close()
    assert modes == dict.fromkeys(["r", "r-wal", "r-shm"], 0o600)


def test_a_message_put_again_replaces_itself_and_is_removed_once(tmp_path: Path) -> None:
    store = RetryStore(tmp_path / "r")
    store.put([stored(4)])
    store.put([stored(4, group="h")])
    store.put([stored(4, failures=9)])
    assert [row.attempts for row in store.read()] == [9, 3]
    assert store.remove("g", "t", 1, 4)
    assert not store.remove("g", "t", 1, 4)
    assert store.read() == [stored(4, group="h")]
    store.close()


def test_a_full_store_refuses_but_lets_a_message_replace_itself(tmp_path: Path) -> None:
    store = RetryStore(tmp_path / "r", size_bytes_max=1500)
    assert store.put([stored(1, value=b"x" * 1000)])
    assert not store.put([stored(2, value=b"x" * 1000)])
    assert store.put([stored(1, value=b"x" * 1000, failures=4)])
    assert [row.attempts for row in store.read()] == [4]
    store.close()


def test_file_is_forced_at_every_commit_and_of_known_version(tmp_path: Path) -> None:
    store = RetryStore(tmp_path / "r")
    assert store._database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store._database.execute("PRAGMA user_version=99")
    store.close()
    with pytest.raises(StorageError, match="version 99") as refused:
        RetryStore(tmp_path / "r")
    assert open_files(tmp_path) == []
    assert refused.value  # which holds what its frames hold
    (tmp_path / "bad").write_bytes(b"not a database at all, and long enough to be taken for one" * 20)
    with pytest.raises(StorageError) as told:
        RetryStore(tmp_path / "bad")
    assert isinstance(told.value.__cause__, sqlite3.Error)


def test_what_is_deferred_below_the_position_travels_with_it() -> None:
    consumed = ConsumedPartition(("t", 0), 1, 10, 10)
    assert deferred_text(consumed) is None
    consumed.deferred = {7: Waiting(None, 4, None), 3: Waiting(None, 6, 99), 10: Waiting(None, 4, None)}
    text = deferred_text(consumed)
    assert text == "[[3,6,99],[7,4,null]]"
    found = parsed(text)
    assert [(at, item.failures, item.key_crc) for at, item in found.items()] == [(3, 6, 99), (7, 4, None)]
    assert parsed(None) == {}
    with pytest.raises(StorageError):
        parsed("something else")


def test_longest_deferred_text_is_one_that_the_broker_takes() -> None:
    last = (1 << 63) - 1
    consumed = ConsumedPartition(("t", 0), 1, last, None)
    for number in range(DEFERRED_MESSAGES_MAX):
        consumed.deferred[last - 1 - number] = Waiting(None, 10**9, (1 << 32) - 1, copy=last)
    text = deferred_text(consumed) or ""
    assert text.count("[") == DEFERRED_MESSAGES_MAX + 1
    assert len(text) <= DEFERRED_SIZE_MAX


def test_message_deferred_is_out_once_and_counts_as_under_way() -> None:
    consumed = ConsumedPartition(("t", 0), 1, 10, 10)
    consumed.deferred = {7: Waiting(stored(7).message, 4, None, due_at=5.0), 8: Waiting(None, 4, None)}
    assert consumed.take(9, 4.0) == []
    assert [message.offset for message in consumed.take(9, 5.0)] == [7]
    assert consumed.take(9, 6.0) == []
    assert consumed.under_way == 1
    consumed.seek(8)
    assert list(consumed.deferred) == [7]
    consumed.seek(7)
    assert consumed.deferred == {}
