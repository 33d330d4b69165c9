"""A backlog: a million rows wait in MariaDB's outbox when the relay begins, how many of them does it move a second?

A relay of a peer is stopped after a while, since some would take many minutes; txmq's goes on until nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

from bench.model import Measure
from bench.peers.helpers import helper
from bench.peers.model import TOPICS, VALUE, Peer, Running
from bench.peers.orders import empty
from bench.peers.own_outbox import DRAIN_S_MAX, fill, installed, own_relay
from bench.peers.relay import POLL_S, relay
from bench.rows.databases import OUTBOX, Database

ROWS = 1_000_000
UNITS = {"drained": "rows/s"}
_SECONDS_MAX = 60.0
_PER_COMMIT = 10_000

Make = Callable[[Database, int], AbstractContextManager[Measure]]


@contextmanager
def into_peer(peer: Peer, running: Running, database: Database, rows: int) -> Iterator[Measure]:
    """An unordered relay into a peer."""
    with helper(relay, database.connect, database.claim, peer, running.address, POLL_S) as moving:

        def measure() -> dict[str, float]:
            _fill(database, rows)
            moved, seconds = moving.ask(_SECONDS_MAX, DRAIN_S_MAX)
            empty(database)
            return {"drained": moved / seconds}

        yield measure


@contextmanager
def into_own(running: Running, database: Database, rows: int) -> Iterator[Measure]:
    """txmq's outbox."""
    outbox = installed(database)
    with helper(own_relay, database.connect, running.address) as moving:

        def measure() -> dict[str, float]:
            fill(outbox, database.connect, rows)
            sent, seconds = moving.ask(DRAIN_S_MAX, DRAIN_S_MAX)
            if sent != rows:
                raise AssertionError(f"{sent} messages were sent, {rows} waited")
            return {"drained": sent / seconds}

        yield measure


def _fill(database: Database, rows: int) -> None:
    values = [(TOPICS[0], b"key", VALUE)] * _PER_COMMIT
    with closing(database.connect()) as connection:
        cursor = connection.cursor()
        for first in range(0, rows, _PER_COMMIT):
            cursor.executemany(database.sql(OUTBOX), values[: rows - first])
            connection.commit()
