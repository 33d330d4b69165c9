"""What mutations have in common: seeds are played until a history fails with what is looked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from tools.simulation.run import Result


def seed_that_catches(play: Callable[[int], Result], finding: str, *, first: Iterable[int], then: Iterable[int]) -> int:
    """The first seed that finds it.

    Args:
        play: runs a seed, with the mutation.
        finding: a pattern of the error.
        first: seeds known to find it, the cheapest first: as a rule no other is played.
        then: what is played when these find nothing any more, because histories have moved.

    Raises:
        AssertionError: no seed finds it.
    """
    seeds = list(dict.fromkeys((*first, *then)))
    for number, seed in enumerate(seeds, 1):
        if re.search(finding, play(seed).error or ""):
            print(f"caught by seed {seed}, the {number}. of {len(seeds)}")
            return seed
    raise AssertionError(f"{len(seeds)} seeds found nothing: {finding}")
