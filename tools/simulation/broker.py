"""The broker's shell, simulated: the steps of the commit pipeline, each at a time that the seed draws, and its deaths.

Requests arrive between the parts of a step; a checkpoint runs alongside the other steps. The process dies at a crash
point, at a disk error, or from outside; what the disk keeps then is drawn.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from math import inf
from typing import cast

from tools.images.node import Client as NodeClient
from tools.images.node import Node, Served, small_settings
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from txmq.broker.commit.retention import retire
from txmq.broker.commit.steps import Checkpoint, Part, Step
from txmq.config import BrokerSettings
from txmq.errors import JournalFailedError, JournalFullError, StorageError
from txmq.protocol import requests
from txmq.protocol.answers import encode_all
from txmq.runtime import crashpoints
from txmq.runtime.clocks import SteadyClock
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.runtime.tls import TlsSession

from .threads import current_task
from .tls import End, binding_of, shown_by
from .watch import Watch
from .world import Simulation

LOGIN = b"login"  # the opaque of a scripted client's login


class Link(NodeClient):
    """One connection: bytes in both directions, in random pieces, late, in order; lost at any time.

    With TLS the broker's side of it is here; the client's is too, if ``speak_tls`` says whose certificate it shows.
    """

    def __init__(self, broker: Broker, receive: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        assert broker.node is not None
        super().__init__(broker.node)
        self.broker, self.world = broker, broker.world
        self._receive, self._lost = receive, lost
        self._free = [0.0, 0.0]  # when each direction has delivered all before
        self.is_lost = self.has_stalled = False
        self.server_end = End.of_broker(self._to_client, self.send_bytes, self._shaken) if self.world.has_tls else None
        self.client_end: End | None = None

    def speak_tls(self, name: str, shaken: Callable[[TlsSession], None] = lambda _session: None) -> None:
        """Have the client's side spoken here, with the certificate of a name; with none if it is empty."""
        self.client_end = End.of_client(name, self._to_broker, self._receive, shaken)

    def _shaken(self, session: TlsSession) -> None:
        self.client.certificates, self.client.binding = shown_by(session), binding_of(session)
        self.world.meet("a handshake was completed")

    def log_in(self, user: str) -> None:
        """By certificate, before whatever follows."""
        if self.server_end is None:
            self.client.certificates = frozenset({f"CN={user}"})
        self.write(b"".join(requests.request("auth", "external", body=[b""], opaque=LOGIN)))

    def write(self, data: bytes) -> None:
        """From the client."""
        if self.client_end is None:
            self._to_broker(data)
        else:
            self.client_end.write(data)

    def _to_broker(self, data: bytes) -> None:
        self._pieces(0, data, self._arrive)

    def _arrive(self, data: bytes) -> None:
        take = self.send_bytes if self.server_end is None else self.server_end.arrived
        self.broker.reach(self.node, lambda: take(data))

    def take(self) -> None:
        """From the core; what is written may still be lost."""
        data, self.client.out = encode_all(self.client.out), []
        if self.server_end is None:
            self._to_client(data)
        else:
            self.server_end.write(data)

    def _to_client(self, data: bytes) -> None:
        self._pieces(1, data, self._receive if self.client_end is None else self.client_end.arrived)

    def _pieces(self, way: int, data: bytes, deliver: Callable[[bytes], None]) -> None:
        rng = self.world.rng
        while data:
            count = len(data) if rng.random() < 0.6 else rng.randint(1, len(data))
            piece, data = data[:count], data[count:]
            at = max(self._free[way], self.world.now + rng.uniform(0.0001, 0.004))
            self._free[way] = at
            self.world.after(at - self.world.now, partial(self.deliver, deliver, piece))

    def deliver(self, take: Callable[[bytes], None], piece: bytes) -> None:
        """A piece arrives at one of the ends."""
        if not self.is_lost:
            take(piece)

    def stall(self) -> None:
        """One direction delivers nothing for a while; then all of it, or the connection is lost."""
        rng, way = self.world.rng, self.world.rng.randrange(2)
        end = self.world.now + rng.uniform(0.05, 1.0)
        self.has_stalled = True
        self._free[way] = max(self._free[way], end)
        self.world.meet("one direction stalled")
        self.world.trace("link stalls", self.client.number, way)
        if rng.random() < 0.5:
            self.world.after(end - self.world.now, self.cut)

    def cut(self) -> None:
        """The connection is lost; each end hears of it in its own time."""
        if self.is_lost:
            return
        self.is_lost = True
        self.world.trace("link lost", self.client.number)
        self.world.after(self.world.rng.uniform(0.001, 0.02), self._lost)
        self.world.after(self.world.rng.uniform(0.001, 0.02), self.hang_up)

    def hang_up(self) -> None:
        """The broker hears of the lost connection."""
        self.broker.reach(self.node, self.disconnect)


