"""The content of journal records: a sequence of entries, each ``type u8 · flags u8 · reserved u16 · length u32 ·
body``.

Theory of operation. A record's payload is entries one after the other; its CRC has been checked before anyone looks
inside, so an entry that does not parse was written by other software and is refused, never skipped. The state of a
broker is a fold over the entries in the order of the journal.

Invariants:

* little endian throughout; no padding between entries;
* decoding what encoding made gives equal values, and bytes that encoding cannot make are refused;
* bodies and batches are handed out as views of the payload: valid as long as they are referenced, never written to.

Bodies::

     1 RUN            topic_id u32, partition u32, segment_base u64, position u64, base_offset u64, next_offset u64,
                      max_timestamp_ms i64, batches (one or more, back to back). Flag 1: some batch is idempotent
     2 PAYLOAD        session u64, counter u64, part number u32, topic_id u32, partition u32, count u32,
                      max_timestamp_ms i64, batch: one part of an undecided transaction
     3 PREPARED       session u64, counter u64, meta (JSON)
     4 COMMITTED      session u64, counter u64, floor u64, number of placements u32, then per placement:
                      topic_id u32, partition u32, segment_base u64, position u64, base_offset u64, count u32,
                      part number u32 (0xFFFFFFFF: the bytes are in a RUN of the same record)
     5 ROLLED_BACK    session u64, counter u64, floor u64
     6 SESSION        JSON
     7 TOPIC          JSON: id and settings; of a broker with a registry also version and homes
     8 TOPIC_DELETED  topic_id u32
     9 LOG_START      topic_id u32, partition u32, offset u64
    11 SESSION_ENDED  session u64
    12 DECIDED        as COMMITTED, then meta (JSON): branches that must hear of it; messages are placed, not shown
    13 COMPLETED      JSON: one branch has heard of it
    14 SHOWN          JSON: messages of a decision are shown before all its branches have completed
    15 HEURISTIC      JSON: a heuristic decision; kept until forgotten
    16 FORGOTTEN      JSON
    17 SAVED          JSON: offsets of a consumer group
    18 HANDED_OVER    JSON: partitions of a consumer group got a new owner and generation
    19 GROUP_DELETED  JSON
    24 QUERY_OPENED   JSON: a driver's new incarnation writes in the name of a query
    25 BATCH_COMMITTED  number of transactions u32, then of each what COMMITTED holds, then meta (JSON): the query,
                      epoch and batch that are decided, digest of its rows; all its messages are placed
    26 QUERY_DELETED  JSON
    27 EPOCH_DRAWN    JSON: the number of a driver's incarnation, never handed out again
    28 SESSION_TAKEN  JSON: a session was taken over, its epoch rises
    29 SESSIONS_AT_REST  JSON: sessions whose clients are away keep what they need and no more
    31 PLACE_AWAITED  as PREPARED: a transaction is decided, its messages wait for earlier transactions to be placed
    32 REPORTED       JSON: the home that decided a transaction knows that this home has placed its part, or an operator
                      has given that home up (fact)
    34 USER           JSON: a user from now on: name, keys of the password, certificate; the first one with a secret
    35 USER_REMOVED   JSON
    36 GRANTED        JSON: everything that a user may do from now on
    37 QUOTA_SET      JSON: the limits of a user or of a topic from now on; none of them: no quota
    39 ACCESS         JSON: users, grants and quotas are those of the registry at a version; the cluster's secrets
    40 FENCED         JSON: a transaction that was not known takes no decision with a branch in one database any more
    41 MADE           JSON: a user has made something of which there may be so many: kind, name, how many it counts for
    42 HOME_RETIRED   JSON: another home of the cluster is given up as lost for ever: its id, why
    43 SESSION_CLOSED  session u64: its client is done with it. No connection speaks for it any more, its batches are
                      not known again; the outcomes of its transactions are
    44 TOKEN_DRAWN    JSON: the newest fencing token of a database, by the database's uuid
    45 CLOCK          time u64, ms since 1970: when the segments begin that the record's later entries begin
    47 OUTBOX_CHAIN   JSON: the newest page of an outbox, in the record of its decision; without one it is forgotten
    48 LED            JSON: a process leads the home, under a higher epoch: the first entry of the epoch's first record.
                      With its replica and start, the time, the limits that rule the fold, the format of the entries
                      that follow, and whether the epoch is a registry's
    49 CHECKPOINT     nothing; the last entry of a record: the state as of its end is one that checkpoints are taken of
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from txmq.errors import StorageError
from txmq.runtime.ports import Buffer

RUN: Final = 1
PAYLOAD: Final = 2
PREPARED: Final = 3
COMMITTED: Final = 4
ROLLED_BACK: Final = 5
SESSION: Final = 6
TOPIC: Final = 7
TOPIC_DELETED: Final = 8
LOG_START: Final = 9
SESSION_ENDED: Final = 11
DECIDED: Final = 12
COMPLETED: Final = 13
SHOWN: Final = 14
HEURISTIC: Final = 15
FORGOTTEN: Final = 16
SAVED: Final = 17
HANDED_OVER: Final = 18
GROUP_DELETED: Final = 19
QUERY_OPENED: Final = 24
BATCH_COMMITTED: Final = 25
QUERY_DELETED: Final = 26
EPOCH_DRAWN: Final = 27
SESSION_TAKEN: Final = 28
SESSIONS_AT_REST: Final = 29
PLACE_AWAITED: Final = 31
REPORTED: Final = 32
USER: Final = 34
USER_REMOVED: Final = 35
GRANTED: Final = 36
QUOTA_SET: Final = 37
ACCESS: Final = 39
FENCED: Final = 40
MADE: Final = 41
HOME_RETIRED: Final = 42
SESSION_CLOSED: Final = 43
TOKEN_DRAWN: Final = 44
CLOCK: Final = 45
OUTBOX_CHAIN: Final = 47
LED: Final = 48
CHECKPOINT: Final = 49

FORMAT: Final = 1  # of entries and of their fold, as LED states it

NAMES: Final = {
    RUN: "run", PAYLOAD: "payload", PREPARED: "prepared", COMMITTED: "committed", ROLLED_BACK: "rolled-back",
    SESSION: "session", TOPIC: "topic", TOPIC_DELETED: "topic-deleted", LOG_START: "log-start",
    SESSION_ENDED: "session-ended", DECIDED: "decided", COMPLETED: "completed", SHOWN: "shown", HEURISTIC: "heuristic",
    FORGOTTEN: "forgotten", SAVED: "saved", HANDED_OVER: "handed-over", GROUP_DELETED: "group-deleted",
    QUERY_OPENED: "query-opened", BATCH_COMMITTED: "batch-committed", QUERY_DELETED: "query-deleted",
    EPOCH_DRAWN: "epoch-drawn", SESSION_TAKEN: "session-taken", SESSIONS_AT_REST: "sessions-at-rest",
    PLACE_AWAITED: "place-awaited", REPORTED: "reported", USER: "user",
    USER_REMOVED: "user-removed", GRANTED: "granted", QUOTA_SET: "quota-set", ACCESS: "access", FENCED: "fenced",
    MADE: "made", HOME_RETIRED: "home-retired", SESSION_CLOSED: "session-closed", TOKEN_DRAWN: "token-drawn",
    CLOCK: "clock", OUTBOX_CHAIN: "outbox-chain", LED: "led", CHECKPOINT: "checkpoint",
}  # fmt: skip

FLAG_IDEMPOTENT: Final = 1  # of a RUN: recovery looks at the batches' headers for sequences
_FLAGS_ALLOWED: Final = {RUN: FLAG_IDEMPOTENT}
IN_JOURNAL: Final = 0xFFFFFFFF  # part number of a placement whose bytes stand in a RUN of the same record

_FRAME: Final = struct.Struct("<BBHI")
_RUN: Final = struct.Struct("<IIQQQQq")
_RUN_ENTRY: Final = struct.Struct("<BBHIIIQQQQq")  # frame and fixed part at once
_PAYLOAD: Final = struct.Struct("<QQIIIIq")
_PAYLOAD_ENTRY: Final = struct.Struct("<BBHIQQIIIIq")
_PREPARED: Final = struct.Struct("<QQ")
_PREPARED_ENTRY: Final = struct.Struct("<BBHIQQ")
_COMMITTED: Final = struct.Struct("<QQQI")
_COMMITTED_ENTRY: Final = struct.Struct("<BBHIQQQI")
_PLACEMENT: Final = struct.Struct("<IIQQQII")
_BATCH_COMMITTED: Final = struct.Struct("<I")
_ROLLED_BACK: Final = struct.Struct("<QQQ")
_TOPIC_DELETED: Final = struct.Struct("<I")
_LOG_START: Final = struct.Struct("<IIQ")
_SESSION_ENDED: Final = struct.Struct("<Q")
_CLOCK: Final = struct.Struct("<Q")
_CLOCK_ENTRY: Final = struct.Struct("<BBHIQ")
CLOCK_SIZE_BYTES: Final = _CLOCK_ENTRY.size

FRAME_SIZE: Final = _FRAME.size
RUN_OVERHEAD_BYTES: Final = _RUN_ENTRY.size  # the size of run_header's result


class Run(NamedTuple):
    """Consecutive batches at one place of one partition."""

    topic_id: int
    partition: int
    segment_base: int
    position: int
    base_offset: int
    next_offset: int
    max_timestamp_ms: int
    batches: Buffer


class Payload(NamedTuple):
    """A part of a transaction that is not decided."""

    session: int
    counter: int
    number: int
    topic_id: int
    partition: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no caller uses
    max_timestamp_ms: int
    batch: Buffer


class Prepared(NamedTuple):
    """A transaction is prepared; ``meta`` is JSON."""

    session: int
    counter: int
    meta: bytes


class Placement(NamedTuple):
    """The place of one part of a committed transaction; ``part`` is its number, or IN_JOURNAL."""

    topic_id: int
    partition: int
    segment_base: int
    position: int
    base_offset: int
    count: int  # type: ignore[assignment]
    part: int


class Committed(NamedTuple):
    """A transaction is decided, its parts are placed."""

    session: int
    counter: int
    floor: int
    placements: tuple[Placement, ...]


class Decided(NamedTuple):
    """A transaction is decided, its parts are placed, its branches must hear of it; ``meta`` is JSON."""

    session: int
    counter: int
    floor: int
    placements: tuple[Placement, ...]
    meta: bytes


class BatchCommitted(NamedTuple):
    """A batch of a query is decided: its transactions, placed; ``meta`` is JSON."""

    transactions: tuple[Committed, ...]
    meta: bytes


class RolledBack(NamedTuple):
    """A transaction never happened."""

    session: int
    counter: int
    floor: int


class LogStart(NamedTuple):
    """A partition's first offset moved."""

    topic_id: int
    partition: int
    offset: int


