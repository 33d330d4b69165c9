"""Listeners: returning acknowledges, raising retries, and after a reject returning does not acknowledge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.logged import said
from tools.simulated.clock import SimClock
from tools.simulated.stand_in import AnyClass, StandIn
from txmq.client.consumer.assigned_partitions import TURN_S, AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition, Waiting
from txmq.client.consumer.consumer import Listener
from txmq.client.consumer.failures import Failures
from txmq.client.consumer.options import ConsumerOptions, ConsumerSettings
from txmq.model import Message
from txmq.runtime.logging import SPARING_S, get_logger

SLOT = ("orders", 0)


class DeadLetters(AnyClass):
    """Remembers what it gets."""

    def __init__(self) -> None:
        self.dead_lettered: list[int] = []
        self.reasons: list[str] = []
        self.meanwhile: Callable[[Message], None] = lambda _: None

    def dead_letter(self, message: Message, failures: int, reason: str) -> None:
        """One more; another thread does something meanwhile."""
        self.dead_lettered.append(message.offset)
        self.reasons.append(reason)
        meanwhile, self.meanwhile = self.meanwhile, lambda _: None
        meanwhile(message)


class Contents(AnyClass):
    """A retry store in memory, or none."""

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept

    def update(self, message: Message, failures: int, reason: str) -> None:
        """It failed again."""

    def store(self, messages: Sequence[Message], failures: int, reason: str) -> list[int | None] | None:
        """There is room."""
        return [None] * len(messages) if self.is_kept else None


class ListenerFixture:
    """A consumer with one message to take."""

    def __init__(self, max_retries: int, *, is_kept: bool, accept: Callable[[Message], bool] | None = None) -> None:
        settings = ConsumerSettings("g", ("orders",), "earliest", max_retries, ConsumerOptions(accept=accept))
        self.clock, log = SimClock(), get_logger()
        self.share, self.dead_letters = AssignedPartitions(None, settings, self.clock, log), DeadLetters()
        self.acks = StandIn(rejected=lambda _: False, is_store_away=lambda _: False, may_give_up=lambda _: True)
        contents = Contents(is_kept=is_kept)
        self.failures = Failures(self.share, contents, self.dead_letters, self.acks, settings, self.clock, log)
        self.consumed = self.assigned(1)

    def assigned(self, made_ms: int, count: int = 1) -> ConsumedPartition:
        """The partition is assigned to us, with so many messages made at a time."""
        consumed = self.share.partitions[SLOT] = ConsumedPartition(SLOT, 1, 0, 0)
        consumed.fetch = 1
        consumed.fetched(1, [Message("orders", 0, at, b"k", b"v", {}, None, made_ms, None) for at in range(count)])
        return consumed

    def run(self, handle: Any) -> Listener:
        """Call a listener with one message."""

        def once(message: Message) -> None:
            self.share.is_closed = True
            handle(message)

        self.share.is_closed = False
        listener = Listener(self.share, self.failures, StandIn(more=lambda: None), self.clock, once)
        listener.work()
        return listener

    def reject(self, message: Message) -> None:
        """A listener that rejects, and returns."""
        self.failures.failed(message, "bad")


def test_rejected_message_is_retried_and_not_acknowledged_by_the_return() -> None:
    world = ListenerFixture(1, is_kept=False)
    world.run(world.reject)
    assert (world.consumed.position, world.consumed.under_way, len(world.consumed.retries)) == (0, 1, 1)
    world.clock.advance(60.0)
    world.run(world.reject)
    assert (world.dead_letters.dead_lettered, world.consumed.position) == ([0], 1)


def test_what_a_listener_rejects_stays_deferred() -> None:
    world = ListenerFixture(0, is_kept=True)
    world.run(world.reject)
    assert (list(world.consumed.deferred), world.consumed.position) == ([0], 1)
    world.clock.advance(600.0)
    world.run(world.reject)
    assert (list(world.consumed.deferred), world.consumed.deferred[0].failures) == ([0], 2)
    world.clock.advance(600.0)
    world.run(lambda _: None)
    assert world.consumed.deferred == {}


@pytest.mark.parametrize("is_good", [True, False])
def test_to_return_acknowledges_and_to_raise_does_not(is_good: bool) -> None:
    world = ListenerFixture(1, is_kept=False)

    def handle(_: Message) -> None:
        if not is_good:
            raise ValueError

    world.run(handle)
    assert (world.consumed.position, len(world.consumed.retries)) == ((1, 0) if is_good else (0, 1))


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_rejects_at_the_last_retry_dead_letter_once(is_kept: bool) -> None:
    world = ListenerFixture(0, is_kept=is_kept)
    world.dead_letters.meanwhile = world.reject
    while not world.dead_letters.dead_lettered:
        world.run(world.reject)
        world.clock.advance(600.0)
    assert world.dead_letters.dead_lettered == [0]
    assert (world.consumed.position, world.consumed.deferred) == (1, {})


def test_reject_of_a_message_awaiting_retry_is_no_failure() -> None:
    world = ListenerFixture(1, is_kept=False)
    (message,) = world.consumed.take(1, 0.0)
    for _ in range(3):
        world.reject(message)
    assert (world.dead_letters.dead_lettered, world.consumed.attempts, len(world.consumed.retries)) == ([], {0: 1}, 1)
    world.failures.acked(message)  # and what is acknowledged after all does not come again
    assert (world.consumed.take(1, 600.0), world.consumed.position) == ([], 1)


@pytest.mark.parametrize("is_deferred", [True, False])
def test_delivery_of_a_topic_does_not_count_for_its_successor(is_deferred: bool) -> None:
    world = ListenerFixture(1, is_kept=True)
    (old,) = world.consumed.take(1, 0.0)
    new = world.assigned(2)
    (delivered,) = new.take(1, 0.0)
    if is_deferred:
        new.defer(delivered, Waiting(delivered, 1, None))
        new.deferred[0].is_out = True
    world.reject(old)
    world.failures.acked(old)
    assert (new.attempts, new.is_under_way(0), list(new.deferred)) == ({}, not is_deferred, [0] * is_deferred)
    world.failures.acked(delivered)
    assert (new.position, new.deferred) == (1, {})


def handled(world: ListenerFixture, takes_s: float) -> list[tuple[str, int]]:
    """What a listener gets of two partitions with three messages each, if it takes so long for one."""
    other = world.share.partitions["orders", 1] = ConsumedPartition(("orders", 1), 1, 0, 0)
    other.fetch = 1
    other.fetched(1, [Message("orders", 1, at, b"k", b"v", {}, None, 1, None) for at in range(3)])
    world.consumed = world.assigned(1, count=3)
    world.consumed.fetch = other.fetch = 2  # each waits for an answer
    found: list[tuple[str, int]] = []

    def handle(message: Message) -> None:
        found.append((f"{message.topic}-{message.partition}", message.offset))
        world.clock.advance(takes_s)
        assert sum(one.is_busy for one in world.share.partitions.values()) == 1
        if len(found) == 6:
            world.share.stop_delivery()

    Listener(world.share, world.failures, StandIn(more=lambda: None), world.clock, handle).work()
    assert [one.position for one in world.share.partitions.values()] == [3, 3]
    return found


def test_quick_listener_goes_on_with_its_partition() -> None:
    found = handled(ListenerFixture(1, is_kept=False), takes_s=0.0)
    assert [offset for _, offset in found] == [0, 1, 2, 0, 1, 2]


def test_slow_listener_takes_partitions_in_turn() -> None:
    found = handled(ListenerFixture(1, is_kept=False), takes_s=TURN_S)
    assert [offset for _, offset in found] == [0, 0, 1, 1, 2, 2]


def test_room_that_a_listener_makes_is_fetched_into() -> None:
    world, fetches = ListenerFixture(1, is_kept=False), list[int]()
    world.consumed = world.assigned(1, count=3)

    def handle(message: Message) -> None:
        if message.offset == 2:
            world.share.stop_delivery()

    more = StandIn(more=lambda: fetches.append(world.consumed.position))
    world.consumed.fetch = 7
    Listener(world.share, world.failures, more, world.clock, handle).work()
    assert fetches == []  # one is under way
    world.consumed = world.assigned(1, count=3)
    world.share.is_closed = False
    Listener(world.share, world.failures, more, world.clock, handle).work()
    assert fetches


def test_message_of_transaction_in_doubt_is_redelivered_not_dead_lettered() -> None:
    world = ListenerFixture(0, is_kept=True)
    may_give_up = False
    world.acks.may_give_up = lambda _: may_give_up
    for _ in range(3):
        world.run(world.reject)
        assert (len(world.consumed.retries), world.consumed.deferred) == (1, {})
        world.clock.advance(600.0)
    may_give_up = True
    world.run(world.reject)
    assert list(world.consumed.deferred) == [0]
    may_give_up = False
    for _ in range(15):
        world.clock.advance(600.0)
        world.run(world.reject)
    assert (list(world.consumed.deferred), world.dead_letters.dead_lettered) == ([0], [])
    may_give_up = True
    world.clock.advance(600.0)
    world.run(world.reject)
    assert (world.consumed.deferred, world.dead_letters.dead_lettered) == ({}, [0])


def test_message_behind_its_key_is_stored_before_the_next_delivery() -> None:
    """A transaction acknowledges in order: what is in nobody's hand and not stored would have it refused."""
    world = ListenerFixture(0, is_kept=True)
    world.consumed = world.assigned(1, 2)
    world.consumed.ahead.add([Message("orders", 0, 2, b"other", b"v", {}, None, 1, None)], [])
    world.consumed.keeps_key_order = True
    world.run(world.reject)
    found: list[tuple[int, int | None]] = []
    world.run(lambda message: found.append((message.offset, world.consumed.lowest_before(message.offset, None))))
    assert found == [(2, None)]
    assert list(world.consumed.deferred) == [0, 1]


