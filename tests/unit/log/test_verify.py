"""``txmq log verify``: damage is found wherever it is, and a torn tail is not called damage."""

from __future__ import annotations

import pytest

from tools.simulated.disk import SimDisk
from txmq.log.verify import Finding, Verdict, verify_log, verify_partition
from txmq.model import TopicConfig

from .support import NUMBER, TOPIC_ID, Log, make_batch, make_placed

CONFIG = TopicConfig("orders", segment_size_bytes=1000)


def filled() -> Log:
    """Eight batches of two messages in four segments."""
    log = Log(CONFIG)
    log.fill([2] * 8, b"x" * 150)
    assert [s.base_offset for s in log.partition.segments] == [0, 4, 8, 12]
    return log


def verify(log: Log, end_offset: int | None = None) -> Verdict:
    return verify_partition(log.disk, TOPIC_ID, NUMBER, end_offset=end_offset)


def damage(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.is_damage]


def overwrite(log: Log, base: int, position: int, content: bytes) -> None:
    log.disk.damage(log.partition.segment_path(base), position, content)


def test_a_whole_partition_is_sound_and_counted() -> None:
    log = filled()
    verdict = verify(log, 16)
    assert (verdict.is_sound, verdict.findings) == (True, [])
    assert (verdict.partitions, verdict.segments, verdict.batches, verdict.messages) == (1, 4, 8, 16)
    assert verdict.size_bytes == sum(len(b) for b in log.batches)


def test_every_damaged_byte_before_the_end_is_found() -> None:
    log = filled()
    segment = b"".join(log.batches[2:4])
    for position in range(len(segment)):
        overwrite(log, 4, position, bytes([segment[position] ^ 0x10]))
        found = damage(verify(log))
        assert [finding.path for finding in found] == [log.partition.segment_path(4)]
        assert found[0].position == (0 if position < len(log.batches[2]) else len(log.batches[2]))
        overwrite(log, 4, position, segment[position : position + 1])
    assert verify(log).is_sound


def test_every_damaged_byte_is_found_if_the_end_is_known() -> None:
    log = filled()
    segment = b"".join(log.batches[6:])
    for position in range(len(segment)):
        overwrite(log, 12, position, bytes([segment[position] ^ 0x10]))
        assert not verify(log, 16).is_sound
        overwrite(log, 12, position, segment[position : position + 1])


def test_damage_with_whole_batches_behind_it_is_no_tail() -> None:
    log = filled()
    overwrite(log, 12, 100, b"?")
    (finding,) = verify(log).findings
    assert (finding.is_damage, finding.position) == (True, 0)
    assert "whole batches follow" in finding.text


@pytest.mark.parametrize("tail", [b"x", bytes(5000), bytes(make_placed(16))[:-1], bytes(range(256)) * 20])
def test_a_torn_tail_is_told_but_is_no_damage(tail: bytes) -> None:
    log = filled()
    end = sum(len(b) for b in log.batches[6:])
    overwrite(log, 12, end, tail)
    verdict = verify(log)
    assert (verdict.is_sound, verdict.messages) == (True, 16)
    (finding,) = verdict.findings
    assert (finding.path, finding.position) == (log.partition.segment_path(12), end)
    assert verify(log, 16).findings == []  # after the end nothing is looked at


def test_a_partition_shorter_than_it_was_is_damage() -> None:
    log = filled()
    assert "16, 17 was written" in damage(verify(log, 17))[0].text
    log.disk.open(log.partition.segment_path(12)).truncate(len(log.batches[6]))
    assert verify(log).is_sound  # nothing says there was more
    assert not verify(log, 16).is_sound
    assert not verify_partition(SimDisk(), TOPIC_ID, NUMBER, end_offset=1).is_sound


def test_a_segment_that_is_missing_doubled_or_swapped_is_damage() -> None:
    log = filled()
    log.disk.unlink(log.partition.segment_path(4))
    assert "begins at offset 8, 4 follows" in damage(verify(log))[0].text
    log = filled()
    overwrite(log, 4, 0, b"".join(log.batches[:2]))  # the bytes of segment 0 where segment 4 was
    assert "base offset 0 where 4 follows" in damage(verify(log))[0].text
    log = filled()
    overwrite(log, 0, len(log.batches[0]), bytes(log.batches[0]))
    assert "base offset 0 where 2 follows" in damage(verify(log))[0].text


def test_bytes_of_another_partition_are_damage() -> None:
    log = filled()
    moved = SimDisk()
    moved.make_directories("log/7/4")
    for segment in log.partition.segments:
        source = log.disk.open(log.partition.segment_path(segment.base_offset))
        target = moved.open(f"log/7/4/{segment.base_offset:020d}.log", create=True)
        target.pwrite(source.pread(1 << 20, 0), 0)
    found = verify_log(moved)
    assert len(damage(found)) >= 3
    assert "placement" in found.findings[0].text


def test_batches_longer_than_a_step_are_read_whole() -> None:
    log = Log(TopicConfig("orders"))
    log.fill([1, 1, 1], b"x" * 1_500_000)
    assert verify(log, 3).is_sound
    overwrite(log, 0, 1_600_000, b"?")
    assert damage(verify(log))[0].position == len(log.batches[0])


def test_a_partition_whose_start_has_moved_is_sound() -> None:
    log = filled()
    for base in (0, 4):
        log.files.unlink(log.partition.segment_path(base))
    assert verify(log, 16).is_sound


def test_the_whole_log_is_gone_through_and_strangers_are_told() -> None:
    log = filled()
    other = make_batch()
    log.files.write("log/9/0/00000000000000000000.log", 0, other)  # never placed
    log.files.write("log/7/3/notes.txt", 0, b"hello")
    log.files.write("log/seven/0/a.log", 0, b"hello")
    log.files.write("log/7/x/a.log", 0, b"hello")
    read: list[int] = []
    verdict = verify_log(log.disk, read.append)
    assert sum(read) == verdict.size_bytes
    assert verdict.partitions == 2
    assert [(f.path, f.is_damage) for f in verdict.findings] == [
        ("log/7/3/notes.txt", True),
        ("log/7/x", True),
        ("log/9/0/00000000000000000000.log", False),
        ("log/seven", True),
    ]
    assert verify_log(SimDisk()) == Verdict()
