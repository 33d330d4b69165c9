"""Descriptors of segment files: thousands of partitions without thousands of open files.

Theory of operation. ``write`` and ``read`` borrow a handle (*pinned* while it is used) from an LRU cache. A write marks
its file dirty with a growing number once it is done; a sync takes note of the number, syncs, and clears the mark only
if the number is still the same. So writes may go on during a checkpoint's ``sync_dirty``, and what was written before
it began is synced when it returns, from any thread.

Invariants:
    * a dirty file is synced before its descriptor is closed (a later descriptor may never hear of a failed write-back);
      clean files are closed first, and ``takes`` says beforehand whether they suffice: the event loop never waits for
      such a sync;
    * the directory of what was created or unlinked, file or directory, is synced by the next ``sync_dirty``, also where
      an earlier process did it (``distrust``): until then the journal has all that may be lost with an entry;
    * a failed sync is never repeated and never forgotten: the kernel marks the pages clean, so a second one would lie.
      All later syncs fail too; the bytes are safe in the journal, a restart writes them again;
    * the last user of a handle closes it, so that no reader gets another file's bytes through a reused descriptor.

Thread safety: any thread; the lock given to the constructor is held for the bookkeeping, never during I/O.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from txmq.errors import caused
from txmq.log.segment_index import IndexCache
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Buffer, Disk, File, parent_path

_PINNED_MAX = 4  # clean files that cannot go just now: a read in each of the broker's threads


class _Handle:
    __slots__ = ("dropped", "file", "pins")

    def __init__(self, file: File) -> None:
        self.file, self.pins, self.dropped = file, 1, False


class FileCache:
    """See the module's docstring. ``indexes`` are those of the same files."""

    def __init__(self, disk: Disk, open_max: int = 256, *, lock: AbstractContextManager[Any] | None = None) -> None:
        self._disk, self._open_max = disk, open_max
        self._lock: AbstractContextManager[Any] = lock if lock is not None else nullcontext()
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._dirty: dict[str, int] = {}  # path -> number of its last write
        self._entries: dict[str, int] = {}  # directory -> number of its last change
        self._number = 0
        self._failed: OSError | None = None
        self.indexes = IndexCache(lock=lock)

    # --- use ---------------------------------------------------------------------------------------------------------

    def write(self, path: str, position: int, data: Buffer) -> None:
        """Write, creating the file if it is absent. Durability: none before ``sync_dirty``.

        Raises:
            OSError: the file may hold a part of it; writing the same again is fine.
        """
        handle = self._pin(path, create=True)
        try:
            handle.file.pwrite(data, position)
        finally:
            self._unpin(handle, wrote=path)

    def read(self, path: str, size: int, position: int) -> bytes:
        """Up to ``size`` bytes; shorter only at the end of the file; FileNotFoundError if it is absent."""
        handle = self._pin(path, create=False)
        try:
            return handle.file.pread(size, position)
        finally:
            self._unpin(handle)

    def try_read(self, path: str, size: int, position: int) -> bytes | None:
        """As ``read``, only from the page cache; None if it would have to wait for the disk."""
        if not self.takes(1) and path not in self._handles:
            return None
        handle = self._pin(path, create=False)
        try:
            return handle.file.try_pread(size, position)
        finally:
            self._unpin(handle)

    def takes(self, count: int) -> bool:
        """Whether so many more files can be opened before a dirty one must be synced and closed for them.

        Every dirty file is open, and the clean ones go first.
        """
        return len(self._dirty) + count + _PINNED_MAX <= self._open_max

    def is_open(self, path: str) -> bool:
        """Whether writing to it opens no file."""
        return path in self._handles

    # --- durability --------------------------------------------------------------------------------------------------

    @property
    def dirty_count(self) -> int:
        """Files with writes that no sync has covered."""
        return len(self._dirty)

    def sync_dirty(self, paths: Iterable[str] | None = None) -> None:
        """Force files and the directory entries that changed.

        Args:
            paths: only these files, and the directories above them; None is all.

        Durability: everything written before the call, by anyone, is on disk when this returns.

        Raises:
            OSError: a sync failed, now or earlier; the broker must stop (see the invariants).
        """
        chosen = None if paths is None else set(paths)
        directories = None if chosen is None else {above for path in chosen for above in _above(path)}
        with self._lock:
            files = [item for item in self._dirty.items() if chosen is None or item[0] in chosen]
            entries = [item for item in self._entries.items() if directories is None or item[0] in directories]
        self._refuse_after_failure()
        for path, number in files:
            self._sync_file(path, number)
        for directory, number in entries:
            self._sync_directory(directory, number)

    def _sync_file(self, path: str, number: int) -> None:
        try:
            handle = self._pin(path, create=False)
        except FileNotFoundError:
            if path in self._dirty:
                raise
            return  # unlinked meanwhile
        try:
            self._force(handle.file, path)
        finally:
            self._unpin(handle)
        self._clear(self._dirty, path, number)

    def _force(self, file: File, path: str) -> None:
        self._refuse_after_failure()
        try:
            file.fdatasync()
        except OSError as error:
            self._fail(error, path)

    def _sync_directory(self, directory: str, number: int) -> None:
        try:
            self._disk.sync_directory(directory)
        except FileNotFoundError:
            pass  # removed with its files; its parent's entries are of no consequence
        except OSError as error:
            self._fail(error, directory)
        self._clear(self._entries, directory, number)

    def _fail(self, error: OSError, path: str) -> None:
        """Never ENOSPC, which would invite a retry: the lost pages look clean in the cache now."""
        self._failed = OSError(errno.EIO, f"sync failed ({error.strerror}); restart, the journal has the bytes", path)
        raise caused(self._failed, error) from error

    def _refuse_after_failure(self) -> None:
        if self._failed is not None:
            raise OSError(errno.EIO, self._failed.strerror, self._failed.filename)

    def _clear(self, marks: dict[str, int], path: str, number: int) -> None:
        with self._lock:
            if marks.get(path) == number:
                del marks[path]

    # --- removal -----------------------------------------------------------------------------------------------------

    def unlink(self, path: str) -> None:
        """Remove a file. Durability: with the next ``sync_dirty``; until then a crash may bring it back."""
        self._forget(path)
        self._disk.unlink(path)
        self._forget(path)  # a sync or reader may have opened it in between
        self._changed(parent_path(path))

    def archive(self, path: str, target: str) -> None:
        """Move a file that is complete to ``target``; its bytes are forced before. Durability: as ``unlink``."""
        with self._lock:
            number = self._dirty.get(path)
        if number is not None:
            self._sync_file(path, number)
        self._forget(path)
        self._disk.make_directories(parent_path(target))
        self._disk.rename(path, target)
        self._forget(path)
        self._changed(parent_path(path))
        self._changed(parent_path(target))

    def _forget(self, path: str) -> None:
        self.indexes.drop(path)
        with self._lock:
            self._dirty.pop(path, None)
            handle = self._handles.pop(path, None)
            if handle is not None:
                handle.pins += 1
                handle.dropped = True
        if handle is not None:
            self._unpin(handle)

    def close(self) -> None:
        """Close everything (what is in use: as soon as it is not); syncs nothing."""
        with self._lock:
            handles, self._handles = list(self._handles.values()), OrderedDict()
            for handle in handles:
                handle.pins += 1
                handle.dropped = True
        for handle in handles:
            self._unpin(handle)

    # --- handles -----------------------------------------------------------------------------------------------------

    def _pin(self, path: str, *, create: bool) -> _Handle:
        with self._lock:
            handle = self._handles.get(path)
            if handle is not None:
                handle.pins += 1
                self._handles.move_to_end(path)
                return handle
        return self._insert(path, _Handle(self._open(path, create=create)))

    def _open(self, path: str, *, create: bool) -> File:
        try:
            return self._disk.open(path)
        except FileNotFoundError:
            if not create:
                raise
        directory = parent_path(path)
        for changed in self._disk.add_directories(directory):  # not synced: there may be 10,000 new partitions
            self._changed(changed)
        crash_point("segment.roll")
        try:
            file = self._disk.open(path, create=True)
        except FileNotFoundError:
            return self._open(path, create=True)  # the directory was removed in between, to make room on a full disk
        self._changed(directory)
        return file

    def distrust(self, directory: str) -> None:
        """An earlier process may have made it, or changed what is in it, and never synced that: sync it next time."""
        if self._disk.exists(directory):
            for changed in (directory, *_above(directory)):
                self._changed(changed)

    def _changed(self, directory: str) -> None:
        with self._lock:
            self._number += 1
            self._entries[directory] = self._number

    def _insert(self, path: str, opened: _Handle) -> _Handle:
        with self._lock:
            handle = self._handles.setdefault(path, opened)
            if handle is not opened:
                handle.pins += 1
        if handle is not opened:
            opened.file.close()
        try:
            while (victim := self._pin_victim()) is not None and self._evict(*victim):
                pass
        except BaseException:
            self._unpin(handle)
            raise
        return handle

    def _pin_victim(self) -> tuple[str, _Handle] | None:
        """The least recently used that is clean, else the least recently used; None if all is within the limit."""
        with self._lock:
            if len(self._handles) <= self._open_max:
                return None
            victim: tuple[str, _Handle] | None = None
            for path, handle in self._handles.items():
                if handle.pins == 0 and (victim is None or path not in self._dirty):
                    victim = path, handle
                    if path not in self._dirty:
                        break
            if victim is not None:
                victim[1].pins += 1
            return victim

    def _evict(self, path: str, handle: _Handle) -> bool:
        """Close a pinned victim; False if another thread pinned it meanwhile: it stays."""
        number = self._dirty.get(path)
        try:
            if number is not None:
                self._force(handle.file, path)
                self._clear(self._dirty, path, number)
            with self._lock:
                if handle.pins > 1 or path in self._dirty or self._handles.get(path) is not handle:
                    return False
                del self._handles[path]
                handle.dropped = True
                return True
        finally:
            self._unpin(handle)

    def _unpin(self, handle: _Handle, wrote: str | None = None) -> None:
        with self._lock:
            if wrote is not None and not handle.dropped:
                self._number += 1
                self._dirty[wrote] = self._number
            handle.pins -= 1
            done = handle.dropped and handle.pins == 0
        if done:
            handle.file.close()


def _above(path: str) -> list[str]:
    """The directories that lead to it, the nearest first."""
    found = []
    while path:
        path = parent_path(path)
        found.append(path)
    return found
