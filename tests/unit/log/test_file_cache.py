"""The descriptor cache: durability of what it wrote, and descriptors that live as long as they must and no longer."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools.simulated.disk import SimDisk
from tools.simulated.file import SimFile
from txmq.log.file_cache import FileCache
from txmq.runtime.os_disk import OSDisk

from .support import CountingDisk


def path(number: int) -> str:
    return f"log/{number}/0/{0:020d}.log"


def content(disk: SimDisk, name: str) -> bytes | None:
    """What a disk holds under a name."""
    if not disk.exists(name):
        return None
    file = disk.open(name)
    return file.pread(file.size(), 0)


class HookedFile(SimFile):
    """Calls something in the middle of a sync or read."""

    during_sync: Callable[[], None] | None = None
    during_read: Callable[[], None] | None = None

    def fdatasync(self) -> None:
        super().fdatasync()
        if self.during_sync is not None:
            self.during_sync()

    def pread(self, size: int, position: int) -> bytes:
        if self.during_read is not None:
            self.during_read()
        return super().pread(size, position)


class HookedDisk(CountingDisk):
    def open(self, path: str, *, create: bool = False, writable: bool = True) -> SimFile:
        file = super().open(path, create=create, writable=writable)
        file.__class__ = HookedFile
        return file


# --- durability ------------------------------------------------------------------------------------------------------


def test_write_is_durable_after_the_sync_and_not_before() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    files.write(path(1), 3, bytearray(b"def"))
    assert files.read(path(1), 10, 0) == b"abcdef"
    assert files.dirty_count == 1
    files.sync_dirty()
    assert files.dirty_count == 0
    assert content(disk.crash(), path(1)) == b"abcdef"


def test_without_a_sync_a_crash_takes_it() -> None:
    disk = SimDisk()
    FileCache(disk).write(path(1), 0, b"abc")
    assert content(disk.crash(), path(1)) is None


def test_a_sync_syncs_files_once() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    for number in range(5):
        files.write(path(number), 0, b"abc")
    files.sync_dirty()
    before = disk.counts["sync"]
    files.sync_dirty()
    assert disk.counts["sync"] == before


def test_a_sync_of_some_leaves_the_others_dirty() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    for number in range(3):
        files.write(path(number), 0, b"abc")
    files.sync_dirty([path(1), "log/none"])
    assert files.dirty_count == 2
    image = disk.crash()
    assert [content(image, path(number)) for number in range(3)] == [None, b"abc", None]


def test_a_write_during_the_sync_stays_dirty() -> None:
    disk = HookedDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    (file,) = disk.opened
    assert isinstance(file, HookedFile)
    file.during_sync = lambda: files.write(path(1), 3, b"def")
    files.sync_dirty()
    assert files.dirty_count == 1
    file.during_sync = None
    files.sync_dirty()
    assert content(disk.crash(), path(1)) == b"abcdef"


def test_a_file_made_during_the_sync_keeps_its_directory_dirty() -> None:
    disk = HookedDisk()
    files = FileCache(disk)
    files.write("log/1/0/a.log", 0, b"abc")
    (file,) = disk.opened
    assert isinstance(file, HookedFile)
    file.during_sync = lambda: files.write("log/1/0/b.log", 0, b"def")
    files.sync_dirty()
    file.during_sync = None
    files.sync_dirty()
    assert content(disk.crash(), "log/1/0/b.log") == b"def"


def test_a_dirty_file_is_synced_before_its_descriptor_is_closed() -> None:
    disk = CountingDisk()
    files = FileCache(disk, open_max=1)
    files.write(path(1), 0, b"abc")
    files.write(path(2), 0, b"def")  # closes the first
    assert disk.opened[0]._closed
    for directory in ("", "log", "log/1", "log/1/0"):
        disk.sync_directory(directory)
    assert content(disk.crash(), path(1)) == b"abc"


def test_cache_predicts_whether_a_dirty_file_must_be_synced_first() -> None:
    disk = SimDisk()
    files = FileCache(disk, open_max=16)
    number = 0
    while files.takes(1):
        before = disk.counts["sync"]
        files.write(path(number), 0, b"abc")
        assert disk.counts["sync"] == before
        number += 1
    assert number == 12
    files.sync_dirty()
    assert files.takes(12)
    assert not files.takes(13)


def test_read_from_cache_syncs_no_dirty_file_to_open_another() -> None:
    disk = SimDisk()
    files = FileCache(disk, open_max=16)
    for number in range(30):
        files.write(path(number), 0, b"abc")
    before = disk.counts["sync"]
    assert files.try_read(path(0), 3, 0) is None
    assert files.try_read(path(29), 3, 0) == b"abc"  # open
    assert disk.counts["sync"] == before
    assert files.read(path(0), 3, 0) == b"abc"
    assert disk.counts["sync"] == before + 1


def test_first_write_needs_no_sync_and_directories_are_synced_once() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    for number in range(50):
        files.write(f"log/1/{number}/a.log", 0, b"abc")
    assert disk.counts["sync"] == 0
    files.sync_dirty()
    assert disk.counts["sync"] == 50 + 50 + 3  # files, their directories, and log/1, log and the root
    after = disk.crash()
    assert {content(after, f"log/1/{number}/a.log") for number in range(50)} == {b"abc"}


def test_directories_of_an_earlier_process_are_synced_once_if_distrusted() -> None:
    disk = SimDisk()
    FileCache(disk).write(path(1), 0, b"abc")
    disk = disk.kill()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    files.distrust("log/1/0")
    files.sync_dirty()
    assert content(disk.crash(), path(1)) == b"abc"


def test_clean_files_are_closed_first() -> None:
    disk = CountingDisk()
    files = FileCache(disk, open_max=2)
    files.write(path(1), 0, b"abc")
    files.write(path(2), 0, b"abc")
    files.sync_dirty([path(2)])
    syncs = disk.counts["sync"]
    files.write(path(3), 0, b"abc")
    assert [file._closed for file in disk.opened] == [False, True, False]
    assert disk.counts["sync"] == syncs


def test_failed_sync_fails_every_later_one_and_forbids_a_retry() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    disk.fail_at(1, errno.ENOSPC, "sync", path_prefix="log/1/0/")
    for _ in range(2):
        with pytest.raises(OSError, match="sync failed") as caught:
            files.sync_dirty()
        assert caught.value.errno == errno.EIO
    files.write(path(2), 0, b"abc")
    with pytest.raises(OSError, match="sync failed"):
        files.sync_dirty([path(2)])


def test_a_failed_sync_of_a_directory_fails_every_later_one() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    disk.fail_at(2, errno.EIO, "sync")
    for _ in range(2):
        with pytest.raises(OSError, match="sync failed"):
            files.sync_dirty()


def test_failed_sync_at_close_reaches_the_writer_and_the_checkpoint() -> None:
    disk = SimDisk()
    files = FileCache(disk, open_max=1)
    files.write(path(1), 0, b"abc")
    disk.fail_at(1, errno.EIO, "sync")
    with pytest.raises(OSError, match="sync failed"):
        files.write(path(2), 0, b"abc")
    with pytest.raises(OSError, match="sync failed"):
        files.sync_dirty()


def test_a_write_that_fails_may_be_repeated() -> None:
    disk = SimDisk(capacity_bytes=1000)
    files = FileCache(disk)
    with pytest.raises(OSError) as caught:
        files.write(path(1), 0, b"x" * 2000)
    assert caught.value.errno == errno.ENOSPC
    disk.set_free_bytes(5000)
    files.write(path(1), 0, b"x" * 2000)
    files.sync_dirty()
    assert content(disk.crash(), path(1)) == b"x" * 2000


# --- removal ---------------------------------------------------------------------------------------------------------


def test_an_unlinked_file_stays_away_after_the_next_sync() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    files.sync_dirty()
    files.unlink(path(1))
    files.sync_dirty()
    with pytest.raises(FileNotFoundError):
        files.read(path(1), 1, 0)
    assert content(disk.crash(), path(1)) is None


def test_an_unlinked_dirty_file_does_not_stop_the_sync() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    files.unlink(path(1))
    disk.remove_directory("log/1/0")
    files.sync_dirty()
    assert files.dirty_count == 0
    with pytest.raises(FileNotFoundError):
        files.unlink(path(1))


def test_archived_file_is_whole_and_durable_after_next_sync() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    files.archive(path(1), "archive/1/0/a.log")
    files.sync_dirty()
    image = disk.crash()
    assert (content(image, path(1)), content(image, "archive/1/0/a.log")) == (None, b"abc")


def test_an_archived_file_has_its_bytes_before_its_new_name() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    files.archive(path(1), "archive/1/0/a.log")
    disk.sync_directory("archive/1/0")
    assert content(disk.crash(), "archive/1/0/a.log") == b"abc"


def test_file_unlinked_while_read_is_closed_by_its_reader() -> None:
    disk = HookedDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    (file,) = disk.opened
    assert isinstance(file, HookedFile)
    file.during_read = lambda: files.unlink(path(1))
    assert files.read(path(1), 3, 0) == b"abc"
    assert disk.open_count == 0


def test_file_in_use_at_close_is_closed_by_its_user() -> None:
    disk = HookedDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    files.write(path(2), 0, b"abc")
    file = disk.opened[0]
    assert isinstance(file, HookedFile)
    file.during_read = files.close
    assert files.read(path(1), 3, 0) == b"abc"
    assert disk.open_count == 0


# --- the limit -------------------------------------------------------------------------------------------------------


def test_thousands_of_files_need_few_descriptors_and_lose_nothing() -> None:
    disk = CountingDisk()
    files = FileCache(disk, open_max=8)
    for turn in range(3):
        for number in range(200):
            files.write(path(number), turn * 3, b"%03d" % number)
            assert disk.open_count <= 8
    files.sync_dirty()
    assert disk.open_count <= 8
    image = disk.crash()
    assert all(content(image, path(number)) == b"%03d" % number * 3 for number in range(200))


def test_the_least_recently_used_goes() -> None:
    disk = CountingDisk()
    files = FileCache(disk, open_max=2)
    for number in (1, 2):
        files.write(path(number), 0, b"abc")
    files.read(path(1), 1, 0)
    files.write(path(3), 0, b"abc")
    assert [file._closed for file in disk.opened] == [False, True, False]


def test_cold_bytes_are_not_waited_for() -> None:
    disk = SimDisk()
    files = FileCache(disk)
    files.write(path(1), 0, b"abc")
    assert files.try_read(path(1), 3, 0) == b"abc"
    disk.cold_reads = True
    assert files.try_read(path(1), 3, 0) is None
    assert files.read(path(1), 3, 0) == b"abc"


def test_a_missing_file_is_not_made_by_reading() -> None:
    disk = SimDisk()
    with pytest.raises(FileNotFoundError):
        FileCache(disk).read(path(1), 1, 0)
    assert not disk.exists("log")


# --- threads ---------------------------------------------------------------------------------------------------------


def test_writers_readers_and_syncs_in_threads(tmp_path: Path) -> None:
    """Real files, more of them than descriptors; every read sees what its own thread wrote before."""
    disk = OSDisk(tmp_path / "data")
    files = FileCache(disk, open_max=4, lock=threading.Lock())
    stop = threading.Event()

    def sync() -> int:
        count = 0
        while not stop.is_set() or count == 0:
            files.sync_dirty()
            count += 1
        return count

    def work(worker: int) -> None:
        for turn in range(200):
            name = path(worker * 10 + turn % 7)
            files.write(name, turn * 8, b"%08d" % turn)
            assert files.read(name, 8, turn * 8) == b"%08d" % turn

    with ThreadPoolExecutor(4) as pool:
        syncing = pool.submit(sync)
        workers = [pool.submit(work, worker) for worker in range(3)]
        try:
            for worker in workers:
                worker.result(60)
        finally:
            stop.set()
        assert syncing.result(60) > 0
    files.sync_dirty()
    assert files.dirty_count == 0
    files.close()
    disk.close()
