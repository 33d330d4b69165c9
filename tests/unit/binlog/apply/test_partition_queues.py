"""Queues hand out the messages of partitions in order, each to one thread, and wait together at statements."""

from __future__ import annotations

import pytest

from tools.simulated.clock import SimClock
from txmq.binlog.apply import partition_queues
from txmq.binlog.apply.partition_queues import PartitionQueue, PartitionQueues
from txmq.binlog.errors import TargetError
from txmq.errors import FencedError
from txmq.model import Message, TopicPartition
from txmq.runtime.threads import Signal, start_daemon
from txmq.testing.eventually import WITHIN_S, eventually

A, B = ("t", 0), ("t", 1)


def message(slot: TopicPartition, offset: int, op: bytes = b"c", epoch: int = 1) -> Message:
    """An event."""
    return Message(*slot, offset, b"k", b"v", {"txmq.op": op, "txmq.epoch": b"%d" % epoch}, None, 0, None)


def begun(*slots: TopicPartition, offset: int | None = 0, batch: int = 3) -> tuple[PartitionQueues, SimClock]:
    """PartitionQueues that were granted, and have all of the first epoch."""
    clock = SimClock()
    made = PartitionQueues(batch, clock)
    for slot in slots:
        made.granted(slot, 7, offset)
    for topic in {topic for topic, _ in slots}:
        made.seen(topic, 1, {})
    for topic, number in slots:
        made.seen(topic, 1, {number: (0, 0)})
    return made, clock


def taken(made: PartitionQueues) -> tuple[PartitionQueue, list[int]]:
    """What a thread gets: a queue, and the offsets of messages."""
    found = made.take()
    assert found is not None
    return found[0], [one.offset for one in found[1]]


def test_a_batch_is_handed_out_until_it_is_done() -> None:
    made, _ = begun(A)
    made.add([message(A, offset) for offset in range(5)])
    queue, offsets = taken(made)
    assert (queue.slot, queue.generation, offsets) == (A, 7, [0, 1, 2])
    made.again(queue, 0.0)
    queue, offsets = taken(made)
    assert offsets == [0, 1, 2]
    assert [one.offset for one in made.done(queue, 3)] == [0, 1, 2]
    assert taken(made)[1] == [3, 4]


def test_no_two_threads_have_one_queue() -> None:
    made, _ = begun(A, B)
    made.add([message(A, 0), message(B, 0), message(A, 1)])
    assert {taken(made)[0].slot, taken(made)[0].slot} == {A, B}


def test_batches_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_queues, "BATCH_BYTES_MAX", 2)
    made, _ = begun(A)
    made.add([message(A, offset) for offset in range(3)])
    assert taken(made)[1] == [0, 1]


def test_a_refused_batch_is_handed_out_one_by_one() -> None:
    made, _ = begun(A)
    made.add([message(A, offset) for offset in range(6)])
    queue, _ = taken(made)
    made.refused(queue, 3, 5.0)
    for offset in range(3):
        assert taken(made)[1] == [offset]
        made.done(queue, offset + 1)
    assert taken(made)[1] == [3, 4, 5]


def test_a_refused_message_is_tried_with_those_behind_it() -> None:
    made, clock = begun(A, batch=5)
    made.add([message(A, offset) for offset in range(9)])
    queue, _ = taken(made)
    made.refused(queue, 5, 3.0)
    begun_at = clock.monotonic()
    for size in (1, 2, 4, 5):
        assert taken(made)[1] == list(range(size))
        made.refused(queue, size, 3.0)
    assert clock.monotonic() == begun_at
    assert queue.due_at == begun_at + 3.0
    clock.sleep(3.0)
    assert taken(made)[1] == [0]
    made.refused(queue, 1, 3.0)
    assert taken(made)[1] == [0, 1]
    made.done(queue, 2)
    assert taken(made)[1] == [2]


