"""Reading journal files: headers, records in a row, and what follows the last one.

Theory of operation. ``open_file`` checks what a file says about itself. ``read_records`` follows the stream from a
``Cursor`` as long as records continue it, and leaves the cursor after the last one. ``look`` examines the address at
which it stopped, and ``look_behind`` if anything after it claims an address of this file. ``redo.recovery`` decides
what that means.

Invariants:

* nothing is written here; memory is bounded by one window of 8 MiB or one record;
* a length is checked against the file's size before anything of that size is read;
* a record is handed out only after it passed every check of ``redo.record_format``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from crc32c import crc32c

from txmq.errors import CorruptRecordError, DirectoryInUseError, StorageError
from txmq.model import Lsn
from txmq.redo.record_format import (
    ALIGNMENT,
    FILE_HEADER_SIZE,
    FORMAT_VERSION,
    GROUP,
    MARK,
    PADDING,
    RECORD_HEADER,
    RECORD_HEADER_SIZE,
    RECORD_MAGIC,
    RECORD_MAGIC_BYTES,
    RECORD_PREFIX_SIZE,
    U32,
    FileHeader,
    RecordHeader,
    file_path,
    is_whole,
    record_size,
    unpack_file_header,
    unpack_record_header,
)
from txmq.runtime.ports import Disk, File

WINDOW_BYTES: Final = 8 << 20
OnRecord = Callable[[Lsn, Lsn, bytes], None]


class At(enum.Enum):
    """What is at an address where no record continues the stream."""

    FILE_END = "no room for a record"
    EMPTY = "nothing that claims the address"
    BROKEN = "a record of this address that fails its check"
    FOREIGN = "a whole record of this address that does not continue the stream"
    UNKNOWN = "a whole record of a type or with flags that this version does not know"


class Behind(NamedTuple):
    """The records that claim an address of this file after a place: none, torn or whole, and their highest mark."""

    is_claimed: bool
    durable_lsn: int
    position: int  # of the record with that mark


@dataclass(slots=True)
class Cursor:
    """The position of a scan.

    Attributes:
        lsn: of the next record.
        chain: CRC of the one before.
        epoch: of the one before; the next one's is not lower.
        durable_lsn: the highest mark read.
        records: group records read.
        highest_epoch: among records and file headers.
    """

    lsn: int
    chain: int
    epoch: int = 0
    durable_lsn: int = 0
    records: int = 0
    highest_epoch: int = 0


def open_file(disk: Disk, base_lsn: int, node_id: int | None, *, writable: bool) -> tuple[File, FileHeader]:
    """Open a journal file and check what it says about itself. The cache is dropped: the disk's truth is read.

    Args:
        node_id: whose it must be; None for any.

    Raises:
        CorruptRecordError: header damaged, misnamed, or the file is not as long as it says (R9).
        StorageError: a newer version wrote it (R7).
        DirectoryInUseError: it belongs to another node (R8).
    """
    path = file_path(base_lsn)
    file = disk.open(path, writable=writable)
    try:
        file.drop_cache()
        header = unpack_file_header(file.pread(FILE_HEADER_SIZE, 0))
        _check_header(header, path, base_lsn, node_id)
        if header is None or file.size() != header.file_size_bytes:
            stated = header.file_size_bytes if header else FILE_HEADER_SIZE
            raise CorruptRecordError(path, file.size(), f"R9: the file ends here, its header states {stated} bytes")
    except BaseException:
        file.close()
        raise
    return file, header


def _check_header(header: FileHeader | None, path: str, base_lsn: int, node_id: int | None) -> None:
    if header is None:
        raise CorruptRecordError(
            path, 0, f"R9: the file header of lsn {base_lsn} fails its check; it was forced before use"
        )
    if header.version != FORMAT_VERSION:
        raise StorageError(
            f"R7: {path} has format version {header.version}, this txmq reads {FORMAT_VERSION}: upgrade txmq"
        )
    if header.base_lsn != base_lsn:
        raise CorruptRecordError(path, 0, f"R9: the header says lsn {header.base_lsn}, the name says {base_lsn}")
    if node_id is not None and header.node_id != node_id:
        raise DirectoryInUseError(
            f"R8: {path} belongs to node {header.node_id:016x}, this is node {node_id:016x}: use its own data directory"
        )


def read_records(file: File, header: FileHeader, cursor: Cursor, on_record: OnRecord) -> None:
    """Hand over every group record from ``cursor.lsn`` on that continues the stream; the cursor ends after the last.

    One loop over plain tuples and local names: a generator of NamedTuples takes twice as long.
    """
    base, size = header.base_lsn, header.file_size_bytes
    unpack, padding, header_size = RECORD_HEADER.unpack_from, PADDING, RECORD_HEADER_SIZE
    position, chain, epoch = cursor.lsn - base, cursor.chain, cursor.epoch
    window, start = b"", position
    while True:
        offset = position - start
        if offset + header_size > len(window):
            window, start, offset = file.pread(min(WINDOW_BYTES, size - position), position), position, 0
            if len(window) < header_size:
                return
        magic, length, inverted, kind, flags, reserved, new_epoch, previous, lsn, durable, reserved_2, crc = unpack(
            window, offset
        )
        if (
            magic != RECORD_MAGIC or lsn != base + position or length ^ inverted != U32 or previous != chain
            or new_epoch < epoch or flags or reserved or reserved_2
        ):  # fmt: skip
            return
        body = offset + header_size
        end = body + (length + 7 & -8)
        if end > len(window):
            if position + end - offset > size:
                return
            window, start = file.pread(max(min(WINDOW_BYTES, size - position), end - offset), position), position
            if len(window) < end - offset:
                return
            continue
        payload = window[body : body + length]
        if crc32c(payload, crc32c(window[offset : offset + RECORD_PREFIX_SIZE])) != crc:
            return
        if length & 7 and window[body + length : end] != padding[length & 7]:
            return
        if kind != GROUP and (kind != MARK or length):
            return
        position += end - offset
        chain = cursor.chain = crc
        epoch = cursor.epoch = new_epoch
        cursor.lsn = base + position
        if durable > cursor.durable_lsn:
            cursor.durable_lsn = durable
        if new_epoch > cursor.highest_epoch:
            cursor.highest_epoch = new_epoch
        if kind == GROUP:
            cursor.records += 1
            on_record(Lsn(lsn), Lsn(cursor.lsn), payload)


def look(file: File, header: FileHeader, lsn: int) -> At:
    """What is at ``lsn``, where ``read_records`` stopped."""
    position = lsn - header.base_lsn
    if position + RECORD_HEADER_SIZE > header.file_size_bytes:
        return At.FILE_END
    record = unpack_record_header(file.pread(RECORD_HEADER_SIZE, position))
    if record.lsn != lsn:
        return At.EMPTY  # zeros, or what an earlier use of the file left
    if not is_valid_at(file, header, position, record):
        return At.BROKEN
    return At.FOREIGN if record.is_known else At.UNKNOWN


def is_valid_at(file: File, header: FileHeader, position: int, record: RecordHeader) -> bool:
    """Whether the record at ``position`` is whole; its length is believed only as far as the file goes."""
    if record.magic != RECORD_MAGIC or record.length ^ record.length_inverted != U32:
        return False
    size = record_size(record.length)
    return position + size <= header.file_size_bytes and is_whole(record, file.pread(size, position))


def look_behind(file: File, header: FileHeader, lsn: int) -> Behind:
    """Whether anything after ``lsn`` claims an address of this file, and the highest mark of whole records there."""
    is_claimed, durable_lsn, at = False, -1, 0
    position = lsn - header.base_lsn + ALIGNMENT
    for found, record in _stated_positions(file, header, position):
        is_claimed = True
        if found < position or not is_valid_at(file, header, found, record):
            continue  # inside a whole record: its payload is not looked at
        position = found + record_size(record.length)
        if record.durable_lsn > durable_lsn:
            durable_lsn, at = record.durable_lsn, found
    return Behind(is_claimed, durable_lsn, at)


def _stated_positions(file: File, header: FileHeader, position: int) -> Iterator[tuple[int, RecordHeader]]:
    """Positions from ``position`` on at which a record header states its own address. ``bytes.find`` does the
    walking."""
    size = header.file_size_bytes
    while position + RECORD_HEADER_SIZE <= size:
        window = file.pread(min(WINDOW_BYTES, size - position), position)
        offset = window.find(RECORD_MAGIC_BYTES)
        while 0 <= offset <= len(window) - RECORD_HEADER_SIZE:
            if (position + offset) % ALIGNMENT == 0:
                record = unpack_record_header(window, offset)
                if record.lsn == header.base_lsn + position + offset:
                    yield position + offset, record
            offset = window.find(RECORD_MAGIC_BYTES, offset + 1)
        if len(window) < RECORD_HEADER_SIZE:
            return
        position += len(window) - RECORD_HEADER_SIZE + ALIGNMENT  # windows overlap, so that no header is cut in two
