"""The metadata of a cluster, and the registry as the port to it: what brokers must agree on.

Two implementations exist, held to one contract (tests/unit/registry/contract.py): ``zookeeper.registry``, and one in
memory, which tests run (``tools/simulated/embedded_registry.py``).

Theory of operation. A partition belongs to a *home*, which is one journal; a broker process *leads* homes. The
registry holds the cluster's id, each home with the epoch and the address of its leader, each topic with its id,
settings and the homes of its partitions, and users with their grants and quotas. Consumer groups, offsets and sessions
are not in it: each home has its own in its journal, so that what the registry holds grows with topics, homes and users,
never with messages or clients.

Users, grants and quotas are *records* under one version (``Access``). A record is a JSON object under a key: all of one
user (``user.shop``), the quota of one user or topic (``quota.topic.orders``), or the secrets of the cluster
(``secret``). One record a user, and not one document of all: ZooKeeper refuses values over 1 MB, which 10,000 users
would pass, while one user with all grants that there can be has a quarter of it. The version holds them together: each
change raises it by 1, by compare-and-set. The registry knows what a key means, and not what a record says; the brokers
do (``broker/state/principals.py``).

Invariants:
    * what is absent from the registry deletes no messages: a home drops a topic only if ``TopicMap.deleted`` has it;
    * a topic's id is given out once, and a name's next topic has another id. So it can be told whether a change whose
      answer was lost was made: every call may be repeated, and none has effect twice;
    * a partition never moves to another home, and partitions are only added;
    * a deleted topic's name is free when each of its homes has dropped the messages, or is retired: no home takes a
      message that is meant for the next topic of that name into the deleted one, and loses it;
    * a home that is retired is never led again, and nothing waits for it;
    * of two processes that lead one home, one has the newest epoch. The other one learns of it from ``announce`` and
      stops;
    * users are changed by compare-and-set of one version; what is absent was removed only if that version rose. It
      never falls, and two different sets of records never had the same one;
    * once there is a user there is one for ever: brokers remove no last administrator. So a version without users is
      older than any with one;
    * a call ends within a bounded number of tries. It reports an error of ``txmq.errors`` that says what to do.

Calls wait for a network: the broker makes them in a thread of its own, never on its event loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from txmq.errors import DeletionPendingError, InvalidNameError, RegistryError
from txmq.model import is_valid_name
from txmq.registry.topics import Topic

SECRET: Final = "secret"  # noqa: S105  the key of a record
_USER: Final = "user."
_QUOTA: Final = "quota."
CHANGES_MAX: Final = 10  # records in one change

Record = Mapping[str, Any]
Changes = Mapping[str, Record | None]
"""Records by key as they are from now on; None: there is none any more."""

TOPICS_MAX: Final = 10_000
IDS_PER_CALL_MAX: Final = 10_000
Listener = Callable[[], None]


class Access(NamedTuple):
    """All records at one moment. Version 0: there was never one."""

    version: int
    records: Mapping[str, Record]


NO_ACCESS: Final = Access(0, MappingProxyType({}))


def user_key(name: str) -> str:
    """The key of a user's record."""
    return _USER + name


def quota_key(kind: str, name: str) -> str:
    """The key of a quota's record."""
    return f"{_QUOTA}{kind}.{name}"


def user_of(key: str) -> str | None:
    """The user whose record has the key; None: it is no user's."""
    return key.removeprefix(_USER) if key.startswith(_USER) else None


def quota_of(key: str) -> tuple[str, str] | None:
    """Kind and name of the quota whose record has the key; None: it is no quota's."""
    if not key.startswith(_QUOTA):
        return None
    kind, _, name = key.removeprefix(_QUOTA).partition(".")
    return kind, name


def has_users(keys: Iterable[str]) -> bool:
    """Whether one of the records is a user's."""
    return any(key.startswith(_USER) for key in keys)


def check_changes(changes: Changes) -> None:
    """Refuse more than a registry makes at once.

    Raises:
        RegistryError: says how many can be.
    """
    if len(changes) > CHANGES_MAX:
        raise RegistryError(f"{len(changes)} records in one change: at most {CHANGES_MAX}")


class Standing(enum.Enum):
    """What a data directory is to a cluster, before it joins."""

    EMPTY = "empty"  # it takes the cluster's id
    USED = "used"  # it has topics or transactions under an id of its own: only the first broker of a cluster may
    MEMBER = "member"  # it has joined, and its journal says so


class Candidate(NamedTuple):
    """A process that wants to lead a home.

    The caller has made ``start`` durable before it calls ``lead``. So its next start knows it again if an
    epoch was drawn and the answer was lost.
    """

    home: int
    name: str  # the broker's name, which no other home of the cluster has
    address: str  # where clients reach it
    start: int  # drawn at random for this start of the process
    former: frozenset[int]  # the starts that its directory knows
    epoch: int  # the newest epoch that the journal knows
    lock: str  # names the lock that the process holds on its data directory: the process before it is gone