def test_a_refused_message_is_not_tried_across_a_statement() -> None:
    made, clock = begun(A)
    made.add([message(A, 0), message(A, 1), message(A, 2, b"ddl"), message(A, 3)])
    queue, offsets = taken(made)
    made.refused(queue, len(offsets), 3.0)
    for size in (1, 2):
        assert taken(made)[1] == list(range(size))
        made.refused(queue, size, 3.0)
    assert queue.due_at == clock.monotonic() + 3.0


def test_whole_epochs_of_a_topic_are_handed_out_together() -> None:
    other = ("u", 0)
    made, _ = begun(A, B, other)
    made.add([message(A, offset) for offset in range(5)])
    first, _ = taken(made)
    made.add([message(A, 5, epoch=2), message(other, 0)])
    made.add([*(message(B, offset) for offset in range(4)), message(B, 4, b"ddl"), message(B, 5)])
    together = made.take_together(first)
    told = {queue.slot: [one.offset for one in messages] for queue, messages in together}
    assert told == {A: [0, 1, 2, 3, 4], B: [0, 1, 2, 3]}
    assert taken(made)[0].slot == other
    for queue, messages in together:
        made.done(queue, messages[-1].offset + 1)
    assert taken(made) == (together[1][0], [4])


def test_all_is_handed_out_when_no_other_thread_has_any() -> None:
    made, _ = begun(A, B)
    made.add([message(A, 0), message(B, 0), message(B, 1, b"ddl")])
    (first, _), (second, _) = taken(made), taken(made)
    found, ended = list[int](), Signal()

    def work() -> None:
        found.extend(queue.slot[1] for queue, _ in made.take_together(first))
        ended.set()

    start_daemon("together", work)
    eventually(lambda: made._together, "a thread waits for the topic")
    assert made.take_together(second) == []  # another thread has them
    made.done(second, 1)
    assert ended.wait(WITHIN_S)
    assert found == [first.slot[1]]


def test_no_message_passes_an_epoch_that_is_not_whole() -> None:
    other = ("u", 0)
    made, _ = begun(A, B, other)
    made.add([message(A, 0, epoch=2), message(A, 1, epoch=3), message(other, 0)])
    assert taken(made)[0].slot == other
    assert made.unasked() == {"t": 3}
    made.seen("t", 3, {0: (0, 2), 1: (0, 2)})  # B has two messages that have not come
    assert made.unasked() == {}
    made.add([message(B, 0, epoch=3)])
    assert taken(made)[1] == [0]  # of A: B's are of a later epoch
    made.add([message(B, 1, epoch=3)])
    assert [taken(made)[1], made.unasked()] == [[0, 1], {}]


def test_partitions_that_hold_a_topic_up_are_told() -> None:
    made, _ = begun(A, B)
    assert made.held_up() == {}
    made.add([message(A, 0, epoch=2), message(A, 1, epoch=3)])
    assert made.held_up() == {("t", 2): []}  # nobody has said yet where the partitions end
    made.seen("t", 3, {0: (0, 2), 1: (0, 2), 2: (0, 9)})
    assert made.held_up() == {("t", 2): [("t", 2), B]}
    made.granted(("t", 2), 7, 0)
    made.add([message(B, 0, epoch=3)])
    assert made.held_up() == {("t", 2): []}
    made.seen("t", 3, {2: (0, 0)})
    assert made.held_up() == {}


def test_idle_partition_holds_nobody_up() -> None:
    made, _ = begun(A, B)
    made.add([message(A, 0, epoch=7), message(A, 1, epoch=9)])
    made.seen("t", 9, {0: (0, 2), 1: (0, 0)})
    assert taken(made)[1] == [0, 1]


def test_what_was_asked_and_does_not_come_is_asked_again() -> None:
    made, clock = begun(A, B)
    made.add([message(A, 0, epoch=2)])
    assert made.unasked() == {"t": 2}
    made.seen("t", 2, {0: (0, 1), 1: (0, 5)})
    clock.sleep(partition_queues.AGAIN_S)
    assert made.unasked() == {"t": 2}
    made.seen("t", 2, {0: (0, 1), 1: (0, 0)})  # the topic was made anew
    assert taken(made)[1] == [0]


