"""The relay of an outbox, in a process of its own: claim a batch of rows, publish, delete, commit.

Theory of operation. As relays are written by hand, and as quick as they come: ``FOR UPDATE SKIP LOCKED`` at READ
COMMITTED, so that it waits for no writer and no writer for it; up to ``RELAY_BATCH`` rows a turn, published with many
in flight; deleted by their ids, since rows with lower ids may commit later; the next look at once, or after a while if
there was nothing. Each message arrives at least once, in no promised order.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

from bench.peers.model import Link, Peer
from bench.rows.databases import Claim, Connect

POLL_S = 0.005


def relay(
    connection: Connection, connect: Connect, claim: Claim, peer: Peer, address: str, poll_s: float
) -> None:  # fmt: skip
    """Move rows from one word of the connection to the next one; the work of a helper process."""
    with closing(connect()) as database, closing(peer.connect(address)) as link:
        if claim.session:
            database.cursor().execute(claim.session)
        connection.send("ready")
        with suppress(EOFError):
            while connection.recv():
                connection.send("ready")
                _move(connection, database, claim, link, poll_s)
                connection.recv()
                connection.send("ready")


def _move(connection: Connection, database: Any, claim: Claim, link: Link, poll_s: float) -> None:
    cursor = database.cursor()
    while not connection.poll():
        cursor.execute(claim.rows)
        rows = cursor.fetchall()
        if rows:
            link.publish_all([content for _, content in rows])
            _delete(cursor, [number for number, _ in rows])
        database.commit()  # after a look at nothing, too: the next one is to see what came since
        if not rows:
            time.sleep(poll_s)


def _delete(cursor: Any, numbers: list[int]) -> None:
    cursor.execute(f"DELETE FROM outbox WHERE id IN ({', '.join(map(str, numbers))})")
