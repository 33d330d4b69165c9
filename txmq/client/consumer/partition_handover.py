"""Takes partitions over that a home assigns, and lets go of those that another member should have.

Invariants:
    * nothing is delivered before where the group begins is saved, unless that is the log's start;
    * an offset that was saved in another log (``txmq.log.history``) counts as far as the two are the same; of another
      topic's none does, and the group begins at the log's start, whatever ``start`` says: nothing is skipped;
    * a revoked partition is released when its messages under way are dealt with, or their time is over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.fetcher import ConsumerFetcher
from txmq.client.consumer.group_member import Assigned, GroupRequests
from txmq.client.consumer.offsets.offset_store import OffsetPosition, next_order
from txmq.client.consumer.offsets.saver import OffsetSaver
from txmq.client.consumer.options import ConsumerSettings, MemberSettings
from txmq.client.consumer.retry.deferred import DeferredMessages, deferred_text
from txmq.client.consumer.retry.retry_store import SIZE_BYTES_MAX
from txmq.errors import StorageError, TxmqError, UnknownGroupError, UnknownTopicError
from txmq.log.history import LogHistory, parsed
from txmq.model import TopicPartition
from txmq.protocol.group_rows import partitions_at_first
from txmq.runtime.logging import Logger

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

HAND_OVER_S = 1.0  # that messages under way get, before their partition goes to another member


class BeginningUnknownError(StorageError):
    """A home that may know where the group began does not answer."""


class Beginnings:
    """Where a group begins in a partition of which it has saved nothing: at its first message, if it was added later.

    A partition that is added to a topic may have another home than those before it, and that home knows nothing of the
    group. So the consumer asks the homes of the topic's other partitions: each keeps how many partitions the topic had
    when it first handed one of them to the group. A partition with a higher number was added later, and so was one that
    the consumer itself did not find when it joined.

    Invariant: while a home does not answer that may know of an earlier beginning, nothing is begun at the log's end.

    Thread safety: any thread.
    """

    def __init__(self, client: Client, membership: MemberSettings) -> None:
        self._client, self._membership = client, membership
        self._found: dict[str, int] = {}  # partitions that the topics had when the consumer joined

    def look(self) -> None:
        """Note how many partitions the topics have; called before the consumer joins."""
        for topic in self._membership.topics if len(self._client.routes.links()) > 1 else ():
            try:
                self._found[topic] = self._client.topics.known(topic).config.partitions
            except UnknownTopicError:
                self._found[topic] = 0
            except TxmqError:
                return  # the homes are asked

    def is_later(self, slot: TopicPartition) -> bool:
        """Whether a partition of which nothing is saved was added after the group began with its topic.

        Raises:
            BeginningUnknownError: a home that may know does not answer.
        """
        topic, number = slot
        routes = self._client.routes
        if len(routes.links()) == 1:
            return False  # a broker that is alone says itself where the partition begins
        if number >= self._found.get(topic, number + 1):
            return True
        links: list[HomeLink] = []
        for other in range(number):
            link = routes.link_for(topic, other)
            if link not in links and link is not routes.link_for(topic, number):
                links.append(link)
        return self._is_later(slot, links)

    def _is_later(self, slot: TopicPartition, links: Sequence[HomeLink]) -> bool:
        topic, number = slot
        silent: TxmqError | None = None
        for link in links:
            try:
                described = json.loads(GroupRequests(link.control, self._membership).call("describe", [], {}))
            except UnknownGroupError:
                continue
            except TxmqError as error:
                silent = error
                continue
            if number >= partitions_at_first(described, topic, number + 1):
                return True
        if silent is not None:
            raise BeginningUnknownError(f"{topic}-{number} may be newer than the group: {silent}") from silent
        return False


class Handover:
    """See the module's docstring. Thread safety: the thread of the home's member."""

    def __init__(
        self, assignment: AssignedPartitions, deferred: DeferredMessages, offsets: OffsetSaver,
        fetcher: ConsumerFetcher, client: Client, settings: ConsumerSettings, log: Logger,
        beginnings: Beginnings | None = None,
    ) -> None:  # fmt: skip
        self._assignment, self._deferred, self._offsets, self._fetcher = assignment, deferred, offsets, fetcher
        self._home, self._beginnings = offsets.home, beginnings
        self._client, self._clock, self._settings, self._log = client, client.clock, settings, log

    def assigned(self, assigned: Assigned) -> None:
        """Begin to consume a partition."""
        slot, log = assigned.slot, assigned.log or self._client.log_of(*assigned.slot)[1]
        if assigned.offset is None:
            offset = self._starting_offset(slot, "earliest" if self._is_later(assigned) else self._settings.start)
            # If this process dies, the next owner would find another "latest", and skip what came between.
            is_anew, deferred = self._settings.start != "earliest", None
        else:
            offset, deferred = self._found(assigned, assigned.offset, log)
            is_anew = offset != assigned.offset
        consumed = ConsumedPartition(slot, assigned.generation, offset, assigned.offset, self._home, log)
        consumed.keeps_key_order = self._settings.options.keep_key_order
        self._deferred.take_over(consumed, deferred)
        if is_anew and not self._is_saved(consumed):
            return  # lost meanwhile; the next view says whose it is
        assignment = self._assignment
        with assignment.changed:
            consumed.is_paused = assigned.slot in assignment.paused
            assignment.partitions[assigned.slot] = consumed
        self._deferred.go_on(
            consumed, lambda: assignment.has(consumed), lambda: assignment.deferred_bytes < SIZE_BYTES_MAX
        )
        self._log.info("partition assigned", topic=assigned.slot[0], partition=assigned.slot[1], offset=offset)
        self._fetcher.more()

    def _found(self, assigned: Assigned, saved: int, log: LogHistory) -> tuple[int, str | None]:
        """Where to go on after what is saved, and what is still deferred."""
        if assigned.read is None:  # by a store that keeps no log
            shared = saved if saved <= self._client.offsets(*assigned.slot).end else None
        else:
            shared = parsed(assigned.read).shared_with(log, saved)
        if shared == saved:
            return saved, assigned.deferred
        offset = shared or self._starting_offset(assigned.slot, "earliest")
        self._log.warning(
            "the offset was saved in another log: its topic was made anew, or an older copy of the broker's data was "
            "put back; what may not have been consumed comes", topic=assigned.slot[0], partition=assigned.slot[1],
            saved=saved, goes_on_at=offset,
        )  # fmt: skip
        return offset, None if shared is None else assigned.deferred

    def _is_saved(self, consumed: ConsumedPartition) -> bool:
        text = deferred_text(consumed)
        start = OffsetPosition(
            consumed.slot, consumed.generation, consumed.position, text, next_order(), consumed.log_text
        )
        if not self._offsets.save_start(start):
            return False
        consumed.saved, consumed.deferred_saved = consumed.position, text
        return True

    def _is_later(self, assigned: Assigned) -> bool:
        if self._settings.start == "earliest":
            return False
        # What came while a broadcast's member was there (or had its name) was sent to it from the first message on.
        if self._settings.broadcast and assigned.is_later:
            return True
        return self._beginnings is not None and self._beginnings.is_later(assigned.slot)

    def _starting_offset(self, slot: TopicPartition, start: str | int) -> int:
        if isinstance(start, int):
            return self._client.offset_for(*slot, start)
        held = self._client.offsets(*slot)
        return held.start if start == "earliest" else held.end

    def revoked(self, slot: TopicPartition) -> None:
        """Deliver nothing more of a partition; its messages under way get ``HAND_OVER_S``."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get(slot)
            if consumed is not None and consumed.revoked_until is None:
                consumed.revoked_until = self._clock.monotonic() + HAND_OVER_S

    def kept(self, slot: TopicPartition, log: LogHistory | None) -> None:
        """Go on with a partition, also if it was revoked for a moment; not with another log."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get(slot)
            if consumed is None:
                return
            before = consumed.log
            if log is not None and not consumed.goes_on_in(log):
                self._assignment.lost(slot)  # the next view assigns it, with what is saved
                return
            if consumed.revoked_until is None and consumed.log == before:
                return
            consumed.revoked_until = None
            self._assignment.changed.notify_all()
        self._fetcher.more()

    def look_again(self, consumed: ConsumedPartition) -> None:
        """Without a group: the log is another one than it was; go on as far as the two are the same."""
        held, log = self._client.log_of(*consumed.slot)
        with self._assignment.changed:
            if not consumed.goes_on_in(log):
                known = consumed.log
                shared = known.shared_with(log, consumed.next_fetch) if known is not None else None
                consumed.seek(max(shared or 0, held.start))
                consumed.log = log
        self._fetcher.more()

    def drained(self) -> list[TopicPartition]:
        """Revoked partitions with nothing under way, and those whose time is over."""
        now = self._clock.monotonic()
        with self._assignment.changed:
            return [
                slot
                for slot, consumed in self._assignment.partitions.items()
                if consumed.home == self._home
                and consumed.revoked_until is not None
                and (now >= consumed.revoked_until or not consumed.under_way)
            ]

    def lost(self, slot: TopicPartition) -> None:
        """Consume a partition no longer: another member has it."""
        self._assignment.lost(slot)

    def held(self) -> list[tuple[TopicPartition, int]]:
        """What is consumed now, with generations."""
        return self._assignment.held(self._home)

    def claims(self) -> list[list[Any]]:
        """The same for a broker that may have started since, with how far was read in which log."""
        with self._assignment.changed:
            ours = (one for one in self._assignment.partitions.values() if one.home == self._home)
            return [
                [*one.slot, one.generation, *([] if one.log is None else [one.next_fetch, one.log.log])] for one in ours
            ]

    def refused(self, error: TxmqError) -> None:
        """End the consumer: the group does not take it."""
        self._assignment.fail(error)
