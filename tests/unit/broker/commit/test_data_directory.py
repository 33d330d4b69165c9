"""The store: falling back to the older checkpoint, the epoch of a life, what a crash left half removed."""

from __future__ import annotations

import errno
import re

import pytest

from tools.images.check import comparable
from tools.images.node import Client, Node
from tools.images.requests import batch
from tools.simulated.disk import SimDisk
from tools.simulated.file import Kind
from txmq.broker.commit.retention import Removals
from txmq.errors import CorruptRecordError, StorageError
from txmq.log.batch import TIMESTAMP_MS_MAX
from txmq.log.file_cache import FileCache
from txmq.redo import checkpoint

from ...redo.support import content
from ...redo.support import put as put_file
from ..support import node, prepare, put, restarted, values


def _damage(broker: Node, lsn: int) -> None:
    broker.disk.damage(checkpoint.path_of(lsn), 300, b"\xff\xff")


def _with_two_checkpoints() -> Node:
    """Two checkpoints with a settled transaction and several journal files between them."""
    broker = node()
    client = broker.session()
    for counter in (1, 2):
        prepare(client, broker.txid(1, counter), ("a", 0, batch(b"%d" % counter)), keys=str(counter))
    broker.checkpoint()
    for _ in range(8):
        put(client, bytes(4000), partition=1)
    client.ask("commit", broker.txid(1, 1), body=b"")
    broker.checkpoint()
    put(client, b"3")
    return broker


def test_a_damaged_checkpoint_costs_a_longer_redo_and_nothing_else() -> None:
    broker = _with_two_checkpoints()
    lsns = checkpoint.list_lsns(broker.disk)
    assert len(lsns) == 2
    _damage(broker, lsns[1])
    again = Node(broker.disk.crash(), broker.settings)
    assert "passed over" in again.recovered.notes[0]
    assert comparable(again.state) == comparable(broker.state)
    assert values(again) == [b"1", b"3"]
    assert again.connect().ask("commit", again.txid(1, 2), body=b"").text == "a 0 2 1\n"


def test_where_no_checkpoint_can_be_read_broker_does_not_start() -> None:
    broker = _with_two_checkpoints()
    for lsn in checkpoint.list_lsns(broker.disk):
        _damage(broker, lsn)
    with pytest.raises(StorageError, match="no checkpoint can be read"):
        Node(broker.kill(), broker.settings)


def test_payload_files_go_when_no_kept_checkpoint_names_them() -> None:
    broker = _with_two_checkpoints()
    (name,) = broker.disk.list_directory("prepared")
    broker.connect().ask("rollback", broker.txid(1, 2))
    broker.checkpoint()
    assert broker.disk.list_directory("prepared") == [name]
    put(broker.connect())
    broker.checkpoint()
    assert broker.disk.list_directory("prepared") == []


def _prepare_many(broker: Node, client: Client, count: int) -> None:
    for counter in range(1, count + 1):
        prepare(client, broker.txid(1, counter), ("a", 0, batch(b"%d" % counter)), keys=str(counter))


def _syncs_of_checkpoint(count: int) -> int:
    broker = node()
    _prepare_many(broker, broker.session(), count)
    before = broker.disk.counts["sync"]
    broker.checkpoint()
    assert len(broker.disk.list_directory("prepared")) == 1
    again = restarted(broker)
    assert comparable(again.state) == comparable(broker.state)
    return broker.disk.counts["sync"] - before


def test_checkpoint_forces_as_many_files_however_many_are_prepared() -> None:
    assert _syncs_of_checkpoint(200) == _syncs_of_checkpoint(1)


