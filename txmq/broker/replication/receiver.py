"""What a leader sends becomes groups for the commit pipeline: bytes in, whole records that continue the journal out.

Theory of operation. The leader answers with pieces of its journal (``redo.journal_reader``). A piece begins with a
file's header block, or with the byte after the piece before. Records may be longer than a piece. Each is checked as
recovery checks it, by the same loop: address, CRC, chain, epoch. What a checkpoint was taken after ends a group, so
that the state can be copied between two groups.

Invariants:

* a group holds whole records only, which continue what came before, and belong into one file;
* what fails a check raises, and nothing of it is handed out: the conversation ends, and begins at the journal's end;
* at most one record and one piece are kept.
"""

from __future__ import annotations

from typing import Final

from txmq.broker.commit.commit_group import ReceivedGroup
from txmq.errors import RemoteProtocolError
from txmq.model import Lsn
from txmq.redo import entries
from txmq.redo.journal import Journal
from txmq.redo.record_format import (
    FILE_HEADER_SIZE,
    FILE_MAGIC,
    FORMAT_VERSION,
    RECORD_HEADER,
    RECORD_HEADER_SIZE,
    RECORD_MAGIC,
    U32,
    FileHeader,
    record_size,
    unpack_file_header,
    unpack_record_header,
)
from txmq.redo.recovery import Cursor, read_records

_CHECKPOINT: Final = entries.frame(entries.CHECKPOINT, b"")
FILE_SIZE_BYTES_MAX: Final = 4 << 30


class Receiver:
    """See the module's docstring."""

    def __init__(self, journal: Journal, epoch: int) -> None:
        self._node_id, self._file_end = journal.node_id, journal.file_end_lsn
        self._cursor = Cursor(journal.next_lsn, journal.chain, epoch)
        self._begins: FileHeader | None = None
        self._pending = bytearray()  # from the cursor on

    @property
    def next_lsn(self) -> int:
        """Of the byte that must be sent next."""
        return self._cursor.lsn + len(self._pending)

    @property
    def chain(self) -> int:
        """CRC of the last whole record."""
        return self._cursor.chain

    def begin_anew(self) -> None:
        """The next piece begins after the last whole record."""
        self._pending.clear()

    def take(self, piece: bytes) -> list[ReceivedGroup]:
        """Take a piece in; the groups that are whole now.

        Raises:
            RemoteProtocolError: it does not continue the journal, or is damaged.
        """
        if not self._pending and piece.startswith(FILE_MAGIC):
            self._begin(piece[:FILE_HEADER_SIZE])
            piece = piece[FILE_HEADER_SIZE:]
        self._pending += piece
        start_lsn = self._cursor.lsn
        found: list[tuple[Lsn, Lsn, bytes]] = []
        window = _Window(self._pending, start_lsn)
        read_records(window, window.header(self._file_end), self._cursor, lambda *record: found.append(record))
        length = self._cursor.lsn - start_lsn
        records = bytes(self._pending[:length])
        del self._pending[:length]
        self._check_rest()
        return self._groups(start_lsn, records, found)

    def _begin(self, block: bytes) -> None:
        header, cursor = unpack_file_header(block), self._cursor
        if header is None:
            raise RemoteProtocolError(f"the file header at lsn {self._file_end} is damaged")
        if header.version != FORMAT_VERSION:
            raise RemoteProtocolError(f"the leader's journal has format {header.version}: upgrade this replica's txmq")
        stated = (header.base_lsn, header.node_id, header.predecessor_end_lsn, header.predecessor_chain)
        size = header.file_size_bytes
        if (
            stated != (self._file_end, self._node_id, cursor.lsn, cursor.chain) or header.epoch < cursor.epoch
            or size % FILE_HEADER_SIZE or not 2 * FILE_HEADER_SIZE <= size <= FILE_SIZE_BYTES_MAX
        ):  # fmt: skip
            raise RemoteProtocolError(f"the file header at lsn {self._file_end} does not continue the journal")
        if self._begins is not None:
            raise RemoteProtocolError(f"a file of the journal begins at lsn {self._file_end}, before any record")
        self._begins, self._file_end = header, header.base_lsn + size
        cursor.lsn = header.base_lsn + FILE_HEADER_SIZE

    def _check_rest(self) -> None:
        """What is left is the beginning of a record, and no more."""
        pending, lsn = self._pending, self._cursor.lsn
        if len(pending) < RECORD_HEADER_SIZE:
            return
        header = unpack_record_header(pending)
        size = record_size(header.length)
        if (
            header.magic != RECORD_MAGIC or header.length ^ header.length_inverted != U32 or header.lsn != lsn
            or lsn + size > self._file_end or len(pending) >= size
        ):  # fmt: skip
            raise RemoteProtocolError(f"what the leader has sent for lsn {lsn} is no record that continues the journal")

    def _groups(self, start_lsn: int, records: bytes, found: list[tuple[Lsn, Lsn, bytes]]) -> list[ReceivedGroup]:
        groups: list[ReceivedGroup] = []
        position, payloads = 0, list[bytes]()
        for lsn, end_lsn, payload in found:
            payloads.append(payload)
            if payload.endswith(_CHECKPOINT):
                last = RECORD_HEADER.unpack_from(records, lsn - start_lsn)
                groups.append(self._group(records[position : end_lsn - start_lsn], last[-1], last[6], payloads))
                position, payloads = end_lsn - start_lsn, []
        if position < len(records) or self._begins is not None:
            groups.append(self._group(records[position:], self._cursor.chain, self._cursor.epoch, payloads))
        return groups

    def _group(self, records: bytes, chain: int, epoch: int, payloads: list[bytes]) -> ReceivedGroup:
        begins, self._begins = self._begins, None
        return ReceivedGroup(begins, records, chain, epoch, payloads)


class _Window:
    """Bytes from an lsn on, read as a journal file that begins there."""

    def __init__(self, content: bytearray, lsn: int) -> None:
        self._content, self._base = content, lsn

    def header(self, file_end: int) -> FileHeader:
        """As of a file that ends where the real one does."""
        return FileHeader(0, self._base, 0, file_end - self._base, 0, 0)

    def pread(self, size: int, position: int) -> bytes:
        with memoryview(self._content) as view:
            return bytes(view[position : position + size])
