"""One partition of an ordered producer, against a partition in memory that numbers as the broker does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.unit.client.spooling.queue_fixture import PARTITION, STEPS, QueueFixture, Step
from txmq.client.transport.connection import Waiter
from txmq.errors import (
    ConnectionLostError,
    DiskFullError,
    FencedError,
    RequestTimeoutError,
    SpoolFullError,
    TooLargeError,
    TxmqError,
    UnavailableError,
    UnknownTopicError,
)
from txmq.model import SendResult, SendStatus
from txmq.runtime.threads import Future


@pytest.fixture
def world(tmp_path: Path) -> Iterator[QueueFixture]:
    made = QueueFixture(tmp_path)
    yield made
    made.spool.close()


def test_direct_sending_goes_on_only_when_the_spool_is_empty(world: QueueFixture) -> None:
    assert world.send(b"0") == 0
    world.partition.plan = [DiskFullError("full")]
    assert world.send(b"1") is None
    assert world.send(b"2") is None
    world.drain()
    assert world.send(b"3") == 3
    assert world.partition.values == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("step", ["lose", "hide", UnavailableError("stopping"), ConnectionLostError("lost")])
@pytest.mark.parametrize("dies", [False, True])
def test_what_was_not_answered_is_stored_once(world: QueueFixture, step: str | TxmqError, dies: bool) -> None:
    world.send(b"0")
    world.partition.plan = [step]
    assert world.send(b"1") is None
    assert world.send(b"2") is None
    if dies:
        world.partition.session += 1
        world.life()
    world.drain()
    assert world.send(b"3") == 3
    assert world.partition.values == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("step", ["store", "lose", ConnectionLostError("lost")])
def test_interrupt_leaves_the_message_under_way_and_later_ones_wait(world: QueueFixture, step: str | TxmqError) -> None:
    world.send(b"0")
    world.partition.plan = [step]
    world.way.link.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        world.send(b"1")
    is_spooled = world.send(b"2") is None
    assert is_spooled is (step != "store")
    world.drain()
    assert world.partition.values == [b"0", b"1", b"2"]


def test_messages_are_many_a_batch_and_many_batches_in_flight(world: QueueFixture) -> None:
    futures = [world.send_async(b"%d" % number) for number in range(30)]
    world.land()
    assert [future.result().offset for future in futures] == list(range(30))
    assert 8 < len(world.partition.stored) < 30
    assert world.partition.values == [b"%d" % number for number in range(30)]


@pytest.mark.parametrize("step", [step for step in STEPS if step not in ("store", "hide")])
@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("dies", [False, True])
def test_failure_in_the_drain_spools_the_rest_in_order(world: QueueFixture, step: Step, at: int, dies: bool) -> None:
    world.partition.plan = [*["store"] * at, step]
    futures = [world.send_async(b"%d" % number) for number in range(30)]
    world.land()
    statuses = [future.result().status for future in futures]
    assert statuses == sorted(statuses, key=lambda status: status.value)  # acknowledged, then spooled
    assert statuses.count(SendStatus.ACKNOWLEDGED) == at
    assert world.send(b"30") is None
    if dies:
        world.partition.session += 1
        world.life()
    world.drain(60)
    assert world.send(b"31") == 31
    assert world.partition.values == [b"%d" % number for number in range(32)]


def test_poison_alone_is_reported_and_later_messages_are_kept(world: QueueFixture) -> None:
    world.partition.refuses = lambda content: b"poison" in content
    futures = [world.send_async(value) for value in (b"0", b"poison", b"1", b"2")]
    world.land()
    with pytest.raises(TooLargeError):
        futures[1].result()
    world.drain()
    assert world.send(b"3") == 3
    assert (world.partition.values, world.spool.parked()) == ([b"0", b"1", b"2", b"3"], [])


def test_poison_among_others_is_parked_and_the_others_are_sent(world: QueueFixture) -> None:
    world.partition.refuses = lambda content: b"poison" in content
    values = [b"%d" % number for number in range(20)]
    values[15] = b"poison"
    futures = [world.send_async(value) for value in values]  # from the ninth on they share a batch
    world.land()
    assert all(future.result().is_success for future in futures)
    world.drain(60)
    assert [entry.reason for entry in world.spool.parked()] == ["refused 2 times: poison"]
    assert world.partition.values == [value for value in values if value != b"poison"]


def test_deleted_topic_is_reported_to_all_and_nothing_is_spooled(world: QueueFixture) -> None:
    world.partition.plan = [UnknownTopicError("gone")] * 10
    futures = [world.send_async(b"%d" % number) for number in range(5)]
    world.land()
    for future in futures:
        with pytest.raises(UnknownTopicError):
            future.result()
    assert world.spool.count(PARTITION) == 0


def test_full_spool_refuses_message_by_message_what_it_cannot_take(world: QueueFixture) -> None:
    world.spool.size_bytes_max = 200  # two messages
    world.partition.plan = [DiskFullError("full")]
    futures = [world.send_async(b"%d" % number) for number in range(12)]
    world.land()
    results = [future.exception() for future in futures]
    assert results[:2] == [None, None]
    assert all(isinstance(error, SpoolFullError) for error in results[2:])
    world.drain()
    assert world.partition.values == [b"0", b"1"]


def test_message_without_a_timely_answer_is_spooled_with_its_number(world: QueueFixture) -> None:
    world.send(b"0")
    world.way.link.is_silent = True
    assert world.send(b"1") is None
    (entry,) = world.spool.entries()
    assert entry.assigned is not None
    assert (entry.assigned.sequence, entry.assigned.offset_at_least) == (1, 1)
    world.drain()
    assert world.partition.values == [b"0", b"1"]


def test_while_broker_is_away_each_message_is_spooled_at_once(world: QueueFixture) -> None:
    world.way.is_away = True
    before = world.clock.monotonic()
    assert [world.send(b"%d" % number) for number in range(3)] == [None, None, None]
    assert world.clock.monotonic() == before
    world.way.is_away = False
    world.drain()
    assert world.partition.values == [b"0", b"1", b"2"]


@pytest.mark.parametrize("is_away", [False, True])
def test_caller_that_finds_the_link_failed_waits_for_the_drain(world: QueueFixture, is_away: bool) -> None:
    world.send(b"0")
    futures = [world.send_async(b"1"), world.send_async(b"2")]
    world.way.link.failure = ConnectionLostError("failed a moment ago")
    world.way.is_away = is_away
    assert world.send(b"3") is None
    world.way.is_away = False
    world.land()
    assert {future.result().status for future in futures} == {SendStatus.SPOOLED}
    world.drain()
    assert world.partition.values == [b"0", b"1", b"2", b"3"]


def test_message_stored_but_answered_unavailable_is_found_in_the_log(
    world: QueueFixture,
) -> None:
    world.partition.plan = ["hide"]
    futures = [world.send_async(b"0"), world.send_async(b"1")]
    world.land()
    assert [future.result().offset for future in futures] == [None, 1]
    world.partition.ended.add(world.partition.session)
    world.partition.session += 1
    world.drain()
    assert world.partition.values == [b"0", b"1"]


def test_another_session_begins_at_its_first_number_without_a_detour(world: QueueFixture) -> None:
    assert [world.send(b"0"), world.send(b"1")] == [0, 1]
    world.partition.session += 1
    world.clock.sleep(1.0)  # an idle link is looked at
    assert [world.send(b"2"), world.send(b"3")] == [2, 3]


def test_the_end_spools_what_is_under_way(world: QueueFixture) -> None:
    world.send(b"0")
    futures = [world.send_async(b"%d" % number) for number in (1, 2)]
    world.way.link.fail(ConnectionLostError("closed"))
    world.queue.close()
    assert [entry.assigned is not None for entry in world.spool.entries()] == [True, True]
    while world.sender._completed:
        world.sender._completed.popleft().complete_futures()
    assert {future.result().status for future in futures} == {SendStatus.SPOOLED}


def test_close_is_not_delayed_by_a_session_that_cannot_renew(
    world: QueueFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what other partitions have under way would be neither spooled nor told."""

    def renew(*_: object) -> None:
        raise RequestTimeoutError("another thread is still connecting")

    world.partition.plan = [FencedError("gone")]
    future = world.send_async(b"0")
    monkeypatch.setattr(world.way, "renew", renew)
    monkeypatch.setattr(world.sender, "_on_given_up", lambda: None)
    world.way.link.wait(Waiter(), world.clock.monotonic())
    world.queue.close()
    while world.sender._completed:
        world.sender._completed.popleft().complete_futures()
    assert future.result().status is SendStatus.SPOOLED


