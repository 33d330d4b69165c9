"""What the broker asks of its registry: values, which a thread of the shell carries out one after another
(``registry_calls``).

Each ask has a number, under which its answer comes back to the core (``Core.registry_answered``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from txmq.errors import TxmqError
from txmq.model import TopicConfig
from txmq.registry.access import Access, Changes
from txmq.registry.cluster_metadata import HomeEntry, TopicMap
from txmq.registry.topics import Topic


class CreateTopic(NamedTuple):
    """Create a topic, spread over the homes that are led."""

    number: int
    config: TopicConfig
    above: int  # the highest id that the asking home knows
    partitions_max: int  # of one home


class AlterTopic(NamedTuple):
    """Give a topic other settings, and more partitions if they say so."""

    number: int
    topic: Topic
    settings: Mapping[str, str]
    partitions_max: int


class DeleteTopic(NamedTuple):
    """Delete a topic."""

    number: int
    topic: Topic


class Refresh(NamedTuple):
    """Read topics and homes."""

    number: int


class DropTopic(NamedTuple):
    """Note that this home has dropped a deleted topic's messages."""

    number: int
    topic_id: int


class DrawQueryEpoch(NamedTuple):
    """Draw an epoch for a query's driver."""

    number: int
    above: int  # the highest that the asking home knows


class FindAnchor(NamedTuple):
    """Find the one home that decides for a group or a query; the asking home, if there is none yet."""

    number: int
    kind: str
    name: str


class ReleaseAnchor(NamedTuple):
    """The group or query is deleted."""

    number: int
    kind: str
    name: str


class RetireHome(NamedTuple):
    """Give a home up as lost for ever."""

    number: int
    home: int
    reason: str


class ChangeAccess(NamedTuple):
    """Change users, grants or quotas as they were at a version; no changes: only see whether they still are so."""

    number: int
    version: int
    changes: Changes


Ask = (
    CreateTopic
    | AlterTopic
    | DeleteTopic
    | Refresh
    | DropTopic
    | DrawQueryEpoch
    | FindAnchor
    | ReleaseAnchor
    | RetireHome
    | ChangeAccess
)


class Answer(NamedTuple):
    """The result of an ask.

    ``topic_map``, ``homes``: as they were read after it; the map is None if the ask concerns no topics.
    ``value``: the id of the topic, the driver's epoch, or the anchor's home; of ``ChangeAccess``: 1, or 0 if users are
    of another version by now, and nothing was changed.
    ``access``: users, grants and quotas as they were read after it; None if the ask concerns none.
    """

    topic_map: TopicMap | None = None
    homes: Sequence[HomeEntry] = ()
    value: int = 0
    access: Access | None = None


Result = Answer | TxmqError