def test_partition_with_messages_is_waited_for_until_it_is_here() -> None:
    made, _ = begun(A, ("u", 0))
    made.add([message(A, 0, epoch=2), message(("u", 0), 0)])
    made.seen("t", 2, {0: (0, 1), 1: (0, 1)})
    assert taken(made)[0].slot == ("u", 0)
    made.granted(B, 7, None)
    made.add([message(B, 0, epoch=2)])
    made.seen("t", 2, {0: (0, 1), 1: (0, 1)})
    assert {taken(made)[0].slot, taken(made)[0].slot} == {A, B}


@pytest.mark.parametrize("number", [b"", b"x", b"-5", b"9" * 19])
def test_message_without_a_number_is_of_the_epoch_before(number: bytes) -> None:
    made, _ = begun(A)
    stranger = Message(*A, 1, b"k", b"v", {"txmq.epoch": number}, None, 0, None)
    made.add([message(A, 0, epoch=5), stranger, message(A, 2, epoch=4)])
    assert made.unasked() == {"t": 5}
    made.seen("t", 5, {0: (0, 3)})
    assert taken(made)[1] == [0, 1, 2]


def test_full_queue_of_one_epoch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_queues, "QUEUE_MAX", 2)
    made, _ = begun(A)
    assert made.add([message(A, 0, epoch=5), message(A, 1, epoch=5)]) == [A]
    assert taken(made)[1] == [0, 1]


def test_a_queue_that_waits_lets_others_pass() -> None:
    made, clock = begun(A, B)
    made.add([message(A, 0)])
    queue, _ = taken(made)
    assert made.refused_for(queue) == 0.0
    made.again(queue, 5.0)
    made.add([message(B, 0)])
    assert taken(made)[0].slot == B
    clock.sleep(5.0)
    assert taken(made)[0].slot == A
    assert made.refused_for(queue) == 5.0
    made.done(queue, 1)
    assert queue.refused_since is None


@pytest.mark.parametrize("op", [b"ddl", b"t"])
def test_a_statement_is_handed_out_alone(op: bytes) -> None:
    made, _ = begun(A)
    made.add([message(A, 0), message(A, 1, op), message(A, 2)])
    for offset in range(3):
        queue, offsets = taken(made)
        assert offsets == [offset]
        made.done(queue, offset + 1)


def test_statement_waits_for_every_partition_that_has_it() -> None:
    made, _ = begun(A, B)
    made.add([message(A, 0, b"ddl"), message(A, 1)])
    first, _ = taken(made)
    assert made.arrive(first, "0-1-5", {A, B}, "said") is None
    made.add([message(B, 0), message(B, 1, b"ddl")])
    second, offsets = taken(made)
    assert (second.slot, offsets) == (B, [0])
    made.done(second, 1)
    second, offsets = taken(made)
    assert offsets == [1]
    arrived = made.arrive(second, "0-1-5", {A, B}, "said")
    assert arrived == [first, second]
    assert sorted((one.partition, one.offset) for one in made.passed(arrived, "0-1-5")) == [(0, 0), (1, 1)]
    assert (first.next, second.next) == (1, 2)
    assert taken(made) == (first, [1])


def test_statement_that_waits_for_long_tells_what_is_missing() -> None:
    made, clock = begun(A, B)
    made.add([message(A, 0, b"ddl"), message(B, 0, b"ddl")])
    assert made.arrive(taken(made)[0], "0-1-5", {A, B}, "said") is None
    assert made.waiting(10.0) == {}
    clock.sleep(10.0)
    assert made.waiting(10.0) in ({"0-1-5": [A]}, {"0-1-5": [B]})
    arrived = made.arrive(taken(made)[0], "0-1-5", {A, B}, "said")
    assert arrived is not None
    assert made.waiting(10.0) == {}
    made.passed(arrived, "0-1-5")
    assert made.waiting(0.0) == {}


