"""What transactions of the application's own database acknowledge: counted when it is seen committed, and once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.client.consumer.pending_acks_fixture import SLOT, deferred, in_database, message
from txmq.client.consumer.consumed_partition import Waiting
from txmq.client.consumer.offsets.offset_store import StoredOffset
from txmq.errors import FencedError, RolledBackError, StorageError, TransactionStateError


def test_offset_is_saved_in_the_transaction_behind_running_saves() -> None:
    world, _ = in_database()
    world.consumed.ack(0)
    assert world.to_save() == [1]
    world.pending_acks.pending_ack_in(message(1), None)
    world.pending_acks.pending_ack_in(message(2), None)
    assert world.calls == ["waited", "saved 2 above None", "waited", "saved 3 above 1"]
    assert world.to_save() == []  # it would take back what the transaction saves


def test_ack_counts_once_committed_and_a_reject_looks_first() -> None:
    world, database = in_database()
    for offset in (0, 1):
        world.pending_acks.pending_ack_in(message(offset), None)
    world.pending_acks.resolve()
    assert world.consumed.position == 0
    database.committed = StoredOffset(1)
    world.pending_acks.resolve()
    assert (world.consumed.position, sorted(world.consumed.pending_acks)) == (1, [1])
    assert not world.pending_acks.rejected(message(1))  # rolled back: the application says so
    world.pending_acks.pending_ack_in(message(1), None)
    database.committed = StoredOffset(2)
    assert world.pending_acks.rejected(message(1))  # it was committed all the same
    assert (world.consumed.position, world.consumed.saved) == (2, 2)


def test_what_is_refused_is_doomed_and_not_claimed() -> None:
    world, database = in_database()
    with pytest.raises(TransactionStateError, match="message 0 before it"):
        world.pending_acks.pending_ack_in(message(1), None)
    database.refusal = FencedError("somebody else's")
    with pytest.raises(FencedError):
        world.pending_acks.pending_ack_in(message(0), None)
    assert world.calls == ["doomed", "waited", "saved 1 above None", "doomed"]
    assert world.consumed.pending_acks == {}
    world.share.lost(SLOT)
    with pytest.raises(FencedError):
        world.pending_acks.pending_ack_in(message(0), None)
    assert world.calls[-1] == "doomed"


@pytest.mark.parametrize("error", [StorageError("away"), ZeroDivisionError()], ids=repr)
def test_absent_store_is_asked_later_and_ends_no_thread(error: Exception) -> None:
    world, database = in_database()
    world.pending_acks.pending_ack_in(message(0), None)
    database.away = error
    world.pending_acks.resolve()
    assert (world.consumed.position, world.pending_acks.rejected(message(0))) == (0, False)  # it is delivered again
    assert not world.pending_acks.may_give_up(message(0))
    world.pending_acks.resolve()
    assert world.consumed.in_doubt == {0}
    database.away, database.committed = None, StoredOffset(1)
    world.pending_acks.resolve()
    assert (world.consumed.position, world.consumed.in_doubt) == (1, set())


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("is_deferred", [True, False])
def test_unanswered_commit_blocks_saves_and_dead_letters_until_it_ends(is_committed: bool, is_deferred: bool) -> None:
    """Else the plain save waits for the row, runs after the COMMIT, and takes back what that has saved."""
    world, database = in_database()
    text, offset = deferred(world, -1) if is_deferred else None, -1 if is_deferred else 0
    database.committed, database.is_under_way = StoredOffset(0, text), True
    world.consumed.deferred[-2] = Waiting(message(-2), 1, None)  # of which there is something to save
    world.pending_acks.pending_ack_in(message(offset), None)
    assert not world.pending_acks.rejected(message(offset))
    for _ in range(2):
        assert not world.pending_acks.may_give_up(message(offset))
        world.pending_acks.resolve()
        assert world.to_save() == []
    database.is_under_way = False
    if is_committed:
        database.committed = StoredOffset(0, None) if is_deferred else StoredOffset(1, None)
    assert world.pending_acks.may_give_up(message(offset)) is not is_committed
    assert world.to_save() == [0 if is_deferred or not is_committed else 1]
    assert (offset in world.consumed.deferred, world.consumed.is_under_way(0)) == (
        is_deferred and not is_committed, is_deferred or not is_committed
    )  # fmt: skip


def test_what_comes_back_during_look_is_not_settled_by_it() -> None:
    world, database = in_database()
    world.pending_acks.pending_ack_in(message(0), None)
    assert not world.pending_acks.rejected(message(0))
    settled = database.settled

    def meanwhile(group: str, slot: tuple[str, int], connection: Any = None) -> StoredOffset | None:
        found = settled(group, slot, connection)
        world.consumed.in_doubt.add(1)
        return found

    database.settled = meanwhile  # type: ignore[method-assign]
    world.pending_acks.resolve()
    assert world.consumed.in_doubt == {1}


def test_next_transaction_of_a_message_learns_the_former_outcome() -> None:
    world, database = in_database()
    world.pending_acks.pending_ack_in(message(0), None)
    assert not world.pending_acks.rejected(message(0))
    database.is_under_way = True
    world.pending_acks.pending_ack_in(message(0), None)
    assert world.consumed.in_doubt == set()


@pytest.mark.parametrize("is_deferred", [True, False])
def test_second_ack_in_a_transaction_changes_nothing(is_deferred: bool) -> None:
    world, database = in_database()
    text, offset = deferred(world, -1) if is_deferred else None, -1 if is_deferred else 0
    database.committed = StoredOffset(0, text)
    connection = object()
    world.pending_acks.pending_ack_in(message(offset), connection)
    calls = len(world.calls)
    database.inside = StoredOffset(0 if is_deferred else 1, None)
    world.pending_acks.pending_ack_in(message(offset), connection)
    assert (len(world.calls), list(world.consumed.pending_acks)) == (calls, [offset])
    database.inside = database.committed  # that one was rolled back: this is another transaction
    world.pending_acks.pending_ack_in(message(offset), connection)
    assert world.calls[calls:] == ["waited", f"saved {max(offset + 1, 0)} above None"]
    database.committed = database.inside = StoredOffset(0 if is_deferred else 1, None)  # it was committed
    database.refusal = TransactionStateError("of an earlier one")
    with pytest.raises(TransactionStateError):
        world.pending_acks.pending_ack_in(message(offset), connection)
    assert world.calls[-1] == "doomed"


def test_save_behind_a_deferred_message_must_match_its_transaction() -> None:
    """Else that one is rolled back, and this one's text does not name the message: it is in nobody's."""
    world, database = in_database()
    world.consumed.deferred[-1] = waiting = Waiting(message(-1), 1, None)
    waiting.is_out = True
    world.pending_acks.pending_ack_in(message(-1), None)
    assert database.beside is None
    world.pending_acks.pending_ack_in(message(0), None)
    assert database.beside == StoredOffset(0, None)
    world.pending_acks.pending_ack_in(message(1), None)
    assert database.beside == StoredOffset(1, None)
    database.committed = StoredOffset(2, None)
    world.pending_acks.resolve()
    world.pending_acks.pending_ack_in(message(2), None)
    assert database.beside is None


def test_the_highest_below_counts_in_whatever_order_they_were_claimed() -> None:
    world, _ = in_database()
    for offset in (0, 1):
        world.pending_acks.pending_ack_in(message(offset), None)
    assert not world.pending_acks.rejected(message(0))
    world.pending_acks.pending_ack_in(message(0), None)
    world.pending_acks.pending_ack_in(message(2), None)
    assert world.calls[-1] == "saved 3 above 1"


def test_save_above_an_acknowledged_message_needs_a_seek_back() -> None:
    world, database = in_database()
    world.pending_acks.pending_ack_in(message(0), None)
    assert database.most == 0
    world.consumed.pending_acks.clear()
    world.consumed.saved = 4
    world.pending_acks.pending_ack_in(message(0), None)
    assert database.most == 4


def test_deferred_message_does_not_fail_for_a_recent_commit() -> None:
    world, database = in_database()
    text = deferred(world, -1)
    world.pending_acks.pending_ack_in(message(0), None)
    database.committed = StoredOffset(0, text)
    with pytest.raises(RolledBackError, match="commit first"):
        world.pending_acks.pending_ack_in(message(-1), None)
    database.committed = StoredOffset(1, text)
    world.pending_acks.pending_ack_in(message(-1), None)
    assert (database.beside, list(world.consumed.pending_acks)) == (StoredOffset(1, text), [-1])
    world.pending_acks.pending_ack_in(message(-1), None)  # rolled back: the block runs again
    assert world.calls.count("doomed") == 1


def test_deferred_message_is_not_acknowledged_twice_after_a_failed_commit() -> None:
    world, database = in_database()
    text = deferred(world, -1)
    database.committed = StoredOffset(0, text)
    world.pending_acks.pending_ack_in(message(-1), None)
    assert not world.pending_acks.rejected(message(-1))  # not committed, as far as can be seen
    database.committed = StoredOffset(0, None)
    with pytest.raises(TransactionStateError, match="committed after all"):
        world.pending_acks.pending_ack_in(message(-1), None)
    assert (world.calls[-1], world.consumed.pending_acks) == ("doomed", {})
    assert world.consumed.deferred == {}  # it is dealt with


def test_message_that_no_save_has_passed_is_not_committed() -> None:
    """What waited for another of its key is delivered before anybody saved that it is deferred."""
    world, database = in_database()
    world.consumed.deferred[0] = waiting = Waiting(message(0), 0, None)
    world.consumed.ack(0)
    waiting.is_out = True
    database.committed = StoredOffset(0)
    world.pending_acks.pending_ack_in(message(0), None)
    world.pending_acks.resolve()
    assert not world.pending_acks.rejected(message(0))
    assert (list(world.consumed.deferred), world.to_save()) == ([0], [])
    world.pending_acks.resolve()
    assert (list(world.consumed.deferred), world.to_save()) == ([0], [1])


def test_refusal_caused_by_an_effective_failed_commit_counts_as_done() -> None:
    world, database = in_database()
    world.pending_acks.pending_ack_in(message(0), None)
    assert not world.pending_acks.rejected(message(0))
    database.committed, database.refusal = StoredOffset(1), TransactionStateError("1 is saved there")
    with pytest.raises(TransactionStateError):
        world.pending_acks.pending_ack_in(message(0), None)
    assert (world.consumed.position, world.consumed.pending_acks) == (1, {})


def test_message_refused_beside_a_rolled_back_one_has_not_failed() -> None:
    world, database = in_database()
    world.pending_acks.pending_ack_in(message(0), None)
    database.refusal = TransactionStateError("nothing is saved there")  # the transaction of message 0 was rolled back
    with pytest.raises(TransactionStateError):
        world.pending_acks.pending_ack_in(message(1), None)
    world.reject(0, 1)
    assert (world.consumed.attempts, world.deliver_again()) == ({0: 1}, [0, 1])
    database.refusal = None
    for offset in (0, 1):
        world.pending_acks.pending_ack_in(message(offset), None)
    world.reject(1)  # rolled back
    assert world.consumed.attempts == {0: 1, 1: 1}


def test_deferred_message_refused_beside_an_earlier_one_has_not_failed() -> None:
    world, database = in_database()
    text = deferred(world, -1)
    world.pending_acks.pending_ack_in(message(0), None)
    database.committed = StoredOffset(0, text)
    with pytest.raises(RolledBackError, match="commit first"):
        world.pending_acks.pending_ack_in(message(-1), None)
    world.reject(-1)
    assert world.consumed.deferred[-1].failures == 1
    assert world.deliver_again() == [-1]


def test_failures_while_the_database_is_away_do_not_count() -> None:
    world, database = in_database()
    text = deferred(world, -1)
    database.away = ConnectionError("refused")
    for _ in range(20):
        world.reject(-1, 0)
        assert sorted(world.deliver_again()) == [-1, 0]
    assert (world.consumed.attempts, world.consumed.deferred[-1].failures, world.dead_lettered) == ({}, 1, [])
    database.away, database.committed = None, StoredOffset(0, text)
    world.reject(0)
    assert world.consumed.attempts == {0: 1}
