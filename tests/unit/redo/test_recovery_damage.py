"""Damage is found, never served, and never cut away below a durable mark (P10)."""

from __future__ import annotations

import functools
import random

import pytest

from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Image
from txmq.errors import CorruptRecordError
from txmq.model import Lsn
from txmq.redo.journal_files import list_bases
from txmq.redo.record_format import FILE_HEADER_SIZE, RECORD_HEADER_SIZE, file_path, record_size, unpack_file_header
from txmq.redo.recovery import Cursor, Walk

from .support import FILE_SIZE, NODE, content, flip, open_journal, payload, put

LENGTHS = (300, 1, 0, 700, 13, 299, 512, 8, 1000, 407, 600, 90, 333, 250)


@functools.cache
def _two_files() -> tuple[Image, int]:
    """Forced records in two files, the last thing a mark; the LSN of that mark."""
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number, length in enumerate(LENGTHS):
        journal.append(payload(number, length))
        journal.sync()
    journal.mark()
    assert FILE_SIZE < journal.next_lsn < 2 * FILE_SIZE
    return disk.model.build(()), journal.next_lsn - record_size(0)


def _read(disk: SimDisk) -> tuple[str, list[bytes]]:
    """What recovery would find, without its repairs."""
    payloads: list[bytes] = []
    walk = Walk(disk, Cursor(0, 0), node_id=NODE, writable=False)
    rule = walk.run(lambda _lsn, _end, item: payloads.append(item))
    return rule.label, payloads


@pytest.mark.parametrize("base", [0, FILE_SIZE])
def test_flipped_bit_in_any_byte_is_found_or_harmless(base: int) -> None:
    image, mark_lsn = _two_files()
    expected = [payload(number, length) for number, length in enumerate(LENGTHS)]
    end_of_first = _end_of_records(image)
    found = 0
    for position in range(FILE_SIZE):
        disk = SimDisk(image=image)
        flip(disk, base, position, 1 << position % 8)
        try:
            label, payloads = _read(disk)
        except CorruptRecordError as error:
            found += error.path == file_path(base)
            continue
        lsn = base + position
        assert payloads == expected, position
        assert label in ("R2", "R3"), position
        assert lsn >= mark_lsn or end_of_first <= lsn < FILE_SIZE, f"byte {position} of {base} was not missed"
    assert found == (end_of_first if base == 0 else mark_lsn - FILE_SIZE)  # header and records, byte for byte


def _end_of_records(image: Image) -> int:
    header = unpack_file_header(content(SimDisk(image=image), file_path(FILE_SIZE))[:FILE_HEADER_SIZE])
    assert header is not None
    return header.predecessor_end_lsn


@pytest.mark.parametrize("base", [0, FILE_SIZE])
def test_a_file_cut_to_any_length_is_refused(base: int) -> None:
    image, _ = _two_files()
    whole = content(SimDisk(image=image), file_path(base))
    for length in range(FILE_SIZE):
        disk = SimDisk(image=image)
        file = disk.open(file_path(base))
        file.truncate(length)
        with pytest.raises(CorruptRecordError, match="R9"):
            _read(disk)
    put(disk, file_path(base), whole + b"\0")
    with pytest.raises(CorruptRecordError, match="R9"):
        _read(disk)


def test_random_damage_of_several_bytes_never_yields_wrong_payloads() -> None:
    image, _ = _two_files()
    expected = [payload(number, length) for number, length in enumerate(LENGTHS)]
    rng = random.Random(5)
    outcomes = {"refused": 0, "whole": 0}
    for _ in range(1500):
        disk = SimDisk(image=image)
        base = rng.choice([0, FILE_SIZE])
        position = rng.randrange(FILE_SIZE - 64)
        disk.damage(file_path(base), position, rng.randbytes(rng.choice([2, 8, 64])))
        try:
            _, payloads = _read(disk)
        except CorruptRecordError:
            outcomes["refused"] += 1
        else:
            assert payloads == expected
            outcomes["whole"] += 1
    assert min(outcomes.values()) > 100


def test_flipped_bit_in_unforced_tail_costs_at_most_that_tail() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.append(payload(0))
    journal.sync()
    start = journal.next_lsn
    journal.append(payload(1))
    end = journal.append(payload(2))
    journal._file.fdatasync()  # on disk, but no mark says so
    image = disk.model.build(())
    for position in range(start, end):
        damaged = SimDisk(image=image)
        flip(damaged, 0, position)
        label, payloads = _read(damaged)
        kept = 1 if position < start + record_size(300) else 2
        assert payloads == [payload(number) for number in range(kept)]
        assert label in ("R3", "R3b", "R2")  # R2: the damaged record claims another address, or none


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_file_is_named(missing: int) -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(40):
        journal.append(payload(number))
    journal.sync()
    bases = list_bases(disk)
    assert len(bases) > 3
    disk.unlink(file_path(bases[missing]))
    with pytest.raises(CorruptRecordError, match="R6"):
        open_journal(disk)


def test_damage_is_reported_with_its_place_and_nothing_changes() -> None:
    image, _ = _two_files()
    disk = SimDisk(image=image)
    second = FILE_HEADER_SIZE + record_size(LENGTHS[0])
    flip(disk, 0, second + RECORD_HEADER_SIZE)
    before = {path: content(disk, path) for path in (file_path(0), file_path(FILE_SIZE))}
    with pytest.raises(CorruptRecordError, match=f"R4b: lsn {second}") as caught:
        open_journal(disk)
    assert (caught.value.path, caught.value.position) == (file_path(0), second)
    assert {path: content(disk, path) for path in before} == before
    assert disk.model.pending() == []


def test_old_checkpoint_position_is_followed_and_a_wrong_chain_refused() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(6):
        journal.append(payload(number))
    lsn, chain = journal.next_lsn, journal.chain
    for number in range(6, 20):
        journal.append(payload(number))
    journal.mark()
    image = disk.model.build(())
    _, payloads = open_journal(SimDisk(image=image), from_lsn=lsn, from_chain=chain)
    assert payloads == [payload(number) for number in range(6, 20)]
    with pytest.raises(CorruptRecordError, match=f"lsn {lsn}"):
        open_journal(SimDisk(image=image), from_lsn=lsn, from_chain=chain ^ 1)
    with pytest.raises(CorruptRecordError):
        open_journal(SimDisk(image=image), from_lsn=Lsn(lsn + 8), from_chain=chain)
