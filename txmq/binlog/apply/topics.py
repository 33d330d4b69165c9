"""Which topics are applied."""

from __future__ import annotations

from txmq.binlog.config import BinlogSettings, topics_named
from txmq.client import Client


def applied_topics(client: Client, settings: BinlogSettings) -> list[str]:
    """Those that ``apply.topics`` names, or else those of the sync that there are.

    Raises:
        TxmqError: the broker is away.
    """
    if settings.apply.topics:
        return sorted(settings.apply.topics)
    named = topics_named(settings.publish.topic, name=settings.name)
    internal = {settings.position_topic, settings.parked_topic}
    return sorted(
        topic.name for topic in client.topics.list() if named.match(topic.name) and topic.name not in internal
    )
