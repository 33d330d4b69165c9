"""Reading the journal's bytes by their addresses, while it is written: what a replica is sent.

Theory of operation. A copy of the journal has the same bytes at the same addresses, in files of the same sizes. So what
is sent is a piece of one file: from an lsn on, up to where the records end that are there to be sent, or to where the
file's records end. There the next file's header says that they end there, and its block is sent in their place; after
it comes what the file holds.

Invariants:

* nothing is sent from ``end_lsn`` on, which is at most what the journal has forced;
* a file may be released, and written anew as a later one, at any moment: its header is looked at after its bytes were
  read, and is written before any other byte of it.

Thread safety: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from txmq.errors import CorruptRecordError, JournalReleasedError, StorageError
from txmq.redo.journal_files import list_bases
from txmq.redo.record_format import (
    FILE_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    FileHeader,
    file_path,
    unpack_file_header,
    unpack_record_header,
)
from txmq.runtime.ports import Disk, File

PIECE_SIZE_BYTES_MAX: Final = 1 << 20


class Place(NamedTuple):
    """An end of a journal: where its next record goes, and the CRC of the one before."""

    lsn: int
    chain: int


class JournalReader:
    """See the module's docstring."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._file: File | None = None
        self._base, self._file_end = -1, -1

    def read_cached(self, lsn: int, end_lsn: int, size_bytes_max: int = PIECE_SIZE_BYTES_MAX) -> bytes | None:
        """The same, for a replica that lags little: at once, from the page cache; None where ``read`` must be asked.

        A file in which the journal's forced end is cannot be released meanwhile: no header is looked at.
        """
        if self._file is None or not self._base < lsn < end_lsn <= self._file_end:
            return None
        return self._file.try_pread(min(end_lsn - lsn, size_bytes_max), lsn - self._base)

    def read(self, lsn: int, end_lsn: int, size_bytes_max: int = PIECE_SIZE_BYTES_MAX) -> bytes:
        """A piece of the journal.

        Args:
            lsn: of its first byte: within a file, or where its records end.
            end_lsn: up to which it may be told; nothing is read at or after it.
            size_bytes_max: of the piece; a header block is never cut.

        Returns:
            Bytes of the file from ``lsn`` on; or, if its records end there, the header block of the next one and bytes
            after that; empty if there is nothing.

        Raises:
            JournalReleasedError: it was released.
            StorageError: no record can be there.
            OSError: the disk fails.
        """
        bases = list_bases(self._disk)
        base = max((base for base in bases if base <= lsn), default=None)
        if base is None:
            raise JournalReleasedError(f"the journal begins at lsn {bases[0] if bases else 0}, {lsn} is released")
        header = self._header(base)
        records_end = self._records_end(header, bases)
        if lsn > base and records_end is not None and lsn >= records_end:
            if lsn > records_end:
                raise StorageError(f"lsn {lsn}: the records of {file_path(base)} end at {records_end}")
            base = lsn = base + header.file_size_bytes
            records_end = self._records_end(self._header(base), bases)
        size = max(size_bytes_max, FILE_HEADER_SIZE) if lsn == base else size_bytes_max
        end = min(end_lsn, lsn + size, end_lsn if records_end is None else records_end)
        return self._read_file(base, lsn, end) if lsn < end else b""

    def follows(self, place: Place, end: Place) -> bool:
        """Whether a record of this journal, which ends at ``end``, ends at a place with that CRC.

        Raises: as ``read``.
        """
        if place.lsn in (0, FILE_HEADER_SIZE) and place.chain == 0:
            self.read(FILE_HEADER_SIZE, end.lsn, 1)
            return True
        if place.lsn >= end.lsn:
            return place == end
        piece = self.read(place.lsn, end.lsn, FILE_HEADER_SIZE + RECORD_HEADER_SIZE)
        if (header := unpack_file_header(piece[:FILE_HEADER_SIZE])) is not None:
            return (header.predecessor_end_lsn, header.predecessor_chain) == tuple(place)
        if len(piece) < RECORD_HEADER_SIZE:
            return False
        record = unpack_record_header(piece)
        return record.lsn == place.lsn and record.chain == place.chain

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._base, self._file_end = None, -1, -1

    def _records_end(self, header: FileHeader, bases: Sequence[int]) -> int | None:
        """Where the records of a file end; None if it is the one that is written."""
        following = header.base_lsn + header.file_size_bytes
        return self._header(following).predecessor_end_lsn if following in bases else None

    def _header(self, base: int) -> FileHeader:
        file = self._disk.open(file_path(base), writable=False)
        try:
            header = unpack_file_header(file.pread(FILE_HEADER_SIZE, 0))
        finally:
            file.close()
        if header is None:
            raise CorruptRecordError(file_path(base), 0, "the file header fails its check")
        if header.base_lsn != base:
            raise JournalReleasedError(f"the journal from lsn {base} on is released")
        return header

    def _read_file(self, base: int, lsn: int, end: int) -> bytes:
        try:
            if base != self._base:
                self.close()
                self._file, self._base = self._disk.open(file_path(base), writable=False), base
            assert self._file is not None
            data = self._file.pread(end - lsn, lsn - base)
            header = unpack_file_header(self._file.pread(FILE_HEADER_SIZE, 0))
        except FileNotFoundError:
            raise JournalReleasedError(f"the journal from lsn {base} on is released") from None
        if header is None or header.base_lsn != base:
            self.close()
            raise JournalReleasedError(f"the journal from lsn {base} on is released")
        self._file_end = base + header.file_size_bytes
        return data
