"""Rewriting the journal's tail: the records after the last mark, which the cache may show and the disk may lack.

Theory of operation. After a failed sync Linux calls the lost pages clean; a reader sees them until they are evicted.
Recovery drops the cache, but that is a request, so what no mark vouches for is written once more and forced. Writing
over good records in place would risk them in a crash at that moment; so a copy is forced first (``journal/tail``), and
a recovery that finds one finishes it.

Invariants:

* while bytes in place are being overwritten, a forced copy of them exists; with a full disk there is no room for the
  copy, and the bytes are rewritten without one;
* finishing twice writes the same bytes: a journal never changes what it has written, and a copy whose file is gone is
  dropped;
* a damaged copy is dropped: it was forced before it got its name, so the bytes in place were not yet touched, or the
  disk damaged the copy and recovery judges what is in place.

Layout of ``journal/tail``, little endian: magic "txmqtail", version u32 (1), CRC32C of the content u32, node id u64,
base LSN of the file u64, position in it u64, length u64, CRC32C of the 48 bytes before u32; content from byte 52 on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from crc32c import crc32c

from txmq.redo.journal_files import is_disk_full
from txmq.redo.record_format import DIRECTORY, FileHeader, file_path
from txmq.runtime.ports import Disk, File

PATH: Final = f"{DIRECTORY}/tail"
_TEMPORARY: Final = f"{DIRECTORY}/tail.tmp"
_HEADER: Final = struct.Struct("<8sIIQQQQ")
_CRC: Final = struct.Struct("<I")
_CONTENT: Final = _HEADER.size + _CRC.size
_MAGIC: Final = b"txmqtail"
_VERSION: Final = 1
_PIECE_BYTES: Final = 1 << 20


class _Header(NamedTuple):
    magic: bytes
    version: int
    content_crc: int
    node_id: int
    base_lsn: int
    position: int
    length: int


def rewrite(disk: Disk, file: File, header: FileHeader, start: int, end: int) -> None:
    """Write ``[start, end)`` of an open journal file once more. Durability: forced when this returns."""
    if start >= end:
        return
    try:
        _make_copy(disk, file, header, start, end)
    except OSError as error:
        if not is_disk_full(error):
            raise
        _drop(disk, _TEMPORARY)
        for position, piece in _pieces(file, start, end - start):
            file.pwrite(piece, position)
        file.fdatasync()
        return
    finish(disk, header.node_id)


def finish(disk: Disk, node_id: int) -> None:
    """Finish what an earlier recovery began. Durability: forced when this returns, and the copy is gone."""
    _drop(disk, _TEMPORARY)
    if not disk.exists(PATH):
        return
    copy = disk.open(PATH, writable=False)
    try:
        header = _read_header(copy)
        if header is not None and header.node_id == node_id and disk.exists(file_path(header.base_lsn)):
            _copy_back(disk, copy, header)
    finally:
        copy.close()
    disk.unlink(PATH)
    disk.sync_directory(DIRECTORY)


def _make_copy(disk: Disk, file: File, header: FileHeader, start: int, end: int) -> None:
    copy = disk.open(_TEMPORARY, create=True)
    try:
        crc = 0
        for position, piece in _pieces(file, start, end - start):
            crc = crc32c(piece, crc)
            copy.pwrite(piece, _CONTENT + position - start)
        fields = _HEADER.pack(_MAGIC, _VERSION, crc, header.node_id, header.base_lsn, start, end - start)
        copy.pwrite(fields + _CRC.pack(crc32c(fields)), 0)
        copy.fsync()
    finally:
        copy.close()
    disk.rename(_TEMPORARY, PATH)
    disk.sync_directory(DIRECTORY)


def _read_header(copy: File) -> _Header | None:
    """The copy's header, if it and its content are whole."""
    block = copy.pread(_CONTENT, 0)
    if len(block) < _CONTENT or _CRC.unpack_from(block, _HEADER.size)[0] != crc32c(block[: _HEADER.size]):
        return None
    header = _Header._make(_HEADER.unpack_from(block))
    if header.magic != _MAGIC or header.version != _VERSION or copy.size() != _CONTENT + header.length:
        return None
    crc = 0
    for _, piece in _pieces(copy, _CONTENT, header.length):
        crc = crc32c(piece, crc)
    return header if crc == header.content_crc else None


def _copy_back(disk: Disk, copy: File, header: _Header) -> None:
    file = disk.open(file_path(header.base_lsn))
    try:
        if header.position + header.length > file.size():
            return  # the file was cut short by something else: it is judged as it is
        for position, piece in _pieces(copy, _CONTENT, header.length):
            file.pwrite(piece, header.position + position - _CONTENT)
        file.fdatasync()
    finally:
        file.close()


def _pieces(file: File, start: int, length: int) -> Iterator[tuple[int, bytes]]:
    for position in range(start, start + length, _PIECE_BYTES):
        yield position, file.pread(min(_PIECE_BYTES, start + length - position), position)


def _drop(disk: Disk, path: str) -> None:
    with suppress(FileNotFoundError):
        disk.unlink(path)
