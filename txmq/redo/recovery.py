"""Opening a journal: follow the records from a checkpoint, judge what ends them, repair the tail, hand them over.

Theory of operation. ``open_file`` checks what a file says about itself. From the checkpoint's LSN and chain,
``read_records`` follows the stream as long as records continue it (R1), and leaves its ``Cursor`` after the last one.
``look`` examines the place at which that ends, ``look_behind`` the bytes after it. ``TABLE`` names the finding:

=====  ===============================================================================  ==============================
label  what is found at the expected LSN                                                what is done
=====  ===============================================================================  ==============================
R1     a whole record that states this LSN and continues chain and epoch                read it
R7     a whole record of an unknown type or with unknown flags                          refuse: upgrade txmq
R5     no record, and the next file begins from exactly here, chain included            go on in the next file
R4b    no record, and the next file was begun further on: its predecessor was forced    refuse: damage
R4c    no record, and the next file contradicts (earlier end, or another chain)         refuse: damage
R6     no record, and later files exist, but not the next one                           refuse: a file is missing
R4     no record, and a whole record after it says that this place was forced           refuse: damage
R4d    a whole record of this LSN that does not continue chain or epoch                 refuse: mixed journals
R3     a record of this LSN that fails its check, and nothing says it was forced        cut: a torn tail
R3b    no record, and after it torn or whole records that nothing says were forced      cut: a torn tail
R2     nothing that claims this LSN or one after it (zeros, remains of an earlier use)   the end, nothing to repair
R8     (file header) another node's file                                                refuse
R9     (file header) damaged, misnamed, or the file is not as long as it says           refuse: damage
=====  ===============================================================================  ==============================

A file header of a newer version is R7. R7, R8 and R9 of headers are found where a file is opened (``open_file``). No
crash makes R9: header and size are forced before a file gets its name.

Then, in this order: a cut zeroes everything from the cut to the end of the file, forced; the records no mark vouches
for are written once more, forced (``rewrite_tail``); the directory is forced, so that the newest file's name is as
durable as what it will hold. Only then are the records handed over, which reads them a second time (a tenth of what
redoing them costs): what is made of them in partition files must not outlive them.

*Rewriting the tail.* The cache may show the records after the last mark, and the disk may lack them: after a failed
sync Linux calls the lost pages clean; a reader sees them until they are evicted. Recovery drops the cache, but that is
a request, so what no mark vouches for is written once more and forced. Writing over good records in place would risk
them in a crash at that moment; so a copy is forced first (``journal/tail``), and a recovery that finds one finishes
it.

Invariants:

* nothing at or below a durable mark is ever cut; nothing is changed where recovery refuses;
* every step may be repeated: a crash at any point of recovery, or of the recovery after it, changes nothing of what is
  recovered;
* a record is forced before it is handed to ``on_record``, and none is where recovery refuses;
* while bytes in place are being overwritten, a forced copy of them exists; with a full disk there is no room for the
  copy, and the bytes are rewritten without one;
* finishing twice writes the same bytes: a journal never changes what it has written, and a copy whose file is gone is
  dropped;
* a damaged copy is dropped: it was forced before it got its name, so the bytes in place were not yet touched, or the
  disk damaged the copy and recovery judges what is in place;
* memory is bounded by one window (8 MiB) or one record; a length is checked against the file's size before anything of
  that size is read, and a record is handed out only after every check of ``record_format``.

Damage to records that were forced but that no mark on disk vouches for (the last group, for the 50 ms until the idle
mark) is taken for a torn tail; it cannot be told apart.

Layout of ``journal/tail``, little endian: magic "txmqtail", version u32 (1), CRC32C of the content u32, node id u64,
base LSN of the file u64, position in it u64, length u64, CRC32C of the 48 bytes before u32; content from byte 52 on.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from crc32c import crc32c

from txmq.errors import CorruptRecordError, DirectoryInUseError, StorageError
from txmq.model import Lsn
from txmq.redo.journal import Found, Head, Journal
from txmq.redo.journal_files import FILE_SIZE_BYTES, JournalFiles, Settings, is_disk_full, list_bases
from txmq.redo.record_format import (
    ALIGNMENT,
    DIRECTORY,
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


class Readable(Protocol):
    """A journal file, or a piece of one."""

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes at ``position``; shorter only at its end."""


def read_records(file: Readable, header: FileHeader, cursor: Cursor, on_record: OnRecord) -> None:
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


