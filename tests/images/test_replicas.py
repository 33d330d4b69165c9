"""A replica beside each script; from every crash image of its disk it follows on, and has what its leader has."""

from __future__ import annotations

import itertools

import pytest

from tools.images.node import Node
from tools.images.replica import Replica, record_replica
from tools.images.scripts import SCRIPTS
from tools.simulated.crash_images import enumerate_images
from tools.simulated.disk import SimDisk
from txmq.errors import ConfigError
from txmq.redo import checkpoint
from txmq.redo.journal_files import list_bases
from txmq.redo.record_format import RECORD_HEADER_SIZE, file_path

EVERY = 5


@pytest.mark.parametrize("applies_late", [False, True])
@pytest.mark.parametrize("piece_size_bytes", [100, 1 << 20])
@pytest.mark.parametrize("name", SCRIPTS)
def test_replica_comes_to_the_leaders_state(name: str, piece_size_bytes: int, applies_late: bool) -> None:
    record_replica(SCRIPTS[name], piece_size_bytes=piece_size_bytes, applies_late=applies_late)


@pytest.mark.parametrize("name", SCRIPTS)
def test_replica_that_dies_anywhere_goes_on(name: str) -> None:
    trace, leader = record_replica(SCRIPTS[name], piece_size_bytes=1000)
    for label, disk in itertools.islice(enumerate_images(trace), 0, None, EVERY):
        replica = Replica(disk, leader)
        replica.follow(leader)
        try:
            replica.compare(leader)
        except AssertionError as error:
            raise AssertionError(f"image {label} of the replica of {name}: {error}") from error


def test_damage_after_the_checkpoint_is_cut_and_comes_again() -> None:
    trace, leader = record_replica(SCRIPTS["everything"], piece_size_bytes=1000)
    *_, (_, disk) = enumerate_images(trace)
    newest = checkpoint.list_lsns(disk)[-1]
    base = max(base for base in list_bases(disk) if base <= newest)
    disk.damage(file_path(base), newest - base + RECORD_HEADER_SIZE, b"?")
    replica = Replica(disk, leader)
    assert replica.store.journal.next_lsn == newest
    replica.follow(leader)
    replica.compare(leader)


def test_copy_and_home_are_not_taken_for_each_other() -> None:
    trace, leader = record_replica(SCRIPTS["pages"], piece_size_bytes=1000)
    *_, (_, disk) = enumerate_images(trace)
    with pytest.raises(ConfigError, match="copy of a home, which may lack messages"):
        Node(disk)
    with pytest.raises(ConfigError, match="a home's own, no copy"):
        Replica(Node(SimDisk()).kill(), leader)
