"""``journal dump`` and ``journal verify`` see what recovery sees, and change nothing."""

from __future__ import annotations

import json
import random

import pytest

from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from txmq.errors import CorruptRecordError
from txmq.model import Lsn
from txmq.redo import checkpoint, entries, inspect, replica_identity
from txmq.redo.directory_identity import load_or_create
from txmq.redo.record_format import FILE_HEADER_SIZE, file_path, record_size

from .support import FILE_SIZE, content, flip, open_journal, payload, put
from .test_directory_identity import SeededRandom


def _disk() -> SimDisk:
    """A sound directory of several files, with entries of every type in the records."""
    disk = SimDisk()
    load_or_create(disk, SeededRandom(1), SimClock())
    replica_identity.load_or_create(disk, SeededRandom(1))
    journal, _ = open_journal(disk)
    samples = [
        entries.json_entry(entries.LED, {"epoch": 1}),
        entries.json_entry(entries.TOPIC, {"name": "orders"}),
        entries.json_entry(entries.SESSION, {"session": 1}),
        entries.run_header(1, 0, 0, 0, 0, 3, 17, 900) + bytes(900),
        entries.encode_payload(1, 1, 0, 1, 0, 2, 17, bytes(1400)),
        entries.encode_prepared(1, 1, b'{"kind": "last-resource"}'),
        entries.encode_committed(1, 1, 0, [entries.Placement(1, 0, 0, 900, 3, 2, 0)]),
        entries.encode_rolled_back(1, 2, 1),
        entries.encode_log_start(1, 0, 2),
        entries.encode_topic_deleted(1),
        entries.encode_session_ended(1),
        entries.encode_decided(1, 3, 0, [entries.Placement(1, 0, 0, 900, 5, 2, 0)], b'{"branches": []}'),
        entries.json_entry(entries.COMPLETED, {"session": 1}),
        entries.json_entry(entries.SHOWN, {"session": 1}),
        entries.json_entry(entries.HEURISTIC, {"session": 1}),
        entries.json_entry(entries.FORGOTTEN, {"session": 1}),
        entries.json_entry(entries.SAVED, {"group": "g"}),
        entries.json_entry(entries.HANDED_OVER, {"group": "g"}),
        entries.json_entry(entries.GROUP_DELETED, {"group": "g"}),
        entries.json_entry(entries.QUERY_OPENED, {"query": "q"}),
        entries.encode_batch_committed([(1, 4, [entries.Placement(1, 0, 0, 900, 7, 2, 0)])], b'{"batch": 1}'),
        entries.json_entry(entries.QUERY_DELETED, {"query": "q"}),
        entries.json_entry(entries.EPOCH_DRAWN, {"epoch": 1}),
        entries.json_entry(entries.SESSION_TAKEN, {"session": 1, "epoch": 1}),
        entries.json_entry(entries.SESSIONS_AT_REST, {"sessions": [1]}),
        entries.encode_place_awaited(1, 5, b'{"kind": "local"}'),
        entries.json_entry(entries.REPORTED, {"session": 1, "counter": 6}),
        entries.json_entry(entries.USER, {"user": "shop", "keys": ["c2FsdA==", 4096, "a2V5", "b2xk"], "secret": "5ec"}),
        entries.json_entry(entries.USER_REMOVED, {"user": "shop"}),
        entries.json_entry(entries.GRANTED, {"user": "shop", "grants": [["read", "topic", "a*"]]}),
        entries.json_entry(entries.QUOTA_SET, {"kind": "user", "name": "shop", "limits": {}}),
        entries.json_entry(entries.ACCESS, {"version": 1, "secret": "5ec", "between_brokers": "b07"}),
        entries.json_entry(entries.FENCED, {"session": 1, "counter": 2, "uuid": "a" * 32}),
        entries.json_entry(entries.MADE, {"kind": "group", "name": "g", "user": "shop", "size": 1}),
        entries.json_entry(entries.HOME_RETIRED, {"home": "00000000000000b2", "reason": "burnt"}),
        entries.encode_session_ended(1, entries.SESSION_CLOSED),
        entries.json_entry(entries.TOKEN_DRAWN, {"uuid": "a", "token": "b"}),
        entries.encode_clock(17),
        entries.json_entry(entries.OUTBOX_CHAIN, {"uuid": "a", "name": "shop", "last": "b", "time_ms": 1}),
        entries.frame(entries.CHECKPOINT, b""),
    ]
    for sample in samples:
        journal.append(sample)
    journal.append(b"".join(samples))
    journal.mark()
    return disk


def test_dump_shows_every_record_with_its_place_and_its_entries() -> None:
    disk = _disk()
    records = list(inspect.dump(disk))
    assert [record.kind for record in records] == ["group"] * (len(entries.NAMES) + 1) + ["mark"]
    assert records[0].position == FILE_HEADER_SIZE
    shown = [record.describe() for record in records]
    json.dumps(shown)
    kinds = [entry["entry"] for record in shown for entry in record["entries"]]  # type: ignore[attr-defined]
    assert kinds[: len(entries.NAMES)] == kinds[len(entries.NAMES) :]
    assert set(kinds) == set(entries.NAMES.values())
    assert shown[-1]["durable_lsn"] == shown[-1]["lsn"]
    for record in records:
        assert content(disk, record.path)[record.position :][:4] == b"\xc7RED"


