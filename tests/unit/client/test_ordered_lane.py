"""One partition of an ordered producer, against a partition in memory that numbers as the broker does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from txmq.client.ordered_lane import Lane
from txmq.client.ordered_sessions import Sessions, stamped
from txmq.client.spool import Identity, Pin, Place, Spool
from txmq.errors import (
    ConnectionLostError,
    DiskFullError,
    FencedError,
    SequenceError,
    TooLargeError,
    TxmqError,
    UnavailableError,
)
from txmq.log import records
from txmq.log.batch import HEADER
from txmq.model import PartitionRange
from txmq.runtime.sim_clock import SimClock

PLACE = ("t", 0)
Step = str | BaseException
STEPS: list[Step] = [
    "store", "lose", ConnectionLostError("lost"), UnavailableError("stopping"), DiskFullError("full")
]  # fmt: skip


class Answer:
    """What a request came to."""

    def __init__(self, outcome: bytes | BaseException) -> None:
        self._outcome = outcome

    def result(self) -> bytes:
        """As ``Reply``."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class Partition:
    """A partition, its sessions and the way to it; each step of ``plan`` decides over the next request."""

    in_flight_max = 8

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.known: dict[tuple[int, int], tuple[int, int]] = {}  # session, sequence -> CRC, offset
        self.following: dict[int, int] = {}
        self.session = 1
        self.ended: set[int] = set()
        self.start = 0
        self.plan: list[Step] = []
        self.refuses: Callable[[bytes], bool] = lambda _: False

    def current(self, _deadline: float) -> Identity:
        """As ``Sessions``."""
        return Identity(1, 1, self.session, 0)

    def renew(self, identity: Identity, _deadline: float) -> None:
        """As ``Sessions``."""
        if identity.session == self.session:
            self.session += 1

    def start_(self, pin: Pin, content: bytes) -> Answer:
        step = self.plan.pop(0) if self.plan else "store"
        session = pin.identity.session
        if not isinstance(step, str):
            return Answer(step)
        if session in self.ended:
            return Answer(FencedError("gone"))
        batch = stamped(content, pin)
        crc = HEADER.unpack_from(batch)[4]
        known = self.known.get((session, pin.sequence))
        if known is not None:
            return Answer(b"%d" % known[1] if known[0] == crc else SequenceError("another batch"))
        if pin.sequence != self.following.get(session, 0):
            return Answer(SequenceError("a gap"))
        if self.refuses(content):
            return Answer(TooLargeError("poison"))
        self.known[session, pin.sequence] = crc, len(self.stored)
        self.following[session] = pin.sequence + 1
        self.stored.append(bytes(batch))
        return Answer(ConnectionLostError("no answer") if step == "lose" else b"%d" % (len(self.stored) - 1))

    def offsets(self, topic: str, partition: int) -> PartitionRange:
        """As ``Client``."""
        return PartitionRange(topic, partition, self.start, len(self.stored))

    def fetch_raw(self, _topic: str, _partition: int, offset: int, *_: object) -> bytes:
        """As ``Client``."""
        batch = bytearray(self.stored[offset])
        HEADER.pack_into(batch, 0, offset, *HEADER.unpack_from(batch)[1:])
        return bytes(batch)

    @property
    def values(self) -> list[bytes | None]:
        """What a reader sees."""
        return [records.decode(bytearray(batch), "t", 0)[0].value for batch in self.stored]


class World:
    """A lane, its spool and its partition."""

    def __init__(self, path: Path) -> None:
        self.partition, self.clock = Partition(), SimClock()
        self.spool = Spool(path)
        self.lane = self.life()

    def life(self) -> Lane:
        """The lane of a new process."""
        partition = self.partition

        class Way:
            in_flight_max = partition.in_flight_max
            current, renew = partition.current, partition.renew

            @staticmethod
            def start(pin: Pin, _place: Place, content: bytes, _deadline: float) -> Answer:
                return partition.start_(pin, content)

            @staticmethod
            def reconnect() -> None:
                pass

        sessions = cast(Sessions, Way())
        self.lane = Lane(
            PLACE, self.spool, sessions, cast(Any, partition), self.clock, attempts_max=2, visibility_wait_s=0
        )
        return self.lane

    def send(self, value: bytes) -> int | None:
        """Send a message of this value."""
        return self.lane.send(bytes(records.encode([(None, value, (), 1)])), 1.0)

    def drain(self, rounds: int = 20) -> None:
        """Flights until the spool is empty."""
        for _ in range(rounds):
            if not self.spool.count(PLACE):
                return
            try:
                self.lane.flight(1.0)
            except TxmqError:
                continue
        pytest.fail(f"{self.spool.count(PLACE)} left: {self.spool.entries()}")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.spool.close()


