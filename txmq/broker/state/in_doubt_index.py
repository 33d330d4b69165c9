"""An index of work in doubt: in order, and by whose it is. A page of a list touches what is on the page.

Each item has a number when it comes, and numbers only grow. Items leave in any order.

Invariants:
    * adding and removing cost the same however many there are, on average;
    * going on after a number costs a binary search, whether or not the item of that number is still there;
    * numbers whose items have left are at most as many as those that are there, and a few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
_LEFT_MAX = 32  # numbers of items that have left, beyond the number of those that are there


class Ordered(Generic[Item]):
    """Items in order of their numbers."""

    __slots__ = ("_first", "_items", "_numbers")

    def __init__(self) -> None:
        self._items: dict[int, Item] = {}
        self._numbers: list[int] = []  # ascending, also of some items that have left
        self._first = 0  # where in the list the first item is

    def __len__(self) -> int:
        return len(self._items)

    def add(self, number: int, item: Item) -> None:
        """One more; ``number`` is higher than all before."""
        self._numbers.append(number)
        self._items[number] = item

    def remove(self, number: int) -> None:
        """It is settled; one that is not there is none."""
        items, numbers = self._items, self._numbers
        if items.pop(number, None) is None:
            return
        while self._first < len(numbers) and numbers[self._first] not in items:
            self._first += 1
        if len(numbers) > 2 * len(items) + _LEFT_MAX:
            self._numbers, self._first = [*items], 0

    def behind(self, number: int) -> Iterator[tuple[int, Item]]:
        """Numbers and items after that number, in order; nothing may change meanwhile."""
        items, numbers = self._items, self._numbers
        for at in range(max(self._first, bisect_right(numbers, number)), len(numbers)):
            item = items.get(numbers[at])
            if item is not None:
                yield numbers[at], item


class InDoubtIndex(Generic[Item]):
    """All items in order, and those under each of some keys."""

    __slots__ = ("_all", "_under")

    def __init__(self) -> None:
        self._all: Ordered[Item] = Ordered()
        self._under: dict[str, Ordered[Item]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, number: int, item: Item, keys: tuple[str, ...]) -> None:
        """One more; ``number`` is higher than all before."""
        self._all.add(number, item)
        for key in keys:
            under = self._under.get(key)
            if under is None:
                under = self._under[key] = Ordered()
            under.add(number, item)

    def remove(self, number: int, keys: tuple[str, ...]) -> None:
        """It is settled."""
        self._all.remove(number)
        for key in keys:
            self.remove_under(number, key)

    def remove_under(self, number: int, key: str) -> None:
        """It is settled as far as that key is concerned."""
        under = self._under.get(key)
        if under is not None:
            under.remove(number)
            if not under:
                del self._under[key]

    def behind(self, number: int, key: str | None = None) -> Iterator[tuple[int, Item]]:
        """Numbers and items after that number, in order, of all or under one key; nothing may change meanwhile."""
        found = self._all if key is None else self._under.get(key)
        return iter(()) if found is None else found.behind(number)

    def count(self, key: str) -> int:
        """How many items there are under a key."""
        under = self._under.get(key)
        return 0 if under is None else len(under)
