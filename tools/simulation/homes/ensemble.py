"""The ZooKeeper of a world: calls take time and lose their answers, and a session that is silent too long expires.

Theory of operation. ``SimZooKeeper`` carries a call out at once; here a call waits on its way there and back, in the
simulated thread that makes it, so that calls of several brokers come between each other. Kazoo's own work (to hear of
a lost connection, to connect again) is done by the world's events. It stands still with its process: a broker that is
paused hears of its expired session when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from tools.simulated.zookeeper import SimSession, SimZooKeeper, Tree
from tools.simulation.threads import Host, pause
from tools.simulation.world import Simulation
from txmq.registry.zookeeper.session import SessionState, WatchEvent

SESSION_TIMEOUT_S = 0.4
RECONNECT_S = 0.03
WAY_S = (0.0001, 0.003)
DEATHS = 0.002  # chance of a process after a call
LAGS, LOSSES = 0.01, 0.01  # chances of a call
LAGS_THEN = 0.1  # chance that a session goes on at a server that has heard of nothing since
RARELY = 0.25  # where there are users, which change through the registry only: so often, and servers lag the more


class Ensemble:
    """See the module's docstring."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.servers = SimZooKeeper()
        self.often = RARELY if world.has_users else 1.0
        self.sessions: list[HostSession] = []
        self.is_healed = False

    def open(self, host: Host) -> HostSession:
        """A session of a process; it may take a while until it is connected."""
        session = HostSession(self, host)
        self.sessions = [one for one in self.sessions if one.host.is_alive]
        self.sessions.append(session)
        return session

    def go_away(self, seconds: float) -> None:
        """No server answers, or they have no quorum: no session expires meanwhile."""
        if not self.servers.is_reachable:
            return
        self.world.meet("ZooKeeper was away")
        self.world.trace("ZooKeeper away", seconds)
        self.servers.is_reachable = False
        for session in self.sessions:
            session.lose()
        self.world.after(seconds, self._come_back)

    def _come_back(self) -> None:
        self.servers.is_reachable = True
        self.world.trace("ZooKeeper back")

    def heal(self) -> None:
        """From now on nothing is lost."""
        self.is_healed = True
        for session in self.sessions:
            session.is_cut_off = False


class HostSession(SimSession):
    """A process's session."""

    def __init__(self, ensemble: Ensemble, host: Host) -> None:
        super().__init__(ensemble.servers)
        self._of, self.host, self._world = ensemble, host, ensemble.world
        self.before_call, self.after_call = self._there, self._back
        self._heard = self._world.now
        self._then: Tree | None = None  # the tree when the connection was lost
        host.on_death.append(lambda: self._expires_at(self._world.now + SESSION_TIMEOUT_S))
        self._reconnect()

    # --- the ways of a call ------------------------------------------------------------------------------------------

    def _there(self) -> None:
        rng = self._world.rng
        pause(rng.uniform(*WAY_S))
        if self._of.is_healed:
            return
        if rng.random() < LAGS / self._of.often:
            self._world.meet("a server lagged behind")
            self.lag()
        if rng.random() < LOSSES * self._of.often:
            self._world.meet("an answer of ZooKeeper was lost")
            self.lose_next(is_carried_out=rng.random() < 0.5, after=rng.choice((0, 0, 1, 2)))

    def _back(self) -> None:
        if not self._of.is_healed and self._world.rng.random() < DEATHS * self._of.often:
            self._world.meet("a broker died behind a call of ZooKeeper")
            self.host.kill()
        pause(self._world.rng.uniform(*WAY_S))

    def wait_connected(self, timeout: float) -> bool:
        """See ``Session``."""
        end = self._world.now + timeout
        while self.state is not SessionState.CONNECTED and self._world.now < end:
            pause(0.01)
        return self.state is SessionState.CONNECTED

    def call_watches(self, event: WatchEvent) -> None:
        """Watches are told late."""
        self._at_host(self._world.rng.uniform(0.0, 0.01), lambda: super(HostSession, self).call_watches(event))

    # --- what happens to it ------------------------------------------------------------------------------------------

    def cut_off(self, seconds: float) -> None:
        """The network between the process and ZooKeeper is gone for a while."""
        if self.is_cut_off:
            return
        self._world.meet("a broker was cut off from ZooKeeper")
        self._world.trace(self.host.name, "cut off from ZooKeeper", seconds)
        self.is_cut_off = True
        self.lose()
        self._world.after(seconds, self._can_connect_again)

    def _can_connect_again(self) -> None:
        self.is_cut_off = False

    @property
    def is_carrying(self) -> bool:
        """Whether calls and watches go their ways."""
        return self.state is SessionState.CONNECTED and self._of.servers.is_reachable and not self.is_cut_off

    def was_paused(self, seconds: float) -> None:
        """Nothing is heard of the process for so long."""
        self._expires_at(self._world.now + SESSION_TIMEOUT_S, until=self._world.now + seconds)

    def lose(self) -> None:
        """The connection is lost; the process hears of it soon."""
        self._at_host(self._world.rng.uniform(0.0, 0.01), self.disconnect)

    def disconnect(self) -> None:
        """See ``SimSession``."""
        if self.state is SessionState.CONNECTED:
            self._world.trace(self.host.name, "suspended")
            super().disconnect()
            self._then = self._of.servers.picture()
            self._expires_at(self._world.now + SESSION_TIMEOUT_S)
            self._reconnect()

    def connect(self) -> None:
        """See ``SimSession``."""
        former = self._number
        super().connect()
        then, self._then = self._then, None
        # No server shows less than a session has seen; one that is new has been written down by its server.
        if former == self._number and not self._of.is_healed and self._world.chance(LAGS_THEN / self._of.often):
            self._world.meet("a server lagged behind")
            self._picture = then
        self._heard = self._world.now
        if former not in (0, self._number):
            self._world.meet("a session expired")
        self._world.trace(self.host.name, "connected", self._number)

    def _reconnect(self) -> None:
        def attempt() -> None:
            if self.state is SessionState.CONNECTED:
                return
            if self.can_connect:
                self.connect()
            else:
                self._reconnect()

        self._at_host(self._world.rng.uniform(0.001, RECONNECT_S), attempt)

    def _expires_at(self, at: float, until: float | None = None) -> None:
        """The servers end the session then, if they have not heard of it by then."""
        number = self._number

        def look() -> None:
            is_heard = self.state is SessionState.CONNECTED and self.host.is_alive and until is None
            if number != self._number or is_heard or not self._of.servers.has_session(number):
                return
            if not self._of.servers.is_reachable:
                self._world.after(SESSION_TIMEOUT_S, look)
                return
            self._world.trace(self.host.name, "expires", number)
            self._of.servers.end_session(number)
            self.lose()  # the servers close the connection

        if number and (until is None or at < until):
            self._world.after(at - self._world.now, look)

    def _at_host(self, seconds: float, call: Callable[[], None]) -> None:
        """Have kazoo's threads do something: not in a dead process, and late in one that is paused."""

        def run() -> None:
            if self.host.is_alive:
                self.host.when_running(call)

        self._world.after(seconds, run)
