"""Batches that leave a core: to another partition if they were never sent, to another home if they were refused."""

from __future__ import annotations

from txmq.client.producer.core import Batch, ProducerCore, ProducerLimits
from txmq.errors import DeliveryUnknownError, NotOwnerError, RequestTimeoutError, TxmqError

NOT_OWNER = NotOwnerError("leader=host:9 home=2 owns it")


def core(**limits: float) -> ProducerCore:
    made = ProducerCore(ProducerLimits(**limits))  # type: ignore[arg-type]
    made.connected(1, 0, 8)
    return made


def add(to: ProducerCore, value: bytes, *, is_movable: bool = False, now: float = 0.0) -> Batch:
    to.separate("t", 0, is_movable=is_movable)
    batch, _ = to.append("t", 0, (None, value, (), 1), now, now + 10)
    batch.is_movable = is_movable
    return batch


def errors(of: ProducerCore) -> list[type[TxmqError]]:
    return [type(batch.error) for batch in of.take_finished() if batch.error is not None]


def test_messages_that_may_move_share_no_batch_with_others() -> None:
    lingering = core(linger_s=5.0)
    batches = [add(lingering, b"v", is_movable=is_movable) for is_movable in (True, True, False, False, True)]
    assert [batches.index(batch) for batch in batches] == [0, 0, 2, 2, 4]
    assert lingering.movable() == [batches[0], batches[4]]


def test_a_batch_that_was_given_out_is_not_movable() -> None:
    first = core()
    batch = add(first, b"v", is_movable=True)
    assert first.movable() == [batch]
    assert first.poll(0.0) == [batch]
    first.disconnected()
    assert first.movable() == []


def test_a_moved_batch_takes_the_next_sequence_where_it_is() -> None:
    first, second = core(), core()
    size = add(second, b"there").size_bytes
    second.poll(0.0)
    batch = add(first, b"there", is_movable=True)
    first.withdraw([batch])
    second.adopt("t", 0, [batch])
    assert (first.buffered_bytes, first.unfinished, first.unfinished_batches()) == (0, 0, [])
    assert (second.buffered_bytes, second.unfinished) == (2 * size, 2)
    assert second.poll(0.0) == [batch]
    assert batch.sequence == 1
    second.answered(batch, 7)
    assert batch.base_offset == 7


def test_a_moved_batch_ends_at_its_own_deadline() -> None:
    first, second = core(), ProducerCore(ProducerLimits())
    batch = add(first, b"v", is_movable=True)
    first.withdraw([batch])
    second.adopt("t", 0, [batch])
    second.expire(9.0)
    assert not batch.is_finished
    second.expire(10.0)
    assert errors(second) == [RequestTimeoutError]
    assert not first.take_finished()


def test_batches_are_taken_when_nothing_is_in_flight() -> None:
    stranger = core(in_flight_max=2)
    batches = [stranger.add("t", 0, bytearray(61), 1, 0.0, 10.0) for _ in range(3)]
    sent = stranger.poll(0.0)
    assert sent == batches[:2]
    stranger.refused(sent[0], 1, NOT_OWNER, 0.0)
    assert stranger.due_returned() == []  # the second is on its way
    stranger.refused(sent[1], 1, NOT_OWNER, 0.0)
    assert stranger.poll(0.0) == []
    [queue] = stranger.due_returned()
    assert stranger.take_returned(queue) == batches
    assert stranger.due_returned() == []
    owner = core()
    owner.adopt("t", 0, batches)
    assert owner.poll(0.0) == batches
    assert [batch.sequence for batch in batches] == [0, 1, 2]


def sent_and_lost(count: int) -> tuple[ProducerCore, list[Batch]]:
    """Batches whose answers were lost, and that were sent again."""
    lossy = core()
    batches = [lossy.add("t", 0, bytearray(61), 1, 0.0, 10.0) for _ in range(count)]
    lossy.poll(0.0)
    lossy.disconnected()
    lossy.connected(1, 0, 8)
    assert lossy.poll(0.0) == batches
    return lossy, batches


def test_what_a_stranger_may_have_stored_is_unknown() -> None:
    lossy, batches = sent_and_lost(2)
    later = lossy.add("t", 0, bytearray(61), 1, 0.0, 10.0)
    assert lossy.poll(0.0) == [later]
    for batch in (*batches, later):
        lossy.refused(batch, batch.transmission, NOT_OWNER, 0.0)
    [queue] = lossy.due_returned()
    assert lossy.take_returned(queue) == [later]
    assert errors(lossy) == [DeliveryUnknownError, DeliveryUnknownError]


def test_what_was_accepted_before_the_refusal_is_not_taken() -> None:
    """The first batch found the owner, its answer waits for the journal; the second one found a stranger."""
    stranger = core()
    first, second = (stranger.add("t", 0, bytearray(61), 1, 0.0, 10.0) for _ in range(2))
    assert stranger.poll(0.0) == [first, second]
    stranger.refused(second, 1, NOT_OWNER, 0.0)
    stranger.disconnected()
    stranger.connected(1, 0, 8)
    assert stranger.poll(0.0) == []
    [queue] = stranger.due_returned()
    assert stranger.take_returned(queue) == [second]
    assert errors(stranger) == [DeliveryUnknownError]


def test_the_only_home_known_is_asked_again_after_a_pause() -> None:
    stranger = core()
    batch = stranger.add("t", 0, bytearray(61), 1, 0.0, 10.0)
    stranger.poll(0.0)
    stranger.refused(batch, 1, NOT_OWNER, 0.0)
    [queue] = stranger.due_returned()
    stranger.keep_returned(queue, 1.0)
    assert stranger.poll(1.0) == []
    due = stranger.next_wakeup()
    assert 1.0 < due < 2.0
    assert stranger.poll(due) == [batch]
    stranger.refused(batch, 2, NOT_OWNER, due)
    stranger.fail_returned(queue, NOT_OWNER)
    assert errors(stranger) == [NotOwnerError]
    assert (stranger.buffered_bytes, stranger.unfinished) == (0, 0)
