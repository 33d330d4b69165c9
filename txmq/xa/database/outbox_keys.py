"""The keys by which messages of an outbox keep their order, and those of rows that others stay behind.

Theory of operation. A row that stays (parked, recalled) holds back later rows of its keys, and they hold back those
behind them. ``HeldKeys`` knows since which row that is so for each key and slot: a look costs the same however many
rows are held back.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import NamedTuple

ANY_KEY = "*"


class OutboxKey(NamedTuple):
    """A key that waits: ``topic-partition`` and the key's hash, or ANY_KEY."""

    slot: str
    hash: str

    def collides(self, other: OutboxKey) -> bool:
        """Whether messages of the two keep their order: also where the topic has grown, and the key has moved."""
        if ANY_KEY in (self.hash, other.hash):
            return self.slot == other.slot
        return self.hash == other.hash and self.topic == other.topic

    @property
    def topic(self) -> str:
        """The topic of the slot."""
        return self.slot.rpartition("-")[0]


class HeldKeys:
    """Keys of rows that stay. A place is a number by which rows are ordered."""

    def __init__(self) -> None:
        self._slots: dict[str, float] = {}  # any row of the slot
        self._whole: dict[str, float] = {}  # one that stands for its whole slot
        self._keys: dict[tuple[str, str], float] = {}  # by topic and hash

    def __bool__(self) -> bool:
        return bool(self._slots)

    def add(self, keys: Collection[OutboxKey], place: int) -> None:
        """A row at this place stays."""
        for key in keys:
            self._slots[key.slot] = min(self._slots.get(key.slot, inf), place)
            if key.hash == ANY_KEY:
                self._whole[key.slot] = min(self._whole.get(key.slot, inf), place)
            else:
                name = key.topic, key.hash
                self._keys[name] = min(self._keys.get(name, inf), place)

    def hold(self, keys: Collection[OutboxKey], place: int) -> bool:
        """Whether a row at this place has one of these keys behind a row that stays."""
        return any(self._since(key) < place for key in keys)

    def _since(self, key: OutboxKey) -> float:
        if key.hash == ANY_KEY:
            return self._slots.get(key.slot, inf)
        return min(self._whole.get(key.slot, inf), self._keys.get((key.topic, key.hash), inf))
