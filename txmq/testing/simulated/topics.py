"""The topics of a broker in memory, as blocks with an outbox and ``install`` use a client's (``SimulatedBroker``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from txmq.xa.database.outbox_topics import TopicSize


class SimulatedTopics:
    """As ``client.topics``: what the broker has, or what a database says while it is away.

    Attributes:
        changes: as of ``Topics``.
        wants_to_assume: as of ``Topics``.
        assumed: what databases have said.
        partitions: how many each topic has.
    """

    def __init__(self, ids: Callable[[], Mapping[str, int]], partitions: int = 1) -> None:
        self._ids, self.partitions = ids, partitions
        self.changes, self.wants_to_assume = 0, True
        self.assumed: dict[str, TopicSize] = {}

    def sizes(self) -> dict[str, TopicSize]:
        """As of ``Topics``."""
        return {name: TopicSize(topic_id, self.partitions) for name, topic_id in self._ids().items()}

    def seen(self, name: str) -> TopicSize | None:
        """As of ``Topics``."""
        return self.sizes().get(name)

    def assume(self, found: Mapping[str, TopicSize], resource: str) -> None:
        """As of ``Topics``."""
        self.assumed.update(found)

    def forget(self, name: str) -> None:
        """As of ``Topics``."""
