"""What every Disk promises, held against the operating system's and the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.simulated.disk import SimDisk
from txmq.errors import DirectoryInUseError
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.ports import Disk, File


@pytest.fixture(params=["os", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "simulated":
        yield SimDisk()
        return
    real = OSDisk(tmp_path / "data")
    yield real
    real.close()


@pytest.fixture
def file(disk: Disk) -> Iterator[File]:
    opened = disk.open("file", create=True)
    yield opened
    opened.close()


def test_a_created_file_is_empty_and_knows_its_path(disk: Disk, file: File) -> None:
    assert (file.path, file.size(), file.pread(10, 0)) == ("file", 0, b"")
    assert disk.exists("file")


def test_reads_show_what_was_written(file: File) -> None:
    file.pwrite(b"hello", 0)
    file.pwrite(b"J", 0)
    assert file.pread(100, 0) == b"Jello"
    assert file.pread(2, 1) == b"el"
    assert file.pread(5, 5) == file.pread(5, 500) == b""


@pytest.mark.parametrize("buffer", [b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"xabcx")[1:4]])
def test_every_kind_of_buffer_can_be_written(file: File, buffer: bytes | bytearray | memoryview) -> None:
    file.pwrite(buffer, 2)
    assert file.pread(100, 0) == b"\0\0abc"


def test_a_write_keeps_no_hold_on_the_callers_buffer(file: File) -> None:
    buffer = bytearray(b"before")
    file.pwrite(buffer, 0)
    buffer[:] = b"after!"
    assert file.pread(6, 0) == b"before"


def test_a_write_beyond_the_end_leaves_zeros_between(file: File) -> None:
    file.pwrite(b"x", 1000)
    assert file.size() == 1001
    assert file.pread(1001, 0) == bytes(1000) + b"x"


def test_an_empty_write_changes_nothing(file: File) -> None:
    file.pwrite(b"", 1000)
    assert file.size() == 0


def test_try_pread_of_cached_bytes_equals_pread(file: File) -> None:
    file.pwrite(b"0123456789", 0)
    assert file.try_pread(4, 3) == b"3456"
    assert file.try_pread(100, 8) == b"89"
    assert file.try_pread(100, 10) == b""


def test_every_try_pread_returns_its_own_bytes(file: File) -> None:
    size = (1 << 20) + 1
    file.pwrite(b"a" * size + b"b" * size, 0)
    small, large, larger = file.try_pread(10, 0), file.try_pread(1 << 20, size), file.try_pread(size, 0)
    assert (small, large, larger) == (b"a" * 10, b"b" * (1 << 20), b"a" * size)
    assert file.try_pread(1 << 21, 2 * size - 5) == b"bbbbb"


def test_reserve_extends_with_zeros_and_keeps_the_content(file: File) -> None:
    file.pwrite(b"head", 0)
    size = (2 << 20) + 5
    file.reserve(size)
    assert file.size() == size
    assert file.pread(size, 0) == b"head" + bytes(size - 4)
    file.reserve(10)
    assert file.size() == size


def test_syncs_and_drop_cache_keep_the_content(disk: Disk, file: File) -> None:
    file.pwrite(b"kept", 0)
    file.fdatasync()
    file.pwrite(b"!", 4)
    file.drop_cache()
    file.fsync()
    disk.sync_directory("")
    file.drop_cache()
    assert file.pread(10, 0) == b"kept!"


def test_two_handles_see_one_file(disk: Disk, file: File) -> None:
    file.pwrite(b"shared", 0)
    other = disk.open("file", writable=False)
    assert other.pread(10, 0) == b"shared"
    file.pwrite(b"S", 0)
    assert other.pread(1, 0) == b"S"
    other.close()


def test_a_file_opened_for_reading_refuses_writes(disk: Disk, file: File) -> None:
    other = disk.open("file", writable=False)
    with pytest.raises(OSError, match="descriptor"):
        other.pwrite(b"x", 0)
    other.close()
    assert file.size() == 0


def test_a_closed_file_refuses_everything(file: File) -> None:
    file.close()
    file.close()
    for call in (lambda: file.pread(1, 0), lambda: file.pwrite(b"x", 0), file.fdatasync, file.size):
        with pytest.raises(OSError, match="descriptor"):
            call()


def test_create_refuses_a_name_that_is_there(disk: Disk, file: File) -> None:
    file.pwrite(b"x", 0)
    with pytest.raises(FileExistsError):
        disk.open("file", create=True)
    assert file.size() == 1


def test_open_refuses_what_is_absent(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open("absent")
    with pytest.raises(FileNotFoundError):
        disk.open("absent/file", create=True)
    assert not disk.exists("absent")
    assert not disk.exists("absent/file")


def test_directories_are_made_with_their_parents_and_may_be_there(disk: Disk) -> None:
    disk.make_directories("a/b/c")
    disk.make_directories("a/b/c")
    disk.make_directories("")
    assert disk.exists("a/b/c")
    assert (disk.list_directory("a"), disk.list_directory("a/b/c")) == (["b"], [])


def test_directories_are_added_with_parents_and_changed_ones_reported(disk: Disk) -> None:
    assert disk.add_directories("a/b/c") == ["", "a", "a/b"]
    assert disk.add_directories("a/b/c") == []
    assert disk.add_directories("a/b/d") == ["a/b"]
    assert disk.add_directories("") == []
    assert disk.list_directory("a/b") == ["c", "d"]
    for directory in ("", "a", "a/b"):
        disk.sync_directory(directory)


def test_a_directory_cannot_be_added_where_a_file_is(disk: Disk, file: File) -> None:
    with pytest.raises(NotADirectoryError):
        disk.add_directories(file.path)
    with pytest.raises(NotADirectoryError):
        disk.add_directories(file.path + "/below")


def test_a_directory_cannot_be_made_where_a_file_is(disk: Disk, file: File) -> None:
    with pytest.raises(NotADirectoryError):
        disk.make_directories(file.path)
    with pytest.raises(NotADirectoryError):
        disk.make_directories(file.path + "/below")


def test_a_directory_cannot_be_opened_as_a_file(disk: Disk) -> None:
    disk.make_directories("a")
    with pytest.raises(IsADirectoryError):
        disk.open("a")
    with pytest.raises(OSError, match="directory"):
        disk.open("", create=True)


def test_listing_is_sorted_and_an_absent_directory_is_empty(disk: Disk) -> None:
    disk.make_directories("d/sub")
    for name in ("d/2", "d/10", "d/sub/x"):
        disk.open(name, create=True).close()
    assert disk.list_directory("d") == ["10", "2", "sub"]
    assert disk.list_directory("") == disk.list_directory(".") == ["d"]
    assert disk.list_directory("absent") == []


def test_rename_replaces_the_target(disk: Disk, file: File) -> None:
    file.pwrite(b"new", 0)
    old = disk.open("old", create=True)
    old.pwrite(b"old", 0)
    disk.rename("file", "old")
    assert not disk.exists("file")
    again = disk.open("old")
    assert again.pread(10, 0) == b"new"
    assert old.pread(10, 0) == b"old"
    again.close()
    old.close()


def test_rename_reaches_into_another_directory(disk: Disk, file: File) -> None:
    disk.make_directories("d")
    disk.rename("file", "d/file")
    assert (disk.exists("file"), disk.list_directory("d")) == (False, ["file"])


def test_rename_of_an_absent_file_is_refused(disk: Disk, file: File) -> None:
    with pytest.raises(FileNotFoundError):
        disk.rename("absent", "file")
    with pytest.raises(FileNotFoundError):
        disk.rename("file", "absent/file")
    assert disk.exists("file")


def test_an_unlinked_file_is_gone_but_its_handle_lives(disk: Disk, file: File) -> None:
    file.pwrite(b"x", 0)
    disk.unlink("file")
    assert not disk.exists("file")
    disk.sync_directory("")
    file.pwrite(b"y", 1)
    file.fdatasync()
    assert file.pread(10, 0) == b"xy"
    with pytest.raises(FileNotFoundError):
        disk.unlink("file")


def test_only_an_empty_directory_is_removed(disk: Disk) -> None:
    disk.make_directories("d/e")
    disk.open("d/e/file", create=True).close()
    with pytest.raises(OSError, match="not empty"):
        disk.remove_directory("d/e")
    disk.unlink("d/e/file")
    disk.remove_directory("d/e")
    assert disk.list_directory("d") == []
    with pytest.raises(FileNotFoundError):
        disk.remove_directory("d/e")
    disk.make_directories("d/e")
    assert disk.list_directory("d") == ["e"]


def test_syncing_an_absent_directory_is_refused(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.sync_directory("absent")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/./b", "a\0b", "a\\b"])
def test_paths_that_could_leave_the_directory_are_refused(disk: Disk, path: str) -> None:
    for call in (disk.open, disk.exists, disk.list_directory, disk.make_directories, disk.unlink, disk.lock):
        with pytest.raises(ValueError, match="not a relative path"):
            call(path)


def test_free_space_is_a_positive_number(disk: Disk) -> None:
    assert disk.free_bytes() > 0


def test_lock_is_held_by_one_and_can_be_let_go(disk: Disk) -> None:
    lock = disk.lock("lock")
    with pytest.raises(DirectoryInUseError, match=r"lock is held by .*another data directory"):
        disk.lock("lock")
    lock.release()
    lock.release()
    disk.lock("lock").release()
