"""What an outbox's database knows of topics, for processes that cannot ask a broker.

Theory of operation. A message that waits names its partition, so who puts it there needs the number of partitions.
``install`` writes the topics down, and each block with messages for a topic that is newer than what stands here brings
it up to date, in its own database transaction (``tell``). A block that fills the outbox reads the number again behind
its own rows (``newest``): so the number changes in the order of the rows, for all processes at once, and no message of
a key goes to its former partition behind one that went to the new one.

A query costs MySQL and MariaDB a quarter of what such a block costs them at all. So there the topics have an *age*, a
number that rises whenever something is told, and the places of the outbox's rows (``seq``) are numbers of that age: who
tells has the server count on from the first place of the new age, at once, and whoever comes behind his commit is given
such a place. A block that has read topics and age together (``newest_of_age``) knows by the age of its row's place
alone that nothing was told since. A place of another age proves nothing: then the topics are read. So does a server
that counts from elsewhere (restored without its counter): the next block begins a new age. (The counter has to outlive
the server, as InnoDB's does since MariaDB 10.2.4 and MySQL 8.0; before, it is found anew from the rows that are left.)

Table::

    <table>_outbox_topics  name (primary key), topic_id, partitions, homes (of each partition; NULL: a lone broker's);
                           in MySQL and MariaDB a row without a name, whose partitions are the age

Invariants:
    * what stands here never becomes older: ids of topics rise, and partitions of a topic only grow;
    * who tells has begun a new age before he commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from txmq.xa.database.dbapi import Connection, run, text
from txmq.xa.database.dialects import Dialect
from txmq.xa.database.statement import Statement

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


_AGE = ""  # the name of the row that has the age
_AGE_BITS = 42  # of a place: so many rows, four million million, have one age
_IS_OF_AGE = f"LAST_INSERT_ID() >> {_AGE_BITS} = %s"


def is_of_age(age: int) -> Statement:
    """A condition that the last row of this session was given a place of that age, as SQL for MySQL and MariaDB."""
    return Statement(_IS_OF_AGE, (str(int(age)),))


class TopicSize(NamedTuple):
    """A topic, how many partitions it has, and the home of each; of two with one name the larger one is the newer one.

    Attributes:
        homes: none if a broker without a registry told it.
    """

    topic_id: int
    partitions: int
    homes: tuple[int, ...] = ()


class TopicsAgreed(NamedTuple):
    """What a block's database knows of its topics.

    Attributes:
        newer: what it knows better.
        age: of the topics, if it knew them all and they have one.
    """

    newer: dict[str, TopicSize]
    age: int | None


class OutboxTopics:
    """The statements on one database's table. Has no connection of its own and keeps no state."""

    def __init__(self, marker: str, dialect: Dialect, placeholder: str) -> None:
        self.name = f"{marker}_outbox_topics"
        self._rows, self._dialect, self._mark = f"{marker}_outbox", dialect, placeholder

    @property
    def have_age(self) -> bool:
        """Whether this kind of database has a use for it."""
        return self._dialect.name == "mysql"

    def tell(self, connection: Connection, topics: Iterable[tuple[str, TopicSize]]) -> None:
        """Write down what is newer than what stands there, in the transaction that is open."""
        news = sorted(topics)  # each locks a row
        if news and self.have_age:
            self.begin_age(connection)
        marks = ", ".join([self._mark] * 4)
        newer = _UPSERT[self._dialect.name].format(table=self.name)
        for name, size in news:
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

    def agree(
        self, connection: Connection, topics: Mapping[str, TopicSize], distrusted: int | None = None
    ) -> TopicsAgreed:  # fmt: skip
        """Write down what is newer than what stands there, in the transaction that is open; what is newer there.

        Args:
            distrusted: an age that rows do not have, though it is that of the topics: another one begins.
        """
        age, known = self.newest_of_age(connection, topics)
        # One that is told locks a row until the commit: only what is news.
        news = [it for it in topics.items() if it[0] not in known or known[it[0]] < it[1]]
        self.tell(connection, news)
        if not news and self.have_age and age in (None, distrusted):
            self.begin_age(connection)
            age = None
        newer = {name: one for name, one in known.items() if one > topics[name]}
        return TopicsAgreed(newer, None if news else age)

    def begin_age(self, connection: Connection) -> None:
        """Make all rows of the outbox whose INSERT comes later be of a new age; in the transaction that is open.

        Others that tell wait for its end.
        """
        table, rows = self.name, self._rows
        there = f"INSERT INTO {table} (name, topic_id, partitions) VALUES ('{_AGE}', 0, 0)"  # noqa: S608
        run(connection, f"{there} ON DUPLICATE KEY UPDATE topic_id = 0")
        ((age,),) = run(connection, f"SELECT partitions FROM {table} WHERE name = '{_AGE}' FOR UPDATE")[0]  # noqa: S608
        ((last,),) = run(connection, f"SELECT COALESCE(MAX(seq), 0) FROM {rows}")[0]  # noqa: S608
        new = max(int(age), int(last) >> _AGE_BITS) + 1
        first = new << _AGE_BITS
        # The server counts on behind a number that was given by hand, at once, and whether or not the row is kept.
        columns = "seq, number, id, state, written_ms, size_bytes, reason, batches"
        row = f"{first}, 0, 'age-{new}', '{_AGE}', 0, 0, '', ''"
        run(connection, f"INSERT INTO {rows} ({columns}) VALUES ({row})")  # noqa: S608
        run(connection, f"DELETE FROM {rows} WHERE seq = {first}")  # noqa: S608
        run(connection, f"UPDATE {table} SET partitions = {new} WHERE name = '{_AGE}'")  # noqa: S608

    def newest(self, connection: Connection, names: Collection[str] | None = None) -> dict[str, TopicSize]:
        """What stands there of some topics, or of all, in the transaction that is open."""
        return self.newest_of_age(connection, names)[1]

    def newest_of_age(
        self, connection: Connection, names: Collection[str] | None = None
    ) -> tuple[int | None, dict[str, TopicSize]]:
        """The same by one query with the age of the topics; None if they have none."""
        asked = [] if names is None else [_AGE, *sorted(names)]
        wanted = "" if names is None else f" WHERE name IN ({', '.join([self._mark] * len(asked))})"
        rows, _ = run(connection, f"SELECT name, topic_id, partitions, homes FROM {self.name}{wanted}", asked)  # noqa: S608
        found = {
            text(name): TopicSize(int(topic_id), int(partitions), _read(homes))
            for name, topic_id, partitions, homes in rows
        }
        age = found.pop(_AGE, None)
        return None if age is None else age.partitions, found


def _written(homes: Sequence[int]) -> str | None:
    return ",".join(f"{home:016x}" for home in homes) or None


def _read(homes: Any) -> tuple[int, ...]:
    return tuple(int(home, 16) for home in text(homes).split(",")) if homes else ()
