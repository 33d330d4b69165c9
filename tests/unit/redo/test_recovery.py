"""Recovery's decision table, row by row, and the order of its repairs."""

from __future__ import annotations

import errno
import itertools

import pytest

from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Rename, Sync, SyncDirectory, Write
from txmq.errors import CorruptRecordError, DirectoryInUseError, JournalFailedError, StorageError
from txmq.model import Lsn
from txmq.redo import recovery
from txmq.redo.journal_files import Settings, list_bases
from txmq.redo.record_format import (
    FILE_HEADER_SIZE,
    FORMAT_VERSION,
    GROUP,
    MARK,
    FileHeader,
    file_path,
    pack_file_header,
    pack_record,
    record_size,
    unpack_file_header,
)
from txmq.redo.recovery import TABLE, Action, At, Mark, Next, Observation, decide

from .support import FILE_SIZE, NODE, content, flip, open_journal, payload, put

START = FILE_HEADER_SIZE


def _disk_with(*payloads: bytes, mark: bool = False) -> tuple[SimDisk, Lsn, int]:
    """A forced journal; where it ends, and its chain there."""
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for item in payloads:
        journal.append(item)
        journal.sync()
    if mark:
        journal.mark()
    return disk, journal.next_lsn, journal.chain


def _write(disk: SimDisk, position: int, record: bytes) -> None:
    disk.damage(file_path(0), position, record)


def test_every_combination_of_observations_has_a_reached_row() -> None:
    reached = {decide(Observation(*seen)).label for seen in itertools.product(At, Next, Mark)}
    assert reached == {rule.label for rule in TABLE}


def test_no_row_cuts_synced_records_or_before_a_later_file() -> None:
    for at, following, mark in itertools.product(At, Next, Mark):
        if following is not Next.NONE or mark is Mark.FORCED:
            assert decide(Observation(at, following, mark)).action not in (Action.CUT, Action.END)


def test_r2_zeros_are_end_and_nothing_is_written_but_tail() -> None:
    disk, end, _ = _disk_with(b"a", b"b")
    journal, payloads = open_journal(disk.crash())
    assert (payloads, journal.next_lsn, journal.found.rule, journal.found.cut_lsn) == ([b"a", b"b"], end, "R2", None)


def test_r2_remains_of_an_older_life_are_the_end() -> None:
    disk, end, chain = _disk_with(b"a")
    stale, _ = pack_record(GROUP, 1, chain, end - 64, 0, b"stale")
    _write(disk, end, stale)
    journal, payloads = open_journal(disk)
    assert (payloads, journal.found.rule) == ([b"a"], "R2")


def test_r3_torn_record_is_cut_and_the_rest_zeroed() -> None:
    disk, end, chain = _disk_with(b"a")
    record, crc = pack_record(GROUP, 1, chain, end, end, payload(1))
    behind, _ = pack_record(GROUP, 1, crc, end + len(record), end, payload(2))
    _write(disk, end, record[:-20] + bytes(20) + behind)
    _write(disk, FILE_SIZE - 8, b"leftover")
    journal, payloads = open_journal(disk)
    assert (payloads, journal.found.rule, journal.found.cut_lsn) == ([b"a"], "R3", end)
    assert content(disk, file_path(0))[end:] == bytes(FILE_SIZE - end)
    assert disk.model.pending() == []


def test_r3_cut_at_the_checkpoint_is_synced() -> None:
    disk, end, chain = _disk_with(b"a")
    record, _ = pack_record(GROUP, 1, chain, end, end, payload(1))
    _write(disk, end, record[:-1] + b"\xff")
    journal, _ = open_journal(disk, from_lsn=end, from_chain=chain)
    assert journal.found.rule == "R3"
    assert disk.model.pending() == []


def test_r3b_a_missing_record_before_whole_unforced_ones_is_cut() -> None:
    disk, end, chain = _disk_with(b"a")
    first, crc = pack_record(GROUP, 1, chain, end, end, payload(1))
    second, _ = pack_record(GROUP, 1, crc, end + len(first), end, payload(2))
    _write(disk, end + len(first), second)
    journal, payloads = open_journal(disk)
    assert (payloads, journal.found.rule) == ([b"a"], "R3b")
    assert content(disk, file_path(0))[end:] == bytes(FILE_SIZE - end)


def test_r4_whole_record_behind_that_says_place_was_forced_refuses() -> None:
    disk, _, _ = _disk_with(b"a", b"b", mark=True)
    second = START + record_size(1)
    flip(disk, 0, second + 50)
    with pytest.raises(CorruptRecordError, match=f"R4: lsn {second}:"):
        open_journal(disk)


