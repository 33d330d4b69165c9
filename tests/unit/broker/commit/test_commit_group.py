"""Runs of a group: what stands side by side in a partition file is written at once, in order."""

from __future__ import annotations

from txmq.broker.commit.commit_group import JOINED_SIZE_BYTES_MAX, CommitGroup, Run
from txmq.log.memory_partition import new_partition
from txmq.log.partition import Partition
from txmq.model import TopicConfig

SIZE = 100


def partition(number: int = 0) -> Partition:
    return new_partition(1, "a", number, TopicConfig("a", 2))


def journaled(group: CommitGroup, of: Partition, position: int, *, base: int = 0, size: int = SIZE) -> Run:
    run = group.journaled_run_at(of, base, position, position, size)
    run.add(bytearray(size), 1, 0)
    return run


def fresh(group: CommitGroup, of: Partition, position: int) -> Run:
    run = group.run_at(of, 0, position, position)
    run.add(bytearray(SIZE), 1, 0)
    return run


def test_bytes_of_earlier_records_side_by_side_are_one_run() -> None:
    group, one, other = CommitGroup(), partition(), partition(1)
    first = journaled(group, one, 0)
    assert journaled(group, one, SIZE) is first
    assert journaled(group, other, 0) is not first
    assert journaled(group, one, 2 * SIZE) is first
    assert [(run.partition, run.position, len(run.buffers)) for run in group.placed] == [(one, 0, 3), (other, 0, 1)]
    assert (group.items, first.next_offset) == ([], 3)


def test_bytes_of_this_record_end_such_a_run() -> None:
    group, one = CommitGroup(), partition()
    runs = [journaled(group, one, 0), fresh(group, one, SIZE), journaled(group, one, 2 * SIZE)]
    runs += [fresh(group, one, 3 * SIZE), fresh(group, one, 4 * SIZE)]
    assert group.placed == [*runs[:3], runs[3]]
    assert runs[4] is runs[3]
    assert group.items == [runs[1], runs[3]]


def test_another_segment_or_a_long_run_begins_a_new_one() -> None:
    group, one = CommitGroup(), partition()
    first = journaled(group, one, 0)
    rolled = journaled(group, one, 0, base=1)
    long = journaled(group, one, SIZE, base=1, size=JOINED_SIZE_BYTES_MAX)
    assert group.placed == [first, rolled, long]
