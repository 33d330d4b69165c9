"""Topics in ZooKeeper: ids, the map of partitions to homes, and the homes of groups and queries.

Theory of operation. Every change of a topic is one transaction, in which the map's version grows by 1. So changes are
made one after another, one watch tells of all, and a map that was read is of one moment if its version is the same
before and after. That node also names the newest changes: so a broker reads again what changed, and not ten thousand
topics. A change whose connection was lost is looked for before it is tried again: a topic's
id is its own, and an untouched version proves that nothing happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from txmq.errors import BrokerError, RegistryConflictError, RegistryError, TopicExistsError, UnknownTopicError
from txmq.registry.cluster_metadata import (
    TOPICS_MAX,
    DeletedTopic,
    Listener,
    PlacedTopic,
    TopicMap,
    check_alteration,
    check_anchor,
    check_count,
    check_name_is_free,
    check_placement,
    is_altered,
)
from txmq.registry.topics import Topic
from txmq.registry.zookeeper import layout
from txmq.registry.zookeeper.layout import MapHead
from txmq.registry.zookeeper.nodes import Listeners, Nodes
from txmq.registry.zookeeper.session import (
    ANY_VERSION,
    BadVersionError,
    Check,
    ConnectionLossError,
    Create,
    Delete,
    Operation,
    Session,
    SetValue,
    Stat,
)

_T = TypeVar("_T")
_Find = Callable[[], _T | None]
_Plan = Callable[[int], tuple[list[Operation], _T]]


NEWEST_MAX: Final = 64  # changes that the map's node names


class _Read(NamedTuple):
    """All topics as they were read last.

    Attributes:
        tree: the session, and the change that made the map's node. Another session may be one with an ensemble that was
            emptied, whose numbers begin anew.
        changed: the change that last set the map's node.
    """

    tree: tuple[int, int]
    changed: int
    version: int
    topics: tuple[PlacedTopic, ...]  # sorted by name


class TopicNodes(Nodes):
    """See the module's docstring."""

    def __init__(self, session: Session, chroot: str = "") -> None:
        super().__init__(session, chroot)
        self._topic_listeners = Listeners()
        self._read: _Read | None = None

    # --- changes -----------------------------------------------------------------------------------------------------

    def reserve_topic_ids(self, count: int, above: int = 0) -> range:
        """See ``Registry``."""
        check_count(count)
        return self._attempts.run(lambda: self._draw(self._paths.last_id, count, above))

    def create_topic(self, topic: Topic, homes: Sequence[int]) -> PlacedTopic:
        """See ``Registry``."""
        check_placement(topic, homes)

        def find() -> PlacedTopic | None:
            stored = self._stored(topic.config.name)
            if stored is not None and stored.topic.topic_id != topic.topic_id:
                raise TopicExistsError(f"topic {topic.config.name!r} exists")
            return stored

        def plan(version: int) -> tuple[list[Operation], PlacedTopic]:
            check_name_is_free(topic.config.name, self._read_all(self._paths.deleted, layout.decode_deleted))
            self._require_room()
            self._require_homes(homes)
            placed = PlacedTopic(topic, tuple(homes), version)
            made = Create(self._paths.topic(topic.config.name), layout.encode_topic(placed))
            return [made, *self._raised(self._paths.last_id, topic.topic_id)], placed

        return self._change(topic.config.name, find, plan)

    def alter_topic(self, changed: PlacedTopic) -> PlacedTopic:
        """See ``Registry``."""

        def find() -> PlacedTopic | None:
            stored = self._stored(changed.topic.config.name)
            return stored if stored is not None and is_altered(stored, changed) else None

        def plan(version: int) -> tuple[list[Operation], PlacedTopic]:
            stored = self._required(changed.topic)
            check_alteration(stored, changed)
            self._require_homes(changed.homes)
            if stored.version != changed.version:
                raise RegistryConflictError(f"topic {changed.topic.config.name!r} was changed: read it again")
            altered = changed._replace(version=version)
            path = self._paths.topic(changed.topic.config.name)
            return [SetValue(path, layout.encode_topic(altered), ANY_VERSION)], altered

        return self._change(changed.topic.config.name, find, plan)

    def delete_topic(self, topic: Topic) -> None:
        """See ``Registry``."""
        tombstone = self._paths.deleted_topic(topic.topic_id)

        def find() -> bool | None:
            return None if self._session.exists(tombstone) is None else True

        def plan(_version: int) -> tuple[list[Operation], bool]:
            stored, name = self._required(topic), topic.config.name
            deleted = DeletedTopic(topic.topic_id, name, self._not_retired(stored.homes))
            gone = Delete(self._paths.topic(name), ANY_VERSION)
            return [gone, Create(tombstone, layout.encode_deleted(deleted))] if deleted.homes else [gone], True

        self._change(topic.config.name, find, plan)

    def drop_topic(self, topic_id: int, home: int) -> None:
        """See ``Registry``."""
        self._attempts.run(lambda: self._drop(self._paths.deleted_topic(topic_id), home))

    def _drop(self, path: str, home: int) -> None:
        found = self._find(path)
        if found is None:
            return
        deleted = layout.decode_deleted(path, found.value)
        left = tuple(other for other in deleted.homes if other != home)
        if not left:
            self._session.delete(path, found.stat.version)
        elif left != deleted.homes:
            self._session.set_value(path, layout.encode_deleted(deleted._replace(homes=left)), found.stat.version)

    def _change(self, name: str, find: _Find[_T], plan: _Plan[_T]) -> _T:
        """Change a topic and the map's version; the result.

        Args:
            name: the topic's; empty if it is none that changes.
            find: the result, if the change is made already.
            plan: the operations, and their result, under the map's next version.
        """
        lost_at: int | None = None

        def attempt() -> _T:
            nonlocal lost_at
            value, stat = self._session.get(self._paths.topics)
            version, newest = layout.decode_map(self._paths.topics, value)
            made = find()
            if made is not None:
                return made
            if lost_at is not None and version != lost_at:
                raise RegistryConflictError(
                    "the connection was lost during the change, and others came behind it: look whether it was made"
                )
            lost_at = None
            operations, result = self._of_one_moment(value, lambda: plan(version + 1))
            head = MapHead(version + 1, (*newest, (version + 1, name))[-NEWEST_MAX:])
            try:
                self._session.transact(
                    [SetValue(self._paths.topics, layout.encode_map(head), stat.version), *operations]
                )
            except ConnectionLossError:
                lost_at = version
                raise
            return result

        return self._attempts.run(attempt)

    def _of_one_moment(self, version: bytes, read: Callable[[], _T]) -> _T:
        """What ``read`` returns. A refusal counts only if the map did not change after it was read."""
        try:
            return read()
        except (RegistryError, BrokerError):
            if self._session.get(self._paths.topics).value == version:
                raise
        raise BadVersionError(f"{self._paths.topics} changed while it was read")

    # --- reads -------------------------------------------------------------------------------------------------------

    def topics(self, listener: Listener | None = None) -> TopicMap:
        """See ``Registry``."""
        self._topic_listeners.add(listener)
        return self._attempts.run(self._read_map)

    def _read_map(self) -> TopicMap:
        value, stat = self._topic_listeners.read(self._paths.topics, self._session.get)
        head = layout.decode_map(self._paths.topics, value)
        topics = self._topics_at(head, stat)
        deleted = self._read_all(self._paths.deleted, layout.decode_deleted)
        if self._session.get(self._paths.topics).value != value:
            raise BadVersionError(f"{self._paths.topics} changed while it was read")
        self._read = _Read((self._session.number, stat.created), stat.changed, head.version, topics)
        return TopicMap(head.version, topics, tuple(sorted(deleted)))

    def _topics_at(self, head: MapHead, stat: Stat) -> tuple[PlacedTopic, ...]:
        """All topics; of those that were read last, what has changed since is read again."""
        known = self._read
        if known is None or known.tree != (self._session.number, stat.created):
            return tuple(self._read_all(self._paths.topics, layout.decode_topic))
        names = _touched_since(head, known.version)
        if names is None or (known.version == head.version and known.changed != stat.changed):
            return tuple(self._read_all(self._paths.topics, layout.decode_topic))
        if not names:
            return known.topics
        topics = {placed.topic.config.name: placed for placed in known.topics}
        paths = [self._paths.topic(name) for name in names]
        for name, path, node in zip(names, paths, self._session.get_many(paths), strict=True):
            if node is None:
                topics.pop(name, None)
            else:
                topics[name] = layout.decode_topic(path, node.value)
        return tuple(topics[name] for name in sorted(topics))

    def _read_all(self, parent: str, decode: Callable[[str, bytes], _T]) -> list[_T]:
        paths = [f"{parent}/{name}" for name in self._session.children(parent)]
        found = zip(paths, self._session.get_many(paths), strict=True)
        return [decode(path, node.value) for path, node in found if node is not None]

    def _stored(self, name: str) -> PlacedTopic | None:
        path = self._paths.topic(name)
        found = self._find(path)
        return None if found is None else layout.decode_topic(path, found.value)

    def _required(self, topic: Topic) -> PlacedTopic:
        stored = self._stored(topic.config.name)
        if stored is None or stored.topic.topic_id != topic.topic_id:
            raise UnknownTopicError(f"no topic {topic.config.name!r} with id {topic.topic_id}")
        return stored

    def _require_room(self) -> None:
        stat = self._session.exists(self._paths.topics)
        if stat is not None and stat.children >= TOPICS_MAX:
            raise RegistryError(f"there are {TOPICS_MAX} topics: delete some")

    def _not_retired(self, homes: Sequence[int]) -> tuple[int, ...]:
        distinct = sorted(set(homes))
        paths = [self._paths.state(home) for home in distinct]
        found = zip(distinct, paths, self._session.get_many(paths), strict=True)
        return tuple(
            home for home, path, node in found if node is None or not layout.decode_state(path, node.value).retired
        )

    def _require_homes(self, homes: Sequence[int]) -> None:
        distinct = sorted(set(homes))
        found = self._session.get_many([self._paths.state(home) for home in distinct])
        unknown = [f"{home:016x}" for home, node in zip(distinct, found, strict=True) if node is None]
        if unknown:
            raise RegistryError(f"home {', '.join(unknown)} is not in the registry: start its broker first")

    # --- queries and groups ------------------------------------------------------------------------------------------

    def draw_query_epoch(self, above: int = 0) -> int:
        """See ``Registry``."""
        return self._attempts.run(lambda: self._draw(self._query_epochs(), 1, above)[0])

    def anchor(self, kind: str, name: str, home: int) -> int:
        """See ``Registry``."""
        check_anchor(kind, name)
        path = self._paths.anchor(kind, name)
        return self._attempts.run(lambda: self._anchor(path, home))

    def _anchor(self, path: str, home: int) -> int:
        found = self._find(path)
        if found is not None:
            return layout.decode_home(path, found.value)
        self._require_homes([home])
        self._session.create(path, layout.encode_home(home))
        return home

    def anchors(self, kind: str, names: Sequence[str]) -> dict[str, int]:
        """See ``Registry``."""
        paths = [self._paths.anchor(kind, name) for name in names]
        found = self._attempts.run(lambda: self._session.get_many(paths))
        homes = zip(names, paths, found, strict=True)
        return {name: layout.decode_home(path, node.value) for name, path, node in homes if node is not None}

    def release_anchor(self, kind: str, name: str, home: int) -> None:
        """See ``Registry``."""
        check_anchor(kind, name)
        self._attempts.run(lambda: self._release(self._paths.anchor(kind, name), home))

    def _release(self, path: str, home: int) -> None:
        """Delete it only as it was read: after an answer that was lost, the name may be another home's.

        A release that arrives after the death of its process must not delete the anchor of the next one. The node's
        version is no fence: made anew, it begins at 0 again. Each process that leads the home changes its state.
        """
        state = self._paths.state(home)
        fence = Check(state, self._session.get(state).stat.version)
        found = self._find(path)
        if found is not None and layout.decode_home(path, found.value) == home:
            self._session.transact([fence, Delete(path, found.stat.version)])


def _touched_since(head: MapHead, version: int) -> list[str] | None:
    """The topics that changed after a version; None: it is not known any more."""
    behind = [change for change in head.newest if change[0] > version]
    if version > head.version or len(behind) != head.version - version:
        return None
    return sorted({name for _version, name in behind if name})
