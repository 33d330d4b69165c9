"""What an outbox's database knows of topics, for processes that cannot ask a broker.

Theory of operation. A message that waits names its partition, so who puts it there needs the number of partitions.
``install`` writes the topics down, and each block with messages for a topic that is newer than what stands here brings
it up to date, in its own database transaction (``tell``). A block that fills the outbox reads the number again behind
its own rows (``newest``): so the number changes in the order of the rows, for all processes at once, and no message of
a key goes to its former partition behind one that went to the new one.

Table::

    <table>_outbox_topics  name (primary key), topic_id, partitions, homes (of each partition; NULL: a lone broker's)

Invariant: what stands here never becomes older. Ids of topics rise, and partitions of a topic only grow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from txmq.xa.database.dbapi import Connection, run, text
from txmq.xa.database.dialects import Dialect
from txmq.xa.database.marker_table import written_out

_NEWER = (
    "ON CONFLICT (name) DO UPDATE SET topic_id = excluded.topic_id, partitions = excluded.partitions, "
    "homes = excluded.homes WHERE {table}.topic_id < excluded.topic_id "
    "OR ({table}.topic_id = excluded.topic_id AND ({table}.partitions < excluded.partitions "
    "OR ({table}.partitions = excluded.partitions AND {table}.homes IS NULL)))"
)
_LARGER = "topic_id < VALUES(topic_id) OR (topic_id = VALUES(topic_id) AND partitions < VALUES(partitions))"
_UPSERT = {
    "sqlite": _NEWER,
    "postgresql": _NEWER,
    # An assignment sees what those before it have made.
    "mysql": (
        f"ON DUPLICATE KEY UPDATE homes = IF({_LARGER} OR (topic_id = VALUES(topic_id) "
        "AND partitions = VALUES(partitions) AND homes IS NULL), VALUES(homes), homes), "
        f"partitions = IF({_LARGER}, VALUES(partitions), partitions), topic_id = GREATEST(topic_id, VALUES(topic_id))"
    ),
}


class TopicSize(NamedTuple):
    """A topic, how many partitions it has, and the home of each; of two with one name the larger one is the newer one.

    Attributes:
        homes: none if a broker without a registry told it.
    """

    topic_id: int
    partitions: int
    homes: tuple[int, ...] = ()


class OutboxTopics:
    """The statements on one database's table. Has no connection of its own and keeps no state."""

    def __init__(self, marker: str, dialect: Dialect, placeholder: str) -> None:
        self.name = f"{marker}_outbox_topics"
        self._dialect, self._mark = dialect, placeholder
        self._written: tuple[Mapping[str, TopicSize], str] = ({}, "")

    def tell(self, connection: Connection, topics: Iterable[tuple[str, TopicSize]]) -> None:
        """Write down what is newer than what stands there, in the transaction that is open."""
        marks = ", ".join([self._mark] * 4)
        newer = _UPSERT[self._dialect.name].format(table=self.name)
        for name, size in sorted(topics):  # each locks a row
            run(
                connection,
                f"INSERT INTO {self.name} (name, topic_id, partitions, homes) VALUES ({marks}) {newer}",  # noqa: S608
                (name, size.topic_id, size.partitions, _written(size.homes)),
            )

    def none_newer(self, sizes: Mapping[str, TopicSize]) -> tuple[str, list[str]]:
        """A condition that nothing newer of these topics stands there, as SQL with its parameters; for an INSERT."""
        conditions, names = list[str](), list[str]()
        for name, size in sorted(sizes.items()):
            topic_id, partitions = int(size.topic_id), int(size.partitions)
            newer = f"topic_id > {topic_id} OR (topic_id = {topic_id} AND partitions > {partitions})"
            if not size.homes:
                newer += f" OR (topic_id = {topic_id} AND partitions = {partitions} AND homes IS NOT NULL)"
            conditions.append(f"(name = ? AND ({newer}))")
            names.append(name)
        if not conditions:
            return "1 = 1", []
        return f"NOT EXISTS (SELECT 1 FROM {self.name} WHERE {' OR '.join(conditions)})", names  # noqa: S608

    def none_newer_written(self, sizes: Mapping[str, TopicSize]) -> str:
        """The same as SQL without parameters; empty for no topics. Raises ValueError: a name is none."""
        known, written = self._written
        if known != sizes:
            written = written_out(self.none_newer(sizes))
            self._written = dict(sizes), written  # most blocks are about the topics of the one before
        return written

    def newest(self, connection: Connection, names: Collection[str] | None = None) -> dict[str, TopicSize]:
        """What stands there of some topics, or of all, in the transaction that is open."""
        wanted = "" if names is None else f" WHERE name IN ({', '.join([self._mark] * len(names))})"
        select = f"SELECT name, topic_id, partitions, homes FROM {self.name}{wanted}"  # noqa: S608
        rows, _ = run(connection, select, sorted(names or ()))
        return {
            text(name): TopicSize(int(topic_id), int(partitions), _read(homes))
            for name, topic_id, partitions, homes in rows
        }


def _written(homes: Sequence[int]) -> str | None:
    return ",".join(f"{home:016x}" for home in homes) or None


def _read(homes: Any) -> tuple[int, ...]:
    return tuple(int(home, 16) for home in text(homes).split(",")) if homes else ()
