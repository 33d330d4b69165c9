"""A small journal on a simulated disk, and what can be read back from it."""

from __future__ import annotations

from tools.simulated.disk import SimDisk
from txmq.model import Lsn
from txmq.redo import recovery
from txmq.redo.journal import Journal
from txmq.redo.record_format import file_path
from txmq.runtime.ports import Disk

NODE = 0x1234
FILE_SIZE = 8192  # room for 4096 bytes of records: every workload crosses files


def open_journal(
    disk: Disk, *, from_lsn: int = 0, from_chain: int = 0, epoch: int = 1, file_size_bytes: int = FILE_SIZE
) -> tuple[Journal, list[bytes]]:
    """Recover or create; the journal and the payloads it handed over."""
    payloads: list[bytes] = []
    journal = recovery.open_journal(
        disk,
        node_id=NODE,
        from_lsn=Lsn(from_lsn),
        from_chain=from_chain,
        epoch=epoch,
        file_size_bytes=file_size_bytes,
        on_record=lambda _lsn, _end, payload: payloads.append(payload),
    )
    return journal, payloads


def payload(number: int, size: int = 300) -> bytes:
    """A payload that no other equals."""
    return (b"%06d." % number * (size // 7 + 1))[:size]


def content(disk: Disk, path: str) -> bytes:
    """A file's bytes."""
    file = disk.open(path, writable=False)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


def put(disk: Disk, path: str, data: bytes) -> None:
    """A file with these bytes, forced, in place of what was there."""
    if disk.exists(path):
        disk.unlink(path)
    file = disk.open(path, create=True)
    file.pwrite(data, 0)
    file.fsync()
    file.close()
    disk.sync_directory(path.rpartition("/")[0])


def flip(disk: SimDisk, base_lsn: int, position: int, mask: int = 1) -> None:
    """Damage one byte of a journal file."""
    path = file_path(base_lsn)
    disk.damage(path, position, bytes([content(disk, path)[position] ^ mask]))
