"""What transactions acknowledge of a partition: in order, counted when the outcome is known, never before."""

from __future__ import annotations

import pytest

from tests.unit.client.consumer.pending_acks_fixture import SLOT, PendingAcksFixture, consumed, message
from txmq.client.consumer.consumed_partition import ConsumedPartition, PendingAck, Waiting
from txmq.errors import ConnectionLostError, FencedError, RolledBackError, TransactionStateError
from txmq.model import Outcome
from txmq.protocol.group_rows import OffsetRow
from txmq.xid import TxId

ONE, OTHER = object(), object()


def pending_ack(made: ConsumedPartition, offset: int, owner: object = ONE) -> None:
    """As ``Claims`` does once nothing speaks against it."""
    made.pending_acks[offset] = PendingAck(owner, message(offset))


def test_the_lowest_message_that_is_left_out_is_named() -> None:
    made = consumed()
    assert made.lowest_before(10, ONE) is None
    assert made.lowest_before(12, ONE) == 10
    pending_ack(made, 10)
    assert made.lowest_before(11, ONE) is None
    assert made.lowest_before(12, ONE) == 11
    assert made.lowest_before(11, OTHER) == 10
    made.ack(11)
    assert made.lowest_before(12, ONE) is None


def test_a_claimed_message_is_nobody_elses_to_acknowledge() -> None:
    made = consumed()
    pending_ack(made, 10)
    made.ack(10)
    made.ack(11)
    assert made.position == 10
    assert made.under_way == 4
    del made.pending_acks[10]
    made.ack(10)
    assert made.position == 12


@pytest.mark.parametrize("acked", [(), (12,), (12, 13, 14)])
def test_offset_that_transaction_saves_is_what_position_will_be(acked: tuple[int, ...]) -> None:
    made = consumed()
    for offset in (10, 11):
        pending_ack(made, offset)
    for offset in acked:
        made.ack(offset)
    assert made.position_with(OTHER) == made.position == 10
    expected = 12 + len(acked)
    assert made.position_with(ONE) == expected
    made.pending_acks.clear()
    for offset in (10, 11):
        made.ack(offset)
    assert made.position == expected


def test_partition_in_doubt_delivers_nothing() -> None:
    made = consumed(3)
    made.deferred[7] = Waiting(message(7), 1, None)
    made.retry(message(11), 0.0)
    made.is_in_doubt = True
    assert (made.take(10, 1.0), made.wants_more(1.0, 1 << 20)) == ([], False)
    made.is_in_doubt = False
    assert [found.offset for found in made.take(10, 1.0)] == [11, 7]


def test_a_seek_forgets_claims_and_doubts() -> None:
    made = consumed()
    pending_ack(made, 10)
    made.is_in_doubt = True
    made.seek(3)
    assert (made.pending_acks, made.is_in_doubt, made.position) == ({}, False, 3)


# --- with a consumer's share -----------------------------------------------------------------------------------------


def test_partition_saves_nothing_else_from_sending_until_the_outcome() -> None:
    world = PendingAcksFixture()
    world.consumed.ack(0)
    world.pending_ack(1, 2)
    assert world.to_save() == [1]
    assert world.look() == [OffsetRow("orders", 0, 1, 3, None)]
    assert world.to_save() == []
    world.pending_acks.end([world.consumed], world.owner, Outcome.COMMITTED, [OffsetRow("orders", 0, 1, 3, None)])
    assert (world.consumed.position, world.consumed.saved, world.to_save()) == (3, 3, [])
    world.consumed.ack(3)
    assert world.to_save() == [4]


def test_what_was_rolled_back_is_in_the_applications_hands_again() -> None:
    world = PendingAcksFixture()
    world.pending_ack(0)
    world.look()
    with pytest.raises(RolledBackError, match="not known yet"):
        world.pending_acks.pending_ack(message(1), object())
    world.pending_acks.end([world.consumed], world.owner, Outcome.ROLLED_BACK)
    assert (world.consumed.position, world.consumed.retries, world.consumed.is_under_way(0)) == (0, [], True)
    world.pending_ack(0)


def test_loss_of_the_partition_after_ack_aborts_the_transaction() -> None:
    world = PendingAcksFixture()
    world.pending_ack(0)
    world.share.partitions[SLOT] = consumed(first=0)
    with pytest.raises(RolledBackError, match="any more"):
        world.look()
    world.share.lost(SLOT)
    with pytest.raises(RolledBackError, match="any more"):
        world.pending_ack(0)


def test_seek_after_ack_aborts_the_transaction() -> None:
    world = PendingAcksFixture()
    world.pending_ack(0)
    world.consumed.seek(3)
    with pytest.raises(RolledBackError):
        world.look()


TXID = str(TxId(1, 2, 3, 4))


@pytest.mark.parametrize("answer", [b"committed\n", b"rolled-back\n"])
def test_doubt_is_asked_about_with_fence_until_it_is_settled(answer: bytes) -> None:
    world = PendingAcksFixture(ConnectionLostError("away"), b"prepared\n", answer)
    world.pending_ack(0, 1)
    rows = world.look()
    assert world.pending_acks.rejected(message(0))  # not the application's to say
    world.pending_acks.doubt([world.consumed], world.owner, TXID, rows)
    world.settled()
    assert world.client.control.asked == [(f"outcome {TXID}", {"fence": None})] * 3
    if answer.startswith(b"committed"):
        assert (world.consumed.position, world.consumed.saved, world.consumed.retries) == (2, 2, [])
    else:
        assert world.consumed.position == 0
        assert [found.offset for found in world.consumed.take(5, 1e9)] == [0, 1]


def test_where_outcome_is_not_kept_partition_is_loaded_anew() -> None:
    world = PendingAcksFixture(FencedError("no longer kept"))
    world.pending_ack(0)
    world.pending_acks.doubt([world.consumed], world.owner, TXID, world.look())
    world.settled()
    assert world.share.partitions == {}


# --- failures ---------------------------------------------------------------------------------------------------------


def test_message_refused_for_an_earlier_one_has_not_failed() -> None:
    world = PendingAcksFixture()
    for _ in range(20):
        with pytest.raises(TransactionStateError, match="message 0 before it"):
            world.pending_ack(1)
        world.reject(1)  # before the other one, too: it comes after it all the same
        if world.consumed.is_under_way(0):
            world.reject(0)
        assert world.deliver_again() in ([0, 1], [1])
        if world.dead_lettered:
            break
    assert world.dead_lettered == [0]
    assert (world.consumed.attempts, world.consumed.out_of_turn) == ({}, set())
    world.pending_ack(1)
    world.pending_acks.end([world.consumed], world.owner, Outcome.ROLLED_BACK)
    world.reject(1)
    assert world.consumed.attempts == {1: 1}  # which it did by itself


def test_refusal_that_a_later_ack_makes_good_excuses_nothing() -> None:
    world = PendingAcksFixture()
    with pytest.raises(TransactionStateError):
        world.pending_ack(1)
    world.pending_ack(0, 1)
    world.pending_acks.end([world.consumed], world.owner, Outcome.ROLLED_BACK)
    world.reject(0, 1)
    assert world.consumed.attempts == {0: 1, 1: 1}


def test_message_behind_an_unknown_outcome_has_not_failed() -> None:
    world = PendingAcksFixture()
    world.pending_ack(0)
    world.look()
    with pytest.raises(RolledBackError, match="not known yet"):
        world.pending_ack(1)
    world.reject(1)
    assert (world.consumed.attempts, world.deliver_again()) == ({}, [1])
