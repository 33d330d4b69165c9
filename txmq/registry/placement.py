"""Which homes a topic's new partitions are placed in: the least loaded of those that are led, and have room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace

from txmq.errors import OverloadedError
from txmq.registry.cluster_metadata import HomeEntry, PlacedTopic


class Room:
    """The homes that take new partitions, and how many they have.

    Args:
        homes: those that are led take some, and ``own``, whose leader asks.
    """

    def __init__(self, topics: Iterable[PlacedTopic], homes: Sequence[HomeEntry], own: int) -> None:
        self._loads = Counter(home for placed in topics for home in placed.homes)
        self._homes = {own, *(home.home for home in homes if home.address is not None)}

    def spread(self, existing: Sequence[int], count: int, partitions_max: int) -> tuple[int, ...]:
        """Homes for ``count`` more partitions: each to the one with the fewest of this topic, then of all, then by id.

        Args:
            existing: the homes of the topic's partitions.

        Raises:
            OverloadedError: no home would have ``partitions_max`` or less.
        """
        own = Counter(existing)
        ranking = [(own[home], self._loads[home], home) for home in self._homes if self._loads[home] < partitions_max]
        heapify(ranking)
        chosen: list[int] = []
        while len(chosen) < count:
            if not ranking:
                raise OverloadedError(f"partitions_max {partitions_max} would be passed in every home that is led")
            of_topic, load, home = ranking[0]
            chosen.append(home)
            if load + 1 < partitions_max:
                heapreplace(ranking, (of_topic + 1, load + 1, home))
            else:
                heappop(ranking)
        return tuple(chosen)
