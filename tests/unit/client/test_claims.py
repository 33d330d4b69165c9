"""What transactions acknowledge of a partition: in order, counted when the outcome is known, never before."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from txmq.client.claims import Claims
from txmq.client.consumer_options import ConsumerOptions, ConsumerSettings
from txmq.client.offset_store import OffsetPosition, StoredOffset
from txmq.client.share import Share
from txmq.client.tracker import Claim, Tracker, Waiting
from txmq.errors import ConnectionLostError, FencedError, RolledBackError, StorageError, TransactionStateError
from txmq.model import Message, Outcome
from txmq.protocol.offsets import OffsetRow
from txmq.runtime.logging import get_logger
from txmq.runtime.sim_clock import SimClock
from txmq.xid import TxId

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


# --- with a consumer's share -----------------------------------------------------------------------------------------


class Control:
    """The broker's answers to ``outcome``, in order; an exception is raised."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def told(self, txid: TxId) -> Outcome | None:
        """Nothing was lost and found."""

    def call(self, verb: str, txid: str, *, extensions: dict[str, Any], timeout: float) -> bytes:
        """One answer; the last one again and again."""
        self.asked.append((f"{verb} {txid}", extensions))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class World:
    """A share with one partition, five messages of which are delivered; its client, and its claims."""

    def __init__(self, *answers: bytes | Exception, store: Any = None) -> None:
        self.client = SimpleNamespace(clock=SimClock(), control=Control(*answers or (b"unknown\n",)))
        settings = ConsumerSettings("g", ("orders",), "earliest", 5, ConsumerOptions(), offset_store=store)
        self.share = Share(self.client, None, settings, get_logger())
        self.claims = Claims(self.client, self.share, "g", store)
        self.calls: list[str] = []
        self.share.more = lambda: None
        self.share.wait_saved = lambda: self.calls.append("waited")
        self.share.aside = SimpleNamespace(remove=lambda *_: None)  # type: ignore[assignment]
        self.tracker = self.share.trackers[SLOT] = tracker(first=0)
        self.owner = object()

    def claim(self, *offsets: int) -> None:
        """The transaction acknowledges these."""
        for offset in offsets:
            self.claims.claim(message(offset), self.owner)

    def look(self) -> list[OffsetRow]:
        """It is sent."""
        return self.claims.look([self.tracker], self.owner)[1]

    def to_save(self) -> list[int]:
        """Offsets that would be saved now."""
        return [position.offset for position in self.share.to_save(everything=True)]

    def settled(self) -> None:
        """Wait for the thread that asks."""
        deadline = time.monotonic() + 60.0
        while self.tracker.is_in_doubt and self.share.trackers:
            assert time.monotonic() < deadline, self.client.control.asked
            signal.sigtimedwait((), 0.005)


def test_from_when_it_is_sent_until_its_outcome_is_known_nothing_else_of_the_partition_is_saved() -> None:
    world = World()
    world.tracker.ack(0)
    world.claim(1, 2)
    assert world.to_save() == [1]
    assert world.look() == [OffsetRow("orders", 0, 1, 3, None)]
    assert world.to_save() == []
    world.claims.end([world.tracker], world.owner, Outcome.COMMITTED, [OffsetRow("orders", 0, 1, 3, None)])
    assert (world.tracker.position, world.tracker.saved, world.to_save()) == (3, 3, [])
    world.tracker.ack(3)
    assert world.to_save() == [4]


def test_what_was_rolled_back_is_in_the_applications_hands_again() -> None:
    world = World()
    world.claim(0)
    world.look()
    with pytest.raises(RolledBackError, match="not known yet"):
        world.claims.claim(message(1), object())
    world.claims.end([world.tracker], world.owner, Outcome.ROLLED_BACK)
    assert (world.tracker.position, world.tracker.retries, world.tracker.is_under_way(0)) == (0, [], True)
    world.claim(0)


def test_a_partition_that_was_lost_since_the_claim_ends_the_transaction_before_it_is_sent() -> None:
    world = World()
    world.claim(0)
    world.share.trackers[SLOT] = tracker(first=0)
    with pytest.raises(RolledBackError, match="any more"):
        world.look()
    world.share.lost(SLOT)
    with pytest.raises(RolledBackError, match="any more"):
        world.claim(0)


def test_a_seek_since_the_claim_does_so_too() -> None:
    world = World()
    world.claim(0)
    world.tracker.seek(3)
    with pytest.raises(RolledBackError):
        world.look()


TXID = str(TxId(1, 2, 3, 4))


