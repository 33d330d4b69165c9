"""What the journals of homes know of their cluster, and what is rebuilt from that: for an ensemble that lost its data.

Theory of operation. Each home has journaled all topics of the cluster, its users and the homes that are given up, as it
last heard of them; and by itself its epoch, its incarnations, its queries and its grants. Of everything the newest
version counts. A registry that was restored from a backup is one more source: ``Rebuilt`` is merged with it where it is
written (``zookeeper.rebuilding``).

Invariants:
    * nothing is deleted: a topic that some know and others do not is kept, and told. It may have been deleted while a
      home was away; an operator deletes it again;
    * contradictions are refused, and nothing is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from txmq.errors import RegistryError
from txmq.registry.access import Access
from txmq.registry.cluster_metadata import PlacedTopic, parse_home

FORMAT: Final = 1


class Facts(NamedTuple):
    """What one home's journal knows.

    Attributes:
        incarnations: of all its starts, the newest last.
        grants: by group with one member for everything, the newest grant that is known: its anchor knows the highest.
        retired: by home that is given up, why.
    """

    cluster: int
    home: int
    epoch: int
    incarnations: tuple[int, ...]
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
            "incarnations": [f"{number:032x}" for number in self.incarnations],
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
                tuple(int(number, 16) for number in fields["incarnations"]),
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