def _refuse(kind: int, reason: str) -> StorageError:
    return StorageError(f"journal entry {NAMES.get(kind, kind)}: {reason}")


_as_json = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes such an object each time


def json_body(fields: object) -> bytes:
    """JSON as it is journaled: text takes what it took on the wire; escapes would take up to three times that."""
    return _as_json(fields).encode()


# --- framing ---------------------------------------------------------------------------------------------------------


def frame(kind: int, body: Buffer, *, flags: int = 0) -> bytes:
    """One entry."""
    return b"".join((_FRAME.pack(kind, flags, 0, len(body)), body))


def json_entry(kind: int, fields: object) -> bytes:
    """An entry whose body is JSON and nothing else; ``fields`` are made JSON as ``json_body`` does."""
    return frame(kind, json_body(fields))


def encode_completed(session: int, counter: int, uuid: str) -> bytes:
    """As ``json_entry`` makes it of a database's branch that has completed without a fact, in a fifth of its time."""
    text = f'{{"session": {session}, "counter": {counter}, "uuid": "{uuid}", "fact": null}}'
    return frame(COMPLETED, text.encode())


def split(payload: Buffer) -> Iterator[tuple[int, int, memoryview]]:
    """A payload's entries as (type, flags, body).

    Raises:
        StorageError: the payload is not whole entries of known types.
    """
    view = memoryview(payload)
    position, size = 0, len(view)
    while position < size:
        if size - position < FRAME_SIZE:
            raise StorageError(f"journal entry: {size - position} bytes left at {position}, less than a frame")
        kind, flags, reserved, length = _FRAME.unpack_from(view, position)
        if kind not in NAMES or reserved or flags & ~_FLAGS_ALLOWED.get(kind, 0):
            raise StorageError(
                f"journal entry: type {kind}, flags {flags:#x} is not known: a newer txmq wrote it; upgrade"
            )
        position += FRAME_SIZE
        end = position + length
        if end > size:
            raise _refuse(kind, f"{length} bytes stated, {size - position} there")
        yield kind, flags, view[position:end]
        position = end


