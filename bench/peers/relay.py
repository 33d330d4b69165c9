"""The relay of an outbox, in a process of its own: claim a batch of rows, publish, delete, commit.

Theory of operation. As relays are written by hand, and as quick as they come: ``FOR UPDATE SKIP LOCKED`` at READ
COMMITTED, so that it waits for no writer and no writer for it; up to ``RELAY_BATCH`` rows a turn, published with many
in flight; deleted by their ids, since rows with lower ids may commit later; the next look at once, or after a while if
there was nothing. Each message arrives at least once, in no promised order.

A helper's words: ``MOVE``, until the next word; or a number of seconds, after which it stops, or as soon as nothing is
left, and says how many rows it has moved and how long that took.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

from bench.peers.model import Link, Peer
from bench.rows.databases import Claim, Connect

POLL_S = 0.005
MOVE = "move"


def relay(
    connection: Connection, connect: Connect, claim: Claim, peer: Peer, address: str, poll_s: float
) -> None:  # fmt: skip
    """The work of a helper process."""
    with closing(connect()) as database, closing(peer.connect(address)) as link:
        if claim.session:
            database.cursor().execute(claim.session)
        connection.send("ready")
        with suppress(EOFError):
            while word := connection.recv():
                if word == MOVE:
                    connection.send("ready")
                    _move(connection, database, claim, link, poll_s)
                    connection.recv()
                    connection.send("ready")
                else:
                    connection.send(_drain(database, claim, link, word))


def _move(connection: Connection, database: Any, claim: Claim, link: Link, poll_s: float) -> None:
    while not connection.poll():
        if not _turn(database, claim, link):
            time.sleep(poll_s)


def _drain(database: Any, claim: Claim, link: Link, seconds: float) -> tuple[int, float]:
    moved, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds and (found := _turn(database, claim, link)):
        moved += found
    return moved, time.perf_counter() - started


def _turn(database: Any, claim: Claim, link: Link) -> int:
    """Move the oldest rows; how many there were."""
    cursor = database.cursor()
    cursor.execute(claim.rows)
    rows = cursor.fetchall()
    if rows:
        link.publish_all([content for _, content in rows])
        _delete(cursor, [number for number, _ in rows])
    database.commit()  # after a look at nothing, too: the next one is to see what came since
    return len(rows)


def _delete(cursor: Any, numbers: list[int]) -> None:
    cursor.execute(f"DELETE FROM outbox WHERE id IN ({', '.join(map(str, numbers))})")