def test_message_that_fails_for_ever_is_told_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []
    ours = ListenerFixture(100, is_kept=False)
    say = StandIn(warning=lambda _, times, **_where: reported.append(times), info=lambda *_, **__: None)
    monkeypatch.setattr(ours.failures, "_log", say)
    for _ in range(9):
        [message] = ours.share.take(1, ours.clock.monotonic())
        ours.reject(message)
        ours.clock.advance(60.0)
    assert reported == [1, 2, 4, 8]


# --- what is logged --------------------------------------------------------------------------------------------------


def test_a_failure_of_the_listener_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    world = ListenerFixture(9, is_kept=False)

    def charge(_: Message) -> None:
        raise ZeroDivisionError("mine")

    world.run(charge)
    [record] = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)
    assert "in charge" in caplog.text  # the frame of the listener
    [line] = said(caplog)
    assert (line["event"], line["level"], line["offset"], line["times"]) == ("message failed", "warning", 0, 1)


class SpeechlessError(Exception):
    """Fails where its words are asked for."""

    def __repr__(self) -> str:
        raise AttributeError("never set")


@pytest.mark.parametrize("reason", ["file \udcff", SpeechlessError(), ValueError("\udcff"), None])
def test_reason_that_cannot_be_told_dead_letters_the_message(reason: Any) -> None:
    """Found: its encoding failed, and its partition stood still without a word."""
    world = ListenerFixture(0, is_kept=False)
    world.run(lambda message: world.failures.failed(message, reason))
    (told,) = world.dead_letters.reasons
    assert told.encode("utf-8")
    assert (world.dead_letters.dead_lettered, world.consumed.position) == ([0], 1)


