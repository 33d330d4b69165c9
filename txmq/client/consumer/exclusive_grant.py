"""The grant of a consumer that must be the only one of its group, over several homes.

Theory of operation. One home, the group's anchor, says which member has everything, under a number that grows. The
consumer joins the other homes under that number: each lets go of whichever member had an older one. A consumer begins
nothing before every home has heard of its grant, unless the holder before it left in order. So a consumer that is taken
for gone at the anchor, and is alive at another home, never consumes at the same time as its successor. A home that is
away holds up a successor that way, and never the holder.

Invariant: a consumer that loses its grant, or cannot reach the anchor for the session timeout, gives up everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from txmq.client.consumer.assigned_partitions import AssignedPartitions


class ExclusiveGrant:
    """See the module's docstring. A broker that is alone, and members that share, know of no grant. Thread-safe.

    Args:
        count_homes: how many homes there are.

    Attributes:
        anchor: the number of the consumer's home that grants; None while it is not known.
        number: of the grant; 0 without one.
    """

    def __init__(self, assignment: AssignedPartitions, count_homes: Callable[[], int]) -> None:
        self._assignment, self._count_homes = assignment, count_homes
        self.anchor: int | None = None
        self.number = 0
        self._is_clean = False
        self._heard: frozenset[int] = frozenset()  # the homes that know this grant

    def seen(self, home: int, view: dict[str, Any], stated: int) -> None:
        """A home has answered a member that stated a grant."""
        if "grant" in view:
            self.anchor = home
            if view["grant"] != self.number:
                self.lose()
            self.number, self._is_clean = view["grant"], view["clean"]
        if stated == self.number or home == self.anchor:
            self._heard |= {home}

    def lose(self) -> None:
        """It is another member's by now, or may be: give up everything."""
        self.number, self._heard = 0, frozenset()
        with self._assignment.changed:
            held = list(self._assignment.partitions)
        for slot in held:
            self._assignment.lost(slot)

    def may_begin(self) -> bool:
        """Whether no other consumer has anything."""
        return self.anchor is None or (self.number > 0 and (self._is_clean or len(self._heard) >= self._count_homes()))
