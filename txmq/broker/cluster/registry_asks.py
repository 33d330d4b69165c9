"""What the broker asks of its registry: values, and how a thread of the shell carries them out, one after another.

Each ask has a number, under which its answer comes back to the core (``Core.registry_answered``). ``carry_out`` waits
for a network: it is never called on the event loop.

Invariant: every ask may be carried out again: none has effect twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from txmq.broker.state.principals import decode_access
from txmq.errors import (
    BrokerError,
    RegistryAwayError,
    RegistryConflictError,
    TopicExistsError,
    TxmqError,
    UnavailableError,
    UnknownTopicError,
)
from txmq.model import TopicConfig
from txmq.registry.cluster_metadata import (
    Access,
    Changes,
    HomeEntry,
    PlacedTopic,
    Registry,
    TopicMap,
    check_name_is_free,
)
from txmq.registry.placement import Room
from txmq.registry.topics import Topic, altered
from txmq.runtime.crashpoints import crash_point

TRIES_MAX: Final = 5


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


def as_answer(error: TxmqError) -> BrokerError:
    """The error of an ask, as the broker answers it to the client for whom it asked."""
    if isinstance(error, BrokerError):
        return error
    if isinstance(error, RegistryAwayError):
        return UnavailableError(f"the registry does not answer: whether it was done is not known ({error})")
    return UnavailableError(str(error))


def carry_out(registry: Registry, home: int, ask: Ask) -> Answer:
    """Do what ``home`` asks.

    Raises:
        RegistryError: the registry refused it, or does not answer.
        DeletionPendingError: the topic's name is not free yet.
        BrokerError: the topic exists, or does not; a setting is wrong; the homes have no room for the partitions.
    """
    if isinstance(ask, DrawQueryEpoch):
        return Answer(value=registry.draw_query_epoch(ask.above))
    if isinstance(ask, FindAnchor):
        return Answer(value=registry.anchor(ask.kind, ask.name, home))
    if isinstance(ask, ReleaseAnchor):
        registry.release_anchor(ask.kind, ask.name, home)
        return Answer()
    if isinstance(ask, DropTopic):
        registry.drop_topic(ask.topic_id, home)
        return Answer()
    if isinstance(ask, ChangeAccess):
        return _change_access(registry, home, ask)
    return _with_topics(registry, home, ask)


def _change_access(registry: Registry, home: int, ask: ChangeAccess) -> Answer:
    try:
        changed = registry.change_access(home, ask.version, ask.changes)
    except RegistryConflictError:
        return Answer(value=0, access=readable(registry.access()))
    if ask.changes:
        crash_point("registry.users_changed")
    return Answer(value=1, access=readable(changed))


def readable(access: Access) -> Access:
    """What was read, once it is known that the core can take it over.

    Raises:
        RegistryError: it cannot: a newer txmq, or a hand, has written it.
    """
    decode_access(access)
    return access


def _with_topics(
    registry: Registry, home: int, ask: CreateTopic | AlterTopic | DeleteTopic | RetireHome | Refresh
) -> Answer:
    topic_id = 0
    if isinstance(ask, CreateTopic):
        topic_id = _create(registry, home, ask)
    elif isinstance(ask, AlterTopic):
        topic_id = _alter(registry, home, ask)
    elif isinstance(ask, DeleteTopic):
        registry.delete_topic(ask.topic)
        topic_id = ask.topic.topic_id
    elif isinstance(ask, RetireHome):
        registry.retire_home(ask.home, ask.reason)
    access = readable(registry.access()) if isinstance(ask, Refresh) else None
    return Answer(registry.topics(), registry.homes(), topic_id, access)


def _create(registry: Registry, home: int, ask: CreateTopic) -> int:
    topic_map = registry.topics()
    if any(placed.topic.config.name == ask.config.name for placed in topic_map.topics):
        raise TopicExistsError(f"topic {ask.config.name!r} exists")
    check_name_is_free(ask.config.name, topic_map.deleted)  # before an id is drawn
    topic = Topic(registry.reserve_topic_ids(1, ask.above)[0], ask.config)
    crash_point("registry.topic_id_drawn")

    def attempt() -> None:
        room = Room(registry.topics().topics, registry.homes(), home)
        registry.create_topic(topic, room.spread((), ask.config.partitions, ask.partitions_max))

    _until_no_conflict(attempt)
    return topic.topic_id


def _alter(registry: Registry, home: int, ask: AlterTopic) -> int:
    def attempt() -> None:
        topic_map = registry.topics()
        stored = _stored(topic_map, ask.topic)
        config = altered(stored.topic.config, ask.settings)
        added, homes = config.partitions - len(stored.homes), stored.homes
        if added:
            homes += Room(topic_map.topics, registry.homes(), home).spread(homes, added, ask.partitions_max)
        registry.alter_topic(PlacedTopic(dataclasses.replace(stored.topic, config=config), homes, stored.version))

    _until_no_conflict(attempt)
    return ask.topic.topic_id


def _until_no_conflict(attempt: Callable[[], None]) -> None:
    """Try again while others change topics first."""
    for tries_left in reversed(range(TRIES_MAX)):
        try:
            attempt()
        except RegistryConflictError:
            if not tries_left:
                raise
        else:
            return


def _stored(topic_map: TopicMap, topic: Topic) -> PlacedTopic:
    for placed in topic_map.topics:
        if placed.topic.topic_id == topic.topic_id:
            return placed
    raise UnknownTopicError(f"no topic {topic.config.name!r} with id {topic.topic_id}")