def _fixed(kind: int, layout: struct.Struct, body: Buffer) -> tuple[int, ...]:
    """The fields of a body that has nothing else."""
    if len(body) != layout.size:
        raise _refuse(kind, f"{len(body)} bytes instead of {layout.size}")
    return layout.unpack(body)


def _leading(kind: int, layout: struct.Struct, body: Buffer) -> tuple[int, ...]:
    """The fields at the head of a body."""
    if len(body) < layout.size:
        raise _refuse(kind, f"{len(body)} bytes, less than {layout.size}")
    return layout.unpack_from(body)


def run_header(  # hot: one struct call, the caller joins header and batches
    topic_id: int, partition: int, segment_base: int, position: int, base_offset: int, next_offset: int,
    max_timestamp_ms: int, size: int, *, idempotent: bool = False,
) -> bytes:  # fmt: skip
    """The part of a RUN entry before its ``size`` bytes of batches."""
    return _RUN_ENTRY.pack(
        RUN, FLAG_IDEMPOTENT if idempotent else 0, 0, _RUN.size + size,
        topic_id, partition, segment_base, position, base_offset, next_offset, max_timestamp_ms,
    )  # fmt: skip


def encode_clock(time_ms: int) -> bytes:
    """A CLOCK entry."""
    return _CLOCK_ENTRY.pack(CLOCK, 0, 0, _CLOCK.size, time_ms)


