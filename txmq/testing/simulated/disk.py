"""A simulated disk (ports ``Disk`` and ``File``): it forgets, tears and refuses as a real one may.

Theory of operation. Reads show the newest bytes (the page cache: one ``bytearray`` a file); beside them a ``Model``
keeps what is durable and what is pending. ``crash()`` draws what a power loss leaves, and returns a new disk that holds
just that. ``kill()`` ends the process only: the cache stays, locks and open files go. Operations can be recorded in a
``Trace``, from which ``sim_images.enumerate_images`` makes every crash image.

Faults: ``fail_at`` lets the n-th write, sync, entry operation, open or read raise. A failed write leaves a part of
itself. A failed sync loses what was pending and keeps showing it (``fsyncgate``), or leaves it pending.
``capacity_bytes`` gives ENOSPC. ``damage`` changes bytes under everybody's feet.

Invariants:

* an operation that raises without being a write or a sync did nothing;
* after ``crash`` or ``kill`` the old disk and its files answer EIO: nothing of the dead process reaches the disk.

Thread safety: none, the simulation has one thread.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from txmq.errors import DirectoryInUseError
from txmq.runtime.paths import ROOT, normal, parent, split
from txmq.runtime.ports import Buffer
from txmq.testing.simulated.damage import SECTOR_BYTES, CrashModel, draw_outcome
from txmq.testing.simulated.disk_model import (
    DIRECTORY,
    AddDirectory,
    Create,
    Image,
    Lose,
    MakeDirectory,
    Model,
    Note,
    Op,
    RemoveDirectory,
    Rename,
    Sync,
    SyncDirectory,
    Trace,
    Truncate,
    Unlink,
    Write,
    overwrite,
    resize,
)

Kind = Literal["write", "sync", "entry", "open", "read"]
_MUTATING: Final = frozenset({"write", "sync", "entry"})
CAPACITY_BYTES: Final = 1 << 40


class Fault(NamedTuple):
    """From the ``first`` operation of that kind on (counted by ``SimDisk.counts``), once or for ever."""

    kind: str
    first: int
    number: int
    forever: bool
    path_prefix: str


class _Node:
    """A file as the process sees it."""

    __slots__ = ("cache", "number")

    def __init__(self, number: int, content: bytes | bytearray = b"") -> None:
        self.number = number
        self.cache = content

    def change(self) -> bytearray:
        if isinstance(self.cache, bytes):
            self.cache = bytearray(self.cache)  # an image's bytes are shared
        return self.cache


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class SimFile:
    """An open file (port ``File``)."""

    def __init__(self, disk: SimDisk, node: _Node, path: str, writable: bool) -> None:
        self._disk, self._node, self._path, self._writable = disk, node, path, writable
        self._closed = False

    @property
    def path(self) -> str:
        """Relative path it was opened by."""
        return self._path

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes at ``position``; shorter only at the end of the file."""
        self._check("read")
        return bytes(self._node.cache[position : position + size])

    def try_pread(self, size: int, position: int) -> bytes | None:
        """As ``pread``; a disk with ``cold_reads`` answers None, as if nothing were cached."""
        self._check("read")
        return None if self._disk.cold_reads else bytes(self._node.cache[position : position + size])

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of ``data``. Not durable before ``fdatasync``."""
        self._write(bytes(data), position)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write all buffers, one behind the other, starting at ``position``."""
        self._write(b"".join(buffers), position)

    def _write(self, data: bytes, position: int) -> None:
        failure = self._failure("write")
        growth = position + len(data) - len(self._node.cache)
        if failure is None and growth > 0 and growth > self._disk.free_bytes():
            failure = _error(errno.ENOSPC, self._path)
        if failure is not None:
            data = self._part(data, growth)
        if data:
            self._disk.perform(Write(self._node.number, self._path, position, data))
            before = len(self._node.cache)
            overwrite(self._node.change(), position, data)
            self._disk.used_bytes += len(self._node.cache) - before
        if failure is not None:
            raise failure

    def _part(self, data: bytes, growth: int) -> bytes:
        """What a failing write leaves: some of its sectors, as far as there is room."""
        sectors = len(data) // SECTOR_BYTES
        rng = self._disk.rng
        count = (sectors // 2 if rng is None else rng.randint(0, sectors)) * SECTOR_BYTES
        lacking = max(0, growth - self._disk.free_bytes())
        return data[: max(0, min(count, len(data) - lacking))]

    def fdatasync(self) -> None:
        """Force data, and the size if it grew."""
        failure = self._failure("sync")
        if failure is None:
            self._disk.perform(Sync(self._node.number, self._path))
            return
        if self._disk.fsyncgate:
            self._disk.perform(Lose(self._node.number, self._path))
        raise failure

    def fsync(self) -> None:
        """Force data and all metadata (not the directory entry)."""
        self.fdatasync()

    def truncate(self, size: int) -> None:
        """Set the size."""
        self._check("write")
        growth = size - len(self._node.cache)
        if growth > 0 and growth > self._disk.free_bytes():
            raise _error(errno.ENOSPC, self._path)
        self._disk.perform(Truncate(self._node.number, self._path, size))
        resize(self._node.change(), size)
        self._disk.used_bytes += growth

    def reserve(self, size: int) -> None:
        """Make it ``size`` bytes long, zeros at the end; not durable before ``fsync``."""
        if len(self._node.cache) < size:
            self.truncate(size)
        else:
            self._check("write")

    def drop_cache(self) -> None:
        """Forget clean cached bytes: what a failed sync lost is seen to be lost."""
        self._check(None)
        if self._node.number in self._disk.model.inodes:
            before = len(self._node.cache)
            self._node.cache = self._disk.model.current(self._node.number)
            self._disk.used_bytes += len(self._node.cache) - before

    def size(self) -> int:
        """Current size in bytes."""
        self._check(None)
        return len(self._node.cache)

    def close(self) -> None:
        """Close; does not sync. Closing twice is harmless."""
        self._closed = True

    def _failure(self, kind: Kind | None) -> OSError | None:
        if self._closed or (kind == "write" and not self._writable):
            raise _error(errno.EBADF, self._path)
        return self._disk.failure(kind, self._path)

    def _check(self, kind: Kind | None) -> None:
        if (failure := self._failure(kind)) is not None:
            raise failure


class SimLock:
    """A held lock file; it ends with the process."""

    def __init__(self, locks: set[str], path: str) -> None:
        self._locks, self._path = locks, path

    def release(self) -> None:
        """Let go."""
        self._locks.discard(self._path)


class SimDisk:
    """One simulated data directory.

    Args:
        rng: draws crash outcomes; without it, ``crash()`` drops everything unsynced.
        image: what it holds; empty by default.
        capacity_bytes: writes beyond it get ENOSPC.
        fsyncgate: a failed sync loses what was pending (Linux); without it, it stays pending.
        crash_model: what a crash may do.
        record: start a trace.
    """

    def __init__(
        self, rng: random.Random | None = None, *, image: Image | None = None, capacity_bytes: int = CAPACITY_BYTES,
        fsyncgate: bool = True, crash_model: CrashModel | None = None, record: bool = False,
    ) -> None:  # fmt: skip
        image = image if image is not None else Image({}, {})
        self.rng, self.capacity_bytes, self.fsyncgate = rng, capacity_bytes, fsyncgate
        self.crash_model = crash_model if crash_model is not None else CrashModel()
        self.model = Model(image)
        self.cold_reads = False
        self.notes: list[object] = []
        self.trace: Trace | None = None
        self.counts: dict[str, int] = dict.fromkeys(("write", "sync", "entry", "open", "read", "any"), 0)
        self.used_bytes = sum(len(content) for content in image.contents.values())
        self._entries = dict(image.entries)  # as the process sees them
        self._nodes = {number: _Node(number, content) for number, content in image.contents.items()}
        self._next_inode = max(image.contents, default=DIRECTORY) + 1
        self._faults: list[Fault] = []
        self._locks: set[str] = set()
        self._dead = False
        if record:
            self.start_trace()

    # --- what the simulation does to it ---

    def start_trace(self) -> Trace:
        """Record from here on.

        Raises:
            ValueError: something is pending, which the trace could not tell.
        """
        if self.model.pending():
            raise ValueError("a trace starts from a disk with nothing unsynced")
        self.trace = Trace(self.model.build(()), [])
        return self.trace

    def note(self, tag: object) -> None:
        """Mark a progress of the test; every later image comes with it."""
        self.notes.append(tag)
        self.perform(Note(tag))

    def crash(self) -> SimDisk:
        """Power loss: a new disk with what is left. This one, its files and its locks are dead."""
        kept = draw_outcome(self.rng, self.model, self.crash_model) if self.rng is not None else ()
        self._dead = True
        return self._successor(self.model.build(kept))

    def kill(self) -> SimDisk:
        """The process ends, the machine lives: a new disk with the same cache, pending operations and trace."""
        self._dead = True
        disk = self._successor(Image({}, {}))
        disk.model, disk.trace, disk.used_bytes = self.model, self.trace, self.used_bytes
        disk._entries, disk._nodes, disk._next_inode = self._entries, self._nodes, self._next_inode  # noqa: SLF001
        return disk

    def _successor(self, image: Image) -> SimDisk:
        disk = SimDisk(
            self.rng, image=image, capacity_bytes=self.capacity_bytes, fsyncgate=self.fsyncgate,
            crash_model=self.crash_model,
        )  # fmt: skip
        disk.notes = list(self.notes)
        return disk

    def fail_at(
        self, nth: int, number: int = errno.EIO, kind: Kind | Literal["any"] = "any", *, forever: bool = False,
        path_prefix: str = "",
    ) -> None:  # fmt: skip
        """Let the nth operation of a kind from now on (1 is the next) raise ``OSError(number)``.

        Args:
            nth: counted by ``counts``, on all paths.
            number: EIO, ENOSPC, EMFILE, EROFS, ...
            kind: "any" is every write, sync and entry operation (create, rename, unlink, make, remove).
            forever: all later ones too.
            path_prefix: only on paths that start so (the nth operation passes where its path does not).
        """
        self._faults.append(Fault(kind, self.counts[kind] + nth, number, forever, path_prefix))

    def clear_faults(self) -> None:
        """Every operation works again."""
        self._faults.clear()

    def set_free_bytes(self, count: int) -> None:
        """Set the free space as it is now; it shrinks as files grow."""
        self.capacity_bytes = self.used_bytes + count

    def damage(self, path: str, position: int, data: bytes) -> None:
        """Change bytes of a file, in the cache and on disk, as a failing medium does. The file is forced on the way."""
        node = self._node(normal(path))
        self.perform(Write(node.number, path, position, data))
        self.perform(Sync(node.number, path))
        overwrite(node.change(), position, data)

    def perform(self, op: Op) -> None:
        """Let ``op`` happen in the model, and record it."""
        if self._dead:
            raise _error(errno.EIO, "this disk's process has ended")
        self.model.apply(op)
        if self.trace is not None:
            self.trace.ops.append(op)

    def failure(self, kind: Kind | None, path: str) -> OSError | None:
        """Count an operation, and say whether it is to fail."""
        if self._dead:
            raise _error(errno.EIO, path)
        if kind is None:
            return None
        self.counts[kind] += 1
        if kind in _MUTATING:
            self.counts["any"] += 1
        for fault in self._faults:
            if fault.kind != kind and not (fault.kind == "any" and kind in _MUTATING):
                continue
            count = self.counts[fault.kind]
            if (count == fault.first or (fault.forever and count > fault.first)) and path.startswith(fault.path_prefix):
                return _error(fault.number, path)
        return None

    def _check(self, kind: Kind | None, path: str) -> None:
        if (failure := self.failure(kind, path)) is not None:
            raise failure

    # --- port Disk ---

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> SimFile:
        """Open an existing file, or create it empty (``create=True``: FileExistsError if it is there)."""
        path = normal(path)
        self._check("open", path)
        if path == ROOT:
            raise _error(errno.EISDIR, path)
        if create:
            self._create(path)
        return SimFile(self, self._node(path), path, writable or create)

    def _create(self, path: str) -> None:
        self._require_directory(parent(path))
        if path in self._entries:
            raise _error(errno.EEXIST, path)
        self._check("entry", path)
        number, self._next_inode = self._next_inode, self._next_inode + 1
        self.perform(Create(path, number))
        self._entries[path] = number
        self._nodes[number] = _Node(number)

    def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""
        self._check(None, path)
        return (path := normal(path)) == ROOT or path in self._entries

    def list_directory(self, path: str) -> list[str]:
        """Sorted names; an absent directory lists as empty."""
        path = normal(path)
        self._check(None, path)
        if path in self._entries:
            self._require_directory(path)
        return self._names(path)

    def _names(self, path: str) -> list[str]:
        prefix = path + "/" if path else ""
        start = len(prefix)
        return sorted(p[start:] for p in self._entries if p.startswith(prefix) and "/" not in p[start:])

    def make_directories(self, path: str) -> None:
        """Create a directory and its parents, each entry synced; no error where it exists."""
        for name in self._missing(path):
            self.perform(MakeDirectory(name))
            self._entries[name] = DIRECTORY

    def add_directories(self, path: str) -> list[str]:
        """Create a directory and its parents where they are missing; the directories that got an entry, not synced."""
        changed = []
        for name in self._missing(path):
            self.perform(AddDirectory(name))
            self._entries[name] = DIRECTORY
            changed.append(parent(name))
        return changed

    def _missing(self, path: str) -> Iterator[str]:
        """The directories on the way that are to be made, from the top."""
        parts = split(path)
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            if name in self._entries:
                self._require_directory(name)
            else:
                self._check("entry", name)
                yield name

    def rename(self, source: str, target: str) -> None:
        """Replace ``target`` atomically; durable only after ``sync_directory``. Files only."""
        source, target = normal(source), normal(target)
        node = self._node(source)
        self._require_directory(parent(target))
        if self._entries.get(target) == DIRECTORY:
            raise _error(errno.EISDIR, target)
        self._check("entry", source)
        if source == target:
            return
        self.perform(Rename(source, target, node.number))
        self._forget(target)
        self._entries[target] = self._entries.pop(source)

    def unlink(self, path: str) -> None:
        """Remove a file; FileNotFoundError if absent; durable only after ``sync_directory``."""
        path = normal(path)
        self._node(path)
        self._check("entry", path)
        self.perform(Unlink(path))
        self._forget(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        path = normal(path)
        self._require_directory(path)
        if self._names(path):
            raise _error(errno.ENOTEMPTY, path)
        self._check("entry", path)
        self.perform(RemoveDirectory(path))
        del self._entries[path]

    def sync_directory(self, path: str) -> None:
        """Force a directory's entries. One that fails leaves them pending."""
        path = normal(path)
        self._require_directory(path)
        self._check("sync", path)
        self.perform(SyncDirectory(path))

    def free_bytes(self) -> int:
        """Free space."""
        return max(0, self.capacity_bytes - self.used_bytes)

    def lock(self, path: str) -> SimLock:
        """Take an exclusive lock file, or raise DirectoryInUseError. It has no entry: nothing depends on one."""
        path = normal(path)
        self._check("open", path)
        if path in self._locks:
            raise DirectoryInUseError(f"{path} is held by a process: stop that process, or use another data directory")
        self._locks.add(path)
        return SimLock(self._locks, path)

    def _node(self, path: str) -> _Node:
        number = self._entries.get(path)
        if number is None:
            raise _error(errno.ENOENT, path)
        if number == DIRECTORY:
            raise _error(errno.EISDIR, path)
        return self._nodes[number]

    def _forget(self, path: str) -> None:
        number = self._entries.pop(path, None)
        # A crash may have left two names: a rename that is on disk behind one that is not.
        if number is not None and number not in self._entries.values():
            self.used_bytes -= len(self._nodes.pop(number).cache)

    def _require_directory(self, path: str) -> None:
        if path == ROOT:
            return
        number = self._entries.get(path)
        if number is None:
            raise _error(errno.ENOENT, path)
        if number != DIRECTORY:
            raise _error(errno.ENOTDIR, path)