def test_listener_whose_error_has_no_words_is_retried() -> None:
    """Found: the listener's thread ended, and held its partition."""

    def fail(_: Message) -> None:
        raise SpeechlessError

    world = ListenerFixture(0, is_kept=False)
    world.run(fail)
    assert world.dead_letters.dead_lettered == [0]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_listener_that_ends_its_thread_ends_all_of_them(kind: type[BaseException]) -> None:
    """Found: one thread fewer, without a word, and its partition stood still."""

    def leave(_: Message) -> None:
        world.share.is_closed = False
        raise kind

    world = ListenerFixture(0, is_kept=False)
    listener = world.run(leave)
    assert (type(listener.error), world.share.is_closed, world.consumed.position) == (kind, True, 0)


def test_what_was_rejected_has_a_reason_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    world = ListenerFixture(9, is_kept=False)
    world.run(world.reject)
    assert not caplog.records[0].exc_info
    assert said(caplog)[0]["reason"] == "bad"


def test_messages_deferred_are_logged_once_and_then_sparingly(caplog: pytest.LogCaptureFixture) -> None:
    world = ListenerFixture(0, is_kept=True)
    world.consumed = world.assigned(1, count=50)
    for _ in range(49):
        world.run(world.reject)
    assert len(world.consumed.deferred) == 49
    lines = [line for line in said(caplog) if "deferred" in line["event"]]
    assert [line["offset"] for line in lines] == [0]
    world.clock.advance(SPARING_S)
    while 49 not in world.consumed.deferred:  # some that are deferred may be due before it
        world.run(world.reject)
    [line] = [line for line in said(caplog) if "deferred" in line["event"]]
    assert (line["offset"], line["more"]) == (49, 48)


def test_a_filter_that_fails_is_logged_sparingly_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def accept(_: Message) -> bool:
        raise ZeroDivisionError("mine")

    world = ListenerFixture(0, is_kept=True, accept=accept)
    world.consumed = world.assigned(1, count=9)
    for _ in range(9):
        world.run(lambda _: None)
    [record] = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)
