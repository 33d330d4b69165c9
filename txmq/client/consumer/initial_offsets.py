"""Where a group begins in a partition of which it has saved nothing: at its first message, if it was added later.

Theory of operation. A partition that is added to a topic may have another home than those before it, and that home
knows nothing of the group. So the consumer asks the homes of the topic's other partitions: each keeps how many
partitions the topic had when it first handed one of them to the group. A partition with a higher number was added
later, and so was one that the consumer itself did not find when it joined.

Invariant: while a home does not answer that may know of an earlier beginning, nothing is begun at the log's end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from txmq.client.consumer.group_requests import GroupRequests
from txmq.client.consumer.options import MemberSettings
from txmq.errors import StorageError, TxmqError, UnknownGroupError, UnknownTopicError
from txmq.model import TopicPartition
from txmq.protocol.group_rows import partitions_at_first

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink


class BeginningUnknownError(StorageError):
    """A home that may know where the group began does not answer."""


class Beginnings:
    """See the module's docstring. Thread safety: any thread."""

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