def test_one_in_doubt_keeps_not_the_file_of_many() -> None:
    broker = node()
    client = broker.session()
    _prepare_many(broker, client, 100)
    broker.checkpoint()
    (large,) = broker.disk.list_directory("prepared")
    for counter in range(1, 60):
        client.ask("rollback", broker.txid(1, counter))
        if counter == 40:
            broker.checkpoint()
            assert broker.disk.list_directory("prepared") == [large]  # more than half of it is unsettled
    broker.checkpoint()
    assert len(broker.disk.list_directory("prepared")) == 2
    put(client)
    broker.checkpoint()
    (small,) = broker.disk.list_directory("prepared")
    assert small != large
    again = restarted(broker)
    assert comparable(again.state) == comparable(broker.state)
    put(again.connect())
    again.checkpoint()
    assert again.disk.list_directory("prepared") == [small]


def test_older_checkpoint_finds_what_newer_one_wrote_once_more() -> None:
    broker = node()
    client = broker.session()
    parts = [batch(bytes(900)) for _ in range(3)]
    for number, streamed in enumerate(parts, 1):
        client.ask("put", "a", 0, body=streamed, extensions={"tx": broker.txid(1, 9)})
        broker.checkpoint()
        assert len(broker.disk.list_directory("prepared")) == min(number, 2)  # it has grown: those of two checkpoints
    _damage(broker, checkpoint.list_lsns(broker.disk)[1])
    again = restarted(broker)  # ends the stream
    assert "passed over" in again.recovered.notes[0]
    assert not again.state.transactions


@pytest.mark.parametrize("reason", ["CRC", "missing", "0 parts"])
def test_payload_file_that_cannot_be_right_is_told(reason: str) -> None:
    broker = _with_two_checkpoints()
    disk = broker.disk.kill()
    path = f"prepared/{disk.list_directory('prepared')[0]}"
    if reason == "CRC":
        disk.damage(path, 30, b"\xff\xff")
    else:
        disk.unlink(path)
    if reason == "0 parts":
        put_file(disk, path, bytes(4))  # whole, and the CRC of nothing
    with pytest.raises(CorruptRecordError, match=reason):
        Node(disk, broker.settings)


def test_the_epoch_of_a_life_is_never_used_again() -> None:
    first = node()
    second = Node(first.disk.crash(), first.settings)
    third = Node(second.disk.crash(), first.settings)
    assert [broker.state.epoch for broker in (first, second, third)] == [1, 2, 3]
    assert third.store.journal.epoch == 3


def test_journaled_but_not_unlinked_segment_goes_at_the_next_start() -> None:
    broker = node()
    client = broker.connect()
    client.ask("topic", "alter", "a", extensions={"segment_size_bytes": 4096, "retention_size_bytes": 4096})
    for _ in range(4):
        put(client, bytes(3000))
    broker.checkpoint()
    apply = broker.store.apply
    broker.store.apply = lambda group: []  # type: ignore[method-assign]  # the process dies here
    broker.retire()
    broker.store.apply = apply  # type: ignore[method-assign]
    assert len(broker.disk.list_directory("log/1/0")) == 4
    again = Node(broker.kill(), broker.settings)
    assert len(again.disk.list_directory("log/1/0")) == 2
    assert again.partition("a").log_start == 2
    assert len(values(again)) == 2


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("power_lost", [False, True])
def test_lower_retention_frees_active_segment_and_offsets_go_on(checkpoint: bool, power_lost: bool) -> None:
    broker = node()
    client = broker.connect()
    for _ in range(3):
        put(client, bytes(10_000))
    broker.mark()  # which makes the journal's next file
    free = broker.disk.free_bytes()
    client.ask("topic", "alter", "a", extensions={"retention_ms": 1000})
    broker.clock.advance(2)
    broker.retire()
    assert broker.disk.free_bytes() > free + 29_000
    if checkpoint:
        broker.checkpoint()
    after = broker.disk.crash() if power_lost else broker.kill()
    again = Node(after, broker.settings, clock=broker.clock)
    assert (again.partition("a").log_start, values(again)) == (3, [])
    assert comparable(again.state) == comparable(broker.state)
    assert again.disk.list_directory("log/1/0") == []
    put(again.connect(), b"4")
    third = Node(again.disk.crash(), broker.settings)
    assert (third.partition("a").log_start, values(third)) == (3, [b"4"])


