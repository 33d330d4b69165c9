"""The redo journal's one writer: append, sync, mark, release.

Theory of operation. ``append`` writes one record with one system call at ``next_lsn``; ``sync`` forces all of them;
no request is answered before. When the next record does not fit, the file is forced, and a prepared one
(``redo.journal_files``) takes over under the next base LSN; its header repeats where the stream stood. So the end of
every file but the newest is durable, and says so on disk.

Every record carries ``durable_lsn``: everything below it was forced when the record was written. Recovery takes damage
below the highest one for damage, not for a torn tail. ``mark`` writes one if no record follows.

Invariants:

* ``durable_lsn <= next_lsn``; both only grow; a record's bytes are written once;
* ``durable_lsn`` moves only after a sync that succeeded, to where ``next_lsn`` was when it was called;
* after any failed write or sync nothing is written or synced again: the content of the file is unknown until recovery
  has read it (a second fdatasync would succeed and lie);
* ``JournalFullError`` and ``TooLargeError`` come before any byte of the record was written.

Thread safety: calls may come from any thread, one at a time, but for ``prepare_next``, ``raise_epoch``, and ``append``
during ``sync``, if the file has room for the record. Two syncs never run at once: one alone would hear of a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from txmq.errors import InvariantError, JournalFailedError, JournalFullError, TooLargeError, caused
from txmq.model import Lsn
from txmq.redo.journal_files import JournalFiles, lacks_descriptors
from txmq.redo.record_format import (
    FILE_HEADER_SIZE,
    GROUP,
    MARK,
    RECORD_HEADER_SIZE,
    FileHeader,
    pack_record,
    payload_size_max,
    record_size,
)
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Buffer, File


class Head(NamedTuple):
    """The place at which a journal is continued.

    Attributes:
        base_lsn, size_bytes: of the file that is written.
        next_lsn: where the next record goes; everything below is forced.
        chain: CRC of the last record.
    """

    base_lsn: int
    size_bytes: int
    next_lsn: int
    chain: int


class Found(NamedTuple):
    """The finds of recovery on the way to the journal's end.

    Attributes:
        rule: label of the row of ``redo.recovery``'s decision table that ended it; "new" for a new journal.
        records: valid group records read.
        highest_epoch: among the records and file headers read; 0 if there was none.
        cut_lsn: the end of the journal, if a torn tail was cut off; else None.
    """

    rule: str = "new"
    records: int = 0
    highest_epoch: int = 0
    cut_lsn: int | None = None


class Journal:
    """One journal, open for appending. Made by ``redo.recovery``.

    Attributes:
        next_lsn: where the next record goes.
        durable_lsn: everything below is forced.
        chain: CRC of the last record; a checkpoint at ``next_lsn`` keeps it.
        epoch: of this incarnation of the writer; records and files hold it.
        node_id: whose journal it is.
        found: the finds of recovery.
        failed: True once a write or sync has failed; nothing works from then on.
        payload_size_bytes_max: the longest payload.
    """

    def __init__(
        self, files: JournalFiles, file: File, head: Head, *, epoch: int, older_bases: Sequence[int] = (),
        found: Found | None = None,
    ) -> None:  # fmt: skip
        self._files, self._file = files, file
        self._base, self._end = head.base_lsn, head.base_lsn + head.size_bytes
        self._older_bases = list(older_bases)
        self.found = found if found is not None else Found()
        self.next_lsn = self.durable_lsn = self._opened_lsn = Lsn(head.next_lsn)
        self._marked_lsn = -1  # a record on disk says that everything below is durable
        self.chain, self.epoch, self.node_id = head.chain, epoch, files.node_id
        self.failed = self._closed = self._is_syncing = False
        self.payload_size_bytes_max = payload_size_max(files.settings.file_size_bytes)

    def append(self, payload: Buffer) -> Lsn:
        """Write one record; no sync.

        Args:
            payload: bytes, one byte an item; at most ``payload_size_bytes_max``.

        Returns:
            the record's end LSN, which is ``next_lsn``. Durability: none before ``sync``.

        Raises:
            TooLargeError, JournalFullError: nothing was written, the journal goes on.
            OSError: descriptors are lacking to begin the next file; the same call may be repeated, and no other before.
            JournalFailedError: the disk failed; whether the record is there is not known.
        """
        return self._append(GROUP, payload)

    def _append(self, kind: int, payload: Buffer) -> Lsn:
        self._check()
        length = len(payload)
        if length > self.payload_size_bytes_max:
            raise TooLargeError(f"{length} bytes in one journal record; at most {self.payload_size_bytes_max}")
        end = self.next_lsn + record_size(length)
        if end > self._end:
            self._rotate(length, FileHeader(self.epoch, self._end, self.node_id, 0, self.next_lsn, self.chain))
            end = self.next_lsn + record_size(length)
        record, crc = pack_record(kind, self.epoch, self.chain, self.next_lsn, self.durable_lsn, payload)
        crash_point("journal.append.before")
        try:
            self._file.pwrite(record, self.next_lsn - self._base)
        except BaseException as error:
            self._fail(error)
            raise
        crash_point("journal.append.written")
        self.next_lsn, self.chain = Lsn(end), crc  # in this order: see ``replica_feeds``
        return self.next_lsn

    def append_verbatim(self, records: Buffer, chain: int, epoch: int) -> Lsn:
        """Write records as another journal of this home has them; no sync.

        Args:
            records: one or more, whole. They were checked: they continue this journal, and its file has room for them.
            chain, epoch: of the last one.

        Returns:
            ``next_lsn``. Durability: none before ``sync``.

        Raises:
            JournalFailedError: the disk failed; whether they are there is not known.
        """
        self._check()
        end = self.next_lsn + len(records)
        if end > self._end:
            raise InvariantError(f"records up to lsn {end}, in a journal file that ends at {self._end}")
        crash_point("journal.append.before")
        try:
            self._file.pwrite(records, self.next_lsn - self._base)
        except BaseException as error:
            self._fail(error)
            raise
        crash_point("journal.append.written")
        self.next_lsn, self.chain, self.epoch = Lsn(end), chain, max(self.epoch, epoch)
        return self.next_lsn

    def begin_verbatim(self, header: FileHeader) -> None:
        """Go on in the next file, with the header and the size that it has in another journal of this home.

        Durability: all before is forced, and the file's name, when this returns.

        Raises:
            JournalFullError: there is no room; the journal is as it was.
            OSError: as ``append``.
        """
        self._check()
        stated = (header.base_lsn, header.predecessor_end_lsn, header.predecessor_chain, header.node_id)
        if stated != (self._end, self.next_lsn, self.chain, self.node_id):
            raise InvariantError(f"the journal file of lsn {header.base_lsn} does not continue this journal")
        self._rotate(0, header)

    @property
    def file_end_lsn(self) -> int:
        """Where the file ends that is written, and the next one begins."""
        return self._end

    def raise_epoch(self, epoch: int) -> None:
        """Give the records and files from now on a higher epoch, which a registry gave out.

        Thread safety: may run concurrently with all other calls.
        """
        if epoch < self.epoch:
            raise InvariantError(f"the journal's epoch would fall from {self.epoch} to {epoch}")
        self.epoch = epoch

    def sync(self) -> None:
        """Force everything appended. Durability: all below the ``next_lsn`` of the call, when this returns.

        Raises:
            JournalFailedError: the disk failed; what is durable above ``durable_lsn`` is not known.

        Thread safety: may run concurrently with ``append``, if ``has_room``.
        """
        self._check()
        self._is_syncing = True
        target = self.next_lsn
        try:
            self._file.fdatasync()
        except BaseException as error:
            self._fail(error)
            raise
        crash_point("journal.sync.done")
        self.durable_lsn, self._is_syncing = target, False

    def mark(self) -> None:
        """Force everything, and put on disk that it is forced, so that damage to it is not taken for a torn tail.

        Does nothing where the last record says so already. On a full disk it only forces.

        Raises:
            OSError: as ``append``.
        """
        if self._marked_lsn == self.next_lsn:
            return
        self.sync()
        try:
            self._append(MARK, b"")
        except JournalFullError:
            return
        self.sync()
        self._marked_lsn = self.next_lsn

    def release(self, lsn: Lsn) -> None:
        """Give up the files wholly below ``lsn``. Durability: their names are gone when this returns.

        Raises:
            OSError: descriptors are lacking; the same call may be repeated.
        """
        self._check()
        bases = [*self._older_bases, self._base]
        doomed = [base for base, following in pairwise(bases) if following <= lsn]
        try:
            self._files.release(doomed)
        except BaseException as error:
            self._fail_unless_lacking(error)
            raise
        del self._older_bases[: len(doomed)]

    @property
    def has_grown(self) -> bool:
        """Whether something was written since it was opened."""
        return self.next_lsn != self._opened_lsn

    def may_append(self, payload_length: int) -> bool:
        """Whether there is a place for such a record, on a full disk in the ballast."""
        return self.has_room(payload_length) or self.is_next_ready or self._files.has_ballast

    @property
    def is_next_ready(self) -> bool:
        """Whether the next file is there ahead of need."""
        return self._files.has_spare(self.payload_size_bytes_max)

    def has_room(self, payload_length: int) -> bool:
        """Whether the file that is written takes such a record; else appending it begins the next one."""
        return payload_length <= self._end - self.next_lsn - RECORD_HEADER_SIZE  # both are aligned, as records are

    def prepare_next(self) -> bool:
        """Make the next file ahead of need, and the ballast. False if the disk is full.

        Thread safety: may run concurrently with all other calls. An OSError here does not fail the journal.
        """
        self._check()
        try:
            if not self.is_next_ready:
                self._files.make_spare()
            self._files.keep_ballast()
        except JournalFullError:
            return False
        return True

    def use_ballast(self) -> bool:
        """After ``JournalFullError``: give up the ballast as the next, smaller file; False if it is gone already."""
        self._check()
        try:
            return self._files.use_ballast()
        except BaseException as error:
            self._fail_unless_lacking(error)
            raise

    def close(self) -> None:
        """Let go of the file; forces nothing. Closing twice is harmless."""
        self._closed = True
        self._file.close()
        self._files.close()

    def _rotate(self, payload_length: int, header: FileHeader) -> None:
        """Force the file that is full and continue in the next one.

        Args:
            header: of the next one; size 0: whatever takes a payload of that length.
        """
        if self._is_syncing:
            raise InvariantError("the journal begins a file while the last one is being synced")
        try:
            if not self._files.has_spare(payload_length, header.file_size_bytes):
                self._files.make_spare(header.file_size_bytes, is_written=False)
            if self.durable_lsn != self.next_lsn:
                self.sync()
            file, size = self._files.begin(header, payload_length)
        except (JournalFullError, JournalFailedError):
            raise
        except BaseException as error:
            self._fail_unless_lacking(error)
            raise
        self._file.close()
        self._file = file
        self._older_bases.append(self._base)
        self._base, self._end = self._end, self._end + size
        self.next_lsn = self.durable_lsn = Lsn(self._base + FILE_HEADER_SIZE)

    def _check(self) -> None:
        if self.failed or self._closed:
            raise JournalFailedError("the journal has failed or is closed: restart, recovery reads what the disk holds")

    def _fail_unless_lacking(self, error: BaseException) -> None:
        """Between files nothing is unknown: what lacked descriptors is done once more."""
        if not (isinstance(error, OSError) and lacks_descriptors(error)):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Never write again. What is no error of the disk (an interrupt) leaves the file just as unknown."""
        self.failed = True
        if isinstance(error, OSError):
            raise caused(JournalFailedError(f"journal file {self._base}: {error}"), error) from error