@pytest.mark.parametrize("lost", [0, 1, 5, 7, 8, 12, 19])
def test_interrupted_drain_is_repeated_with_its_numbers(world: QueueFixture, lost: int) -> None:
    world.partition.plan = [DiskFullError("full")]
    for number in range(20):
        world.send(b"%d" % number)
    world.partition.plan = [*["store"] * lost, "lose", *[ConnectionLostError("lost")] * 8]
    with pytest.raises(ConnectionLostError):
        world.queue.drain(world.clock.monotonic() + 1.0)
    world.partition.session += 1  # the process was killed
    world.life()
    world.drain()
    assert world.partition.values == [b"%d" % number for number in range(20)]


def test_poison_is_parked_after_its_last_attempt_and_renumbers_followers(world: QueueFixture) -> None:
    world.partition.plan = [DiskFullError("full")]
    for value in (b"1", b"poison", b"2", b"3"):
        world.send(value)
    world.partition.refuses = lambda content: b"poison" in content
    world.queue._visibility_wait_s = 35.0  # the numbers have to fit without asking the log
    world.drain()
    (parked,) = world.spool.parked()
    assert parked.reason == "refused 2 times: poison"
    assert world.send(b"4") == 3
    assert world.partition.values == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("step", ["lose", ConnectionLostError("lost")])
