"""A registry is rebuilt from the journals of its homes: for an ensemble that lost its data, or has older ones.

Theory of operation. Each home has journaled all topics of the cluster, its users and the homes that are given up, as it
last heard of them; and by itself its epoch, its starts, its queries and its grants (``Facts``). Of everything the
newest version counts (``rebuilt``). A registry that was restored from a backup is one more source: it is merged where
the nodes are written (``Rebuilding``).

No broker leads a home meanwhile. Every node is set to what is newer, the ensemble's or the journals'; so it may be done
again, and goes on where it ended. The cluster's node is made last in an empty ensemble: brokers wait for it. The map's
version rises above all that were heard of, so that every home takes the map over. A home's state names its newest
start, so that a copy of its directory from before is refused; and stands under the home's number as its name,
until its broker brings its own.

Invariants:
    * nothing is deleted: a topic that some know and others do not is kept, and told. It may have been deleted while a
      home was away; an operator deletes it again;
    * contradictions are refused, and nothing is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from txmq.errors import HomeInUseError, HomeSupersededError, RegistryError
from txmq.registry.cluster_metadata import NOTHING_BROUGHT, Access, PlacedTopic, Standing, has_users, parse_home
from txmq.registry.zookeeper import layout
from txmq.registry.zookeeper.access import AccessNodes, by_size
from txmq.registry.zookeeper.layout import AccessHead, HomeState, MapHead
from txmq.registry.zookeeper.registry import RetiredNodes
from txmq.registry.zookeeper.session import ANY_VERSION, Create, NodeExistsError, Operation, SetValue

FORMAT: Final = 1


class Facts(NamedTuple):
    """What one home's journal knows.

    Attributes:
        starts: by which the registry may know its directory; the one that led it last is the last.
        grants: by group with one member for everything, the newest grant that is known: its anchor knows the highest.
        retired: by home that is given up, why.
    """

    cluster: int
    home: int
    epoch: int
    starts: tuple[int, ...]
    topics: tuple[PlacedTopic, ...]
    last_topic_id: int
    queries: tuple[str, ...]
    last_query_epoch: int
    grants: Mapping[str, int]
    retired: Mapping[int, str]
    access: Access

    def to_json(self) -> dict[str, Any]:
        """JSON-able; with the keys of users, and what brokers know each other by."""
        return {
            "format": FORMAT, "cluster": f"{self.cluster:016x}", "home": f"{self.home:016x}", "epoch": self.epoch,
            "starts": [f"{number:032x}" for number in self.starts],
            "topics": [placed.to_json() for placed in self.topics], "last_topic_id": self.last_topic_id,
            "queries": list(self.queries), "last_query_epoch": self.last_query_epoch, "grants": dict(self.grants),
            "retired": {f"{home:016x}": reason for home, reason in self.retired.items()},
            "access": {"version": self.access.version, "records": {k: dict(v) for k, v in self.access.records.items()}},
        }  # fmt: skip

    @classmethod
    def from_json(cls, fields: Any) -> Facts:
        """The reverse.

        Raises:
            RegistryError: these are none, or a newer txmq's.
        """
        try:
            if fields["format"] != FORMAT:
                raise RegistryError(f"facts of format {fields['format']}, this txmq reads {FORMAT}: upgrade txmq")
            access = fields["access"]
            return cls(
                parse_home(fields["cluster"]), parse_home(fields["home"]), int(fields["epoch"]),
                tuple(int(number, 16) for number in fields["starts"]),
                tuple(PlacedTopic.from_json(topic) for topic in fields["topics"]), int(fields["last_topic_id"]),
                tuple(map(str, fields["queries"])), int(fields["last_query_epoch"]),
                {str(group): int(grant) for group, grant in fields["grants"].items()},
                {parse_home(home): str(reason) for home, reason in fields["retired"].items()},
                Access(int(access["version"]), dict(access["records"])),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise RegistryError(f"not the facts of a home ({error!r}): make them with txmq cluster facts") from None


class Rebuilt(NamedTuple):
    """What is rebuilt from the facts. ``version``: the newest that a home has heard of."""

    cluster: int
    homes: Mapping[int, Facts]
    topics: tuple[PlacedTopic, ...]  # sorted by name
    version: int
    last_topic_id: int
    last_query_epoch: int
    anchors: Mapping[tuple[str, str], int]  # by kind and name
    retired: Mapping[int, str]
    access: Access
    notes: tuple[str, ...]  # what an operator should look at


def rebuilt(facts: Sequence[Facts], lost: Mapping[int, str]) -> Rebuilt:
    """Put together what homes know.

    Args:
        lost: homes that are lost for ever, and why: they are given up (``Registry.retire_home``).

    Raises:
        RegistryError: facts are missing, of several clusters, given twice, or contradict each other.
    """
    homes = {one.home: one for one in facts}
    clusters = sorted({one.cluster for one in facts})
    if len(clusters) != 1 or len(homes) != len(facts):
        named = ", ".join(f"{cluster:016x}" for cluster in clusters) or "none"
        raise RegistryError(f"facts of each home of one cluster are wanted, once; these are of {named}")
    topics = newest_topics(facts)
    retired = {home: reason for one in facts for home, reason in one.retired.items()} | dict(lost)
    if retired.keys() & homes.keys():
        named = ", ".join(f"{home:016x}" for home in sorted(retired.keys() & homes.keys()))
        raise RegistryError(f"home {named} is given up, and has facts: leave the one or the other out")
    placed_in = {home for topic in topics for home in topic.homes}
    missing = sorted(placed_in - homes.keys() - retired.keys())
    if missing:
        named = ", ".join(f"{home:016x}" for home in missing)
        raise RegistryError(f"home {named} has partitions: give its facts, too, or say --lost, if it is lost for ever")
    return Rebuilt(
        clusters[0], homes, topics, max((topic.version for topic in topics), default=0),
        max(max(one.last_topic_id for one in facts), *(topic.topic.topic_id for topic in topics), 0),
        max(one.last_query_epoch for one in facts), _anchors(facts), retired,
        max((one.access for one in facts), key=lambda access: access.version), tuple(_doubts(facts, topics)),
    )  # fmt: skip


def newest_topics(facts: Iterable[Facts]) -> tuple[PlacedTopic, ...]:
    """Each topic as of its newest version, sorted by name.

    Raises:
        RegistryError: two of one version differ, or two topics have one name.
    """
    return merged_topics(topic for one in facts for topic in one.topics)


def merged_topics(known: Iterable[PlacedTopic]) -> tuple[PlacedTopic, ...]:
    """The same of topics from anywhere."""
    by_id: dict[int, PlacedTopic] = {}
    for topic in known:
        other = by_id.setdefault(topic.topic.topic_id, topic)
        if other.version == topic.version and other != topic:
            raise RegistryError(
                f"topic {topic.topic.topic_id} is known in two ways of version {topic.version} "
                f"({topic.topic.config.name!r}, {other.topic.config.name!r}): these homes had different registries"
            )
        if topic.version > other.version:
            by_id[topic.topic.topic_id] = topic
    by_name: dict[str, PlacedTopic] = {}
    for topic in by_id.values():
        other = by_name.setdefault(topic.topic.config.name, topic)
        if other is not topic:
            ids = sorted((topic.topic.topic_id, other.topic.topic_id))
            raise RegistryError(f"topic {topic.topic.config.name!r} is known with ids {ids[0]} and {ids[1]}")
    return tuple(by_name[name] for name in sorted(by_name))


def _anchors(facts: Iterable[Facts]) -> dict[tuple[str, str], int]:
    """A query is known to its anchor alone; of a group, the anchor knows the newest grant."""
    found: dict[tuple[str, str], int] = {}
    newest: dict[str, int] = {}
    for one in facts:
        for query in one.queries:
            other = found.setdefault(("query", query), one.home)
            if other != one.home:
                raise RegistryError(f"query {query!r} is that of home {other:016x} and of home {one.home:016x}")
        for group, grant in one.grants.items():
            if grant > newest.get(group, 0):
                newest[group], found["group", group] = grant, one.home
    return found


def _doubts(facts: Sequence[Facts], topics: Iterable[PlacedTopic]) -> Iterable[str]:
    for topic in topics:
        unknown = [one.home for one in facts if topic.topic.topic_id not in {t.topic.topic_id for t in one.topics}]
        if unknown:
            named = ", ".join(f"{home:016x}" for home in unknown)
            yield (
                f"topic {topic.topic.config.name!r} is kept, and home {named} does not know it: delete it again if it "
                "was deleted while others were away"
            )


class Rebuilding(RetiredNodes, AccessNodes):
    """See the module's docstring."""

    def rebuild(self, made: Rebuilt) -> None:
        """Make the registry what ``made`` says, where it says something newer. May be repeated.

        Raises:
            ForeignClusterError: another cluster is there.
            HomeInUseError: a home is led: its broker must be stopped.
            HomeSupersededError: a home was led since its facts were made.
            RegistryError: topics contradict what is there; or users, where everybody could write them.
        """
        if has_users(made.access.records):
            self._require_closed_nodes()
        self._attempts.run(lambda: self._found_nodes(made))
        for facts in made.homes.values():
            self._attempts.run(partial(self._put_home, facts))
        self._attempts.run(lambda: self._put_topics(made))
        for (kind, name), home in made.anchors.items():
            self.anchor(kind, name, home)
        for home, reason in made.retired.items():
            self._attempts.run(partial(self._put_retired, home, reason))
        self._attempts.run(lambda: self._put_access(made))
        self._attempts.run(lambda: self._put_cluster(made))

    def _found_nodes(self, made: Rebuilt) -> None:
        found = self._find(self._paths.cluster)
        if found is not None:
            self._join(made.cluster, Standing.MEMBER, NOTHING_BROUGHT)
        for path, value in self._paths.fixed():
            try:
                self._session.create(path, value, is_public=path == self._paths.homes)
            except NodeExistsError:
                continue
        for home in self._homes():
            if home.address is not None:
                raise HomeInUseError(
                    f"home {home.home:016x} is led at {home.address}: stop all brokers first; of one that has died, "
                    "the ZooKeeper session is about to expire"
                )
        raised = [
            *self._raised(self._paths.last_id, made.last_topic_id),
            *self._raised(self._query_epochs(), made.last_query_epoch),
        ]
        if raised:
            self._session.transact(raised)

    def _put_home(self, facts: Facts) -> None:
        path = self._paths.state(facts.home)
        found = self._find(path)
        if found is None:
            state = HomeState(facts.epoch, facts.starts[-1], f"{facts.home:016x}")
            name = Create(self._paths.name(state.name), layout.encode_home(facts.home))
            self._session.transact([*self._draw_epoch(facts.home, None, state), name])
            return
        known = layout.decode_state(path, found.value)
        if known.retired:
            return
        if known.start not in facts.starts:
            raise HomeSupersededError(
                f"home {facts.home:016x} has epoch {known.epoch}, drawn by a process that its facts do not know: make "
                "them anew of the directory that was led last"
            )
        state = known._replace(epoch=max(known.epoch, facts.epoch), start=facts.starts[-1])
        self._session.transact([SetValue(path, layout.encode_state(state), found.stat.version)])

    def _put_topics(self, made: Rebuilt) -> None:
        value, stat = self._session.get(self._paths.topics)
        there = self._read_all(self._paths.topics, layout.decode_topic)
        deleted = {one.topic_id for one in self._read_all(self._paths.deleted, layout.decode_deleted)}
        known = {placed.topic.topic_id: placed for placed in there}
        for placed in merged_topics([*there, *(one for one in made.topics if one.topic.topic_id not in deleted)]):
            path = self._paths.topic(placed.topic.config.name)
            if placed.topic.topic_id not in known:
                self._session.create(path, layout.encode_topic(placed))
            elif placed != known[placed.topic.topic_id]:
                self._session.set_value(path, layout.encode_topic(placed), ANY_VERSION)
        version = max(layout.decode_map(self._paths.topics, value).version, made.version) + 1
        self._session.set_value(self._paths.topics, layout.encode_map(MapHead(version, ())), stat.version)

    def _put_retired(self, home: int, reason: str) -> None:
        """As the journals have it; of a home that had no state there is nothing but that."""
        path = self._paths.state(home)
        found = self._find(path)
        if found is None:
            state = HomeState(1, 0, f"{home:016x}", reason)
            self._session.transact(self._draw_epoch(home, None, state))
        elif not layout.decode_state(path, found.value).retired:
            self.retire_home(home, reason)

    def _put_access(self, made: Rebuilt) -> None:
        head, node_version = self._head()
        if node_version is not None and head.publisher is None and head.version >= made.access.version:
            return
        if head.publisher is None:
            publisher = min(made.homes)  # nobody reads what is not whole
            self._session.transact([self._head_set(head._replace(publisher=publisher), node_version)])
            head, node_version = self._head()
        for key in self._session.children(self._paths.access):
            if key not in made.access.records:
                self._session.delete(self._paths.access_record(key), ANY_VERSION)
        for some in by_size(self._set_records(made.access.records)):
            self._session.transact(some)
        version = max(head.version, made.access.version)
        self._session.transact([self._head_set(AccessHead(version, None, ()), node_version)])

    def _put_cluster(self, made: Rebuilt) -> None:
        path = self._paths.cluster
        value = layout.encode_cluster(made.cluster, has_users=has_users(self._session.children(self._paths.access)))
        found = self._find(path)
        operation: Operation = Create(path, value) if found is None else SetValue(path, value, found.stat.version)
        self._session.transact([operation])
