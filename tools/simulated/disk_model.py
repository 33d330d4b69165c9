"""The contents that a disk may have after a power loss: the model under ``SimDisk`` and the crash-image enumerator.

Theory of operation. A file is an inode: its durable bytes, and the operations on it since its last sync, in order. A
directory's entries are likewise the durable ones and the operations since. The same operations, recorded in a
``Trace``, replay to the same model. An *image* is the durable state plus those pending operations that happened to
reach the disk, in order, whole or in part; which ones is for the caller of ``Model.build`` to choose.

Invariants:

* ``Sync`` makes a file's bytes and size durable, not its directory entry; ``SyncDirectory`` makes entries durable, not
  bytes. Any subset of what is pending may be on disk, whatever the order it was asked for;
* a name stands for one inode at a time: a rename is atomic. Across directories, syncing the target's makes the new
  name durable, and only syncing the source's takes the old one away;
* a directory is durable once made (``make_directories`` syncs it), or added and its parent synced; until then nothing
  below it can be reached, whatever was synced there; one that was removed has no entries;
* after ``Lose`` (a failed sync) the pending operations will never reach the disk: Linux marks the pages clean.

Source: ALICE (OSDI 2014), Rebello et al. (ATC 2020), SQLite's crash VFS.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Final, NamedTuple

from txmq.runtime.ports import ROOT_PATH, parent_path

DIRECTORY: Final = 0  # inode number of every directory: only their names matter


class Write(NamedTuple):
    """Bytes written; extends the file if they lie beyond its end."""

    inode: int
    path: str
    position: int
    data: bytes


class Truncate(NamedTuple):
    """A file is cut or extended."""

    inode: int
    path: str
    size: int


class Grow(NamedTuple):
    """The size reached the disk without the bytes: only in images."""

    inode: int
    path: str
    size: int


class Create(NamedTuple):
    """An empty file's entry."""

    path: str
    inode: int


class Rename(NamedTuple):
    """An entry moved, replacing the target."""

    source: str
    target: str
    inode: int


class Unlink(NamedTuple):
    """An entry removed."""

    path: str


class RemoveDirectory(NamedTuple):
    """An empty directory removed."""

    path: str


class AddDirectory(NamedTuple):
    """A directory made, its entry not synced."""

    path: str


class MakeDirectory(NamedTuple):
    """A directory made and its entry synced."""

    path: str


class Sync(NamedTuple):
    """A file's bytes and size forced."""

    inode: int
    path: str


class Lose(NamedTuple):
    """A sync of a file that failed: what was pending is clean in the cache and not on disk."""

    inode: int
    path: str


class SyncDirectory(NamedTuple):
    """A directory's entries forced."""

    path: str


class Note(NamedTuple):
    """A marker of the test: what it has been told so far."""

    tag: object


FileOp = Write | Truncate | Grow
EntryOp = Create | Rename | Unlink | AddDirectory | RemoveDirectory
PendingOp = FileOp | EntryOp
Op = PendingOp | MakeDirectory | Sync | Lose | SyncDirectory | Note
_FILE_OPS = (Write, Truncate, Grow)


def describe(op: Op) -> str:
    """``<kind>:<what it touches>``, for labels."""
    kind = type(op).__name__.lower()
    if isinstance(op, Rename):
        return f"{kind}:{op.source}>{op.target}"
    return kind if isinstance(op, Note) else f"{kind}:{op.path}"


class Image(NamedTuple):
    """The contents of a disk: entries (path to inode number, 0 for a directory) and the files' bytes."""

    entries: dict[str, int]
    contents: dict[int, bytes]

    def fingerprint(self) -> int:
        """Equal for equal images (64 bits, of this process)."""
        contents = self.contents
        return hash(frozenset((path, hash(contents[n]) if n else 0) for path, n in self.entries.items()))


class Trace(NamedTuple):
    """Everything that was done to a disk since ``base``."""

    base: Image
    ops: list[Op]


def overwrite(buffer: bytearray, position: int, data: bytes) -> None:
    """Put ``data`` at ``position``; a gap before it reads as zeros."""
    gap = position - len(buffer)
    if gap > 0 and data:
        buffer.extend(bytes(gap))
    buffer[position : position + len(data)] = data


def resize(buffer: bytearray, size: int) -> None:
    """Cut, or extend with zeros."""
    if size < len(buffer):
        del buffer[size:]
    else:
        buffer.extend(bytes(size - len(buffer)))


def apply_file_op(buffer: bytearray, op: FileOp) -> None:
    """Do to the bytes what ``op`` says."""
    if isinstance(op, Write):
        overwrite(buffer, op.position, op.data)
    elif isinstance(op, Truncate) or op.size > len(buffer):
        resize(buffer, op.size)


def apply_entry_op(entries: dict[str, int], op: EntryOp) -> None:
    """Do to the entries what ``op`` says; the name it starts from may be absent if an earlier op was dropped."""
    if isinstance(op, Create):
        entries[op.path] = op.inode
    elif isinstance(op, Rename):
        entries.pop(op.source, None)
        entries[op.target] = op.inode
    elif isinstance(op, Unlink):
        entries.pop(op.path, None)
    elif isinstance(op, AddDirectory):
        entries[op.path] = DIRECTORY
    else:
        for path in [path for path in entries if path.startswith(op.path + "/")]:
            del entries[path]
        entries.pop(op.path, None)