def test_a_deleted_topics_directory_goes_with_its_files() -> None:
    broker = node()
    client = broker.connect()
    client.ask("topic", "create", "gone", extensions={"partitions": 3})
    for number in range(2):
        put(client, topic="gone", partition=number)
    put(client)
    assert broker.disk.list_directory("log") == ["1", "3"]
    client.ask("topic", "delete", "gone")
    assert broker.disk.list_directory("log") == ["1"]
    client.ask("topic", "create", "unwritten")
    client.ask("topic", "delete", "unwritten")
    assert broker.disk.list_directory("log") == ["1"]
    assert Node(broker.disk.crash(), broker.settings).disk.list_directory("log") == ["1"]


def test_directories_of_killed_process_are_durable_after_next_checkpoint() -> None:
    """They are seen, and may not be on disk: the journal that could make them again is let go of."""
    broker = node()
    put(broker.connect(), b"1")
    broker = Node(broker.kill(), broker.settings)
    for _ in range(3):
        put(broker.connect(), b"2")
        broker.checkpoint()
    assert values(Node(broker.disk.crash(), broker.settings)) == [b"1", b"2", b"2", b"2"]


def test_what_is_no_topic_in_log_directory_is_not_touched() -> None:
    broker = node()
    put(broker.connect())
    broker.disk.make_directories("log/keep")
    with pytest.raises(StorageError, match="log/keep"):
        Node(broker.kill(), broker.settings)


@pytest.mark.parametrize("name", ["log/\u00b2", "log/1a"])
def test_name_that_only_looks_like_number_is_no_topic_either(name: str) -> None:
    broker = node()
    broker.disk.make_directories(name)
    with pytest.raises(StorageError, match="not a topic's directory"):
        Node(broker.kill(), broker.settings)


@pytest.mark.parametrize(
    "name", ["journal/spare-abc", "journal/spare-\u00b2", "journal/1.redo", "checkpoint/x", "prepared/x", "notes.txt"]
)
def test_a_stray_file_is_no_reason_not_to_start(name: str) -> None:
    broker = node()
    put(broker.connect(), b"1")
    broker.checkpoint()
    disk = broker.kill()
    disk.make_directories("prepared")
    disk.open(name, create=True).close()
    assert values(Node(disk, broker.settings)) == [b"1"]


def test_messages_whose_journal_and_checkpoints_are_lost_are_never_removed() -> None:
    broker = node()
    put(broker.connect(), b"1")
    broker.checkpoint()
    disk = broker.kill()
    for directory in ("journal", "checkpoint"):
        for name in disk.list_directory(directory):
            disk.unlink(f"{directory}/{name}")
    held = disk.list_directory("log/1/0")
    assert held
    with pytest.raises(StorageError, match="restore both"):
        Node(disk, broker.settings)
    assert disk.list_directory("log/1/0") == held


@pytest.mark.parametrize("what", ["batch", "segment", "topic"])
def test_older_journal_is_refused_and_nothing_is_removed(what: str) -> None:
    broker = node()
    client = broker.connect()
    client.ask("topic", "alter", "a", extensions={"segment_size_bytes": 4096})
    put(client, bytes(3000))
    older = {path: content(broker.disk, path) for path in _journal_and_checkpoints(broker.disk)}
    if what == "topic":
        client.ask("topic", "create", "newer")
        put(client, b"2", topic="newer")
    else:
        put(client, bytes(3000 if what == "segment" else 500))
    disk = broker.kill()
    for path in _journal_and_checkpoints(disk):
        disk.unlink(path)
    for path, data in older.items():
        put_file(disk, path, data)
    files = {path: content(disk, path) for path in _segments(disk)}
    named = {"batch": r"log/1/0/0{20}\.log from byte 3\d{3} on", "segment": r"log/1/0/0{19}1\.log", "topic": "log/3"}
    with pytest.raises(StorageError, match=f"do not know: {named[what]}. Either these two are older") as refused:
        Node(disk, broker.settings)
    assert {path: content(disk, path) for path in _segments(disk)} == files
    _set_aside(disk, re.findall(r"(log/\S+?)(?: from byte (\d+) on)?\. Either", str(refused.value)))
    assert values(Node(disk, broker.settings)) == [bytes(3000)]


