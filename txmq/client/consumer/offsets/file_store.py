"""Offsets in a file: for a group of one, without anything but the broker and a local disk.

The file is replaced as a whole: written under another name, synced, renamed, the directory synced. A lock file next to
it keeps a second process out, and the broker refuses a second member, because one on another host would not find these
offsets.

Byte layout
    Two lines. The first is JSON: ``{"format": 2, "group": text, "partitions": [[topic, partition, generation, offset or
    null, deferred or null, log or null], ...]}``. The second is the CRC32 of the first without its end: 8 hex digits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

from txmq.client.arguments import require_kind
from txmq.client.consumer.offsets.offset_store import OffsetPosition, StoredOffset
from txmq.errors import ConfigError, CorruptRecordError, DirectoryInUseError, FencedError, StorageError
from txmq.model import TopicPartition
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.ports import Disk
from txmq.runtime.threads import Lock

FORMAT = 2
FILE_SIZE_BYTES_MAX = 1 << 30


class _Kept(NamedTuple):
    generation: int
    found: StoredOffset | None


class FileOffsetStore:
    """See the module's docstring. One consumer at a time.

    Args:
        path: the file; made, with its directory, if it is absent.

    Thread safety: any thread.
    """

    is_shared = False

    def __init__(self, path: str, *, disk: Disk | None = None) -> None:
        require_kind("path", path, str, "the path of a file")
        folder, _, self._name = path.rpartition("/")
        if not self._name or self._name in (".", ".."):
            raise ConfigError(f"path = {path!r}: expected the path of a file")
        self._folder = folder or ("/" if path.startswith("/") else ".")
        self._given, self.path = disk, path
        self._disk: Disk | None = None  # while a consumer uses it
        self._opened = ExitStack()
        self._lock = Lock()
        self._kept: dict[TopicPartition, _Kept] = {}

    def enter(self, group: str) -> None:
        """Take the lock and read the file.

        Raises:
            DirectoryInUseError: another consumer has it.
            CorruptRecordError: it is damaged; nothing was changed.
            ConfigError: it is another group's.
            StorageError: it cannot be read.
        """
        with self._lock:
            if self._disk is not None:
                raise DirectoryInUseError(f"{self.path} is used by another consumer of this process: a group of one")
            with ExitStack() as opened:
                try:
                    disk = self._given or opened.enter_context(closing(OSDisk(self._folder)))
                    opened.callback(disk.lock(self._name + ".lock").release)
                except OSError as error:
                    raise StorageError(f"{self.path}: {error}") from error
                self._kept = self._read(disk, group)
                self._disk, self._opened = disk, opened.pop_all()

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """See ``OffsetStore``."""
        found = self.load_many(group, [(slot, generation)])
        if slot not in found:
            raise FencedError(
                f"{self.path} knows a newer generation of {slot[0]}-{slot[1]} than {generation}: "
                "another broker's, or its clock went back? Then move the file away"
            )
        return found[slot]

    def load_many(
        self, group: str, wanted: Sequence[tuple[TopicPartition, int]]
    ) -> Mapping[TopicPartition, StoredOffset | None]:
        """See ``OffsetStoreOfMany``. The file is replaced once."""
        with self._lock:
            known = {slot: self._kept.get(slot) or _Kept(0, None) for slot, _ in wanted}
            fenced = {
                slot: known[slot]._replace(generation=new) for slot, new in wanted if new > known[slot].generation
            }
            if fenced:
                self._write(group, {**self._kept, **fenced})
            return {slot: known[slot].found for slot, generation in wanted if generation >= known[slot].generation}

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """See ``OffsetStore``."""
        with self._lock:
            kept, refused = dict(self._kept), []
            for position in positions:
                known = kept.get(position.slot)
                if known is None or known.generation != position.generation:
                    refused.append(position.slot)
                else:
                    kept[position.slot] = _Kept(position.generation, position.stored)
            if kept != self._kept:
                self._write(group, kept)
            return refused

    def leave(self, group: str) -> None:
        """Release the lock and close the directory."""
        with self._lock:
            self._disk = None
            self._opened.close()

    # --- the file ----------------------------------------------------------------------------------------------------

    def _read(self, disk: Disk, group: str) -> dict[TopicPartition, _Kept]:
        try:
            file = disk.open(self._name, writable=False)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StorageError(f"{self.path}: {error}") from error
        try:
            data = file.pread(min(file.size(), FILE_SIZE_BYTES_MAX), 0)
        except OSError as error:
            raise StorageError(f"{self.path}: {error}") from error
        finally:
            file.close()
        line, _, crc = data.partition(b"\n")
        if crc != b"%08x\n" % zlib.crc32(line):
            raise CorruptRecordError(self.path, 0, "its CRC does not fit")
        fields = json.loads(line)
        if fields["format"] != FORMAT:
            raise StorageError(f"{self.path}: format {fields['format']} is not known: another txmq wrote it")
        if fields["group"] != group:
            raise ConfigError(f"{self.path} holds the offsets of group {fields['group']!r}, not of {group!r}")
        return {(row[0], row[1]): _kept(row) for row in fields["partitions"]}

    def _write(self, group: str, kept: dict[TopicPartition, _Kept]) -> None:
        """Replace the file; what is kept here changes only once that is durable."""
        if self._disk is None:
            raise StorageError(f"{self.path}: not in use by a consumer")
        line = json.dumps({"format": FORMAT, "group": group, "partitions": [_row(*item) for item in kept.items()]})
        content = b"%b\n%08x\n" % (line.encode(), zlib.crc32(line.encode()))
        try:
            _replace(self._disk, self._name, content)
        except OSError as error:
            raise StorageError(f"{self.path}: {error}") from error
        self._kept = kept


def _replace(disk: Disk, name: str, content: bytes) -> None:
    beside = name + ".new"
    if disk.exists(beside):
        disk.unlink(beside)  # left by a process that was killed
    file = disk.open(beside, create=True)
    try:
        file.pwrite(content, 0)
        file.fsync()
    finally:
        file.close()
    disk.rename(beside, name)
    disk.sync_directory("")


def _kept(row: list[Any]) -> _Kept:
    _, _, generation, offset, deferred, log = row
    return _Kept(generation, None if offset is None else StoredOffset(offset, deferred, log))


def _row(slot: TopicPartition, kept: _Kept) -> list[Any]:
    return [*slot, kept.generation, *(kept.found or (None, None, None))]
