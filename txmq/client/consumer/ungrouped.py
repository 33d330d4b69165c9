"""A consumer that shares with nobody: every partition of its topics, and nothing is saved. A thread of its own.

Theory of operation. This is what a broadcast's member without a name has in place of a ``GroupMember``. It asks the
broker now and then which partitions its topics have, and gives all of them to the ``Partitions``. No group knows of
it, so there is nothing to hand over, nothing to save, and nothing that stays behind when it ends; where a partition
has got to is in memory, so a restart of the broker changes nothing.

Invariants:
    * every partition of every topic is consumed, each from ``start`` where it was there at the beginning, and from its
      first message where it came later;
    * a topic that was made anew under its name is another one;
    * a broker that cannot be reached takes nothing away.
"""

from __future__ import annotations

from txmq.client.consumer.membership import RETRY_S, Assigned, Partitions
from txmq.client.consumer.options import MemberSettings
from txmq.client.transport.ports import TopicDirectory
from txmq.errors import ClosedError, TxmqError, UnknownTopicError
from txmq.model import TopicPartition
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import Signal, start_daemon


class UngroupedConsumer:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, topics: TopicDirectory, settings: MemberSettings, partitions: Partitions) -> None:
        self._topics, self._settings, self._partitions = topics, settings, partitions
        self._log = get_logger(group=settings.group, member=settings.name)
        self._held: dict[TopicPartition, int] = {}  # with the topic's id
        self._has_looked = self._is_closing = False
        self._wake, self._ended = Signal(), Signal()

    def start(self) -> None:
        """Begin; the thread goes on."""
        start_daemon(f"txmq-alone-{self._settings.group}", self._run)

    def stop(self, timeout: float) -> None:
        """End. There is nothing to save."""
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
                self._wake.wait(wait_s)
        finally:
            self._ended.set()

    def _look(self) -> None:
        there = self._there()
        for slot in [slot for slot, topic_id in self._held.items() if there.get(slot) != topic_id]:
            del self._held[slot]
            self._partitions.lost(slot)
        for slot, topic_id in there.items():
            if slot not in self._held:
                self._partitions.assigned(Assigned(slot, 1, None, None, self._has_looked))
                self._held[slot] = topic_id
        self._has_looked = True

    def _there(self) -> dict[TopicPartition, int]:
        """The partitions that there are, each with its topic's id."""
        there: dict[TopicPartition, int] = {}
        for name in self._settings.topics:
            try:
                topic = self._topics.refresh(name)
            except UnknownTopicError:
                continue
            there |= {(name, number): topic.topic_id for number in range(topic.config.partitions)}
        return there
