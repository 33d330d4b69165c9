"""Applications and resolvers that run txmq's real client: connection, producer, transaction blocks, last resource,
the client's own resolver and ``txmq resolver``'s, each in a simulated process that dies and is started again.

What the real client says (returns, errors, results, outcomes) goes into the same history that the scripted clients
fill, and is held to the same promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from tools.simulated.clock import SimRandom
from tools.simulated.xa_resource import SimulatedXAResource
from txmq.client.client import Client
from txmq.client.producer.producer import Producer
from txmq.client.transaction.block import Transaction as Block
from txmq.errors import (
    BrokerError,
    DeliveryUnknownError,
    FencedError,
    HeuristicError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionTimeoutError,
    TxmqError,
)
from txmq.model import Outcome
from txmq.xa.last_resource import in_doubt_outcome
from txmq.xa.last_resource.in_doubt_outcome import ResolvingConnection, Step
from txmq.xa.last_resource.resource import LastResource
from txmq.xa.resolver import Resolver

from .bank import KEYS_FROM as XA_KEYS_FROM
from .history import XA_ROW, Put, Shared, Transaction
from .threads import Host, Threads, pause, required_task
from .users import bootstrap, settler
from .world import Violation

RESOURCE = "orders-db"
KEYS_FROM = 100  # the scripted clients' rows have smaller ones
Resources = Sequence[LastResource | SimulatedXAResource]


class AbandonedError(Exception):
    """Raised by the body of a block."""


class Program:
    """Something that is started again when it has died.

    Attributes:
        is_over: it will not run again.
    """

    def __init__(self, shared: Shared, threads: Threads, name: str) -> None:
        self.shared, self.world, self.name = shared, shared.world, name
        self._threads, self._lives = threads, 0
        self.is_over = False
        self.host: Host
        self._start()

    def _start(self) -> None:
        self._lives += 1
        self.host = Host(self._threads, f"{self.name}{self._lives}")
        if self.world.chance(0.4) and not self.shared.stopping:
            self.host.countdown = self.world.rng.randint(1, 80)
        self.host.on_death.append(self._died)
        self._set_out()

    def _set_out(self) -> None:
        self.host.start("main", self._main)

    def _main(self) -> None:
        self.main()
        self.is_over = True

    def _died(self) -> None:
        self.world.meet("real client died")
        self.world.after(self.world.rng.uniform(0.01, 0.5), self._again)

    def _again(self) -> None:
        if self.shared.stopping and self.ends_with_the_world:
            self.is_over = True
        else:
            self._start()

    ends_with_the_world = True

    def die(self) -> None:
        """From outside."""
        if not self.is_over:
            self.host.kill()

    def main(self) -> None:
        """One life."""
        raise NotImplementedError

    def resource(self) -> LastResource:
        """The database as this process sees it."""
        assert self.shared.rows is not None
        return LastResource(RESOURCE, self.shared.rows.connect, clock=self.host, random=SimRandom(self.world.rng))

    def banks(self) -> list[SimulatedXAResource]:
        """The XA databases as this process sees them."""
        assert self.shared.bank is not None
        return self.shared.bank.resources()

    def user(self) -> str:
        """The user that it logs in as; empty where there are no users."""
        return self.shared.user

    def client(self) -> Client:
        """A client of its own."""
        return Client(
            bootstrap(self.shared, self.user()),
            timeout=self.world.rng.choice((0.3, 1.0)),
            name=self.host.name,
            clock=self.host,
        )


class ResolverProgram(Program):
    """``txmq resolver``."""

    ends_with_the_world = False

    def user(self) -> str:
        """One of its own."""
        return settler(self.shared)

    def main(self) -> None:
        """Rounds until it dies."""
        client = self.client()
        while True:  # as cli/resolver: a broker that is away at the start
            try:
                client.session  # noqa: B018
                break
            except TxmqError:
                pause(0.1)
        Resolver(client, [self.resource(), *self.banks()], self.host).run(_Never())


class _Never:
    """A stop that never comes."""

    def wait(self, timeout: float) -> bool:
        """Sleep."""
        pause(timeout)
        return False


class Application(Program):
    """Sends, and runs transaction blocks, one after the other."""

    def main(self) -> None:
        """One life."""
        producer = self._open()
        while not self.shared.stopping:
            draw = self.world.rng.random()
            if draw < 0.3:
                self._send(producer)
            elif draw < 0.5:
                self._block(producer, [])
            elif draw < 0.75:
                self._block(producer, [self._resource])
            elif draw < 0.95:
                self._block(producer, self.world.rng.choice((self._banks, self._banks, self._banks[:1])))
            else:
                self._look_back()
            pause(self.world.rng.uniform(0.0, 0.01))
        self._close(producer)

    def _open(self) -> Producer:
        self._count = 0
        self._mine: list[Transaction] = []
        self._client, self._resource, self._banks = self.client(), self.resource(), self.banks()
        self._until_done(self._resource.install)
        for bank in self._banks:
            self._until_done(bank.install)
        return self._client.producer(timeout=self.world.rng.choice((0.2, 1.0, 5.0)))

    def _close(self, producer: Producer) -> None:
        with suppress(TxmqError):
            producer.close()
        self._client.close()
        self._resource.close()

    def _until_done(self, call: Callable[[], Any]) -> None:
        while True:
            try:
                call()
            except Exception:  # noqa: BLE001  the database's, drawn
                pause(0.02)
            else:
                return

    def _value(self) -> bytes:
        self._count += 1
        padding = b"." * self.world.rng.choice((10, 100, 700))
        return b"%b-%06d-%b" % (self.host.name.encode(), self._count, padding)

    def _place(self) -> tuple[str, int | None]:
        """A topic and perhaps a partition."""
        rng, topics = self.world.rng, self.shared.history.topics
        topic = rng.choice(sorted(topics))
        return topic, rng.randrange(topics[topic]) if rng.random() < 0.7 else None

    # --- plain sends ---

    def _send(self, producer: Producer) -> None:
        topic, partition = self._place()
        if partition is None:
            partition = 0
        put = Put((topic, partition), (self._value(),))
        self.shared.history.puts.append(put)
        try:
            result = producer.send(topic, put.values[0], partition=partition)
        except DeliveryUnknownError:
            self.world.meet("real send unknown")
        except TxmqError as error:
            put.told = "not stored"
            self.world.trace(self.host.name, "not stored", type(error).__name__)
        else:
            assert result.offset is not None
            put.told = result.offset
            self.world.meet("real send acknowledged")

    # --- blocks ---

    def _block(self, producer: Producer, resources: Resources) -> Outcome:
        timeout = self.world.rng.choice((0.05, 0.3, 2.0, 30.0))
        block = producer.transaction(*resources, timeout=timeout)
        told: list[Transaction] = []
        error = self._run_block(block, producer, resources, told)
        if told:
            self._judge(told[0], block, error)
        return block.outcome

    def _run_block(
        self, block: Block, producer: Producer, resources: Resources, told: list[Transaction]
    ) -> Exception | None:
        error: Exception | None = None
        try:
            with block:
                self._body(block, producer, resources, told)
        except Exception as failure:  # noqa: BLE001  whatever it is, the block says what became of the transaction
            error = failure
        self.world.trace(self.host.name, "block", block.outcome.value, type(error).__name__)
        return error

    def _body(self, block: Block, producer: Producer, resources: Resources, told: list[Transaction]) -> None:
        rng, history = self.world.rng, self.shared.history
        transaction = Transaction(block.txid, [])
        told.append(transaction)
        self._mine.append(transaction)
        history.transactions[transaction.txid] = transaction
        if resources and isinstance(resources[0], LastResource):
            self._row(block, resources[0], transaction)
        elif resources:
            self._xa_rows(block, resources, transaction)
        for topic, partition, value in self._messages(block):
            history.owners[value] = transaction
            result = producer.send(topic, value, b"%d" % transaction.key, partition=partition)
            transaction.parts.append(((topic, result.partition), (value,)))
        if rng.random() < 0.1:
            raise AbandonedError

    def _messages(self, _block: Block) -> Iterator[tuple[str, int | None, bytes]]:
        """What a block sends."""
        for _ in range(self.world.rng.randint(1, 4)):
            yield (*self._place(), self._value())

    def _row(self, block: Block, resource: LastResource, transaction: Transaction) -> None:
        connection = block.connection(resource)
        transaction.key = KEYS_FROM + self.world.rng.randrange(3)
        transaction.row = "row-" + transaction.txid
        ((version,),) = connection.execute(
            "SELECT coalesce(max(version), 0) + 1 FROM orders WHERE key = ?", (transaction.key,)
        ).fetchall()
        transaction.version = version
        connection.execute(
            "INSERT INTO orders (row, key, version) VALUES (?, ?, ?)", (transaction.row, transaction.key, version)
        )

    def _xa_rows(self, block: Block, resources: Resources, transaction: Transaction) -> None:
        assert self.shared.bank is not None
        transaction.is_xa, transaction.row = True, XA_ROW + transaction.txid
        transaction.key = XA_KEYS_FROM + self.world.rng.randrange(3)
        connections = {number: block.connection(resource) for number, resource in enumerate(resources)}
        transaction.version = self.shared.bank.write(transaction.row, transaction.key, connections)

    def _judge(self, transaction: Transaction, block: Block, error: Exception | None) -> None:
        """What the caller was told."""
        if isinstance(error, TransactionTimeoutError):
            self.world.meet("deadline passed before commit")
        if isinstance(error, HeuristicError):
            raise Violation(f"P3: {transaction.txid}: {error!r}")
        if error is None:
            self._committed(transaction, block)
        elif isinstance(error, OutcomeUnknownError):
            if block.outcome is not Outcome.UNKNOWN:
                raise Violation(f"P6: {error!r} with outcome {block.outcome}")
            self._find_out(transaction)
        elif block.outcome is Outcome.ROLLED_BACK:
            transaction.told = "rolled-back"
            self.world.meet("real block rolled back")
        else:
            raise Violation(f"P6: {error!r} with outcome {block.outcome}")
        if isinstance(error, RolledBackError) and block.outcome is not Outcome.ROLLED_BACK:
            raise Violation(f"P6: {error!r} with outcome {block.outcome}")

    def _committed(self, transaction: Transaction, block: Block) -> None:
        if block.outcome is not Outcome.COMMITTED:
            raise Violation(f"P6: a normal return with outcome {block.outcome}")
        transaction.told = "committed"
        kind = "xa" if transaction.is_xa else "last resource" if transaction.row else "local"
        self.world.meet(f"real {kind} committed")
        if block.pending:
            self.world.meet("committed, broker to be told")
        for result, (place, values) in zip(block.results, transaction.parts, strict=True):
            if result.offset is not None:
                transaction.placed[values[0]] = place, result.offset

    def _find_out(self, transaction: Transaction) -> None:
        self.world.meet("real outcome unknown")
        for _ in range(20):
            with suppress(TxmqError):
                outcome = self._client.outcome(transaction.txid)
                if outcome is not Outcome.UNKNOWN:
                    transaction.told = outcome.value
                    self.world.meet("real unknown resolved")
                    return
            pause(0.1)

    def _look_back(self) -> None:
        """An outcome is the same for ever, or refused as too old."""
        if not self._mine:
            return
        transaction = self.world.rng.choice(self._mine)
        try:
            outcome = self._client.outcome(transaction.txid)
        except FencedError:
            self.world.meet("outcome below the floor")
        except (BrokerError, TxmqError):
            return
        else:
            opposite = {"committed": Outcome.ROLLED_BACK, "rolled-back": Outcome.COMMITTED}.get(transaction.told)
            if outcome is opposite and not self.shared.may_forget:
                raise Violation(f"P6: told {transaction.told}, now {outcome}: {transaction.txid}")
            # The broker has told its places: below the session's floor it says so (410), it never says "never seen".
            if outcome is Outcome.UNKNOWN and transaction.placed and not self.shared.may_forget:
                raise Violation(f"P6: committed and told, now unknown: {transaction.txid}")


def watched_prove(shared: Shared) -> Callable[..., Any]:
    """``in_doubt_outcome.prove`` as resolvers call it, noting what each of them proved.

    A rollback that was proved stands. A commit may be followed by a "rollback": the committed marker leaves once the
    broker has committed, and a later resolver gets a rolled-back one in. The broker then contradicts it.
    """
    proved: dict[str, tuple[Step, str]] = {}

    def prove(
        database: ResolvingConnection, txid: str, deadline_ms: int, *, has_token: bool = True, waits: bool = True
    ) -> tuple[Step, Exception | None]:
        host = required_task().host
        step, error = _prove(database, txid, deadline_ms, has_token=has_token, waits=waits)
        host.world.trace(host.name, "proves", txid[34:], step.name, type(error).__name__)
        if step not in (Step.UNDECIDED, Step.HELD):
            before, who = proved.setdefault(txid, (step, host.name))
            if before is Step.REPORT_ROLLBACK and step is not before:
                raise Violation(f"P3: {txid}: {who} proved {before.name}, {host.name} {step.name}")
            if before is not step:  # the marker had gone, as it may once the broker has committed: its word counts
                host.world.trace(txid, "proved", before.name, "and", step.name)
            if who != host.name:
                host.world.meet("two resolvers met")
            if host.world.clock.now_ms() >= deadline_ms > 0:
                host.world.meet("deadline passed while prepared")
            met = "real resolver committed" if step is Step.REPORT_COMMIT else "real resolver rolled back"
            host.world.meet(met)
        return step, error

    return prove


_prove = in_doubt_outcome.prove
