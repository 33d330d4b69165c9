"""Checkpoints: the broker's state as of one LSN, ``checkpoint/<lsn, 20 digits>.checkpoint``.

Theory of operation. Recovery is the newest good checkpoint plus the journal from its LSN on. A checkpoint is written
under a temporary name, forced, renamed, and its directory forced; only then is the third newest unlinked. Two are
kept, so that a damaged one costs a longer redo and not the data; the journal is released only up to the older one's
LSN.

Invariants:

* a name in the directory belongs to a forced file: one that fails its check was damaged later;
* the last good checkpoint is never unlinked before a newer one is durable: damaged ones are not counted among the two;
* everything is under a CRC, header and state, and node id and LSN are checked against directory and name;
* the state derives from the journal's records alone: who folds them has the same bytes, and the same CRC. Where this
  directory keeps payloads stands after it.

Layout: one line of ASCII, ``txmq-checkpoint <version> <node id, 16 hex> <lsn> <chain> <epoch> <state length> <CRC32C
of the state, 8 hex> <length of the payload files> <their CRC32C> <CRC32C of the line so far, 8 hex>\n``, then the
state, then the payload files: a JSON list, session, counter and file of each transaction whose payload is in another
file than this checkpoint's own, one after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from crc32c import crc32c

from txmq.errors import CorruptRecordError, DirectoryInUseError, StorageError
from txmq.model import Lsn
from txmq.runtime.ports import Disk

DIRECTORY: Final = "checkpoint"
VERSION: Final = 4
_KEPT: Final = 2
_SUFFIX: Final = ".checkpoint"
_TEMPORARY: Final = ".tmp"
_LINE_SIZE_MAX: Final = 256
_PIECE_BYTES: Final = 1 << 20  # in one call of the CRC, or of a copy into the page cache
_PIECE_NUMBERS: Final = 5000  # in one call of the encoder
_NAME: Final = re.compile(r"([0-9]{20})\.checkpoint\Z", re.ASCII)
_LINE: Final = re.compile(
    rb"(txmq-checkpoint (\d{1,9}) ([0-9a-f]{16}) (\d{1,20}) (\d{1,10}) (\d{1,10}) (\d{1,15}) ([0-9a-f]{8})"
    rb" (\d{1,15}) ([0-9a-f]{8}))"
    rb" ([0-9a-f]{8})\n"
)
_ANY_VERSION: Final = re.compile(rb"(txmq-checkpoint (\d{1,9}) [ -~]*) ([0-9a-f]{8})\n")


class Checkpoint(NamedTuple):
    """The state as of ``lsn``; ``chain`` and ``epoch`` are the journal's there.

    Attributes:
        payload_files: of the transactions whose payload is not in the checkpoint's own file (``encode_payload_files``).
    """

    lsn: Lsn
    chain: int
    epoch: int
    state: bytes | bytearray
    payload_files: bytes = b"[]"

    def file_of(self) -> dict[tuple[int, int], int]:
        """By session and counter, the file of each of these payloads."""
        numbers = json.loads(self.payload_files)
        return dict(zip(zip(numbers[::3], numbers[1::3], strict=True), numbers[2::3], strict=True))


def path_of(lsn: int) -> str:
    """The path of the checkpoint at that LSN."""
    return f"{DIRECTORY}/{lsn:020d}{_SUFFIX}"


def write(disk: Disk, checkpoint: Checkpoint, *, node_id: int) -> None:
    """Write a checkpoint, then unlink what is older than the two newest good ones.

    One of that LSN that is there already is replaced. Durability: it is forced, its name too, when this returns; what
    it builds on must have been forced before.

    Raises:
        OSError: the older checkpoints are as they were; nothing half written is left, as far as the disk allows.
    """
    disk.make_directories(DIRECTORY)
    path = path_of(checkpoint.lsn)
    _drop(disk, path + _TEMPORARY)
    try:
        _write_file(disk, path + _TEMPORARY, checkpoint, node_id)
        disk.rename(path + _TEMPORARY, path)
    except OSError:
        with suppress(OSError):
            _drop(disk, path + _TEMPORARY)
        raise
    disk.sync_directory(DIRECTORY)
    _unlink_older(disk, checkpoint.lsn, node_id)


def _write_file(disk: Disk, path: str, checkpoint: Checkpoint, node_id: int) -> None:
    file = disk.open(path, create=True)
    try:
        line = _encode_line(checkpoint, node_id)
        file.pwrite(line, 0)
        view = memoryview(checkpoint.state)
        for start in range(0, len(view), _PIECE_BYTES):
            file.pwrite(view[start : start + _PIECE_BYTES], len(line) + start)
        file.pwrite(checkpoint.payload_files, len(line) + len(view))
        file.fsync()
    finally:
        file.close()


def load_newest(disk: Disk, *, node_id: int) -> tuple[Checkpoint | None, str | None]:
    """The newest good checkpoint, and a note if a damaged one was passed over.

    Leftovers of a write that was cut off are removed, and the directory is forced: a checkpoint that is loaded is
    durable. None and a note: checkpoints exist, all damaged (with the journal from 0 on, nothing is lost).

    Raises:
        DirectoryInUseError: a checkpoint belongs to another node.
        StorageError: another version wrote one.
    """
    for name in disk.list_directory(DIRECTORY):
        if name.endswith(_SUFFIX + _TEMPORARY):
            disk.unlink(f"{DIRECTORY}/{name}")
    lsns = list_lsns(disk)
    if lsns:
        disk.sync_directory(DIRECTORY)
    notes: list[str] = []
    for lsn in reversed(lsns):
        try:
            return read(disk, lsn, node_id=node_id), "; ".join(notes) or None
        except CorruptRecordError as error:
            notes.append(f"checkpoint passed over: {error}")
    return None, "; ".join(notes) or None


def oldest_kept_lsn(disk: Disk) -> Lsn:
    """How far the journal may be released: the LSN of the oldest checkpoint, 0 while fewer than two are kept.

    With one checkpoint, a damaged one would leave nothing but the journal from its beginning.
    """
    lsns = list_lsns(disk)
    return Lsn(lsns[0]) if len(lsns) >= _KEPT else Lsn(0)


def read(disk: Disk, lsn: int, *, node_id: int | None) -> Checkpoint:
    """Read and check one checkpoint.

    Raises:
        CorruptRecordError: it fails its check.
        DirectoryInUseError: it belongs to another node.
        StorageError: another version wrote it.
    """
    path = path_of(lsn)
    file = disk.open(path, writable=False)
    try:
        file.drop_cache()
        line = _read_line(file.pread(_LINE_SIZE_MAX, 0), path)
        if node_id is not None and line.node_id != node_id:
            raise DirectoryInUseError(f"{path} belongs to node {line.node_id:016x}, this is node {node_id:016x}")
        if line.lsn != lsn:
            raise CorruptRecordError(path, 0, f"the header says lsn {line.lsn}, the name says {lsn}")
        end = line.size + line.state_length
        if file.size() != end + line.files_length:  # before anything of that length is read
            raise CorruptRecordError(path, file.size(), f"{line.state_length} bytes of state stated")
        state, files = file.pread(line.state_length, line.size), file.pread(line.files_length, end)
    finally:
        file.close()
    if _crc(state) != line.state_crc:
        raise CorruptRecordError(path, line.size, "the state fails its CRC")
    if _crc(files) != line.files_crc:
        raise CorruptRecordError(path, line.size + line.state_length, "the list of payload files fails its CRC")
    return Checkpoint(Lsn(line.lsn), line.chain, line.epoch, state, files)


def _crc(state: bytes | bytearray) -> int:
    """Piece by piece: a call holds the interpreter's lock."""
    crc, view = 0, memoryview(state)
    for start in range(0, len(view), _PIECE_BYTES):
        crc = crc32c(view[start : start + _PIECE_BYTES], crc)
    return crc


