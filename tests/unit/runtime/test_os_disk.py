"""What only a real disk can do: symbolic links, modes, short writes, cold reads, two processes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from txmq.errors import DirectoryInUseError
from txmq.runtime.os_disk import OSDisk, OSFile

DESCRIPTORS = Path("/dev/fd" if sys.platform == "darwin" else "/proc/self/fd")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def disk(root: Path) -> Iterator[OSDisk]:
    opened = OSDisk(root)
    yield opened
    opened.close()


@pytest.fixture
def file(disk: OSDisk) -> Iterator[OSFile]:
    opened = disk.open("file", create=True)
    yield opened
    opened.close()


def test_nobody_else_may_read(disk: OSDisk, root: Path, file: OSFile) -> None:
    disk.make_directories("a/b")
    disk.lock("lock").release()
    modes = [(root / name).stat().st_mode & 0o777 for name in (".", "a", "a/b", "file", "lock")]
    assert modes == [0o700, 0o700, 0o700, 0o600, 0o600]


def test_a_symbolic_link_is_refused_wherever_it_stands(disk: OSDisk, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "directory").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    calls: list[Callable[[], object]] = [
        lambda: disk.open("file"),
        lambda: disk.lock("file"),
        lambda: disk.open("directory/secret"),
        lambda: disk.open("directory/new", create=True),
        lambda: disk.unlink("directory/secret"),
        lambda: disk.rename("directory/secret", "mine"),
        lambda: disk.make_directories("directory/sub"),
        lambda: disk.make_directories("directory"),
        lambda: disk.list_directory("directory"),
        lambda: disk.sync_directory("directory"),
    ]
    for call in calls:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.ELOOP
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_pipe_in_place_of_a_file_is_refused_without_hanging(disk: OSDisk, root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        disk.open("pipe")


def test_errors_name_the_whole_path(disk: OSDisk, root: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        disk.open("journal/absent")
    assert caught.value.filename == str(root / "journal/absent")


def test_descriptors_close_on_exec(disk: OSDisk, file: OSFile) -> None:
    before = len(list(DESCRIPTORS.iterdir()))
    assert not os.get_inheritable(file._descriptor)
    assert not os.get_inheritable(disk._root)
    with pytest.raises(FileNotFoundError):
        disk.open("a/b/c")
    disk.make_directories("a/b")
    assert disk.list_directory("a") == ["b"]
    assert len(list(DESCRIPTORS.iterdir())) == before  # and none leaks, on success or error


def test_short_writes_are_continued(file: OSFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, position: pwrite(fd, bytes(data)[:3], position))
    file.pwrite(b"0123456789", 0)
    file.pwrite(memoryview(b"abcdefghij"), 10)
    assert file.pread(100, 0) == b"0123456789abcdefghij"


def test_disk_that_takes_nothing_is_error_not_loop(file: OSFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, position: 0)
    with pytest.raises(OSError, match="took no bytes"):
        file.pwrite(b"x", 0)


def test_short_reads_are_continued(file: OSFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.pwrite(b"0123456789", 0)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, position: pread(fd, min(size, 3), position))
    assert file.pread(8, 1) == b"12345678"
    assert file.pread(100, 1) == b"123456789"


def test_read_that_would_wait_is_reported(file: OSFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.pwrite(b"0123456789", 0)

    def cold(*_: Any) -> int:
        raise BlockingIOError(errno.EAGAIN, "cold")

    monkeypatch.setattr(os, "preadv", cold)
    assert file.try_pread(4, 0) is None
    monkeypatch.setattr(os, "preadv", lambda *_: 2)  # half of it is cached
    assert file.try_pread(4, 0) is None


def test_without_nowait_a_try_is_a_plain_read(file: OSFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.pwrite(b"0123456789", 0)
    calls = []

    def unsupported(*_: Any) -> int:
        calls.append(1)
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "preadv", unsupported)
    assert file.try_pread(4, 1) == file.try_pread(4, 1) == b"1234"
    assert len(calls) == 1


def test_reserved_blocks_are_no_holes(file: OSFile, root: Path) -> None:
    file.reserve((1 << 20) + 10)
    assert (root / "file").stat().st_blocks * 512 >= 1 << 20


def test_zeros_are_written_where_the_system_cannot_reserve(file: OSFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    written = []
    pwrite = os.pwrite

    def recorded(fd: int, data: bytes, position: int) -> int:
        written.append((position, len(data)))
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "posix_fallocate", missing)
    monkeypatch.setattr(os, "pwrite", recorded)
    file.reserve((1 << 20) + 10)
    assert written == [(0, 1 << 20), (1 << 20, 10)]
    assert file.pread(2 << 20, 0) == bytes((1 << 20) + 10)


def test_a_full_disk_shows_at_reservation(file: OSFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        file.reserve(1000)


def _synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths given to fsync and fdatasync from here on."""
    paths: list[str] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(fd: int, name: str = name, real: Any = real) -> None:
            paths.append(f"{name} {(DESCRIPTORS / str(fd)).readlink().name}")
            real(fd)

        monkeypatch.setattr(os, name, sync)
    return paths


def test_every_directory_made_is_synced_in_its_parent(disk: OSDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = _synced(monkeypatch)
    disk.make_directories("a/b")
    assert synced == ["fsync data", "fsync a"]


def test_directory_left_unsynced_by_a_dead_process_is_synced_later(
    disk: OSDisk, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a").mkdir()
    synced = _synced(monkeypatch)
    disk.make_directories("a")
    disk.make_directories("a")
    assert synced == ["fsync data"]


def test_syncs_reach_the_right_file(disk: OSDisk, file: OSFile, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.make_directories("a")
    synced = _synced(monkeypatch)
    file.fdatasync()
    file.fsync()
    disk.sync_directory("a")
    disk.sync_directory("")
    assert synced == ["fdatasync file", "fsync file", "fsync a", "fsync data"]


def test_the_lock_names_its_owner(disk: OSDisk, root: Path) -> None:
    lock = disk.lock("lock")
    other = OSDisk(root)
    with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()}: stop that process"):
        other.lock("lock")
    lock.release()
    other.lock("lock").release()
    other.close()