def test_dump_hides_the_keys_of_users() -> None:
    fields = {"user": "shop", "keys": ["c2FsdA==", 4096, "a2V5", "b2xk"], "certificate": None, "secret": "5ec"}
    (body,) = [memoryview(body) for _, _, body in entries.split(entries.json_entry(entries.USER, fields))]
    shown = {"user": "shop", "keys": "hidden", "certificate": None, "secret": "hidden"}
    assert json.loads(str(inspect.summary(entries.USER, 0, body)["json"])) == shown


def test_dump_from_an_lsn_starts_there() -> None:
    disk = _disk()
    records = list(inspect.dump(disk))
    assert list(inspect.dump(disk, from_lsn=records[4].header.lsn)) == records[4:]


def test_dump_and_recovery_read_equal_records() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        disk = SimDisk(rng)
        journal, _ = open_journal(disk)
        for number in range(rng.randint(1, 40)):
            journal.append(payload(number, rng.randint(0, 1500)))
            if rng.random() < 0.3:
                journal.sync()
        image = disk.crash()
        dumped = [record.payload for record in inspect.dump(image) if record.kind == "group"]
        assert dumped == open_journal(image)[1]


def test_dump_stops_at_damage_with_the_error_of_recovery() -> None:
    disk = _disk()
    third = list(inspect.dump(disk))[2]
    flip(disk, 0, third.position + 50)
    walked = inspect.dump(disk)
    assert [next(walked), next(walked)]
    with pytest.raises(CorruptRecordError, match=f"lsn {third.header.lsn}"):
        next(walked)


def test_a_sound_directory_is_sound_and_nothing_is_changed() -> None:
    disk = _disk()
    writes = disk.counts["any"]
    verdict = inspect.verify(disk)
    assert verdict.is_sound
    assert verdict.findings == ()
    assert verdict.records == len(entries.NAMES) + 1
    assert disk.counts["any"] == writes
    assert verdict.end_lsn == _end(disk)[0]


def _end(disk: SimDisk) -> tuple[int, int]:
    """Where the records end, by the dump, and the chain there."""
    last = list(inspect.dump(disk))[-1]
    return last.header.lsn + record_size(last.header.length), last.header.crc


def test_empty_directory_has_no_identity_and_is_sound() -> None:
    verdict = inspect.verify(SimDisk())
    assert verdict.is_sound
    assert [finding.text for finding in verdict.findings] == ["missing"] * 2
    assert list(inspect.dump(SimDisk())) == []


def test_verify_names_damage_wherever_it_is() -> None:
    disk = _disk()
    second = list(inspect.dump(disk))[1]
    for path, position in (
        (file_path(0), second.position + 49),
        (file_path(0), 20),
        ("node.json", 15),
        ("replica.json", 15),
    ):
        damaged = _disk()
        damaged.damage(path, position, bytes([content(damaged, path)[position] ^ 1]))
        verdict = inspect.verify(damaged)
        assert not verdict.is_sound
        assert verdict.findings[0].path == path


def test_verify_reports_a_damaged_checkpoint_and_goes_on() -> None:
    disk = _disk()
    end, chain = _end(disk)
    for lsn in (end - 8, end):
        checkpoint.write(disk, checkpoint.Checkpoint(Lsn(lsn), chain, 1, b"{}"), node_id=1)
    disk.damage(checkpoint.path_of(end), 3, b"x")
    verdict = inspect.verify(disk)
    assert [(finding.path, finding.is_damage) for finding in verdict.findings] == [(checkpoint.path_of(end), True)]


def test_verify_reports_torn_tail_as_what_next_start_cuts() -> None:
    disk = _disk()
    end, _ = _end(disk)
    base = end // FILE_SIZE * FILE_SIZE
    claim = bytearray(48)
    claim[24:32] = end.to_bytes(8, "little")
    disk.damage(file_path(base), end - base, bytes(claim))
    verdict = inspect.verify(disk)
    assert verdict.is_sound
    assert "R3" in verdict.findings[0].text
    assert (verdict.findings[0].path, verdict.findings[0].position) == (file_path(base), end - base)


def test_verify_reports_entries_that_do_not_parse() -> None:
    disk = SimDisk()
    load_or_create(disk, SeededRandom(1), SimClock())
    replica_identity.load_or_create(disk, SeededRandom(1))
    journal, _ = open_journal(disk)
    journal.append(b"no entry at all")
    journal.sync()
    (finding,) = inspect.verify(disk).findings
    assert finding.is_damage
    assert (finding.path, finding.position) == (file_path(0), FILE_HEADER_SIZE)


def test_verify_mentions_a_recovery_that_was_cut_off() -> None:
    disk = _disk()
    put(disk, "journal/tail", b"whatever")
    (finding,) = inspect.verify(disk).findings
    assert not finding.is_damage
    assert finding.path == "journal/tail"
