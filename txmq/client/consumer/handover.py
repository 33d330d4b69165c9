"""Takes partitions over that a home assigns, and lets go of those that another member should have.

Invariants:
    * nothing is delivered before where the group begins is saved, unless that is the log's start;
    * a revoked partition is released when its messages under way are dealt with, or their time is over.
"""

from __future__ import annotations

from txmq.client.consumer.assignment import Assignment, Fetches
from txmq.client.consumer.beginnings import Beginnings
from txmq.client.consumer.membership import Assigned
from txmq.client.consumer.offsets.saver import OffsetSaver
from txmq.client.consumer.offsets.store import OffsetPosition
from txmq.client.consumer.options import ConsumerSettings
from txmq.client.consumer.partition import ConsumedPartition
from txmq.client.consumer.retry.deferred import DeferredMessages
from txmq.client.consumer.retry.file_store import SIZE_BYTES_MAX
from txmq.client.transport.ports import Log
from txmq.errors import TxmqError
from txmq.model import TopicPartition
from txmq.runtime.logging import Logger

HAND_OVER_S = 1.0  # that messages under way get, before their partition goes to another member


class Handover:
    """See the module's docstring; implements ``Partitions``. Thread safety: the thread of the home's member."""

    def __init__(
        self, assignment: Assignment, deferred: DeferredMessages, offsets: OffsetSaver, fetcher: Fetches, client: Log,
        settings: ConsumerSettings, log: Logger, beginnings: Beginnings | None = None,
    ) -> None:  # fmt: skip
        self._assignment, self._deferred, self._offsets, self._fetcher = assignment, deferred, offsets, fetcher
        self._home, self._beginnings = offsets.home, beginnings
        self._client, self._clock, self._settings, self._log = client, client.clock, settings, log

    def assigned(self, assigned: Assigned) -> None:
        """Begin to consume a partition."""
        offset, saved = assigned.offset, assigned.offset
        if offset is None:
            offset = self._starting_offset(
                assigned.slot, "earliest" if self._is_later(assigned) else self._settings.start
            )
            if self._settings.start != "earliest":
                # If this process dies, the next owner would find another "latest", and skip what came between.
                if not self._offsets.save_start(OffsetPosition(assigned.slot, assigned.generation, offset)):
                    return  # lost meanwhile; the next view says whose it is
                saved = offset
        consumed = ConsumedPartition(assigned.slot, assigned.generation, offset, saved, self._home)
        consumed.keeps_key_order = self._settings.options.keep_key_order
        self._deferred.take_over(consumed, assigned.deferred)
        assignment = self._assignment
        with assignment.changed:
            consumed.is_paused = assigned.slot in assignment.paused
            assignment.partitions[assigned.slot] = consumed
        self._deferred.go_on(
            consumed, lambda: assignment.has(consumed), lambda: assignment.deferred_bytes < SIZE_BYTES_MAX
        )
        self._log.info("partition assigned", topic=assigned.slot[0], partition=assigned.slot[1], offset=offset)
        self._fetcher.more()

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

    def kept(self, slot: TopicPartition) -> None:
        """Go on with a partition, also if it was revoked for a moment."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get(slot)
            if consumed is None or consumed.revoked_until is None:
                return
            consumed.revoked_until = None
            self._assignment.changed.notify_all()
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

    def refused(self, error: TxmqError) -> None:
        """End the consumer: the group does not take it."""
        self._assignment.fail(error)