@pytest.mark.parametrize("answer", [b"committed\n", b"rolled-back\n"])
def test_a_doubt_is_asked_about_with_a_fence_until_it_is_settled(answer: bytes) -> None:
    world = World(ConnectionLostError("away"), b"prepared\n", answer)
    world.claim(0, 1)
    rows = world.look()
    assert world.claims.rejected(message(0))  # not the application's to say
    world.claims.doubt([world.tracker], world.owner, TXID, rows)
    world.settled()
    assert world.client.control.asked == [(f"outcome {TXID}", {"fence": None})] * 3
    if answer.startswith(b"committed"):
        assert (world.tracker.position, world.tracker.saved, world.tracker.retries) == (2, 2, [])
    else:
        assert world.tracker.position == 0
        assert [found.offset for found in world.tracker.take(5, 1e9)] == [0, 1]


def test_where_the_outcome_is_not_kept_the_partition_is_loaded_anew() -> None:
    world = World(FencedError("no longer kept"))
    world.claim(0)
    world.claims.doubt([world.tracker], world.owner, TXID, world.look())
    world.settled()
    assert world.share.trackers == {}


class Database:
    """A store with transactions that writes down what is asked of it."""

    is_shared = True

    def __init__(self, world_calls: list[str] | None = None) -> None:
        self.calls = world_calls if world_calls is not None else []
        self.committed: StoredOffset | None = None
        self.refusal: Exception | None = None
        self.away: Exception | None = None
        self.most: int | None = None
        self.beside: StoredOffset | None = None

    def save_in(
        self, connection: Any, group: str, position: OffsetPosition, above: int | None, *,
        most: int | None = None, beside: StoredOffset | None = None,
    ) -> None:  # fmt: skip
        """In the application's transaction."""
        self.calls.append(f"saved {position.offset} above {above}")
        self.most, self.beside = most, beside
        if self.refusal is not None:
            raise self.refusal

    def doom(self, connection: Any, error: BaseException) -> None:
        """It cannot commit."""
        self.calls.append("doomed")

    def saved(self, group: str, slot: tuple[str, int]) -> StoredOffset | None:
        """What is committed."""
        if self.away is not None:
            raise self.away
        return self.committed

    def enter(self, group: str) -> None:
        """Nothing."""

    def load(self, group: str, slot: tuple[str, int], generation: int) -> StoredOffset | None:
        """Nothing."""

    def save(self, group: str, positions: Any) -> tuple[()]:
        """Nothing."""
        return ()

    def leave(self, group: str) -> None:
        """Nothing."""


def in_database() -> tuple[World, Database]:
    """A consumer whose offsets are in the application's database."""
    database = Database()
    world = World(store=database)
    database.calls = world.calls
    return world, database


def test_an_offset_is_saved_in_the_transaction_behind_every_save_that_is_under_way() -> None:
    world, _ = in_database()
    world.tracker.ack(0)
    assert world.to_save() == [1]
    world.claims.claim_in(message(1), None)
    world.claims.claim_in(message(2), None)
    assert world.calls == ["waited", "saved 2 above None", "waited", "saved 3 above 1"]
    assert world.to_save() == []  # it would take back what the transaction saves


def test_it_counts_when_it_is_seen_committed_and_a_reject_looks_first() -> None:
    world, database = in_database()
    for offset in (0, 1):
        world.claims.claim_in(message(offset), None)
    world.claims.settle()
    assert world.tracker.position == 0
    database.committed = StoredOffset(1)
    world.claims.settle()
    assert (world.tracker.position, sorted(world.tracker.claims)) == (1, [1])
    assert not world.claims.rejected(message(1))  # rolled back: the application says so
    world.claims.claim_in(message(1), None)
    database.committed = StoredOffset(2)
    assert world.claims.rejected(message(1))  # it was committed all the same
    assert (world.tracker.position, world.tracker.saved) == (2, 2)


def test_what_is_refused_is_doomed_and_not_claimed() -> None:
    world, database = in_database()
    with pytest.raises(TransactionStateError, match="message 0 before it"):
        world.claims.claim_in(message(1), None)
    database.refusal = FencedError("somebody else's")
    with pytest.raises(FencedError):
        world.claims.claim_in(message(0), None)
    assert world.calls == ["doomed", "waited", "saved 1 above None", "doomed"]
    assert world.tracker.claims == {}
    world.share.lost(SLOT)
    with pytest.raises(FencedError):
        world.claims.claim_in(message(0), None)
    assert world.calls[-1] == "doomed"


