"""``keep_key_order``: whatever fails, is deferred or changes hands, a key's messages are dealt with in order."""

from __future__ import annotations

from random import Random

import pytest

from txmq.client.consumer.consumed_partition import DEFERRED_MESSAGES_MAX, NO_ROOM, ConsumedPartition, Waiting, key_crc
from txmq.client.consumer.retry.deferred import deferred_text, parsed
from txmq.model import Message

SLOT = ("t", 0)


def message(offset: int, key: bytes | None) -> Message:
    """A message with nothing in it."""
    return Message("t", 0, offset, key, b"v", {}, None, 0, None)


def fetch(member: ConsumedPartition, log: list[Message], count: int) -> None:
    """So many more messages come from the broker."""
    member.fetch = 1
    member.fetched(1, log[member.next_fetch : member.next_fetch + count])


def consumed(log: list[Message], offset: int = 0, deferred: str | None = None) -> ConsumedPartition:
    """Of a member that has just got the partition."""
    made = ConsumedPartition(SLOT, 1, offset, offset)
    made.keeps_key_order = True
    made.deferred = parsed(deferred)
    for at, waiting in made.deferred.items():
        waiting.message = log[at]
    return made


class FailingMember:
    """A member of the group after another, and an application that fails at random."""

    def __init__(self, random: Random, log: list[Message]) -> None:
        self.random, self.log, self.member = random, log, consumed(log)
        self.done: set[int] = set()
        self.in_hand: list[Message] = []
        self.saved: tuple[int, str | None] = (0, None)

    def delivered(self, messages: list[Message]) -> None:
        """The promise: everything earlier of the key is dealt with, and nothing of it is in hand."""
        for found in messages:
            if found.key is not None:
                earlier = {other.offset for other in self.log[: found.offset] if other.key == found.key}
                assert earlier <= self.done
                assert found.key not in [other.key for other in self.in_hand]
            self.in_hand.append(found)

    def step(self) -> None:
        """Something happens."""
        what = self.random.randrange(8)
        if what == 0:
            self.delivered(self.member.take(self.random.randrange(1, 5), 0.0))
        elif what == 1 and self.member.blocked:
            self.member.defer_blocked([(found, None) for found in self.member.blocked.values()])
        elif what in (2, 3, 4) and self.in_hand:
            self.deal_with(self.in_hand.pop(self.random.randrange(len(self.in_hand))), is_good=what == 2)
        elif what == 7:
            fetch(self.member, self.log, 1)
        elif what == 5:
            self.saved = self.member.position, deferred_text(self.member)
        elif what == 6 and self.random.random() < 0.2:  # it dies: what was not saved comes again
            self.in_hand, self.member = [], consumed(self.log, *self.saved)

    def deal_with(self, found: Message, *, is_good: bool) -> None:
        """It works, or fails: then it is retried in place, deferred, retried from there, or dead-lettered."""
        waiting = self.member.deferred_in_hand(found.offset)
        if is_good or self.random.random() < 0.1:
            self.done.add(found.offset)
            self.member.ack(found.offset)
            self.member.forget_deferred(found.offset)
        elif waiting is not None:
            waiting.is_out = False
        elif self.random.random() < 0.5:
            self.member.retry(found, 0.0)
        else:
            self.member.defer(found, Waiting(found, 1, key_crc(found)))


@pytest.mark.parametrize("seed", range(200))
def test_message_waits_for_earlier_ones_of_its_key(seed: int) -> None:
    random = Random(seed)
    keys = random.choices([b"a", b"b", None], k=20)
    world = FailingMember(random, [message(offset, key) for offset, key in enumerate(keys)])
    for _ in range(300):
        world.step()
    while world.member.position < len(keys) or world.member.deferred:  # and in the end nothing is left
        fetch(world.member, world.log, 9)
        world.delivered(world.member.take(9, 0.0))
        world.member.defer_blocked([(found, None) for found in world.member.blocked.values()])
        while world.in_hand:
            world.deal_with(world.in_hand.pop(), is_good=True)
    assert world.done == set(range(len(keys)))
    assert (world.member.position, deferred_text(world.member)) == (len(keys), None)


def test_partition_passes_a_deferred_message_and_queues_its_key() -> None:
    log = [message(offset, key) for offset, key in enumerate([b"a", b"a", b"b", None, b"a"])]
    member = consumed(log)
    fetch(member, log, len(log))
    (first,) = member.take(9, 0.0)  # the next one is of the same key: not while the first is in hand
    member.defer(first, Waiting(first, 1, key_crc(first), due_at=5.0))
    assert [found.offset for found in member.take(9, 0.0)] == [2, 3]
    assert sorted(member.blocked) == [1, 4]
    assert member.position == 1
    member.defer_blocked([(found, 7) for found in member.blocked.values()])
    member.ack(2)
    member.ack(3)
    crc = key_crc(first)
    assert (member.position, deferred_text(member)) == (5, f"[[0,1,{crc}],[1,0,{crc},7],[4,0,{crc},7]]")
    assert member.next_due() == 5.0  # the later ones are due, and not deliverable
    for offset in (0, 1, 4):
        assert [found.offset for found in member.take(9, 5.0)] == [offset]
        member.forget_deferred(offset)


def test_partition_with_excess_waiting_messages_stops_and_resumes_itself() -> None:
    log = [message(offset, b"a") for offset in range(DEFERRED_MESSAGES_MAX + 5)] + [
        message(DEFERRED_MESSAGES_MAX + 5, None)
    ]
    member = consumed(log)
    fetch(member, log, len(log))
    (first,) = member.take(1, 0.0)
    member.defer(first, Waiting(first, 1, key_crc(first), due_at=9.0))
    assert member.take(9, 0.0) == []
    member.defer_blocked([(found, None) for found in member.blocked.values()])
    assert member.take(9, 0.0) == []
    assert (len(member.deferred), member.stopped, member.position) == (
        DEFERRED_MESSAGES_MAX,
        NO_ROOM,
        DEFERRED_MESSAGES_MAX,
    )
    dealt: list[int] = []
    while len(dealt) < len(log):
        for found in member.take(9, 9.0):
            dealt.append(found.offset)
            member.ack(found.offset)
            member.forget_deferred(found.offset)
        member.defer_blocked([(found, None) for found in member.blocked.values()])
    assert [offset for offset in dealt if log[offset].key] == list(range(DEFERRED_MESSAGES_MAX + 5))
    assert (member.stopped, member.position) == (None, len(log))


def test_without_the_option_nothing_waits_for_a_key() -> None:
    log = [message(offset, b"a") for offset in range(3)]
    member = consumed(log)
    fetch(member, log, len(log))
    member.keeps_key_order = False
    (first,) = member.take(1, 0.0)
    member.defer(first, Waiting(first, 1, key_crc(first), due_at=9.0))
    assert [found.offset for found in member.take(9, 0.0)] == [1, 2]