def decode_clock(body: Buffer) -> int:
    """A CLOCK's body."""
    (time_ms,) = _fixed(CLOCK, _CLOCK, body)
    return time_ms


def decode_run(body: Buffer) -> Run:
    """A RUN's body."""
    return Run._make((*_leading(RUN, _RUN, body), memoryview(body)[_RUN.size :]))


def encode_payload(
    session: int, counter: int, number: int, topic_id: int, partition: int, count: int, max_timestamp_ms: int,
    batch: Buffer,
) -> bytes:  # fmt: skip
    """A PAYLOAD entry."""
    size, fields = _PAYLOAD.size + len(batch), (topic_id, partition, count, max_timestamp_ms)
    return b"".join((_PAYLOAD_ENTRY.pack(PAYLOAD, 0, 0, size, session, counter, number, *fields), batch))


def decode_payload(body: Buffer) -> Payload:
    """A PAYLOAD's body."""
    return Payload._make((*_leading(PAYLOAD, _PAYLOAD, body), memoryview(body)[_PAYLOAD.size :]))


def encode_prepared(session: int, counter: int, meta: bytes) -> bytes:
    """A PREPARED entry; ``meta`` is JSON."""
    return _PREPARED_ENTRY.pack(PREPARED, 0, 0, _PREPARED.size + len(meta), session, counter) + meta


def encode_place_awaited(session: int, counter: int, meta: bytes) -> bytes:
    """A PLACE_AWAITED entry; ``meta`` is JSON."""
    return frame(PLACE_AWAITED, _PREPARED.pack(session, counter) + meta)


def decode_prepared(body: Buffer) -> Prepared:
    """A PREPARED's body, or a PLACE_AWAITED's."""
    session, counter = _leading(PREPARED, _PREPARED, body)
    return Prepared(session, counter, bytes(body[_PREPARED.size :]))


def encode_committed(session: int, counter: int, floor: int, placements: Iterable[tuple[int, ...]]) -> bytes:
    """A COMMITTED entry; placements are ``Placement``, or plain tuples of the same fields (faster to make)."""
    return encode_decided(session, counter, floor, placements, b"", COMMITTED)


def decode_committed(body: Buffer) -> Committed:
    """A COMMITTED's body."""
    session, counter, floor, count = _leading(COMMITTED, _COMMITTED, body)
    packed = memoryview(body)[_COMMITTED.size :]
    if len(packed) != count * _PLACEMENT.size:
        raise _refuse(COMMITTED, f"{count} placements stated, {len(packed)} bytes there")
    return Committed(session, counter, floor, tuple(map(Placement._make, _PLACEMENT.iter_unpack(packed))))


def encode_decided(
    session: int, counter: int, floor: int, placements: Iterable[tuple[int, ...]], meta: bytes, kind: int = DECIDED
) -> bytes:
    """A DECIDED entry; ``meta`` is JSON. Or one of another ``kind`` that begins as it does."""
    packed = [_PLACEMENT.pack(*placement) for placement in placements]
    size = _COMMITTED.size + len(packed) * _PLACEMENT.size + len(meta)
    head = _COMMITTED_ENTRY.pack(kind, 0, 0, size, session, counter, floor, len(packed))
    return b"".join((head, *packed, meta))


