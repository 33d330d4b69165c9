"""A lane of an ordered producer over a partition in memory that numbers as the broker does, and the way to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tools.simulated.clock import SimClock
from txmq.client.producer.core import ProducerLimits
from txmq.client.spooling.direct_or_spooled import PartitionQueue
from txmq.client.spooling.direct_sender import OrderedSender
from txmq.client.spooling.spool import AssignedSequence, Spool, SpoolIdentity
from txmq.client.spooling.spool_homes import Sessions, stamped
from txmq.client.transaction.homes import PendingCommits
from txmq.client.transport.connection import Connection, Pending, Waiter
from txmq.errors import (
    BrokerError,
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
from txmq.model import PartitionRange, SendResult, TopicPartition
from txmq.runtime.threads import Future

PARTITION = ("t", 0)
OTHERS = b"of another producer"
Step = str | BaseException
STEPS: list[Step] = [
    "store", "lose", "hide", ConnectionLostError("lost"), UnavailableError("stopping"), DiskFullError("full")
]  # fmt: skip
Outcome = bytes | BaseException


class Answer:
    """The result of a request of a flight."""

    def __init__(self, outcome: Outcome) -> None:
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
        self.stored: list[tuple[int, bytes]] = []  # base offset, batch
        self.end = 0
        self.known: dict[tuple[int, int], tuple[int, int]] = {}  # session, sequence -> CRC, offset
        self.following: dict[int, int] = {}
        self.session = 1
        self.ended: set[int] = set()
        self.start = 0
        self.epoch = 1  # of the broker's incarnation
        self.held_at: int | None = None  # what is stored from here on is not visible yet
        self.plan: list[Step] = []
        self.refuses: Callable[[bytes], bool] = lambda _: False

    def put(self, batch: bytes) -> Outcome:
        """As a broker: by session and sequence."""
        step = self.plan.pop(0) if self.plan else "store"
        fields = HEADER.unpack_from(batch)
        crc, session, sequence, count = fields[4], fields[9], fields[11], fields[12]
        if not isinstance(step, str):
            return step
        if session in self.ended:
            return FencedError("gone")
        known = self.known.get((session, sequence))
        if known is not None:
            return b"%d" % known[1] if known[0] == crc else SequenceError("another batch")
        if sequence != self.following.get(session, 0):
            return SequenceError("a gap")
        if self.refuses(batch):
            return TooLargeError("poison")
        self.known[session, sequence] = crc, self.end
        self.following[session] = sequence + count
        self.stored.append((self.end, bytes(batch)))
        self.end += count
        if step == "hide":
            return UnavailableError("stopping, and it is stored")
        return ConnectionLostError("no answer") if step == "lose" else b"%d" % (self.end - count)

    def offsets(self, topic: str, partition: int) -> PartitionRange:
        """As ``Client``."""
        return PartitionRange(topic, partition, self.start, self.end if self.held_at is None else self.held_at)

    def stats(self) -> str:
        """As ``Client``."""
        return f"broker b\nepoch {self.epoch}\n"

    def fetch_raw(self, _topic: str, _partition: int, offset: int, *_: object) -> bytes:
        """As ``Client``."""
        base, stored = next(item for item in reversed(self.stored) if item[0] <= offset)
        batch = bytearray(stored)
        HEADER.pack_into(batch, 0, base, *HEADER.unpack_from(batch)[1:])
        return bytes(batch)

    def made_anew(self) -> None:
        """The topic was deleted, and made again: it knows no numbers."""
        self.stored, self.end = [], 0
        self.known, self.following = {}, {}

    def others(self, count: int) -> None:
        """So many messages of another producer."""
        for _ in range(count):
            self.stored.append((self.end, bytes(records.encode([(None, OTHERS, (), 1)]))))
            self.end += 1

    @property
    def own(self) -> list[bytes | None]:
        """What a reader sees of ours."""
        return [value for value in self.values if value != OTHERS]

    @property
    def values(self) -> list[bytes | None]:
        """What a reader sees."""
        return [message.value for _, batch in self.stored for message in records.decode(bytearray(batch), "t", 0)]


class FakeLink:
    """A link to the partition: what is put is answered when somebody waits."""

    def __init__(self, partition: Partition, clock: SimClock, session: int) -> None:
        self._partition, self._clock, self.session = partition, clock, session
        self.failure: TxmqError | None = None
        self.used_at = clock.monotonic()
        self.has_unsent = False
        self.interrupts = self.is_silent = False
        self._answers: list[tuple[Pending, Outcome]] = []

    def put(self, pending: Pending, _topic: bytes, _partition: int, batch: bytearray, _topic_id: int) -> None:
        """As ``Connection``."""
        if self.failure is not None:
            raise self.failure
        outcome = self._partition.put(bytes(batch))
        if not self.is_silent:
            self._answers.append((pending, outcome))

    def wait(self, waiter: Waiter, deadline: float) -> None:
        """As ``Connection``."""
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        while self._answers and not waiter.done:
            pending, outcome = self._answers.pop(0)
            if isinstance(outcome, BrokerError):
                pending.answered(outcome.code, f"{outcome.wire_name} {outcome}".encode())
            elif isinstance(outcome, TxmqError):
                self._answers.insert(0, (pending, outcome))
                self.fail(outcome)
                return
            elif isinstance(outcome, bytes):
                pending.answered(200, outcome)
        if not waiter.done:
            self._clock.sleep(max(0.0, deadline - self._clock.monotonic()))

    def fail(self, error: TxmqError) -> None:
        """As ``Connection``."""
        if self.failure is None:
            self.failure = error
            lost, self._answers = self._answers, []
            for pending, _ in lost:
                pending.lost(error)

    def is_stale(self) -> bool:
        """As ``Connection``."""
        return self.failure is not None


class Way:
    """The sessions of one life."""

    main = None

    def __init__(self, partition: Partition, clock: SimClock) -> None:
        self._partition, self._clock = partition, clock
        self.link = FakeLink(partition, clock, partition.session)
        self.in_flight_max = partition.in_flight_max
        self.is_away = False

    def bound(self, _deadline: float) -> tuple[Connection, SpoolIdentity, int]:
        """As ``Sessions``."""
        if self.is_away:
            raise ConnectionLostError("away")
        session = self._partition.session
        if self.link.failure is not None or self.link.session != session:
            self.link.fail(ConnectionLostError("another session"))
            self.link = FakeLink(self._partition, self._clock, session)
        return cast(Connection, self.link), SpoolIdentity(1, 1, session, 0), self.in_flight_max

    def current(self, deadline: float) -> SpoolIdentity:
        """As ``Sessions``."""
        return self.bound(deadline)[1]

    def renew(self, identity: SpoolIdentity, _deadline: float) -> None:
        """As ``Sessions``."""
        if identity.session == self._partition.session:
            self._partition.session += 1
            self.link.fail(ConnectionLostError("the session was given up"))

    def start(
        self, assigned: AssignedSequence, _partition: TopicPartition, content: bytes, _deadline: float, _topic_id: int
    ) -> Answer:  # fmt: skip
        """As ``Sessions``."""
        if self.is_away:
            raise ConnectionLostError("away")
        return Answer(self._partition.put(bytes(stamped(content, assigned))))

    def reconnect(self) -> None:
        """As ``Sessions``."""
        self.link.fail(ConnectionLostError("another connection took over"))


class QueueHome:
    """The only home."""

    def __init__(self, sender: OrderedSender, sessions: Sessions, partition: Partition) -> None:
        self.sender, self.sessions = sender, sessions
        self.stats = partition.stats
        self.commits = PendingCommits(SimClock())


class QueueFixture:
    """A lane, its spool and its partition; the keeper's work is done at once, by whoever calls for it."""

    def __init__(self, path: Path, spool: Spool | None = None) -> None:
        self.partition, self.clock = Partition(), SimClock()
        self.spool = Spool(path) if spool is None else spool
        self.life()

    def life(self) -> None:
        """The lane of a new process."""
        partition = self.partition
        self.way = Way(partition, self.clock)
        sessions = cast(Sessions, self.way)
        self.sender = OrderedSender(sessions, self.clock, ProducerLimits(), self._keep)
        self.sender._start_background = lambda: None  # type: ignore[method-assign]
        self.home = QueueHome(self.sender, sessions, partition)
        self.queue = PartitionQueue(
            PARTITION, self.spool, cast(Any, self), cast(Any, partition), self.clock, attempts_max=2,
            visibility_wait_s=0,
        )  # fmt: skip

    def known(self, _partition: TopicPartition) -> QueueHome:
        """As ``SpoolHomes``."""
        return self.home

    owner = known

    def corrected(self, topic: str) -> None:
        """As ``SpoolHomes``."""
        raise AssertionError(f"{topic} has one home")

    def _keep(self) -> None:
        self.queue.take_over(self.clock.monotonic() + 1.0)

    def send(self, value: bytes) -> int | None:
        """Send a message of this value; its offset, or None where it was spooled."""
        return self.queue.send((None, value, (), 1), self.clock.monotonic() + 1.0).offset

    def send_async(self, value: bytes) -> Future[SendResult]:
        """The same, without waiting."""
        return self.queue.send_async((None, value, (), 1), self.clock.monotonic() + 1.0)

    def land(self) -> None:
        """Wait for everything that was sent without waiting."""
        self.sender.flush(self.clock.monotonic() + 60.0)
        while self.sender._completed:
            self.sender._completed.popleft().complete_futures()

    def drain(self, rounds: int = 20) -> None:
        """Flights until the spool is empty."""
        for _ in range(rounds):
            if not self.spool.count(PARTITION):
                return
            try:
                self.queue.drain(self.clock.monotonic() + 1.0)
            except TxmqError:
                continue
        pytest.fail(f"{self.spool.count(PARTITION)} left: {self.spool.entries()}")
