"""What an outbox's database knows of topics, for processes that cannot ask a broker.

Theory of operation. A message that waits names its partition, so who puts it there needs the number of partitions.
``install`` writes the topics down, and each block with messages for a topic that is newer than what stands here brings
it up to date, in its own database transaction (``tell``). A block that fills the outbox reads the number again behind
its own rows (``newest``): so the number changes in the order of the rows, for all processes at once, and no message of
a key goes to its former partition behind one that went to the new one.

Table::

    <table>_outbox_topics  name (primary key), topic_id, partitions

Invariant: what stands here never becomes older. Ids of topics rise, and partitions of a topic only grow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from txmq.xa.database.dbapi import Connection, run, text
from txmq.xa.database.dialects import Dialect

_NEWER = (
    "ON CONFLICT (name) DO UPDATE SET topic_id = excluded.topic_id, partitions = excluded.partitions "
    "WHERE {table}.topic_id < excluded.topic_id "
    "OR ({table}.topic_id = excluded.topic_id AND {table}.partitions < excluded.partitions)"
)
_UPSERT = {
    "sqlite": _NEWER,
    "postgresql": _NEWER,
    # The second assignment sees what the first one has made.
    "mysql": (
        "ON DUPLICATE KEY UPDATE partitions = IF(topic_id < VALUES(topic_id) OR (topic_id = VALUES(topic_id) "
        "AND partitions < VALUES(partitions)), VALUES(partitions), partitions), "
        "topic_id = GREATEST(topic_id, VALUES(topic_id))"
    ),
}


class TopicSize(NamedTuple):
    """A topic, and how many partitions it has; of two with one name the larger one is the newer one."""

    topic_id: int
    partitions: int


class OutboxTopics:
    """The statements on one database's table. Has no connection of its own and keeps no state."""

    def __init__(self, marker: str, dialect: Dialect, placeholder: str) -> None:
        self.name = f"{marker}_outbox_topics"
        self._dialect, self._mark = dialect, placeholder

    def tell(self, connection: Connection, topics: Iterable[tuple[str, TopicSize]]) -> None:
        """Write down what is newer than what stands there, in the transaction that is open."""
        marks = ", ".join([self._mark] * 3)
        newer = _UPSERT[self._dialect.name].format(table=self.name)
        for name, size in sorted(topics):  # each locks a row
            run(
                connection,
                f"INSERT INTO {self.name} (name, topic_id, partitions) VALUES ({marks}) {newer}",  # noqa: S608
                (name, *size),
            )

    def newest(self, connection: Connection, names: Collection[str] | None = None) -> dict[str, TopicSize]:
        """What stands there of some topics, or of all, in the transaction that is open."""
        wanted = "" if names is None else f" WHERE name IN ({', '.join([self._mark] * len(names))})"
        rows, _ = run(connection, f"SELECT name, topic_id, partitions FROM {self.name}{wanted}", sorted(names or ()))  # noqa: S608
        return {text(name): TopicSize(int(topic_id), int(partitions)) for name, topic_id, partitions in rows}
