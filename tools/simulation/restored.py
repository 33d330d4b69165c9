"""One seed of a broker that is restored from an older copy of its data directory, under services with a database.

The copy is an image of the disk at one moment (C). Later (R) the broker dies, and what starts is the copy. Services go
on meanwhile, through outages. If the broker's newest fencing token is an older one then, an operator adopts the
database, some time after the restore. What must hold at the end:

    lost      of the transactions that the broker had placed at R, or prepared, those whose messages the copy does not
              have. Only these may have a row, and no messages
    P1, P6    every other one that is committed is there, at the place that was told; what was rolled back is not
    P2, P6    whatever is there is whole, once, and its row is committed
    P7        in order per key, whatever is there
    P5        nothing is in doubt

A session or an offset that the copy does not have is given again by the restored broker: readers and plain producers
are not in this world.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from tools.images.node import Node
from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Image
from txmq.broker.state.transaction import TransactionState
from txmq.client.client import Client
from txmq.client.producer.producer import Producer
from txmq.client.transaction.block import Transaction as Block
from txmq.errors import HeuristicError
from txmq.xa.fencing import Fence, StrangeServerError
from txmq.xa.last_resource.in_doubt_outcome import ResolvingConnection
from txmq.xa.last_resource.resource import LastResource
from txmq.xa.resolver_ports import cluster_of
from txmq.xid import TxId

from .application import Application, Program, ResolverProgram
from .broker import Broker
from .client import Steps
from .history import Shared, Transaction
from .promises import check_order, check_settled, check_transaction, visible_messages
from .run import HEAL_S, Operator, Result, TracedLog, await_ends, heal, inhabited, played
from .stream import Network
from .threads import Threads, pause
from .world import SITUATIONS, Simulation, Violation

TOPICS = {"t0": 2, "t1": 1}
SECONDS = 2.5
COPIED_S, RESTORED_S = (0.1, 1.2), (1.3, 2.2)
ADOPTED_S_MAX = 1.0  # after the restore
_IN_DOUBT = (TransactionState.PREPARED, TransactionState.PLACING)
SITUATIONS_OF_RESTORES = frozenset(
    {
        "a transaction was lost with the restore", "the broker was told what it has lost",
        "a restored broker agreed with the database", "a database was adopted",
        "the broker decided otherwise than a database",
        "broker killed", "power lost", "link lost", "real client died",
    }
)  # fmt: skip


@dataclass(slots=True)
class Restore:
    """The copy and the restore, and what was seen of them.

    Attributes:
        copy: of the disk.
        lost: the disk that the copy took the place of.
        contradicted: transactions of which the broker said that it has decided otherwise.
    """

    copy: Image | None = None
    lost: SimDisk | None = None
    contradicted: set[str] = field(default_factory=set)


class _Log(TracedLog):
    """Tells the restore what the log says of it."""

    def __init__(self, world: Simulation, restore: Restore) -> None:
        super().__init__(world)
        self._restore = restore

    def contradicted(self, txid: str, _text: str) -> None:
        self.world.meet("the broker decided otherwise than a database")
        self._restore.contradicted.add(txid)


class _Founder(Operator):
    """Makes the topics."""

    def main(self) -> Steps:
        """See the class."""
        for name, partitions in TOPICS.items():
            yield from self._topic("create", name, partitions)
        self.shared.history.topics = dict(TOPICS)


class Service(Application):
    """Runs blocks with the database, one after the other."""

    def __init__(self, shared: Shared, threads: Threads, name: str, restore: Restore) -> None:
        self._restore = restore
        super().__init__(shared, threads, name)

    def main(self) -> None:
        """One life."""
        producer: Producer = self._open()
        while not self.shared.stopping:
            self._block(producer, [self._resource])
            pause(self.world.rng.uniform(0.0, 0.02))
        self._close(producer)

    def _judge(self, transaction: Transaction, block: Block, error: Exception | None) -> None:
        try:
            if isinstance(error, HeuristicError):
                raise error
            super()._judge(transaction, block, error)
        except HeuristicError:  # perhaps of its results
            self._restore.contradicted.add(transaction.txid)


class AdoptingProgram(Program):
    """An operator after the restore: adopts the database, where need be."""

    ends_with_the_world = False

    def __init__(self, shared: Shared, threads: Threads, name: str, restore: Restore) -> None:
        self._restore = restore
        super().__init__(shared, threads, name)

    def main(self) -> None:
        """For ever."""
        resource, client = self.resource(), self.client()
        while True:
            pause(self.world.rng.uniform(0.05, ADOPTED_S_MAX))
            # Database or broker are away.
            with suppress(Exception), closing(resource.open_for_resolver(cluster_of(client))) as database:
                while True:
                    self._adopt(client, resource, database)
                    pause(self.world.rng.uniform(0.05, ADOPTED_S_MAX))

    def _adopt(self, client: Client, resource: LastResource, database: ResolvingConnection) -> None:
        if self._restore.lost is None:
            return
        (home,) = client.routes.all_links()
        try:
            Fence(database, f"{home.session.home:016x}", home.control, resource.new_token).check()
        except StrangeServerError:
            pause(self.world.rng.uniform(0.0, ADOPTED_S_MAX))
            resource.install(client, adopt=True)
            self.world.meet("a database was adopted")
        else:
            self.world.meet("a restored broker agreed with the database")


def simulate_restored(seed: int) -> Result:
    """Run one seed."""
    situations = SITUATIONS_OF_RESTORES | SITUATIONS
    return played(seed, Simulation(seed, sync="always", situations=situations), _simulate)


def _simulate(world: Simulation) -> None:
    threads, broker, restore = Threads(world), Broker(world), Restore()
    network, log = Network(broker), _Log(world, restore)
    with inhabited(threads, [broker], network, log=log) as (shared, _):
        _live(shared, threads, restore)
        _check(shared, restore)


def _live(shared: Shared, threads: Threads, restore: Restore) -> None:
    world, broker, rng = shared.world, shared.broker, shared.world.rng
    broker.start()
    _Founder(shared, "op")
    world.run(30.0, until=lambda: bool(shared.history.topics))
    services = [Service(shared, threads, f"a{n}_", restore) for n in range(rng.randint(2, 3))]
    resolvers = [ResolverProgram(shared, threads, f"s{n}_") for n in range(rng.randint(1, 2))]
    AdoptingProgram(shared, threads, "n0_", restore)
    _plan(shared, restore, [*services, *resolvers])
    world.run(SECONDS)
    heal(shared)
    await_ends(world, services)
    world.run(HEAL_S)


def _plan(shared: Shared, restore: Restore, programs: list[Program]) -> None:
    world, broker, rng = shared.world, shared.broker, shared.world.rng

    def later(call: Callable[[], None], least: int, most: int) -> None:
        for _ in range(rng.randint(least, most)):
            world.after(rng.uniform(0.0, SECONDS), call)

    later(lambda: broker.die() if broker.node is not None else None, 1, 4)
    later(lambda: broker.pause(rng.uniform(0.1, 0.4)), 0, 2)
    later(lambda: rng.choice(broker.links).cut() if broker.links else None, 0, 3)
    later(rng.choice(programs).die, 0, 2)
    world.after(rng.uniform(*COPIED_S), lambda: _copy(broker, restore))
    world.after(rng.uniform(*RESTORED_S), lambda: _restore(shared, restore))


def _copy(broker: Broker, restore: Restore) -> None:
    """An atomic snapshot of the file system."""
    model = broker.disk.model
    restore.copy = model.build(model.pending())
    broker.world.trace("copied")


def _restore(shared: Shared, restore: Restore) -> None:
    broker = shared.broker
    if broker.node is not None:
        broker.die()
    assert restore.copy is not None
    restore.lost = broker.disk
    broker.disk = SimDisk(shared.world.rng, image=restore.copy)
    shared.world.trace("restored")


def _check(shared: Shared, restore: Restore) -> None:
    [node], history = shared.nodes(), shared.history
    visible, lost = visible_messages([node], history), _lost(shared, restore)
    check_settled(node, lost)
    if node.state.decisions.heuristics:
        shared.world.meet("the broker was told what it has lost")
    for one in history.transactions.values():
        there = {value in visible for _, values in one.parts for value in values}
        if one.txid not in lost:
            check_transaction(one, visible, shared, weak=False)
        elif len(there) > 1:
            raise Violation(f"P2: a part of {one.txid}, which may be lost")
        elif there == {True} and not shared.has_row(one.row):
            raise Violation(f"P3: messages without their row: {one.txid}, which may be lost")
        elif there == {False} and shared.has_row(one.row):
            shared.world.meet("a transaction was lost with the restore")
    check_order(history, visible)
    if strange := restore.contradicted - lost:
        raise Violation(f"P3: the broker decided otherwise, and had lost nothing of them: {sorted(strange)}")


def _lost(shared: Shared, restore: Restore) -> set[str]:
    """The transactions that the broker had placed or prepared at R, and the copy has not placed."""
    assert restore.lost is not None
    settings, clock = shared.broker.settings, shared.world.clock
    before = Node(restore.lost, settings, clock=clock)
    copied = Node(SimDisk(image=restore.copy), settings, clock=clock)
    was_there, is_there = (visible_messages([node], shared.history) for node in (before, copied))
    prepared = {name for name, one in before.state.transactions.items() if one.state in _IN_DOUBT}
    return {
        one.txid
        for one in shared.history.transactions.values()
        for values in [[value for _, values in one.parts for value in values]]
        if any(value in was_there for value in values) or TxId.parse(one.txid)[2:] in prepared
        if not any(value in is_there for value in values)
    }
