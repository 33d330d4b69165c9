"""What a campaign of the cluster proved, and how long everything took: lines for people, JSON for programs.

The table has a row for each kind of fault and the longest time of that kind in each column; the JSON has every fault
with its own times. A finding comes with its clues.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tools.checkers.events import History
from tools.checkers.history import Verdict
from tools.crash.cluster.recovery import CLIENTS, GROUP_OWNED, OTHERS, SETTLED, STREAM, VICTIMS
from txmq.cli.text_table import table_lines

NAMES: Final = {
    "L": "last resource, SQLite", "M": "last resource, MariaDB", "T": "local", "X": "XA, two databases", "Y": "XA",
}  # fmt: skip
RECOVERIES: Final = (VICTIMS, OTHERS, CLIENTS, GROUP_OWNED, SETTLED, STREAM)
COLUMNS: Final = ("fault", "times", "paused", "machine", *RECOVERIES)
LEGEND: Final = (
    "Seconds, the longest of each kind of fault. paused: a partition of a home that lived took no message; machine: in",
    "the same time a thread that only writes and forces a file stood still. From the moment when the victims are up:",
    "victims, others: until their partitions take messages; clients: until killed ones are acknowledged something;",
    "group: until each partition has a member; settled: until what was in doubt is decided; stream: until the Spark",
    "stream has committed another batch (a killed driver starts a Java process first).",
)


class Played(NamedTuple):
    """A fault and its times.

    Attributes:
        what: without the numbers of the victims; ``text`` has all.
        paused_s: the longest time in which a partition of a living home took no message.
        machine_paused_s: the longest time in which the machine let a thread without any broker wait.
        recovered_s: by what it was until: the time since the victims were up.
    """

    number: int
    what: str
    text: str
    paused_s: float
    machine_paused_s: float
    recovered_s: dict[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{what} {seconds:.2f}" for what, seconds in self.recovered_s.items())
        return (
            f"{self.number}  {self.text}: paused {self.paused_s:.2f} s (the machine {self.machine_paused_s:.2f} s); "
            f"up again, seconds: {times}"
        )


class Bounds(NamedTuple):
    """What is promised, in seconds: of a pause, and of something in doubt."""

    paused_s: float
    settled_s: float


@dataclass(slots=True)
class ClusterReport:
    """What a campaign proved.

    Attributes:
        transactions: by kind: how many were acknowledged.
        over_homes: how many of those have messages at several homes.
        batches: of the Spark stream.
        others: what is wrong and no checker's finding.
        clues: what to look at, of a finding's text.
    """

    bounds: Bounds
    messages: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    group: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    faults: list[Played] = field(default_factory=list)
    transactions: Counter[str] = field(default_factory=Counter)
    over_homes: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    streamed: int = 0
    others: list[str] = field(default_factory=list)
    clues: Callable[[str], list[str]] = field(default=lambda _text: [])

    def add(self, fault: Played) -> None:
        """A fault is over."""
        self.faults.append(fault)
        if fault.paused_s > self.bounds.paused_s:
            self.others.append(f"fault-{fault.number}: a partition of a living home paused {fault.paused_s:.2f} s")

    @property
    def complaints(self) -> list[str]:
        """What is wrong; none if every promise was kept."""
        found = [str(finding) for finding in (*self.messages.findings, *self.group.findings)]
        return [*found, *self.messages.missing, *self.group.missing, *self.others]

    def count(self, history: History, broker_of: dict[tuple[str, int], int]) -> None:
        """Count the transactions that were acknowledged, and those over several homes.

        Args:
            broker_of: of a partition.
        """
        for operation in history.operations.values():
            if operation.kind == "txn" and operation.status == "ok":
                kind = NAMES[operation.id[-1]]
                places = [(send.topic, send.partition) for send in operation.sends if send.partition is not None]
                self.transactions[kind] += 1
                self.over_homes[kind] += len({broker_of[place] for place in places}) > 1

    # --- for people --------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """The table, what was done, and the findings; also of a campaign that got stuck."""
        if self.faults:
            yield ""
            yield from table_lines(COLUMNS, self._rows(), [False] + [True] * (len(COLUMNS) - 1), None)
            yield from LEGEND
            yield ""
            yield from self._longest()
        if self.messages.counts:
            yield from self._done()
        for number, complaint in enumerate(self.complaints, 1):
            yield f"\nfinding {number}: {complaint}"
            yield from (f"    {clue}" for clue in self.clues(complaint))

    def _rows(self) -> list[list[str]]:
        by_kind: dict[str, list[Played]] = defaultdict(list)
        for fault in self.faults:
            by_kind[fault.what].append(fault)
        return [_row(what, faults) for what, faults in sorted(by_kind.items())] + [_row("all", self.faults)]

    def _longest(self) -> Iterator[str]:
        paused = max(self.faults, key=lambda fault: fault.paused_s)
        yield (
            f"longest pause of a living home: {paused.paused_s:.2f} s, at most {self.bounds.paused_s:g} s are promised "
            f"(the machine's own: {paused.machine_paused_s:.2f} s; fault {paused.number}, {paused.text})"
        )
        in_doubt = sorted(self.faults, key=lambda fault: fault.recovered_s[SETTLED])
        middle, longest = in_doubt[len(in_doubt) // 2], in_doubt[-1]
        yield (
            f"in doubt: middle {middle.recovered_s[SETTLED]:.2f} s, longest {longest.recovered_s[SETTLED]:.2f} s, "
            f"at most {self.bounds.settled_s:g} s are promised (fault {longest.number}, {longest.text})"
        )

    def _done(self) -> Iterator[str]:
        counts = self.messages.counts
        yield f"operations: {counts['ok']} acknowledged, {counts['fail']} refused, {counts['info']} unknown"
        yield f"messages: {counts['messages']} stored; {self.group.counts['handled']} times dealt with by the group"
        yield f"rows: {counts['rows']}; {counts['row_reads']} looked for behind their messages"
        for kind, count in sorted(self.transactions.items()):
            yield f"transactions, {kind}: {count} committed, {self.over_homes[kind]} of them over several homes"
        if self.batches:
            yield f"Spark stream: {self.streamed} messages in {self.batches} batches"

    # --- for programs ------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Everything; times in seconds."""
        found = [{"finding": complaint, "clues": self.clues(complaint)} for complaint in self.complaints]
        return {
            "bounds": self.bounds._asdict(),
            "faults": [fault._asdict() for fault in self.faults],
            "messages": self.messages.counts,
            "group": self.group.counts,
            "transactions": {
                kind: {"committed": count, "over_homes": self.over_homes[kind]}
                for kind, count in self.transactions.items()
            },
            "stream": {"messages": self.streamed, "batches": self.batches},
            "findings": found,
        }


def _row(what: str, faults: Sequence[Played]) -> list[str]:
    pauses = [
        f"{max(fault.paused_s for fault in faults):.2f}",
        f"{max(fault.machine_paused_s for fault in faults):.2f}",
    ]
    found = [[fault.recovered_s[name] for fault in faults if name in fault.recovered_s] for name in RECOVERIES]
    return [what, str(len(faults)), *pauses, *(f"{max(times):.2f}" if times else "" for times in found)]