def test_direct_sending_goes_on_only_when_the_spool_is_empty(world: World) -> None:
    assert world.send(b"0") == 0
    world.partition.plan = [DiskFullError("full")]
    assert world.send(b"1") is None
    assert world.send(b"2") is None
    world.drain()
    assert world.send(b"3") == 3
    assert world.partition.values == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("step", ["lose", UnavailableError("stopping"), ConnectionLostError("lost")])
@pytest.mark.parametrize("dies", [False, True])
def test_what_was_not_answered_is_stored_once(world: World, step: str | TxmqError, dies: bool) -> None:
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


@pytest.mark.parametrize("step", ["lose", ConnectionLostError("lost")])
def test_an_interrupt_leaves_the_message_with_its_number(world: World, step: str | TxmqError) -> None:
    world.send(b"0")
    world.partition.plan = ["lose" if step == "lose" else step]
    original = world.partition.start_

    def interrupted(pin: Pin, content: bytes) -> Answer:
        original(pin, content)
        return Answer(KeyboardInterrupt())

    world.partition.start_ = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.send(b"1")
    world.partition.start_ = original  # type: ignore[method-assign]
    assert world.send(b"2") is None
    world.drain()
    assert world.partition.values == [b"0", b"1", b"2"]


@pytest.mark.parametrize("lost", range(6))
def test_a_flight_cut_short_anywhere_is_sent_again_by_the_same_numbers(world: World, lost: int) -> None:
    world.partition.plan = [DiskFullError("full")]
    for number in range(6):
        world.send(b"%d" % number)
    world.partition.plan = ["store"] * lost + ["lose"] + [ConnectionLostError("lost")] * 5
    with pytest.raises(ConnectionLostError):
        world.lane.flight(1.0)
    world.partition.session += 1  # the process was killed
    world.life()
    world.drain()
    assert world.partition.values == [b"%d" % number for number in range(6)]


def test_poison_is_parked_behind_its_last_attempt_and_the_rest_takes_its_number(world: World) -> None:
    world.partition.plan = [DiskFullError("full")]
    for value in (b"1", b"poison", b"2", b"3"):
        world.send(value)
    world.partition.refuses = lambda content: b"poison" in content
    world.lane._visibility_wait_s = 35.0  # the numbers have to fit without asking the log
    world.drain()
    (parked,) = world.spool.parked()
    assert parked.reason == "refused 2 times: poison"
    assert world.send(b"4") == 3
    assert world.partition.values == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("step", ["lose", ConnectionLostError("lost")])
def test_the_log_tells_what_became_of_a_message_whose_session_is_gone(world: World, step: str | TxmqError) -> None:
    world.send(b"0")
    world.partition.plan = [step]
    world.send(b"1")
    world.send(b"2")
    world.partition.ended.add(1)
    world.partition.session = 2
    world.drain()
    assert world.partition.values == [b"0", b"1", b"2"]
    assert world.spool.parked() == []


def test_where_the_log_cannot_tell_the_message_is_parked_and_not_guessed(world: World) -> None:
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


def test_the_log_is_read_only_when_everything_stored_is_visible(world: World) -> None:
    world.lane._visibility_wait_s = 35.0
    world.partition.plan = [ConnectionLostError("lost")]
    world.send(b"1")
    world.partition.ended.add(1)
    world.partition.session = 2
    for _ in range(2):
        with pytest.raises(FencedError):
            world.lane.flight(1.0)
        assert world.partition.values == []
    world.clock.sleep(35.0)
    world.drain()
    assert world.partition.values == [b"1"]


def test_a_row_that_is_damaged_is_parked_and_not_sent(world: World) -> None:
    world.spool.append(PLACE, b"\0" * 70, 1)
    world.send(b"1")
    world.drain()
    assert "damaged in the spool" in world.spool.parked()[0].reason
    assert world.partition.values == [b"1"]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_fails_nothing_is_lost_repeated_or_reordered(world: World, seed: int) -> None:
    # Kept in memory: what is tested is the lane, and 60 files that are synced at each step take a minute.
    world.spool._database.execute("PRAGMA synchronous=OFF")
    chance = Random(seed)
    told = []
    for number in range(40):
        happens = chance.random()
        if happens < 0.3:
            world.partition.plan = [chance.choice(STEPS) for _ in range(chance.randrange(1, 12))]
        elif happens < 0.4:
            world.partition.session += 1
            world.life()
        elif happens < 0.45:
            world.partition.ended.add(world.partition.session)
            world.partition.session += 1
        elif happens < 0.7:
            with suppress(TxmqError):
                world.lane.flight(1.0)
        value = b"%d" % number
        world.partition.refuses = lambda content: b"poison" in content
        if chance.random() < 0.1 and world.spool.count(PLACE):
            world.send(b"poison")
        world.send(value)
        told.append(value)
    world.partition.plan = []
    world.drain(400)
    assert world.partition.values == told
