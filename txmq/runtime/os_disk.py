"""The operating system's disk (ports ``Disk`` and ``File``).

Theory of operation. The data directory is held open; every path is walked from it one component at a time with
``O_NOFOLLOW``, so that a symbolic link planted below it is refused and not followed, and a
directory that is moved away meanwhile does not matter. Directories are 0700, files 0600, descriptors close on exec.

Invariants:

* a write returns when all its bytes are in the page cache; only ``fdatasync``/``fsync`` make them durable;
* a directory that ``make_directories`` saw is durable when it returns, also when an earlier process made it and died
  before it synced the entry;
* no file or lock is descriptor 0, 1 or 2, whatever the process was started with;
* a failed sync is reported once and never repeated here: the kernel marks the pages clean, so a second sync would lie.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from txmq.errors import DirectoryInUseError
from txmq.runtime.os_process import take_standard_descriptors
from txmq.runtime.ports import Buffer, parent_path, path_parts
from txmq.runtime.private_files import make_private_directory

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ZERO_STEP_BYTES = 1 << 20
_SCRATCH_BYTES = 1 << 20  # the largest step of a read
_SCRATCH_COUNT_MAX = 4
_scratch: list[bytearray] = []
_COMMON = os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | _COMMON
_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", None)  # Linux 4.14
_NO_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})


def _require_open(descriptor: int) -> None:
    if descriptor < 0:  # os.fsync would raise ValueError, which no one takes for a closed file
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _force(descriptor: int) -> None:
    _require_open(descriptor)
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync there leaves the data in the drive's cache
    else:
        os.fsync(descriptor)


def _force_data(descriptor: int) -> None:
    _require_open(descriptor)
    if sys.platform == "linux":
        os.fdatasync(descriptor)
    else:
        _force(descriptor)


@cache
def _boot() -> str:
    """This machine, since it started; a word of this process alone if the system has no name for it."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return secrets.token_hex(16)


def _write_rest(descriptor: int, data: Buffer, done: int, position: int) -> None:
    """Continue a short write. A disk that takes nothing and reports nothing is an error, not a loop."""
    view = memoryview(data).cast("B")
    while done < len(view):
        count = os.pwrite(descriptor, view[done:], position + done)
        if count == 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        done += count


def _take_scratch(size: int) -> bytearray:
    """A buffer of at least ``size`` bytes.

    With a fresh one each time, the allocator gives 1 MiB back and faults it in again at every read, which takes far
    longer than the read of cached bytes. list.pop and append are atomic, so threads share the list.
    """
    try:
        return _scratch.pop() if size <= _SCRATCH_BYTES else bytearray(size)
    except IndexError:
        return bytearray(_SCRATCH_BYTES)


def _return_scratch(buffer: bytearray) -> None:
    if len(buffer) == _SCRATCH_BYTES and len(_scratch) < _SCRATCH_COUNT_MAX:
        _scratch.append(buffer)


