"""Decisions whose branches have not all completed, placed parts of other homes' decisions, and heuristic outcomes.

Parts of the state, so folds over the journal. DECIDED makes an entry of ``XADecisions``, COMPLETED ticks one branch
off, and the last branch ends it. Branches are in databases (XA) or at other homes. Those in databases hold the
messages: readers see them when all these have committed, or with SHOWN. HEURISTIC keeps the outcome that a resource or
an operator decided alone, until FORGOTTEN. A decision whose messages wait for their place (PLACE_AWAITED) is kept until
they have it, too.

``BranchParts`` are the other side: parts of other homes' transactions that this home has placed, until the home that
decided knows it. The COMMITTED of a prepared part of kind ``branch`` makes an entry, REPORTED ends it. The home that
decided keeps its decision for as long: it forgets nothing that a branch still needs. If that home is lost for ever, an
operator ends it: a REPORTED with the fact, which is kept as a heuristic outcome. A part of an XA transaction is *held*:
readers see it when the databases' branches have committed, which the home that decided says when the part is reported
to it, or after ``visibility_hold_ms_max`` (SHOWN).

Invariants:
    * a decision is kept until every branch has completed, even after the client says that it has finished with it;
    * a branch that completed stays complete;
    * a placed part leaves only when the home that decided has journaled that it is placed, or was given up;
    * a heuristic outcome stays until an operator forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from txmq.broker.state import visibility
from txmq.broker.state.in_doubt_index import InDoubtIndex, Ordered
from txmq.broker.state.session import CommittedParts
from txmq.broker.state.visibility import VisibilityBarrier, VisibilityBarriers
from txmq.log.partition import LogPosition, Partition
from txmq.model import TransactionKind
from txmq.xid import TxId, home_word

Name = tuple[int, int]  # session, counter
FROZEN_FIELDS: Final = 6
Frozen = tuple[int, int, dict[str, Any], list[dict[str, Any]], dict[str, bool], CommittedParts]
PART_FIELDS: Final = 5
FrozenPart = tuple[int, int, str, bool, list[Any]]
HELD = "held"  # under which decisions are indexed whose messages are not shown yet


def home_key(txid: str) -> str:
    """Under which decisions are indexed that wait for the home of a transaction id."""
    return f"home {home_word(txid)}"


class XADecision:
    """One decision that some branch has not carried out, or whose messages have no place yet.

    Attributes:
        meta: decided_ms, client.
        homes: by the id of its transaction at another home, whether that home has placed its part. Replaced, never
            changed.
        is_placed: whether its messages have their offsets.
        branches: resource, uuid, bqual, connection, wrote, marker as ``decide`` stated them; complete; heuristic. The
            list is replaced, never changed: a checkpoint is written of it in a thread.
        parts: the offsets of its messages.
        number: in order of decision, in this incarnation of the broker.
        waiting: requests (connection, opaque) of branch homes that are answered when readers may see the messages.
    """

    __slots__ = ("barrier", "branches", "homes", "is_placed", "meta", "name", "number", "parts", "waiting")

    def __init__(
        self, name: Name, meta: dict[str, Any], parts: CommittedParts, barrier: VisibilityBarrier, number: int
    ) -> None:
        self.name, self.meta, self.parts, self.barrier, self.number = name, meta, parts, barrier, number
        self.branches: list[dict[str, Any]] = meta.pop("branches")
        self.homes: dict[str, bool] = dict(meta.pop("homes", ()))
        self.is_placed = True
        self.waiting: list[Any] = []

    @property
    def kind(self) -> TransactionKind:
        """XA if it has branches in databases."""
        return TransactionKind.XA if self.branches else TransactionKind.LOCAL

    @property
    def has_rows_to_come(self) -> bool:
        """Whether some database has not committed."""
        return False in [branch["complete"] for branch in self.branches]  # hot: a generator costs twice as much

    @property
    def is_over(self) -> bool:
        """Whether its messages have their place and every branch has completed."""
        return self.is_placed and not self.has_rows_to_come and False not in self.homes.values()

    @property
    def index_keys(self) -> tuple[str, ...]:
        """Keys of the index: the resources and homes it waits for, and HELD while readers do not see it."""
        waited_for = {branch["uuid"]: None for branch in self.branches if not branch["complete"]}
        if self.homes:
            waited_for |= {home_key(txid): None for txid, is_complete in self.homes.items() if not is_complete}
        return (*waited_for, HELD) if not self.barrier.is_ended else tuple(waited_for)

    def branch(self, uuid: str) -> dict[str, Any] | None:
        """The branch in one resource."""
        for branch in self.branches:
            if branch["uuid"] == uuid:
                return branch
        return None


class XADecisions:
    """All decisions, and the heuristic outcomes.

    Attributes:
        incomplete: in order of decision.
        index: the same, by resource and number.
        recorded: the names of ``heuristics``, in order of their first record.
    """

    def __init__(self) -> None:
        self.incomplete: dict[Name, XADecision] = {}
        self.index: InDoubtIndex[XADecision] = InDoubtIndex()
        self.barriers = VisibilityBarriers()
        self.heuristics: dict[Name, list[dict[str, Any]]] = {}
        self.recorded: Ordered[Name] = Ordered()
        self._number_of: dict[Name, int] = {}  # of heuristics
        self._next_number = 1  # of both, in this incarnation of the broker

    def decide(
        self, name: Name, meta: Mapping[str, Any], parts: CommittedParts, places: Mapping[Partition, LogPosition] | None
    ) -> XADecision:
        """A decision with branches was accepted.

        Args:
            places: None: its messages wait for their place.
        """
        branches = [{**branch, "complete": False, "heuristic": None} for branch in meta["branches"]]
        stated = {**meta, "branches": branches, "homes": dict.fromkeys(meta.get("homes", ()), False)}
        barrier = VisibilityBarrier(name, {}, is_ended=not branches)
        decided = self._add(XADecision(name, stated, parts, barrier, self._next_number))
        decided.is_placed = places is not None
        if places is not None:
            self._hold(decided, places)
        return decided

    def place(self, decided: XADecision, parts: CommittedParts, places: Mapping[Partition, LogPosition]) -> bool:
        """The messages of a decision got their place; call in order of offsets. Whether it is over with that."""
        decided.is_placed, decided.parts = True, parts
        self._hold(decided, places)
        return self._end_if_over(decided)

    def _hold(self, decided: XADecision, places: Mapping[Partition, LogPosition]) -> None:
        if decided.barrier.is_ended:
            self.barriers.add_behind(decided.name, places)
        else:
            decided.barrier.places = places
            self.barriers.add(decided.barrier)

    def _add(self, decided: XADecision) -> XADecision:
        self._next_number += 1
        self.incomplete[decided.name] = decided
        self.index.add(decided.number, decided, decided.index_keys)
        return decided

    def complete(self, name: Name, uuid: str, fact: Mapping[str, Any] | None) -> XADecision | None:
        """A database's branch has completed. Returns the decision if that was the last of them: its barrier may go.

        Args:
            fact: outcome and reason, if the resource decided alone.
        """
        decided = self.incomplete[name]
        branch = decided.branch(uuid)
        if branch is not None:
            heuristic = branch["heuristic"] if fact is None else fact["what"]
            completed = {**branch, "complete": True, "heuristic": heuristic}
            decided.branches = [completed if one is branch else one for one in decided.branches]
            self.index.remove_under(decided.number, uuid)
            if fact is not None:
                self.record(name, fact)
        if decided.has_rows_to_come:
            return None
        self.index.remove_under(decided.number, HELD)
        decided.barrier.is_ended = True
        self._end_if_over(decided)
        return decided

    def complete_home(self, name: Name, txid: str, fact: Mapping[str, Any] | None) -> None:
        """Another home has placed its part.

        Args:
            fact: why it is waited for no longer, if it has not.
        """
        decided = self.incomplete[name]
        if fact is not None:
            self.record(name, fact)
        decided.homes = {**decided.homes, txid: True}
        self.index.remove_under(decided.number, home_key(txid))
        self._end_if_over(decided)

    def _end_if_over(self, decided: XADecision) -> bool:
        is_over = decided.is_over
        if is_over:
            del self.incomplete[decided.name]
            self.index.remove(decided.number, ())
        return is_over

    def overdue(self, latest_ms: int) -> list[XADecision]:
        """Decisions from before that time whose messages are hidden. The caller makes them visible."""
        found = []
        for number, decided in self.index.behind(0, HELD):
            if decided.meta["decided_ms"] > latest_ms:
                break  # in order of decision
            found.append((number, decided))
        for number, _ in found:
            self.index.remove_under(number, HELD)
        return [decided for _, decided in found if not decided.barrier.is_ended]

    def record(self, name: Name, fact: Mapping[str, Any]) -> None:
        """Keep a heuristic outcome."""
        if name not in self.heuristics:
            self._note(name)
        self.heuristics[name] = [*self.heuristics.get(name, ()), dict(fact)]

    def _note(self, name: Name) -> None:
        self._number_of[name] = self._next_number
        self.recorded.add(self._next_number, name)
        self._next_number += 1

    def number_of(self, name: Name) -> int:
        """The number of a name in ``recorded``; 0 for one that is not there."""
        return self._number_of.get(name, 0)

    def forget(self, name: Name) -> None:
        """An operator has dealt with a heuristic outcome."""
        if self.heuristics.pop(name, None) is not None:
            self.recorded.remove(self._number_of.pop(name))

    # --- snapshot ----------------------------------------------------------------------------------------------------

    def freeze(self) -> Iterator[Frozen]:
        """A copy of each that is incomplete; ``row`` makes it JSON-able, in any thread."""
        for decided in self.incomplete.values():
            yield (*decided.name, decided.meta, decided.branches, decided.homes, decided.parts)

    def freeze_barriers(self) -> Iterator[visibility.Frozen]:
        """A copy of each barrier. Those that keep nothing from readers (any more) say whether offsets may be loaded."""
        held: set[VisibilityBarrier] = set()
        for barrier, places in self.barriers.held():
            held.add(barrier)
            yield (*barrier.name, barrier.is_ended, places)
        for decided in self.incomplete.values():
            if decided.barrier not in held:
                yield (*decided.name, decided.barrier.is_ended, {})

    def freeze_heuristics(self) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
        """Session, counter and facts of each."""
        for name, facts in self.heuristics.items():
            yield (*name, facts)

    def restore(self, snapshot: dict[str, Any], partition: Callable[[int, int], Partition | None]) -> None:
        """What ``freeze`` copied, formatted by ``FrozenState``; then redo, then ``recovered``."""
        barriers: dict[Name, VisibilityBarrier] = {}
        for session, counter, is_ended, listed in snapshot["holds"]:
            found = {partition(topic_id, number): (at[0], at[1], at[2]) for topic_id, number, *at in listed}
            places = {known: place for known, place in found.items() if known is not None}
            barrier = barriers[session, counter] = VisibilityBarrier((session, counter), places, is_ended=is_ended)
            self.barriers.add(barrier)
        for session, counter, meta, parts in snapshot["undone"]:
            name = (session, counter)
            placed = tuple((p[0], p[1], p[2], p[3]) for p in parts)
            barrier = barriers.get(name) or VisibilityBarrier(
                name, {}, is_ended=bool(placed)
            )  # a checkpoint that did not list it
            self._add(XADecision(name, meta, placed, barrier, self._next_number))
        for session, counter, facts in snapshot["heuristics"]:
            self.heuristics[session, counter] = facts
            self._note((session, counter))


def row(frozen: Sequence[Any]) -> list[Any]:
    """One decision, as ``XADecisions.restore`` takes it, of what ``freeze`` yielded."""
    session, counter, meta, branches, homes, parts = frozen
    stated = {**meta, "branches": branches, "homes": homes} if homes else {**meta, "branches": branches}
    return [session, counter, stated, parts]


class BranchPart:
    """One placed part of another home's transaction.

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
    """All placed parts.

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

    def freeze(self) -> Iterator[FrozenPart]:
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