class Inode:
    """One file's durable bytes and what has been done to it since its last sync."""

    __slots__ = ("_durable", "_snapshot", "pending")

    def __init__(self, content: bytes = b"") -> None:
        self._snapshot: bytes | None = content  # shared between images until it changes
        self._durable: bytearray | None = None
        self.pending: list[tuple[int, FileOp]] = []

    def snapshot(self) -> bytes:
        """The durable bytes."""
        if self._snapshot is None:
            self._snapshot = bytes(self._durable or b"")
        return self._snapshot

    def copy(self) -> bytearray:
        """The durable bytes, to be changed."""
        return bytearray(self._durable if self._snapshot is None and self._durable is not None else self.snapshot())

    def persist(self) -> None:
        """Make everything pending durable."""
        if not self.pending:
            return
        if self._durable is None:
            self._durable = self.copy()
        self._snapshot = None
        for _, op in self.pending:
            apply_file_op(self._durable, op)
        self.pending.clear()

    def size_max(self) -> int:
        """The largest size the file may have on disk."""
        ends = [op.position + len(op.data) if isinstance(op, Write) else op.size for _, op in self.pending]
        durable = self._durable if self._durable is not None else self.snapshot()
        return max([len(durable), *ends])


class Model:
    """Durable state and pending operations of a whole disk."""

    def __init__(self, image: Image) -> None:
        self.inodes: dict[int, Inode] = {number: Inode(content) for number, content in image.contents.items()}
        self._entries = dict(image.entries)  # durable
        self._pending_entries: list[tuple[int, EntryOp]] = []
        self._count = 0

    def apply(self, op: Op) -> None:
        """Let ``op`` happen. Files that no entry can reach any more are forgotten, and operations on them."""
        self._count += 1
        if isinstance(op, _FILE_OPS):
            if (inode := self.inodes.get(op.inode)) is not None:
                inode.pending.append((self._count, op))
        elif isinstance(op, Sync):
            if (inode := self.inodes.get(op.inode)) is not None:
                inode.persist()
        elif isinstance(op, Lose):
            if (inode := self.inodes.get(op.inode)) is not None:
                inode.pending.clear()
        elif isinstance(op, SyncDirectory):
            self._sync_directory(op.path)
        elif isinstance(op, MakeDirectory):
            self._make_directory(op.path)
        elif not isinstance(op, Note):
            self._apply_entry(op)

    def _apply_entry(self, op: EntryOp) -> None:
        if isinstance(op, Create):
            self.inodes[op.inode] = Inode()
        elif isinstance(op, AddDirectory):
            self._finish_removal(op.path)
        self._pending_entries.append((self._count, op))

    def _make_directory(self, path: str) -> None:
        self._finish_removal(path)
        self._entries[path] = DIRECTORY

    def _finish_removal(self, path: str) -> None:
        if any(isinstance(op, RemoveDirectory) and op.path == path for _, op in self._pending_entries):
            self._sync_directory(path)  # the older directory of that name is gone for good
            self._sync_directory(parent_path(path))

    def _sync_directory(self, directory: str) -> None:
        left: list[tuple[int, EntryOp]] = []
        for number, op in self._pending_entries:
            if not isinstance(op, Rename):
                target = source = parent_path(op.path)
            else:
                target, source = parent_path(op.target), parent_path(op.source)
            if source == directory:
                apply_entry_op(self._entries, op)
            elif target == directory and isinstance(op, Rename):
                self._entries[op.target] = op.inode
                left.append((number, Unlink(op.source)))
            else:
                left.append((number, op))
        forgets = len(left) < len(self._pending_entries)
        self._pending_entries = left
        if forgets:
            self._forget_unreachable()

    def _forget_unreachable(self) -> None:
        reachable = set(self._entries.values())
        reachable.update(op.inode for _, op in self._pending_entries if isinstance(op, Create | Rename))
        if len(reachable) < len(self.inodes):
            self.inodes = {number: inode for number, inode in self.inodes.items() if number in reachable}

    def pending(self) -> list[PendingOp]:
        """Operations that are not durable, in the order they were done."""
        numbered: list[tuple[int, PendingOp]] = list(self._pending_entries)
        for inode in self.inodes.values():
            numbered.extend(inode.pending)
        numbered.sort(key=itemgetter(0))
        return [op for _, op in numbered]

    def current(self, number: int) -> bytearray:
        """A file's bytes as the disk and the dirty pages together have them."""
        inode = self.inodes[number]
        buffer = inode.copy()
        for _, op in inode.pending:
            apply_file_op(buffer, op)
        return buffer

    def build(self, kept: Iterable[PendingOp]) -> Image:
        """The durable state with ``kept`` on top: what a power loss may leave."""
        entries = dict(self._entries)
        changed: dict[int, bytearray] = {}
        for op in kept:
            if not isinstance(op, _FILE_OPS):
                apply_entry_op(entries, op)
                continue
            if op.inode not in changed:
                changed[op.inode] = self.inodes[op.inode].copy()
            apply_file_op(changed[op.inode], op)
        if any(isinstance(op, AddDirectory) for _, op in self._pending_entries):
            entries = _reachable(entries)
        contents = {
            number: bytes(changed[number]) if number in changed else self.inodes[number].snapshot()
            for number in entries.values()
            if number != DIRECTORY
        }
        return Image(entries, contents)


def _reachable(entries: dict[str, int]) -> dict[str, int]:
    """Those whose directories are all there."""
    found: dict[str, int] = {}
    for path in sorted(entries):
        above = parent_path(path)
        if above == ROOT_PATH or found.get(above) == DIRECTORY:
            found[path] = entries[path]
    return found
