"""The registry of a broker that is alone: memory. The broker's own journal makes it durable.

It begins with the topics that the journal has. There is one home, and the directory's lock keeps a second leader away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from txmq.errors import (
    ForeignClusterError,
    HomeInUseError,
    HomeSupersededError,
    RegistryConflictError,
    RegistryError,
    TopicExistsError,
    UnknownTopicError,
)
from txmq.registry.cluster_metadata import (
    NO_ACCESS,
    NOTHING_BROUGHT,
    TOPICS_MAX,
    Access,
    Brought,
    Candidate,
    Changes,
    DeletedTopic,
    HomeEntry,
    Leadership,
    Listener,
    PlacedTopic,
    Standing,
    TopicMap,
    check_alteration,
    check_anchor,
    check_changes,
    check_count,
    check_name_is_free,
    check_placement,
    has_users,
    is_altered,
)
from txmq.registry.topics import Topic
from txmq.runtime.threads import Lock


class EmbeddedRegistry:
    """See ``cluster_metadata.Registry``.

    Args:
        cluster: its id.
        home: the one home.
        topics: what the home's journal has.
    """

    def __init__(self, cluster: int, home: int, topics: Iterable[Topic] = ()) -> None:
        self._cluster, self._home = cluster, home
        self._lock = Lock()
        self._leadership: Leadership | None = None
        self._is_announced = False
        self._replicas: dict[int, str] = {}
        self._topics = {topic.config.name: PlacedTopic(topic, self._here(topic), 0) for topic in topics}
        self._deleted: dict[int, DeletedTopic] = {}
        self._anchors: dict[tuple[str, str], int] = {}
        self._version = 0
        self._last_query_epoch = 0
        self._last_id = max((placed.topic.topic_id for placed in self._topics.values()), default=0)
        self._access = NO_ACCESS
        self._listeners: dict[str, list[Listener]] = {"homes": [], "topics": [], "access": []}

    def join(self, cluster: int, standing: Standing, brought: Brought = NOTHING_BROUGHT) -> int:
        """See ``Registry``."""
        with self._lock:
            self._last_id = max(self._last_id, brought.last_topic_id)
            self._last_query_epoch = max(self._last_query_epoch, brought.last_query_epoch)
        if cluster != self._cluster and standing is not Standing.EMPTY:
            raise ForeignClusterError(f"the directory belongs to cluster {cluster:016x}, not to {self._cluster:016x}")
        return self._cluster

    def lead(self, candidate: Candidate) -> Leadership:
        """See ``Registry``."""
        self._require_here([candidate.home])
        with self._lock:
            led = self._leadership
            if led is not None and led.candidate.start == candidate.start:
                return led
            if led is not None and led.candidate.start not in candidate.former:
                raise HomeSupersededError(
                    f"home {candidate.home:016x} was led by a process that the journal does not know"
                )
            epoch = max(candidate.epoch, 0 if led is None else led.epoch) + 1
            self._leadership, self._is_announced = Leadership(candidate, epoch), False
            return self._leadership

    def announce(self, leadership: Leadership) -> None:
        """See ``Registry``."""
        with self._lock:
            if leadership != self._leadership:
                raise HomeSupersededError(f"home {leadership.candidate.home:016x} is led under a newer epoch: stop")
            self._is_announced = True
        self._tell("homes")

    def announce_replica(self, home: int, incarnation: int, address: str) -> None:
        """See ``Registry``."""
        self._require_here([home])
        with self._lock:
            self._replicas[incarnation] = address
        self._tell("homes")

    def retire_home(self, home: int, reason: str) -> None:
        """See ``Registry``. The one home is led by whoever asks."""
        self._require_here([home])
        raise HomeInUseError(f"home {home:016x} is led here: it is not lost ({reason})")

    def homes(self, listener: Listener | None = None) -> list[HomeEntry]:
        """See ``Registry``."""
        with self._lock:
            self._keep("homes", listener)
            if self._leadership is None:
                return []
            candidate, epoch = self._leadership
            address = candidate.address if self._is_announced else None
            replicas = tuple(there for _, there in sorted(self._replicas.items()))
            return [HomeEntry(candidate.home, candidate.name, epoch, address, replicas=replicas)]

    def reserve_topic_ids(self, count: int, above: int = 0) -> range:
        """See ``Registry``."""
        check_count(count)
        with self._lock:
            first = max(self._last_id, above) + 1
            self._last_id = first + count - 1
            return range(first, first + count)

    def create_topic(self, topic: Topic, homes: Sequence[int]) -> PlacedTopic:
        """See ``Registry``."""
        check_placement(topic, homes)
        self._require_here(homes)
        with self._lock:
            stored = self._topics.get(topic.config.name)
            if stored is not None and stored.topic.topic_id == topic.topic_id:
                return stored
            if stored is not None:
                raise TopicExistsError(f"topic {topic.config.name!r} exists")
            check_name_is_free(topic.config.name, self._deleted.values())
            if len(self._topics) >= TOPICS_MAX:
                raise RegistryError(f"there are {TOPICS_MAX} topics: delete some")
            self._last_id = max(self._last_id, topic.topic_id)
            placed = self._put(topic, tuple(homes))
        self._tell("topics")
        return placed

    def alter_topic(self, changed: PlacedTopic) -> PlacedTopic:
        """See ``Registry``."""
        with self._lock:
            stored = self._stored(changed.topic)
            if is_altered(stored, changed):
                return stored
            check_alteration(stored, changed)
            self._require_here(changed.homes)
            if stored.version != changed.version:
                raise RegistryConflictError(f"topic {changed.topic.config.name!r} was changed: read it again")
            placed = self._put(changed.topic, changed.homes)
        self._tell("topics")
        return placed

    def delete_topic(self, topic: Topic) -> None:
        """See ``Registry``."""
        with self._lock:
            stored = self._stored(topic)
            self._version += 1
            del self._topics[topic.config.name]
            self._deleted[topic.topic_id] = DeletedTopic(
                topic.topic_id, topic.config.name, tuple(sorted(set(stored.homes)))
            )
        self._tell("topics")

    def drop_topic(self, topic_id: int, home: int) -> None:
        """See ``Registry``."""
        with self._lock:
            if home == self._home:
                self._deleted.pop(topic_id, None)

    def topics(self, listener: Listener | None = None) -> TopicMap:
        """See ``Registry``."""
        with self._lock:
            self._keep("topics", listener)
            topics = tuple(placed for _name, placed in sorted(self._topics.items()))
            return TopicMap(self._version, topics, tuple(deleted for _id, deleted in sorted(self._deleted.items())))

    def draw_query_epoch(self, above: int = 0) -> int:
        """See ``Registry``."""
        with self._lock:
            self._last_query_epoch = max(self._last_query_epoch, above) + 1
            return self._last_query_epoch

    def anchor(self, kind: str, name: str, home: int) -> int:
        """See ``Registry``."""
        check_anchor(kind, name)
        self._require_here([home])
        with self._lock:
            return self._anchors.setdefault((kind, name), home)

    def anchors(self, kind: str, names: Sequence[str]) -> dict[str, int]:
        """See ``Registry``."""
        with self._lock:
            return {name: self._anchors[kind, name] for name in names if (kind, name) in self._anchors}

    def release_anchor(self, kind: str, name: str, home: int) -> None:
        """See ``Registry``."""
        check_anchor(kind, name)
        with self._lock:
            if self._anchors.get((kind, name)) == home:
                del self._anchors[kind, name]

    def access(self, listener: Listener | None = None) -> Access:
        """See ``Registry``."""
        with self._lock:
            self._keep("access", listener)
            return self._access

    def change_access(self, home: int, version: int, changes: Changes) -> Access:
        """See ``Registry``."""
        check_changes(changes)
        self._require_here([home])
        with self._lock:
            if version != self._access.version:
                raise RegistryConflictError(f"users, grants or quotas were changed: version {self._access.version}")
            if not changes:
                return self._access
            access = self._set_access(changes)
        self._tell("access")
        return access

    def publish_access(self, home: int, changes: Changes) -> None:
        """See ``Registry``."""
        self._require_here([home])
        with self._lock:
            is_known = has_users(self._access.records) or not has_users(changes)
            if self._access.version and is_known:
                return
            self._set_access(changes)
        self._tell("access")

    def _set_access(self, changes: Changes) -> Access:
        merged = {**self._access.records, **changes}
        records = {key: record for key, record in merged.items() if record is not None}
        self._access = Access(self._access.version + 1, records)
        return self._access

    def close(self) -> None:
        """See ``Registry``."""
        with self._lock:
            self._is_announced = False

    # -----------------------------------------------------------------------------------------------------------------

    def _here(self, topic: Topic) -> tuple[int, ...]:
        return (self._home,) * topic.config.partitions

    def _require_here(self, homes: Iterable[int]) -> None:
        for home in homes:
            if home != self._home:
                raise RegistryError(f"home {home:016x} is not in the registry: this broker is alone")

    def _stored(self, topic: Topic) -> PlacedTopic:
        stored = self._topics.get(topic.config.name)
        if stored is None or stored.topic.topic_id != topic.topic_id:
            raise UnknownTopicError(f"no topic {topic.config.name!r} with id {topic.topic_id}")
        return stored

    def _put(self, topic: Topic, homes: tuple[int, ...]) -> PlacedTopic:
        self._version += 1
        placed = PlacedTopic(topic, homes, self._version)
        self._topics[topic.config.name] = placed
        return placed

    def _keep(self, what: str, listener: Listener | None) -> None:
        if listener is not None:
            self._listeners[what].append(listener)

    def _tell(self, what: str) -> None:
        with self._lock:
            listeners, self._listeners[what] = self._listeners[what], []
        for listener in listeners:
            listener()
