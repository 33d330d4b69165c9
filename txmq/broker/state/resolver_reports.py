"""The resolvers' view of the databases: which of them they reach, and which branches are prepared there.

Theory of operation. A branch that is prepared in a database holds its rows' locks, and the broker knows nothing of it
before ``decide``. Each resolver asks the database (XA RECOVER) and reports: one *sighting* per resource and reporter,
which replaces the one before. Several resolvers may report one resource. The report of a *fresh* reporter (connected,
with a recent report) counts; if two contradict each other, the worse counts, which is at most one report old. A stale
report counts until a later one has reached the resource. So a resolver that died after its last report is outvoted by
the next resolver that asks, and is not forgotten before that.

In memory only: the truth is in the databases, and the resolvers report to a restarted broker within seconds.

Invariants:
    * at most ENTRIES_MAX sightings of bounded size are kept; the oldest one makes room, those without branches and
      errors first;
    * no decision depends on a sighting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

FRESH_MS = 30_000  # three reports of a resolver
QUIET_KEPT_MS = 60_000  # one without branches and errors
LOUD_KEPT_MS = 24 * 3_600_000  # locks stay though no resolver asks
ENTRIES_MAX = 1000
ALARM_AGE_MS = 30_000
REPORTS_SHOWN_MAX = 20

Row = dict[str, Any]
Name = tuple[str, str]  # kind, resource
Reporter = tuple[str, int]


class Branch(NamedTuple):
    """A prepared branch, as a resolver lists it: its transaction, its bqual, how old it is at least, why it stays."""

    txid: str
    bqual: str
    age_ms: int
    why: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """One reporter's last report about one resource.

    Attributes:
        reporter: its session, or its connection if it has none.
        by: the reporter's name and address, for people.
        is_reachable: the database was asked, and answered.
        why: the error, if there was one.
        branches: how many are prepared; if it is not reachable, as last seen.
        age_ms: of the oldest, at least, when that was seen.
        oldest: some of them, the oldest first.
        since_ms: unreachable without a break since then.
    """

    kind: str
    resource: str
    uuid: str | None
    reporter: Reporter
    by: str
    seen_ms: int
    is_reachable: bool
    why: str | None
    branches: int
    age_ms: int
    oldest: tuple[Branch, ...]
    since_ms: int

    @property
    def is_loud(self) -> bool:
        """Whether it reports branches or an error."""
        return not self.is_reachable or self.branches > 0


@dataclass(slots=True)
class Resources:
    """See the module's docstring."""

    _named: dict[Name, dict[Reporter, Sighting]] = field(default_factory=dict)  # each in order of the last report
    _count: int = 0
    _connected: set[Reporter] = field(default_factory=set)
    _alarmed: set[tuple[Name, str]] = field(default_factory=set)

    def report(self, seen: Sighting) -> list[Row]:
        """Take in a report. Returns its alarms as fields of log lines, each once while it lasts."""
        name = seen.kind, seen.resource
        self._drop(name, seen.reporter)
        self._named.setdefault(name, {})[seen.reporter] = seen
        self._count += 1
        self._connected.add(seen.reporter)
        if len(self._connected) > ENTRIES_MAX:
            self._connected &= {reporter for of_one in self._named.values() for reporter in of_one}
        self._expire(name, seen.seen_ms)
        while self._count > ENTRIES_MAX:
            self._make_room(seen)
        return self._alarms(name, seen.seen_ms)

    def disconnected(self, reporter: Reporter) -> None:
        """A client has gone, perhaps for ever: its sightings hold until a later report."""
        self._connected.discard(reporter)

    def since_ms(self, name: Name, reporter: Reporter, now_ms: int) -> int:
        """Since when a reporter has not reached a resource that it does not reach now."""
        before = self._named.get(name, {}).get(reporter)
        return now_ms if before is None or before.is_reachable else before.since_ms

    def rows(self, now_ms: int) -> list[Row]:
        """One row a database, of the reports that count; the oldest branches first."""
        for name in list(self._named):
            self._expire(name, now_ms)
        found = [self._row(one, now_ms) for name in self._named for one in self._databases(name)]
        return sorted(found, key=lambda row: -row["age_ms"])

    def figures(self, now_ms: int) -> dict[str, int]:
        """The same in numbers."""
        rows = self.rows(now_ms)
        return {
            "resources_reported": len(rows),
            "resources_unreachable": sum(not row["reachable"] for row in rows),
            "branches_prepared": sum(row["branches"] for row in rows),
            "branches_age_ms_max": max((row["age_ms"] for row in rows), default=0),
        }

    def _databases(self, name: Name) -> list[list[Sighting]]:
        """The sightings of a resource, by the identity of the database; those that never reached it join the newest."""
        found: dict[str | None, list[Sighting]] = {}
        newest = None
        for one in self._named.get(name, {}).values():
            newest = one.uuid or newest
            found.setdefault(one.uuid, []).append(one)
        nameless = found.pop(None, []) if newest is not None else []
        if nameless:
            found[newest] = sorted((*found[newest], *nameless), key=lambda one: one.seen_ms)
        return list(found.values())

    def _row(self, of_one: list[Sighting], now_ms: int) -> Row:
        """One database: the worst of the reports that count."""
        reached_ms = _reached_ms(of_one)
        counting = [one for one in of_one if one.seen_ms >= reached_ms or self._is_fresh(one, now_ms)]
        told = max(counting, key=lambda one: (one.branches > 0, _age_ms(one, now_ms), one.seen_ms))
        newest = max(counting, key=lambda one: (one.is_reachable, one.seen_ms))
        return {
            "resource": told.resource, "kind": told.kind, "uuid": newest.uuid or told.uuid,
            "reachable": newest.is_reachable, "why": None if newest.is_reachable else newest.why,
            "unreachable_ms": 0 if newest.is_reachable else max(0, now_ms - newest.since_ms),
            "branches": told.branches, "age_ms": _age_ms(told, now_ms),
            "oldest": [one._asdict() for one in told.oldest], "by": told.by,
            "seen_ms_ago": max(0, now_ms - told.seen_ms),
            "reports": [_report_row(one, now_ms) for one in of_one[-REPORTS_SHOWN_MAX:]],
        }  # fmt: skip

    def _is_fresh(self, one: Sighting, now_ms: int) -> bool:
        return one.reporter in self._connected and now_ms - one.seen_ms <= FRESH_MS

    def _drop(self, name: Name, reporter: Reporter) -> None:
        of_one = self._named.get(name)
        if of_one is not None and of_one.pop(reporter, None) is not None:
            self._count -= 1
            if not of_one:
                del self._named[name]

    def _expire(self, name: Name, now_ms: int) -> None:
        for of_one in self._databases(name):
            reached_ms = _reached_ms(of_one)
            for one in of_one:
                age_ms = now_ms - one.seen_ms
                is_over = not one.is_loud or one.seen_ms < reached_ms
                if age_ms > LOUD_KEPT_MS or (age_ms > QUIET_KEPT_MS and is_over):
                    self._drop(name, one.reporter)

    def _make_room(self, newest: Sighting) -> None:
        """Drop the oldest report: of those without branches and errors, if there are any."""
        kept = [
            (one.is_loud, one.seen_ms, name, one.reporter)
            for name, of_one in self._named.items()
            for one in of_one.values()
            if one is not newest
        ]
        _, _, name, reporter = min(kept)
        self._drop(name, reporter)

    # --- alarms ------------------------------------------------------------------------------------------------------

    def _alarms(self, name: Name, now_ms: int) -> list[Row]:
        row = max((self._row(one, now_ms) for one in self._databases(name)), key=lambda one: int(one["age_ms"]))
        common = {"resource": name[1], "kind": name[0], "by": row["by"]}
        states = {
            "branches are prepared in a database and not ended: their rows stay locked (txmq tx list)": (
                row["age_ms"] >= ALARM_AGE_MS,
                {"branches": row["branches"], "age_ms": row["age_ms"], "txid": _first_txid(row)},
            ),
            "no resolver reaches a database: nothing of it is settled (txmq tx list)": (
                row["unreachable_ms"] >= ALARM_AGE_MS, {"reason": row["why"]},
            ),
        }  # fmt: skip
        return [
            {"event": event, **common, **fields}
            for event, (holds, fields) in states.items()
            if self._begins((name, event), holds=holds)
        ]

    def _begins(self, alarm: tuple[Name, str], *, holds: bool) -> bool:
        if not holds:
            self._alarmed.discard(alarm)
        elif alarm not in self._alarmed:
            if len(self._alarmed) >= ENTRIES_MAX:
                self._alarmed.clear()
            self._alarmed.add(alarm)
            return True
        return False


def _reached_ms(of_one: list[Sighting]) -> int:
    """When a reporter last reached it. An older report counts only while it is fresh."""
    return max((one.seen_ms for one in of_one if one.is_reachable), default=-1)


def _age_ms(one: Sighting, now_ms: int) -> int:
    return one.age_ms + max(0, now_ms - one.seen_ms) if one.branches else 0


def _report_row(one: Sighting, now_ms: int) -> Row:
    return {
        "by": one.by, "seen_ms_ago": max(0, now_ms - one.seen_ms), "reachable": one.is_reachable, "why": one.why,
        "branches": one.branches,
    }  # fmt: skip


def _first_txid(row: Row) -> str | None:
    return row["oldest"][0]["txid"] if row["oldest"] else None
