"""The members of one consumer group and what each may consume: a state machine without I/O or clock.

Theory of operation. A member names the topics it wants when it joins; an assignor (``registry/assignors``) says which
member *should* have which partition. A partition that another member should have is *revoked*: its owner is notified,
finishes the messages it has, saves its offset and releases the partition. Then the new owner gets it, under the next
generation. Partitions that stay are not touched, so their owners do not stop. An owner that leaves, or is silent for
its session timeout, loses all its partitions at once.

```
 free --settle: generation + 1--> owned --rebalance wants another--> revoked --release, leave, expiry--> free
                                    ^ |                                 |
                                    +-+---- rebalance wants it again ---+   (only while not released)
```

The strategy is asked about all partitions of a topic, also about those that other homes hand out (``elsewhere``): so a
member's share is the one that it should have of the whole. Two homes that see different members, or hear late what the
other one has handed out, differ in their shares for that time.

``PendingGroups`` has the heartbeats that wait, and the groups that must be looked at: in memory only, as members are.

Invariants:
    * a partition has one owner at a time, and a generation that grows with each change of ownership;
    * a generation is journaled before its owner hears of it (the caller's business);
    * ``version`` of a member changes exactly when what it may consume changed;
    * a tick in which nothing happened touches no group, member, topic or heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.state.deadlines import Deadlines
from txmq.model import TopicPartition
from txmq.registry.assignors import ASSIGNORS

View = tuple[
    list[tuple[TopicPartition, int]], list[TopicPartition]
]  # partitions a member may consume, with generations; partitions it must release
RECONNECT_MS = 1000
ANCHORS_MAX: Final = 100_000


@dataclass(slots=True)
class Member:
    """One consumer.

    Attributes:
        heard_ms: when its last request came, by the ``LivenessClock``.
        connection: the one that its last request came over.
        lost: that connection is gone; it has ``RECONNECT_MS`` to come back.
        version: of what it may consume.
        alone: it must be the only member, because no other one would find its offsets.
        topics_since: ``Topics.changes`` when it joined: a topic made later begins at its first message.
        incarnation: tells apart the processes that use the name one after another; "" if the member states none.
        seen, seen_version: its view, and the version of that: heartbeats ask again and again.
    """

    name: str
    topics: tuple[str, ...]
    timeout_ms: int
    heard_ms: int
    client: str = ""
    connection: int = 0
    lost: bool = False
    version: int = 1
    alone: bool = False
    topics_since: int = 1 << 62
    incarnation: str = ""
    seen: View | None = None
    seen_version: int = 0

    @property
    def silent_ms(self) -> int:
        """When it will have been silent for too long."""
        return self.heard_ms + (min(RECONNECT_MS, self.timeout_ms) if self.lost else self.timeout_ms)

    def is_of(self, incarnation: str) -> bool:
        """Whether a process that states this incarnation may speak for it."""
        return not (incarnation and self.incarnation) or incarnation == self.incarnation


@dataclass(slots=True)
class Owned:
    """The owner of a partition.

    Attributes:
        order: the owner's number of the newest offset it saved; a lower number comes too late.
    """

    member: str
    generation: int
    revoked: bool = False
    order: int = 0


@dataclass(slots=True)
class GroupMembership:
    """The members of one group, and the owners of its partitions.

    Attributes:
        strategy: the first member's choice; the others must agree.
        owned: the partitions of this home that have an owner.
        elsewhere: the owners of partitions of other homes, as members tell.
        anchor: if one member must have everything, over several homes: the home that says which one.
        holder, grant: that member, and the number under which it was granted everything; 0 if it was not yet.
        is_clean: the holder before it had left in order.
        is_changed: members or what they may have changed since it was last settled
            (``verbs/partition_handover``).
        topics_seen: how many changes of topics were seen then.
        look_ms: when the group is checked for silent members; 0 if no time is set.
        user: whose member was the first; empty: the group counts for nobody (``verbs/access/fair_share``).
    """

    strategy: str = "sticky"
    members: dict[str, Member] = field(default_factory=dict)
    owned: dict[TopicPartition, Owned] = field(default_factory=dict)
    elsewhere: dict[TopicPartition, str] = field(default_factory=dict)
    anchor: int | None = None
    holder: str = ""
    grant: int = 0
    is_clean: bool = False
    is_changed: bool = False
    topics_seen: int = -1
    look_ms: int = 0
    user: str = ""
    _wanted: dict[TopicPartition, str] = field(default_factory=dict)  # the member that should have it
    _partitions: dict[str, int] = field(default_factory=dict)
    _topic_ids: dict[str, int] = field(default_factory=dict)

    def join(self, member: Member, strategy: str, elsewhere: Iterable[TopicPartition] = ()) -> None:
        """Add a member, or let it come back with other wishes; ``elsewhere``: what it has at other homes."""
        if not self.members:
            self.strategy = strategy
        known = self.members.get(member.name)
        if known is not None:
            member.version = known.version + 1
            member.topics_since = min(member.topics_since, known.topics_since)
        self.members[member.name] = member
        self._tell_elsewhere(member.name, elsewhere)
        self._rebalance()

    def reclaim(self, name: str, slot: TopicPartition, generation: int) -> None:
        """A member that was there before the broker's restart still has a partition."""
        if slot not in self.owned:
            self.owned[slot] = Owned(name, generation)
            self._changed(name)

    def drop_all_but(self, name: str, reclaimed: Iterable[TopicPartition]) -> None:
        """A member that joins again has lost what it does not reclaim: it may be another process of that name."""
        kept = set(reclaimed)
        for slot in [slot for slot, owned in self.owned.items() if owned.member == name and slot not in kept]:
            del self.owned[slot]
            self._changed(name)

    def leave(self, name: str) -> None:
        """A member is gone: its partitions are free."""
        if self.members.pop(name, None) is not None:
            for slot in [slot for slot, owned in self.owned.items() if owned.member == name]:
                del self.owned[slot]
            self._tell_elsewhere(name, ())
            self._rebalance()

    def heard(self, name: str, now_ms: int) -> None:
        """A member lives."""
        member = self.members[name]
        member.heard_ms, member.lost = now_ms, False

    def lost(self, name: str, now_ms: int) -> None:
        """The connection is gone over which a member was last heard of."""
        member = self.members[name]
        member.heard_ms, member.lost = now_ms, True

    def expired(self, now_ms: int) -> list[str]:
        """Members that have been silent for too long."""
        return [member.name for member in self.members.values() if member.silent_ms <= now_ms]

    def release(self, name: str, slots: Iterable[TopicPartition]) -> None:
        """A member has stopped consuming these; only what was revoked from it becomes free."""
        for slot in slots:
            owned = self.owned.get(slot)
            if owned is not None and owned.member == name and owned.revoked:
                del self.owned[slot]
                self._changed(name)

    def has_elsewhere(self, name: str, slots: Iterable[TopicPartition], *, is_more: bool) -> None:
        """A member tells which partitions of other homes it has; with ``is_more`` besides those it has told of."""
        known = [slot for slot, member in self.elsewhere.items() if member == name] if is_more else []
        self._tell_elsewhere(name, [*known, *slots])
        self._rebalance()

    def _tell_elsewhere(self, name: str, slots: Iterable[TopicPartition]) -> None:
        for slot in [slot for slot, member in self.elsewhere.items() if member == name]:
            del self.elsewhere[slot]
        self.elsewhere |= dict.fromkeys(slots, name)

    def take_back(self, slot: TopicPartition) -> None:
        """Free a partition, so that it is handed over anew."""
        owned = self.owned.pop(slot, None)
        if owned is not None:
            self._changed(owned.member)

    def set_partitions(self, partitions: Mapping[str, int], topic_ids: Mapping[str, int]) -> None:
        """The topics that there are, how many partitions they have, and their ids: one made anew is another one."""
        if partitions != self._partitions or topic_ids != self._topic_ids:
            known, self._partitions, self._topic_ids = self._topic_ids, dict(partitions), dict(topic_ids)
            for slot in list(self.owned):
                topic, number = slot
                if number >= partitions.get(topic, 0) or known.get(topic, topic_ids[topic]) != topic_ids[topic]:
                    self._changed(self.owned.pop(slot).member)
            self._rebalance()

    def due(self) -> list[tuple[TopicPartition, str]]:
        """Free partitions, and the members that should have them."""
        return [(slot, member) for slot, member in self._wanted.items() if slot not in self.owned]

    def hand_over(self, slot: TopicPartition, member: str, generation: int) -> None:
        """A free partition gets its owner."""
        self.owned[slot] = Owned(member, generation)
        self._changed(member)

    def _changed(self, member: str) -> None:
        self.is_changed = True
        self.members[member].version += 1

    def granted(self) -> None:
        """The holder has another grant."""
        self._changed(self.holder)

    def view(self, name: str) -> View:
        """The partitions that a member may consume, with generations, and those that it must release."""
        member = self.members[name]
        if member.seen is None or member.seen_version != member.version:
            mine = [(slot, owned) for slot, owned in self.owned.items() if owned.member == name]
            mine.sort(key=itemgetter(0))
            kept = [(slot, owned.generation) for slot, owned in mine if not owned.revoked]
            member.seen = kept, [slot for slot, owned in mine if owned.revoked]
            member.seen_version = member.version
        return member.seen

    def _hold_all(self) -> None:
        if self.holder not in self.members:
            self.holder, self.grant, self.is_clean = min(self.members, default=""), 0, False
        wanted = [topic for topic in self._partitions if self.holder and topic in self.members[self.holder].topics]
        self._wanted = {(topic, n): self.holder for topic in wanted for n in range(self._partitions[topic])}

    def _rebalance(self) -> None:
        self.is_changed = True
        wishes = {member.name: member.topics for member in self.members.values()}
        current = {**self.elsewhere, **{slot: owned.member for slot, owned in self.owned.items()}}
        if self.anchor is None:
            self._wanted = ASSIGNORS[self.strategy](wishes, self._partitions, current)
        else:
            self._hold_all()
        for slot, owned in self.owned.items():
            revoked = self._wanted.get(slot) != owned.member
            if revoked is not owned.revoked:
                owned.revoked = revoked
                self._changed(owned.member)


