"""One partition of a consumer: delivery in order, acks in any order, retries, seeks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.growth import growth
from tests.interrupts import Strike
from txmq.client.consumer import consumed_partition
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.log import records
from txmq.log.batch import HEADER
from txmq.model import Message


def message(offset: int) -> Message:
    """A message with nothing in it."""
    return Message("t", 0, offset, None, b"v", {}, None, 0, None)


def raw_batch(offset: int, *, count: int = 1) -> records.RawBatch:
    """A batch of messages with nothing in them; with another ``count`` it lies about their number."""
    made = records.encode([(None, b"v", (), 0)])
    fields = list(HEADER.unpack_from(made))
    fields[0], fields[6], fields[12] = offset, count - 1, count
    HEADER.pack_into(made, 0, *fields)
    return records.RawBatch(offset, count, 0, 0, memoryview(made))


def consumed(count: int, start: int = 0) -> ConsumedPartition:
    """With ``count`` messages in the buffer."""
    made = ConsumedPartition(("t", 0), 1, start, None)
    made.fetch = 1
    assert made.fetched(1, [message(start + number) for number in range(count)])
    return made


def test_messages_are_delivered_in_order_and_each_once() -> None:
    made = consumed(5)
    taken = [taken.offset for _ in range(4) for taken in made.take(2, 0.0)]
    assert taken == [0, 1, 2, 3, 4]
    assert made.ahead.size_bytes == 0


@given(st.permutations(range(8)), st.integers(0, 8))
def test_the_position_never_passes_what_is_not_acknowledged(order: list[int], count: int) -> None:
    made = consumed(8)
    made.take(8, 0.0)
    acked: set[int] = set()
    for offset in order[:count]:
        made.ack(offset)
        acked.add(offset)
        assert made.position == min(set(range(9)) - acked)
    assert made.under_way == 8 - count


def test_cost_of_an_ack_does_not_grow_with_messages() -> None:
    def acks(count: int) -> Callable[[], object]:
        made = consumed(count)
        made.take(count, 0.0)

        def ack_all() -> None:
            for offset in range(count):
                made.ack(offset)

        return ack_all

    assert growth(acks, 1_000, 20_000) < 5


def test_what_was_not_delivered_cannot_be_acknowledged() -> None:
    made = consumed(3)
    made.take(1, 0.0)
    made.ack(2)
    made.ack(0)
    made.ack(0)
    assert made.position == 1


def test_failed_message_comes_again_in_time_and_holds_the_position() -> None:
    made = consumed(3)
    first, second = made.take(2, 0.0)
    assert made.count_failure(first) == 1
    made.retry(first, again_at=5.0)
    made.ack(second.offset)
    assert [taken.offset for taken in made.take(9, 4.9)] == [2]
    assert made.position == 0
    assert made.take(9, 5.0) == [first]
    assert made.count_failure(first) == 2
    made.retry(first, again_at=6.0)
    assert made.take(9, 6.0) == [first]
    made.ack(0)
    assert made.position == 2


def test_retry_of_a_silent_partition_wakes_nobody() -> None:
    made = consumed(2)
    (first,) = made.take(1, 0.0)
    made.retry(first, again_at=5.0)
    assert made.next_due() == 5.0
    for name, on, off in (("is_paused", True, False), ("revoked_until", 1.0, None), ("is_busy", True, False)):
        setattr(made, name, on)
        assert made.next_due() is None  # or whoever waits would spin until the listener is done
        setattr(made, name, off)


def test_what_is_paused_or_revoked_delivers_nothing_and_fetches_nothing() -> None:
    for name in ("is_paused", "revoked_until"):
        made = consumed(3)
        setattr(made, name, True)
        assert made.take(9, 0.0) == []
        assert not made.wants_more(0.0, 1 << 20)


def test_full_buffer_fetch_under_way_and_error_hold_fetching_up() -> None:
    made = consumed(3)
    assert made.wants_more(0.0, 1 << 20)
    assert not made.wants_more(0.0, 10)
    made.fetch = 2
    assert not made.wants_more(0.0, 1 << 20)
    assert made.failed(2, again_at=1.0)
    assert not made.wants_more(0.9, 1 << 20)
    assert made.wants_more(1.0, 1 << 20)


def test_batch_that_cannot_be_opened_is_fetched_again() -> None:
    """Its records contradict its header: nothing of it is delivered, and the fetch that has it first reports it."""
    made = consumed(1)
    made.fetch = 1
    assert made.fetched(1, [], [raw_batch(1), raw_batch(2, count=5), raw_batch(7)])
    made.fetch = 2
    assert made.next_fetch == 8
    assert [taken.offset for taken in made.take(9, 0.0)] == [0, 1]
    assert made.take(9, 0.0) == []
    assert (made.next_fetch, made.fetch, made.ahead.size_bytes) == (2, 0, 0)
    assert not made.fetched(2, [message(8)])  # sent before that was known
    assert made.wants_more(0.0, 1 << 20)
    made.fetch = 3
    assert made.fetched(3, [message(2)])
    assert [taken.offset for taken in made.take(9, 0.0)] == [2]


def test_quick_way_leaves_the_last_message_to_the_other() -> None:
    made = consumed(4)
    assert made.take_opened() is None  # nothing is opened yet
    assert [taken.offset for taken in made.take(1, 0.0)] == [0]
    second = made.take_opened()
    assert second is not None
    assert second.offset == 1
    for name, on, off in (("is_paused", True, False), ("revoked_until", 1.0, None), ("is_ready", False, True)):
        setattr(made, name, on)
        assert made.take_opened() is None
        setattr(made, name, off)
    assert made.take_opened() is not None
    assert made.take_opened() is None
    assert [taken.offset for taken in made.take(9, 0.0)] == [3]
    for offset in (1, 0, 2, 3):
        made.ack(offset)
    assert (made.position, made.under_way) == (4, 0)


def test_seek_forgets_messages_under_way_and_ignores_older_replies() -> None:
    made = consumed(3)
    made.take(2, 0.0)
    made.fetch = 7
    made.seek(100)
    assert not made.fetched(7, [message(3)])
    made.ack(0)
    assert (made.position, made.next_fetch, made.take(9, 0.0)) == (100, 100, [])


def test_a_batch_that_begins_before_the_offset_is_cut() -> None:
    made = ConsumedPartition(("t", 0), 1, 2, None)
    made.fetch = 1
    made.fetched(1, [message(number) for number in range(4)])
    assert [taken.offset for taken in made.take(9, 0.0)] == [2, 3]


def test_what_was_fetched_before_retention_took_it_is_still_delivered() -> None:
    mine = consumed(4)
    (first,) = mine.take(1, 0.0)
    mine.skip_to(10)
    assert [m.offset for m in mine.take(9, 0.0)] == [1, 2, 3]
    mine.ack(first.offset)
    for offset in (1, 2, 3):
        mine.ack(offset)
    assert (mine.position, mine.next_fetch) == (4, 10)
    mine.fetch = 1
    assert mine.fetched(1, [message(10)])
    mine.ack(mine.take(1, 0.0)[0].offset)
    assert mine.position == 11


def test_nothing_in_hand_and_everything_below_gone_moves_the_position() -> None:
    mine = consumed(0)
    mine.skip_to(10)
    assert (mine.position, mine.next_fetch) == (10, 10)


@pytest.mark.parametrize("keeps_key_order", [False, True])
def test_an_interrupt_anywhere_loses_no_message(keeps_key_order: bool) -> None:
    """Found: the first message was gone, and the position passed it."""
    number, is_struck = 0, True
    while is_struck:
        number += 1
        made, strike, taken = consumed(1), Strike(number, consumed_partition, consumed_partition), list[Message]()
        made.fetch, made.keeps_key_order = 1, keeps_key_order
        assert made.fetched(1, [message(1)], [raw_batch(2)])
        sys.setprofile(strike)
        with suppress(KeyboardInterrupt):
            taken = made.take(3, 0.0)
        sys.setprofile(None)
        is_struck = strike.left <= 0
        taken += made.take(3, 0.0)
        for one in taken:
            made.ack(one.offset)
        lost = {0, 1, 2} - {one.offset for one in taken}
        assert made.position == min(lost, default=3), f"struck at {number}"
        assert (made.ahead.size_bytes, made.under_way) == (0, len(lost))
    assert number > 20
