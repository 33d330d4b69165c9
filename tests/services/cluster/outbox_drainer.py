"""A process that drains an outbox until it dies: ``python -m tests.services.cluster.outbox_drainer ADDRESS PATH WHEN``.

It does so in the rounds of its resolver, or as one whose blocks use the outbox always.

It is started rather than forked by a test: the thread of another client may be in SQLite at that moment, and a forked
child would wait for ever for the lock that this thread holds.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

import txmq
from txmq.xa import LastResource
from txmq.xa.last_resource.outbox import OutboxOptions
from txmq.xa.resolver import Resolver

NAME = "shop"
HOLDER = "the process that dies"
ROUNDS_MAX = 20
ALIVE_S_MAX = 60.0
When = Literal["away", "always"]


def connect(path: str) -> sqlite3.Connection:
    """A connection to the shop's database."""
    return sqlite3.connect(path, timeout=30.0, check_same_thread=False)


def open_shop(
    address: str, connect: Callable[[], sqlite3.Connection], when: When = "away"
) -> tuple[txmq.Client, LastResource]:
    """The client and the database of one process."""
    client = txmq.connect(address, timeout=3.0, lazy=True)
    return client, LastResource(NAME, connect=connect, outbox=OutboxOptions(when, away_after_ms=1000))


def main(address: str, path: str, when: When) -> None:
    """Drain as the one that has the turn."""
    client, resource = open_shop(address, partial(connect, path), when)
    assert resource.outbox is not None
    resource.outbox.holder = HOLDER
    if when == "always":
        client.settle(resource)
        client.clock.sleep(ALIVE_S_MAX)
    resolver = Resolver(client, [resource])
    for _ in range(ROUNDS_MAX):
        resolver.round()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "always" if sys.argv[3:] == ["always"] else "away")