_ZERO_PIECE_BYTES: Final = 1 << 20
TAIL_PATH: Final = f"{DIRECTORY}/tail"
_TAIL_TEMPORARY: Final = f"{DIRECTORY}/tail.tmp"
_TAIL_HEADER: Final = struct.Struct("<8sIIQQQQ")
_TAIL_CRC: Final = struct.Struct("<I")
_TAIL_CONTENT: Final = _TAIL_HEADER.size + _TAIL_CRC.size
_TAIL_MAGIC: Final = b"txmqtail"
_TAIL_VERSION: Final = 1
_TAIL_PIECE_BYTES: Final = 1 << 20


class Next(enum.Enum):
    """The file that follows."""

    NONE = "no later file"
    CONTINUES = "the next file begins from here"
    BEYOND = "the next file was begun further on"
    CONTRADICTS = "the next file names an earlier end, or another chain"
    GAP = "later files, but not the next one"


class Mark(enum.Enum):
    """The evidence of whole records after the place."""

    NONE = "nothing behind"
    SILENT = "something behind, which does not say that the place was forced"
    FORCED = "a whole record behind says that the place was forced"


class Action(enum.Enum):
    """The action of recovery."""

    CONTINUE = "go on in the next file"
    END = "the end"
    CUT = "cut"
    REFUSE_DAMAGE = "damage"
    REFUSE_NEWER = "newer"


class Observation(NamedTuple):
    """The end of the records, classified; the order of the questions is that of the table."""

    at: At
    next: Next
    mark: Mark


class Rule(NamedTuple):
    """One row; a None matches everything."""

    label: str
    at: frozenset[At] | None
    next: frozenset[Next] | None
    mark: frozenset[Mark] | None
    action: Action
    text: str


def _rule(label: str, action: Action, text: str, *, at: At | None = None, next: Next | None = None,
          mark: Mark | None = None) -> Rule:  # fmt: skip
    return Rule(
        label,
        None if at is None else frozenset({at}),
        None if next is None else frozenset({next}),
        None if mark is None else frozenset({mark}),
        action,
        text,
    )


TABLE: Final = (  # the first row that matches; R1 is the loop of scan.read_records
    _rule("R7", Action.REFUSE_NEWER, "a record this version does not know; upgrade txmq", at=At.UNKNOWN),
    _rule("R5", Action.CONTINUE, "the next file continues", next=Next.CONTINUES),
    _rule("R4b", Action.REFUSE_DAMAGE, "records are missing that were forced before the next file was begun",
          next=Next.BEYOND),
    _rule("R4c", Action.REFUSE_DAMAGE, "the next file does not continue this one", next=Next.CONTRADICTS),
    _rule("R6", Action.REFUSE_DAMAGE, "the next file is missing, later ones exist", next=Next.GAP),
    _rule("R4", Action.REFUSE_DAMAGE, "a later record says that this one was forced", mark=Mark.FORCED),
    _rule("R4d", Action.REFUSE_DAMAGE, "it does not continue the one before: files of different journals?",
          at=At.FOREIGN),
    _rule("R3", Action.CUT, "torn tail", at=At.BROKEN),
    _rule("R3b", Action.CUT, "torn tail behind a missing record", mark=Mark.SILENT),
    _rule("R2", Action.END, "clean end"),
)  # fmt: skip


def decide(observation: Observation) -> Rule:
    """The row of ``TABLE`` for an observation."""
    for rule in TABLE:
        if all(
            wanted is None or seen in wanted
            for seen, wanted in zip(observation, (rule.at, rule.next, rule.mark), strict=True)
        ):
            return rule
    raise StorageError(f"no rule for {observation}")  # the last row matches everything


# --- opening ---------------------------------------------------------------------------------------------------------


def open_journal(
    disk: Disk, *, node_id: int, from_lsn: Lsn, from_chain: int, epoch: int, on_record: OnRecord,
    file_size_bytes: int = FILE_SIZE_BYTES, has_own_marks: bool = True,
) -> Journal:  # fmt: skip
    """``recover``, or ``create`` if there is no journal and none is expected (``from_lsn`` 0)."""
    settings = Settings(file_size_bytes)
    if from_lsn == 0 and not list_bases(disk):
        return create(disk, FileHeader(epoch, 0, node_id, 0, 0, 0), settings)
    return recover(
        disk, node_id=node_id, from_lsn=from_lsn, from_chain=from_chain, epoch=epoch, settings=settings,
        on_record=on_record, has_own_marks=has_own_marks,
    )  # fmt: skip


