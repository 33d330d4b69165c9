"""How a data directory becomes a home of a cluster: what it brings to the registry, and the order of the first calls.

The order, each step safe to repeat, so that a process which dies between two of them is started again:

1. a directory without an identity joins first (``take_cluster``) and is made under the cluster's id;
2. the number of this start is forced in the directory (``member``);
3. ``enter``: join, draw the home's epoch, publish the topics of the journal (the first broker of a cluster) and the
   queries; publish or take users (``take_users``), before anybody is served;
4. the epoch is journaled (``Recovered.lead``), and the core serves; then the leader is announced
   (``cluster_membership``).

*Users.* The registry has the truth, and each home reads it before it serves. A broker that was alone and has users
publishes them, if the cluster has none; one that found none makes its first administrator, if it was given one. Both
end the cluster's anonymity and nothing brings it back.

*A cluster that lost its registry* is rebuilt from what the journals of stopped homes know of it (``read_facts``): the
directory is recovered as for a start, and let go of again, as by a broker that waits for its registry in vain.

Invariants:
    * a home serves as the registry says at a moment after its start: a user who was removed meanwhile is unknown;
    * users are neither written nor read where others could do so (``config.why_no_users``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from txmq.broker.cluster.registry_asks import readable
from txmq.broker.commit.data_directory import Recovered, open_store
from txmq.broker.shell import first_administrator
from txmq.broker.state.principals import Principals, Secrets, records_of
from txmq.broker.state.state import State
from txmq.broker.verbs.access.access_changes import SECRET_BITS
from txmq.broker.verbs.partition_handover import GRANT
from txmq.config import BrokerSettings, why_no_users
from txmq.errors import HomeInUseError, RegistryAwayError, RegistryConflictError, RegistryError, TopicExistsError
from txmq.redo import directory_identity, replica_identity
from txmq.registry.cluster_metadata import (
    SECRET,
    Access,
    Brought,
    Candidate,
    HomeEntry,
    Leadership,
    Listener,
    Record,
    Registry,
    Standing,
    TopicMap,
    has_users,
    user_key,
)
from txmq.registry.topics import Topic
from txmq.registry.zookeeper.rebuild_from_journals import Facts
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


def member(recovered: Recovered, address: str, lock: str, settings: BrokerSettings, random: Random) -> JoiningHome:
    """What a recovered home brings to its registry, which may hear of this start from now on.

    Args:
        address: where clients reach the broker.
        lock: names the data directory's lock.
        random: draws the secrets that a cluster with users has.

    Raises:
        OSError: the start is not on disk.
    """
    state, who, journal = recovered.state, recovered.identity, recovered.store.journal
    candidate = Candidate(
        who.node, who.name, address, who.start, frozenset(recovered.make_known()), journal.epoch, lock
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


def until_answered(
    step: Callable[[], _T], clock: Clock, pause: Pause, in_use_s: float, *, waits_for: str = "the registry"
) -> _T:  # fmt: skip
    """The result of ``step``, tried again while the registry is away, and while the process before this one is there.

    Args:
        waits_for: for the log.
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
                log.warning(f"waits for {waits_for}", reason=str(error))
        pause(RETRY_S)


class UsersOfHome(NamedTuple):
    """What a home has and was given.

    Attributes:
        access: of its journal, as the registry would have it; version 0: they were never the registry's.
        first: the first administrator's records, of the file that the settings name; None: they name none.
        why_none: why users would not be safe in the registry; empty: they are.
    """

    access: Access
    first: Callable[[], Mapping[str, Record]] | None = None
    why_none: str = ""

    @property
    def is_bringing(self) -> bool:
        """Whether they must be published: they are of a broker that was alone."""
        return self.access.version == 0 and bool(self.access.records)


def users_of(principals: Principals, settings: BrokerSettings, random: Random) -> UsersOfHome:
    """What a recovered home has and was given."""

    def drawn() -> str:
        return f"{random.bits(SECRET_BITS):064x}"

    records = records_of(principals)
    if principals.users:
        secrets = Secrets(principals.secret, principals.between_brokers or drawn())
        records[SECRET] = secrets._asdict()
    path = settings.first_administrator

    def first() -> Mapping[str, Record]:
        name, record = first_administrator.read(path)
        log.info("first administrator", user=name)
        return {user_key(name): record, SECRET: Secrets(drawn(), drawn())._asdict()}

    return UsersOfHome(Access(principals.registry_version, records), first if path else None, why_no_users(settings))


def take_users(registry: Registry, home: int, own: UsersOfHome, listener: Listener) -> Access:
    """What the cluster has after what the home brings was published. Each step may be repeated.

    Raises:
        RegistryConflictError: another home came first, or has yet to publish; try again.
        RegistryError: users would not be safe there; or the registry is older than the journal.
        ConfigError: the file of the first administrator is not there, not whole, or not its owner's alone.
    """
    if own.is_bringing:
        if has_users(own.access.records):
            _refuse_unsafe(own)
        registry.publish_access(home, own.access.records)
        crash_point("registry.users_published")
    access = registry.access(listener)
    if not has_users(access.records) and own.first is not None:
        _refuse_unsafe(own)
        access = registry.change_access(home, access.version, own.first())
        crash_point("registry.first_user_made")
    if has_users(access.records):
        _refuse_unsafe(own)
    if access.version < own.access.version:
        raise RegistryError(
            f"users in ZooKeeper have version {access.version}, and this home's journal {own.access.version}: the "
            "ensemble lost changes, and a user who was removed may be back there. Bring it up to date: txmq cluster "
            "rebuild"
        )
    return readable(access)


def _refuse_unsafe(own: UsersOfHome) -> None:
    if own.why_none:
        raise RegistryError(own.why_none)


def read_facts(disk: Disk, clock: Clock, random: Random, settings: BrokerSettings) -> Facts:
    """The facts of a data directory that no broker runs on. Raises as ``open_store``.

    Raises:
        RegistryError: the directory is no member of a cluster.
    """
    node = directory_identity.load(disk)
    if node is None:
        raise RegistryError("the directory has no identity: it is none of a broker")
    recovered = open_store(disk, clock, random, settings, is_member=True)
    try:
        return _facts(node, recovered.state, replica_identity.load_or_create(disk, random).pending)
    finally:
        recovered.store.close()


def _facts(node: directory_identity.Node, state: State, pending: tuple[int, ...]) -> Facts:
    registration, principals = state.registration, state.principals
    if not registration.epoch:
        raise RegistryError("the directory was never a member of a cluster: start its broker with --registry")
    records = records_of(principals)
    if principals.secret:
        records[SECRET] = Secrets(principals.secret, principals.between_brokers)._asdict()
    grants = {group: state.saved.generation(group, GRANT) for group in state.saved.named}
    return Facts(
        node.cluster_id, node.node_id, state.epoch, (*pending, *registration.starts),
        tuple(state.placed.values()), state.topics.next_id - 1, tuple(state.queries.named), state.queries.last_epoch,
        {group: grant for group, grant in grants.items() if grant}, registration.retired,
        Access(principals.registry_version, records),
    )  # fmt: skip
