"""Members of consumer groups: they join, consume, save, sleep through hand-overs, leave; and what must hold then.

The members of ``plain`` save what they have dealt with; those of ``exact`` write one message for each that they
consume and save the offset in the same transaction. One that sends its heartbeats in time stays a member, also while
the broker is stopped for longer than that. Checked are P8 (docs/promises.md) and acks in transactions: no gap below a
saved offset, no saved offset that goes back, none of a fenced generation, and for ``exact`` one message for
each input below the saved offset, none above it, and never two.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from txmq.broker.state.group_offsets import Saved
from txmq.log import records
from txmq.model import TopicPartition
from txmq.protocol.group_rows import GroupOffsets, OffsetRow, encode_offsets

from .client import Client, Reply, Steps
from .history import Shared, Transaction
from .world import Violation

OUTPUT = "outputs"  # a topic that nobody consumes
PLAIN, EXACT = "plain", "exact"
TIMEOUT_MS = 300
HEARTBEAT_S_MAX = 0.25  # between two heartbeats; with the time under way it is heard of before its time is over
GROUPS = (PLAIN, EXACT)


@dataclass(slots=True)
class Held:
    """A partition that a member believes to be its own.

    Attributes:
        next: the first offset that it has not dealt with.
        saved: the newest one that it has been told is saved.
    """

    generation: int
    next: int
    saved: int


@dataclass(slots=True)
class Consumption:
    """What all members did, and were told.

    Attributes:
        done: offsets that members of ``plain`` dealt with.
        saved: by group and partition, (generation, offset) of the newest one that somebody was told is saved.
    """

    done: dict[TopicPartition, set[int]] = field(default_factory=lambda: defaultdict(set))
    saved: dict[tuple[str, TopicPartition], tuple[int, int]] = field(default_factory=dict)


class Member(Client):
    """One consumer: scripted, as a foreign client would be."""

    def __init__(self, shared: Shared, consumption: Consumption, name: str, group: str) -> None:
        self.consumption, self.group = consumption, group
        self.held: dict[TopicPartition, Held] = {}
        self.view = self.order = 0
        self.joined_on: object = None
        self._heartbeat_at = 0.0  # when it sent what it was heard with
        self._to_release: list[TopicPartition] = []
        self._offsets = b""
        self._source: list[tuple[str, int, int]] = []
        self.last: Transaction
        super().__init__(shared, name)

    def main(self) -> Steps:
        """Until the world stops."""
        rng = self.world.rng
        while not self.shared.stopping:
            yield from self.connected()
            if self.joined_on is not self.link:
                yield from self._join()
            elif rng.random() < 0.3:
                yield from self._heartbeat()
            elif rng.random() < 0.03:
                self.world.meet("a member slept")
                yield rng.uniform(0.2, 0.6)  # and acts then on what it believes
            elif rng.random() < 0.03:
                yield from self._leave()
            else:
                yield from self._consume()
            yield rng.uniform(0.0, 0.02)
        yield from self._leave()

    # --- the group ---

    def _join(self) -> Steps:
        rng = self.world.rng
        topics = sorted(name for name in self.shared.history.topics if name != "temporary")
        pending_acks = (
            [[*place, held.generation] for place, held in sorted(self.held.items())] if rng.random() < 0.7 else []
        )
        if not pending_acks:
            self.held = {}  # another process of that name
        given: dict[str, str | int | None] = {
            "member": self.name, "topics": ",".join(topics), "timeout": TIMEOUT_MS,
        }  # fmt: skip
        link, now = self.link, self.world.now
        reply = yield from self._ask("join", given, pending_acks)
        if reply is not None and reply[0] == 200:
            self.joined_on, self._heartbeat_at = link, now
            self._see(reply)

    def _heartbeat(self) -> Steps:
        revoked: list[list[object]] = [list(place) for place in self._to_release]
        for place in self._to_release:
            self.held.pop(place, None)
        link, now = self.link, self.world.now
        reply = yield from self._ask("heartbeat", {"member": self.name}, revoked)
        if reply is not None and reply[0] == 200:
            self._heartbeat_at = now
            self._see(reply)
        elif reply is not None and reply[0] == 404:
            self.joined_on = None
            if link is not None and not link.has_stalled and now - self._heartbeat_at < HEARTBEAT_S_MAX:
                raise Violation(f"{self.name} is not known, {now - self._heartbeat_at:.3f} s after it was heard of")

    def _leave(self) -> Steps:
        yield from self._ask("leave", {"member": self.name}, [])
        self.held, self.joined_on = {}, None

    def _ask(
        self, action: str, given: dict[str, str | int | None], rows: list[list[object]]
    ) -> Generator[float | bytes, Reply, Reply]:
        return self.ask("group", action, self.group, extensions=given, body=json.dumps(rows).encode())

    def _see(self, reply: Reply) -> None:
        """A view: what is new begins where the group has saved."""
        assert reply is not None
        view = json.loads(reply[1])
        self._to_release = [(topic, partition) for topic, partition in view["revoked"]]
        mine: dict[TopicPartition, Held] = {}
        for topic, partition, generation, offset, _ in view["assigned"]:
            place = (topic, partition)
            known = self.held.get(place)
            if known is not None and known.generation == generation:
                mine[place] = known
                continue
            self._require_not_forgotten(place, generation, offset or 0)
            mine[place] = Held(generation, offset or 0, offset or 0)
            self.world.meet("a partition was handed over")
        for place in self._to_release:
            if place in self.held:
                mine[place] = self.held[place]
        self.held = mine

    def _require_not_forgotten(self, place: TopicPartition, generation: int, offset: int) -> None:
        told = self.consumption.saved.get((self.group, place))
        if told is not None and generation > told[0] and offset < told[1] and not self.shared.may_forget:
            raise Violation(f"P8: {self.group} {place}: saved {told} (generation, offset), now {(generation, offset)}")

    # --- consuming ---

    def _consume(self) -> Steps:
        if not self.held:
            return
        place = self.world.rng.choice(sorted(self.held))
        held = self.held[place]
        reply = yield from self.ask("get", *place, held.next, 4096)
        if reply is None or reply[0] != 200:
            return
        given = [m.offset for m in records.decode(reply[1], *place) if m.offset >= held.next]
        given = given[: self.world.rng.randint(1, 4)]
        if not given or self.held.get(place) is not held:
            return
        if given[0] != held.next:
            raise Violation(f"P2: {place} asked for {held.next}, got {given[0]}")
        if self.group == EXACT:
            yield from self._write(place, held, given)
            return
        self.consumption.done[place].update(given)
        held.next = given[-1] + 1
        if self.world.chance(0.6):
            yield from self._save(place, held)

    def _save(self, place: TopicPartition, held: Held) -> Steps:
        self.order += 1
        offset = held.next
        row: list[object] = [*place, held.generation, offset, None]
        reply = yield from self._ask("save", {"member": self.name, "order": self.order}, [row])
        if reply is None or reply[0] != 200:
            return
        if json.loads(reply[1])["refused"]:
            self.world.meet("a fenced save was refused")
            self.held.pop(place, None)
        else:
            self._told(place, held, offset)
            self.world.meet("an offset was saved")

    def _told(self, place: TopicPartition, held: Held, offset: int) -> None:
        known = self.consumption.saved.get((self.group, place), (0, 0))
        self.consumption.saved[self.group, place] = max(known, (held.generation, offset))
        held.saved = max(held.saved, offset)

    def _write(self, place: TopicPartition, held: Held, given: list[int]) -> Steps:
        """One message for each, and the offset, in one transaction."""
        self.order += 1
        offset = given[-1] + 1
        row = OffsetRow(*place, held.generation, offset, None)
        self._offsets = encode_offsets([GroupOffsets(self.group, self.order, (row,))])
        self._source = [(*place, offset) for offset in given]
        yield from self.last_resource() if self.world.chance(0.3) else self.local()
        transaction, self._offsets = self.last, b""
        if transaction.told == "committed":
            self.world.meet("an offset was saved by a transaction")
            self._told(place, held, offset)
            held.next = offset
        elif transaction.told == "unknown":
            self.held.pop(place, None)
            self.joined_on = None

    def begin(self) -> Transaction:
        """One output for each message that is consumed; the attempt's id tells them apart."""
        txid = self.next_txid()
        values = tuple(b"%b|%b %d %d" % (txid.encode(), t.encode(), p, o) for t, p, o in self._source)
        self.last = self.shared.history.transactions[txid] = Transaction(txid, [((OUTPUT, 0), values)])
        return self.last

    def request(
        self, transaction: Transaction, streamed: int, keys: str = ""
    ) -> tuple[dict[str, str | int | None], bytes]:
        """With the offsets in front of the parts."""
        extensions, body = super().request(transaction, streamed, keys)
        return extensions | {"offsets": len(self._offsets)}, self._offsets + body

    def refused(self, reply: tuple[int, bytes]) -> None:
        """A fenced ack rolls its transaction back."""
        if reply[0] == 409:
            self.world.meet("a fenced ack rolled its transaction back")
            self.held.clear()
            self.joined_on = None


