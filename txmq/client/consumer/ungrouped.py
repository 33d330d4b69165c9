"""A consumer without a group: it has every partition of its topics, and saves nothing. A thread of its own.

Theory of operation. A broadcast's member without a name has this in place of a ``GroupMember``. The thread asks the
broker every ``heartbeat_interval`` which partitions the topics have, and gives all of them to the ``ConsumerHomes``.
There is nothing to hand over or to save, and nothing is left when the consumer ends. Positions are in memory, so a
restart of the broker changes nothing.

Invariants:
    * every partition of every topic is consumed: from ``start`` if it existed at the beginning, from its first message
      if it came later;
    * a topic that was deleted and created under the same name is another one;
    * a broker that cannot be reached takes nothing away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.client.consumer.group_member import RETRY_S, Assigned
from txmq.client.consumer.options import MemberSettings
from txmq.client.topics import Topics
from txmq.errors import ClosedError, TxmqError, UnknownTopicError
from txmq.model import TopicPartition
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import Signal, start_daemon

if TYPE_CHECKING:
    from txmq.client.consumer.consumer_homes import ConsumerHomes


class UngroupedConsumer:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, topics: Topics, settings: MemberSettings, partitions: ConsumerHomes) -> None:
        self._topics, self._settings, self._partitions = topics, settings, partitions
        self._log = get_logger(group=settings.group, member=settings.name)
        self._held: dict[TopicPartition, int] = {}  # with the topic's id
        self._at_first: frozenset[tuple[TopicPartition, int]] | None = None  # what was there when it first looked
        self._is_closing = False
        self._wake, self._ended = Signal(), Signal()

    def start(self) -> None:
        """Start the thread."""
        start_daemon(f"txmq-alone-{self._settings.group}", self._run)

    def stop(self, timeout: float) -> None:
        """End the thread."""
        self._is_closing = True
        self._wake.set()
        self._ended.wait(timeout)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                wait_s = self._settings.heartbeat_interval_s
                try:
                    self._look()
                except ClosedError:
                    return
                except TxmqError as error:
                    self._log.debug("the broker cannot be reached", error=repr(error))
                    wait_s = RETRY_S
                except Exception as error:  # noqa: BLE001  as a GroupMember's: the thread goes on
                    self._log.error("the consumer's thread failed; it goes on", error=repr(error), exc_info=error)
                self._wake.wait(wait_s)
        finally:
            self._ended.set()

    def _look(self) -> None:
        there = self._there()
        for slot in [slot for slot, topic_id in self._held.items() if there.get(slot) != topic_id]:
            del self._held[slot]
            self._partitions.lost(slot)
        if self._at_first is None:
            self._at_first = frozenset(there.items())
        failure: TxmqError | None = None
        for slot, topic_id in there.items():
            if slot not in self._held:
                try:
                    is_later = (slot, topic_id) not in self._at_first
                    self._partitions.assigned(Assigned(slot, 1, None, None, is_later))
                    self._held[slot] = topic_id
                except TxmqError as error:  # the home of that partition is away
                    failure = error
        if failure is not None:
            raise failure

    def _there(self) -> dict[TopicPartition, int]:
        there: dict[TopicPartition, int] = {}
        for name in self._settings.topics:
            try:
                topic = self._topics.refresh(name)
            except UnknownTopicError:
                continue
            there |= {(name, number): topic.topic_id for number in range(topic.config.partitions)}
        return there