def _set_aside(disk: SimDisk, named: list[tuple[str, str]]) -> None:
    """What docs/operations.md advises where nothing newer can be put back."""
    for path, size in named:
        if size:
            disk.open(path).truncate(int(size))
        elif path in _segments(disk):
            disk.unlink(path)
        else:
            Removals(disk, FileCache(disk)).drop_topic(path)


def _journal_and_checkpoints(disk: SimDisk) -> list[str]:
    return [f"{folder}/{name}" for folder in ("journal", "checkpoint") for name in disk.list_directory(folder)]


def _segments(disk: SimDisk) -> list[str]:
    partitions = [
        f"log/{topic}/{n}" for topic in disk.list_directory("log") for n in disk.list_directory(f"log/{topic}")
    ]
    return [f"{partition}/{name}" for partition in partitions for name in disk.list_directory(partition)]


def test_what_is_no_segment_is_not_touched() -> None:
    broker = node()
    put(broker.connect())
    disk = broker.kill()
    disk.open("log/1/0/notes.txt", create=True).close()
    assert Node(disk, broker.settings).disk.exists("log/1/0/notes.txt")


@pytest.mark.parametrize("checkpoint", [False, True])
def test_message_from_future_keeps_no_segment_also_after_restart(checkpoint: bool) -> None:
    broker = node()
    client = broker.connect()
    client.ask("topic", "create", "old", extensions={"segment_size_bytes": 4096, "retention_ms": 60_000})
    for _ in range(3):
        put(client, bytes(3000), topic="old", time_ms=TIMESTAMP_MS_MAX)
    broker = restarted(broker)
    if checkpoint:
        broker.checkpoint()
        broker = restarted(broker)
    broker.clock.advance(59)
    broker.retire()
    assert broker.partition("old").log_start == 0
    broker.clock.advance(2)
    broker.retire()
    assert broker.partition("old").log_start == 2


@pytest.mark.parametrize("is_taken_out", [False, True])
def test_redo_of_an_archived_segment_is_not_archived_again(is_taken_out: bool) -> None:
    broker = node()
    client = broker.connect()
    words: dict[str, str | int | None] = {"segment_size_bytes": 4096, "retention_size_bytes": 1}
    client.ask("topic", "create", "old", extensions={**words, "retention_policy": "archive"})
    put(client, bytes(1000), topic="old")
    broker.checkpoint()
    put(client, bytes(2000), topic="old")
    put(client, bytes(3000), topic="old")
    broker.retire()
    (name,) = broker.disk.list_directory("archive/3/0")
    if is_taken_out:
        broker.disk.unlink(f"archive/3/0/{name}")
    after = restarted(broker)
    assert after.disk.list_directory("archive/3/0") == ([] if is_taken_out else [name])
    assert len(after.disk.list_directory("log/3/0")) == 1
    assert len(after.messages(after.partition("old"))) == 1


@pytest.mark.parametrize("kind", ["write", "sync"])
@pytest.mark.parametrize("directory", ["checkpoint", "prepared"])
def test_checkpoint_without_space_leaves_no_file_and_its_lsn(directory: str, kind: Kind) -> None:
    broker = node()
    client = broker.session()
    prepare(client, broker.txid(1, 1), ("a", 0, batch(bytes(3000))))
    before, names = broker.store.checkpoint_lsn, broker.disk.list_directory("checkpoint")
    broker.disk.fail_at(1, errno.ENOSPC, kind, forever=True, path_prefix=directory)
    broker.checkpoint()
    assert broker.disk.list_directory("checkpoint") == names
    assert [name for name in broker.disk.list_directory("prepared") if name.endswith(".tmp")] == []
    assert broker.store.checkpoint_lsn == before
    broker.disk.clear_faults()
    broker.checkpoint()
    assert broker.store.checkpoint_lsn > before
    assert put(client, b"2").code == 200
