"""Looking at a stopped data directory's journal: every record (``dump``), and whether all of it is sound (``verify``).

Theory of operation. The same walk as recovery's (``redo.recovery.Walk``), read only: nothing is repaired, cut or
removed, no lock is taken. Records are read one by one, marks included; plain and slower than recovery's loop, which
the tests hold against this one.

Invariants: nothing is written; memory is bounded by one record and its entries' summaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, NamedTuple

from txmq.errors import CorruptRecordError, StorageError, TxmqError
from txmq.redo import checkpoint, directory_identity, entries, recovery, replica_identity
from txmq.redo.journal_files import list_bases
from txmq.redo.record_format import (
    FILE_HEADER_SIZE,
    GROUP,
    RECORD_HEADER_SIZE,
    FileHeader,
    RecordHeader,
    file_path,
    record_size,
    unpack_record_header,
)
from txmq.redo.recovery import Action, Cursor, Rule, Walk, is_valid_at, open_file
from txmq.runtime.ports import Disk, File

_JSON_SHOWN_MAX: Final = 400
# A session's secret lets one speak in its name; a user's keys let one guess the password at any speed.
_SECRET: Final = re.compile(r'("(?:secret|keys|between_brokers)": )(?:"[^"]*"|\[[^]]*\])')
_WITH_SECRETS: Final = (entries.SESSION, entries.USER, entries.ACCESS)


class Record(NamedTuple):
    """One record of the journal."""

    path: str
    position: int
    header: RecordHeader
    payload: bytes

    @property
    def kind(self) -> str:
        """``group`` or ``mark``."""
        return "group" if self.header.kind == GROUP else "mark"

    def describe(self) -> dict[str, object]:
        """JSON-able: file, position, lsn, epoch, type, entries."""
        return {
            "file": self.path,
            "position": self.position,
            "lsn": self.header.lsn,
            "durable_lsn": self.header.durable_lsn,
            "epoch": self.header.epoch,
            "type": self.kind,
            "bytes": self.header.length,
            "entries": [summary(kind, flags, body) for kind, flags, body in entries.split(self.payload)],
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """What ``verify`` has to say; ``is_damage`` where the broker would refuse to start or has lost something."""

    path: str
    position: int
    text: str
    is_damage: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ``verify`` found.

    Attributes:
        records: sound group records.
        end_lsn: where the sound stream ends.
    """

    records: int
    end_lsn: int
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not any(finding.is_damage for finding in self.findings)


# --- dump ------------------------------------------------------------------------------------------------------------


def dump(disk: Disk, *, from_lsn: int = 0) -> Iterator[Record]:
    """Every record from ``from_lsn`` on, in order.

    Raises:
        StorageError: the error that recovery would raise, after the records before it.
    """
    walk = _walk(disk)
    if walk is None:
        return
    with closing(walk):
        while True:
            for record in iterate(walk.file, walk.header, walk.cursor):
                if record.header.lsn >= from_lsn:
                    yield record
            if walk.advance() is not None:
                return


def iterate(file: File, header: FileHeader, cursor: Cursor) -> Iterator[Record]:
    """The records of one file from ``cursor.lsn`` on that continue the stream, marks included."""
    while cursor.lsn - header.base_lsn + RECORD_HEADER_SIZE <= header.file_size_bytes:
        position = cursor.lsn - header.base_lsn
        record = unpack_record_header(file.pread(RECORD_HEADER_SIZE, position))
        continues = (record.lsn, record.chain) == (cursor.lsn, cursor.chain) and record.epoch >= cursor.epoch
        if not continues or not is_valid_at(file, header, position, record) or not record.is_known:
            return
        payload = file.pread(record.length, position + RECORD_HEADER_SIZE)
        cursor.lsn += record_size(record.length)
        cursor.chain, cursor.epoch = record.crc, record.epoch
        cursor.durable_lsn = max(cursor.durable_lsn, record.durable_lsn)
        cursor.highest_epoch = max(cursor.highest_epoch, record.epoch)
        cursor.records += record.kind == GROUP
        yield Record(file_path(header.base_lsn), position, record, payload)


def _walk(disk: Disk) -> Walk | None:
    """From the first record of the file that holds the older kept checkpoint; files before it wait to be released."""
    released = checkpoint.oldest_kept_lsn(disk)
    bases = list_bases(disk)
    if not bases:
        return None
    first = max((base for base in bases if base <= released), default=bases[0])
    file, header = open_file(disk, first, None, writable=False)
    file.close()
    cursor = Cursor(first + FILE_HEADER_SIZE, header.predecessor_chain)
    return Walk(disk, cursor, node_id=None, writable=False)