def create(disk: Disk, header: FileHeader, settings: Settings) -> Journal:
    """Begin a journal at LSN 0. Durability: its first file is forced; a crash before leaves no journal.

    Args:
        header: of the first file; size 0: as the settings say.

    Raises:
        JournalFullError: there is no room.
    """
    files = JournalFiles(disk, header.node_id, settings)
    size = header.file_size_bytes or settings.file_size_bytes
    if not files.has_spare(0, size):
        files.make_spare(size)
    file, size = files.begin(header._replace(file_size_bytes=size), 0)
    return Journal(files, file, Head(0, size, FILE_HEADER_SIZE, 0), epoch=header.epoch)


def recover(
    disk: Disk, *, node_id: int, from_lsn: Lsn, from_chain: int, epoch: int, settings: Settings, on_record: OnRecord,
    has_own_marks: bool = True,
) -> Journal:  # fmt: skip
    """Read the journal from a checkpoint on, repair its tail, and return it open for appending.

    Args:
        node_id: whose it must be.
        from_lsn, from_chain: the place of the checkpoint; 0 and 0 for the beginning. Everything below was forced.
        epoch: of this incarnation; raised to one more than the highest epoch found.
        on_record: gets (LSN, end LSN, payload) of every group record, in order. May be called again with the same
            records by a later recovery.
        has_own_marks: marks tell of this disk. Those of a copy (``Journal.append_verbatim``) tell of another one, so
            they vouch for nothing here: the last file is cut at the first record that is not whole. What is cut comes
            once more.

    Durability: a record is forced when it is handed to ``on_record``.

    Raises:
        CorruptRecordError: damage below a durable mark (R4, R6, R9); the reason names the rule and the LSN.
        DirectoryInUseError: the files belong to another node (R8).
        StorageError: a newer version wrote them (R7).
    """
    finish_tail(disk, node_id)
    cursor = Cursor(from_lsn, from_chain, durable_lsn=from_lsn)
    walk = Walk(disk, cursor, node_id=node_id, writable=True, has_own_marks=has_own_marks)
    try:
        rule = walk.run(lambda *_: None)
        if not has_own_marks:
            cursor.durable_lsn = from_lsn
        journal = _repaired(disk, walk, rule, max(epoch, cursor.highest_epoch + 1), settings)
        _hand_over(disk, walk.headers, Cursor(from_lsn, from_chain), on_record, journal.next_lsn)
        return journal
    except BaseException:
        walk.close()
        raise


def _repaired(disk: Disk, walk: Walk, rule: Rule, epoch: int, settings: Settings) -> Journal:
    file, header, cursor = walk.file, walk.header, walk.cursor
    cut_lsn = cursor.lsn if rule.action is Action.CUT else None
    if cut_lsn is not None:
        _zero(file, cut_lsn - header.base_lsn, header.file_size_bytes)
    start_lsn = max(cursor.durable_lsn, header.base_lsn + FILE_HEADER_SIZE)
    rewrite_tail(disk, file, header, start_lsn - header.base_lsn, cursor.lsn - header.base_lsn)
    files = JournalFiles(disk, header.node_id, settings)
    disk.sync_directory(DIRECTORY)
    head = Head(header.base_lsn, header.file_size_bytes, cursor.lsn, cursor.chain)
    found = Found(rule.label, cursor.records, cursor.highest_epoch, cut_lsn)
    return Journal(files, file, head, epoch=epoch, older_bases=walk.older_bases, found=found)


def _hand_over(disk: Disk, headers: list[FileHeader], cursor: Cursor, on_record: OnRecord, end_lsn: Lsn) -> None:
    """Read the records once more; the first reading found them whole up to ``end_lsn``."""
    for header in headers:
        cursor.lsn = max(cursor.lsn, header.base_lsn + FILE_HEADER_SIZE)
        file = disk.open(file_path(header.base_lsn), writable=False)
        try:
            read_records(file, header, cursor, on_record)
        finally:
            file.close()
    if cursor.lsn != end_lsn:
        path, position = file_path(headers[-1].base_lsn), cursor.lsn - headers[-1].base_lsn
        raise CorruptRecordError(
            path, position, f"whole up to lsn {end_lsn} at the first reading, and not at the second"
        )


def _zero(file: File, start: int, end: int) -> None:
    """Zero the tail: bytes that were cut must not become valid again after shorter new records."""
    zeros = bytes(min(_ZERO_PIECE_BYTES, end - start))
    for position in range(start, end, _ZERO_PIECE_BYTES):
        file.pwrite(zeros[: end - position], position)
    file.fdatasync()


