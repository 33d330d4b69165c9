"""A data directory's identity: drawn once, kept for ever, never another node's."""

from __future__ import annotations

import random

import pytest

from tools.simulated.clock import SimClock
from tools.simulated.crash_images import enumerate_images
from tools.simulated.disk import SimDisk
from txmq.errors import CorruptRecordError, StorageError
from txmq.redo import directory_identity
from txmq.redo.directory_identity import PATH, load, load_or_create

from .support import content, open_journal, put


class SeededRandom:
    """Port Random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bits(self, count: int) -> int:
        """As the port says."""
        return self._random.getrandbits(count)


def _create(disk: SimDisk, seed: int = 1) -> directory_identity.Node:
    return load_or_create(disk, SeededRandom(seed), SimClock())


def test_identity_is_drawn_once_and_survives_a_power_loss() -> None:
    disk = SimDisk()
    node = _create(disk, 1)
    assert node.node_id != node.cluster_id
    assert _create(disk.crash(), 2) == node


def test_a_journal_without_an_identity_gets_no_new_one() -> None:
    disk = SimDisk()
    open_journal(disk)
    with pytest.raises(CorruptRecordError, match="missing"):
        _create(disk)
    assert load(disk) is None


def test_flipped_bit_in_any_byte_and_any_length_is_found() -> None:
    disk = SimDisk()
    _create(disk)
    whole = content(disk, PATH)
    for position in range(len(whole)):
        for mask in (1, 2, 0x20, 0x80):
            put(disk, PATH, whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :])
            with pytest.raises(CorruptRecordError):
                load(disk)
        put(disk, PATH, whole[:position])
        with pytest.raises(CorruptRecordError):
            load(disk)


def test_a_newer_format_is_refused() -> None:
    disk = SimDisk()
    put(disk, PATH, directory_identity.encode_fields({"format": 2, "anything": "else"}))
    with pytest.raises(StorageError, match="upgrade"):
        load(disk)


def test_every_crash_image_of_first_start_keeps_what_was_returned() -> None:
    disk = SimDisk(record=True)
    node = _create(disk)
    disk.note(node)
    assert disk.trace is not None
    returned = 0
    for label, image in enumerate_images(disk.trace):
        found = load(image)
        assert found in (None, node), label
        if image.notes:
            returned += 1
            assert found == node, label
        _create(image, 2)
    assert returned >= 1


def test_identity_that_was_found_is_durable_when_it_is_returned() -> None:
    disk = SimDisk()
    node = _create(disk)
    whole = content(disk, PATH)
    disk = SimDisk()
    file = disk.open(PATH, create=True)
    file.pwrite(whole, 0)
    file.fsync()
    killed = disk.kill()  # died before the directory was forced
    assert _create(killed, 2) == node
    assert load(killed.crash()) == node
