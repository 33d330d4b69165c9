"""The spool: what was appended is there after any end, in order, bounded, and of one owner."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.open_files import open_files
from txmq.client.producer.core import TopicRef
from txmq.client.spooling.spool import EPOCH_MAX, FILE_NAME, AssignedSequence, Held, Spool, SpoolIdentity
from txmq.errors import DirectoryInUseError, SpoolFullError, StorageError

PARTITION = ("orders", 3)
IDENTITY = SpoolIdentity(2**64 - 1, 2**63, 17, 0)
SECRET = "5e" * 16


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path / "spool")
    yield opened
    opened.close()


def _values(spool: Spool) -> list[bytes]:
    return [entry.content for entry in spool.head(PARTITION, 100)]


def test_messages_are_their_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(mode=0o755)
    with closing(Spool(tmp_path / "spool")) as spool:
        spool.append(PARTITION, b"a secret", 1)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "spool").iterdir()}
    assert modes == dict.fromkeys(["lock", FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"], 0o600)


def test_batches_come_out_in_order_in_which_they_went_in(spool: Spool) -> None:
    for value in (b"1", b"2", b"3"):
        spool.append(PARTITION, value, 1)
    spool.append(("orders", 4), b"another partition's", 1)
    assert _values(spool) == [b"1", b"2", b"3"]
    assert spool.waiting == {PARTITION: 3, ("orders", 4): 1}


def test_batch_and_number_are_there_after_the_spool_is_reopened(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    assigned = AssignedSequence(IDENTITY, 2**31 - 1, 12)
    spool.append(PARTITION, b"sent", 5, assigned)
    spool.append(PARTITION, b"not sent", 6)
    spool.remember_topic("orders", TopicRef(7, 4))
    spool.remember_session(IDENTITY, SECRET)
    spool.close()
    spool = Spool(tmp_path)
    first, second = spool.head(PARTITION, 10)
    assert (first.assigned, second.assigned, first.created_ms) == (assigned, None, 5)
    assert (spool.topics(), spool.sessions()) == ({"orders": TopicRef(7, 4)}, [IDENTITY])
    assert (spool.waiting, spool.size_bytes) == ({PARTITION: 2}, 12)
    spool.close()


def test_what_was_appended_survives_kill_9(tmp_path: Path) -> None:
    code = (
        "import sys; from txmq.client.spooling.spool import Spool; s = Spool(sys.argv[1])\n"
        "for n in range(10**9): s.append(('orders', 3), b'%d' % n, 1); print(n, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        seen = [child.stdout.readline() for _ in range(20)]
        os.kill(child.pid, signal.SIGKILL)
        seen += child.stdout.readlines()
    spool = Spool(tmp_path)
    count = spool.count(PARTITION)
    assert len([line for line in seen if line.endswith(b"\n")]) <= count
    assert [entry.content for entry in spool.head(PARTITION, 10**6)] == [b"%d" % number for number in range(count)]
    spool.close()


def test_every_append_is_synced(spool: Spool) -> None:
    # What the SQLite manual calls FULL (2): the write-ahead log is synced at each commit.
    assert spool._database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert spool._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_full_spool_refuses_with_a_reason(tmp_path: Path) -> None:
    spool = Spool(tmp_path, size_bytes_max=10)
    spool.append(PARTITION, b"12345678", 1)
    with pytest.raises(SpoolFullError, match=r"8 bytes and cannot take 3 more \(spool_size_bytes_max 10\)"):
        spool.append(PARTITION, b"abc", 1)
    assert _values(spool) == [b"12345678"]
    spool.done(spool.head(PARTITION, 1))
    spool.append(PARTITION, b"abc", 1)
    assert (_values(spool), spool.size_bytes) == ([b"abc"], 3)
    spool.close()


def test_batch_of_unknown_fate_finds_room_in_full_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path, size_bytes_max=10)
    spool.append(PARTITION, b"1234567890", 1)
    spool.append(PARTITION, b"sent", 1, AssignedSequence(IDENTITY, 0, 0))
    assert spool.count(PARTITION) == 2
    spool.close()


def test_a_second_owner_is_refused_and_a_reader_is_not(spool: Spool) -> None:
    spool.append(PARTITION, b"1", 1)
    with pytest.raises(DirectoryInUseError, match=str(os.getpid())):
        Spool(spool.path)
    reader = Spool(spool.path, read_only=True)
    assert _values(reader) == [b"1"]
    reader.close()


def test_directory_without_spool_is_not_made_one_by_looking(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no spool"):
        Spool(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


def test_a_spool_of_another_version_is_refused_with_its_version(tmp_path: Path) -> None:
    Spool(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(StorageError, match="version 9"):
        Spool(tmp_path)


def test_a_file_that_is_no_database_is_refused_as_damaged(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"x" * 4096)
    with pytest.raises(StorageError, match="not a database"):
        Spool(tmp_path)


@pytest.mark.parametrize("damage", ["PRAGMA user_version = 9", "DROP TABLE batches"])
def test_a_spool_that_is_refused_is_let_go_of(tmp_path: Path, damage: str) -> None:
    Spool(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as database:
        database.execute(damage)
    with pytest.raises(StorageError) as refused:
        Spool(tmp_path)
    assert open_files(tmp_path) == []
    with pytest.raises(StorageError, match=re.escape(str(refused.value))):  # not: another process has it
        Spool(tmp_path)


def test_a_spool_of_another_process_is_not_held_open(tmp_path: Path) -> None:
    with closing(Spool(tmp_path)):
        before = open_files(tmp_path)
        with pytest.raises(DirectoryInUseError):
            Spool(tmp_path)
        assert open_files(tmp_path) == before
    assert open_files(tmp_path) == []


def test_pins_stay_until_they_are_taken_back(spool: Spool) -> None:
    for value in (b"1", b"2", b"3"):
        spool.append(PARTITION, value, 1)
    entries = spool.head(PARTITION, 3)
    sequences = [AssignedSequence(IDENTITY, number, 0) for number in range(3)]
    spool.assign(list(zip(entries, sequences, strict=True)))
    assert [entry.assigned for entry in spool.head(PARTITION, 3)] == sequences
    spool.unassign([entries[0].number])
    assert [entry.assigned for entry in spool.head(PARTITION, 3)] == [None, *sequences[1:]]


def test_parked_batch_is_deferred_and_its_followers_are_renumbered(spool: Spool) -> None:
    for value in (b"poison", b"2", b"3"):
        spool.append(PARTITION, value, 1)
    other = AssignedSequence(SpoolIdentity(1, 2, 3, 4), 9, 0)
    entries = spool.head(PARTITION, 3)
    spool.assign(
        [
            (entries[0], AssignedSequence(IDENTITY, 0, 0)),
            (entries[1], AssignedSequence(IDENTITY, 1, 0)),
            (entries[2], other),
        ]
    )
    spool.park(spool.head(PARTITION, 1)[0], "too large", renumber=True)
    assert [(entry.content, entry.assigned) for entry in spool.head(PARTITION, 3)] == [(b"2", None), (b"3", other)]
    (parked,) = spool.parked()
    assert (parked.content, parked.reason, parked.is_parked) == (b"poison", "too large", True)
    assert (spool.count(PARTITION), spool.unpark(), spool.count(PARTITION)) == (2, 1, 3)
    assert spool.head(PARTITION, 1)[0].content == b"poison"


def test_counts_follow_file_after_write_that_was_cut_short(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.append(PARTITION, b"1", 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spool, "_add", interrupted)  # after the commit
    with pytest.raises(KeyboardInterrupt):
        spool.append(PARTITION, b"2", 1)
    monkeypatch.undo()
    assert (spool.count(PARTITION), spool.size_bytes, _values(spool)) == (2, 2, [b"1", b"2"])
    spool.append(PARTITION, b"3", 1)
    assert spool.count(PARTITION) == 3


def _commits(spool: Spool) -> list[str]:
    """The commits from now on."""
    seen: list[str] = []
    spool._database.set_trace_callback(lambda statement: seen.append(statement) if statement == "COMMIT" else None)
    return seen


def test_threads_that_spool_concurrently_share_one_synced_transaction(spool: Spool) -> None:
    commits = _commits(spool)
    tickets = [spool.enqueue(("orders", number % 4), b"%d" % number, 1) for number in range(100)]
    assert (spool.count(PARTITION), spool.head(PARTITION, 100)) == (25, [])
    threads = [threading.Thread(target=spool.wait_synced, args=(ticket,)) for ticket in reversed(tickets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(commits) == 1
    assert [ticket.number for ticket in tickets] == list(range(1, 101))
    assert [entry.content for entry in spool.entries()] == [b"%d" % number for number in range(100)]
    assert spool.waiting == {("orders", number): 25 for number in range(4)}


def test_misfit_is_refused_and_its_company_is_written(tmp_path: Path) -> None:
    spool = Spool(tmp_path, size_bytes_max=10)
    small, large, other = (spool.enqueue(PARTITION, content, 1) for content in (b"1234", b"12345678", b"5678"))
    assert spool.wait_synced(other) == 2
    with pytest.raises(SpoolFullError, match="4 bytes and cannot take 8 more"):
        spool.wait_synced(large)
    assert spool.wait_synced(small) == 1
    assert (_values(spool), spool.waiting, spool.size_bytes) == ([b"1234", b"5678"], {PARTITION: 2}, 8)
    spool.close()


def _interrupted_before(commit: Callable[[], None]) -> None:
    raise KeyboardInterrupt


def _interrupted_behind(commit: Callable[[], None]) -> None:
    commit()
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", [_interrupted_before, _interrupted_behind])
def test_what_others_enqueued_is_written_once_though_writer_was_interrupted(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[[Callable[[], None]], None]
) -> None:
    tickets = [spool.enqueue(PARTITION, b"%d" % number, 1) for number in range(3)]
    commit = spool._commit
    monkeypatch.setattr(spool, "_commit", lambda: interrupted(commit))
    with pytest.raises(KeyboardInterrupt):
        spool.wait_synced(tickets[1])
    assert spool.count(PARTITION) == 3
    monkeypatch.undo()
    spool.wait_synced(tickets[2])
    assert _values(spool) == [b"0", b"1", b"2"]
    assert all(ticket.is_done for ticket in tickets)
    assert (spool.count(PARTITION), spool.size_bytes) == (3, 3)


def test_what_nobody_waits_for_is_written_at_the_end(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.enqueue(PARTITION, b"1", 1)
    spool.close()
    with Spool(tmp_path, read_only=True) as reader:
        assert _values(reader) == [b"1"]


def test_a_disk_that_fails_is_told_to_all_who_wait(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = [spool.enqueue(PARTITION, b"1", 1) for _ in range(2)]

    def failed() -> None:
        raise StorageError("failed")

    monkeypatch.setattr(spool, "_commit", failed)
    for ticket in tickets:
        with pytest.raises(StorageError, match="failed"):
            spool.wait_synced(ticket)
    assert spool.count(PARTITION) == 0


def test_a_row_of_several_messages_counts_as_many(spool: Spool) -> None:
    spool.wait_synced(spool.enqueue(PARTITION, b"three", 1, AssignedSequence(IDENTITY, 5, 0), 3))
    spool.append(PARTITION, b"one", 1)
    assert (spool.count(PARTITION), [entry.messages for entry in spool.entries()]) == (4, [3, 1])
    assert spool.summary()[0][2:4] == (4, 0)
    spool._recount()
    assert spool.count(PARTITION) == 4
    spool.done(spool.head(PARTITION, 1))
    assert spool.count(PARTITION) == 1


def test_head_is_cut_by_size_and_holds_one_message(spool: Spool) -> None:
    for value in (b"1234", b"5678", b"9"):
        spool.append(PARTITION, value, 1)
    for size, contents in ((9, [b"1234", b"5678", b"9"]), (8, [b"1234", b"5678"]), (7, [b"1234"]), (1, [b"1234"])):
        assert [entry.content for entry in spool.head(PARTITION, 10, size)] == contents


def test_what_is_meant_for_one_topic_is_parked_together(spool: Spool) -> None:
    for topic_id in (7, 7, 0, 8):
        ticket = spool.enqueue(PARTITION, b"1", 1, None, 2, topic_id)
        spool.wait_synced(ticket)
    spool.wait_synced(spool.enqueue(("orders", 4), b"1", 1, topic_id=7))
    spool.park_topic(spool.entries()[0], "gone")
    assert [(entry.topic_id, entry.is_parked) for entry in spool.entries()] == [
        (7, True), (7, True), (0, False), (8, False), (7, False)
    ]  # fmt: skip
    assert spool.waiting == {PARTITION: 4, ("orders", 4): 1}
    spool._recount()
    assert spool.waiting == {PARTITION: 4, ("orders", 4): 1}
    assert spool.unpark() == 4
    assert [entry.topic_id for entry in spool.head(PARTITION, 9)] == [0, 0, 0, 8]


def test_each_process_that_takes_a_session_raises_its_epoch(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        spool.remember_session(IDENTITY, SECRET)
    taken = []
    for _ in range(3):
        with Spool(tmp_path) as spool:
            taken.append(spool.take_session(IDENTITY))
    assert taken == [Held(SECRET, 1), Held(SECRET, 2), Held(SECRET, 3)]
    assert SECRET not in repr(taken)


def test_ended_session_keeps_its_secret_while_a_batch_names_it(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        spool.append(PARTITION, b"1", 1, AssignedSequence(IDENTITY, 5, 0))
        spool.remember_session(IDENTITY, SECRET)
        spool.forget_session(IDENTITY)
        assert spool.sessions() == []
    with Spool(tmp_path) as spool:
        assert spool.take_session(IDENTITY).secret == SECRET
        spool.done(spool.entries())
    with Spool(tmp_path) as spool:
        assert spool.take_session(IDENTITY).secret == ""


def test_an_epoch_stops_at_what_a_batch_can_carry(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        spool.remember_session(SpoolIdentity(1, 2, 3, EPOCH_MAX), SECRET)
        assert spool.take_session(SpoolIdentity(1, 2, 3, EPOCH_MAX)).epoch == EPOCH_MAX