# --- the walk --------------------------------------------------------------------------------------------------------


class Walk:
    """From file to file along the stream, read only; also what ``journal verify`` walks with.

    Attributes:
        file, header: its position.
        headers: of the files walked through, this one's last.
    """

    def __init__(
        self, disk: Disk, cursor: Cursor, *, node_id: int | None, writable: bool, has_own_marks: bool = True
    ) -> None:
        self.cursor, self._has_own_marks = cursor, has_own_marks
        self._disk, self._node_id, self._writable = disk, node_id, writable
        self._bases = list_bases(disk)
        self.file, self.header = self._first()
        self.headers = [self.header]

    @property
    def older_bases(self) -> list[int]:
        """Base LSNs of the files before the current one."""
        return [base for base in self._bases if base < self.header.base_lsn]

    def close(self) -> None:
        """Let go of the current file."""
        self.file.close()

    def run(self, on_record: OnRecord) -> Rule:
        """Hand over all records; the rule that ended them, which is END or CUT.

        Raises:
            CorruptRecordError, StorageError, DirectoryInUseError: as ``recover``.
        """
        while True:
            read_records(self.file, self.header, self.cursor, on_record)
            rule = self.advance()
            if rule is not None:
                return rule

    def advance(self) -> Rule | None:
        """Judge what stopped the records; None if the next file continues them, and the walk is there now.

        Raises:
            CorruptRecordError, StorageError, DirectoryInUseError: as ``recover``.
        """
        observation, successor, behind = self._observe()
        rule = decide(observation)
        if rule.action is not Action.CONTINUE or successor is None:
            if successor is not None:
                successor[0].close()
            self._refuse(rule, observation, behind)
            return rule
        self.file.close()
        self.file, self.header = successor
        self.headers.append(self.header)
        self.cursor.lsn = self.header.base_lsn + FILE_HEADER_SIZE
        self.cursor.highest_epoch = max(self.cursor.highest_epoch, self.header.epoch)
        return None

    def _first(self) -> tuple[File, FileHeader]:
        """The file that holds the cursor's LSN; a cursor before its header steps over it."""
        cursor = self.cursor
        base = max((base for base in self._bases if base <= cursor.lsn), default=None)
        if base is None:
            raise CorruptRecordError(file_path(cursor.lsn), 0, f"R6: no journal file holds lsn {cursor.lsn}")
        file, header = open_file(self._disk, base, self._node_id, writable=self._writable)
        continues = (header.predecessor_end_lsn, header.predecessor_chain) == (cursor.lsn, cursor.chain)
        if cursor.lsn == base and continues:
            cursor.lsn = base + FILE_HEADER_SIZE
        if not base + FILE_HEADER_SIZE <= cursor.lsn <= base + header.file_size_bytes:
            file.close()
            raise CorruptRecordError(file_path(base), 0, f"R6: no journal file holds lsn {cursor.lsn}")
        cursor.highest_epoch = max(cursor.highest_epoch, header.epoch)
        return file, header

    def _observe(self) -> tuple[Observation, tuple[File, FileHeader] | None, Behind]:
        lsn = self.cursor.lsn
        at = look(self.file, self.header, lsn)
        following, successor = self._look_ahead()
        if following is not Next.NONE:
            return Observation(at, following, Mark.NONE), successor, Behind(False, -1, 0)
        behind = look_behind(self.file, self.header, lsn)
        is_forced = behind.durable_lsn > lsn and self._has_own_marks
        mark = Mark.FORCED if is_forced else Mark.SILENT if behind.is_claimed else Mark.NONE
        return Observation(at, following, mark), None, behind

    def _look_ahead(self) -> tuple[Next, tuple[File, FileHeader] | None]:
        end = self.header.base_lsn + self.header.file_size_bytes
        later = [base for base in self._bases if base > self.header.base_lsn]
        if not later:
            return Next.NONE, None
        if later[0] != end:
            return Next.GAP, None
        successor = open_file(self._disk, end, self._node_id, writable=self._writable)
        predecessor_end, chain = successor[1].predecessor_end_lsn, successor[1].predecessor_chain
        if predecessor_end > self.cursor.lsn:
            return Next.BEYOND, successor
        if (predecessor_end, chain) == (self.cursor.lsn, self.cursor.chain):
            return Next.CONTINUES, successor
        return Next.CONTRADICTS, successor

    def _refuse(self, rule: Rule, observation: Observation, behind: Behind) -> None:
        """Raise what the rule says, if it says so."""
        lsn = self.cursor.lsn
        path, position = file_path(self.header.base_lsn), lsn - self.header.base_lsn
        if rule.action is Action.REFUSE_NEWER:
            raise StorageError(f"{rule.label}: {path} at byte {position}, lsn {lsn}: {rule.text}")
        if rule.action is Action.REFUSE_DAMAGE:
            evidence = f" (the one at byte {behind.position})" if observation.mark is Mark.FORCED else ""
            found = observation.at.value
            raise CorruptRecordError(path, position, f"{rule.label}: lsn {lsn}: {found}; {rule.text}{evidence}")