class Beat:
    """A heartbeat that waits for its member's view to change."""

    __slots__ = ("client", "deadline_ms", "group", "incarnation", "is_answered", "member", "opaque", "view")

    def __init__(
        self, client: ClientConnection, opaque: bytes, group: str, member: str, view: int, deadline_ms: int,
        incarnation: str,
    ) -> None:  # fmt: skip
        self.client, self.opaque, self.group, self.member = client, opaque, group, member
        self.view, self.deadline_ms, self.incarnation = view, deadline_ms, incarnation
        self.is_answered = False


class PendingGroups:
    """Heartbeats that wait, and consumer groups that must be looked at.

    Attributes:
        unsettled: groups that are settled with the next tick: something could not be handed over, or one has no member.
        changed: groups whose members may have a new view.
        anchors: homes that the registry has fixed for groups: joining needs no registry then.
        left_in_order: groups whose holder left (``verbs/partition_handover``), and that have none since.
        topics_seen: how many changes of topics were seen.
        outdated: groups that have not seen all of them.
        silences: groups by the time at which a member may have been silent for too long (``LivenessClock``).
        over: heartbeats by the time at which they are answered in any case.
    """

    def __init__(self) -> None:
        self.unsettled: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self.anchors: dict[str, int] = {}
        self.left_in_order: set[str] = set()
        self.topics_seen = -1
        self.outdated: list[str] = []
        self.silences: Deadlines[tuple[str, GroupMembership]] = Deadlines(lambda look: not look[1].members)
        self.over: Deadlines[Beat] = Deadlines(lambda heartbeat: heartbeat.is_answered)
        self._heartbeats: dict[str, dict[Beat, None]] = {}

    def listen(self, name: str, membership: GroupMembership, at_ms: int) -> None:
        """Check the group for silent members at that time, or earlier if an earlier time is set."""
        if not 0 < membership.look_ms <= at_ms:
            membership.look_ms = at_ms
            self.silences.add(at_ms, (name, membership))

    def note_anchor(self, group: str, home: int) -> None:
        """The registry has told of a group's anchor; it stays until the group is deleted there, or it is lost."""
        if len(self.anchors) >= ANCHORS_MAX and group not in self.anchors:
            del self.anchors[next(iter(self.anchors))]
        self.anchors[group] = home

    def lost_anchor(self, home: int) -> None:
        """A home is given up: the groups that it was the anchor of choose another."""
        self.anchors = {group: anchor for group, anchor in self.anchors.items() if anchor != home}

    def forget(self, group: str) -> None:
        """The group is deleted."""
        self.anchors.pop(group, None)
        self.left_in_order.discard(group)

    def wait(self, heartbeat: Beat) -> None:
        """A heartbeat waits."""
        self._heartbeats.setdefault(heartbeat.group, {})[heartbeat] = None
        self.over.add(heartbeat.deadline_ms, heartbeat)

    def waiting(self, group: str) -> list[Beat]:
        """The heartbeats of a group that wait."""
        return list(self._heartbeats.get(group, ()))

    def answered(self, heartbeat: Beat) -> None:
        """It waits no more."""
        heartbeat.is_answered = True
        waiting = self._heartbeats.get(heartbeat.group, {})
        waiting.pop(heartbeat, None)
        if not waiting:
            self._heartbeats.pop(heartbeat.group, None)
