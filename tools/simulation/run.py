"""One seed: a world is made, lives under faults, heals, and is checked.

What must hold afterwards: P1 (told is there), P2 (all or none, contiguous, at the told places, no holes), P3 (row if
and only if message), P4 (a message seen by a reader has its row by then), P5 (nothing stays in doubt five seconds after
healing), P6 (each at most once, told outcomes are true), P10 (every CRC), P7 (order of a producer and of a key's rows),
and that a restart finds the state that was.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tools.images.check import comparable
from tools.images.node import Node
from tools.simulated.clock import SimRandom
from txmq.client.consumer.offsets.offset_store import order_anew
from txmq.client.spooling.direct_or_spooled import VISIBILITY_WAIT_S
from txmq.client.transaction import block
from txmq.log import records
from txmq.runtime import crashpoints, logging, loop_stream, net, workers
from txmq.runtime.clocks import OSClock, OSRandom
from txmq.xa.last_resource import in_doubt_outcome

from . import users
from .acknowledged import TOPIC as ACKNOWLEDGED
from .acknowledged import AcknowledgedReader
from .application import Application, Program, ResolverProgram, watched_prove
from .bank import Bank
from .broker import Broker
from .client import RETAINED, Client, Process, Steps
from .consumers import ConsumerProgram, Dealt, ExactProgram
from .damage import Rest
from .database import Database
from .drivers import SINK, Driver, Written
from .endless import Load
from .history import History, Shared
from .loop_programs import LoopApplication
from .loops import SimWorker, connect_by_loop
from .members import GROUPS, OUTPUT, Consumption, Member
from .ordered import OrderedProgram
from .promises import Told, check_promises, visible_messages
from .replica import SITUATIONS_OF_REPLICAS, FollowedBroker
from .resolver import Resolver
from .rows import Rows
from .stream import Network
from .threads import Threads, installed, required_task
from .tls_streams import SimTls
from .world import SITUATIONS, Simulation, Violation

SECONDS = 1.3
ALONE_S = 0.7  # of endless load: others' requests force what ``sync`` lets wait
HEAL_S = 5.0
END_S = 25.0 + 2 * VISIBILITY_WAIT_S  # an ordered producer killed after its look into the log may need another one
_STREAM_AT_BYTES = block._STREAM_AT_BYTES
_MEMORY = "/dev/shm"


class Result(NamedTuple):
    """What became of a seed."""

    seed: int
    error: str | None
    digest: str
    met: frozenset[str]
    tail: list[str]


class Operator(Process):
    """Makes, alters and deletes topics, and reads."""

    def main(self) -> Steps:
        """For ever."""
        history, rng = self.shared.history, self.world.rng
        if len(self.shared.brokers) == 1 and self.world.has_users:
            yield from users.end_anonymity(self)
        wanted = {f"t{n}": rng.randint(1, 4) for n in range(rng.randint(1, 4))} | {"temporary": 1}
        for name, partitions in wanted.items():
            yield from self._topic("create", name, partitions)
        yield from self._topic("create", RETAINED, 1)
        yield from self._topic("create", OUTPUT, 1)
        yield from self._topic("create", SINK, 2)
        yield from self._topic("create", ACKNOWLEDGED, 1)
        history.topics = dict(wanted)
        while True:
            yield rng.uniform(0.01, 0.1)
            if rng.random() < 0.05 and "temporary" in history.topics:
                history.deleted.add("temporary")
                del history.topics["temporary"]
                yield from self._topic("delete", "temporary", 0)
                self.world.meet("topic deleted")
            elif rng.random() < 0.05:
                name = rng.choice(sorted(name for name in history.topics if name != "temporary"))
                yield from self._topic("alter", name, history.topics[name] + 1)
                history.topics[name] += 1
                self.world.meet("topic altered")
            elif self.link is not None or self.open_link():
                yield from self._read()

    def _topic(self, action: str, name: str, partitions: int) -> Steps:
        while True:
            if self.link is not None or self.open_link():
                extensions = {"partitions": partitions, "segment_size_bytes": 4096} if partitions else {}
                if name == RETAINED:
                    extensions |= {"retention_size_bytes": 4096, "retention_ms": 500}
                reply = yield from self.ask("topic", action, name, extensions=extensions)
                if reply is not None and reply[0] in (200, 404, 409):
                    return
            yield 0.02

    def _read(self) -> Steps:
        """A reader asks over the wire; what it sees must be true then, and stay so."""
        history = self.shared.history
        topic = self.world.rng.choice([name for name in sorted(history.topics) if name != "temporary"])
        partition = self.world.rng.randrange(history.topics[topic])
        topic_id = int(topic[1:])
        seen = [offset for t, p, offset in history.seen if (t, p) == (topic_id, partition)]
        offset = max(seen, default=-1) + 1
        reply = yield from self.ask("get", topic, partition, offset, 4096, extensions={"wait": 100})
        if reply is None or reply[0] != 200:
            if reply is not None and reply[0] >= 500:
                raise Violation(f"P10: get {topic}-{partition} at {offset}: {reply}")
            return
        for message in records.decode(reply[1], topic, partition):
            self.world.meet("read by a reader")
            place = topic_id, partition, message.offset
            value = message.value or b""
            if history.seen.setdefault(place, value) != value:
                raise Violation(f"P2: {place} was {history.seen[place][:12]!r}, is {value[:12]!r}")
            self.shared.check_row(value)


def simulate(seed: int, *, sync: str = "", endless: bool = False, users: bool = False) -> Result:
    """Run one seed; the others as of ``Simulation``."""
    return played(seed, Simulation(seed, sync=sync, endless=endless, users=users), _simulate)


def played(seed: int, world: Simulation, play: Callable[[Simulation], None]) -> Result:
    """What becomes of a world."""
    order_anew()
    try:
        play(world)
        error = None
    except Exception as failure:  # noqa: BLE001  whatever it is, the seed that shows it is what counts
        error = f"{type(failure).__name__}: {failure}"
        where = failure.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        if where is not None:
            error += f" [{where.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{where.tb_lineno}]"
    finally:
        crashpoints.set_hook(None)
        logging.configure("warning")
    return Result(seed, error, world.digest, frozenset(world.met), list(world.tail))


def simulate_followed(seed: int) -> Result:
    """Run one seed beside a replica."""
    return played(seed, Simulation(seed, situations=SITUATIONS | SITUATIONS_OF_REPLICAS), _simulate_followed)


def _simulate_followed(world: Simulation) -> None:
    threads, broker = Threads(world), FollowedBroker(world)
    with inhabited(threads, [broker], Network(broker)) as (shared, told):
        _live(shared, threads, told)
        broker.replica.check()
        _check(shared, told)


def _simulate(world: Simulation) -> None:
    threads, broker = Threads(world), Broker(world)
    with inhabited(threads, [broker], Network(broker)) as (shared, told):
        _live(shared, threads, told)
        _check(shared, told)


@contextmanager
def inhabited(
    threads: Threads, brokers: Sequence[Broker], network: Network, *, log: TracedLog | None = None
) -> Iterator[tuple[Shared, Told]]:
    """Databases, files and doors of a world, in which real clients can live.

    Args:
        log: where their log lines go; None: into the trace, and what tells of a defect fails the world.
    """
    world = threads.world
    with TemporaryDirectory(prefix="txmq", dir=_MEMORY if os.path.isdir(_MEMORY) else None) as folder:  # noqa: PTH112
        rows = Rows(world, f"{folder}/orders.db")
        shared = Shared(world, brokers[0], Database(world), History(), rows, Bank(world), brokers=brokers)
        shared.tls = SimTls(network) if world.has_tls else None
        doors = {net.connect: network.connect, OSClock: lambda: required_task().host,
                 OSRandom: lambda: SimRandom(world.rng), in_doubt_outcome.prove: watched_prove(shared),
                 loop_stream.connect: connect_by_loop(network), workers.Worker: SimWorker}  # fmt: skip
        block._STREAM_AT_BYTES = world.rng.choice((500, 8 << 20))
        logging.configure("info", log or TracedLog(world))  # type: ignore[arg-type]
        try:
            with installed(threads, doors), users.quick_passwords():
                yield shared, Told(Consumption(), Written(), Dealt(folder, world.chance(0.3)))
        finally:
            block._STREAM_AT_BYTES = _STREAM_AT_BYTES
            rows.close()


class TracedLog:
    """Log lines become lines of the trace, without their time."""

    def __init__(self, world: Simulation) -> None:
        self.world = world

    def write(self, text: str) -> None:
        """One line."""
        fields = json.loads(text)
        txid, error = fields.get("txid", ""), fields.get("error", "")
        self.world.trace("log", fields["event"], txid[34:], error[:80])
        if fields["event"].startswith("heuristic"):
            self.contradicted(txid, text)

    def flush(self) -> None:
        """Nothing is kept."""

    def contradicted(self, _txid: str, text: str) -> None:
        """The broker has decided otherwise than the database."""
        raise Violation(f"P3: {text}")


def _live(shared: Shared, threads: Threads, told: Told) -> None:
    world, broker = shared.world, shared.broker
    broker.start()
    operator = Operator(shared, "op")
    world.run(30.0, until=lambda: bool(shared.history.topics))
    if world.chance(0.2) or world.is_endless:
        topic = world.rng.choice(sorted(name for name in shared.history.topics if name != "temporary"))
        broker.feed = Load(shared, topic).feed
        world.run(ALONE_S if world.is_endless else world.rng.choice((0.0, ALONE_S)))
    clients = [Client(shared, f"c{n}") for n in range(world.rng.randint(0, 3))]
    resolvers = [Resolver(shared, f"r{n}") for n in range(world.rng.randint(1, 2))]
    members = [
        Member(shared, told.consumption, f"m{n}{group}", group)
        for group in GROUPS for n in range(world.rng.randint(0, 3))
    ]  # fmt: skip
    programs = _programs(shared, threads, told)
    AcknowledgedReader(shared, "n0")
    users.population(shared)
    _plan_faults(world, broker, clients, programs)
    drivers = [Driver(shared, told.written, "d0")] if world.rng.random() < 0.5 else []
    _plan_drivers(shared, told.written, drivers)
    if members and world.rng.random() < 0.5:
        world.after(world.rng.uniform(0, SECONDS), members[0].die)
    world.run(SECONDS)
    heal(shared)
    operator.is_over = True
    finite: list[Client | Program] = [*clients, *members, *drivers]
    finite += [program for program in programs if not isinstance(program, ResolverProgram)]
    await_ends(world, finite)
    if drivers:
        drivers.append(Driver(shared, told.written, "d9", batches_max=0))  # what was left is rolled back
        world.run(60.0, until=lambda: drivers[-1].is_over)
    world.run(HEAL_S)
    assert resolvers
    assert broker.node
    if broker.node.state.fences_of:
        world.meet("a resolver fenced a branch of another user's")


def await_ends(world: Simulation, finite: Sequence[Program | Process]) -> None:
    """All of them end soon. What is over stays over, and is not asked again with each event."""
    waited = list(finite)

    def are_over() -> bool:
        while waited and waited[-1].is_over:
            waited.pop()
        return not waited

    world.run(END_S, until=are_over)
    for one in finite:
        if not one.is_over:
            raise Violation(f"{one.name} has not come to its end {END_S:.0f} s after healing")


def _programs(shared: Shared, threads: Threads, told: Told) -> list[Program]:
    """What runs txmq's real client."""
    dealt = told.dealt
    kinds: list[tuple[int, int, Callable[[int], Program]]] = [
        (1, 2, lambda n: Application(shared, threads, f"a{n}_")),
        (0, 1, lambda n: LoopApplication(shared, threads, f"l{n}_")),
        (1, 2, lambda n: ResolverProgram(shared, threads, f"s{n}_")),
        (0, 2, lambda n: ConsumerProgram(shared, threads, f"k{n}_", dealt)),
        (0, 1, lambda n: ExactProgram(shared, threads, f"e{n}_")),
        (0, 2, lambda n: OrderedProgram(shared, threads, f"o{n}_", dealt.folder)),
    ]
    return [make(n) for least, most, make in kinds for n in range(shared.world.rng.randint(least, most))]