def summary(kind: int, flags: int, body: memoryview) -> dict[str, object]:
    """One entry in words: its type, and its fields with the length of what is opaque."""
    return {"entry": entries.NAMES[kind], **({"flags": flags} if flags else {}), **_fields(kind, body)}


def _fields(kind: int, body: memoryview) -> dict[str, object]:
    decode = _DECODERS.get(kind)
    if decode is None:
        text = bytes(body).decode("utf-8", "replace")
        return {"json": (_SECRET.sub(r'\1"hidden"', text) if kind in _WITH_SECRETS else text)[:_JSON_SHOWN_MAX]}
    decoded = decode(body)
    if isinstance(decoded, int):
        return {"time_ms" if kind == entries.CLOCK else "id": decoded}
    return {name: _shown(value) for name, value in decoded._asdict().items()}


def _shown(value: object) -> object:
    if isinstance(value, memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, bytes):
        return value[:_JSON_SHOWN_MAX].decode("utf-8", "replace")
    if isinstance(value, tuple):
        return [placement._asdict() for placement in value]
    return value


_Decoded = (
    entries.Run
    | entries.Payload
    | entries.Prepared
    | entries.Committed
    | entries.Decided
    | entries.BatchCommitted
    | entries.RolledBack
    | entries.LogStart
    | int
)
_DECODERS: Final[dict[int, Callable[[memoryview], _Decoded]]] = {
    entries.RUN: entries.decode_run,
    entries.CLOCK: entries.decode_clock,
    entries.PAYLOAD: entries.decode_payload,
    entries.PREPARED: entries.decode_prepared,
    entries.PLACE_AWAITED: entries.decode_prepared,
    entries.COMMITTED: entries.decode_committed,
    entries.DECIDED: entries.decode_decided,
    entries.BATCH_COMMITTED: entries.decode_batch_committed,
    entries.ROLLED_BACK: entries.decode_rolled_back,
    entries.TOPIC_DELETED: entries.decode_topic_deleted,
    entries.LOG_START: entries.decode_log_start,
    entries.SESSION_ENDED: entries.decode_session_ended,
    entries.SESSION_CLOSED: entries.decode_session_ended,
}


# --- verify ----------------------------------------------------------------------------------------------------------


def verify(disk: Disk) -> Verdict:
    """Check identity, checkpoints and every record and entry of the journal; changes nothing."""
    findings = [*_check_identity(disk), *_check_checkpoints(disk)]
    if disk.exists(recovery.TAIL_PATH):
        findings.append(
            Finding(recovery.TAIL_PATH, 0, "a recovery was cut off; the next one finishes it", is_damage=False)
        )
    records, end_lsn = 0, 0
    try:
        walk = _walk(disk)
        if walk is not None:
            with closing(walk):
                findings.extend(_check_records(walk))
            records, end_lsn = walk.cursor.records, walk.cursor.lsn
    except StorageError as error:
        findings.append(_finding(error))
    return Verdict(records, end_lsn, tuple(findings))


def _check_records(walk: Walk) -> Iterator[Finding]:
    while True:
        for record in iterate(walk.file, walk.header, walk.cursor):
            try:
                for kind, flags, body in entries.split(record.payload):
                    summary(kind, flags, body)
            except StorageError as error:
                yield Finding(record.path, record.position, f"lsn {record.header.lsn}: {error}", is_damage=True)
        try:
            rule = walk.advance()
        except StorageError as error:
            yield _finding(error)
            return
        if rule is not None:
            yield from _end(walk, rule)
            return


def _end(walk: Walk, rule: Rule) -> Iterator[Finding]:
    if rule.action is Action.CUT:
        path, position = file_path(walk.header.base_lsn), walk.cursor.lsn - walk.header.base_lsn
        text = f"{rule.label}: {rule.text} at lsn {walk.cursor.lsn}; the next start cuts it"
        yield Finding(path, position, text, is_damage=False)


def _check_identity(disk: Disk) -> Iterator[Finding]:
    for path, load in (
        (directory_identity.PATH, directory_identity.load),
        (replica_identity.PATH, replica_identity.load),
    ):
        try:
            if load(disk) is None:
                yield Finding(path, 0, "missing", is_damage=bool(list_bases(disk)))
        except StorageError as error:
            yield _finding(error)


def _check_checkpoints(disk: Disk) -> Iterator[Finding]:
    for lsn in checkpoint.list_lsns(disk):
        try:
            checkpoint.read(disk, lsn, node_id=None)
        except StorageError as error:
            yield _finding(error)


def _finding(error: TxmqError) -> Finding:
    if isinstance(error, CorruptRecordError):
        return Finding(error.path, error.position, error.reason, is_damage=True)
    return Finding("", 0, str(error), is_damage=True)
