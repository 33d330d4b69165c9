"""The owner of a data directory: ``node.json``, written once.

Theory of operation. Cluster id and node id are 64 random bits each; they stand in every txid (``txmq.xid``) and in
every journal file, so a directory that was copied or swapped is noticed and not appended to. The lock file keeps a
second process out.

Invariants:

* written under a temporary name, forced, renamed, directory forced; never changed afterwards;
* a directory that holds a journal or checkpoints but no identity is refused: a new one would disown them;
* the caller holds the lock (``LOCK_PATH``) before it looks at anything.

Layout: one line, JSON: ``{"format": 1, "cluster": "<16 hex>", "node": "<16 hex>", "created_ms": n, "crc32c": "<8
hex>"}``; the CRC is over the same JSON without the member ``crc32c``, keys in this order, separators ``", "`` and ``":
"``.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from txmq.errors import CorruptRecordError, DirectoryInUseError, StorageError
from txmq.redo.checkpoint import DIRECTORY as CHECKPOINT_DIRECTORY
from txmq.redo.journal_files import list_bases
from txmq.runtime.ports import Clock, Disk, Random

PATH: Final = "node.json"
LOCK_PATH: Final = "lock"
FORMAT: Final = 1
_TEMPORARY: Final = PATH + ".tmp"
_SIZE_MAX: Final = 4096
_ROOT: Final = ""


class Node(NamedTuple):
    """The identity of a data directory."""

    cluster_id: int
    node_id: int
    created_ms: int


def load_or_create(disk: Disk, random: Random, clock: Clock, cluster_id: int | None = None) -> Node:
    """The directory's identity; a directory without one gets one. The caller holds the lock.

    Args:
        cluster_id: of the cluster that a directory without an identity joins; None draws one.

    Durability: the identity is synced when this returns.

    Raises:
        CorruptRecordError: damaged, or missing although there is a journal.
        StorageError: a newer version wrote it.
    """
    node = load(disk)
    if node is None:
        _refuse_orphans(disk)
        drawn = random.bits(64)
        node = Node(drawn if cluster_id is None else cluster_id, random.bits(64), clock.now_ms())
        _write(disk, node)
    disk.sync_directory(_ROOT)  # also if an earlier process died between the rename and this
    return node


def load_or_copy(disk: Disk, node: Node) -> Node:
    """The identity of a copy: that of the home that it copies. The caller holds the lock.

    Durability: synced when this returns.

    Raises:
        DirectoryInUseError: the directory is another home's.
        CorruptRecordError, StorageError: as ``load_or_create``.
    """
    known = load(disk)
    if known is None:
        _refuse_orphans(disk)
        _write(disk, node)
        return node
    if known[:2] != node[:2]:
        raise DirectoryInUseError(
            f"the data directory belongs to home {known.node_id:016x} of cluster {known.cluster_id:016x}, and not to "
            f"{node.node_id:016x} of {node.cluster_id:016x}: give the replica one of its own with --data DIR"
        )
    disk.sync_directory(_ROOT)
    return known


def load(disk: Disk) -> Node | None:
    """The directory's identity; None if there is none.

    Raises:
        CorruptRecordError: damaged.
        StorageError: a newer version wrote it.
    """
    fields = read_fields(disk, PATH, _SIZE_MAX)
    if fields is None:
        return None
    return Node(int(fields["cluster"], 16), int(fields["node"], 16), fields["created_ms"])


def read_fields(disk: Disk, path: str, size_max: int) -> dict[str, Any] | None:
    """The fields of such a file, spaces at its end left out; None if there is no file. Raises as ``load``."""
    if not disk.exists(path):
        return None
    file = disk.open(path, writable=False)
    try:
        text = file.pread(size_max, 0).rstrip(b" ")
    finally:
        file.close()
    try:
        fields: dict[str, Any] = json.loads(text)
        stated = fields.pop("crc32c")
        whole = stated == _checksum(fields) and text == encode_fields(fields)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptRecordError(path, 0, f"not an identity: {error}") from error
    if not whole:
        raise CorruptRecordError(path, 0, "fails its CRC: restore it from a backup")
    if fields.get("format") != FORMAT:
        raise StorageError(f"{path}: format {fields.get('format')}, this txmq reads {FORMAT}: upgrade")
    return fields


def encode_fields(fields: dict[str, Any]) -> bytes:
    """The content of such a file."""
    return json.dumps({**fields, "crc32c": _checksum(fields)}).encode() + b"\n"


def _checksum(fields: dict[str, Any]) -> str:
    return f"{crc32c(json.dumps(fields).encode()):08x}"


def _write(disk: Disk, node: Node) -> None:
    fields = {
        "format": FORMAT,
        "cluster": f"{node.cluster_id:016x}",
        "node": f"{node.node_id:016x}",
        "created_ms": node.created_ms,
    }
    with suppress(FileNotFoundError):
        disk.unlink(_TEMPORARY)
    file = disk.open(_TEMPORARY, create=True)
    try:
        file.pwrite(encode_fields(fields), 0)
        file.fsync()
    finally:
        file.close()
    disk.rename(_TEMPORARY, PATH)
    disk.sync_directory(_ROOT)


def _refuse_orphans(disk: Disk) -> None:
    if list_bases(disk) or disk.list_directory(CHECKPOINT_DIRECTORY):
        raise CorruptRecordError(PATH, 0, "missing, although the directory holds a journal: restore it from a backup")
