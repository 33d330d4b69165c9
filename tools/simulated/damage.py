"""The remains of one unsynced write after a power loss: parts of it, its size alone, garbage; and a draw of it all.

Sectors are ``granularity`` bytes, aligned in the file. A sector is written whole or not at all; between sectors
anything goes. Garbage covers the bytes that were being written, or, with ``powersafe_overwrite=False``, the whole
sectors they touch, with whatever durable neighbours lie there (SQLite's SQLITE_IOCAP_POWERSAFE_OVERWRITE: bytes outside
a write are never changed by it, which SQLite and file systems assume of disks).
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.simulated.disk_model import FileOp, Grow, Model, PendingOp, Write

SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class CrashModel:
    """The faults that the simulated disk may bring on unsynced operations.

    Args:
        reorder: any subset may be on disk; without it, always the oldest ones.
        torn: a write may be there in part.
        garbage: a write may leave garbage in place of itself.
        granularity: bytes of a sector.
        powersafe_overwrite: bytes next to a write are safe from it.
    """

    reorder: bool = True
    torn: bool = True
    garbage: bool = True
    granularity: int = SECTOR_BYTES
    powersafe_overwrite: bool = True


def cut(write: Write, start: int, end: int) -> Write:
    """The part of a write between two positions of the file."""
    return Write(write.inode, write.path, start, write.data[start - write.position : end - write.position])


def inner_boundaries(write: Write, granularity: int) -> range:
    """Positions inside the write at which a sector ends."""
    return range((write.position // granularity + 1) * granularity, write.position + len(write.data), granularity)


def grown(write: Write) -> Grow:
    """The write's size without its bytes."""
    return Grow(write.inode, write.path, write.position + len(write.data))


def garbage(write: Write, start: int, end: int) -> Write:
    """Bytes that are neither the old nor the new ones; the same for the same write."""
    seed = zlib.crc32(write.data, write.position & 0xFFFFFFFF) ^ start
    return Write(write.inode, write.path, start, random.Random(seed).randbytes(end - start))


def garbage_range(model: Model, write: Write, crash_model: CrashModel) -> tuple[int, int]:
    """The bytes in which a write may leave garbage; never beyond the end of the file."""
    start, end = write.position, write.position + len(write.data)
    if crash_model.powersafe_overwrite:
        return start, end
    granularity = crash_model.granularity
    sectors_end = -(-end // granularity) * granularity
    return start // granularity * granularity, min(sectors_end, max(end, model.inodes[write.inode].size_max()))


def _torn(rng: random.Random, write: Write, granularity: int) -> Iterator[FileOp]:
    """A random prefix, or a random choice of at most 64 runs of sectors."""
    edges = [write.position, *inner_boundaries(write, granularity), write.position + len(write.data)]
    if rng.random() < 0.5:
        yield cut(write, write.position, rng.choice(edges))
        return
    if rng.random() < 0.5:
        yield grown(write)
    if len(edges) > 64:
        edges = sorted({edges[0], edges[-1], *rng.sample(edges, 62)})
    for start, end in itertools.pairwise(edges):
        if rng.random() < 0.5:
            yield cut(write, start, end)


def _remains(rng: random.Random, model: Model, op: PendingOp, crash_model: CrashModel) -> Iterator[PendingOp]:
    draw = rng.random()
    if not isinstance(op, Write) or draw < 0.6:
        if draw < 0.3 or (not isinstance(op, Write) and draw < 0.6):
            yield op
    elif draw < 0.85 and crash_model.torn:
        yield from _torn(rng, op, crash_model.granularity)
    elif crash_model.garbage:
        yield op
        yield garbage(op, *garbage_range(model, op, crash_model))


def draw_outcome(rng: random.Random, model: Model, crash_model: CrashModel) -> Sequence[PendingOp]:
    """Which of the pending operations, or parts of them, a power loss leaves on disk."""
    pending = model.pending()
    style = rng.random()
    if style < 0.1:
        return []
    if style < 0.2:
        return pending
    if style < 0.35 or not crash_model.reorder:  # the oldest, the last of them in part
        kept = pending[: rng.randint(0, len(pending))]
        return [*kept[:-1], *_remains(rng, model, kept[-1], crash_model)] if kept else []
    return [part for op in pending for part in _remains(rng, model, op, crash_model)]