def _plan_drivers(shared: Shared, written: Written, drivers: list[Driver]) -> None:
    """A driver is killed, or thought dead; another one goes on."""
    world = shared.world
    for number in range(1, world.rng.randint(1, 4) if drivers else 0):

        def replace(name: str = f"d{number}", dies: bool = world.rng.random() < 0.5) -> None:
            if dies and not drivers[-1].is_over:
                drivers[-1].die()
            drivers.append(Driver(shared, written, name))

        world.after(world.rng.uniform(0, SECONDS), replace)


def _plan_faults(world: Simulation, broker: Broker, clients: list[Client], programs: list[Program]) -> None:
    rng = world.rng
    for _ in range(rng.randint(0, 3)):
        world.after(rng.uniform(0, SECONDS), rng.choice(programs).die)
    for _ in range(rng.randint(0, 3)):
        world.after(rng.uniform(0, SECONDS), lambda: rng.choice(broker.links).stall() if broker.links else None)
    for _ in range(rng.randint(0, 3)):
        world.after(rng.uniform(0, SECONDS), lambda: broker.die() if broker.node is not None else None)
    for _ in range(rng.randint(0, 2)):
        world.after(rng.uniform(0, SECONDS), lambda: broker.pause(rng.uniform(0.05, 0.45)))
    for _ in range(rng.randint(0, 4)):
        world.after(rng.uniform(0, SECONDS), lambda: rng.choice(broker.links).cut() if broker.links else None)
    if rng.random() < 0.2:
        world.after(rng.uniform(0, SECONDS), lambda: broker.disk.set_free_bytes(rng.randint(0, 4000)))
    if rng.random() < 0.2:
        world.after(rng.uniform(0, SECONDS), lambda: broker.disk.fail_at(rng.randint(1, 20), errno.EIO))
    if len(clients) > 1 and rng.random() < 0.5:
        world.after(rng.uniform(0, SECONDS), clients[0].die)
    for _ in range(rng.choice((0, 0, 1, 2))):
        world.after(rng.uniform(0, SECONDS), partial(_set_clock, world, rng.choice((-3_600_000, 3_600_000))))


