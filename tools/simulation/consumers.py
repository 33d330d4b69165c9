"""Programs that run txmq's real consumer: groups, retries, what is deferred, dead letters; and what must hold then.

A consumer's process dies at crash points and from outside, loses its local disk now and then, and is started again.
What it could not deal with waits in a file, in the retry topic, or goes to the dead letters at once. Checked is P8:
whatever lies below a saved offset was dealt with, is named as deferred, or is a dead letter; and, where messages of a
key wait for each other, that none was dealt with before an earlier one of its key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.images.node import Node
from txmq.client.client import Client
from txmq.client.consumer.options import DEAD_LETTERS_SUFFIX, ConsumerOptions
from txmq.client.consumer.retry.dead_letters import HEADER
from txmq.client.consumer.retry.deferred import parsed
from txmq.client.transaction.block import Transaction as Block
from txmq.errors import TxmqError
from txmq.log.batch import checksum
from txmq.model import Message, Outcome, TopicPartition

from .application import Application, Program
from .history import Shared
from .members import EXACT, OUTPUT, saved_offsets
from .threads import Threads, pause
from .world import Violation

GROUP = "real"
OWN = f"{GROUP}."  # topics that consumers make


@dataclass(slots=True)
class Dealt:
    """What all consumers did.

    Attributes:
        order: of a partition's offsets, the first time that each was dealt with, as a number that grows.
        keys: of what was delivered.
        keep_key_order: as all of them were told.
        folder: of their files.
    """

    folder: str
    keep_key_order: bool
    order: dict[TopicPartition, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    keys: dict[TopicPartition, dict[int, bytes | None]] = field(default_factory=lambda: defaultdict(dict))
    count: int = 0


def consumed_topics(shared: Shared) -> list[str]:
    """Those that are never deleted."""
    return sorted(name for name in shared.history.topics if name != "temporary")


class ConsumerProgram(Program):
    """One member of the group, with its local disk."""

    def __init__(self, shared: Shared, threads: Threads, name: str, dealt: Dealt) -> None:
        self._dealt = dealt
        self._file = Path(dealt.folder) / f"{name}.db"
        rng = shared.world.rng
        stores = [str(self._file), str(self._file), "topic"] + ([] if dealt.keep_key_order else [None])
        self._store = rng.choice(stores)
        self._disk: Any = None
        super().__init__(shared, threads, name)

    def _died(self) -> None:
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        if self.world.chance(0.3):
            for path in self._file.parent.glob(f"{self._file.name}*"):
                path.unlink()
            self.world.meet("a consumer's disk was lost")
        super()._died()

    def main(self) -> None:
        """One life."""
        client = self.client()
        consumer = None
        while consumer is None and not self.shared.stopping:
            try:
                consumer = self._consumer(client)
            except TxmqError:
                pause(0.05)
        if consumer is None:
            client.close()
            return
        while not self.shared.stopping:
            for message in consumer.poll(self.world.rng.randint(1, 5), timeout=0.1):
                with suppress(TxmqError):  # taken from it meanwhile, or the store refused
                    self._deal_with(message)
            pause(self.world.rng.uniform(0.0, 0.01))
        consumer.close()
        client.close()

    def _consumer(self, client: Client) -> Any:
        rng = self.world.rng
        options = ConsumerOptions(
            retry_delay=0.01, session_timeout=0.5, heartbeat_interval=0.05, deferred_delay=0.02, deferred_retries=2,
            offset_save_interval=rng.choice((0.02, 0.2)), keep_key_order=self._dealt.keep_key_order,
        )  # fmt: skip
        topics = consumed_topics(self.shared)
        consumer = client.consumer(
            GROUP, topics, max_retries=rng.randint(0, 2), retry_store=self._store, options=options
        )
        if self._store not in (None, "topic"):
            self._disk = consumer._deferred._store._database  # type: ignore[union-attr]
        return consumer

    def _deal_with(self, message: Message) -> None:
        place, value = (message.topic, message.partition), message.value or b""
        self._dealt.keys[place][message.offset] = message.key
        is_poison = checksum(value) % 12 == 0
        if is_poison or self.world.chance(0.1):
            self.world.meet("a message was rejected")
            message.reject("drawn")
            return
        if message.offset not in self._dealt.order[place]:
            self._dealt.count += 1
            self._dealt.order[place][message.offset] = self._dealt.count
        if self.world.chance(0.95):
            message.ack()
            self.world.meet("a message was acknowledged")


class ExactProgram(Application):
    """Consumes, and writes one message for each in the transaction that saves the offset: in the group ``exact``."""

    def main(self) -> None:
        """One life."""
        rng = self.world.rng
        producer, consumer = self._open(), None
        while consumer is None and not self.shared.stopping:
            with suppress(TxmqError):
                consumer = self._consumer()
            pause(0.02)
        while consumer is not None and not self.shared.stopping:
            self._given = consumer.poll(rng.randint(1, 4), timeout=0.1)
            if self._given:
                resources = rng.choice(([], [], [self._resource], self._banks))
                outcome = self._block(producer, resources)
                if outcome is Outcome.COMMITTED:
                    self.world.meet("a real consumer acknowledged in a transaction")
                for message in self._given if outcome is not Outcome.COMMITTED else ():
                    with suppress(TxmqError):
                        message.reject("not committed")
        if consumer is not None:
            consumer.close()
        self._close(producer)

    def _consumer(self) -> Any:
        options = ConsumerOptions(
            retry_delay=0.01, session_timeout=0.5, heartbeat_interval=0.05, offset_save_interval=0.05
        )
        return self._client.consumer(EXACT, consumed_topics(self.shared), max_retries=100_000, options=options)

    def _messages(self, block: Block) -> Iterator[tuple[str, int | None, bytes]]:
        for message in self._given:
            source = b"%b %d %d" % (message.topic.encode(), message.partition, message.offset)
            yield OUTPUT, 0, b"%b|%b" % (block.txid.encode(), source)
            block.ack(message)


def check_dealt(shared: Shared, dealt: Dealt) -> None:
    """What must hold at the end."""
    dead_lettered = _dead_lettered(shared.nodes())
    if any(dead_lettered.values()):
        shared.world.meet("a message became a dead letter")
    for place, at in saved_offsets(shared, GROUP):
        deferred = parsed(at.deferred)
        if deferred:
            shared.world.meet("a message is deferred")
        known = dealt.order[place].keys() | deferred.keys() | dead_lettered[place]
        # Relaxed ``sync`` may lose a dead letter that was acknowledged; its offset was saved after the restart.
        if (gap := set(range(at.offset)) - known) and not shared.may_forget:
            raise Violation(f"P8: {place}: {min(gap)} was passed over, saved {at.offset}, deferred {sorted(deferred)}")
        if dealt.keep_key_order:
            _check_key_order(place, dealt, dead_lettered[place])


def _dead_lettered(nodes: list[Node]) -> dict[TopicPartition, set[int]]:
    found: dict[TopicPartition, set[int]] = defaultdict(set)
    for node in nodes:
        for partition in node.state.all_partitions():
            for message in node.messages(partition) if partition.topic == GROUP + DEAD_LETTERS_SUFFIX else ():
                words = {name: message.headers[HEADER + name].decode() for name in ("topic", "partition", "offset")}
                found[words["topic"], int(words["partition"])].add(int(words["offset"]))
    return found


def _check_key_order(place: TopicPartition, dealt: Dealt, dead_lettered: set[int]) -> None:
    newest: dict[bytes, tuple[int, int]] = {}  # by key: (number, offset) of what was dealt with last of those before
    order = dealt.order[place]
    for offset, key in sorted(dealt.keys[place].items()):
        if key is None or offset in dead_lettered or offset not in order:
            continue
        number = order[offset]
        if number < newest.get(key, (0, 0))[0]:
            raise Violation(f"P7: {place}: {offset} of {key!r} was dealt with before {newest[key][1]}")
        newest[key] = (number, offset)