def test_r4_evidence_is_found_behind_any_amount_of_garbage() -> None:
    disk, end, _ = _disk_with(*(payload(number) for number in range(9)), mark=True)
    _write(disk, START, b"\xc7RED" * ((end - record_size(0) - START) // 4))  # magic all over the place
    with pytest.raises(CorruptRecordError, match=f"R4: lsn {START}:"):
        open_journal(disk)


def test_r4c_next_file_of_another_chain_or_earlier_end_refuses() -> None:
    for change in ({"predecessor_chain": 5}, {"predecessor_end_lsn": START}):
        disk = SimDisk()
        journal, _ = open_journal(disk)
        for _ in range(2):
            journal.append(bytes(3000))
        journal.sync()
        block = content(disk, file_path(FILE_SIZE))[:FILE_HEADER_SIZE]
        header = unpack_file_header(block)
        assert header is not None
        disk.damage(file_path(FILE_SIZE), 0, pack_file_header(header._replace(**change)))
        with pytest.raises(CorruptRecordError, match="R4c"):
            open_journal(disk)


def test_r4d_a_whole_record_of_another_chain_refuses() -> None:
    disk, end, chain = _disk_with(b"a")
    record, _ = pack_record(GROUP, 1, chain ^ 1, end, end, b"foreign")
    _write(disk, end, record)
    with pytest.raises(CorruptRecordError, match=f"R4d: lsn {end}:"):
        open_journal(disk)


def test_r4d_an_epoch_that_goes_down_refuses() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk, epoch=5)
    journal.append(b"a")
    record, _ = pack_record(GROUP, 4, journal.chain, journal.next_lsn, journal.next_lsn, b"older life")
    journal.sync()
    _write(disk, journal.next_lsn, record)
    with pytest.raises(CorruptRecordError, match="R4d"):
        open_journal(disk)


def test_record_of_another_address_is_never_read_despite_its_chain() -> None:
    disk, end, chain = _disk_with(b"a")
    record, _ = pack_record(GROUP, 1, chain, end + 8, end, b"misdirected write")
    _write(disk, end, record)
    assert open_journal(disk)[1] == [b"a"]


def test_r7_unknown_record_type_or_flag_refuses_with_advice() -> None:
    disk, end, chain = _disk_with(b"a")
    record, _ = pack_record(9, 1, chain, end, end, b"from the future")
    _write(disk, end, record)
    with pytest.raises(StorageError, match=f"R7: .*lsn {end}.*upgrade"):
        open_journal(disk)


def test_r7_a_mark_with_a_payload_is_not_known() -> None:
    disk, end, chain = _disk_with(b"a")
    record, _ = pack_record(MARK, 1, chain, end, end, b"payload")
    _write(disk, end, record)
    with pytest.raises(StorageError, match="R7"):
        open_journal(disk)


def _replace_header(disk: SimDisk, header: FileHeader) -> None:
    disk.damage(file_path(0), 0, pack_file_header(header))


def test_headers_are_checked_for_version_node_and_name() -> None:
    good = FileHeader(1, 0, NODE, FILE_SIZE, 0, 0)
    cases: list[tuple[FileHeader, type[StorageError], str]] = [
        (good._replace(version=FORMAT_VERSION + 1), StorageError, "R7.*upgrade"),
        (good._replace(node_id=NODE + 1), DirectoryInUseError, "R8"),
        (good._replace(base_lsn=FILE_SIZE), CorruptRecordError, "R9"),
        (good._replace(file_size_bytes=2 * FILE_SIZE), CorruptRecordError, "R9"),
    ]
    for header, error, text in cases:
        disk, _, _ = _disk_with(b"a")
        _replace_header(disk, header)
        with pytest.raises(error, match=text):
            open_journal(disk)
    disk, _, _ = _disk_with(b"a")
    _replace_header(disk, good)
    assert open_journal(disk)[1] == [b"a"]


def test_checkpoint_without_its_journal_is_refused_and_none_is_begun() -> None:
    disk = SimDisk()
    with pytest.raises(CorruptRecordError, match="R6"):
        open_journal(disk, from_lsn=5000)
    assert disk.list_directory("journal") == []


def test_recovery_from_zero_needs_the_first_file() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(40):
        journal.append(payload(number))
    journal.release(Lsn(FILE_SIZE))
    with pytest.raises(CorruptRecordError, match="R6"):
        open_journal(disk)


def test_files_below_the_checkpoint_are_not_looked_at() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(30):
        journal.append(payload(number))
    lsn, chain = journal.next_lsn, journal.chain
    journal.append(b"last")
    journal.sync()
    flip(disk, 0, 10)
    recovered, payloads = open_journal(disk, from_lsn=lsn, from_chain=chain)
    assert payloads == [b"last"]
    recovered.release(lsn)
    assert not disk.exists(file_path(0))


def test_record_is_forced_before_it_is_handed_over() -> None:
    """What is made of it, in other files, must not outlive it."""
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(20):
        journal.append(payload(number))
    killed, handed = disk.kill(), list[bytes]()  # all of it is in the cache, none is forced

    def check(_lsn: Lsn, _end: Lsn, record: bytes) -> None:
        handed.append(record)
        assert killed.model.pending() == []

    recovery.recover(
        killed, node_id=NODE, from_lsn=Lsn(0), from_chain=0, epoch=1, settings=Settings(FILE_SIZE), on_record=check
    )
    assert handed == [payload(number) for number in range(20)]


def test_nothing_is_handed_over_where_recovery_refuses() -> None:
    disk, _, _ = _disk_with(*(payload(number) for number in range(30)))
    bases = list_bases(disk)
    flip(disk, bases[1], FILE_HEADER_SIZE + 200)
    handed = list[bytes]()
    with pytest.raises(CorruptRecordError, match="R4b"):
        recovery.recover(
            disk, node_id=NODE, from_lsn=Lsn(0), from_chain=0, epoch=1, settings=Settings(FILE_SIZE),
            on_record=lambda _lsn, _end, record: handed.append(record),
        )  # fmt: skip
    assert handed == []


# --- the tail --------------------------------------------------------------------------------------------------------


def test_what_failed_sync_lost_is_not_recovered_from_cache() -> None:
    disk = SimDisk(fsyncgate=True)
    journal, _ = open_journal(disk)
    journal.append(b"forced")
    journal.sync()
    journal.append(b"lost")
    disk.fail_at(1, errno.EIO, "sync")
    with pytest.raises(JournalFailedError):
        journal.sync()
    killed = disk.kill()
    assert b"lost" in content(killed, file_path(0))  # the cache lies
    _, payloads = open_journal(killed)
    assert payloads == [b"forced"]


def test_tail_is_copied_synced_and_named_before_it_is_overwritten() -> None:
    disk, _, _ = _disk_with(payload(1))
    trace = disk.start_trace()
    open_journal(disk)
    steps = [
        (type(op).__name__, op.target if isinstance(op, Rename) else op.path)
        for op in trace.ops
        if isinstance(op, Write | Sync | Rename | SyncDirectory)
    ]
    wanted = [
        ("Write", recovery.TAIL_PATH + ".tmp"),
        ("Sync", recovery.TAIL_PATH + ".tmp"),
        ("Rename", recovery.TAIL_PATH),
        ("SyncDirectory", "journal"),
        ("Write", file_path(0)),
        ("Sync", file_path(0)),
        ("SyncDirectory", "journal"),
    ]
    rest = iter(steps)
    assert all(step in rest for step in wanted), steps
    assert not disk.exists(recovery.TAIL_PATH)
    assert disk.model.pending() == []


def test_copy_of_tail_repairs_what_crash_left_in_place() -> None:
    disk, end, _ = _disk_with(payload(1), payload(2))
    whole = content(disk, file_path(0))
    file = disk.open(file_path(0))
    header = unpack_file_header(whole[:FILE_HEADER_SIZE])
    assert header is not None
    recovery._make_copy(disk, file, header, START, end)
    _write(disk, START, bytes(end - START))
    assert open_journal(disk)[1] == [payload(1), payload(2)]
    assert not disk.exists(recovery.TAIL_PATH)


@pytest.mark.parametrize("position", range(0, 52 + 8, 3))
def test_a_damaged_copy_of_the_tail_is_dropped(position: int) -> None:
    disk, end, _ = _disk_with(payload(1))
    file = disk.open(file_path(0))
    header = unpack_file_header(content(disk, file_path(0))[:FILE_HEADER_SIZE])
    assert header is not None
    recovery._make_copy(disk, file, header, START, end)
    disk.damage(recovery.TAIL_PATH, position, bytes([content(disk, recovery.TAIL_PATH)[position] ^ 4]))
    assert open_journal(disk)[1] == [payload(1)]
    assert not disk.exists(recovery.TAIL_PATH)


def test_copy_of_another_node_or_a_gone_file_is_dropped() -> None:
    disk, end, _ = _disk_with(payload(1))
    header = unpack_file_header(content(disk, file_path(0))[:FILE_HEADER_SIZE])
    assert header is not None
    for other in (header._replace(node_id=NODE + 1), header._replace(base_lsn=FILE_SIZE)):
        recovery._make_copy(disk, disk.open(file_path(0)), other, START, end)
        assert open_journal(disk)[1] == [payload(1)]
        assert not disk.exists(recovery.TAIL_PATH)


# --- leftovers -------------------------------------------------------------------------------------------------------


def test_half_made_files_and_spares_of_another_size_are_removed() -> None:
    disk, _, _ = _disk_with(b"a")
    put(disk, "journal/spare-7", bytes(FILE_SIZE))
    put(disk, "journal/spare-8", bytes(100))
    put(disk, "journal/spare-9.tmp", b"")
    put(disk, "journal/ballast.tmp", b"")
    put(disk, "journal/tail.tmp", b"half")
    open_journal(disk)
    assert disk.list_directory("journal") == ["00000000000000000000.redo", "spare-7"]


def test_sync_vouches_only_for_what_was_appended_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = open_journal(SimDisk())
    before = journal.append(b"before")
    force = journal._file.fdatasync

    def append_meanwhile() -> None:
        force()
        journal.append(b"meanwhile")

    monkeypatch.setattr(journal._file, "fdatasync", append_meanwhile)
    journal.sync()
    assert journal.durable_lsn == before < journal.next_lsn
