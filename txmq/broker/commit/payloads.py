"""The messages of unsettled transactions, kept out of the checkpoints: ``prepared/<session>-<counter>``.

A checkpoint writes the payload of a transaction that has none yet, or that has grown since (one that streams); later
ones only refer to it, and say how many of its parts are theirs. Layout: PAYLOAD entries (``redo.entries``) one behind
the other, then a CRC32C (u32, little endian) over all of them.

Invariants:
    * a file only grows, at its end, so that the older of the two kept checkpoints finds its parts in it too;
    * a file is synced and its entry is synced before a checkpoint refers to it;
    * it goes only when neither of the two kept checkpoints refers to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress

from txmq.broker.state.transaction import Transaction
from txmq.errors import CorruptRecordError
from txmq.log.batch import checksum
from txmq.redo import entries
from txmq.runtime.ports import Disk

DIRECTORY = "prepared"
_CRC = struct.Struct("<I")


class PayloadFiles:
    """The payload files of one data directory."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._referenced = set(disk.list_directory(DIRECTORY))  # by the checkpoint before; all, if that is not known

    def write(self, payloads: list[tuple[Transaction, int]]) -> None:
        """Write so many parts of each transaction. Durability: files and entries are synced when this returns."""
        if not payloads:
            return
        self._disk.make_directories(DIRECTORY)
        for transaction, count in payloads:
            self._write_one(transaction, count)
        self._disk.sync_directory(DIRECTORY)
        for transaction, count in payloads:
            transaction.file_parts = count

    def _write_one(self, transaction: Transaction, count: int) -> None:
        content = b"".join(
            entries.encode_payload(
                transaction.session, transaction.counter, number,
                part.topic_id, part.partition, part.count, part.max_timestamp_ms, part.batch,
            )
            for number, part in enumerate(transaction.parts[:count])
        )  # fmt: skip
        temporary = f"{transaction.file_name}.tmp"
        self._drop(temporary)
        try:
            self._write_file(temporary, content + _CRC.pack(checksum(content, 0)))
            self._disk.rename(temporary, transaction.file_name)
        except OSError:
            with suppress(OSError):
                self._drop(temporary)
            raise

    def _write_file(self, path: str, content: bytes) -> None:
        file = self._disk.open(path, create=True)
        try:
            file.pwrite(content, 0)
            file.fsync()
        finally:
            file.close()

    def _drop(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._disk.unlink(path)

    def read(self, transaction: Transaction) -> Iterator[memoryview]:
        """The bodies of the first ``file_parts`` PAYLOAD entries of a transaction, in order.

        Raises:
            CorruptRecordError: the file is missing or damaged; a checkpoint refers to it, so it was whole once.
        """
        if transaction.file_parts == 0:
            return
        path = transaction.file_name
        if not self._disk.exists(path):
            raise CorruptRecordError(path, 0, "missing, although a checkpoint refers to it")
        file = self._disk.open(path, writable=False)
        try:
            content = file.pread(file.size(), 0)
        finally:
            file.close()
        if len(content) < _CRC.size or _CRC.unpack(content[-4:])[0] != checksum(content[:-4], 0):
            raise CorruptRecordError(path, 0, "CRC does not match")
        bodies = [body for _kind, _flags, body in entries.split(content[:-4])]
        if len(bodies) < transaction.file_parts:
            raise CorruptRecordError(path, 0, f"{len(bodies)} parts, a checkpoint refers to {transaction.file_parts}")
        yield from bodies[: transaction.file_parts]

    def release(self, unsettled: set[tuple[int, int]]) -> None:
        """Unlink the files to which neither this checkpoint nor the one before refers.

        Args:
            unsettled: session and counter of each transaction in this checkpoint.
        """
        now = {f"{session}-{counter}" for session, counter in unsettled}
        names = self._disk.list_directory(DIRECTORY)
        doomed = [name for name in names if name not in now and name not in self._referenced]
        for name in doomed:
            self._disk.unlink(f"{DIRECTORY}/{name}")
        if doomed:
            self._disk.sync_directory(DIRECTORY)
        self._referenced = now
