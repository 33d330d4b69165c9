"""Scripts: what one client asks of a small broker, one step after the other.

Requests are numbered, messages named, transactions counted, so that the same script can be asked again of whatever a
crash left: that is what a client does that never heard an answer. ``check`` plays scripts and says what must be true.

The client's session is number 1, its batches carry that producer id and sequences without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tools.simulated.clock import START_MS
from txmq.log import records
from txmq.log.batch import checksum
from txmq.model import TopicPartition
from txmq.protocol.group_rows import GroupOffsets, OffsetRow, encode_offsets
from txmq.protocol.transaction_bodies import encode_branch

from .node import Node

UUID = "a" * 32
GROUP = "g"
QUERY = "q"
OF_ANOTHER_HOME = ("of", "homes", "branch")
_BRANCH = {"bqual": "b", "connection": 1, "wrote": True, "marker": True, "table": "txmq_marker"}
Fate = Literal["committed", "rolled-back", "prepared", "stream"]
"""What the script makes of a transaction; a stream commits only if no restart came between its parts."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        number: of the request in its script; the opaque is made of it.
        counter: of the transaction it belongs to; 0 for none.
        once: what it does cannot be asked twice with the same answer (``put tx=``, ``topic``, ``prepare``).
        adds: messages that a 200 promises, in order of the answer's lines.
        winners: counters of the transactions that a batch's decision names.

    In ``extensions``, the values of OF_ANOTHER_HOME are counters of transactions there.
    """

    number: int
    verb: str
    arguments: tuple[str | int, ...]
    extensions: Mapping[str, str | int | None] = field(default_factory=dict)
    body: bytes | None = None
    counter: int = 0
    once: bool = False
    topics: tuple[str, ...] = ()
    adds: tuple[tuple[TopicPartition, tuple[bytes, ...]], ...] = ()
    winners: tuple[int, ...] = ()

    @property
    def opaque(self) -> bytes:
        """Its token on the wire."""
        return b"n%d" % self.number


@dataclass(frozen=True, slots=True)
class Do:
    """Something that is done to the broker, not asked of it; ``what`` None is a restart."""

    what: Callable[[Node], object] | None
    name: str


@dataclass(slots=True)
class Transaction:
    """What the script does with one transaction."""

    parts: list[tuple[TopicPartition, tuple[bytes, ...]]] = field(default_factory=list)
    batches: list[bytes] = field(default_factory=list)
    fate: Fate = "committed"
    offset: int = 0  # that it saves for the group, of partition 0 of topic a; 0 for none
    is_branch: bool = False  # of a transaction that another home decides
    is_page: bool = False  # of an outbox


class Script:
    """Requests and events in order; written by the methods below, each of which adds one step.

    Requests between ``together()`` and the next event or ``apart()`` share a group commit.
    """

    def __init__(self, name: str, *, sync: str = "always", padding: int = 40) -> None:
        self.name, self.sync, self.padding = name, sync, padding
        self.steps: list[list[Ask] | Do] = []
        self.transactions: dict[int, Transaction] = {}
        self.topics: list[str] = []
        self.deleted: set[str] = set()
        self._requests = self._messages = 0
        self._sequences: dict[TopicPartition, int] = {}
        self._together = False

    # --- writing ---

    def topic(self, name: str, **settings: str | int) -> Script:
        """Create a topic."""
        self.topics.append(name)
        return self._ask("topic", "create", name, extensions=settings, once=True, topics=(name,))

    def alter(self, name: str, **settings: str | int) -> Script:
        """Alter a topic."""
        return self._ask("topic", "alter", name, extensions=settings, once=True, topics=(name,))

    def delete(self, name: str) -> Script:
        """Delete a topic."""
        self.deleted.add(name)
        return self._ask("topic", "delete", name, once=True, topics=(name,))

    def put(self, topic: str, partition: int = 0, *, count: int = 1, size: int = 0) -> Script:
        """Put one batch with the session's next sequence."""
        place = topic, partition
        sequence = self._sequences.get(place, 0)
        self._sequences[place] = sequence + count
        values, batch = self._batch(count, size, sequence)
        return self._ask("put", topic, partition, body=batch, topics=(topic,), adds=((place, values),))

    def local(
        self, counter: int, *places: TopicPartition, count: int = 1, homes: bool = False, waits: bool = False
    ) -> Script:
        """A local transaction with one part for each place.

        Args:
            homes: it has a branch at another home.
            waits: for a branch here; the ``commit`` that follows tells its places.
        """
        body = self._parts(counter, places, count, keys="7" if waits else "")
        return self._commit(counter, body, places, {"homes": counter} if homes else None, waits=waits)

    def consumes(self, counter: int, offset: int, fate: Fate = "committed") -> Script:
        """A transaction saves the group's offset of partition 0 of topic a, as its first owner."""
        self._transaction(counter, fate).offset = offset
        return self

    def stream(self, counter: int, topic: str, partition: int = 0, *, count: int = 1, size: int = 0) -> Script:
        """One part of a streamed transaction."""
        values, batch = self._batch(count, size, -1)
        self._transaction(counter, "stream").parts.append(((topic, partition), values))
        self.transactions[counter].batches.append(batch)
        return self._ask("put", topic, partition, extensions={"tx": counter}, body=batch, counter=counter, once=True,
                         topics=(topic,))  # fmt: skip

    def commit_stream(self, counter: int, *places: TopicPartition) -> Script:
        """Commit what was streamed, with more parts in the request itself."""
        stated = self._stated(counter)
        return self._commit(counter, self._parts(counter, places, 1, fate="stream"), places, stated)

    def prepare(self, counter: int, *places: TopicPartition, count: int = 1, keys: str = "7", fate: Fate = "committed",
                streamed: bool = False) -> Script:  # fmt: skip
        """Prepare; ``fate`` is what the script makes of it later."""
        stated = self._stated(counter) if streamed else {}
        body = self._parts(counter, places, count, keys=keys, fate=fate)
        extensions = {"resource": "db", "uuid": UUID, "table": "txmq_marker", **stated, **self._saving(counter)}
        body = self._saved(counter) + body
        return self._ask("prepare", str(counter), "last-resource", extensions=extensions, body=body, counter=counter,
                         once=True, topics=tuple(topic for topic, _ in places))  # fmt: skip

    def branch(self, counter: int, *places: TopicPartition, held: bool = False) -> Script:
        """Prepare a part of a transaction that another home decides; ``commit`` says that it is committed."""
        body = self._parts(counter, places, 1, keys="7")
        self.transactions[counter].is_branch = True
        given: dict[str, int | None] = {"of": counter, **({"held": None} if held else {}), **self._saving(counter)}
        return self._ask("prepare", str(counter), "branch", extensions=given, body=self._saved(counter) + body,
                         counter=counter, once=True, topics=tuple(topic for topic, _ in places))  # fmt: skip

    def page(self, counter: int, after: int, *places: TopicPartition, waits: bool = False) -> Script:
        """A page of an outbox follows the one of transaction ``after``, 0 for none; ``waits`` as of ``local``."""
        body = self._parts(counter, places, 1, keys="7" if waits else "") if places else b""
        self._transaction(counter, "committed").is_page = True
        adds = () if waits else tuple(self.transactions[counter].parts)
        words: dict[str, str | int] = {"outbox": UUID, "name": "shop", "after": after}
        return self._ask("commit", str(counter), extensions=words, body=body, counter=counter, adds=adds,
                         topics=tuple(topic for topic, _ in places))  # fmt: skip

    def draw(self, number: int) -> Script:
        """A database's fencing token, numbered from 1, follows the one before."""
        after = {"after": f"{number - 1:032x}"} if number > 1 else {}
        return self._ask("token", UUID, f"{number:032x}", extensions=after, once=True)

    def complete_home(self, counter: int) -> Script:
        """The other home reports its branch."""
        return self._ask("complete", str(counter), extensions={"branch": counter}, counter=counter)

    def commit(self, counter: int) -> Script:
        """Commit what is prepared, or waits for its place."""
        return self._commit(counter, b"", ())

    def decide(
        self, counter: int, *places: TopicPartition, branches: int = 1, streamed: bool = False, homes: bool = False,
        waits: bool = False,
    ) -> Script:  # fmt: skip
        """Decide with branches, whose resources are numbered; ``homes`` and ``waits`` as of ``local``."""
        stated = self._stated(counter) if streamed else {}
        body = b"".join(encode_branch(f"db{number}", _uuid(number), _BRANCH) for number in range(branches))
        fate: Fate = "stream" if streamed else "committed"
        body += self._saved(counter) + self._parts(counter, places, 1, keys="7" if waits else "", fate=fate)
        adds = tuple(self.transactions[counter].parts)
        given = {"branches": branches, **stated, **self._saving(counter), **({"homes": counter} if homes else {})}
        return self._ask("decide", str(counter), extensions=given, body=body, counter=counter,
                         adds=() if waits else adds, topics=tuple(topic for (topic, _), _ in adds))  # fmt: skip

    def complete(self, counter: int, number: int = 0) -> Script:
        """Report a branch."""
        topics = tuple(topic for (topic, _), _ in self.transactions[counter].parts)
        return self._ask("complete", str(counter), extensions={"uuid": _uuid(number)}, counter=counter, topics=topics)

    def rollback(self, counter: int) -> Script:
        """Roll back, whether it exists or not."""
        self._transaction(counter, "rolled-back")
        return self._ask("rollback", str(counter), counter=counter)

    def fence(self, counter: int) -> Script:
        """``outcome fence``."""
        self._transaction(counter, "rolled-back")
        return self._ask("outcome", str(counter), extensions={"fence": None}, counter=counter)

    def group(self, action: str, *rows: Sequence[object], member: str = "m") -> Script:
        """Consumer groups: ``join`` topics a and b, ``reset`` offsets, ``leave``."""
        named: dict[str, dict[str, str | int | None]] = {
            "join": {"member": member, "topics": "a,b"}, "leave": {"member": member}, "reset": {"create": None},
        }  # fmt: skip
        words = named[action]
        body = json.dumps(rows).encode()
        return self._ask("group", action, GROUP, extensions=words, body=body, once=action != "reset")

    def query(self, action: str, epoch: int, **words: int) -> Script:
        """A driver's life opens the query, or ends it."""
        return self._ask("query", action, QUERY, extensions={"epoch": epoch, **words}, body=b"", once=True)

    def write(
        self, counter: int, *places: TopicPartition, epoch: int, batch: int, task: int = 0, attempt: int = 0,
        fate: Fate = "committed",
    ) -> Script:  # fmt: skip
        """One task attempt's part of a batch."""
        body = self._parts(counter, places, 1, fate=fate)
        words = {"query": QUERY, "epoch": epoch, "batch": batch, "task": task, "attempt": attempt}
        return self._ask("prepare", str(counter), "spark", extensions=words, body=body, counter=counter, once=True,
                         topics=tuple(topic for topic, _ in places))  # fmt: skip

    def decide_batch(self, *winners: int, epoch: int, batch: int) -> Script:
        """The driver names the winners."""
        adds = tuple(part for counter in winners for part in self.transactions[counter].parts)
        return self._ask("query", "commit", QUERY, extensions={"epoch": epoch, "batch": batch}, body=b"", once=True,
                         adds=adds, topics=tuple(topic for (topic, _), _ in adds), winners=winners)  # fmt: skip

    def do(self, what: Callable[[Node], object], name: str) -> Script:
        """An event."""
        self._together = False
        self.steps.append(Do(what, name))
        return self

    def checkpoint(self) -> Script:
        """The state is written, the journal released."""
        return self.do(Node.checkpoint, "checkpoint")

    def together(self) -> Script:
        """What is asked from here on shares a group."""
        self._together = True
        self.steps.append([])
        return self

    def apart(self) -> Script:
        """Every request has its own group again."""
        self._together = False
        return self

    def restart(self) -> Script:
        """The process is killed and started again."""
        self._together = False
        self.steps.append(Do(None, "restart"))
        return self

    # --- what was written ---

    @property
    def asks(self) -> list[Ask]:
        """All requests, in order."""
        return [ask for step in self.steps if isinstance(step, list) for ask in step]

    @property
    def places(self) -> dict[bytes, TopicPartition]:
        """Where each message goes."""
        return {value: place for ask in self.asks for place, values in ask.adds for value in values}

    def _ask(self, verb: str, *arguments: str | int, **rest: object) -> Script:
        self._requests += 1
        ask = Ask(self._requests, verb, arguments, **rest)  # type: ignore[arg-type]
        if self._together and isinstance(self.steps[-1], list):
            self.steps[-1].append(ask)
        else:
            self.steps.append([ask])
        return self

    def _commit(
        self, counter: int, body: bytes, places: tuple[TopicPartition, ...], stated: Mapping[str, int] | None = None,
        *, waits: bool = False,
    ) -> Script:  # fmt: skip
        adds = tuple(self.transactions[counter].parts)
        given = dict(stated or {})
        if body:  # what was prepared has brought its offset
            given, body = given | self._saving(counter), self._saved(counter) + body
        return self._ask("commit", str(counter), extensions=given, body=body, counter=counter,
                         adds=() if waits else adds, topics=tuple(topic for (topic, _), _ in adds))  # fmt: skip

    def _saved(self, counter: int) -> bytes:
        offset = self._transaction(counter, "committed").offset
        return encode_offsets([GroupOffsets(GROUP, 0, (OffsetRow("a", 0, 1, offset, "x"),))]) if offset else b""

    def _saving(self, counter: int) -> dict[str, int]:
        size = len(self._saved(counter))
        return {"offsets": size} if size else {}

    def _transaction(self, counter: int, fate: Fate) -> Transaction:
        return self.transactions.setdefault(counter, Transaction(fate=fate))

    def _stated(self, counter: int) -> dict[str, int]:
        batches, crc = self.transactions[counter].batches, 0
        for batch in batches:
            crc = checksum(batch, crc)
        return {"parts": len(batches), "bytes": sum(map(len, batches)), "crc": crc}

    def _parts(
        self, counter: int, places: tuple[TopicPartition, ...], count: int, *, keys: str = "", fate: Fate = "committed"
    ) -> bytes:
        transaction, pieces = self._transaction(counter, fate), []
        for topic, partition in places:
            values, batch = self._batch(count, 0, -1)
            transaction.parts.append(((topic, partition), values))
            words = f"{topic} {partition} {len(batch)}" + (f" keys={keys}" if keys else "")
            pieces.append(f"{words}\r\n".encode() + batch)
        return b"".join(pieces)

    def _batch(self, count: int, size: int, sequence: int) -> tuple[tuple[bytes, ...], bytes]:
        values = []
        for _ in range(count):
            self._messages += 1
            values.append((b"m%d." % self._messages).ljust(size or self.padding, b"-"))
        producer = (1, 0, sequence) if sequence >= 0 else (-1, -1, -1)
        rows = [(b"k", value, (), START_MS) for value in values]
        batch = records.encode(rows, producer_id=producer[0], producer_epoch=producer[1], base_sequence=producer[2])
        return tuple(values), bytes(batch)


def _uuid(number: int) -> str:
    """Identity of the resource of a branch."""
    return f"{number:032x}"