@pytest.mark.parametrize("error", [StorageError("away"), ZeroDivisionError()], ids=repr)
def test_a_store_that_is_away_is_asked_again_later_and_ends_nobodys_thread(error: Exception) -> None:
    world, database = in_database()
    world.claims.claim_in(message(0), None)
    database.away = error
    world.claims.settle()
    assert (world.tracker.position, world.claims.rejected(message(0))) == (0, True)
    database.away, database.committed = None, StoredOffset(1)
    world.claims.settle()
    assert world.tracker.position == 1


def test_behind_one_that_was_aside_what_is_saved_must_be_what_its_transaction_saved() -> None:
    """Else that one is rolled back, and this one's text does not name the message: it is in nobody's."""
    world, database = in_database()
    world.tracker.aside[-1] = waiting = Waiting(message(-1), 1, None)
    waiting.is_out = True
    world.claims.claim_in(message(-1), None)
    assert database.beside is None
    world.claims.claim_in(message(0), None)
    assert database.beside == StoredOffset(0, None)
    world.claims.claim_in(message(1), None)
    assert database.beside == StoredOffset(1, None)
    database.committed = StoredOffset(2, None)
    world.claims.settle()
    world.claims.claim_in(message(2), None)
    assert database.beside is None


def test_the_highest_below_counts_in_whatever_order_they_were_claimed() -> None:
    world, _ = in_database()
    for offset in (0, 1):
        world.claims.claim_in(message(offset), None)
    assert not world.claims.rejected(message(0))
    world.claims.claim_in(message(0), None)
    world.claims.claim_in(message(2), None)
    assert world.calls[-1] == "saved 3 above 1"


def test_nothing_may_be_saved_above_a_message_that_is_acknowledged_but_where_a_seek_went_back() -> None:
    world, database = in_database()
    world.claims.claim_in(message(0), None)
    assert database.most == 0
    world.tracker.claims.clear()
    world.tracker.saved = 4
    world.claims.claim_in(message(0), None)
    assert database.most == 4


def aside(world: World, offset: int) -> str:
    """A message that was set aside, in the application's hands again; the text that is saved."""
    world.tracker.aside[offset] = waiting = Waiting(message(offset), 1, None)
    waiting.is_out = True
    world.tracker.aside_saved = text = f"[[{offset},1,null]]"
    return text


def test_one_that_was_aside_does_not_fail_for_what_was_committed_a_moment_ago() -> None:
    world, database = in_database()
    text = aside(world, -1)
    world.claims.claim_in(message(0), None)
    database.committed = StoredOffset(0, text)
    with pytest.raises(RolledBackError, match="commit first"):
        world.claims.claim_in(message(-1), None)
    database.committed = StoredOffset(1, text)
    world.claims.claim_in(message(-1), None)
    assert (database.beside, list(world.tracker.claims)) == (StoredOffset(1, text), [-1])
    world.claims.claim_in(message(-1), None)  # rolled back: the block runs again
    assert world.calls.count("doomed") == 1


def test_one_that_was_aside_is_not_acknowledged_twice_where_a_failed_commit_was_one() -> None:
    world, database = in_database()
    text = aside(world, -1)
    database.committed = StoredOffset(0, text)
    world.claims.claim_in(message(-1), None)
    assert not world.claims.rejected(message(-1))  # not committed, as far as can be seen
    database.committed = StoredOffset(0, None)
    with pytest.raises(TransactionStateError, match="committed after all"):
        world.claims.claim_in(message(-1), None)
    assert (world.calls[-1], world.tracker.claims) == ("doomed", {})
    assert world.tracker.aside == {}  # it is dealt with


def test_one_that_no_save_has_passed_yet_is_not_taken_for_committed() -> None:
    """What waited behind another of its key is delivered before anybody saved that it is aside."""
    world, database = in_database()
    world.tracker.aside[0] = waiting = Waiting(message(0), 0, None)
    world.tracker.ack(0)
    waiting.is_out = True
    database.committed = StoredOffset(0)
    world.claims.claim_in(message(0), None)
    world.claims.settle()
    assert not world.claims.rejected(message(0))
    assert list(world.tracker.aside) == [0]
    assert world.to_save() == [1]


def test_what_is_refused_because_a_failed_commit_was_one_is_dealt_with() -> None:
    world, database = in_database()
    world.claims.claim_in(message(0), None)
    assert not world.claims.rejected(message(0))
    database.committed, database.refusal = StoredOffset(1), TransactionStateError("1 is saved there")
    with pytest.raises(TransactionStateError):
        world.claims.claim_in(message(0), None)
    assert (world.tracker.position, world.tracker.claims) == (1, {})
