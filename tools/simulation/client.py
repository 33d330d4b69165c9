"""Clients: one process each, written as a generator that waits for answers (yields an opaque) or for time (a number).

An answer is None where the connection was lost or the wait too long: then nothing is known, and the client asks again
as a client of txmq does: a put with its sequence, a transaction's fate by its id.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping

from txmq.client.producer.core import Batch, ProducerCore, ProducerLimits
from txmq.errors import DeliveryUnknownError
from txmq.log import records
from txmq.log.batch import checksum
from txmq.model import TopicPartition
from txmq.protocol import requests
from txmq.protocol.answers import AnswerReader, broker_error
from txmq.xa.last_resource.coordinator import (
    LastResourceCoordinator,
    LastResourceEffect,
    LastResourceEvent,
    LastResourceState,
)

from .broker import LOGIN, Broker, Link
from .database import Database, Session
from .history import Put, Shared, Transaction
from .world import Violation

UUID = "a" * 32
RETAINED = "retained"  # a topic whose old segments expire; for puts only
TIMEOUT_S = 0.5
Reply = tuple[int, bytes] | None
Steps = Generator[float | bytes, Reply, None]
Asking = Generator[float | bytes, Reply, Reply]


class Process:
    """Runs a generator on one connection at a time."""

    leaves_when_refused = True  # and connects again later, as a client of txmq does; else it goes on asking, as nobody

    def __init__(self, shared: Shared, name: str) -> None:
        self.shared, self.world, self.name = shared, shared.world, name
        self.link: Link | None = None
        self.is_over = False
        self._reader = AnswerReader()
        self._answers: dict[bytes, Reply] = {}
        self._opaques = 0
        self._waits: bytes | None = None
        self._turn = 0
        self._steps = self.main()
        self.world.after(0.0, lambda: self._resume(None, 0))

    def main(self) -> Steps:
        """What it does."""
        raise NotImplementedError

    def _resume(self, reply: Reply, turn: int) -> None:
        if turn != self._turn or self.is_over:
            return
        self._turn += 1
        self._waits = None
        try:
            wish = self._steps.send(reply)
        except StopIteration:
            self.is_over = True
            return
        turn = self._turn
        if isinstance(wish, float):
            self.world.after(wish, lambda: self._resume(None, turn))
        elif wish in self._answers or self.link is None or self.link.is_lost:
            self.world.after(0.0, lambda: self._resume(self._answers.pop(wish, None), turn))
        else:
            self._waits = wish
            self.world.after(TIMEOUT_S, lambda: self._timed_out(turn))

    def _timed_out(self, turn: int) -> None:
        if turn == self._turn and not self.is_over:
            if self.link is not None:
                self.link.cut()
            self._resume(None, turn)

    def _received(self, link: list[Link], data: bytes) -> None:
        if not link or link[0] is not self.link or self.is_over:
            return
        for code, opaque, body, _ in self._reader.feed(data):
            self._answers[opaque] = code, bytes(body)
            if opaque == LOGIN and code != 200 and self.leaves_when_refused:
                self.world.trace(self.name, "login refused", code)
                link[0].cut()
        if self._waits in self._answers:
            self._resume(self._answers.pop(self._waits), self._turn)

    def _lost(self, link: list[Link]) -> None:
        if link and link[0] is self.link:
            self.link = None
            if self._waits is not None:
                self._resume(None, self._turn)

    def open_link(self, broker: Broker | None = None) -> bool:
        """A new connection, to one of several brokers if it is named; False where nobody listens."""
        return self.open_link_as(self.shared.user, broker)

    def open_link_as(self, user: str, broker: Broker | None = None) -> bool:
        """The same, logged in as a user if one is named."""
        box: list[Link] = []
        self._reader, self._answers = AnswerReader(), {}
        link = (broker or self.shared.broker).connect(
            lambda data: self._received(box, data), lambda: self._lost(box), self.name
        )
        if link is None:
            return False
        box.append(link)
        self.link = link
        if self.world.has_tls:
            link.speak_tls(user)
        if user:
            link.log_in(user)
        return True

    def send(self, verb: str, *arguments: str | int, body: bytes | bytearray | None = None,
             extensions: Mapping[str, str | int | None] | None = None) -> bytes:  # fmt: skip
        """Send one request, if there is a connection; its opaque."""
        self._opaques += 1
        opaque = b"q%d" % self._opaques
        if self.link is not None and not self.link.is_lost:
            self.world.trace(self.name, verb, *arguments, opaque.decode())
            content = requests.request(verb, *arguments, extensions=extensions,
                                       body=None if body is None else [body], opaque=opaque)  # fmt: skip
            self.link.write(b"".join(content))
        return opaque

    def ask(self, verb: str, *arguments: str | int, body: bytes | None = None,
            extensions: Mapping[str, str | int | None] | None = None) -> Asking:  # fmt: skip
        """Send and wait."""
        opaque = self.send(verb, *arguments, body=body, extensions=extensions)
        if self.world.chance(0.02) and self.link is not None and not self.shared.stopping:
            self.world.meet("link lost")
            link = self.link
            self.world.after(self.world.rng.uniform(0, 0.01), link.cut)
        reply = yield opaque
        self.world.trace(self.name, opaque.decode(), "lost" if reply is None else (reply[0], reply[1][:40]))
        return reply

    def die(self) -> None:
        """Killed."""
        self.is_over = True
        self.world.meet("client died")
        self.world.trace(self.name, "dies")
        if self.link is not None:
            self.link.cut()


class Client(Process):
    """An application: puts, local and last-resource transactions, one after the other."""

    def __init__(self, shared: Shared, name: str) -> None:
        self.session = self.epoch = 0
        self.secret = ""
        self.counter = self.messages = 0
        self.cluster = self.home = ""
        self.core = ProducerCore(ProducerLimits(in_flight_max=8))
        self.open: Session | None = None
        super().__init__(shared, name)

    def main(self) -> Steps:
        """Operations until the world stops."""
        while not self.shared.stopping:
            yield from self.connected()
            draw = self.world.rng.random()
            if draw < 0.4:
                yield from self.puts()
            elif draw < 0.7:
                yield from self.local()
            else:
                yield from self.last_resource()
            yield self.world.rng.uniform(0.0, 0.01)

    def die(self) -> None:
        """Killed; its database session with it."""
        super().die()
        if self.open is not None:
            self.shared.database.roll_back(self.open)

    def connected(self) -> Steps:
        """Until there is a connection that speaks for a session."""
        while self.link is None or self.link.is_lost:
            if not self.open_link():
                yield 0.02
                continue
            wish = f"{self.session:x}.{self.epoch}.{self.secret}" if self.session else "new"
            reply = yield from self.ask("hello", 1, self.name, extensions={"session": wish})
            if reply is None or reply[0] != 200:
                if reply is not None and reply[0] == 410:
                    self.session = 0
                if self.link is not None:
                    self.link.cut()
                self.link = None
                continue

            hello = json.loads(reply[1])
            session, self.epoch, self.secret = int(hello["session"], 16), hello["epoch"], hello["secret"]
            if session == self.session:
                self.world.meet("session resumed")
            else:
                self.counter = 0
            self.session, self.cluster, self.home = session, hello["cluster"], hello["home"]
            self.core.disconnected()
            self.core.connected(session, self.epoch, hello["in_flight_max"])

    def place(self) -> TopicPartition:
        """Any partition."""
        topic = self.world.rng.choice(sorted(self.shared.history.topics))
        return topic, self.world.rng.randrange(self.shared.history.topics[topic])

    def values(self) -> tuple[bytes, ...]:
        """New ones."""
        count = self.world.rng.choice((1, 1, 2, 3))
        first, self.messages = self.messages + 1, self.messages + count
        padding = b"." * self.world.rng.choice((10, 100, 700))
        return tuple(b"%b-%06d-%b" % (self.name.encode(), first + n, padding) for n in range(count))

    # --- puts ---

    def puts(self) -> Steps:
        """A few batches at once, until each has its end."""
        now = self.world.now
        batches: list[tuple[Batch, Put]] = []
        for _ in range(self.world.rng.randint(1, 5)):
            put = Put((RETAINED, 0) if self.world.chance(0.25) else self.place(), self.values())
            self.shared.history.puts.append(put)
            content = bytearray(encoded_batch(put.values, self.world.clock.now_ms()))
            batches.append((self.core.add(*put.place, content, len(put.values), now, now + 20.0), put))
        while not all(batch.is_finished for batch, _ in batches):
            yield from self.connected()
            yield from self._flight()
            self.core.expire(self.world.now)
            for batch, put in batches:
                self._note(batch, put)
        self.core.take_finished()

    def _flight(self) -> Steps:
        given = self.core.poll(self.world.now)
        if not given:
            yield 0.02
        sent = []
        for batch in given:
            if batch.transmission > 1:
                self.world.meet("put sent again")
            topic, partition = batch.queue.topic, batch.queue.partition
            assert batch.content is not None
            sent.append((batch, batch.transmission, self.send("put", topic, partition, body=batch.content)))
        for batch, transmission, opaque in sent:
            reply = yield opaque
            if reply is None:
                self.core.disconnected()
                if self.link is not None:
                    self.link.cut()
                    self.link = None
                return
            if reply[0] == 200:
                self.core.answered(batch, int(reply[1]))
            else:
                self.core.refused(batch, transmission, broker_error(*reply), self.world.now)
        if self.core.needs_session or self.core.needs_connection:
            if self.core.needs_session:
                self.session = 0
            if self.link is not None:
                self.link.cut()
            self.link = None
            self.core.disconnected()

    def _note(self, batch: Batch, put: Put) -> None:
        if batch.is_finished and put.told == "unknown":
            if batch.base_offset is not None:
                put.told = batch.base_offset
                self.world.meet("put acknowledged")
            elif not isinstance(batch.error, DeliveryUnknownError):
                put.told = "not stored"

    # --- transactions ---

    def next_txid(self) -> str:
        """An id never used before."""
        self.counter += 1
        return f"{self.cluster}-{self.home}-{self.session:x}-{self.counter:x}"

    def begin(self) -> Transaction:
        """A transaction over any partitions."""
        txid = self.next_txid()
        parts = [(self.place(), self.values()) for _ in range(self.world.rng.randint(1, 4))]
        transaction = self.shared.history.transactions[txid] = Transaction(txid, parts)
        self.shared.history.owners |= {value: transaction for _, values in parts for value in values}
        return transaction

    def _stream(self, transaction: Transaction) -> Generator[float | bytes, Reply, int | None]:
        """Send some parts ahead; how many, None if one of them failed."""
        if self.world.chance(0.6):
            return 0
        count = self.world.rng.randint(1, len(transaction.parts))
        for (topic, partition), values in transaction.parts[:count]:
            reply = yield from self.ask("put", topic, partition, body=encoded_batch(values),
                                        extensions={"tx": transaction.txid})  # fmt: skip
            if reply is None or reply[0] != 200:
                return None
        return count

    def request(
        self, transaction: Transaction, streamed: int, keys: str = ""
    ) -> tuple[dict[str, str | int | None], bytes]:
        """The words and the body of ``commit`` or ``prepare``."""
        batches = [encoded_batch(values) for _, values in transaction.parts]
        ahead = b"".join(batches[:streamed])
        extensions: dict[str, str | int | None] = {}
        if streamed:
            extensions = {"parts": streamed, "bytes": len(ahead), "crc": checksum(ahead)}
        body = b""
        for ((topic, partition), _), batch in list(zip(transaction.parts, batches, strict=True))[streamed:]:
            body += f"{topic} {partition} {len(batch)}{keys}\r\n".encode() + batch
        return extensions, body

    def local(self) -> Steps:
        """One local transaction; where the answer is lost, asked again."""
        transaction = self.begin()
        streamed = yield from self._stream(transaction)
        if streamed is None or self.world.chance(0.1):
            yield from self._withdraw(transaction)
            return
        extensions, body = self.request(transaction, streamed)
        reply = yield from self.ask("commit", transaction.txid, body=body, extensions=extensions)
        if reply is not None and reply[0] == 200:
            if self.world.chance(0.1):
                again = yield from self.ask("commit", transaction.txid, body=body, extensions=extensions)
                if again is not None:
                    self.world.meet("commit asked again")
                    same = again == reply or bool(self.shared.history.deleted)
                    assert same, f"P6: {reply}, then {again}"
            transaction.told, transaction.lines = "committed", reply[1]
            self.world.meet("streamed committed" if streamed else "local committed")
        elif reply is not None and reply[0] < 500:
            transaction.told = "rolled-back"
            self.refused(reply)
        else:
            yield from self.find_out(transaction)

    def refused(self, reply: tuple[int, bytes]) -> None:
        """A transaction was refused; nothing happened."""

    def _withdraw(self, transaction: Transaction) -> Steps:
        yield from self.connected()
        verb = "rollback" if self.world.chance(0.5) else "outcome"
        extensions: dict[str, str | int | None] = {} if verb == "rollback" else {"fence": None}
        reply = yield from self.ask(verb, transaction.txid, extensions=extensions)
        if reply is None or reply[0] != 200:
            return
        if verb == "outcome" and not reply[1].startswith(b"rolled-back\n"):
            raise Violation(f"P6: fenced and {reply[1]!r}")
        transaction.told = "rolled-back"
        self.world.meet("rolled back" if verb == "rollback" else "fence journaled")
        if self.world.chance(0.5):
            extensions, body = self.request(transaction, 0)
            reply = yield from self.ask("commit", transaction.txid, body=body, extensions=extensions)
            if reply is not None and reply[0] == 200:
                raise Violation(f"P6: committed behind its fence: {transaction.txid}")
            if reply is not None and reply[0] in (409, 410):
                self.world.meet("late commit refused")

    def find_out(self, transaction: Transaction) -> Steps:
        """Ask until its end is known, or nobody knows it."""
        while transaction.told == "unknown":
            yield from self.connected()
            reply = yield from self.ask("outcome", transaction.txid, extensions={"fence": None})
            if reply is not None and reply[0] == 410:
                return
            if reply is not None and reply[0] == 200:
                state, _, lines = reply[1].partition(b"\n")
                if state in (b"committed", b"rolled-back"):
                    transaction.told, transaction.lines = state.decode(), lines
                    self.world.meet("unknown resolved")
            yield 0.02

    def last_resource(self) -> Steps:
        """The shell of a coordinator: effects in order, events back."""
        database, transaction = self.shared.database, self.begin()
        transaction.key, transaction.row = self.world.rng.randrange(3), "row-" + transaction.txid
        self.open = session = database.begin(transaction.row, transaction.key)
        if session is None:
            transaction.told = "rolled-back"
            return
        transaction.version = session.version
        coordinator = LastResourceCoordinator()
        streamed = yield from self._stream(transaction)
        if streamed != 0:
            coordinator.step(LastResourceEvent.PARTS_STREAMED)
        event = (
            LastResourceEvent.BODY_FAILED if streamed is None or self.world.chance(0.1) else LastResourceEvent.BODY_DONE
        )
        prepare: list[bytes] = []
        effects = list(coordinator.step(event))
        while effects:
            found = yield from self._carry_out(effects.pop(0), transaction, session, streamed or 0, prepare)
            if found is not None:
                effects = list(coordinator.step(found))
        self.open = None
        if coordinator.state in (LastResourceState.COMMITTED, LastResourceState.COMMITTED_PENDING):
            transaction.told = "committed"
            self.world.meet("last resource committed")
        elif coordinator.state is LastResourceState.ROLLED_BACK:
            transaction.told = "rolled-back"
        elif coordinator.state is not LastResourceState.UNKNOWN:
            raise AssertionError(f"P3: {transaction.txid} ended as {coordinator.state.value}")

    def _carry_out(
        self,
        effect: LastResourceEffect,
        transaction: Transaction,
        session: Session,
        streamed: int,
        prepare: list[bytes],
    ) -> Generator[float | bytes, Reply, LastResourceEvent | None]:
        database = self.shared.database
        if effect is LastResourceEffect.SEND_PREPARE:
            extensions, body = self.request(transaction, streamed, f" keys={transaction.key}")
            extensions |= {"resource": "db", "uuid": UUID, "table": "txmq_marker"}
            prepare.append(self.send("prepare", transaction.txid, "last-resource", body=body, extensions=extensions))
            return None
        if effect is LastResourceEffect.AWAIT_PREPARED:
            reply = yield prepare[0]
            if reply is None or reply[0] >= 500:
                return LastResourceEvent.PREPARE_UNKNOWN
            if reply[0] != 200:
                self.refused(reply)
                return LastResourceEvent.PREPARE_REFUSED
            return LastResourceEvent.PREPARED
        if effect in (LastResourceEffect.SEND_COMMIT, LastResourceEffect.SEND_ROLLBACK):
            return (yield from self._tell(effect, transaction))
        yield self.world.rng.uniform(0.0, 0.005)
        if effect is LastResourceEffect.INSERT_MARKER:
            done = database.insert_marker(session, transaction.txid)
            return LastResourceEvent.MARKER_INSERTED if done else LastResourceEvent.MARKER_REFUSED
        if effect is LastResourceEffect.ROLL_BACK_DATABASE:
            database.roll_back(session)
            return LastResourceEvent.DATABASE_ROLLED_BACK
        if effect is LastResourceEffect.COMMIT_DATABASE:
            return self._commit_database(session)
        return _look_up(database, transaction.txid)

    def _commit_database(self, session: Session) -> LastResourceEvent:
        draw, database = self.world.rng.random(), self.shared.database
        if draw < 0.85:
            database.commit(session)
            return LastResourceEvent.DATABASE_COMMITTED
        self.world.meet("database answer lost")
        if draw < 0.93:
            database.commit(session)
        else:
            database.roll_back(session)
        return LastResourceEvent.DATABASE_UNKNOWN

    def _tell(
        self, effect: LastResourceEffect, transaction: Transaction
    ) -> Generator[float | bytes, Reply, LastResourceEvent]:
        is_commit = effect is LastResourceEffect.SEND_COMMIT
        started = self.world.now
        if is_commit and self.world.chance(0.3):
            self.send("commit", transaction.txid, body=b"")
            self.world.meet("commit not awaited")
            return LastResourceEvent.COMMIT_WRITTEN
        if is_commit:
            reply = yield from self.ask("commit", transaction.txid, body=b"")
        else:
            reply = yield from self.ask("rollback", transaction.txid)
        if self.world.now - started > 0.05:
            self.world.meet("commit waited for order")
        if reply is None or reply[0] >= 500:
            return LastResourceEvent.COMMIT_LEFT if is_commit else LastResourceEvent.BROKER_UNKNOWN
        if not is_commit:
            return LastResourceEvent.BROKER_ROLLED_BACK if reply[0] == 200 else LastResourceEvent.BROKER_CONTRADICTS
        if reply[0] != 200:
            raise AssertionError(f"P3: {transaction.txid} is committed, and the broker says {reply}")
        transaction.lines = reply[1]
        self.shared.database.markers.pop(transaction.txid, None)  # the broker's word is durable
        return LastResourceEvent.COMMIT_WRITTEN


def _look_up(database: Database, txid: str) -> LastResourceEvent:
    found = database.insert_rolled_back(txid)
    if found == "locked":
        return LastResourceEvent.LOOKUP_FAILED
    is_committed = found == "duplicate" and database.markers[txid] == "committed"
    return LastResourceEvent.PROVED_COMMITTED if is_committed else LastResourceEvent.PROVED_ROLLED_BACK


def encoded_batch(values: tuple[bytes, ...], now_ms: int = 0) -> bytes:
    """One record batch."""
    return bytes(records.encode([(b"k", value, (), now_ms) for value in values]))
