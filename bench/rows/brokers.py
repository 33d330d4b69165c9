"""RabbitMQ and NATS JetStream in the same run, from Python as txmq is; ``make bench-peers`` has more peers.

Brokers differ in how far a message is on its way to the disk when they acknowledge it: docs/benchmarks.md says it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.model import Measure, Row, Surroundings
from bench.peers.catalogue import NATS, NATS_SYNCED, RABBITMQ
from bench.peers.model import Peer
from bench.peers.run import row_name
from bench.peers.works import ALONE, FLYING, TRANSACTIONS, Pace, Work

_SECONDS = 3.0
_WORKS: tuple[tuple[Peer, tuple[Work, ...]], ...] = (
    (NATS, (ALONE, FLYING)),
    (NATS_SYNCED, (ALONE,)),
    (RABBITMQ, (ALONE, FLYING, TRANSACTIONS)),
)


def _row(peer: Peer, work: Work) -> Row:
    """The peer is started for this row."""

    @contextmanager
    def opened(surroundings: Surroundings) -> Iterator[Measure]:
        pace = Pace(surroundings.count(10) * _SECONDS / 10)
        with peer.start(surroundings.directory) as running, work.open(peer, running, pace) as measure:
            yield measure

    return Row(row_name(peer, work.name), f"peer: {peer.title}: {work.title}", opened, work.units, repeats=3)


ROWS = tuple(_row(peer, work) for peer, works in _WORKS for work in works)