class _TailHeader(NamedTuple):
    magic: bytes
    version: int
    content_crc: int
    node_id: int
    base_lsn: int
    position: int
    length: int


def rewrite_tail(disk: Disk, file: File, header: FileHeader, start: int, end: int) -> None:
    """Write ``[start, end)`` of an open journal file once more. Durability: forced when this returns."""
    if start >= end:
        return
    try:
        _make_copy(disk, file, header, start, end)
    except OSError as error:
        if not is_disk_full(error):
            raise
        _drop(disk, _TAIL_TEMPORARY)
        for position, piece in _pieces(file, start, end - start):
            file.pwrite(piece, position)
        file.fdatasync()
        return
    finish_tail(disk, header.node_id)


def finish_tail(disk: Disk, node_id: int) -> None:
    """Finish what an earlier recovery began. Durability: forced when this returns, and the copy is gone."""
    _drop(disk, _TAIL_TEMPORARY)
    if not disk.exists(TAIL_PATH):
        return
    copy = disk.open(TAIL_PATH, writable=False)
    try:
        header = _read_header(copy)
        if header is not None and header.node_id == node_id and disk.exists(file_path(header.base_lsn)):
            _copy_back(disk, copy, header)
    finally:
        copy.close()
    disk.unlink(TAIL_PATH)
    disk.sync_directory(DIRECTORY)


def _make_copy(disk: Disk, file: File, header: FileHeader, start: int, end: int) -> None:
    copy = disk.open(_TAIL_TEMPORARY, create=True)
    try:
        crc = 0
        for position, piece in _pieces(file, start, end - start):
            crc = crc32c(piece, crc)
            copy.pwrite(piece, _TAIL_CONTENT + position - start)
        fields = _TAIL_HEADER.pack(_TAIL_MAGIC, _TAIL_VERSION, crc, header.node_id, header.base_lsn, start, end - start)
        copy.pwrite(fields + _TAIL_CRC.pack(crc32c(fields)), 0)
        copy.fsync()
    finally:
        copy.close()
    disk.rename(_TAIL_TEMPORARY, TAIL_PATH)
    disk.sync_directory(DIRECTORY)


def _read_header(copy: File) -> _TailHeader | None:
    """The copy's header, if it and its content are whole."""
    block = copy.pread(_TAIL_CONTENT, 0)
    if len(block) < _TAIL_CONTENT or _TAIL_CRC.unpack_from(block, _TAIL_HEADER.size)[0] != crc32c(
        block[: _TAIL_HEADER.size]
    ):
        return None
    header = _TailHeader._make(_TAIL_HEADER.unpack_from(block))
    if header.magic != _TAIL_MAGIC or header.version != _TAIL_VERSION or copy.size() != _TAIL_CONTENT + header.length:
        return None
    crc = 0
    for _, piece in _pieces(copy, _TAIL_CONTENT, header.length):
        crc = crc32c(piece, crc)
    return header if crc == header.content_crc else None


def _copy_back(disk: Disk, copy: File, header: _TailHeader) -> None:
    file = disk.open(file_path(header.base_lsn))
    try:
        if header.position + header.length > file.size():
            return  # the file was cut short by something else: it is judged as it is
        for position, piece in _pieces(copy, _TAIL_CONTENT, header.length):
            file.pwrite(piece, header.position + position - _TAIL_CONTENT)
        file.fdatasync()
    finally:
        file.close()


def _pieces(file: File, start: int, length: int) -> Iterator[tuple[int, bytes]]:
    for position in range(start, start + length, _TAIL_PIECE_BYTES):
        yield position, file.pread(min(_TAIL_PIECE_BYTES, start + length - position), position)


def _drop(disk: Disk, path: str) -> None:
    with suppress(FileNotFoundError):
        disk.unlink(path)
