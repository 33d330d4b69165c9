"""A process that drains an outbox until it dies: ``python -m tests.services.transaction.dying_drainer JSON``.

JSON: address, resource (its name), how (``pump``, as a service whose blocks use the outbox always, or ``rounds``, as a
resolver), and path (of an SQLite file) or server (what MySQLdb takes). Its pages are short, so that a few rows are
several.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from typing import Any

import MySQLdb

import txmq
from txmq.xa import LastResource
from txmq.xa.last_resource import drainer, turns
from txmq.xa.resolver import Resolver

PAGE_SIZE = 8
ROUNDS_MAX = 20
ALIVE_S_MAX = 60.0


def main(text: str) -> None:
    """Drain."""
    drainer.PAGE_SIZE_MAX = turns.PAGE_SIZE_MAX = PAGE_SIZE  # type: ignore[attr-defined]
    given = json.loads(text)

    def connect() -> Any:
        if "path" in given:
            return sqlite3.connect(given["path"], timeout=30.0, check_same_thread=False)
        return MySQLdb.connect(**given["server"])

    client = txmq.connect(given["address"])
    resource = LastResource(given["resource"], connect=connect, outbox="always")
    if given["how"] == "pump":
        client.settle(resource)
        client.clock.sleep(ALIVE_S_MAX)
    resolver = Resolver(client, [resource])
    for _ in range(ROUNDS_MAX):
        resolver.round()


if __name__ == "__main__":
    main(sys.argv[1])
