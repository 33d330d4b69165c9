"""Which replica of its home a directory is: ``replica.json``.

Theory of operation. A home's directory has a *number* among the home's replicas, and an *incarnation*, drawn when it is
made: one that was wiped and made anew is another one. Each *start* of its process is a number, too, drawn at random.
The registry names the start that led last. A directory that does not know it is an older copy, and is refused. The
journal has the starts that led (LED), so that one that was put back by itself is refused, too; here are the *pending*
ones, which the registry may have heard of, and which died before their LED was durable.

A full disk must not keep a broker from starting. So the file is written into its *spare*, which has the blocks already,
and the spare takes its name; the next spare has those of the file that was replaced.

Invariants:

* forced under another name, renamed, directory forced: it is whole, old or new;
* a directory that has a journal and no such file is refused.

Layout: as ``node.json``: ``{"format": 1, "number": n, "incarnation": "<32 hex>", "pending": ["<32 hex>", ...],
"catching_up": n, "crc32c": "<8 hex>"}``, the newest start last, ``catching_up`` in copies alone; then spaces up to
``SIZE_BYTES``.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress
from typing import Any, Final, NamedTuple

from txmq.errors import ConfigError, CorruptRecordError
from txmq.redo.checkpoint import DIRECTORY as CHECKPOINT_DIRECTORY
from txmq.redo.directory_identity import FORMAT, encode_fields, read_fields
from txmq.redo.journal_files import list_bases
from txmq.runtime.ports import Disk, Random

PATH: Final = "replica.json"
SIZE_BYTES: Final = 64 << 10
START_BITS: Final = 128  # of a number drawn for a start
PENDING_MAX: Final = 1000
_SPARE: Final = PATH + ".spare"
_TEMPORARY: Final = PATH + ".tmp"
_ROOT: Final = ""


class Replica(NamedTuple):
    """The identity of a directory among those of its home.

    Attributes:
        number: 1 for the first, or only, one; 0 for a copy, which has none.
        pending: starts that the registry may name and the journal has not; the newest is the last.
        catching_up: the directory is a *copy*: from this lsn on, marks in its journal tell of the leader's disk, and
            it leads nothing. None: it is not.
    """

    number: int
    incarnation: int
    pending: tuple[int, ...] = ()
    catching_up: int | None = None


def load_or_create(disk: Disk, random: Random) -> Replica:
    """The directory's; one without a journal gets one. The caller holds the lock.

    Durability: synced when this returns.

    Raises:
        CorruptRecordError: damaged, or missing although there is a journal.
        StorageError: a newer version wrote it.
    """
    replica = load(disk)
    if replica is not None:
        disk.sync_directory(_ROOT)  # an earlier process may have died between the rename and this
        return replica
    if list_bases(disk) or disk.list_directory(CHECKPOINT_DIRECTORY):
        raise CorruptRecordError(PATH, 0, "missing, although the directory holds a journal: restore it from a backup")
    replica = Replica(1, random.bits(128))
    _write(disk, replica)
    return replica


def load_or_create_copy(disk: Disk, random: Random) -> Replica:
    """The identity of a copy; a directory without a journal becomes one. The caller holds the lock.

    Durability: synced when this returns.

    Raises:
        ConfigError: the directory is a home's own.
        CorruptRecordError, StorageError: as ``load_or_create``.
    """
    replica = load(disk)
    if replica is None and not (list_bases(disk) or disk.list_directory(CHECKPOINT_DIRECTORY)):
        _write(disk, Replica(0, random.bits(128), catching_up=0))
    elif replica is not None and replica.catching_up is None:
        raise ConfigError("the data directory is a home's own, no copy: give --replica-of another one with --data DIR")
    return load_or_create(disk, random)


def add_start(disk: Disk, start: int, led: Container[int] = ()) -> tuple[int, ...]:
    """A process is about to show itself to the registry. Durability: synced when this returns; may be repeated.

    Args:
        led: starts that the journal has. One is still pending here if its process died at ``drop_start``.

    Returns:
        all starts that are pending.
    """
    replica = _required(disk)
    others = (known for known in replica.pending if known != start and known not in led)
    pending = (*others, start)[-PENDING_MAX:]
    _write(disk, replica._replace(pending=pending))
    return pending


def drop_start(disk: Disk, start: int) -> None:
    """The journal has it, forced. Durability: synced when this returns."""
    replica = _required(disk)
    _write(disk, replica._replace(pending=tuple(known for known in replica.pending if known != start)))


def _required(disk: Disk) -> Replica:
    replica = load(disk)
    if replica is None:
        raise CorruptRecordError(PATH, 0, "missing: it was removed while the broker ran")
    return replica


def load(disk: Disk) -> Replica | None:
    """The directory's; None if there is none. Raises as ``load_or_create``."""
    fields = read_fields(disk, PATH, SIZE_BYTES)
    if fields is None:
        return None
    pending = tuple(int(start, 16) for start in fields["pending"])
    return Replica(fields["number"], int(fields["incarnation"], 16), pending, fields.get("catching_up"))


def _write(disk: Disk, replica: Replica) -> None:
    fields: dict[str, Any] = {
        "format": FORMAT, "number": replica.number, "incarnation": f"{replica.incarnation:032x}",
        "pending": [f"{start:032x}" for start in replica.pending],
    }  # fmt: skip
    if replica.catching_up is not None:
        fields["catching_up"] = replica.catching_up
    if not disk.exists(_SPARE):
        _make_spare(disk)
    file = disk.open(_SPARE)
    try:
        file.pwrite(encode_fields(fields).ljust(SIZE_BYTES), 0)
        file.fsync()
    finally:
        file.close()
    disk.rename(_SPARE, PATH)
    disk.sync_directory(_ROOT)
    with suppress(OSError):  # the next start makes it, or has to wait
        _make_spare(disk)


def _make_spare(disk: Disk) -> None:
    with suppress(FileNotFoundError):
        disk.unlink(_TEMPORARY)
    file = disk.open(_TEMPORARY, create=True)
    try:
        file.pwrite(b" " * SIZE_BYTES, 0)
        file.fsync()
    finally:
        file.close()
    disk.rename(_TEMPORARY, _SPARE)
    disk.sync_directory(_ROOT)