class OSFile:
    """An open file (port ``File``).

    Thread safety: calls may come from several threads; the callers see to it that writes do not overlap.
    """

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        self._nowait = _RWF_NOWAIT is not None

    @property
    def path(self) -> str:
        """Relative path it was opened by."""
        return self._path

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes at ``position``; shorter only at the end of the file."""
        data = os.pread(self._descriptor, size, position)
        if len(data) == size or not data:
            return data
        pieces = [data]
        done = len(data)
        while done < size and (data := os.pread(self._descriptor, size - done, position + done)):
            pieces.append(data)
            done += len(data)
        return b"".join(pieces)

    def try_pread(self, size: int, position: int) -> bytes | None:
        """As ``pread`` but only from the page cache; None if it would have to wait for the disk."""
        if not self._nowait or _RWF_NOWAIT is None:
            return self.pread(size, position)
        buffer = _take_scratch(size)
        try:
            with memoryview(buffer) as view, view[:size] as target:
                count = os.preadv(self._descriptor, [target], position, _RWF_NOWAIT)
                if count < size and position + count < self.size():
                    return None  # a part is cached: short here would read as the end of the file
                return bytes(target[:count])
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _NO_NOWAIT:
                raise
            self._nowait = False  # this file system does not have it
            return self.pread(size, position)
        finally:
            _return_scratch(buffer)

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of ``data`` (short writes are continued). Not durable before ``fdatasync``."""
        count = os.pwrite(self._descriptor, data, position)
        if count != len(data) or isinstance(data, memoryview):
            _write_rest(self._descriptor, data, count, position)

    def fdatasync(self) -> None:
        """Force data, and the size if it grew."""
        _force_data(self._descriptor)

    def fsync(self) -> None:
        """Force data and all metadata."""
        _force(self._descriptor)

    def reserve(self, size: int) -> None:
        """Make it ``size`` bytes long, with blocks for all of them; written zeros where the system cannot reserve."""
        position = self.size()
        if position >= size:
            return
        if sys.platform == "linux":
            try:
                os.posix_fallocate(self._descriptor, position, size - position)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
            else:
                return
        zeros = bytes(min(_ZERO_STEP_BYTES, size - position))
        while position < size:
            step = min(len(zeros), size - position)
            self.pwrite(zeros if step == len(zeros) else zeros[:step], position)
            position += step

    def drop_cache(self) -> None:
        """Ask the system to forget clean cached pages, so that the next read shows what the disk holds."""
        if sys.platform == "linux":
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self) -> int:
        """Current size in bytes."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close; does not sync. Closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1  # -1: a later call gets EBADF, never another file
        if descriptor >= 0:
            os.close(descriptor)


class OSLock:
    """A held lock file (``flock``): it ends with the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go. The file stays: unlinking it would let two processes lock two files of one name."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class OSDisk:
    """One data directory; it is made if it is absent (its own parents are not synced, they are the operator's)."""

    def __init__(self, root: Path | str) -> None:
        take_standard_descriptors()
        self._path = Path(root)
        make_private_directory(self._path)
        self._root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._synced_directories: set[tuple[str, ...]] = set()

    def close(self) -> None:
        """Let go of the data directory; open files stay open."""
        descriptor, self._root = self._root, -1
        if descriptor >= 0:
            os.close(descriptor)

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> OSFile:
        """Open an existing file, or create it empty (``create=True``: FileExistsError if it is there)."""
        flags = _COMMON | os.O_NONBLOCK | (os.O_RDWR if writable or create else os.O_RDONLY)  # a FIFO must not hang us
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        with self._parent(path) as (directory, name):
            descriptor = os.open(name, flags, 0o600, dir_fd=directory)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
            except BaseException:
                os.close(descriptor)
                raise
        return OSFile(descriptor, path)

    def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""
        if not path_parts(path):
            return True
        try:
            with self._parent(path) as (directory, name):
                os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def list_directory(self, path: str) -> list[str]:
        """Sorted names; an absent directory lists as empty."""
        try:
            with self._directory(path) as directory:
                return sorted(os.listdir(directory))  # noqa: PTH208 - a descriptor, not a path
        except FileNotFoundError:
            return []

    def make_directories(self, path: str) -> None:
        """Create a directory and its parents (mode 0700), each entry synced; no error if it exists."""
        parts = path_parts(path)
        for depth in range(1, len(parts) + 1):
            if parts[:depth] not in self._synced_directories:
                self._make_directory(parts[:depth])
                self._synced_directories.add(parts[:depth])

    def _make_directory(self, parts: tuple[str, ...]) -> None:
        with self._parent("/".join(parts)) as (directory, name):
            try:
                os.mkdir(name, 0o700, dir_fd=directory)
            except FileExistsError:
                os.close(self._walk(parts))  # refuses what is not a directory
            _force(directory)

    def add_directories(self, path: str) -> list[str]:
        """Create a directory and its parents where they are missing; the directories that got an entry, not synced."""
        parts = path_parts(path)
        if not parts:
            return []
        try:
            with self._parent(path) as (directory, name):
                os.mkdir(name, 0o700, dir_fd=directory)
        except FileExistsError:
            os.close(self._walk(parts))  # refuses what is not a directory
            return []
        except FileNotFoundError:
            return [*self.add_directories(parent_path(path)), *self.add_directories(path)]
        return [parent_path(path)]

    def rename(self, source: str, target: str) -> None:
        """Replace ``target`` atomically; durable only after ``sync_directory``."""
        with self._parent(source) as (from_directory, from_name), self._parent(target) as (to_directory, to_name):
            os.replace(from_name, to_name, src_dir_fd=from_directory, dst_dir_fd=to_directory)

    def unlink(self, path: str) -> None:
        """Remove a file; FileNotFoundError if absent; durable only after ``sync_directory``."""
        with self._parent(path) as (directory, name):
            os.unlink(name, dir_fd=directory)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        self._synced_directories.discard(path_parts(path))
        with self._parent(path) as (directory, name):
            os.rmdir(name, dir_fd=directory)

    def sync_directory(self, path: str) -> None:
        """Force a directory's entries."""
        with self._directory(path) as directory:
            _force(directory)

    def free_bytes(self) -> int:
        """Free space for an unprivileged writer."""
        figures = os.fstatvfs(self._root)
        return figures.f_bavail * figures.f_frsize

    def lock(self, path: str, *, is_shared: bool = False) -> OSLock:
        """Take a lock file, or raise DirectoryInUseError. The file holds the (last) owner's process id.

        Args:
            is_shared: others that share it may hold it too: readers.
        """
        with self._parent(path) as (directory, name):
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | _COMMON, 0o600, dir_fd=directory)
        try:
            self._take(descriptor, path, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        return OSLock(descriptor)

    def lock_name(self, path: str) -> str:
        """A name for a lock file that is there: two processes that know it by the same name cannot both hold it.

        It has another name on another machine, and once the machine has started anew.
        """
        with self._parent(path) as (directory, name):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return f"{_boot()}:{found.st_dev:x}:{found.st_ino:x}"

    def _take(self, descriptor: int, path: str, kind: int) -> None:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise DirectoryInUseError(
                f"{self._path / path} is held by process {owner}: stop that process, or use another data directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def _walk(self, parts: tuple[str, ...]) -> int:
        """A new descriptor of the directory, no component of which is a symbolic link."""
        descriptor = os.dup(self._root)
        try:
            for name in parts:
                try:
                    child = os.open(name, _DIRECTORY_FLAGS, dir_fd=descriptor)
                except NotADirectoryError:
                    mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
                    if stat.S_ISLNK(mode):
                        raise OSError(errno.ELOOP, "a symbolic link is refused") from None
                    raise
                os.close(descriptor)
                descriptor = child
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        """The directory's descriptor; errors name the whole path."""
        parts = path_parts(path)
        try:
            descriptor = self._walk(parts)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path / path)) from error

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The descriptor of the directory that holds ``path``, and the name there; errors name the whole path."""
        parts = path_parts(path)
        if not parts:
            raise IsADirectoryError(errno.EISDIR, "the data directory itself", str(self._path))
        try:
            descriptor = self._walk(parts[:-1])
            try:
                yield descriptor, parts[-1]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path / path)) from error