def test_log_tells_what_became_of_message_whose_session_is_gone(world: QueueFixture, step: str | TxmqError) -> None:
    world.send(b"0")
    world.partition.plan = [step]
    world.send(b"1")
    world.send(b"2")
    world.partition.ended.add(1)
    world.partition.session = 2
    world.drain()
    assert world.partition.values == [b"0", b"1", b"2"]
    assert world.spool.parked() == []


def test_log_is_read_when_restarted_broker_shows_all(world: QueueFixture) -> None:
    """A broker counts ``visibility_hold_ms_max`` from its start: a restart holds a partition for longer."""
    world.queue._visibility_wait_s = 35.0
    world.partition.held_at = 0
    world.partition.plan = ["lose"]
    world.send(b"1")
    world.partition.ended.add(1)
    world.partition.session = 2
    for passed_s, epoch in ((0.0, 1), (34.0, 1), (2.0, 2), (34.0, 2)):
        world.clock.advance(passed_s)
        world.partition.epoch = epoch
        with pytest.raises(FencedError):
            world.queue.drain(world.clock.monotonic() + 1.0)
    world.clock.advance(1.0)
    world.partition.held_at = None
    world.drain(2)
    assert world.partition.values == [b"1"]


def test_where_log_cannot_tell_message_is_parked_and_not_guessed(world: QueueFixture) -> None:
    world.send(b"0")
    world.partition.plan = ["lose"]
    world.send(b"1")
    world.send(b"2")
    world.partition.ended.add(1)
    world.partition.session, world.partition.start = 2, 2  # retention took what would tell
    world.drain()
    (parked,) = world.spool.parked()
    assert "may or may not be stored" in parked.reason
    assert world.partition.values == [b"0", b"1", b"2"]


def test_the_log_is_read_only_when_everything_stored_is_visible(world: QueueFixture) -> None:
    world.queue._visibility_wait_s = 35.0
    world.partition.plan = [ConnectionLostError("lost")]
    world.send(b"1")
    world.partition.ended.add(1)
    world.partition.session = 2
    for _ in range(2):
        with pytest.raises(FencedError):
            world.queue.drain(world.clock.monotonic() + 1.0)
        assert world.partition.values == []
    world.clock.sleep(35.0)
    world.drain()
    assert world.partition.values == [b"1"]


def test_a_row_that_is_damaged_is_parked_and_not_sent(world: QueueFixture) -> None:
    world.spool.append(PARTITION, b"\0" * 70, 1)
    world.send(b"1")
    world.drain()
    assert "damaged in the spool" in world.spool.parked()[0].reason
    assert world.partition.values == [b"1"]


