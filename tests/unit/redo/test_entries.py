"""Entries: what is encoded is decoded, and nothing else is."""

from __future__ import annotations

import random
import struct

import pytest

from txmq.errors import StorageError
from txmq.redo import entries
from txmq.redo.entries import Committed, LogStart, Payload, Placement, Prepared, RolledBack, Run

U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def _only(entry: bytes, kind: int) -> memoryview:
    ((found, flags, body),) = entries.split(entry)
    assert (found, flags) == (kind, 0)
    return body


def test_a_run_is_its_header_and_the_batches_behind_it() -> None:
    fields = (U32, 3, U64, 1 << 40, 7, 9, -1)
    header = entries.run_header(*fields, 5)
    assert len(header) == entries.RUN_OVERHEAD_BYTES
    body = _only(header + b"batch", entries.RUN)
    assert entries.decode_run(body) == Run(*fields, memoryview(b"batch"))


def test_a_run_says_whether_some_batch_is_idempotent() -> None:
    entry = entries.run_header(1, 2, 3, 4, 5, 6, 7, 0, idempotent=True)
    ((_, flags, _),) = entries.split(entry)
    assert flags == entries.FLAG_IDEMPOTENT


def test_batches_of_a_run_are_a_view_of_the_payload() -> None:
    payload = entries.run_header(1, 2, 3, 4, 5, 6, 7, 5) + b"batch"
    ((_, _, body),) = entries.split(payload)
    batches = entries.decode_run(body).batches
    assert isinstance(batches, memoryview)
    assert batches.obj is payload


def test_every_other_entry_comes_back_as_it_was() -> None:
    placements = (Placement(1, 2, 3, 4, U64, U32, entries.IN_JOURNAL), Placement(0, 0, 0, 0, 0, 0, 0))
    payload = entries.encode_payload(U64, 1, 2, 3, 4, 5, -9, bytearray(b"batch"))
    assert entries.decode_payload(_only(payload, entries.PAYLOAD)) == Payload(
        U64, 1, 2, 3, 4, 5, -9, memoryview(b"batch")
    )
    prepared = entries.encode_prepared(1, U64, b"{}")
    assert entries.decode_prepared(_only(prepared, entries.PREPARED)) == Prepared(1, U64, b"{}")
    awaited = entries.encode_place_awaited(1, U64, b"{}")
    assert entries.decode_prepared(_only(awaited, entries.PLACE_AWAITED)) == Prepared(1, U64, b"{}")
    committed = entries.encode_committed(1, 2, 3, placements)
    assert entries.decode_committed(_only(committed, entries.COMMITTED)) == Committed(1, 2, 3, placements)
    decided = entries.encode_decided(1, 2, 3, placements, b"{}")
    assert entries.decode_decided(_only(decided, entries.DECIDED)) == entries.Decided(1, 2, 3, placements, b"{}")
    batch = entries.encode_batch_committed([(1, U64, placements), (U64, 2, ())], b'{"batch": 1}')
    assert entries.decode_batch_committed(_only(batch, entries.BATCH_COMMITTED)) == entries.BatchCommitted(
        (Committed(1, U64, 0, placements), Committed(U64, 2, 0, ())), b'{"batch": 1}'
    )
    rolled_back = entries.encode_rolled_back(1, 2, 3)
    assert entries.decode_rolled_back(_only(rolled_back, entries.ROLLED_BACK)) == RolledBack(1, 2, 3)
    assert entries.decode_topic_deleted(_only(entries.encode_topic_deleted(U32), entries.TOPIC_DELETED)) == U32
    log_start = entries.encode_log_start(1, 2, U64)
    assert entries.decode_log_start(_only(log_start, entries.LOG_START)) == LogStart(1, 2, U64)
    assert entries.decode_session_ended(_only(entries.encode_session_ended(U64), entries.SESSION_ENDED)) == U64
    completed = {"session": 1, "counter": U64, "uuid": "ab" * 16, "fact": None}
    assert entries.encode_completed(1, U64, "ab" * 16) == entries.json_entry(entries.COMPLETED, completed)
    for kind in (entries.SESSION, entries.TOPIC, entries.LED, entries.QUERY_OPENED, entries.EPOCH_DRAWN):
        assert bytes(_only(entries.json_entry(kind, {"a": "\u00e9"}), kind)).decode() == '{"a": "\u00e9"}'


