"""A replica beside a lone broker: it dies, loses power, lacks space, and has what its leader has in the end.

It reads what the broker's journal has forced, in pieces and at times that a seed of its own draws.
"""

from __future__ import annotations

import errno
import random
from typing import cast

from tools.images.node import Node
from tools.images.replica import Replica
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from txmq.broker.commit.steps import Checkpoint, Part, Step
from txmq.errors import StorageError
from txmq.model import Lsn
from txmq.runtime import crashpoints
from txmq.runtime.clocks import SteadyClock
from txmq.runtime.crashpoints import SimulatedCrash

from .broker import Broker
from .world import Simulation, Violation

SITUATIONS_OF_REPLICAS = frozenset(
    {
        "replica killed", "replica lost power", "replica met EIO", "replica lacked space", "replica cut its journal",
        "replica followed another life", "replica took a checkpoint", "replica died at a crash point",
    }
)  # fmt: skip
TURN_S = 0.01
CRASH_CHANCE = 0.001  # at each point
QUEUED_BYTES_MAX = 20_000


class FollowedBroker(Broker):
    """A broker whose journal is kept for its replica."""

    def __init__(self, world: Simulation) -> None:
        super().__init__(world)
        self.replica = SimReplica(world, self)

    def opened(self, node: Node) -> None:
        """It serves from now on."""
        node.store.kept_from = self.replica.forced_lsn
        super().opened(node)


class SimReplica:
    """See the module's docstring. It draws from a source of its own: the world beside it is what it is without."""

    def __init__(self, world: Simulation, leader: FollowedBroker) -> None:
        self.world, self._leader = world, leader
        self._rng = random.Random(f"replica {world.seed}")
        self._disk = SimDisk(self._rng)
        self._replica: Replica | None = None
        self._connected_to: Node | None = None
        self._running: list[tuple[Step, list[Part]]] = []
        self._is_healing = False
        self.forced_lsn = Lsn(0)
        world.after(0.0, self._turn)

    def _turn(self) -> None:
        if not self._is_healing:
            self.world.after(self._rng.uniform(0, TURN_S), self._turn)
            self._fault()
            self._guard()

    def _fault(self) -> None:
        draw = self._rng.random()
        if draw < 0.01:
            self._die(has_power=draw < 0.005)
        elif draw < 0.013:
            self._disk.fail_at(self._rng.randint(1, 20), errno.EIO)
        elif draw < 0.018:
            self._disk.set_free_bytes(self._rng.choice((0, 4000, 1 << 40)))

    def _guard(self) -> None:
        crashpoints.set_hook(self._reached)
        try:
            self._act()
        except SimulatedCrash:
            self.world.meet("replica died at a crash point")
            self._die(has_power=self._rng.random() < 0.5)
        except (OSError, StorageError) as error:
            of_disk = error if isinstance(error, OSError) else error.__cause__
            if self._is_healing or not isinstance(of_disk, OSError):
                raise
            self.world.meet("replica met EIO" if of_disk.errno == errno.EIO else "replica lacked space")
            self._die(has_power=self._rng.random() < 0.5)
        finally:
            crashpoints.set_hook(self._leader.reached)

    def _reached(self, name: str) -> None:
        if not self._is_healing and self._rng.random() < CRASH_CHANCE:
            self.world.trace("replica at a crash point", name)
            raise SimulatedCrash(name)

    def _act(self) -> None:
        node = self._leader.node
        if self._replica is None:
            if node is None:
                return
            self._open(node)
        replica = self._replica
        assert replica is not None
        if node is not None and node is not self._connected_to:
            if self._connected_to is not None:
                self.world.meet("replica followed another life")
            _connect(replica, node)
            self._connected_to = node
        if node is not None and replica.core.context.queued_bytes() < QUEUED_BYTES_MAX and self._rng.random() < 0.7:
            replica.receive(node, self._rng.choice((1, 50, 3000, 1 << 20)))
        for _ in range(self._rng.randint(0, 6)):
            self._step(replica)
        self.forced_lsn = replica.store.journal.durable_lsn
        if node is not None:
            node.store.kept_from = self.forced_lsn

    def _open(self, node: Node) -> None:
        clock = cast(SimClock, SteadyClock(self.world.clock))
        self._replica, self._connected_to = Replica(self._disk, node, clock=clock), None
        if self._replica.store.journal.found.cut_lsn is not None:
            self.world.meet("replica cut its journal")

    def _step(self, replica: Replica) -> None:
        """Begin a step, or run a part of one."""
        now = replica.clock.monotonic()
        if (begun := replica.pipeline.next_step(now)) is not None:
            self._running.append((begun, list(begun.parts())))
        if not self._running:
            return
        step, parts = entry = self._rng.choice(self._running)
        try:
            parts.pop(0)()
        except (OSError, StorageError) as error:
            self._running.remove(entry)
            if replica.pipeline.failed(step, error, now):
                raise
            self.world.meet("replica lacked space")
            return
        if not parts:
            self._running.remove(entry)
            if isinstance(step, Checkpoint):
                self.world.meet("replica took a checkpoint")
            replica.pipeline.done(step, now)

    def _die(self, *, has_power: bool) -> None:
        self.world.meet("replica killed" if has_power else "replica lost power")
        self.world.trace("replica dies", has_power, self.forced_lsn)
        self._disk = self._disk.kill() if has_power else self._disk.crash()
        self._replica, self._running = None, []

    def check(self) -> None:
        """Nothing fails any more: it comes to what its leader has."""
        self._is_healing = True
        self._disk.clear_faults()
        self._disk.capacity_bytes = 1 << 40
        node = self._leader.node
        assert node is not None
        crashpoints.set_hook(None)
        node.force()
        if not node.pipeline.is_idle:
            raise Violation("the leader has not come to rest")
        if self._replica is not None:
            self._die(has_power=True)
        replica = Replica(self._disk, node)
        replica.follow(node)
        replica.compare(node)


def _connect(replica: Replica, leader: Node) -> None:
    """Whatever ``sync`` is: what a replica gets was forced before."""
    if not replica.is_copy_of(leader):
        raise Violation("P1: the leader has lost what its replica has")
