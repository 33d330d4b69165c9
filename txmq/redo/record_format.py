"""Bytes of the redo journal: file headers and record headers.

Theory of operation. The journal is one endless stream of bytes; an LSN is an address in it. A file named after its
base LSN holds the addresses ``[base, base + file size)``, and the record at file position ``p`` has the LSN
``base + p``. So a record states its own address, and a leftover of an earlier use of a recycled file states an
address that it is not at.

Invariants:

* all integers are little endian; records start at multiples of 8, the padding before the next one is zeros;
* a record never spans files; a file's header is written once, forced before the file gets its name;
* every byte counts: the header's CRC covers the whole block, a record's CRC covers header and payload, and padding that
  is not zero makes a record invalid;
* zeros are never a record.

A record is valid at an address when magic, length and inverted length agree, it ends inside its file, it states that
address, its CRC matches and its padding is zeros; it *continues* the stream when it also carries the CRC of the record
before it (the chain) and an epoch that is not lower.

File header, one block of 4096 bytes::

     0  8  magic "txmqredo"
     8  4  format version (1)
    12  4  epoch in which the file was begun
    16  8  base LSN: also the file's id and its name, 20 digits
    24  8  node id
    32  8  file size in bytes, this header included
    40  8  end LSN of the file before (0 for the first)
    48  4  chain at that end (0 for the first)
    52     zeros
  4092  4  CRC32C of bytes 0 to 4091

Record header, 48 bytes, then the payload, then zeros up to a multiple of 8::

     0  4  magic (bytes c7 52 45 44)
     4  4  payload length
     8  4  payload length, all bits inverted
    12  1  type: 1 group, 2 mark (no payload)
    13  1  flags (0)
    14  2  reserved (0)
    16  4  epoch of the writer's incarnation
    20  4  chain: CRC field of the record before (0 before the first)
    24  8  LSN of this record
    32  8  durable LSN: everything below it was forced when this record was written, on the disk of who wrote it
    40  4  reserved (0)
    44  4  CRC32C of bytes 0 to 43, continued over the payload
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from txmq.runtime.ports import Buffer

DIRECTORY: Final = "journal"
FORMAT_VERSION: Final = 1

FILE_MAGIC: Final = b"txmqredo"
FILE_HEADER: Final = struct.Struct("<8sIIQQQQI")
FILE_HEADER_SIZE: Final = 4096
_CRC: Final = struct.Struct("<I")

RECORD_MAGIC: Final = 0x444552C7  # its first byte is no ASCII, so that text rarely looks like it
RECORD_MAGIC_BYTES: Final = _CRC.pack(RECORD_MAGIC)
RECORD_HEADER: Final = struct.Struct("<IIIBBHIIQQII")
RECORD_PREFIX: Final = struct.Struct("<IIIBBHIIQQI")  # without the CRC
RECORD_HEADER_SIZE: Final = RECORD_HEADER.size
RECORD_PREFIX_SIZE: Final = RECORD_PREFIX.size
ALIGNMENT: Final = 8
PADDING: Final = tuple(bytes(-length % ALIGNMENT) for length in range(ALIGNMENT))  # by payload length % 8
U32: Final = 0xFFFFFFFF

GROUP: Final = 1
MARK: Final = 2

_DIGITS: Final = 20
SUFFIX: Final = ".redo"


class FileHeader(NamedTuple):
    """The header of a journal file."""

    epoch: int
    base_lsn: int
    node_id: int
    file_size_bytes: int
    predecessor_end_lsn: int
    predecessor_chain: int
    version: int = FORMAT_VERSION


class RecordHeader(NamedTuple):
    """A record's header on disk; see the module's layout."""

    magic: int
    length: int
    length_inverted: int
    kind: int
    flags: int
    reserved: int
    epoch: int
    chain: int
    lsn: int
    durable_lsn: int
    reserved_2: int
    crc: int

    @property
    def is_known(self) -> bool:
        """Whether this version of txmq understands the record (asked of records whose CRC matches)."""
        if self.flags or self.reserved or self.reserved_2:
            return False
        return self.kind == GROUP or (self.kind == MARK and self.length == 0)


def file_path(base_lsn: int) -> str:
    """The path of the journal file with that base."""
    return f"{DIRECTORY}/{base_lsn:0{_DIGITS}d}{SUFFIX}"


def base_of_name(name: str) -> int | None:
    """The base LSN in a file's name; None if the name is no journal file's."""
    digits = name.removesuffix(SUFFIX)
    if len(name) == _DIGITS + len(SUFFIX) and len(digits) == _DIGITS and digits.isascii() and digits.isdecimal():
        return int(digits)
    return None


def pack_file_header(header: FileHeader) -> bytes:
    """One block."""
    fields = FILE_HEADER.pack(
        FILE_MAGIC, header.version, header.epoch, header.base_lsn, header.node_id, header.file_size_bytes,
        header.predecessor_end_lsn, header.predecessor_chain,
    )  # fmt: skip
    block = fields.ljust(FILE_HEADER_SIZE - _CRC.size, b"\0")
    return block + _CRC.pack(crc32c(block))


def unpack_file_header(block: bytes) -> FileHeader | None:
    """The header, whatever its version says; None if it is short or damaged."""
    if len(block) != FILE_HEADER_SIZE or not block.startswith(FILE_MAGIC):
        return None
    if crc32c(block[: -_CRC.size]) != _CRC.unpack(block[-_CRC.size :])[0]:
        return None
    _, version, *fields = FILE_HEADER.unpack_from(block)
    return FileHeader._make((*fields, version))


def record_size(length: int) -> int:
    """Bytes a record with a payload of that length takes."""
    return RECORD_HEADER_SIZE + (length + ALIGNMENT - 1 & -ALIGNMENT)


def payload_size_max(file_size_bytes: int) -> int:
    """The longest payload that fits an empty file."""
    return (file_size_bytes - FILE_HEADER_SIZE - RECORD_HEADER_SIZE) // ALIGNMENT * ALIGNMENT


def pack_record(kind: int, epoch: int, chain: int, lsn: int, durable_lsn: int, payload: Buffer) -> tuple[bytes, int]:
    """A whole record, padded, and its CRC (the next one's chain)."""
    length = len(payload)
    prefix = RECORD_PREFIX.pack(
        RECORD_MAGIC, length, length ^ U32, kind, 0, 0, epoch, chain, lsn, durable_lsn, 0
    )  # fmt: skip
    crc = crc32c(payload, crc32c(prefix))
    return b"".join((prefix, _CRC.pack(crc), payload, PADDING[length % ALIGNMENT])), crc


def unpack_record_header(buffer: Buffer, offset: int = 0) -> RecordHeader:
    """The header at ``offset``, unchecked."""
    return RecordHeader(*RECORD_HEADER.unpack_from(buffer, offset))


def is_whole(header: RecordHeader, record: Buffer) -> bool:
    """Whether ``record`` (exactly ``record_size(header.length)`` bytes) passes the checks that need all of it."""
    view = memoryview(record)
    end = RECORD_HEADER_SIZE + header.length
    crc = crc32c(view[RECORD_HEADER_SIZE:end], crc32c(view[:RECORD_PREFIX_SIZE]))
    return crc == header.crc and view[end:] == PADDING[header.length % ALIGNMENT]