def draw_settings(world: Simulation) -> BrokerSettings:
    """Tiny thresholds, so that everything happens in each run."""
    rng = world.rng
    settings = small_settings(
        in_flight_max=rng.randint(2, 8),
        outcomes_kept=rng.choice((2, 8, 1000)),
        sync=world.sync or rng.choice(("interval", "never", *["always"] * 6)),
        sync_interval_ms=50,
        mark_idle_ms=rng.choice((2, 50)),
    )
    object.__setattr__(settings, "journal_file_size_bytes", rng.choice((96, 128, 256)) << 10)
    object.__setattr__(settings, "checkpoint_interval_bytes", rng.choice((2, 4, 16)) << 10)
    return settings


class Broker:
    """The lives of one broker."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.settings = draw_settings(world)
        self.disk = SimDisk(world.rng)
        self.node: Node | None = None
        self.links: list[Link] = []
        self.healing = False
        self.losses = 0
        self._countdown = 0
        self.feed: Callable[[Node], None] = lambda _node: None  # asked before each step: endless load
        self._watch = Watch(world, self.settings)
        self._is_paused = False
        self._waiting: list[Callable[[], None]] = []  # until it goes on: first its timer, then the sockets

    @property
    def may_forget(self) -> bool:
        """Whether what was acknowledged may be lost: ``sync`` says so, and power or a sync failed."""
        return self.settings.sync != "always" and self.losses > 0

    # --- life and death ---

    def start(self) -> None:
        """A new life; recovery may die like everything else."""
        world, rng = self.world, self.world.rng
        self._is_paused, self._waiting = False, []
        self._watch = Watch(world, self.settings)
        self._countdown = rng.randint(1, 400) if not self.healing and rng.random() < 0.5 else 0
        if not self.healing and rng.random() < 0.3:
            self.disk.fail_at(rng.randint(1, 250), errno.EIO, forever=True)
        self.guard(self.open)
        if self.node is None:
            self.not_opened()

    def not_opened(self) -> None:
        """``open`` ended without a node."""
        self.world.meet("recovery crashed")
        if self.healing:
            raise AssertionError("recovery died without a fault")

    def open(self) -> None:
        """Recover what the disk has, and serve."""
        self.opened(Node(self.disk, self.settings, clock=cast(SimClock, SteadyClock(self.world.clock))))

    def opened(self, node: Node) -> None:
        """It serves from now on."""
        self.node = node
        recovered = node.recovered
        if recovered.records:
            self.world.meet("redo of records")
        found = recovered.store.journal.found
        if found.cut_lsn is not None:
            self.world.meet("torn tail cut")
        if self.settings.sync != "always":
            self.world.meet(f"sync={self.settings.sync} recovered")
        self.world.trace("started", recovered.records, recovered.notes, found.rule)
        self.tick(node)

    def reached(self, name: str) -> None:
        """A crash point: this broker's, or a client's."""
        task = current_task()
        if task is not None:
            task.host.reached(name)
        elif self._countdown:
            self._countdown -= 1
            if not self._countdown and not self.healing:
                self.world.trace("crash point", name)
                raise SimulatedCrash(name)

    def guard(self, step: Callable[[], None]) -> None:
        """Run a step of the broker; a crash or a failed disk ends its life."""
        crashpoints.set_hook(self.reached)  # there may be other brokers in this world
        try:
            step()
        except SimulatedCrash:
            self.world.meet("died at a crash point")
            self.die()
        except (OSError, StorageError) as error:
            if not isinstance(error, OSError) and self.healing:
                raise
            if isinstance(error, JournalFullError):
                self.world.trace("refused to start: the disk is full")
            elif isinstance(error, StorageError) and not isinstance(error, JournalFailedError) and self.node is None:
                raise  # recovery calls its own crash's traces damage
            else:
                self.losses += 1
                self.world.meet("died of EIO")
            self.world.trace("disk error", type(error).__name__)
            self.die()

    def die(self) -> None:
        """The process ends, or the power fails."""
        world = self.world
        power = world.chance(0.6)
        world.meet("power lost" if power else "broker killed")
        world.trace("broker dies", "power" if power else "kill")
        self.losses += power
        if not power:
            self.disk.clear_faults()
        self.node = None
        self.disk = self.disk.crash() if power else self.disk.kill()
        links, self.links = self.links, []
        for link in links:
            link.cut()
        world.after(world.rng.uniform(0.01, 0.3), self._again)

    def _again(self) -> None:
        if self.node is None:
            self.start()

    def pause(self, seconds: float) -> None:
        """The process is stopped: it does nothing, and what comes waits in its sockets."""
        node = self.node
        if node is None or self._is_paused:
            return
        self._is_paused = True
        self.world.meet("broker paused")
        self.world.trace("broker paused", seconds)
        self.world.after(seconds, lambda: self._go_on(node))

    def _go_on(self, node: Node) -> None:
        if self.node is node:
            waiting, self._waiting, self._is_paused = self._waiting, [], False
            self.world.trace("broker goes on", len(waiting))
            for step in waiting:
                self.world.after(0.0, step)

    def reach(self, node: Served, take: Callable[[], None]) -> None:
        """Something comes over a socket; where the process is stopped it waits there."""
        if self.node is not node:
            return
        if self._is_paused:
            self._waiting.append(lambda: self.reach(node, take))
            return
        self.guard(take)
        self.wake()

    def connect(self, receive: Callable[[bytes], None], lost: Callable[[], None], _client: str = "") -> Link | None:
        """A connection, if the broker is there."""
        if self.node is None:
            return None
        link = Link(self, receive, lost)
        self.links.append(link)
        return link

    # --- the path of a group ---

    def _later(self, seconds: float, step: Callable[[Node], None]) -> None:
        node = self.node

        def call() -> None:
            if node is None or self.node is not node:
                return
            if self._is_paused:
                self._waiting.insert(0, call)
            else:
                self.guard(lambda: step(node))

        self.world.after(seconds, call)

    def wake(self) -> None:
        """There may be something to commit."""
        if self.node is not None:
            self._later(0.0, self.pump)

    def pump(self, node: Node) -> None:
        """Commit what is there."""
        node.context.now_ms = node.clock.now_ms()
        node.core.wake_memory()
        self._begin_steps(node)
        node.flush()

    def _begin_steps(self, node: Node) -> None:
        """Begin every step that may run now; each of its parts runs at a time of its own."""
        pipeline, now = node.pipeline, node.clock.monotonic()
        self.feed(node)
        while (step := node.next_step()) is not None:
            self._run(step, list(step.parts()))
            self.feed(node)
        if pipeline.wake_at() < inf:
            self._later(max(0.001, pipeline.wake_at() - now), self.pump)

    def delay(self) -> float:
        """How long a part of a step takes."""
        return 0.0 if self.world.chance(0.3) else self.world.rng.uniform(0.0001, 0.003)

    def _run(self, step: Step, parts: list[Part]) -> None:
        def go_on(node: Node) -> None:
            if not parts:
                if isinstance(step, Checkpoint):
                    self.world.meet("checkpoint written")
                self._watch.done(step)
                node.step_done(step)
                self.pump(node)
            elif node.run_part(step, parts.pop(0)):
                self._run(step, parts)

        self._later(self.delay(), go_on)

    # --- time ---

    def tick(self, node: Node) -> None:
        """What the server does now and then."""
        world = self.world
        node.core.tick(node.clock.now_ms())
        full = node.store.is_full(self.disk.free_bytes())
        node.context.disk_full = full
        if full:
            world.meet("disk full")
        if world.chance(0.2):
            before = len(node.context.group.unlinked)
            retire(node.context.state, node.context.group_with_room, node.clock.now_ms())
            if len(node.context.group.unlinked) > before:
                world.meet("segments expired")
        self.pump(node)
        self._watch.look(node)
        self._later(0.05, self.tick)
