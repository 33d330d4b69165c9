"""How a data directory becomes a home of a cluster: what it brings to the registry, and the order of the first calls.

The order, each step safe to repeat, so that a process which dies between two of them is started again:

1. a directory without an identity joins first (``take_cluster``) and is made under the cluster's id;
2. its journal gets a forced record with the incarnation of this start (``open_store``);
3. ``enter``: join, draw the home's epoch, publish the topics of the journal (the first broker of a cluster) and the
   queries; publish or take users (``bringing_users``), before anybody is served;
4. the core journals the epoch and serves; then the leader is announced (``registry_session_loop``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from txmq.broker.commit.data_directory import Recovered
from txmq.broker.shell.bringing_users import UsersOfHome, take_users, users_of
from txmq.config import BrokerSettings
from txmq.errors import HomeInUseError, RegistryAwayError, RegistryConflictError, RegistryError, TopicExistsError
from txmq.redo import directory_identity
from txmq.registry.access import Access, has_users
from txmq.registry.cluster_metadata import (
    Brought,
    Candidate,
    HomeEntry,
    Leadership,
    Listener,
    Registry,
    Standing,
    TopicMap,
)
from txmq.registry.topics import Topic
from txmq.registry.zookeeper.session import Session
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock, Disk, Random

log = get_logger()
RETRY_S: Final = 0.5
TELL_S: Final = 30.0  # the log says again that the registry does not answer

_T = TypeVar("_T")
Pause = Callable[[float], object]


class Connected(NamedTuple):
    """A registry, and the session that it speaks through."""

    registry: Registry
    session: Session


class JoiningHome(NamedTuple):
    """What a home brings to its registry."""

    cluster: int
    standing: Standing
    candidate: Candidate
    topics: tuple[Topic, ...]  # of its journal
    last_topic_id: int  # the highest that it has given out
    queries: tuple[str, ...]  # of its journal
    last_query_epoch: int  # the highest that it has seen
    users: UsersOfHome


class Entered(NamedTuple):
    """A home that is led."""

    leadership: Leadership
    topics: TopicMap
    homes: list[HomeEntry]
    access: Access


def draw_incarnation(random: Random) -> str:
    """Names a start of a process, as the journal has it."""
    return f"{random.bits(128):032x}"


def take_cluster(disk: Disk, random: Random, open_registry: Callable[[], Registry]) -> int | None:
    """The id of the cluster that a directory without an identity joins; None for a directory that has one.

    Raises:
        RegistryError: see ``Registry.join``.
    """
    if directory_identity.load(disk) is not None:
        return None
    drawn = random.bits(64)
    cluster = open_registry().join(drawn, Standing.EMPTY)
    log.info("founded a cluster" if cluster == drawn else "joined", cluster=f"{cluster:016x}")
    crash_point("registry.cluster_taken")
    return cluster


def member(
    recovered: Recovered, incarnation: str, address: str, lock: str, settings: BrokerSettings, random: Random
) -> JoiningHome:
    """What a recovered home brings to its registry.

    Args:
        incarnation: the one that ``open_store`` has journaled.
        address: where clients reach the broker.
        lock: names the data directory's lock.
        random: draws the secrets that a cluster with users has.
    """
    state, who = recovered.state, recovered.identity
    former = frozenset(int(known, 16) for known in state.registration.incarnations)
    candidate = Candidate(
        who.node, who.name, address, int(incarnation, 16), former, recovered.store.journal.epoch, lock
    )
    standing = Standing.MEMBER if state.registration.epoch else Standing.USED
    queries = state.queries
    return JoiningHome(
        who.cluster, standing, candidate, tuple(state.topics), state.topics.next_id - 1, tuple(queries.named),
        queries.last_epoch, users_of(state.principals, settings, random),
    )  # fmt: skip


def enter(
    registry: Registry, who: JoiningHome, on_topics: Listener, on_homes: Listener, on_access: Listener
) -> Entered:
    """Enter the cluster, lead the home, and read what the cluster has.

    Raises:
        RegistryError: see ``Registry.join``, ``Registry.lead`` and ``take_users``; or a topic of the journal is another
            one there, or a query another home's.
        ConfigError: see ``take_users``.
    """
    home, users = who.candidate.home, who.users
    publisher = home if users.is_bringing else None
    if publisher is not None and users.why_none and has_users(users.access.records):
        raise RegistryError(users.why_none)  # before a cluster is founded that waits for them
    registry.join(who.cluster, who.standing, Brought(who.last_topic_id, who.last_query_epoch, publisher))
    crash_point("registry.joined")
    leadership = registry.lead(who.candidate)
    crash_point("registry.led")
    if who.standing is Standing.USED:
        _publish(registry, who)
    _publish_queries(registry, who)
    access = take_users(registry, home, users, on_access)
    return Entered(leadership, registry.topics(on_topics), registry.homes(on_homes), access)


def _publish(registry: Registry, who: JoiningHome) -> None:
    """Give the cluster the topics that the journal had before, under their ids. None is lost, renamed or made anew."""
    known = registry.topics()
    ids = {placed.topic.topic_id for placed in known.topics} | {deleted.topic_id for deleted in known.deleted}
    for topic in who.topics:
        if topic.topic_id in ids:
            continue
        try:
            registry.create_topic(topic, [who.candidate.home] * topic.config.partitions)
        except TopicExistsError as error:
            raise RegistryError(
                f"topic {topic.config.name!r} of this directory is another one in the cluster, made by a member that "
                "came first: delete that one at a member (txmq topic delete), then start this broker again"
            ) from error
        crash_point("registry.topic_published")


def _publish_queries(registry: Registry, who: JoiningHome) -> None:
    """Fix this home as that of each query that the journal has: another home would write its newest batch again.

    A query that was opened before there was a registry has no home there, nor has any after a loss of the registry.
    """
    home, anchors = who.candidate.home, registry.anchors("query", who.queries)
    for name in who.queries:
        is_published = name in anchors
        anchor = anchors[name] if is_published else registry.anchor("query", name, home)
        if anchor != home:
            raise RegistryError(
                f"query {name!r} of this directory is in the cluster one of home {anchor:016x}, which opened it first: "
                f"delete that one (txmq query delete {name}), then start this broker again"
            )
        if not is_published:
            crash_point("registry.query_published")


def until_answered(step: Callable[[], _T], clock: Clock, pause: Pause, in_use_s: float) -> _T:
    """The result of ``step``, tried again while the registry is away, and while the process before this one is there.

    Args:
        pause: waits for so many seconds, or raises to end this.
        in_use_s: how long another leader of the home is waited for; its session must expire by then.

    Raises:
        RegistryError: the registry refuses.
    """
    began, told_at = clock.monotonic(), -TELL_S
    while True:
        try:
            return step()
        except (RegistryAwayError, RegistryConflictError, HomeInUseError) as error:
            now = clock.monotonic()
            if isinstance(error, HomeInUseError) and now - began > in_use_s:
                raise
            if now - told_at >= TELL_S:
                told_at = now
                log.warning("waits for the registry", reason=str(error))
        pause(RETRY_S)
