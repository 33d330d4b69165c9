"""Every image a crash may leave, at every I/O boundary of a recorded run.

Theory of operation. The trace of a ``SimDisk`` is replayed operation by operation. After each, with the pending
operations p0..pn, these images are made (``i`` and ``j`` are numbers in that list):

=====================  ================================================================================
``prefix-i``           the i oldest pending operations; ``prefix-0`` is what was synced, nothing else
``drop-i``             all but one
``reorder-i-j``        the i oldest and the later j: j overtook the ones between
``without-<n>``        all but those on one file (inode n); ``only-<n>``: only those on it
``entries-dropped``    files' bytes but no directory entries; ``entries-only``: the reverse
``torn-i-head-<p>``    of the write i only the sectors before position p; all others kept
``torn-i-tail-<p>``    of the write i only the sectors from position p on
``torn-i-odd``         of the write i every second sector
``size-i``             of the write i only the size
``garbage-i``          garbage where the write i went; ``garbage-i-last``: in its last sector only
``last-...``           as the five above, with everything after the write i dropped
=====================  ================================================================================

After an operation that only adds something pending, images without it were made at the boundary before, so only those
with it are made; after a sync, or where notes were passed, all are. Only the newest ``window`` pending operations are
varied (older ones are kept, and dropped by ``prefix-0``, ``without``, ``only``, ``entries-...``). Equal images with the
same notes are made once.

Invariants: what was synced is in every image; a label names one image of a trace, for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tools.simulated.damage import SECTOR_BYTES, CrashModel, cut, garbage, garbage_range, grown, inner_boundaries
from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import (
    AddDirectory,
    Create,
    MakeDirectory,
    Model,
    Note,
    Op,
    PendingOp,
    RemoveDirectory,
    Rename,
    Trace,
    Truncate,
    Unlink,
    Write,
    describe,
)

WINDOW = 8  # B3 and CrashMonkey found nearly everything with three operations or fewer
_CUTS_MAX = 4
_ADDS = (Write, Truncate, Create, Rename, Unlink, AddDirectory, RemoveDirectory)
_ENTRY_OPS = (Create, Rename, Unlink, AddDirectory, RemoveDirectory)

Variant = tuple[str, list[PendingOp]]


@dataclass(frozen=True, slots=True)
class _Boundary:
    """One place to crash: the position in the trace, its label, and the notes passed."""

    position: int
    label: str
    notes: tuple[object, ...]
    adds: bool  # the last pending operation is the only news


def enumerate_images(
    trace: Trace, *, granularity: int = SECTOR_BYTES, window: int = WINDOW, powersafe_overwrite: bool = True
) -> Iterator[tuple[str, SimDisk]]:
    """Make every crash image of a trace, each a fresh disk whose ``notes`` are those passed before the crash.

    Args:
        trace: of ``SimDisk(record=True)`` or ``SimDisk.start_trace``.
        granularity: bytes of a sector.
        window: how many of the newest pending operations are varied.
        powersafe_overwrite: garbage stays within the bytes being written; without it, it takes their whole sectors.

    Returns:
        Pairs of label and disk. ``image(trace, label, ...)`` with the same settings makes one again.
    """
    crash_model = CrashModel(granularity=granularity, powersafe_overwrite=powersafe_overwrite)
    seen: set[tuple[int, int]] = set()
    for boundary, model in _boundaries(trace):
        for name, kept in _variants(model, boundary.adds, window, crash_model):
            made = model.build(kept)
            key = (made.fingerprint(), len(boundary.notes))
            if key not in seen:
                seen.add(key)
                disk = SimDisk(image=made)
                disk.notes = list(boundary.notes)
                yield f"{boundary.label}:{name}", disk


def image(
    trace: Trace, label: str, *, granularity: int = SECTOR_BYTES, window: int = WINDOW, powersafe_overwrite: bool = True
) -> SimDisk:
    """Make the one image that ``enumerate_images`` with the same settings calls ``label``.

    Raises:
        LookupError: this trace has no such image.
    """
    crash_model = CrashModel(granularity=granularity, powersafe_overwrite=powersafe_overwrite)
    for boundary, model in _boundaries(trace):
        if not label.startswith(boundary.label + ":"):
            continue
        for name, kept in _variants(model, boundary.adds, window, crash_model):
            if f"{boundary.label}:{name}" == label:
                disk = SimDisk(image=model.build(kept))
                disk.notes = list(boundary.notes)
                return disk
    raise LookupError(f"no image {label!r} in this trace of {len(trace.ops)} operations")


def _boundaries(trace: Trace) -> Iterator[tuple[_Boundary, Model]]:
    """Before the first operation, after each, and after each run of notes."""
    model = Model(trace.base)
    notes: tuple[object, ...] = ()
    yield _Boundary(0, "0:start", notes, adds=False), model
    for position, op in enumerate(trace.ops, start=1):
        model.apply(op)
        if isinstance(op, Note):
            notes = (*notes, op.tag)
            if position < len(trace.ops) and isinstance(trace.ops[position], Note):
                continue
        yield _Boundary(position, f"{position}:{describe(op)}", notes, _only_adds(op)), model


def _only_adds(op: Op) -> bool:
    return isinstance(op, _ADDS) and not isinstance(op, MakeDirectory)


def _variants(model: Model, adds: bool, window: int, crash_model: CrashModel) -> Iterator[Variant]:
    pending = model.pending()
    count = len(pending)
    first = max(0, count - window)
    if adds:
        yield f"prefix-{count}", pending
        pairs = ((i, count - 1) for i in range(first, count - 1))
        dropped, damaged = range(first, count - 1), range(count - 1, count)
    else:
        for i in (count, *range(first, count), *([0] if first else [])):
            yield f"prefix-{i}", pending[:i]
        pairs = ((i, j) for i in range(first, count) for j in range(i + 1, count))
        dropped, damaged = range(first, count), range(first, count)
    for i in dropped:
        yield f"drop-{i}", pending[:i] + pending[i + 1 :]
    for i, j in pairs:
        yield f"reorder-{i}-{j}", [*pending[:i], pending[j]]
    yield from _groups(pending)
    for i in damaged:
        yield from _damages(model, pending, i, crash_model)


def _groups(pending: list[PendingOp]) -> Iterator[Variant]:
    """Whole files, and bytes against entries: writeback goes file by file."""
    entries = [op for op in pending if isinstance(op, _ENTRY_OPS)]
    if entries:
        yield "entries-dropped", [op for op in pending if not isinstance(op, _ENTRY_OPS)]
        yield "entries-only", list(entries)
    inodes = sorted({op.inode for op in pending if isinstance(op, Write | Truncate)})
    if len(inodes) + bool(entries) < 2:
        return
    for number in inodes:
        on_it = [isinstance(op, Write | Truncate) and op.inode == number for op in pending]
        yield f"without-{number}", [op for op, is_on_it in zip(pending, on_it, strict=True) if not is_on_it]
        yield f"only-{number}", list(itertools.compress(pending, on_it))


def _damages(model: Model, pending: list[PendingOp], i: int, crash_model: CrashModel) -> Iterator[Variant]:
    write = pending[i]
    if not isinstance(write, Write):
        return
    for name, parts in _partial(model, write, i, crash_model):
        yield name, [*pending[:i], *parts, *pending[i + 1 :]]
        if i + 1 < len(pending):
            yield f"last-{name}", [*pending[:i], *parts]


def _partial(model: Model, write: Write, i: int, crash_model: CrashModel) -> Iterator[Variant]:
    """The remains of one write that a crash may leave."""
    granularity = crash_model.granularity
    start, end = write.position, write.position + len(write.data)
    edges = inner_boundaries(write, granularity)
    for p in _some(edges):
        yield f"torn-{i}-head-{p}", [cut(write, start, p)]
        yield f"torn-{i}-tail-{p}", [cut(write, p, end)]
    if len(edges) > 1:
        sectors = list(itertools.pairwise((start, *edges, end)))
        yield f"torn-{i}-odd", [cut(write, *sector) for sector in sectors[1::2]]
    yield f"size-{i}", [grown(write)]
    low, high = garbage_range(model, write, crash_model)
    yield f"garbage-{i}", [write, garbage(write, low, high)]
    if edges:
        yield f"garbage-{i}-last", [write, garbage(write, edges[-1], high)]


def _some(edges: range) -> list[int]:
    """At most four of them, the first and the last among them."""
    if len(edges) <= _CUTS_MAX:
        return list(edges)
    last = len(edges) - 1
    return [edges[last * k // (_CUTS_MAX - 1)] for k in range(_CUTS_MAX)]
