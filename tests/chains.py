"""The causes and contexts of an exception, as error trackers and retry libraries walk it."""

from __future__ import annotations


def has_circle(error: BaseException) -> bool:
    """Whether ``__cause__`` and ``__context__`` lead back to where they were."""
    above: set[int] = set()
    done: set[int] = set()

    def walk(one: BaseException | None) -> bool:
        if one is None or id(one) in done:
            return False
        if id(one) in above:
            return True
        above.add(id(one))
        found = walk(one.__cause__) or walk(one.__context__)
        above.discard(id(one))
        done.add(id(one))
        return found

    return walk(error)
