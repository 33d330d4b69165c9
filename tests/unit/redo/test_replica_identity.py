"""Which replica a directory is: its starts are known again after any crash, and on a full disk."""

from __future__ import annotations

import pytest

from tools.simulated.crash_images import enumerate_images
from tools.simulated.disk import SimDisk
from txmq.errors import CorruptRecordError
from txmq.redo import replica_identity
from txmq.redo.replica_identity import PATH, SIZE_BYTES, Replica, add_start, drop_start, load_or_create

from .support import content, open_journal, put
from .test_directory_identity import SeededRandom


def _load(disk: SimDisk) -> Replica:
    return load_or_create(disk, SeededRandom(1))


def test_starts_are_known_again_after_a_power_loss() -> None:
    disk = SimDisk()
    made = _load(disk)
    assert (made.number, made.pending) == (1, ())
    for start in (7, 8):
        assert add_start(disk, start)[-1] == start
        disk = disk.crash()
    assert _load(disk) == made._replace(pending=(7, 8))


def test_every_crash_image_knows_the_starts_that_were_returned() -> None:
    disk = SimDisk(record=True)
    _load(disk)
    for start in (7, 8, 9):
        disk.note(add_start(disk, start))
    assert disk.trace is not None
    for label, image in enumerate_images(disk.trace):
        known, told = _load(image).pending, [(), *image.notes]
        assert told[-1] in (known, known[:-1]), label
        assert add_start(image, 10) == (*known, 10), label


def test_start_that_the_journal_has_is_not_pending() -> None:
    disk = SimDisk()
    _load(disk)
    for start in (7, 8, 8, 9):
        add_start(disk, start)
    drop_start(disk, 8)
    disk = disk.crash()
    assert _load(disk).pending == (7, 9)
    assert add_start(disk, 10, {9}) == (7, 10)  # its process died before it was dropped


def test_full_disk_keeps_nobody_from_starting() -> None:
    disk = SimDisk()
    _load(disk)
    disk.set_free_bytes(0)
    for start in (7, 8, 9):  # the file that is replaced gives its blocks to the next spare
        add_start(disk, start)
    assert _load(disk.crash()).pending == (7, 8, 9)


def test_pending_starts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_identity, "PENDING_MAX", 3)
    disk = SimDisk()
    _load(disk)
    assert [add_start(disk, start) for start in (1, 2, 3, 4)][-1] == (2, 3, 4)
    assert len(content(disk, PATH)) == SIZE_BYTES


def test_journal_without_the_file_is_refused() -> None:
    disk = SimDisk()
    open_journal(disk)
    with pytest.raises(CorruptRecordError, match="missing"):
        _load(disk)


@pytest.mark.parametrize("position", [0, 20, 60, 100])
def test_flipped_bit_is_found(position: int) -> None:
    disk = SimDisk()
    _load(disk)
    whole = content(disk, PATH)
    put(disk, PATH, whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    with pytest.raises(CorruptRecordError):
        _load(disk)