def test_statement_that_another_partition_tells_otherwise_is_refused() -> None:
    made, _ = begun(A, B)
    made.add([message(A, 0, b"ddl"), message(B, 0, b"ddl")])
    first, _ = taken(made)
    assert made.arrive(first, "0-1-5", {A, B}, "said") is None
    second, _ = taken(made)
    with pytest.raises(TargetError, match=r"has another statement of transaction 0-1-5 than"):
        made.arrive(second, "0-1-5", {A, B}, "said by somebody else")


@pytest.mark.parametrize("bound", ["QUEUE_MAX", "QUEUE_BYTES_MAX"])
def test_full_queues_are_told_until_they_are_half_empty(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(partition_queues, bound, 10)  # a message has one byte
    made, _ = begun(A, batch=10)
    assert made.add([message(A, offset) for offset in range(9)]) == []
    assert made.add([message(A, 9)]) == [A]
    assert (made.add([]), made.with_room()) == ([], [])
    queue, _ = taken(made)
    made.done(queue, 5)
    assert made.with_room() == []
    taken(made)
    made.done(queue, 6)
    assert (made.with_room(), made.with_room()) == ([A], [])


def test_full_queue_that_can_hand_out_nothing_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_queues, "QUEUE_MAX", 4)
    made, _ = begun(A, batch=10)
    assert made.add([message(A, 0, epoch=2), *(message(A, offset, epoch=3) for offset in range(1, 4))]) == [A]
    queue, offsets = taken(made)
    assert offsets == [0]
    made.done(queue, 1)
    assert made.with_room() == [A]
    made.add([message(A, 4, epoch=4)])
    assert taken(made)[1] == [1, 2, 3]


def test_partition_that_goes_back_has_no_epoch_whole() -> None:
    made, _ = begun(A, ("u", 0), offset=9)
    made.goes_back(A, 4)
    made.add([message(A, 4), message(("u", 0), 9)])
    assert taken(made)[0].slot == ("u", 0)
    assert made.unasked() == {"t": 1}


def test_messages_that_are_missing_are_never_passed_over() -> None:
    made, _ = begun(A, offset=4)
    with pytest.raises(TargetError, match="t-0: messages 4 to 5 are gone"):
        made.add([message(A, 6)])
    made, _ = begun(A, offset=None)  # nothing was ever applied: it begins with what there is
    made.add([message(A, 6)])
    with pytest.raises(TargetError, match="messages 7 to 7 are gone"):
        made.add([message(A, 8)])


def test_partition_that_comes_back_ends_the_queues() -> None:
    made, _ = begun(A)
    made.add([message(A, 0)])
    made.granted(A, 8, 0)
    assert made.take() is None
    with pytest.raises(FencedError):
        made.refuse_failed()


def test_poll_that_grants_anew_brings_messages_in_vain() -> None:
    made, _ = begun(A)
    made.add([message(A, 0), message(A, 1)])
    made.granted(A, 8, 0)
    assert made.add([message(A, 0)]) == []
    with pytest.raises(FencedError, match="was another process's meanwhile"):
        made.refuse_failed()


def test_the_end_is_reached_when_all_queues_have_passed_it() -> None:
    made, _ = begun(A, offset=3)
    assert made.not_passed({}) == []
    assert made.not_passed({A: 3}) == []
    assert made.not_passed({A: 4}) == [A]
    assert made.not_passed({A: 3, B: 1}) == [B]


def test_messages_that_are_all_gone_are_never_passed_over() -> None:
    made, _ = begun(A, offset=4)
    made.begin_at({A: 4, B: 9})
    with pytest.raises(TargetError, match="t-0: messages 4 to 5 are gone"):
        made.begin_at({A: 6})
    made.add([message(A, 4)])
    made.begin_at({A: 6})  # it is here all the same
    made, _ = begun(A, offset=None)  # nothing was ever applied
    assert made.not_passed({A: 6}) == [A]
    made.begin_at({A: 6})
    assert made.not_passed({A: 6}) == []


def test_failure_of_a_thread_ends_all() -> None:
    made, _ = begun(A)
    made.began(1)
    made.ended(ZeroDivisionError("of a thread"))
    assert made.take() is None
    assert made.stop(0.0)
    with pytest.raises(ZeroDivisionError):
        made.refuse_failed()
