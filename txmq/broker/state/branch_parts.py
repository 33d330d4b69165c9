"""Parts of other homes' transactions that this home has placed, until the home that decided knows it.

A part of the state, so a fold over the journal: the COMMITTED of a prepared part of kind ``branch`` makes an entry,
REPORTED ends it. The home that decided keeps its decision for as long: it forgets nothing that a branch still needs.
If that home is lost for ever, an operator ends it: a REPORTED with the fact, which is kept as a heuristic outcome.

A part of an XA transaction is *held*: readers see it when the databases' branches have committed, which the home that
decided says when the part is reported to it, or after ``visibility_hold_ms_max`` (SHOWN).

Invariant: a part leaves only when the home that decided has journaled that it is placed, or was given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from txmq.broker.state.in_doubt_index import Ordered
from txmq.broker.state.visibility import VisibilityBarrier, VisibilityBarriers
from txmq.log.partition import LogPosition, Partition
from txmq.xid import TxId

Name = tuple[int, int]  # session, counter
FROZEN_FIELDS: Final = 5
Frozen = tuple[int, int, str, bool, list[Any]]


class BranchPart:
    """One part that is placed.

    Attributes:
        of: id of the transaction, whose home decided.
        barrier: readers wait for it; None if the part was never held.
        offsets: what it saved for consumer groups, while it is held.
        number: in order of their places, in this incarnation of the broker.
        placed_ms: wall time, 0 if that was before the broker started.
        is_durable: the record that placed it is forced. In memory only.
    """

    __slots__ = ("barrier", "is_durable", "name", "number", "of", "offsets", "placed_ms")

    def __init__(self, name: Name, of: str, barrier: VisibilityBarrier | None, offsets: list[Any], number: int) -> None:
        self.name, self.of, self.barrier, self.offsets, self.number = name, of, barrier, offsets, number
        self.placed_ms, self.is_durable = 0, False

    @property
    def is_held(self) -> bool:
        """Whether readers must not see it yet."""
        return self.barrier is not None and not self.barrier.is_ended


class BranchParts:
    """All of them.

    Attributes:
        unreported: in order of their places.
        held: those of them that readers must not see yet.
        listed: ``unreported`` by number.
    """

    def __init__(self) -> None:
        self.unreported: dict[Name, BranchPart] = {}
        self.held: dict[Name, BranchPart] = {}
        self.listed: Ordered[BranchPart] = Ordered()
        self._next_number = 1

    def placed(
        self, name: Name, meta: Mapping[str, Any], places: Mapping[Partition, LogPosition], barriers: VisibilityBarriers
    ) -> BranchPart:
        """A part was placed; call in order of offsets."""
        if "held" not in meta:
            barriers.add_behind(name, places)
            return self._add(name, meta["of"], None, [])
        barrier = VisibilityBarrier(name, places)
        barriers.add(barrier)
        return self._add(name, meta["of"], barrier, meta.get("offsets", []))

    def _add(self, name: Name, of: str, barrier: VisibilityBarrier | None, offsets: list[Any]) -> BranchPart:
        part = self.unreported[name] = BranchPart(name, of, barrier, offsets, self._next_number)
        self.listed.add(part.number, part)
        self._next_number += 1
        if barrier is not None:
            self.held[name] = part
        return part

    def shown(self, name: Name) -> BranchPart | None:
        """Readers may see a part. Returns it if it was held."""
        part = self.held.pop(name, None)
        if part is not None and part.barrier is not None:
            part.barrier.is_ended = True
        return part

    def reported(self, name: Name) -> None:
        """The home that decided knows, or was given up."""
        part = self.unreported.pop(name, None)
        if part is not None:
            self.listed.remove(part.number)

    def must_be_reported(self, home: int) -> bool:
        """Whether a home must be told of some."""
        return any(TxId.parse(part.of).home == home for part in self.unreported.values())

    def overdue(self, latest_ms: int) -> list[BranchPart]:
        """Parts that are held since that time."""
        found = []
        for part in self.held.values():
            if part.placed_ms > latest_ms:
                break  # in order of their places
            found.append(part)
        return found

    # --- snapshot ----------------------------------------------------------------------------------------------------

    def freeze(self) -> Iterator[Frozen]:
        """A copy of each; the barriers are in ``VisibilityBarriers``."""
        for part in self.unreported.values():
            yield (*part.name, part.of, part.is_held, part.offsets)

    def restore(self, rows: Sequence[Sequence[Any]], barriers: VisibilityBarriers) -> None:
        """What ``freeze`` copied; the barriers are restored."""
        named = barriers.by_name() if rows else {}
        for session, counter, of, is_held, offsets in rows:
            name = (session, counter)
            barrier = (named.get(name) or VisibilityBarrier(name, {})) if is_held else None
            self._add(name, of, barrier, offsets)
