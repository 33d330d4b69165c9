"""A consumer at the homes of its partitions: at each a member of the group, a fetcher and a saver of offsets.

Theory of operation. Each home hands out its own partitions, so the consumer joins the group once at each home, with a
view, generations and heartbeats of its own there. Every member has a thread, because a heartbeat waits at its broker,
and a home that is away must hold up no other. The consumer joins in the order of the homes' ids: at the next home when
a member has tried once at the one before. Homes that become known later are joined in the same way. A broker that is
alone is the one home.

A home computes the assignment over all partitions of a topic, and hands out its own. Which partitions a member has at
the other homes it hears from the member, so that ``sticky`` has the same result everywhere.

Invariants:
    * a home that is away costs its own partitions alone: they are given up after the session timeout;
    * a consumer that one home refuses leaves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.fetcher import ConsumerFetcher
from txmq.client.consumer.group_member import Assigned, ExclusiveGrant, GroupMember, GroupRequests, OtherHomes
from txmq.client.consumer.offsets.offset_store import BrokerOffsetStore, OffsetPosition, OffsetStore
from txmq.client.consumer.offsets.saver import OffsetSaver
from txmq.client.consumer.options import ConsumerSettings, MemberSettings
from txmq.client.consumer.partition_handover import Beginnings, Handover
from txmq.client.consumer.retry.deferred import DeferredMessages
from txmq.client.read_place import ReadPlace
from txmq.model import TopicPartition
from txmq.runtime.logging import Logger
from txmq.runtime.threads import Lock, new_lock, start_threads

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.consumer.transactional_acks import PendingAcks
    from txmq.client.home_link import HomeLink


class ConsumerHome(NamedTuple):
    """A consumer at one home."""

    link: HomeLink
    requests: GroupRequests
    fetcher: ConsumerFetcher
    offsets: OffsetSaver
    handover: Handover


class ConsumerHomes:
    """See the module's docstring. Thread safety: any thread.

    Args:
        store: the place of the offsets; None for the broker, where each home has those of its own partitions.
        enter: lets the consumer into it; see ``OtherHomes``.
    """

    def __init__(
        self, client: Client, assignment: AssignedPartitions, deferred: DeferredMessages, settings: ConsumerSettings,
        membership: MemberSettings, store: OffsetStore | None, log: Logger, enter: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._client, self._assignment, self._deferred = client, assignment, deferred
        self._settings, self._membership, self._store, self._log = settings, membership, store, log
        self._enter = enter
        self._acks: PendingAcks | None = None
        self._beginnings: Beginnings | None = None
        is_alone = membership.strategy == "exclusive" or (store is not None and not store.is_shared)
        self._grant = ExclusiveGrant(assignment, lambda: len(client.routes.links())) if is_alone else None
        self._homes: tuple[ConsumerHome, ...] = ()
        self._members: tuple[GroupMember, ...] = ()
        self._is_closing = False
        self._lock = Lock()
        self._saving = new_lock()  # of a store that all homes share

    # --- membership --------------------------------------------------------------------------------------------------

    def start(self, acks: PendingAcks) -> None:
        """Join the group: at the first home now, at the others one after another."""
        self._acks, self._beginnings = acks, Beginnings(self._client, self._membership)
        if self._settings.start != "earliest":
            self._beginnings.look()
        self.look()

    def look(self) -> None:
        """Join at one more home if there is one, or end everywhere; called by a member's thread after each try."""
        links = self._client.routes.links()  # without the lock: brokers may be asked
        with self._lock:
            if self._is_closing or self._acks is None:
                return
            if self._assignment.failure is not None:
                for member in self._members:
                    member.end()
                return
            joined = [home.link for home in self._homes]
            link = next((link for link in links if link not in joined), None)
            if link is not None:
                self._join(link, self._acks)

    def _join(self, link: HomeLink, acks: PendingAcks) -> None:
        home, number = self._open(link), len(self._members)
        others = OtherHomes(number, lambda: self._held_elsewhere(number), self.look, self._grant, self._enter)
        member = GroupMember(
            home.requests, self._client.clock, self._membership, home.handover, home.offsets, acks, others
        )
        self._members = (*self._members, member)
        member.start()

    def _held_elsewhere(self, number: int) -> frozenset[TopicPartition]:
        if len(self._homes) == 1 or self._membership.strategy != "sticky":
            return frozenset()
        with self._assignment.changed:
            held = self._assignment.partitions.values()
            return frozenset(one.slot for one in held if one.home != number and one.revoked_until is None)

    def stop(self, timeout: float) -> None:
        """Save everything, leave the group at every home and end the members' threads."""
        with self._lock:
            self._is_closing = True
        members = list(self._members)
        anchor = self._grant.anchor if self._grant is not None else None
        last = members.pop(anchor) if anchor is not None else None  # what it grants next begins at once
        if members:
            start_threads("txmq-leave", len(members), lambda: members.pop().stop(timeout))
        if last is not None:
            last.stop(timeout)

    def close(self) -> None:
        """End the fetchers and all connections."""
        with self._lock:
            self._is_closing = True
        for home in self._homes:
            home.fetcher.close()
            home.requests.close()

    def _open(self, link: HomeLink) -> ConsumerHome:
        assignment, settings, log, number = self._assignment, self._settings, self._log, len(self._homes)
        requests = GroupRequests(link.new_connection(), self._membership)
        unreadable = self._deferred.dead_letters.dead_letter_batch if settings.options.pass_unreadable else None
        place = self._read_place(link)
        fetcher = ConsumerFetcher(
            self._client, link.new_connection() if place is None else link.connection_to(place), assignment.changed,
            assignment.partitions, settings.options.buffer_size_bytes, log, number, unreadable,
        )  # fmt: skip
        fetcher.place = place
        store = BrokerOffsetStore(requests.save) if self._store is None else self._store
        saving = new_lock() if self._store is None else self._saving
        offsets = OffsetSaver(assignment, store, self._deferred, settings.saved_as, log, number, saving)
        handover = Handover(assignment, self._deferred, offsets, fetcher, self._client, settings, log, self._beginnings)
        if self._acks is None:
            fetcher.look_again = handover.look_again
        home = ConsumerHome(link, requests, fetcher, offsets, handover)
        self._homes = (*self._homes, home)
        fetcher.start()
        return home

    def _read_place(self, link: HomeLink) -> ReadPlace | None:
        read_from = self._settings.options.read_from
        if read_from == "leader":
            return None
        return ReadPlace(link, self._client.routes, self._client.clock, prefers_replicas=read_from == "replica")

    # --- a consumer without a group ----------------------------------------------------------------------------------

    def assigned(self, assigned: Assigned) -> None:
        """Begin to consume a partition that no home has handed out."""
        link = self._client.routes.link_for(*assigned.slot)
        with self._lock:
            known = next((home for home in self._homes if home.link is link), None)
            home = known or self._open(link)
        home.handover.assigned(assigned)

    def lost(self, slot: TopicPartition) -> None:
        """Consume a partition no longer."""
        self._assignment.lost(slot)

    # --- fetching and saving -----------------------------------------------------------------------------------------

    def more(self) -> None:
        """Fetch where there is room."""
        for home in self._homes:
            home.fetcher.more()

    def save(self, consumed: ConsumedPartition) -> Collection[TopicPartition]:
        """Save the offsets of a partition's home; see ``OffsetSaver.save``."""
        return self._homes[consumed.home].offsets.save()

    def wait_saved(self) -> None:
        """Wait for a save that began before this call in a store that all homes share."""
        with self._saving:
            pass

    def were_saved(self, positions: Iterable[OffsetPosition]) -> None:
        """Note that the group knows these positions."""
        self._homes[0].offsets.were_saved(positions)  # each home's does the same
