"""What a campaign of the cluster proved, and how long everything took."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from txmq.testing.checkers.events import History
from txmq.testing.checkers.history import Verdict

Times = dict[str, list[float]]
NAMES = {"L": "last resource, SQLite", "M": "last resource, MariaDB", "T": "local", "X": "XA, two databases", "Y": "XA"}


@dataclass(slots=True)
class ClusterReport:
    """What a campaign proved.

    Attributes:
        pauses_s: by victim: the longest time in which a partition of a living home took no message.
        machine_paused_s: the longest time, by fault, in which the machine let a thread without any broker wait.
        recovered_s: by fault and by what it was until: the times since the victims were up.
        transactions: by kind: how many were acknowledged.
        over_homes: how many of those have messages at several homes.
        batches: of the Spark stream.
    """

    messages: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    group: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    faults: Counter[str] = field(default_factory=Counter)
    pauses_s: Times = field(default_factory=lambda: defaultdict(list))
    machine_paused_s: list[float] = field(default_factory=list)
    recovered_s: dict[str, Times] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    transactions: Counter[str] = field(default_factory=Counter)
    over_homes: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    streamed: int = 0
    others: list[str] = field(default_factory=list)

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

    def lines(self) -> Iterator[str]:
        """For people."""
        counts = self.messages.counts
        yield f"faults: {', '.join(f'{name} {count}' for name, count in sorted(self.faults.items()))}"
        yield f"operations: {counts['ok']} acknowledged, {counts['fail']} refused, {counts['info']} unknown"
        yield f"messages: {counts['messages']} stored; {self.group.counts['handled']} times dealt with by the group"
        yield f"rows: {counts['rows']}; {counts['row_reads']} looked for behind their messages"
        for kind, count in sorted(self.transactions.items()):
            yield f"transactions, {kind}: {count} committed, {self.over_homes[kind]} of them over several homes"
        if self.batches:
            yield f"Spark stream: {self.streamed} messages in {self.batches} batches, each once and in order"
        for victim, seconds in sorted(self.pauses_s.items()):
            yield f"longest pause of a partition of a living home, victim {victim}: {max(seconds):.2f} s"
        yield f"longest pause of a thread that writes and forces a file beside them: {max(self.machine_paused_s):.2f} s"
        yield "seconds (middle and longest) since the victims are up, until ..."
        for fault, times in sorted(self.recovered_s.items()):
            yield f"  {fault}: {', '.join(f'{what} {_middle(found)}' for what, found in times.items())}"


def _middle(times: list[float]) -> str:
    return f"{sorted(times)[len(times) // 2]:.2f} {max(times):.2f}"
