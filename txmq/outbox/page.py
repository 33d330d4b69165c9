"""Rows of an outbox, and which of them are the next page.

A *unit* is what readers see all or none of. A page is a prefix of the rows by id that splits no unit. What stands after
a parked row of its key is parked, too, with its whole unit, so that no key's order is broken.

Invariants:
    * a page ends before the first row of a unit that goes on after it, and is never completed by later rows;
    * what is parked is whole units;
    * of a key nothing is sent that stands after a parked row of a lower id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

UNKNOWN_TOPIC: Final = "its topic does not exist"
REFUSED: Final = "the broker refuses it"
BEHIND: Final = "an earlier message of its key is parked"
BYTES_PER_S: Final = 1 << 20  # a page has a second more for so many
PARKED_MAX: Final = 10_000  # rows that a relay parks; then the line waits

Run = tuple[int, int]
"""First and last of ids without a gap."""
TopicKey = tuple[str, bytes]


class OutboxRow(NamedTuple):
    """A message that waits.

    Attributes:
        id: by the database, ascending; in the order of transactions that take a common lock before they write.
        created_ms: the database's clock, when it was written.
        unit: of the messages that readers see together; None: it stands alone.
    """

    id: int
    unit: int | None
    topic: str
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    created_ms: int = 0

    @property
    def group(self) -> int:
        """Its unit; a row that stands alone is one of its own."""
        return -self.id if self.unit is None else self.unit


class Waiting(NamedTuple):
    """The first rows by id, as one transaction reads them.

    Attributes:
        rows: as many as were asked for.
        cut: units of these rows that have later ones, too.
        held: of each key of these rows that has parked rows the lowest parked id.
        room: how many more rows may be parked.
        is_slow: it took long to find them.
    """

    rows: Sequence[OutboxRow]
    cut: Collection[int] = ()
    held: Mapping[TopicKey, int] = {}
    room: int = PARKED_MAX
    is_slow: bool = False


class Page(NamedTuple):
    """What is sent, and what is parked.

    Attributes:
        parked: each row with the reason.
        is_full: something after these rows must be parked, and too much is.
    """

    rows: Sequence[OutboxRow]
    parked: Sequence[tuple[OutboxRow, str]] = ()
    is_full: bool = False


def whole_units(waiting: Waiting) -> Sequence[OutboxRow]:
    """The longest prefix of the rows that splits no unit; empty if the first unit goes on after them all."""
    rows = waiting.rows
    last_of_unit = {row.group: at for at, row in enumerate(rows)} | dict.fromkeys(waiting.cut, len(rows))
    end = len(rows)
    for at in range(len(rows) - 1, -1, -1):
        if last_of_unit[rows[at].group] >= end:
            end = at
    return rows[:end]


def first_units(rows: Sequence[OutboxRow]) -> Sequence[OutboxRow]:
    """Of rows that split no unit the shortest prefix that splits none: one unit, or several that are interleaved."""
    last_of_unit = {row.group: at for at, row in enumerate(rows)}
    end = 0
    for at, row in enumerate(rows):
        end = max(end, last_of_unit[row.group] + 1)
        if at + 1 == end:
            break
    return rows[:end]


def build(
    waiting: Waiting,
    known_topics: Collection[str],
    *,
    refused: Collection[int] = (),
    away: Mapping[int, str] = {},
    is_shortest: bool = False,
) -> Page:
    """What of the rows is sent, and what is parked.

    Args:
        known_topics: those that there are; a unit with a message for another one is parked.
        refused: units that the broker has refused when they were a page of their own.
        away: units with a message for a home that is away, each with the reason.
        is_shortest: the page has the first units and no more.
    """
    rows = whole_units(waiting)
    if is_shortest:
        rows = first_units(rows)
    sent, behind = _without_held(rows, waiting.held)
    why = dict.fromkeys((row.group for row in behind), BEHIND)
    bad = _reasons(sent, known_topics, refused, away)
    parked = [(row, (why | bad)[row.group]) for row in rows if row.group in why or row.group in bad]
    is_full = bool(parked) and len(parked) > waiting.room
    if bad or is_full:
        # What stands after them is read again, when their keys are known to be parked.
        end = min(row.id for row, _ in parked)
        last_id = {row.group: row.id for row in rows}
        sent = [row for row in sent if last_id[row.group] < end]
    return Page(sent, () if is_full else parked, is_full)


def _reasons(
    rows: Sequence[OutboxRow], known_topics: Collection[str], refused: Collection[int], away: Mapping[int, str]
) -> dict[int, str]:
    """The units of these rows that cannot be sent."""
    found = {row.group: away[row.group] for row in rows if row.group in away} if away else {}
    found |= {row.group: REFUSED for row in rows if row.group in refused} if refused else {}
    return found | {row.group: UNKNOWN_TOPIC for row in rows if row.topic not in known_topics}


def _without_held(
    rows: Sequence[OutboxRow], held: Mapping[TopicKey, int]
) -> tuple[Sequence[OutboxRow], Sequence[OutboxRow]]:
    """Rows that may be sent, and those of units that stand after parked rows of one of their keys."""
    if not held:
        return rows, ()
    lowest, units = dict(held), defaultdict[int, list[OutboxRow]](list)
    for row in rows:
        units[row.group].append(row)
    parked: list[OutboxRow] = []
    is_changed = True
    while is_changed:
        is_changed = False
        for unit, of_unit in list(units.items()):
            if any(lowest.get(name, row.id) < row.id for row in of_unit if (name := _key(row)) is not None):
                parked += units.pop(unit)
                for row in of_unit:
                    name = _key(row)
                    if name is not None:
                        lowest[name] = min(row.id, lowest.get(name, row.id))
                is_changed = True
    return sorted(row for of_unit in units.values() for row in of_unit), sorted(parked)


def _key(row: OutboxRow) -> TopicKey | None:
    """What its order is kept with; None: it has no key."""
    return None if row.key is None else (row.topic, row.key)


def runs(ids: Iterable[int]) -> tuple[Run, ...]:
    """Ascending ids as runs without gaps: a lower id may be committed later into a gap."""
    found: list[Run] = []
    for one in ids:
        if found and found[-1][1] + 1 == one:
            found[-1] = found[-1][0], one
        else:
            found.append((one, one))
    return tuple(found)
