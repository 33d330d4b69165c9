"""Holes in what was read: offsets of a partition that cannot be read, though the log says that they exist.

Theory of operation. Offsets have no holes (P2 of docs/promises.md), so a run of 65,536 offsets is whole when count,
first and last fit and the offsets add up. Spark counts the runs; the driver compares them with the ranges that should
have been read. Only runs that do not add up are looked at offset by offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from txmq.spark.audit.findings import BUCKET_BITS

HOLES_MAX = 10_000  # findings; more of them say nothing more

Ranges = Mapping[int, tuple[int, int]]  # by partition: first offset, and the one after the last


@dataclass(frozen=True, slots=True, order=True)
class Hole:
    """Offsets ``first`` to ``last`` of a partition are not there; ``last < first``: ``first`` was read twice."""

    partition: int
    first: int
    last: int

    def __str__(self) -> str:
        if self.last < self.first:
            return f"offset {self.first} was read twice"
        count = self.last - self.first + 1
        return f"{count} offset{'s' if count > 1 else ''} cannot be read: {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class GapRun:
    """Figures of one run of offsets; ``first``, ``last`` and ``total`` count from the run's beginning."""

    partition: int
    bucket: int
    count: int
    first: int
    last: int
    total: int

    @property
    def adds_up(self) -> bool:
        """Whether every offset from first to last is there once."""
        is_dense = self.count == self.last - self.first + 1
        return is_dense and 2 * self.total == self.count * (self.first + self.last)

    @property
    def ends(self) -> tuple[int, int]:
        """First and last offset."""
        start = self.bucket << BUCKET_BITS
        return start + self.first, start + self.last


def between_runs(runs: Iterable[GapRun], ranges: Ranges | None) -> list[Hole]:
    """Holes before, between and after the runs.

    Args:
        ranges: what should have been read; None: what lies before the first and after the last offset is not judged.
    """
    by_partition: dict[int, list[GapRun]] = {partition: [] for partition in ranges or ()}
    for run in sorted(runs, key=lambda run: (run.partition, run.bucket)):
        by_partition.setdefault(run.partition, []).append(run)
    holes = []
    for partition, found in sorted(by_partition.items()):
        ends = [run.ends for run in found]
        start, end = (ranges or {}).get(partition, (ends[0][0], ends[-1][1] + 1) if ends else (0, 0))
        expected = start
        for first, last in ends:
            if first > expected:
                holes.append(Hole(partition, expected, first - 1))
            expected = last + 1
        if expected < end:
            holes.append(Hole(partition, expected, end - 1))
    return holes
