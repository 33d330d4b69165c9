"""An outbox in the database: writers that put their messages there, and drainers that bring them to the broker.

A writer commits row and messages in one transaction of the database, with or without a prepare that it gave up.
Drainers number what is committed, send it in order and remove what is answered. They repeat, sleep while others go on,
and die. What must hold is what holds of a last resource: rows and messages agree, nothing is twice, each key is in
order. A marker is refused while a row of its partition and key waits, so that nothing overtakes it.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any

from txmq.xa.last_resource.coordinator import LastResourceEffect, LastResourceEvent

from .client import UUID, Client, Reply, Steps
from .database import OutboxRow, Session
from .history import Shared, Transaction
from .world import Violation

SERIES = "5e" * 16
IN_FLIGHT_MAX = 6


class OutboxWriter(Client):
    """An application whose transactions put their messages into the outbox, or prepare them."""

    def main(self) -> Steps:
        """Until the world stops."""
        while not self.shared.stopping:
            yield from self.connected()
            yield from self.outboxed() if self.world.chance(0.6) else self.last_resource()
            yield self.world.rng.uniform(0.0, 0.02)

    def _carry_out(
        self,
        effect: LastResourceEffect,
        transaction: Transaction,
        session: Session,
        streamed: int,
        prepare: list[bytes],
    ) -> Generator[float | bytes, Reply, LastResourceEvent | None]:
        if effect is LastResourceEffect.INSERT_MARKER and self.world.chance(0.4):
            yield self.world.rng.uniform(0.0, 0.4)  # rows are drained meanwhile, if they need not wait for it
        return (yield from super()._carry_out(effect, transaction, session, streamed, prepare))

    def outboxed(self) -> Steps:
        """One transaction: rows, messages and marker commit together; a prepare that was sent is void."""
        database, transaction = self.shared.database, self.begin()
        kept = [part for part in transaction.parts if part[0][0] != "temporary"]  # a row that cannot be sent is parked
        transaction.key, transaction.row = self.world.rng.randrange(3), "row-" + transaction.txid
        self.open = session = database.begin(transaction.row, transaction.key) if kept else None
        if session is None:
            transaction.told = "rolled-back"
            return
        transaction.parts[:], transaction.version = kept, session.version
        _, body = self.request(transaction, 0, f" keys={transaction.key}")
        is_prepared = self.world.chance(0.5)
        if is_prepared:
            words = {"resource": "db", "uuid": UUID, "table": "txmq_marker"}
            prepare = self.send("prepare", transaction.txid, "last-resource", body=body, extensions=words)
            if self.world.chance(0.7):
                yield prepare
        yield self.world.rng.uniform(0.0, 0.01)
        if self._commit(transaction, session, body):
            transaction.told = "committed"
            self.world.meet("messages went into an outbox")
        self.open = None
        if is_prepared and session.marker is not None:
            yield from self.ask("rollback", transaction.txid)

    def _commit(self, transaction: Transaction, session: Session, body: bytes) -> bool:
        """Whether the writer is told that it is committed."""
        database = self.shared.database
        if not database.insert_marker(session, transaction.txid):
            database.roll_back(session)
            transaction.told = "rolled-back"  # a resolver was first
            return False
        slots = frozenset((place, transaction.key) for place, _ in transaction.parts)
        database.commit(session, "outboxed")
        self.shared.database.outbox.rows.append(OutboxRow(transaction.txid, body, slots))
        return self.world.chance(0.9)


class Drainer(Client):
    """One process that drains; there may be several."""

    def __init__(self, shared: Shared, writers: Sequence[Client], name: str) -> None:
        self._writers = writers
        super().__init__(shared, name)

    def main(self) -> Steps:
        """Until no row comes any more, and none waits."""
        while self.shared.database.outbox.rows or not all(writer.is_over for writer in self._writers):
            yield from self.connected()
            gone = self.shared.database.outbox.gone  # looked at before the broker is asked
            reply = yield from self.ask("drained", SERIES)
            if reply is not None and reply[0] == 200:
                self._check(gone, json.loads(reply[1]))
                yield from self._drain()
            yield self.world.rng.uniform(0.0, 0.05)

    def _check(self, gone: int, told: dict[str, Any]) -> None:
        """The broker knows every number that is gone from the table, and no row under another one's number."""
        if told["last"] < gone:
            raise Violation(f"P1: rows up to {gone} are placed, the broker knows {told['last']}")
        for row in self.shared.database.outbox.rows:
            known = told["rows"]
            if known.get(str(row.number), row.name) != row.name:
                raise Violation(f"P6: {row.name} has number {row.number}, the broker knows {known[str(row.number)]}")

    def _drain(self) -> Steps:
        outbox = self.shared.database.outbox
        outbox.number()
        rows = sorted(outbox.rows, key=lambda row: row.number)[: self.world.rng.randint(1, IN_FLIGHT_MAX)]
        if self.world.chance(0.05):
            del rows[:1]  # such a drainer would be wrong: the broker takes nothing of it
        if self.world.chance(0.2):
            self.world.meet("a drainer was paused")
            yield self.world.rng.uniform(0.0, 1.0)
        sent = [(row, self._send(row)) for row in rows]
        started = self.world.now
        for row, opaque in sent:
            reply: Reply = yield opaque
            if self.world.now - started > 0.2:
                self.world.meet("a row waited for its place")
            if reply is None:
                self.world.meet("a drained row has no answer")
                return
            if reply[0] == 409 and reply[1].startswith(b"out-of-turn "):
                self.world.meet("a drainer was out of turn")
            elif reply[0] == 410:
                self.session = 0
                self.link.cut() if self.link is not None else None
                return
            elif reply[0] < 429 and reply[0] != 200:
                raise Violation(f"P3: row {row.name} is refused: {reply}")
            if reply[0] != 200:
                return
            yield self.world.rng.uniform(0.0, 0.01)
            self.world.meet("a row was drained")
            outbox.delete(row.number, row.name)

    def _send(self, row: OutboxRow) -> bytes:
        words: dict[str, str | int | None] = {"drained": SERIES, "number": row.number, "row": row.name, "uuid": UUID}
        return self.send("commit", self.next_txid(), body=row.body, extensions=words)


def population(shared: Shared, seconds: float) -> list[Client]:
    """The writers and drainers of a world, none in most; all drainers but one may die."""
    world, rng = shared.world, shared.world.rng
    if not world.chance(0.4):
        return []
    writers: list[Client] = [OutboxWriter(shared, f"w{n}") for n in range(rng.randint(1, 2))]
    drainers = [Drainer(shared, writers, f"x{n}") for n in range(rng.randint(1, 3))]
    for drainer in drainers[1:]:
        if world.chance(0.5):
            world.after(rng.uniform(0, seconds), drainer.die)
    return writers + drainers