def decode_decided(body: Buffer) -> Decided:
    """A DECIDED's body."""
    session, counter, floor, count = _leading(DECIDED, _COMMITTED, body)
    rest = memoryview(body)[_COMMITTED.size :]
    size = count * _PLACEMENT.size
    if len(rest) < size:
        raise _refuse(DECIDED, f"{count} placements stated, {len(rest)} bytes there")
    placements = tuple(map(Placement._make, _PLACEMENT.iter_unpack(rest[:size])))
    return Decided(session, counter, floor, placements, bytes(rest[size:]))


def encode_batch_committed(transactions: Sequence[tuple[int, int, Sequence[tuple[int, ...]]]], meta: bytes) -> bytes:
    """A BATCH_COMMITTED entry: session, counter and placements of each transaction; ``meta`` is JSON."""
    packed = [_BATCH_COMMITTED.pack(len(transactions))]
    for session, counter, placements in transactions:
        packed.append(_COMMITTED.pack(session, counter, 0, len(placements)))
        packed.extend(_PLACEMENT.pack(*placement) for placement in placements)
    return frame(BATCH_COMMITTED, b"".join(packed) + meta)


def committed_size(placements: int) -> int:
    """About how long a COMMITTED or DECIDED entry is."""
    return _COMMITTED.size + placements * _PLACEMENT.size


def batch_committed_size(transactions: int, placements: int) -> int:
    """About how long such an entry is."""
    return transactions * _COMMITTED.size + placements * _PLACEMENT.size


def decode_batch_committed(body: Buffer) -> BatchCommitted:
    """A BATCH_COMMITTED's body."""
    (count,) = _leading(BATCH_COMMITTED, _BATCH_COMMITTED, body)
    rest, position = memoryview(body), _BATCH_COMMITTED.size
    transactions = []
    for _ in range(count):
        session, counter, floor, placed = _leading(BATCH_COMMITTED, _COMMITTED, rest[position:])
        position += _COMMITTED.size
        packed = rest[position : position + placed * _PLACEMENT.size]
        if len(packed) != placed * _PLACEMENT.size:
            raise _refuse(BATCH_COMMITTED, f"{placed} placements stated, {len(packed)} bytes there")
        position += len(packed)
        placements = tuple(map(Placement._make, _PLACEMENT.iter_unpack(packed)))
        transactions.append(Committed(session, counter, floor, placements))
    return BatchCommitted(tuple(transactions), bytes(rest[position:]))


def encode_rolled_back(session: int, counter: int, floor: int) -> bytes:
    """A ROLLED_BACK entry."""
    return frame(ROLLED_BACK, _ROLLED_BACK.pack(session, counter, floor))


def decode_rolled_back(body: Buffer) -> RolledBack:
    """The body of a ROLLED_BACK."""
    return RolledBack(*_fixed(ROLLED_BACK, _ROLLED_BACK, body))


def encode_session_ended(session: int, kind: int = SESSION_ENDED) -> bytes:
    """A SESSION_ENDED entry, or a SESSION_CLOSED."""
    return frame(kind, _SESSION_ENDED.pack(session))


def decode_session_ended(body: Buffer) -> int:
    """The session of a SESSION_ENDED, or of a SESSION_CLOSED."""
    return _fixed(SESSION_ENDED, _SESSION_ENDED, body)[0]


def encode_topic_deleted(topic_id: int) -> bytes:
    """A TOPIC_DELETED entry."""
    return frame(TOPIC_DELETED, _TOPIC_DELETED.pack(topic_id))


def decode_topic_deleted(body: Buffer) -> int:
    """The topic that is gone."""
    return _fixed(TOPIC_DELETED, _TOPIC_DELETED, body)[0]


def encode_log_start(topic_id: int, partition: int, offset: int) -> bytes:
    """A LOG_START entry."""
    return frame(LOG_START, _LOG_START.pack(topic_id, partition, offset))


def decode_log_start(body: Buffer) -> LogStart:
    """A LOG_START's body."""
    return LogStart(*_fixed(LOG_START, _LOG_START, body))