def saved_offsets(shared: Shared, group: str) -> Iterator[tuple[TopicPartition, Saved]]:
    """What the brokers have of a group."""
    for node in shared.nodes():
        known = node.state.saved.named.get(group)
        for (topic_id, partition), saved in (known.offsets if known is not None else {}).items():
            topic = node.state.topics.with_id(topic_id)
            assert topic is not None, "no topic that is consumed is deleted"
            yield (topic.config.name, partition), saved


def check_groups(shared: Shared, consumption: Consumption, visible: dict[bytes, tuple[TopicPartition, int]]) -> None:
    """What must hold at the end."""
    weak = shared.may_forget
    outputs: Counter[tuple[TopicPartition, int]] = Counter()
    for value in visible:
        _, bar, source = value.partition(b"|")
        if bar:
            words = source.split()
            outputs[(words[0].decode(), int(words[1])), int(words[2])] += 1
    if twice := [key for key, count in outputs.items() if count > 1]:
        raise Violation(f"P6: consumed twice in transactions: {twice[:5]}")
    for group in GROUPS:
        for place, saved in saved_offsets(shared, group):
            told = consumption.saved.get((group, place), (0, 0))[1]
            if saved.offset < told and not weak:
                raise Violation(f"P8: {group} {place}: told {told}, saved {saved.offset}")
            done = consumption.done[place] if group == PLAIN else {o for p, o in outputs if p == place}
            if gap := set(range(saved.offset)) - done:
                raise Violation(f"P8: {group} {place}: {min(gap)} was passed over, saved {saved.offset}")
            if group == EXACT and (early := [o for o in done if o >= saved.offset]):
                raise Violation(f"P2: {place}: {early[0]} was consumed, saved is {saved.offset}")
