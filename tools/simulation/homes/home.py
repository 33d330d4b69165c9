"""One of several homes: the lives of its broker, each with a session of its own, and the network to its clients.

Theory of operation. A life is a simulated process with one thread, in which the registry's loop runs that ships, over
the registry that ships, on the world's ZooKeeper; core and commit pipeline run in the world's events, as those of a
broker that is alone. A directory without an identity joins first: until then there is no node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from tools.images.node import Node
from tools.simulated.clock import SimClock, SimRandom
from tools.simulation.broker import Broker
from tools.simulation.threads import Host, Threads
from tools.simulation.world import Simulation, Violation
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.shell import joining
from txmq.broker.shell.cluster_membership import RegistrySessionLoop, When
from txmq.broker.shell.joining import Connected, Entered
from txmq.errors import HomeInUseError, HomeSupersededError
from txmq.redo import directory_identity
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.runtime.clocks import SteadyClock

from .conversations import Conversations
from .ensemble import SESSION_TIMEOUT_S, Ensemble
from .network import HomeLink

CHROOT = "/prod"
PORT = 8123


class Home(Broker):
    """See the module's docstring.

    Attributes:
        name: of the broker, and of its host.
        is_copied: another process has a copy of its directory.
        stopped: why its last process stopped by itself; None if it did not.
        opened_at: when its last process began.
        stood_still: from when to when that was stopped the last time; two times that are equal: never.
    """

    def __init__(
        self, world: Simulation, threads: Threads, ensemble: Ensemble, number: int, homes: dict[str, Home]
    ) -> None:
        super().__init__(world)
        self.name, self.number = f"home{number}", number
        object.__setattr__(self.settings, "broker_name", self.name)
        self.is_copied = False
        self.stopped: Exception | None = None
        self.opened_at, self.stood_still = world.now, (0.0, 0.0)
        self._threads, self._ensemble, self._homes = threads, ensemble, homes
        homes[self.name] = self
        self._conversations: Conversations | None = None
        self._lives = 0
        self._host: Host | None = None
        self._session_loop: RegistrySessionLoop | None = None
        self._cut_from: set[str] = set()
        self._down_until = 0.0

    @property
    def address(self) -> str:
        """Where it is reached."""
        return f"{self.name}:{PORT}"

    @property
    def lock(self) -> str:
        """Names the lock of the data directory."""
        return f"disk of {self.name}"

    @property
    def is_serving(self) -> bool:
        """Whether its broker leads it and serves."""
        return self.node is not None and self.node.context.is_serving

    @property
    def is_away(self) -> bool:
        """Whether it does not serve, or stands still."""
        return not self.is_serving or self._is_paused

    @property
    def hears(self) -> bool:
        """Whether its process runs, leads it, and has a session that carries."""
        if self.is_away:
            return False
        return any(one.host is self._host and one.is_carrying for one in self._ensemble.sessions)

    # --- lives -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """See ``Broker``."""
        self._lives += 1
        self.opened_at, self.stood_still = self.world.now, (0.0, 0.0)
        self._host = host = Host(self._threads, f"{self.name}.{self._lives}")
        host.on_death.append(lambda: self._host_died(host))
        if not self.healing and self.world.chance(0.2):
            host.countdown = self.world.rng.randint(1, 6)
        self._session_loop = None
        if directory_identity.load(self.disk) is None:
            self.world.meet("an empty directory joined")
            host.start("join", self._join)
        else:
            self._open_node(None)

    def not_opened(self) -> None:
        """See ``Broker``: it joins, or recovery has died."""
        if self._host is None or not self._host.is_alive:
            super().not_opened()

    def _join(self) -> None:
        host = self._required_host()
        random = SimRandom(self.world.rng)

        def take() -> int | None:
            return joining.take_cluster(self.disk, random, lambda: self._connect(host).registry)

        cluster = joining.until_answered(take, host, host.sleep, SESSION_TIMEOUT_S)
        self.post(host, lambda: self.guard(lambda: self._open_node(cluster)))

    def _connect(self, host: Host) -> Connected:
        session = self._ensemble.open(host)
        return Connected(ZooKeeperRegistry(session, CHROOT), session)

    def _open_node(self, cluster: int | None) -> None:
        host, world = self._required_host(), self.world
        node = Node(
            self.disk, self.settings, clock=cast(SimClock, SteadyClock(world.clock)), is_member=True,
            cluster=ClusterView("zk://simulated"), cluster_id=cluster,
            identity_seed=world.rng.getrandbits(64) if cluster is None else 100 + self.number,
        )  # fmt: skip
        self._conversations = Conversations(self, node, self._homes)
        self.opened(node)
        random = SimRandom(world.rng)
        who = joining.member(node.recovered, self.address, self.lock, self.settings, random)
        self._session_loop = RegistrySessionLoop(
            who, lambda: self._connect(host), node.core,
            lambda call: self.post(host, lambda: self.reach(node, call)),
            When(lambda entered: self._led(node, entered), lambda: None, self._refused), host, SESSION_TIMEOUT_S,
        )  # fmt: skip
        host.start("registry", self._session_loop.run)

    def _led(self, node: Node, entered: Entered) -> None:
        node.lead(entered.leadership.epoch, entered.topics, entered.homes, entered.access)

    def _required_host(self) -> Host:
        assert self._host is not None
        return self._host

    def post(self, host: Host, call: Callable[[], None]) -> None:
        """Have the loop of a process call something, if it lives then."""

        def run() -> None:
            if host.is_alive:
                host.when_running(call)

        self.world.after(0.0, run)

    def _refused(self, error: Exception) -> None:
        """The registry does not want this process: it stops."""
        self.world.trace(self.name, "stops", type(error).__name__)
        if not (self.is_copied and isinstance(error, HomeSupersededError | HomeInUseError)):
            raise Violation(f"{self.name} was refused: {error!r}")
        self.stopped = error
        self.die()

    def _host_died(self, host: Host) -> None:
        if self._host is host and self.node is not None:
            self.die()
        elif self._host is host:
            self.world.after(self.world.rng.uniform(0.01, 0.3), self._again)

    def end(self, down_s: float = 0.0) -> None:
        """From outside; it may still be about to join. It is down for so long at least."""
        self._down_until = self.world.now + down_s
        if self.node is not None:
            self.die()
        elif self._host is not None:
            self._host.kill()

    def _again(self) -> None:
        if self.world.now < self._down_until:
            self.world.after(max(self._down_until - self.world.now, 0.001), self._again)  # the clock counts nanoseconds
        else:
            super()._again()

    def die(self) -> None:
        """See ``Broker``."""
        host, self._host = self._host, None
        conversations, self._conversations = self._conversations, None
        if conversations is not None:
            conversations.close()
        super().die()
        if host is not None:
            host.kill()

    def pause(self, seconds: float) -> None:
        """See ``Broker``; its session is not heard of meanwhile."""
        host = self._host
        if self.node is None or self._is_paused or host is None:
            return
        super().pause(seconds)
        self.stood_still = self.world.now, self.world.now + seconds
        host.pause()
        for session in self._ensemble.sessions:
            if session.host is host:
                session.was_paused(seconds)
        self.world.after(seconds, host.go_on)

    def cut_off(self, seconds: float) -> None:
        """Nothing goes between its process and ZooKeeper for a while."""
        for session in self._ensemble.sessions:
            if session.host is self._host:
                session.cut_off(seconds)

    # --- the path of a group -----------------------------------------------------------------------------------------

    def pump(self, node: Node) -> None:
        """See ``Broker``."""
        super().pump(node)
        asks = node.core.take_registry_asks()
        if asks and self._session_loop is not None:
            self._session_loop.ask(asks)
        if self._conversations is not None:
            self._conversations.ask(node.core.take_branch_asks())

    def tick(self, node: Node) -> None:
        """See ``Broker``."""
        super().tick(node)
        if self._conversations is not None:
            self._conversations.tick()

    def delay(self) -> float:
        """See ``Broker``; sometimes the disk is slow, and the registry faster."""
        return self.world.rng.uniform(0.005, 0.02) if self.world.chance(0.05) else super().delay()

    # --- the network -------------------------------------------------------------------------------------------------

    def is_cut_from(self, client_name: str) -> bool:
        """Whether nothing goes between the home and a client."""
        return any(client_name.startswith(name) for name in self._cut_from)

    def cut_from(self, name: str, seconds: float) -> None:
        """Nothing goes between the home and the clients whose names begin so."""
        if name not in self._cut_from:
            self.world.meet("a client was cut off from a home")
            self.world.trace(self.name, "cut from", name or "all", seconds)
            self._cut_from.add(name)
            self.world.after(seconds, lambda: self._whole_again(name))

    def _whole_again(self, name: str) -> None:
        self._cut_from.discard(name)
        for link in self.links:
            if isinstance(link, HomeLink) and not self.is_cut_from(link.client_name):
                link.is_whole_again()

    def connect(self, receive: Callable[[bytes], None], lost: Callable[[], None], _client: str = "") -> HomeLink | None:
        """See ``Broker``."""
        if self.node is None or self.is_cut_from(_client):
            return None
        link = HomeLink(self, receive, lost, _client)
        self.links.append(link)
        return link
