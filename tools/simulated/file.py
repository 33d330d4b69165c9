"""An open file of the simulated disk, and the file as the process sees it."""

from __future__ import annotations

import errno
import os
import random
from typing import Literal, Protocol

from tools.simulated.damage import SECTOR_BYTES
from tools.simulated.disk_model import Lose, Model, Op, Sync, Truncate, Write, overwrite, resize
from txmq.runtime.ports import Buffer

Kind = Literal["write", "sync", "entry", "open", "read"]


class FileDisk(Protocol):
    """The part of a disk that an open file uses."""

    rng: random.Random | None
    model: Model
    cold_reads: bool
    fsyncgate: bool
    used_bytes: int

    def perform(self, op: Op) -> None:
        """Let ``op`` happen in the model, and record it."""

    def failure(self, kind: Kind | None, path: str) -> OSError | None:
        """Count an operation, and say whether it is to fail."""

    def free_bytes(self) -> int:
        """Free space."""


class Node:
    """A file as the process sees it."""

    __slots__ = ("cache", "number")

    def __init__(self, number: int, content: bytes | bytearray = b"") -> None:
        self.number = number
        self.cache = content

    def change(self) -> bytearray:
        if isinstance(self.cache, bytes):
            self.cache = bytearray(self.cache)  # an image's bytes are shared
        return self.cache


def error(number: int, path: str) -> OSError:
    """As the system raises it."""
    return OSError(number, os.strerror(number), path)


class SimFile:
    """An open file (port ``File``)."""

    def __init__(self, disk: FileDisk, node: Node, path: str, writable: bool) -> None:
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
        data = bytes(data)
        failure = self._failure("write")
        growth = position + len(data) - len(self._node.cache)
        if failure is None and growth > 0 and growth > self._disk.free_bytes():
            failure = error(errno.ENOSPC, self._path)
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
        """The sectors that a failing write leaves, as far as there is room."""
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
            raise error(errno.ENOSPC, self._path)
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
            raise error(errno.EBADF, self._path)
        return self._disk.failure(kind, self._path)

    def _check(self, kind: Kind | None) -> None:
        if (failure := self._failure(kind)) is not None:
            raise failure
