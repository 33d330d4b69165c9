"""A consumer's share, what transactions acknowledge of it, and their databases."""

from __future__ import annotations

from typing import Any

from tools.simulated.clock import SimClock
from tools.simulated.stand_in import AnyClass, StandIn
from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition, Waiting
from txmq.client.consumer.failures import Failures
from txmq.client.consumer.offsets.offset_store import BrokerOffsetStore, OffsetPosition, StoredOffset
from txmq.client.consumer.offsets.saver import OffsetSaver
from txmq.client.consumer.options import ConsumerOptions, ConsumerSettings
from txmq.client.consumer.transactional_acks import PendingAcks
from txmq.errors import StorageError
from txmq.model import Message, Outcome
from txmq.protocol.group_rows import OffsetRow
from txmq.runtime.logging import get_logger
from txmq.testing.eventually import eventually
from txmq.xid import TxId

SLOT = ("orders", 0)


def message(offset: int) -> Message:
    """A message at an offset."""
    return Message("orders", 0, offset, b"k", b"v", {}, None, 0, None)


def consumed(count: int = 5, first: int = 10) -> ConsumedPartition:
    """So many messages delivered."""
    made = ConsumedPartition(SLOT, 1, first, first)
    made.fetch = 1
    made.fetched(1, [message(first + number) for number in range(count)])
    assert len(made.take(count, 0.0)) == count
    return made


class Control:
    """The broker's answers to ``outcome``, in order; an exception is raised."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """Nothing was lost and found."""

    def call(self, verb: str, txid: str, *, extensions: dict[str, Any], timeout: float) -> bytes:
        """One answer; the last one again and again."""
        self.asked.append((f"{verb} {txid}", extensions))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Saver(OffsetSaver, AnyClass):
    """Writes down that a save was waited for; the one home of its consumer."""

    calls: list[str]

    def wait_saved(self) -> None:
        """Note it."""
        self.calls.append("waited")

    def more(self) -> None:
        """Nothing is fetched."""


class PendingAcksFixture:
    """A share with one partition, five messages of which are delivered; its client, and its pending acks.

    Attributes:
        dead_lettered: offsets of messages that became dead letters.
    """

    def __init__(self, *answers: bytes | Exception, store: Any = None) -> None:
        self.client = StandIn(clock=SimClock(), control=Control(*answers or (b"unknown\n",)))
        self.client.routes = StandIn(link_of_home=lambda _: self.client)
        settings = ConsumerSettings("g", ("orders",), "earliest", 5, ConsumerOptions(), offset_store=store)
        self.calls: list[str] = []
        self.share = AssignedPartitions(None, settings, self.client.clock, get_logger())
        contents = StandIn(remove=lambda *_: None)
        kept_in = store if store is not None else BrokerOffsetStore(lambda _: ())
        self.offsets = Saver(self.share, kept_in, contents, "g", get_logger())
        self.offsets.calls = self.calls
        self.pending_acks = PendingAcks(self.client, self.share, self.offsets, "g", store)
        self.dead_lettered: list[int] = []
        dead_letters = StandIn(dead_letter=lambda message, *_: self.dead_lettered.append(message.offset))
        contents = StandIn(store=lambda *_: None, update=lambda *_: None, remove=lambda *_: None)
        self.failures = Failures(
            self.share, contents, dead_letters, self.pending_acks, settings, self.client.clock, get_logger()
        )
        self.consumed = self.share.partitions[SLOT] = consumed(first=0)
        self.owner = object()

    def pending_ack(self, *offsets: int) -> None:
        """The transaction acknowledges these."""
        for offset in offsets:
            self.pending_acks.pending_ack(message(offset), self.owner)

    def reject(self, *offsets: int) -> None:
        """The application rejects these."""
        for offset in offsets:
            self.failures.failed(message(offset), "rolled back")

    def deliver_again(self) -> list[int]:
        """What is due within a minute, as it comes."""
        self.client.clock.advance(60.0)
        return [found.offset for found in self.consumed.take(10, self.client.clock.monotonic())]

    def look(self) -> list[OffsetRow]:
        """It is sent."""
        return self.pending_acks.look([self.consumed], self.owner)[1]

    def to_save(self) -> list[int]:
        """Offsets that would be saved now."""
        return [position.offset for position in self.offsets.to_save(everything=True)]

    def settled(self) -> None:
        """Wait for the thread that asks."""
        eventually(
            lambda: not (self.consumed.is_in_doubt and self.share.partitions),
            lambda: f"nothing is in doubt; asked: {self.client.control.asked}",
        )


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
        self.inside: StoredOffset | None = None
        self.is_under_way = False

    def connection_of(self, given: Any) -> Any:
        """As it is."""
        return given

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

    def settled(self, group: str, slot: tuple[str, int], connection: Any = None) -> StoredOffset | None:
        """What is committed when nothing is under way; or what the application's transaction sees."""
        if connection is not None:
            return self.inside
        if self.is_under_way:
            raise StorageError("lock wait")
        return self.saved(group, slot)

    def enter(self, group: str) -> None:
        """Nothing."""

    def load(self, group: str, slot: tuple[str, int], generation: int) -> StoredOffset | None:
        """Nothing."""

    def save(self, group: str, positions: Any) -> tuple[()]:
        """Nothing."""
        return ()

    def leave(self, group: str) -> None:
        """Nothing."""


def in_database() -> tuple[PendingAcksFixture, Database]:
    """A consumer whose offsets are in the application's database."""
    database = Database()
    world = PendingAcksFixture(store=database)
    database.calls = world.calls
    return world, database


def deferred(world: PendingAcksFixture, offset: int) -> str:
    """A message that was deferred, in the application's hands again; the text that is saved."""
    world.consumed.deferred[offset] = waiting = Waiting(message(offset), 1, None)
    waiting.is_out = True
    world.consumed.deferred_saved = text = f"[[{offset},1,null]]"
    return text
