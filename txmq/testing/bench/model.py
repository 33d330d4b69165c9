"""A load: requests to a broker at an address, and the figures that come of them.

A load is opened once against a target (its topic is made, and deleted at the end), and then run with a count, as often
as its owner likes. ``txmq bench`` chooses counts by time; ``make bench`` has fixed ones and holds figures to bounds.

Invariants:
* Every run gives ``rate``, in units of work a second, whatever else it gives.
* Nothing is left in the broker: the topic goes when the block ends, whatever happened in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import txmq
from txmq.errors import TxmqError
from txmq.testing.bench.raw import percentile

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}
LATENCY_UNITS = dict.fromkeys(PERCENTILES, "ms")

Figures = Mapping[str, float]
Run = Callable[[int], Figures]


@dataclass(frozen=True, slots=True)
class Target:
    """The broker that a load goes to, and the load's shape.

    Attributes:
        address: ``txmq://HOST:PORT``.
        topic: made by the load, deleted at its end; there must be none of that name.
        size_bytes: of a message's value.
        outstanding: requests of one connection without an answer, if a load pipelines.
        threads: callers at the same time, if a load has several.
    """

    address: str
    topic: str = "bench"
    size_bytes: int = 100
    partitions: int = 4
    outstanding: int = 2048
    threads: int = 64

    @property
    def value(self) -> bytes:
        """The value of each message."""
        return b"x" * self.size_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of work.

    Attributes:
        name: for ``--rows``.
        title: what is done.
        units: of every figure, in the order in which they are shown.
        bare: names of the bare limits that it is shown with.
        first_count: enough work to see how fast it goes, on a slow disk too.
    """

    name: str
    title: str
    open: Callable[[Target], AbstractContextManager[Run]]
    units: Mapping[str, str]
    bare: tuple[str, ...]
    first_count: int


@contextmanager
def client_with_topic(target: Target, timeout: float = 60.0) -> Iterator[txmq.Client]:
    """A client, and the target's topic for as long as the block lasts."""
    with txmq.connect(target.address, timeout=timeout, name="bench") as client:
        client.topics.create(target.topic, partitions=target.partitions)
        try:
            yield client
        except BaseException:
            with suppress(TxmqError):  # or Ctrl-C would become the failure of one row, and the next one begin
                _delete_topic(target)
            raise
        _delete_topic(target)


def _delete_topic(target: Target) -> None:
    """On a connection of its own: one that was interrupted while it wrote is shut."""
    with txmq.connect(target.address, name="bench") as client:
        client.topics.delete(target.topic)


def latencies(ordered: Sequence[float]) -> dict[str, float]:
    """Percentiles in ms of sorted seconds."""
    return {name: percentile(ordered, percent) * 1000 for name, percent in PERCENTILES.items()}


def amount(value: float) -> str:
    """A figure for people: three significant digits, or its whole part."""
    if value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
