"""What a binlog campaign did and found: lines for people, JSON for programs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools.crash.faults import Fault
from txmq.cli.text_table import table_lines


class Played(NamedTuple):
    """A fault, and how long from then on it took until the target had a row that was written then; 0 if not asked."""

    fault: Fault
    level_s: float


@dataclass(slots=True)
class BinlogReport:
    """See the module's docstring.

    Attributes:
        points_hit: how often each crash point was the place of a death.
        counts: of all syncs: units in the binlog, events by kind, rows of the tables compared.
        notes: what is not txmq's: rows that the source's engine has lost of its own binlog.
    """

    points_hit: Counter[str]
    played: list[Played] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    syncs: int = 0
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """For people."""
        by_kind: dict[str, list[Played]] = defaultdict(list)
        for played in self.played:
            by_kind[played.fault.what].append(played)
        rows = [
            [what, str(len(some)), f"{max(one.level_s for one in some):.2f}"] for what, some in sorted(by_kind.items())
        ]
        if rows:
            yield from table_lines(("fault", "times", "level again, s"), rows, [False, True, True], None)
        yield f"points hit: {', '.join(f'{name} {count}' for name, count in sorted(self.points_hit.items()))}"
        counts = self.counts
        yield (
            f"{self.syncs} syncs; changes in the binlog {counts['units']}, of XA transactions {counts['xa']}; "
            f"statements {counts['statements']}"
        )
        yield f"events: {', '.join(f'{op} {counts[op]}' for op in ('r', 'c', 'u', 'd', 'ddl', 't', 'begin', 'end'))}"
        yield f"rows compared of the binlog's replay and the target: {counts['rows']}"
        yield from (f"note: {note}" for note in self.notes)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "faults": [{"fault": str(fault), "level_s": round(level_s, 3)} for fault, level_s in self.played],
            "points": self.points_hit, "counts": self.counts, "syncs": self.syncs, "findings": self.complaints,
            "notes": self.notes,
        }  # fmt: skip
