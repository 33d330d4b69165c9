"""A copy of the broker's state for a checkpoint: made at once on the event loop, formatted and encoded in a thread.

``State.freeze`` copies references only; rows of JSON are made of them one at a time when ``encode`` asks for them, and
what is formatted is let go of. The text is what one ``json.dumps`` of the whole would be.

The copies of sessions, partitions, transactions and decisions are *packed*: a list holds the fields of hundreds of
rows, one after the other. A tuple for each row would be a new object, and the garbage collector would walk over all of
them on the loop, for as long as copying takes.

Invariants:
    * nothing that a frozen state refers to changes any more: small containers are copied, and what they hold is
      immutable or complete;
    * no call holds the interpreter's lock for long: a row that is long is encoded item by item, and after
      ``PIECE_SIZE`` characters the lock is given away.

Not compiled: between two lines of Python the interpreter hands its lock to the event loop, compiled code does not.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

from txmq.broker.state import (
    decisions,
    fencing_tokens,
    group_offsets,
    outbox_chains,
    producer_sequences,
    session,
    transaction,
    visibility,
)
from txmq.log import partition
from txmq.registry.cluster_metadata import PlacedTopic
from txmq.registry.topics import Topic

PIECE_SIZE: Final = 16 << 10  # characters
_ITEMS_MAX: Final = 500  # in one call of the encoder, at each level
_LEVELS: Final = 2  # of lists below a row that are looked at for long ones
_encoder: Final = json.JSONEncoder(separators=(",", ":"))

PACKED_MAX: Final = 5000  # fields in one list, and those of the row that passes it
Packed = deque[list[Any]]
_HEURISTIC_FIELDS: Final = 3  # session, counter, facts
_T = TypeVar("_T")


@dataclass(slots=True)
class FrozenState:
    """What ``State.freeze`` copied. ``sections`` can be gone through once.

    Attributes:
        partitions: topic id, number, the fields of ``Partition.freeze``; number, next sequence and recent batches of
            each producer; None.
        sessions: the fields of ``Session.freeze``; the others likewise, of what ``row`` of their module takes.
    """

    numbers: dict[str, int]
    life: str
    topics: list[Topic]
    placed: dict[int, PlacedTopic]
    partitions: Packed
    sessions: Packed
    issued_sessions: Packed
    transactions: Packed
    incomplete: Packed
    barriers: Packed
    heuristics: Packed
    branch_parts: Packed
    groups: group_offsets.Frozen
    generation_floor: int
    queries: dict[str, Any]
    registration: dict[str, Any] | None
    fencing_tokens: Packed
    outbox_chains: Packed
    principals: dict[str, Any] | None

    def sections(self) -> Iterator[tuple[str, Any]]:
        """Name and value of each; an iterator stands for a long list."""
        yield from self.numbers.items()
        yield "life", self.life
        yield "topics", ((self.placed.get(topic.topic_id) or topic).to_json() for topic in self.topics)
        yield "partitions", _partition_rows(self.partitions)
        yield "sessions", _rows(self.sessions, session.FROZEN_FIELDS, session.row)
        yield "issued_sessions", _rows(self.issued_sessions, session.RUN_FIELDS, list)
        yield "transactions", _rows(self.transactions, transaction.FROZEN_FIELDS, transaction.row)
        yield (
            "decisions",
            {
                "undone": _rows(self.incomplete, decisions.FROZEN_FIELDS, decisions.row),
                "holds": _rows(self.barriers, visibility.FROZEN_FIELDS, visibility.row),
                "heuristics": _rows(self.heuristics, _HEURISTIC_FIELDS, list),
            },
        )
        yield "groups", group_offsets.rows(self.groups)
        yield "generation_floor", self.generation_floor
        yield "queries", self.queries
        if self.registration is not None:
            yield "registration", self.registration
        if any(self.branch_parts):  # with several homes only
            yield "branch_parts", _rows(self.branch_parts, decisions.PART_FIELDS, list)
        if any(self.fencing_tokens):
            yield "fencing_tokens", _rows(self.fencing_tokens, fencing_tokens.FROZEN_FIELDS, list)
        if any(self.outbox_chains):
            yield "outbox_chains", _rows(self.outbox_chains, outbox_chains.FROZEN_FIELDS, list)
        if self.principals is not None:
            yield "principals", self.principals

    def plain(self) -> dict[str, Any]:
        """JSON-able: what ``State.restore`` takes."""
        return {name: _plain(value) for name, value in self.sections()}

    def encode(self, give_way: Callable[[], None]) -> bytearray:
        """As JSON. ``give_way`` is called now and then, to let other threads run."""
        content, size = bytearray(), 0
        texts: list[str] = []
        for text in self._texts():
            texts.append(text)
            size += len(text)
            if size >= PIECE_SIZE:
                content += "".join(texts).encode()
                texts, size = [], 0
                give_way()
        content += "".join(texts).encode()
        return content

    def _texts(self) -> Iterator[str]:
        before = "{"
        for name, value in self.sections():
            yield f"{before}{_encoder.encode(name)}:"
            yield from _texts_of(value)
            before = ","
        yield "}"


def _partition_rows(packed: Packed) -> Iterator[list[Any]]:
    for fields in map(iter, _taken(packed)):
        for topic_id in fields:
            number, frozen = next(fields), tuple(islice(fields, partition.FROZEN_FIELDS))
            producers = [
                [producer, next(fields), producer_sequences.batches(next(fields))]
                for producer in iter(fields.__next__, None)
            ]
            yield [topic_id, number, partition.row(frozen), producers]


def _rows(packed: Packed, size: int, row: Callable[[tuple[Any, ...]], list[Any]]) -> Iterator[list[Any]]:
    for fields in map(iter, _taken(packed)):
        while frozen := tuple(islice(fields, size)):
            yield row(frozen)


def _taken(rows: deque[_T]) -> Iterator[_T]:
    """Each row once; it is let go of one by one, not all at the end."""
    while rows:
        yield rows.popleft()


def packed(rows: Iterable[tuple[Any, ...]]) -> Packed:
    """The fields of rows, one after the other."""
    fields: list[Any] = []
    found = deque([fields])
    for row in rows:
        if len(fields) >= PACKED_MAX:
            fields = []
            found.append(fields)
        fields += row
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, Iterator) else value


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        before = "{"
        for name, item in value.items():
            yield f"{before}{_encoder.encode(name)}:"
            yield from _texts_of(item)
            before = ","
        yield "}"
    elif isinstance(value, Iterator) or _is_long(value, _LEVELS):
        before = "["
        for item in value:
            yield before
            yield from _texts_of(item)
            before = ","
        yield "]" if before == "," else "[]"
    else:
        yield _encoder.encode(value)


def _is_long(value: object, levels: int) -> bool:
    """Whether encoding it at once may take long."""
    if isinstance(value, dict):
        return any(_is_long(item, levels) for item in value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return len(value) > _ITEMS_MAX or (levels > 0 and any(_is_long(item, levels - 1) for item in value))