@pytest.mark.parametrize("seed", range(70))
def test_whatever_fails_nothing_is_lost_repeated_or_reordered(world: QueueFixture, seed: int) -> None:
    # Kept in memory: what is tested is the lane, and so many files that are synced at each step take a minute.
    world.spool._database.execute("PRAGMA synchronous=OFF")
    chance = Random(seed)
    told: list[bytes] = []
    under_way: list[tuple[bytes, Future[SendResult]]] = []
    world.partition.refuses = lambda content: b"poison" in content
    for number in range(60):
        happens = chance.random()
        if happens < 0.25:
            world.partition.plan = [chance.choice(STEPS) for _ in range(chance.randrange(1, 12))]
        elif happens < 0.33:
            world.land()
            world.partition.session += 1
            world.life()
        elif happens < 0.38:
            world.partition.ended.add(world.partition.session)
            world.partition.session += 1
        elif happens < 0.6:
            with suppress(TxmqError):
                world.queue.drain(world.clock.monotonic() + 1.0)
        elif happens < 0.65:
            world.land()
        value = b"%d" % number
        if chance.random() < 0.05:
            under_way.append((b"poison", world.send_async(b"poison")))
        if chance.random() < 0.6:
            under_way.append((value, world.send_async(value)))
        else:
            world.send(value)
        told.append(value)
    world.partition.plan = []
    world.land()
    assert all(future.done() for _, future in under_way)
    assert {value for value, future in under_way if future.exception() is not None} <= {b"poison"}
    world.drain(400)
    assert world.partition.values == told


def test_possibly_stored_batch_is_not_parked_nor_followers_sent_twice(world: QueueFixture) -> None:
    """A broker that was restarted with a lower limit refuses what it has before it looks whether it has it."""
    world.partition.plan = [DiskFullError("full")]
    for value in (b"1", b"2", b"3"):
        world.send(value)
    world.partition.plan = ["lose"]
    with pytest.raises(ConnectionLostError):
        world.queue.drain(world.clock.monotonic() + 1.0)
    assert world.partition.values == [b"1", b"2", b"3"]
    world.partition.session += 1  # the process was killed
    world.life()
    for _ in range(2):
        world.partition.plan = [TooLargeError("over the limit now")]
        with suppress(TooLargeError):
            world.queue.drain(world.clock.monotonic() + 1.0)
    world.drain()
    assert (world.spool.parked(), world.partition.values) == ([], [b"1", b"2", b"3"])


def test_where_it_was_never_stored_it_is_parked_in_end(world: QueueFixture) -> None:
    world.partition.plan = [ConnectionLostError("lost")]
    world.send(b"poison")
    world.send(b"2")
    world.partition.refuses = lambda content: b"poison" in content
    world.drain()
    (parked,) = world.spool.parked()
    assert parked.reason == "refused 2 times: poison"
    assert world.partition.values == [b"2"]


def another_session(world: QueueFixture) -> None:
    """The link is lost, and another lane is the first to connect again."""
    world.partition.session += 1
    world.way.link.fail(ConnectionLostError("lost"))
    world.sender.follow(world.clock.monotonic() + 1.0)


@pytest.mark.parametrize("state", ["direct", "was spooled", "given up", "refused"])
def test_topic_made_anew_is_looked_at_from_its_own_beginning(world: QueueFixture, state: str) -> None:
    """What the partition of the old one had reached says nothing about where the new one has a batch."""
    for number in range(5):
        world.send(b"old %d" % number)
    if state == "was spooled":
        world.partition.plan = [DiskFullError("full")]
        world.send(b"old 5")
        world.drain()
        world.send(b"old 6")
    elif state == "given up":
        world.sender.core._give_up(world.sender.core.queue_of(*PARTITION))
        world.sender.core.given_up[world.sender.core.queue_of(*PARTITION)] = world.sender.core.identity
    if state != "refused":
        another_session(world)
    world.queue.take_over(world.clock.monotonic() + 1.0)
    world.partition.made_anew()
    if state == "refused":
        assert world.send(b"1") is None  # its number does not follow: there is a new session
        world.drain()
    world.partition.plan = ["lose"]
    assert world.send(b"2") is None
    world.partition.others(10)
    world.partition.ended.add(world.partition.session)
    world.partition.session += 1
    world.drain()
    assert world.partition.own == ([b"1", b"2"] if state == "refused" else [b"2"])