class _Line(NamedTuple):
    node_id: int
    lsn: int
    chain: int
    epoch: int
    state_length: int
    state_crc: int
    files_length: int
    files_crc: int
    size: int


def encode_payload_files(numbers: Sequence[int], give_way: Callable[[], None]) -> bytes:
    """A list for ``Checkpoint.payload_files``.

    Args:
        numbers: session, counter and file of each transaction, one after the other.
        give_way: called between pieces of work of about a millisecond.
    """
    pieces: list[str] = []
    for start in range(0, len(numbers), _PIECE_NUMBERS):
        pieces.append(",".join(map(str, numbers[start : start + _PIECE_NUMBERS])))
        give_way()
    return f"[{','.join(pieces)}]".encode()


def _encode_line(checkpoint: Checkpoint, node_id: int) -> bytes:
    files = checkpoint.payload_files
    text = (
        f"txmq-checkpoint {VERSION} {node_id:016x} {checkpoint.lsn} {checkpoint.chain} {checkpoint.epoch} "
        f"{len(checkpoint.state)} {_crc(checkpoint.state):08x} {len(files)} {_crc(files):08x}"
    ).encode()
    return text + f" {crc32c(text):08x}\n".encode()


def _read_line(head: bytes, path: str) -> _Line:
    match = _ANY_VERSION.match(head)
    if match is None or crc32c(match[1]) != int(match[3], 16):
        raise CorruptRecordError(path, 0, "the header fails its check")
    if int(match[2]) != VERSION:
        what = "upgrade txmq" if int(match[2]) > VERSION else "start the txmq that wrote it"
        raise StorageError(f"{path} has version {int(match[2])}, this txmq reads {VERSION}: {what}")
    match = _LINE.match(head)
    if match is None:
        raise CorruptRecordError(path, 0, "the header does not parse")
    lsn, chain, epoch, length, files_length = (int(field) for field in match.group(4, 5, 6, 7, 9))
    crcs = int(match[8], 16), int(match[10], 16)
    return _Line(int(match[3], 16), lsn, chain, epoch, length, crcs[0], files_length, crcs[1], match.end())


def list_lsns(disk: Disk) -> list[int]:
    """The LSNs of all checkpoints, ascending, good or not."""
    matches = (_NAME.match(name) for name in disk.list_directory(DIRECTORY))
    return sorted(int(match[1]) for match in matches if match)


def _unlink_older(disk: Disk, newest: int, node_id: int) -> None:
    """Keep the newest and the newest good one before it; damaged ones between go too."""
    older = [lsn for lsn in reversed(list_lsns(disk)) if lsn != newest]
    kept = next((lsn for lsn in older if lsn < newest and _is_good(disk, lsn, node_id)), None)
    for lsn in older:
        if lsn != kept:
            disk.unlink(path_of(lsn))


def _is_good(disk: Disk, lsn: int, node_id: int) -> bool:
    try:
        read(disk, lsn, node_id=node_id)
    except CorruptRecordError:
        return False
    return True


def _drop(disk: Disk, path: str) -> None:
    with suppress(FileNotFoundError):
        disk.unlink(path)
