"""What transactions acknowledge of a partition: in order, counted when the outcome is known, never before."""

from __future__ import annotations

import pytest

from txmq.client.tracker import Claim, Tracker, Waiting
from txmq.model import Message

SLOT = ("orders", 0)
ONE, OTHER = object(), object()


def message(offset: int) -> Message:
    """A message at an offset."""
    return Message("orders", 0, offset, b"k", b"v", {}, None, 0, None)


def tracker(count: int = 5, first: int = 10) -> Tracker:
    """So many messages delivered."""
    made = Tracker(SLOT, 1, first, first)
    made.fetch = 1
    made.fetched(1, [message(first + number) for number in range(count)])
    assert len(made.take(count, 0.0)) == count
    return made


def claim(made: Tracker, offset: int, owner: object = ONE) -> None:
    """As ``Claims`` does once nothing speaks against it."""
    made.claims[offset] = Claim(owner, message(offset))


def test_the_lowest_message_that_is_left_out_is_named() -> None:
    made = tracker()
    assert made.lowest_before(10, ONE) is None
    assert made.lowest_before(12, ONE) == 10
    claim(made, 10)
    assert made.lowest_before(11, ONE) is None
    assert made.lowest_before(12, ONE) == 11
    assert made.lowest_before(11, OTHER) == 10
    made.ack(11)
    assert made.lowest_before(12, ONE) is None


def test_a_claimed_message_is_nobody_elses_to_acknowledge() -> None:
    made = tracker()
    claim(made, 10)
    made.ack(10)
    made.ack(11)
    assert made.position == 10
    assert made.under_way == 4
    del made.claims[10]
    made.ack(10)
    assert made.position == 12


@pytest.mark.parametrize("acked", [(), (12,), (12, 13, 14)])
def test_the_offset_that_a_transaction_saves_is_what_the_position_will_be(acked: tuple[int, ...]) -> None:
    made = tracker()
    for offset in (10, 11):
        claim(made, offset)
    for offset in acked:
        made.ack(offset)
    assert made.position_with(OTHER) == made.position == 10
    expected = 12 + len(acked)
    assert made.position_with(ONE) == expected
    made.claims.clear()
    for offset in (10, 11):
        made.ack(offset)
    assert made.position == expected


def test_in_doubt_nothing_is_delivered_neither_new_nor_aside_nor_again() -> None:
    made = tracker(3)
    made.aside[7] = Waiting(message(7), 1, None)
    made.retry(message(11), 0.0)
    made.is_in_doubt = True
    assert (made.take(10, 1.0), made.wants_more(1.0, 1 << 20)) == ([], False)
    made.is_in_doubt = False
    assert [found.offset for found in made.take(10, 1.0)] == [11, 7]


def test_a_seek_forgets_claims_and_doubts() -> None:
    made = tracker()
    claim(made, 10)
    made.is_in_doubt = True
    made.seek(3)
    assert (made.claims, made.is_in_doubt, made.position) == ({}, False, 3)
