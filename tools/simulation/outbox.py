"""An outbox in the database: writers that put their messages there, and drainers that bring them to the broker.

A writer commits row and messages in one transaction of the database, with or without a prepare that it gave up, which
is void then. Drainers number what is committed, send it in order and remove what is answered. They repeat, sleep while
others go on, and die. An operator keeps rows back: their numbers go to voids, also while a drainer that has read them
sleeps. What must hold is what holds of a last resource: rows and messages agree, nothing is twice, each key is in
order. A marker is refused while a row of its partition and key waits, so that nothing overtakes it. A number is taken
once, whoever asks, and of what went to an outbox the broker never says that it was rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from txmq.xa.last_resource.coordinator import LastResourceEffect, LastResourceEvent
from txmq.xa.last_resource.drainer import VOID

from .client import UUID, Client, Process, Reply, Steps
from .database import WAITING, OutboxRow, Session
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
            yield from self._void(transaction)

    def _void(self, transaction: Transaction) -> Steps:
        reply = yield from self.ask("rollback", transaction.txid, extensions={"voided": None})
        if reply is not None and reply[0] == 200:
            reply = yield from self.ask("outcome", transaction.txid)
            if reply is not None and reply[0] == 200 and not reply[1].startswith(b"unknown"):
                raise Violation(f"P6: {transaction.txid} is in an outbox, and the broker says {reply[1]!r}")

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


class _Sent(NamedTuple):
    """A row as a drainer has read it; others may have gone on since."""

    number: int
    row: str
    body: bytes
    is_void: bool


def _read(row: OutboxRow, took: str | None) -> _Sent:
    is_void = row.state != WAITING if took is None else took == VOID
    return _Sent(row.number, row.name, row.body, is_void)


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
                told = json.loads(reply[1])
                self._check(gone, told)
                yield from self._drain(told["rows"])
            yield self.world.rng.uniform(0.0, 0.05)

    def _check(self, gone: int, told: dict[str, Any]) -> None:
        """The broker knows every number that is gone from the table, and no row under another one's number."""
        if told["last"] < gone:
            raise Violation(f"P1: rows up to {gone} are placed, the broker knows {told['last']}")
        for row in self.shared.database.outbox.rows:
            known = told["rows"].get(str(row.number), row.name)
            if known != row.name and (known != VOID or row.state == WAITING):
                raise Violation(f"P6: {row.name} has number {row.number}, the broker knows {known}")

    def _drain(self, known: Mapping[str, str]) -> Steps:
        rows = self._numbered(known)
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
                raise Violation(f"P3: row {row.row} is refused: {reply}")
            if reply[0] != 200:
                return
            yield self.world.rng.uniform(0.0, 0.01)
            self._taken(row)

    def _numbered(self, known: Mapping[str, str]) -> list[_Sent]:
        """Rows that have a number now; what took it the broker may have said."""
        outbox = self.shared.database.outbox
        outbox.number()
        numbered = sorted((row for row in outbox.rows if row.number), key=lambda row: row.number)
        return [_read(row, known.get(str(row.number))) for row in numbered[: self.world.rng.randint(1, IN_FLIGHT_MAX)]]

    def _taken(self, sent: _Sent) -> None:
        outbox, took = self.shared.database.outbox, VOID if sent.is_void else sent.row
        first = outbox.taken.setdefault(sent.number, took)
        if first != took:
            raise Violation(f"P6: number {sent.number} was taken by {first}, and is by {took}")
        if sent.is_void:
            self.world.meet("a number was used up by a void")
            outbox.voided(sent.number, sent.row)
        else:
            self.world.meet("a row was drained")
            outbox.delete(sent.number, sent.row)

    def _send(self, sent: _Sent) -> bytes:
        words: dict[str, str | int | None] = {
            "drained": SERIES, "number": sent.number, "row": VOID if sent.is_void else sent.row, "uuid": UUID,
        }  # fmt: skip
        return self.send("commit", self.next_txid(), body=b"" if sent.is_void else sent.body, extensions=words)


class OutboxOperator(Process):
    """Keeps rows back, and lets them go: for ever."""

    def main(self) -> Steps:
        """See the class."""
        outbox = self.shared.database.outbox
        while True:
            yield self.world.rng.uniform(0.0, 0.1)
            waiting = [row for row in outbox.rows if row.state == WAITING]
            if waiting and not self.shared.stopping and self.world.chance(0.5):
                outbox.park(self.world.rng.choice(waiting))
            else:
                outbox.release()


def population(shared: Shared, seconds: float) -> list[Client]:
    """The writers and drainers of a world, none in most; all drainers but one may die."""
    world, rng = shared.world, shared.world.rng
    if not (world.chance(0.4) or world.has_outbox):
        return []
    writers: list[Client] = [OutboxWriter(shared, f"w{n}") for n in range(rng.randint(1, 2))]
    drainers = [Drainer(shared, writers, f"x{n}") for n in range(rng.randint(1, 3))]
    for drainer in drainers[1:]:
        if world.chance(0.5):
            world.after(rng.uniform(0, seconds), drainer.die)
    if world.chance(0.5) or world.has_outbox:
        OutboxOperator(shared, "xo")
    return writers + drainers
