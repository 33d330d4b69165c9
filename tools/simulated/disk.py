"""A simulated disk (ports ``Disk`` and ``File``): it forgets, tears and refuses as a real one may.

Theory of operation. Reads show the newest bytes (the page cache: one ``bytearray`` a file); apart from them a ``Model``
keeps what is durable and what is pending. ``crash()`` draws what a power loss leaves, and returns a new disk that holds
just that. ``kill()`` ends the process only: the cache stays, locks and open files go. Operations can be recorded in a
``Trace``, from which ``crash_images.enumerate_images`` makes every crash image.

Faults: ``fail_at`` lets the n-th write, sync, entry operation, open or read raise. A failed write leaves a part of
itself. A failed sync loses what was pending and keeps showing it (``fsyncgate``), or leaves it pending.
``capacity_bytes`` gives ENOSPC. ``damage`` changes bytes without the program's knowledge.

Invariants:

* an operation that raises without being a write or a sync did nothing;
* after ``crash`` or ``kill`` the old disk and its files answer EIO: nothing of the dead process reaches the disk.

Thread safety: none, the simulation has one thread.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from tools.simulated.damage import CrashModel, draw_outcome
from tools.simulated.disk_model import (
    DIRECTORY,
    AddDirectory,
    Create,
    Image,
    MakeDirectory,
    Model,
    Note,
    Op,
    RemoveDirectory,
    Rename,
    Sync,
    SyncDirectory,
    Trace,
    Unlink,
    Write,
    overwrite,
)
from tools.simulated.file import Kind, Node, SimFile, error
from txmq.errors import DirectoryInUseError
from txmq.runtime.ports import ROOT_PATH, normal_path, parent_path, path_parts

_MUTATING: Final = frozenset({"write", "sync", "entry"})
CAPACITY_BYTES: Final = 1 << 40


class Fault(NamedTuple):
    """From the ``first`` operation of that kind on (counted by ``SimDisk.counts``), once or for ever."""

    kind: str
    first: int
    number: int
    forever: bool
    path_prefix: str


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
        self._nodes = {number: Node(number, content) for number, content in image.contents.items()}
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
        return self.view()

    def view(self) -> SimDisk:
        """The same files, for somebody who only looks: no fault concerns it, nothing is counted, no lock is seen."""
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
            path_prefix: only on paths that start so (the nth operation passes if its path does not).
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
        node = self._node(normal_path(path))
        self.perform(Write(node.number, path, position, data))
        self.perform(Sync(node.number, path))
        overwrite(node.change(), position, data)

    def perform(self, op: Op) -> None:
        """Let ``op`` happen in the model, and record it."""
        if self._dead:
            raise error(errno.EIO, "this disk's process has ended")
        self.model.apply(op)
        if self.trace is not None:
            self.trace.ops.append(op)

    def failure(self, kind: Kind | None, path: str) -> OSError | None:
        """Count an operation, and say whether it is to fail."""
        if self._dead:
            raise error(errno.EIO, path)
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
                return error(fault.number, path)
        return None

    def _check(self, kind: Kind | None, path: str) -> None:
        if (failure := self.failure(kind, path)) is not None:
            raise failure

    # --- port Disk ---

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> SimFile:
        """Open an existing file, or create it empty (``create=True``: FileExistsError if it is there)."""
        path = normal_path(path)
        self._check("open", path)
        if path == ROOT_PATH:
            raise error(errno.EISDIR, path)
        if create:
            self._create(path)
        return SimFile(self, self._node(path), path, writable or create)

    def _create(self, path: str) -> None:
        self._require_directory(parent_path(path))
        if path in self._entries:
            raise error(errno.EEXIST, path)
        self._check("entry", path)
        number, self._next_inode = self._next_inode, self._next_inode + 1
        self.perform(Create(path, number))
        self._entries[path] = number
        self._nodes[number] = Node(number)

    def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""
        self._check(None, path)
        return (path := normal_path(path)) == ROOT_PATH or path in self._entries

    def list_directory(self, path: str) -> list[str]:
        """Sorted names; an absent directory lists as empty."""
        path = normal_path(path)
        self._check(None, path)
        if path in self._entries:
            self._require_directory(path)
        return self._names(path)

    def _names(self, path: str) -> list[str]:
        prefix = path + "/" if path else ""
        start = len(prefix)
        return sorted(p[start:] for p in self._entries if p.startswith(prefix) and "/" not in p[start:])

    def make_directories(self, path: str) -> None:
        """Create a directory and its parents, each entry synced; no error if it exists."""
        for name in self._missing(path):
            self.perform(MakeDirectory(name))
            self._entries[name] = DIRECTORY

    def add_directories(self, path: str) -> list[str]:
        """Create a directory and its parents if they are missing; the directories that got an entry, not synced."""
        changed = []
        for name in self._missing(path):
            self.perform(AddDirectory(name))
            self._entries[name] = DIRECTORY
            changed.append(parent_path(name))
        return changed

    def _missing(self, path: str) -> Iterator[str]:
        """The directories on the way that must be made, from the top."""
        parts = path_parts(path)
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            if name in self._entries:
                self._require_directory(name)
            else:
                self._check("entry", name)
                yield name

    def rename(self, source: str, target: str) -> None:
        """Replace ``target`` atomically; durable only after ``sync_directory``. Files only."""
        source, target = normal_path(source), normal_path(target)
        node = self._node(source)
        self._require_directory(parent_path(target))
        if self._entries.get(target) == DIRECTORY:
            raise error(errno.EISDIR, target)
        self._check("entry", source)
        if source == target:
            return
        self.perform(Rename(source, target, node.number))
        self._forget(target)
        self._entries[target] = self._entries.pop(source)

    def unlink(self, path: str) -> None:
        """Remove a file; FileNotFoundError if absent; durable only after ``sync_directory``."""
        path = normal_path(path)
        self._node(path)
        self._check("entry", path)
        self.perform(Unlink(path))
        self._forget(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        path = normal_path(path)
        self._require_directory(path)
        if self._names(path):
            raise error(errno.ENOTEMPTY, path)
        self._check("entry", path)
        self.perform(RemoveDirectory(path))
        del self._entries[path]

    def sync_directory(self, path: str) -> None:
        """Force a directory's entries. One that fails leaves them pending."""
        path = normal_path(path)
        self._require_directory(path)
        self._check("sync", path)
        self.perform(SyncDirectory(path))

    def free_bytes(self) -> int:
        """Free space."""
        return max(0, self.capacity_bytes - self.used_bytes)

    def lock(self, path: str) -> SimLock:
        """Take an exclusive lock file, or raise DirectoryInUseError. It has no entry: nothing depends on one."""
        path = normal_path(path)
        self._check("open", path)
        if path in self._locks:
            raise DirectoryInUseError(f"{path} is held by a process: stop that process, or use another data directory")
        self._locks.add(path)
        return SimLock(self._locks, path)

    def _node(self, path: str) -> Node:
        number = self._entries.get(path)
        if number is None:
            raise error(errno.ENOENT, path)
        if number == DIRECTORY:
            raise error(errno.EISDIR, path)
        return self._nodes[number]

    def _forget(self, path: str) -> None:
        number = self._entries.pop(path, None)
        # A crash may have left two names: a rename is on disk, and an earlier one is not.
        if number is not None and number not in self._entries.values():
            self.used_bytes -= len(self._nodes.pop(number).cache)

    def _require_directory(self, path: str) -> None:
        if path == ROOT_PATH:
            return
        number = self._entries.get(path)
        if number is None:
            raise error(errno.ENOENT, path)
        if number != DIRECTORY:
            raise error(errno.ENOTDIR, path)
