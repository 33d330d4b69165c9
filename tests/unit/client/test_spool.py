"""The spool: what was appended is there after any end, in order, bounded, and of one owner."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq.client.spool import FILE_NAME, Identity, Pin, Spool
from txmq.errors import DirectoryInUseError, SpoolFullError, StorageError

PLACE = ("orders", 3)
IDENTITY = Identity(2**64 - 1, 2**63, 17, 0)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path / "spool")
    yield opened
    opened.close()


def _values(spool: Spool) -> list[bytes]:
    return [entry.content for entry in spool.head(PLACE, 100)]


def test_batches_come_out_in_the_order_in_which_they_went_in(spool: Spool) -> None:
    for value in (b"1", b"2", b"3"):
        spool.append(PLACE, value, 1)
    spool.append(("orders", 4), b"another partition's", 1)
    assert _values(spool) == [b"1", b"2", b"3"]
    assert spool.waiting == {PLACE: 3, ("orders", 4): 1}


def test_a_batch_and_its_number_are_there_after_the_spool_is_opened_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    pin = Pin(IDENTITY, 2**31 - 1, 12)
    spool.append(PLACE, b"sent", 5, pin)
    spool.append(PLACE, b"not sent", 6)
    spool.remember_topic("orders", 4)
    spool.remember_session(IDENTITY)
    spool.close()
    spool = Spool(tmp_path)
    first, second = spool.head(PLACE, 10)
    assert (first.pin, second.pin, first.created_ms) == (pin, None, 5)
    assert (spool.topics(), spool.sessions()) == ({"orders": 4}, [IDENTITY])
    assert (spool.waiting, spool.size_bytes) == ({PLACE: 2}, 12)
    spool.close()


def test_what_was_appended_survives_kill_9(tmp_path: Path) -> None:
    code = (
        "import sys; from txmq.client.spool import Spool; s = Spool(sys.argv[1])\n"
        "for n in range(10**9): s.append(('orders', 3), b'%d' % n, 1); print(n, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        seen = [child.stdout.readline() for _ in range(20)]
        os.kill(child.pid, signal.SIGKILL)
        seen += child.stdout.readlines()
    spool = Spool(tmp_path)
    count = spool.count(PLACE)
    assert len([line for line in seen if line.endswith(b"\n")]) <= count
    assert [entry.content for entry in spool.head(PLACE, 10**6)] == [b"%d" % number for number in range(count)]
    spool.close()


def test_every_append_is_synced(spool: Spool) -> None:
    # What the SQLite manual calls FULL (2): the write-ahead log is synced at each commit.
    assert spool._database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert spool._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_full_spool_refuses_and_says_so(tmp_path: Path) -> None:
    spool = Spool(tmp_path, size_bytes_max=10)
    spool.append(PLACE, b"12345678", 1)
    with pytest.raises(SpoolFullError, match=r"8 bytes and cannot take 3 more \(spool_size_bytes_max 10\)"):
        spool.append(PLACE, b"abc", 1)
    assert _values(spool) == [b"12345678"]
    spool.done(spool.head(PLACE, 1))
    spool.append(PLACE, b"abc", 1)
    assert (_values(spool), spool.size_bytes) == ([b"abc"], 3)
    spool.close()


def test_a_batch_of_unknown_fate_finds_room_in_a_full_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path, size_bytes_max=10)
    spool.append(PLACE, b"1234567890", 1)
    spool.append(PLACE, b"sent", 1, Pin(IDENTITY, 0, 0))
    assert spool.count(PLACE) == 2
    spool.close()


def test_a_second_owner_is_refused_and_a_reader_is_not(spool: Spool) -> None:
    spool.append(PLACE, b"1", 1)
    with pytest.raises(DirectoryInUseError, match=str(os.getpid())):
        Spool(spool.path)
    reader = Spool(spool.path, read_only=True)
    assert _values(reader) == [b"1"]
    reader.close()


def test_a_directory_without_a_spool_is_not_made_one_by_looking(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no spool"):
        Spool(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


def test_a_spool_of_another_version_is_refused_with_its_version(tmp_path: Path) -> None:
    Spool(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(StorageError, match="version 9"):
        Spool(tmp_path)


def test_a_file_that_is_no_database_is_refused_as_damaged(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"x" * 4096)
    with pytest.raises(StorageError, match="not a database"):
        Spool(tmp_path)


def test_pins_stay_until_they_are_taken_back(spool: Spool) -> None:
    for value in (b"1", b"2", b"3"):
        spool.append(PLACE, value, 1)
    entries = spool.head(PLACE, 3)
    pins = [Pin(IDENTITY, number, 0) for number in range(3)]
    spool.pin(list(zip(entries, pins, strict=True)))
    assert [entry.pin for entry in spool.head(PLACE, 3)] == pins
    spool.unpin(entries[0])
    assert [entry.pin for entry in spool.head(PLACE, 3)] == [None, *pins[1:]]


def test_a_parked_batch_stands_aside_and_those_behind_it_of_its_session_are_renumbered(spool: Spool) -> None:
    for value in (b"poison", b"2", b"3"):
        spool.append(PLACE, value, 1)
    other = Pin(Identity(1, 2, 3, 4), 9, 0)
    entries = spool.head(PLACE, 3)
    spool.pin([(entries[0], Pin(IDENTITY, 0, 0)), (entries[1], Pin(IDENTITY, 1, 0)), (entries[2], other)])
    spool.park(spool.head(PLACE, 1)[0], "too large", renumber=True)
    assert [(entry.content, entry.pin) for entry in spool.head(PLACE, 3)] == [(b"2", None), (b"3", other)]
    (parked,) = spool.parked()
    assert (parked.content, parked.reason, parked.is_parked) == (b"poison", "too large", True)
    assert (spool.count(PLACE), spool.unpark(), spool.count(PLACE)) == (2, 1, 3)
    assert spool.head(PLACE, 1)[0].content == b"poison"


def test_counts_follow_the_file_after_a_write_that_was_cut_short(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.append(PLACE, b"1", 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spool, "_add", interrupted)  # behind the commit
    with pytest.raises(KeyboardInterrupt):
        spool.append(PLACE, b"2", 1)
    monkeypatch.undo()
    assert (spool.count(PLACE), spool.size_bytes, _values(spool)) == (2, 2, [b"1", b"2"])
    spool.append(PLACE, b"3", 1)
    assert spool.count(PLACE) == 3