class Brought(NamedTuple):
    """What a directory brings to a cluster.

    Attributes:
        last_topic_id: the highest id that it has given to a topic. If the cluster is founded, ids that are drawn are
            above it from the first moment on.
        last_query_epoch: the highest that it has seen; those that are drawn from now on are above it.
        publisher: the home, if it brings users: if the cluster is founded, nobody is told of users or quotas, or of
            their absence, until it has published them (``Registry.publish_access``).
    """

    last_topic_id: int = 0
    last_query_epoch: int = 0
    publisher: int | None = None


NOTHING_BROUGHT: Final = Brought()


class Leadership(NamedTuple):
    """A candidate that leads, under an epoch that is higher than any before."""

    candidate: Candidate
    epoch: int


class HomeEntry(NamedTuple):
    """A home of the cluster. ``address`` is where its leader is reached, None if no leader is known to live.

    ``retired``: why its directory is given up as lost for ever; empty if it is not. ``replicas``: where those that
    live are reached.
    """

    home: int
    name: str
    epoch: int
    address: str | None
    retired: str = ""
    replicas: tuple[str, ...] = ()


class PlacedTopic(NamedTuple):
    """A topic, the home of each of its partitions, and the version of the map at which it last changed."""

    topic: Topic
    homes: tuple[int, ...]
    version: int

    def to_json(self) -> dict[str, object]:
        """The fields of the topic; the version; the homes, as on the wire."""
        return {**self.topic.to_json(), "version": self.version, "homes": [f"{home:016x}" for home in self.homes]}

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> PlacedTopic:
        """The reverse of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError, AssertionError: these are not the fields of a placed topic.
        """
        values = dict(fields)
        version, homes = values.pop("version"), values.pop("homes")
        assert isinstance(version, int)
        assert isinstance(homes, list)
        return cls(Topic.from_json(values), tuple(map(parse_home, homes)), version)


class DeletedTopic(NamedTuple):
    """A topic that was deleted, and the homes that have not dropped its messages yet."""

    topic_id: int
    name: str
    homes: tuple[int, ...]


class TopicMap(NamedTuple):
    """All topics at one moment. ``version`` grows with each topic that is created, altered or deleted."""

    version: int
    topics: tuple[PlacedTopic, ...]  # sorted by name
    deleted: tuple[DeletedTopic, ...]  # sorted by id


class Registry(Protocol):
    """See the module's docstring. Thread-safe. Every call raises RegistryAwayError if the registry does not answer."""

    def join(self, cluster: int, standing: Standing, brought: Brought = NOTHING_BROUGHT) -> int:
        """Enter the cluster, or found it under ``cluster``; the cluster's id.

        Raises:
            ForeignClusterError: the directory is not empty, and belongs to another cluster.
            RegistryError: there is no cluster, and the directory belongs to one.
        """

    def lead(self, candidate: Candidate) -> Leadership:
        """Draw the home's next epoch. The caller journals it, then calls ``announce``.

        Raises:
            HomeInUseError: another process leads the home, and lives as far as the registry knows.
            HomeSupersededError: the home was led by a process that the candidate's journal does not know; or it is
                retired.
            DuplicateBrokerError: another home has the candidate's name.
        """

    def announce(self, leadership: Leadership) -> None:
        """Say where the home is led, for as long as this process lives. Call it again after each lost session.

        Raises:
            HomeSupersededError: another process has drawn a newer epoch: this one stops.
        """

    def announce_replica(self, home: int, incarnation: int, address: str) -> None:
        """Say where a replica of a home is reached, for as long as this process lives. As often as you like."""

    def retire_home(self, home: int, reason: str) -> None:
        """Give a home up as lost for ever: its epoch rises, and nobody leads it any more. What waits for it goes on.

        Its name, the names of deleted topics that it has yet to drop, and the groups that it is the anchor of are free.

        Raises:
            HomeInUseError: a process leads it.
            RegistryError: there is no such home.
        """

    def homes(self, listener: Listener | None = None) -> list[HomeEntry]:
        """All homes, sorted. The listener is called once or more often when that has changed, or may have."""

    def reserve_topic_ids(self, count: int, above: int = 0) -> range:
        """Draw ids for topics, higher than any before and than ``above``. Ids that are not used are lost."""

    def create_topic(self, topic: Topic, homes: Sequence[int]) -> PlacedTopic:
        """Create a topic under an id that was drawn, or that the first broker of the cluster brings along.

        Raises:
            TopicExistsError: the name is another topic's.
            DeletionPendingError: it was a deleted topic's, and a home that lags may still take messages into that one.
            RegistryConflictError: the connection was lost, and others changed topics since: look whether it was made.
            RegistryError: ``homes`` does not fit, or one of them is not in the registry.
        """

    def alter_topic(self, changed: PlacedTopic) -> PlacedTopic:
        """Give a topic other settings, or more partitions; ``changed.version`` is the one that was read.

        Raises:
            UnknownTopicError: there is no such topic (any more).
            RegistryConflictError: it was changed since: read it again.
            RegistryError: another name or storage, fewer partitions, or one that would move.
        """

    def delete_topic(self, topic: Topic) -> None:
        """Delete a topic: its name is free, and each of its homes is told to drop its messages.

        Raises:
            UnknownTopicError: there is no such topic (any more).
        """

    def drop_topic(self, topic_id: int, home: int) -> None:
        """Note that a home has dropped a deleted topic's messages. The last one ends the topic's entry."""

    def topics(self, listener: Listener | None = None) -> TopicMap:
        """All topics. The listener is called once when that has changed, or may have."""

    def draw_query_epoch(self, above: int = 0) -> int:
        """The epoch of a query's driver, higher than any before and than ``above``."""

    def anchor(self, kind: str, name: str, home: int) -> int:
        """The one home that decides for a group or a query: the first ``home`` that was named, from then on."""

    def anchors(self, kind: str, names: Sequence[str]) -> dict[str, int]:
        """The homes that decide for these, of those that have one."""

    def release_anchor(self, kind: str, name: str, home: int) -> None:
        """The group or query is deleted; the next one of that name chooses anew. The anchor of another home stays."""

    def access(self, listener: Listener | None = None) -> Access:
        """Users, grants and quotas. The listener is called once when they have changed, or may have.

        Raises:
            RegistryConflictError: a home brings users, and has yet to publish them.
        """

    def change_access(self, home: int, version: int, changes: Changes) -> Access:
        """Change users, grants or quotas, as they were at a version; what they are then. No changes: look only.

        Args:
            home: whose leader asks; it makes one change after another.

        Raises:
            RegistryConflictError: they were changed since, or are not published yet: read them again.
            RegistryError: too many changes at once, or too large; or users where everybody could write them.
        """

    def publish_access(self, home: int, changes: Changes) -> None:
        """Give the cluster the users and quotas of a broker that was alone, if it has none.

        Raises:
            RegistryConflictError: another home does so.
            RegistryError: users where everybody could write them.
        """

    def close(self) -> None:
        """End the conversation: homes that are announced here are led from nowhere."""


