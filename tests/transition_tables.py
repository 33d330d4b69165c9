"""What a table of transitions allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

StateT = TypeVar("StateT")


def reachable(table: Mapping[tuple[StateT, Any], tuple[StateT, Any]], start: StateT) -> set[StateT]:
    """The states that any events lead to from ``start``, and itself."""
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        new = {following for (before, _), (following, _) in table.items() if before == state} - found
        found |= new
        todo.extend(new)
    return found
