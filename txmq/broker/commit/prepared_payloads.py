"""The messages of unsettled transactions, kept out of the checkpoints: ``prepared/<lsn of a checkpoint, 20 digits>``.

Theory of operation. A checkpoint writes one file: the payloads of all transactions that are in none yet, and of those
that have grown since (which stream). Later checkpoints only name the file in which a transaction's payload is. A
transaction may stay in doubt for long and keep the file of many that are settled, so a file of which less than half
is unsettled is left: what is unsettled in it goes into the next checkpoint's file. So each byte that is copied once
more is paid for by one that was settled, and the files hold at most twice what is unsettled, and what the older of the
two kept checkpoints names.

Layout: PAYLOAD entries (``redo.entries``) one after the other, those of a transaction in the order of its parts; then
a CRC32C (u32, little endian) over all of them.

Invariants:
    * a file is written once, and never changes;
    * it and its entry are synced before a checkpoint names it;
    * it goes only when neither of the two kept checkpoints names it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from txmq.broker.state.transaction import Transaction
from txmq.errors import CorruptRecordError
from txmq.log.batch import checksum
from txmq.redo import entries
from txmq.runtime.ports import Disk, File

DIRECTORY: Final = "prepared"
_CRC: Final = struct.Struct("<I")
_NAME: Final = re.compile(r"[0-9]{20}\Z", re.ASCII)
_PIECE_BYTES: Final = 1 << 20  # in one write
_TEMPORARY: Final = ".tmp"


def path_of(lsn: int) -> str:
    """The path of the file that the checkpoint at that LSN wrote."""
    return f"{DIRECTORY}/{lsn:020d}"


class PayloadFiles:
    """The payload files of one data directory."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._sizes: dict[int, int] = {}  # bytes of batches in each file that was read or written
        self._named = set(self._list())  # by the checkpoint before; all, if that is not known

    def _list(self) -> list[int]:
        return [int(name) for name in self._disk.list_directory(DIRECTORY) if _NAME.match(name)]

    # --- writing -----------------------------------------------------------------------------------------------------

    def leave_sparse(self, transactions: Iterable[Transaction]) -> None:
        """Have the payloads in files that hold little else written once more, by the next checkpoint."""
        filed = [transaction for transaction in transactions if transaction.file]
        unsettled = dict.fromkeys([transaction.file for transaction in filed], 0)
        for transaction in filed:
            unsettled[transaction.file] += transaction.size_bytes
        sparse = {lsn for lsn, size in unsettled.items() if 2 * size < self._sizes[lsn]}
        for transaction in filed if sparse else ():
            if transaction.file in sparse:
                transaction.file = transaction.file_parts = 0

    def write(self, transactions: Sequence[Transaction], counts: Sequence[int], lsn: int) -> None:
        """Write so many parts of each transaction into the file of that checkpoint.

        Durability: file and entry are synced when this returns.
        """
        if not transactions:
            return
        payloads = list(zip(transactions, counts, strict=True))
        self._disk.make_directories(DIRECTORY)
        path = path_of(lsn)
        self._drop(path + _TEMPORARY)
        try:
            self._write_file(path + _TEMPORARY, payloads)
            self._disk.rename(path + _TEMPORARY, path)
        except OSError:
            with suppress(OSError):
                self._drop(path + _TEMPORARY)
            raise
        self._disk.sync_directory(DIRECTORY)
        self._named.add(lsn)  # also if the checkpoint is given up once it has its name
        self._sizes[lsn] = 0
        for transaction, count in payloads:
            self._sizes[lsn] += sum(len(part.batch) for part in transaction.parts[:count])
            transaction.file, transaction.file_parts = lsn, count

    def _write_file(self, path: str, payloads: list[tuple[Transaction, int]]) -> None:
        file = self._disk.open(path, create=True)
        try:
            _write_pieces(file, _encoded(payloads))
            file.fsync()
        finally:
            file.close()

    def _drop(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._disk.unlink(path)

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, transactions: Iterable[Transaction]) -> Iterator[tuple[Transaction, entries.Payload]]:
        """The first ``file_parts`` parts of each transaction, those of one in their order. Each file is read once.

        Raises:
            CorruptRecordError: a file is missing or damaged; a checkpoint names it, so it was whole once.
        """
        wanted: dict[int, dict[tuple[int, int], Transaction]] = {}
        for transaction in transactions:
            if transaction.file_parts:
                wanted.setdefault(transaction.file, {})[transaction.name] = transaction
        for lsn, named in wanted.items():
            yield from self._read_file(lsn, named)

    def _read_file(
        self, lsn: int, named: dict[tuple[int, int], Transaction]
    ) -> Iterator[tuple[Transaction, entries.Payload]]:
        path, found, size = path_of(lsn), dict.fromkeys(named, 0), 0
        for _kind, _flags, body in entries.split(self._content(path)):
            payload = entries.decode_payload(body)
            size += len(payload.batch)
            transaction = named.get((payload.session, payload.counter))
            if transaction is not None and payload.number < transaction.file_parts:
                found[transaction.name] += 1
                yield transaction, payload
        self._sizes[lsn] = size
        for name, count in found.items():
            if count != (stated := named[name].file_parts):
                raise CorruptRecordError(path, 0, f"{count} parts of {name}, a checkpoint names {stated}")

    def _content(self, path: str) -> memoryview:
        if not self._disk.exists(path):
            raise CorruptRecordError(path, 0, "missing, although a checkpoint names it")
        file = self._disk.open(path, writable=False)
        try:
            content = memoryview(file.pread(file.size(), 0))
        finally:
            file.close()
        if len(content) < _CRC.size or _CRC.unpack(content[-_CRC.size :])[0] != checksum(content[: -_CRC.size], 0):
            raise CorruptRecordError(path, 0, "CRC does not match")
        return content[: -_CRC.size]

    # --- going -------------------------------------------------------------------------------------------------------

    def release(self, named: set[int]) -> None:
        """Unlink the files that neither this checkpoint nor the one before names.

        Args:
            named: the LSNs of the files that this checkpoint names.
        """
        doomed = [lsn for lsn in self._list() if lsn not in named and lsn not in self._named]
        for lsn in doomed:
            self._disk.unlink(path_of(lsn))
            self._sizes.pop(lsn, None)
        if doomed:
            self._disk.sync_directory(DIRECTORY)
        self._named = named


def _encoded(payloads: list[tuple[Transaction, int]]) -> Iterator[bytes]:
    for transaction, count in payloads:
        for number, part in enumerate(transaction.parts[:count]):
            yield entries.encode_payload(
                transaction.session, transaction.counter, number,
                part.topic_id, part.partition, part.count, part.max_timestamp_ms, part.batch,
            )  # fmt: skip


def _write_pieces(file: File, items: Iterable[bytes]) -> None:
    """Write all and the CRC over it, in large pieces."""
    piece, position, crc = bytearray(), 0, 0
    for item in items:
        piece += item
        if len(piece) >= _PIECE_BYTES:
            file.pwrite(piece, position)
            position, crc, piece = position + len(piece), checksum(piece, crc), bytearray()
    piece += _CRC.pack(checksum(piece, crc))
    file.pwrite(piece, position)