def parse_home(text: object) -> int:
    """A home's number, from its 16 hex digits.

    Raises:
        ValueError: it is something else.
    """
    if not (isinstance(text, str) and len(text) == 16):
        raise ValueError(repr(text)[:40])
    return int(text, 16)


def check_name_is_free(name: str, deleted: Iterable[DeletedTopic]) -> None:
    """Refuse a name that homes still use.

    Raises:
        DeletionPendingError: names these homes.
    """
    homes = sorted({home for topic in deleted if topic.name == name for home in topic.homes})
    if homes:
        named = ", ".join(f"{home:016x}" for home in homes)
        raise DeletionPendingError(
            f"topic {name!r} was deleted, and home {named} has yet to drop its messages: repeat when it has done so, "
            "or take another name"
        )


def check_placement(topic: Topic, homes: Sequence[int]) -> None:
    """Refuse a topic that has not one home for each partition.

    Raises:
        InvalidNameError, RegistryError: the name is not allowed; the counts differ.
    """
    if not is_valid_name(topic.config.name):
        raise InvalidNameError(f"{topic.config.name[:64]!r} is not a topic name")
    if len(homes) != topic.config.partitions:
        raise RegistryError(f"topic {topic.config.name!r} has {topic.config.partitions} partitions, not {len(homes)}")


def check_alteration(stored: PlacedTopic, changed: PlacedTopic) -> None:
    """Refuse what cannot be altered.

    Raises:
        RegistryError: says what cannot.
    """
    check_placement(changed.topic, changed.homes)
    before, after = stored.topic.config, changed.topic.config
    if (after.name, after.storage) != (before.name, before.storage):
        raise RegistryError(f"topic {before.name!r}: name and storage cannot be altered; create another topic")
    if changed.homes[: len(stored.homes)] != stored.homes:
        raise RegistryError(f"topic {before.name!r}: a partition cannot be removed, or moved to another home")


def is_altered(stored: PlacedTopic, changed: PlacedTopic) -> bool:
    """Whether the topic is already as it must be."""
    return (stored.topic, stored.homes) == (changed.topic, changed.homes)


def check_count(count: int) -> None:
    """Refuse to draw no id, or too many.

    Raises:
        RegistryError: says how many can be drawn.
    """
    if not 1 <= count <= IDS_PER_CALL_MAX:
        raise RegistryError(f"{count} ids at once: 1 to {IDS_PER_CALL_MAX} can be drawn")


def check_anchor(kind: str, name: str) -> None:
    """Refuse names that no group or query can have.

    Raises:
        InvalidNameError: the kind or the name is not allowed.
    """
    if not (is_valid_name(name) and kind.isascii() and kind.isalpha()):
        raise InvalidNameError(f"{kind[:64]!r} {name[:64]!r} cannot have a home")