def _set_clock(world: Simulation, by_ms: int) -> None:
    """Somebody sets the clock of the machine they are all on."""
    world.clock.jump(by_ms)
    world.meet("a clock was set")
    world.trace("clock set", by_ms)


def heal(shared: Shared) -> None:
    """From now on nothing fails, and programs end."""
    shared.world.trace("heal")
    shared.stopping = True
    for broker in shared.brokers:
        broker.healing = True
        broker.disk.clear_faults()
        broker.disk.capacity_bytes = 1 << 40
    assert shared.rows is not None
    shared.rows.is_healed = True
    assert shared.bank is not None
    shared.bank.heal()


# --- the checks ------------------------------------------------------------------------------------------------------


def _check(shared: Shared, told: Told) -> None:
    visible = check_promises(shared, told)
    [node] = shared.nodes()
    before = node.state
    before.led(0, 0, 0, before.limits, is_member=False)
    again = node
    for lost in (node.disk.kill(), node.disk.crash()):
        again = Node(lost, shared.broker.settings, clock=shared.world.clock)
        if comparable(again.state) != comparable(before):
            raise Violation("P1: a restart finds another state")
        if visible_messages([again], shared.history) != visible:
            raise Violation("P1: a restart finds other messages")
    Rest(shared.world, again).check()
