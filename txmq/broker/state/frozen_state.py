"""A copy of the broker's state for a checkpoint: made at once on the event loop, formatted and encoded in a thread.

``State.freeze`` copies references only; rows of JSON are made of them one at a time when ``encode`` asks for them, and
what is formatted is let go of. The text is what one ``json.dumps`` of the whole would be.

Invariants:
    * nothing that a frozen state refers to changes any more: small containers are copied, and what they hold is
      immutable or complete;
    * no call holds the interpreter's lock for long: a row that is long is encoded item by item, and after
      ``PIECE_SIZE`` characters the lock is given away.

Not compiled: between two lines of Python the interpreter hands its lock to the event loop, compiled code does not.
"""

from __future__ import annotations

import gc
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from txmq.broker.state import group_offsets, session
from txmq.log import partition
from txmq.registry.topics import Topic

PIECE_SIZE: Final = 16 << 10  # characters: about 0.7 ms
_ITEMS_MAX: Final = 500  # in one call of the encoder, at each level: 0.5 ms of sequences
_LEVELS: Final = 2  # of lists below a row that are looked at for long ones
_encoder: Final = json.JSONEncoder(separators=(",", ":"))

Producer = tuple[int, int, tuple[tuple[int, int, int], ...]]  # its number; the rest is of its Sequences
_T = TypeVar("_T")


@dataclass(slots=True)
class FrozenState:
    """What ``State.freeze`` copied. ``sections`` can be gone through once."""

    numbers: dict[str, int]
    topics: list[Topic]
    partitions: deque[tuple[int, int, partition.Frozen, list[Producer]]]
    sessions: deque[session.Frozen]
    transactions: list[list[Any]]
    decisions: dict[str, Any]
    groups: deque[group_offsets.Frozen]
    generation_floor: int
    queries: dict[str, Any]

    def sections(self) -> Iterator[tuple[str, Any]]:
        """Name and value of each; an iterator stands for a long list."""
        yield from self.numbers.items()
        yield "topics", (topic.to_json() for topic in self.topics)
        yield (
            "partitions",
            (
                [topic_id, number, partition.row(frozen), producers]
                for topic_id, number, frozen, producers in _taken(self.partitions)
            ),
        )
        yield "sessions", map(session.row, _taken(self.sessions))
        yield "transactions", iter(self.transactions)
        yield "decisions", self.decisions
        yield "groups", map(group_offsets.row, _taken(self.groups))
        yield "generation_floor", self.generation_floor
        yield "queries", self.queries

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


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for: among ten thousands of new objects that all live on, that takes longer than to copy."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _taken(rows: deque[_T]) -> Iterator[_T]:
    """Each row once; it is let go of one by one, not all at the end."""
    while rows:
        yield rows.popleft()


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
