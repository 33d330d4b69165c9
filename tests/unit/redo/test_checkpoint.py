"""Checkpoints: two are kept, the newest good one is found, nothing good goes before something newer is durable."""

from __future__ import annotations

import errno
import random

import pytest
from crc32c import crc32c

from tools.simulated.crash_images import enumerate_images
from tools.simulated.disk import SimDisk
from txmq.errors import CorruptRecordError, DirectoryInUseError, StorageError
from txmq.model import Lsn
from txmq.redo.checkpoint import (
    VERSION,
    Checkpoint,
    encode_payload_files,
    list_lsns,
    load_newest,
    oldest_kept_lsn,
    path_of,
    read,
    write,
)

from .support import NODE, content, put


def _checkpoint(lsn: int, state: bytes = b"state") -> Checkpoint:
    files = encode_payload_files((1, lsn, 7, 2, 1, 8), lambda: None)
    return Checkpoint(Lsn(lsn), 0xABCDEF01, 3, state + b" %d" % lsn, files)


def _write(disk: SimDisk, *lsns: int) -> None:
    for lsn in lsns:
        write(disk, _checkpoint(lsn), node_id=NODE)


def test_a_new_directory_has_none() -> None:
    disk = SimDisk()
    assert load_newest(disk, node_id=NODE) == (None, None)
    assert oldest_kept_lsn(disk) == 0


def test_what_was_written_is_read_after_a_power_loss() -> None:
    disk = SimDisk()
    big = Checkpoint(Lsn(7), 0, 1, random.Random(1).randbytes(100_000))
    write(disk, big, node_id=NODE)
    assert load_newest(disk.crash(), node_id=NODE) == (big, None)


def test_payload_files_are_those_that_were_listed() -> None:
    disk, ways = SimDisk(), list[None]()
    numbers = [number for transaction in range(5000) for number in (transaction, 1, 7)]
    files = encode_payload_files(numbers, lambda: ways.append(None))
    write(disk, Checkpoint(Lsn(9), 0, 1, b"", files), node_id=NODE)
    assert read(disk, 9, node_id=NODE).file_of() == {(transaction, 1): 7 for transaction in range(5000)}
    assert len(ways) == 3


def test_an_empty_state_is_a_state() -> None:
    disk = SimDisk()
    write(disk, Checkpoint(Lsn(0), 0, 0, b""), node_id=NODE)
    assert load_newest(disk, node_id=NODE)[0] == Checkpoint(Lsn(0), 0, 0, b"")


def test_two_newest_are_kept_with_the_journal_of_the_older() -> None:
    disk = SimDisk()
    _write(disk, 100)
    assert oldest_kept_lsn(disk) == 0  # alone, its damage would leave nothing but the whole journal
    _write(disk, 200)
    assert oldest_kept_lsn(disk) == 100
    _write(disk, 300, 400)
    assert list_lsns(disk) == [300, 400]
    assert oldest_kept_lsn(disk) == 300


def test_checkpoint_of_an_equal_lsn_replaces() -> None:
    disk = SimDisk()
    _write(disk, 100, 200)
    write(disk, _checkpoint(200, b"newer"), node_id=NODE)
    newest, _ = load_newest(disk, node_id=NODE)
    assert newest is not None
    assert newest.state == b"newer 200"
    assert list_lsns(disk) == [100, 200]


def test_damaged_newest_is_passed_over_with_note_that_names_it() -> None:
    disk = SimDisk()
    _write(disk, 100, 200)
    disk.damage(path_of(200), 5, b"\0")
    newest, note = load_newest(disk, node_id=NODE)
    assert newest == _checkpoint(100)
    assert note is not None
    assert path_of(200) in note


def test_a_damaged_one_is_not_counted_among_the_two() -> None:
    disk = SimDisk()
    _write(disk, 100, 200)
    disk.damage(path_of(200), 5, b"\0")
    _write(disk, 300)
    assert list_lsns(disk) == [100, 300]


def test_flipped_bit_in_any_byte_and_any_length_is_found() -> None:
    disk = SimDisk()
    _write(disk, 100)
    whole = content(disk, path_of(100))
    for position in range(len(whole)):
        for mask in (1, 0x20, 0x80):
            put(disk, path_of(100), whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :])
            with pytest.raises(CorruptRecordError):
                read(disk, 100, node_id=NODE)
        put(disk, path_of(100), whole[:position])
        with pytest.raises(CorruptRecordError):
            read(disk, 100, node_id=NODE)
    put(disk, path_of(100), whole + b"x")
    with pytest.raises(CorruptRecordError):
        read(disk, 100, node_id=NODE)


def test_renamed_or_foreign_checkpoint_is_refused() -> None:
    disk = SimDisk()
    _write(disk, 100)
    put(disk, path_of(200), content(disk, path_of(100)))
    with pytest.raises(CorruptRecordError, match="name"):
        read(disk, 200, node_id=NODE)
    disk.unlink(path_of(200))
    with pytest.raises(DirectoryInUseError):
        load_newest(disk, node_id=NODE + 1)


@pytest.mark.parametrize(("version", "advice"), [(VERSION + 1, "upgrade"), (VERSION - 1, "the txmq that wrote it")])
def test_another_version_is_refused_and_not_passed_over(version: int, advice: str) -> None:
    disk = SimDisk()
    _write(disk, 100, 200)
    text = b"txmq-checkpoint %d of another shape" % version
    put(disk, path_of(200), text + b" %08x\n" % crc32c(text))
    with pytest.raises(StorageError, match=advice):
        load_newest(disk, node_id=NODE)


def test_leftovers_of_a_write_that_was_cut_off_are_removed() -> None:
    disk = SimDisk()
    _write(disk, 100)
    put(disk, path_of(200) + ".tmp", b"half")
    assert load_newest(disk, node_id=NODE)[0] == _checkpoint(100)
    assert disk.list_directory("checkpoint") == [path_of(100).partition("/")[2]]


def test_found_checkpoint_is_made_durable_before_use() -> None:
    disk = SimDisk()
    _write(disk, 100)
    file = disk.open(path_of(200), create=True)
    file.pwrite(content(disk, path_of(100)).replace(b"100", b"200"), 0)  # only the entry matters here
    file.fsync()
    killed = disk.kill()  # died between the rename and the sync of the directory
    load_newest(killed, node_id=NODE)
    assert killed.crash().exists(path_of(200))


def test_every_crash_image_of_three_checkpoints_has_last_acknowledged_one() -> None:
    disk = SimDisk(record=True)
    for lsn in (100, 200, 300):
        _write(disk, lsn)
        disk.note(lsn)
    assert disk.trace is not None
    count = 0
    for label, image in enumerate_images(disk.trace):
        acknowledged = max(image.notes, default=0, key=lambda note: note if isinstance(note, int) else 0)
        newest, note = load_newest(image, node_id=NODE)
        assert note is None, label
        assert (newest.lsn if newest else 0) in (acknowledged, 100, 200, 300), label
        assert newest is None or newest == _checkpoint(newest.lsn), label
        assert (newest.lsn if newest else 0) >= (acknowledged if isinstance(acknowledged, int) else 0), label
        count += 1
    assert count > 30


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_anywhere_while_writing_leaves_the_last_good_one(number: int) -> None:
    nth = 0
    while True:
        nth += 1
        disk = SimDisk(random.Random(nth))
        _write(disk, 100, 200)
        disk.fail_at(nth, number)
        try:
            _write(disk, 300)
        except OSError:
            newest, _ = load_newest(disk.crash(), node_id=NODE)
            assert newest in (_checkpoint(200), _checkpoint(300))
            continue
        break
    assert nth > 4
