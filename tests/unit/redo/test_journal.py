"""The journal's writer: what append, sync, mark, rotation and release promise."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable

import pytest

from tests.crash_points import hooked
from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Op, Sync
from txmq.errors import ConfigError, InvariantError, JournalFailedError, JournalFullError, TooLargeError
from txmq.model import Lsn
from txmq.redo import inspect
from txmq.redo.journal_files import BALLAST, Settings, list_bases
from txmq.redo.record_format import FILE_HEADER_SIZE, file_path, payload_size_max, record_size, unpack_file_header
from txmq.runtime.ports import Buffer

from .support import FILE_SIZE, content, open_journal, payload


def test_append_returns_the_end_of_the_record_and_syncs_nothing() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    syncs = disk.counts["sync"]
    end = journal.append(b"abc")
    assert end == journal.next_lsn == FILE_HEADER_SIZE + record_size(3)
    assert journal.durable_lsn == FILE_HEADER_SIZE
    assert disk.counts["sync"] == syncs


def test_one_append_is_one_write_and_one_sync_serves_many() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    writes, syncs = disk.counts["write"], disk.counts["sync"]
    for number in range(5):
        journal.append(payload(number))
    journal.sync()
    assert disk.counts["write"] == writes + 5
    assert disk.counts["sync"] == syncs + 1
    assert journal.durable_lsn == journal.next_lsn


def test_synced_records_survive_a_power_loss_and_no_others() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.append(b"forced")
    journal.sync()
    journal.append(b"not forced")
    recovered, payloads = open_journal(disk.crash())
    assert payloads == [b"forced"]
    assert recovered.next_lsn == FILE_HEADER_SIZE + record_size(6)


class BesideSync(SimDisk):
    """A disk on which something happens while a file is forced."""

    beside: Callable[[], object] | None = None

    def perform(self, op: Op) -> None:
        """Do it, and what happens meanwhile."""
        super().perform(op)
        beside = self.beside
        if isinstance(op, Sync) and beside is not None:
            self.beside = None
            beside()


def test_record_appended_beside_a_sync_is_forced_by_the_next() -> None:
    disk = BesideSync()
    journal, _ = open_journal(disk)
    first = journal.append(b"first")
    disk.beside = lambda: journal.append(b"second")
    journal.sync()
    assert journal.durable_lsn == first < journal.next_lsn
    journal.sync()
    assert journal.durable_lsn == journal.next_lsn
    assert open_journal(disk.crash())[1] == [b"first", b"second"]


def test_no_file_is_begun_beside_a_sync() -> None:
    disk = BesideSync()
    journal, _ = open_journal(disk)
    journal.append(b"first")
    large = bytes(journal.payload_size_bytes_max)
    assert not journal.has_room(len(large))
    disk.beside = lambda: journal.append(large)
    with pytest.raises(InvariantError, match="while the last one is being synced"):
        journal.sync()


def test_payloads_of_every_length_come_back_as_they_were() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    expected = [payload(length, length) for length in [*range(40), *range(4000, payload_size_max(FILE_SIZE) + 1)]]
    for item in expected:
        journal.append(item)
    journal.sync()
    assert open_journal(disk.crash())[1] == expected


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_buffer_is_taken(kind: type) -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.append(kind(b"some bytes"))
    journal.sync()
    assert open_journal(disk.crash())[1] == [b"some bytes"]


def test_record_that_fits_no_file_is_refused_before_a_write() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    counts, before = dict(disk.counts), journal.next_lsn
    with pytest.raises(TooLargeError):
        journal.append(bytes(journal.payload_size_bytes_max + 1))
    assert disk.counts == counts
    assert journal.next_lsn == before
    assert journal.append(bytes(journal.payload_size_bytes_max)) == FILE_SIZE


def test_file_that_is_full_is_forced_before_next_one_begins() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    numbers = itertools.count()
    while journal.next_lsn < FILE_SIZE:
        journal.append(payload(next(numbers)))
    recovered, payloads = open_journal(disk.crash())  # nothing was synced by us
    assert len(payloads) == next(numbers) - 1  # all of the first file; the one that began the second is lost
    assert recovered.next_lsn == FILE_SIZE + FILE_HEADER_SIZE


def test_a_record_never_spans_files() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(40):
        end = journal.append(payload(number, 700))
        assert (end - 1) // FILE_SIZE == (end - record_size(700)) // FILE_SIZE
    assert list_bases(disk) == list(range(0, journal.next_lsn, FILE_SIZE))


def test_rotation_with_a_prepared_file_makes_none() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    assert journal.prepare_next()
    journal.append(bytes(journal.payload_size_bytes_max))
    created = disk.counts["entry"]
    journal.append(b"in the next file")
    assert disk.counts["entry"] == created + 1  # the rename alone


def test_without_prepared_file_rotation_reserves_one_and_writes_no_zeros() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.append(bytes(journal.payload_size_bytes_max))
    assert not journal.is_next_ready
    assert not journal.has_room(1)
    written = disk.counts["write"]
    journal.append(b"in the next file")
    assert disk.counts["write"] == written + 3  # the reservation, the header and the record
    journal.sync()
    assert open_journal(disk.crash())[1][-1] == b"in the next file"


def test_next_file_is_prepared_in_steps_and_each_is_forced() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk, file_size_bytes=10 << 20)
    writes, syncs = disk.counts["write"], disk.counts["sync"]
    assert journal.prepare_next()
    assert journal.is_next_ready
    spare, ballast = 1 + 3, 1 + 3  # reserved, then 4, 4 and 2 MiB
    assert disk.counts["sync"] - syncs == spare + ballast
    assert disk.counts["write"] - writes == 2 * (1 + 40)  # a quarter of a MiB is held in memory
    assert disk.open("journal/spare-2").size() == 10 << 20


def test_next_file_that_cannot_be_prepared_fails_nothing_of_journal() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    disk.fail_at(1, errno.EMFILE, "open")
    with pytest.raises(OSError, match="open files"):
        journal.prepare_next()
    journal.append(b"a")
    journal.sync()
    assert not journal.failed
    assert journal.prepare_next()


def test_next_file_is_prepared_while_journal_rotates_and_releases() -> None:
    """In the middle of every step of preparing, the writer goes on: it begins files and lets go of others."""
    disk = SimDisk()
    journal, _ = open_journal(disk)
    expected: list[bytes] = []
    inner = disk.perform

    def perform(op: Op) -> None:
        inner(op)
        if getattr(op, "path", "").endswith(".tmp"):
            disk.perform = inner  # type: ignore[method-assign]
            for _ in range(12):
                expected.append(payload(len(expected)))
                journal.append(expected[-1])
            journal.sync()
            journal.release(Lsn(0))
            disk.perform = perform  # type: ignore[method-assign]

    for _ in range(3):
        disk.perform = perform  # type: ignore[method-assign]
        assert journal.prepare_next()
        disk.perform = inner  # type: ignore[method-assign]
        expected.append(bytes(journal.payload_size_bytes_max))
        journal.append(expected[-1])
    journal.sync()
    assert len(expected) > 40
    assert open_journal(disk.crash())[1] == expected


def test_released_files_are_recycled_and_their_old_records_stay_invalid() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(30):
        journal.append(payload(number))
    journal.sync()
    journal.release(journal.next_lsn)
    lsn, chain = journal.next_lsn, journal.chain
    created = disk.counts["write"]
    for number in range(30, 44):  # into a recycled file, over old records of the same size
        journal.append(payload(number))
    journal.sync()
    assert disk.counts["write"] == created + 14 + 1  # records and one header: no file was filled with zeros
    _, payloads = open_journal(disk.crash(), from_lsn=lsn, from_chain=chain)
    assert payloads == [payload(number) for number in range(30, 44)]


def test_release_keeps_every_file_at_or_above_the_lsn() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(60):
        journal.append(payload(number))
    journal.release(Lsn(2 * FILE_SIZE - 1))
    assert list_bases(disk)[0] == FILE_SIZE
    journal.release(Lsn(2 * FILE_SIZE))
    assert list_bases(disk)[0] == 2 * FILE_SIZE
    journal.release(Lsn(1 << 60))
    assert list_bases(disk) == [(journal.next_lsn - 1) // FILE_SIZE * FILE_SIZE]


def test_at_most_two_released_files_are_kept_for_recycling() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    for number in range(80):
        journal.append(payload(number))
    journal.release(journal.next_lsn)
    assert sum(name.startswith("spare-") for name in disk.list_directory("journal")) == 2
    assert len(disk.crash().list_directory("journal")) == 3  # durable, and nothing else is left


def test_a_mark_says_once_that_everything_is_forced() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.append(b"a")
    journal.mark()
    assert journal.durable_lsn == journal.next_lsn == FILE_HEADER_SIZE + record_size(1) + record_size(0)
    writes = disk.counts["write"]
    journal.mark()
    assert disk.counts["write"] == writes
    assert open_journal(disk.crash())[1] == [b"a"]


def test_a_mark_on_a_full_disk_still_forces() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.append(bytes(journal.payload_size_bytes_max))
    disk.set_free_bytes(0)
    journal.mark()
    assert len(open_journal(disk.crash())[1]) == 1


def test_the_epoch_of_every_life_is_new() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk, epoch=1)
    for epoch in (1, 2, 3):
        assert journal.epoch == epoch
        journal.append(b"life")
        journal.sync()
        disk = disk.crash()
        journal, _ = open_journal(disk, epoch=1)
        assert journal.found.highest_epoch == epoch


def test_file_sizes_may_change_between_lives() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    expected = [payload(number) for number in range(30)]
    for item in expected:
        journal.append(item)
    journal.sync()
    disk = disk.crash()
    journal, _ = open_journal(disk, file_size_bytes=4 * FILE_SIZE)
    expected += [payload(number, 9000) for number in range(30, 36)]
    for item in expected[30:]:
        journal.append(item)
    journal.sync()
    assert open_journal(disk.crash())[1] == expected


@pytest.mark.parametrize("size", [0, 4096, 8191, 10000])
def test_file_size_that_is_no_multiple_of_block_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        Settings(size)


# --- a disk that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_after_a_failed_write_or_sync_nothing_is_tried_again(kind: str) -> None:
    disk = SimDisk(random.Random(1))
    journal, _ = open_journal(disk)
    journal.append(b"a")
    disk.fail_at(1, errno.EIO, "write" if kind == "write" else "sync")
    with pytest.raises(JournalFailedError) as caught:  # noqa: PT012 - one of the two
        journal.append(b"b")
        journal.sync()
    assert isinstance(caught.value.__cause__, OSError)
    assert journal.failed
    assert journal.durable_lsn == FILE_HEADER_SIZE
    counts = dict(disk.counts)
    for call in (
        lambda: journal.append(b"c"), journal.sync, journal.mark, journal.prepare_next, journal.use_ballast,
        lambda: journal.release(Lsn(0)),
    ):  # fmt: skip
        with pytest.raises(JournalFailedError):
            call()
    assert disk.counts == counts


def test_interrupt_in_middle_of_write_fails_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = open_journal(SimDisk())

    def interrupt(data: Buffer, position: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(journal._file, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        journal.append(b"a")
    with pytest.raises(JournalFailedError):
        journal.append(b"a")


def test_a_closed_journal_refuses_and_is_not_failed() -> None:
    journal, _ = open_journal(SimDisk())
    journal.close()
    journal.close()
    assert not journal.failed
    with pytest.raises(JournalFailedError):
        journal.append(b"a")


def test_full_disk_refuses_a_new_file_and_the_journal_continues() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    disk.set_free_bytes(100)
    expected = []
    with pytest.raises(JournalFullError):  # noqa: PT012 - whichever append needs the second file
        for number in itertools.count():
            journal.append(payload(number))
            expected.append(payload(number))
    assert not journal.failed
    journal.append(b"a small one still fits")
    assert disk.list_directory("journal") == ["00000000000000000000.redo"]  # nothing half made is left
    disk.set_free_bytes(10 * FILE_SIZE)
    journal.append(payload(99))
    journal.sync()
    assert open_journal(disk.crash())[1] == [*expected, b"a small one still fits", payload(99)]


def test_prepared_file_without_room_leaves_the_journal_unchanged() -> None:
    for failing in ("write", "sync"):
        disk = SimDisk()
        journal, _ = open_journal(disk)
        journal.prepare_next()
        journal.append(bytes(3500))
        journal.sync()
        disk.fail_at(1, errno.ENOSPC, "write" if failing == "write" else "sync")
        with pytest.raises(JournalFullError):
            journal.append(payload(1, 1000))
        assert not journal.failed
        journal.append(b"still here")
        journal.append(payload(1, 1000))
        journal.sync()
        assert open_journal(disk.crash())[1] == [bytes(3500), b"still here", payload(1, 1000)]


def test_the_ballast_lets_decisions_go_on_without_any_free_space() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk, file_size_bytes=4 * FILE_SIZE)
    journal.prepare_next()
    assert disk.exists(BALLAST)
    disk.set_free_bytes(0)
    journal.append(bytes(20000))
    journal.append(bytes(20000))  # in the prepared file
    with pytest.raises(JournalFullError):
        journal.append(bytes(20000))
    assert journal.use_ballast()
    assert not journal.use_ballast()
    journal.append(b"decided")
    journal.sync()
    assert open_journal(disk.crash())[1][-1] == b"decided"


def test_the_ballast_comes_back_when_there_is_room() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.prepare_next()
    journal.use_ballast()
    disk.set_free_bytes(0)
    assert journal.prepare_next()
    assert not disk.exists(BALLAST)
    disk.set_free_bytes(100 * FILE_SIZE)
    journal.prepare_next()
    assert disk.exists(BALLAST)


# --- crash points ----------------------------------------------------------------------------------------------------


def test_crash_points_stand_before_write_behind_it_and_behind_sync() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    seen: list[tuple[str, int, int]] = []
    writes, syncs = disk.counts["write"], disk.counts["sync"]
    with hooked(lambda name: seen.append((name, disk.counts["write"], disk.counts["sync"]))):
        journal.append(b"a")
        journal.sync()
    assert seen == [
        ("journal.append.before", writes, syncs),
        ("journal.append.written", writes + 1, syncs),
        ("journal.sync.done", writes + 1, syncs + 1),
    ]


def test_the_header_of_a_file_repeats_where_the_stream_stood() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.append(bytes(3500))
    end, chain = journal.next_lsn, journal.chain
    journal.append(bytes(3500))
    header = unpack_file_header(content(disk, file_path(FILE_SIZE))[:FILE_HEADER_SIZE])
    assert header is not None
    assert (header.predecessor_end_lsn, header.predecessor_chain) == (end, chain)


def test_epoch_is_raised_for_the_records_and_files_that_follow() -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    journal.append(b"before")
    journal.raise_epoch(journal.epoch + 7)
    with pytest.raises(InvariantError, match="would fall"):
        journal.raise_epoch(journal.epoch - 1)
    journal.append(b"behind")
    while len(list_bases(disk)) < 2:
        journal.append(b"x" * 100)
    journal.sync()
    assert [record.header.epoch for record in inspect.dump(disk)][:2] == [1, 8]
    newest = unpack_file_header(content(disk, file_path(list_bases(disk)[-1]))[:FILE_HEADER_SIZE])
    assert newest is not None
    assert newest.epoch == 8
    assert open_journal(disk.kill())[0].epoch == 9