def test_the_layout_is_the_documented_one() -> None:
    assert entries.run_header(1, 2, 3, 4, 5, 6, 7, 8) == struct.pack("<BBHIIIQQQQq", 1, 0, 0, 56, 1, 2, 3, 4, 5, 6, 7)
    assert entries.encode_rolled_back(1, 2, 3) == struct.pack("<BBHIQQQ", 5, 0, 0, 24, 1, 2, 3)
    assert entries.encode_place_awaited(1, 2, b"{}") == struct.pack("<BBHIQQ2s", 31, 0, 0, 18, 1, 2, b"{}")
    assert entries.json_entry(entries.REPORTED, {}) == struct.pack("<BBHI2s", 32, 0, 0, 2, b"{}")
    of_users = (entries.USER, entries.USER_REMOVED, entries.GRANTED, entries.QUOTA_SET)
    for number, kind in enumerate(of_users, 34):
        assert entries.json_entry(kind, {}) == struct.pack("<BBHI2s", number, 0, 0, 2, b"{}")
    assert entries.json_entry(entries.ACCESS, {}) == struct.pack("<BBHI2s", 39, 0, 0, 2, b"{}")
    assert entries.encode_committed(1, 2, 3, [Placement(4, 5, 6, 7, 8, 9, 10)]) == struct.pack(
        "<BBHIQQQIIIQQQII", 4, 0, 0, 68, 1, 2, 3, 1, 4, 5, 6, 7, 8, 9, 10
    )
    batch = entries.encode_batch_committed([(1, 2, [Placement(4, 5, 6, 7, 8, 9, 10)]), (3, 4, [])], b"{}")
    assert batch == struct.pack(
        "<BBHIIQQQIIIQQQIIQQQI2s",
        25, 0, 0, 102, 2, 1, 2, 0, 1, 4, 5, 6, 7, 8, 9, 10, 3, 4, 0, 0, b"{}",
    )  # fmt: skip


def test_entries_come_in_order_and_an_empty_payload_has_none() -> None:
    payload = b"".join(
        (entries.encode_session_ended(1), entries.encode_topic_deleted(2), entries.encode_session_ended(3))
    )
    kinds = [kind for kind, _, _ in entries.split(payload)]
    assert kinds == [entries.SESSION_ENDED, entries.TOPIC_DELETED, entries.SESSION_ENDED]
    assert list(entries.split(b"")) == []


def test_a_payload_cut_anywhere_inside_an_entry_is_refused() -> None:
    first, second = entries.encode_session_ended(1), entries.encode_log_start(1, 2, 3)
    payload = first + second
    for end in range(1, len(payload)):
        if end != len(first):
            with pytest.raises(StorageError):
                list(entries.split(payload[:end]))


@pytest.mark.parametrize(
    "frame", [(0, 0, 0, 0), (20, 0, 0, 0), (255, 0, 0, 0), (5, 1, 0, 0), (1, 2, 0, 0), (5, 0, 1, 0)]
)  # fmt: skip
def test_unknown_types_flags_and_reserved_bits_are_refused_with_advice(frame: tuple[int, int, int, int]) -> None:
    with pytest.raises(StorageError, match="upgrade"):
        list(entries.split(struct.pack("<BBHI", *frame)))


def test_bodies_of_a_wrong_length_are_refused() -> None:
    for decode, size in (
        (entries.decode_rolled_back, 24), (entries.decode_topic_deleted, 4), (entries.decode_log_start, 16),
        (entries.decode_session_ended, 8),
    ):  # fmt: skip
        decode(bytes(size))
        for wrong in (0, size - 1, size + 1):
            with pytest.raises(StorageError):
                decode(bytes(wrong))
    for leading, size in ((entries.decode_run, 48), (entries.decode_payload, 40), (entries.decode_prepared, 16)):
        leading(bytes(size))
        with pytest.raises(StorageError):
            leading(bytes(size - 1))


def test_count_of_placements_contradicting_the_length_is_refused_early() -> None:
    entry = bytearray(entries.encode_committed(1, 2, 3, [Placement(1, 2, 3, 4, 5, 6, 7)]))
    entry[8 + 24 : 8 + 28] = struct.pack("<I", U32)
    with pytest.raises(StorageError, match="placements"):
        entries.decode_committed(entry[8:])


def test_random_bytes_never_raise_anything_but_a_storage_error() -> None:
    rng = random.Random(3)
    parsed = 0
    for _ in range(5000):
        data = bytes([rng.randint(0, 12), 0, 0, 0, rng.randint(0, 30), 0, 0, 0]) + rng.randbytes(rng.randint(0, 60))
        try:
            parsed += len(list(entries.split(data))) > 0
        except StorageError:
            continue
    assert parsed > 20


def test_a_batch_whose_transactions_are_cut_short_is_refused() -> None:
    body = _only(
        entries.encode_batch_committed([(1, 2, [Placement(1, 2, 3, 4, 5, 6, 7)]), (3, 4, [])], b""),
        entries.BATCH_COMMITTED,
    )
    for end in range(len(body)):
        with pytest.raises(StorageError, match="batch-committed"):
            entries.decode_batch_committed(body[:end])
