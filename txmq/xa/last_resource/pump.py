"""When the outbox of a resource is drained whose blocks use it always (``OutboxOptions.when``).

Theory of operation. A pump is called again and again by a thread of its own (``step``), which a commit of this process
wakes. A first row is sent at once; behind a page it lets more rows come together, for ``GATHER_S``, and longer the more
come: a page costs a commit and half a dozen statements, whatever is in it. Rows that other processes commit it finds by
looking, every few milliseconds while rows came lately, and more and more seldom then.

One process has the turn (``TurnDrainer.turn``); behind a second without rows it leaves it, so that whoever commits the
next row drains it at once, woken by itself. It looks once more behind that: a row whose owner was refused the turn
before was committed before. Who is refused looks again while rows wait: the other one may have died, and its turn ends
by itself.

Whoever has the turn also removes the markers that need not be kept any more.

Invariants:
    * while broker or database are away, commits wake nobody: it tries again after ``AWAY_S``;
    * an idle process asks its database once in ``LOOK_EVERY_S``, and its broker for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.errors import ClosedError
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.xa.broker_port import Home, Homes, cluster_of
from txmq.xa.database.outbox_homes import LONE
from txmq.xa.last_resource.drainer import LOOK_EVERY_S, PAGE_SIZE_MAX
from txmq.xa.last_resource.outbox import OutboxState
from txmq.xa.last_resource.resolving import ResolvingConnection
from txmq.xa.last_resource.resource import LastResource
from txmq.xa.last_resource.turns import TurnDrainer

GATHER_S = 0.005  # docs/benchmarks.md, "Draining, in the service"
GATHER_BUSY_S, BUSY = 0.01, 8  # behind a page of so many rows; the next one has some twice as many
LOOK_S_MIN, LOOK_S_MAX = 0.003, 0.05  # for rows of other processes, while they may come
IDLE_S = 1.0  # without rows: the turn is left to others
REFUSED_S = 0.25
AWAY_S = 0.5
SWEEP_EVERY_S = 30.0


class Pause(NamedTuple):
    """How long nobody need call, and whether a commit ends that."""

    seconds: float
    is_ended_by_commits: bool


class Pump:
    """One resource's at one home. See the module's docstring. Used by one thread at a time."""

    def __init__(self, client: Home, resource: LastResource, state: OutboxState, clock: Clock, homes: Homes) -> None:
        self._client, self._resource, self._state = client, resource, state
        self._clock, self._homes = clock, homes
        self._drainer: TurnDrainer | None = None
        self._database: ResolvingConnection | None = None
        self._found_at, self._look_s = float("-inf"), LOOK_S_MIN
        self._sweep_at, self._swept_to = clock.monotonic() + SWEEP_EVERY_S, ""
        self._is_away = self._has_left = False
        self._log = get_logger(resource=resource.name)

    def step(self) -> Pause:
        """Drain a page.

        Raises:
            ClosedError: the client is closed.
        """
        try:
            self._client.look()
            pause = self._step(self._open())
        except ClosedError:
            raise
        except Exception as error:  # noqa: BLE001  of whatever driver: broker or database are away, or do not agree
            self._failed(error)
            return Pause(AWAY_S, is_ended_by_commits=False)
        self._is_away = False
        return pause

    def _step(self, database: ResolvingConnection) -> Pause:
        drainer = self._drainer_here(database)
        sent = drainer.turn(database)
        now = self._clock.monotonic()
        if sent is None:
            waits = self._state_here.size.rows > 0
            return Pause(REFUSED_S if waits else LOOK_EVERY_S, is_ended_by_commits=not waits)
        if drainer.has_turn:
            self._sweep(database, now)
        if sent:
            self._found_at, self._look_s, self._has_left = now, LOOK_S_MIN, False
            gather_s = GATHER_BUSY_S if sent >= BUSY else GATHER_S
            return Pause(0.0 if sent == PAGE_SIZE_MAX else gather_s, is_ended_by_commits=False)
        if not drainer.has_turn:
            return Pause(LOOK_EVERY_S, is_ended_by_commits=True)
        if now >= self._found_at + IDLE_S and not drainer.is_flying:
            drainer.let_go(database)
            had_left, self._has_left = self._has_left, True  # what waits still is kept back, or behind such a row
            return Pause(LOOK_EVERY_S if had_left else 0.0, is_ended_by_commits=True)
        pause = Pause(self._look_s, is_ended_by_commits=True)
        self._look_s = min(1.5 * self._look_s, LOOK_S_MAX)
        return pause

    def end(self, until: float) -> None:
        """Drain what waits, until a moment, leave the turn to others, and close the connection to the database."""
        try:
            while self._clock.monotonic() < until and not self._is_away:
                database = self._open()
                drainer = self._drainer_here(database)
                if not drainer.turn(database) and not drainer.is_flying:
                    break
            if self._drainer is not None and self._database is not None:
                self._drainer.let_go(self._database)
        except Exception as error:  # noqa: BLE001  others drain what is left
            self._failed(error)
        self._close()

    def _drainer_here(self, database: ResolvingConnection) -> TurnDrainer:
        drainer, home = self._drainer, LONE if self._homes.is_lone else f"{self._client.session.home:016x}"
        if drainer is None or drainer.home != home:  # a lone broker may have founded a cluster
            drainer = TurnDrainer(self._client, self._state, database.uuid, self._resource.name, self._clock, home)
            self._drainer = drainer
        return drainer

    @property
    def _state_here(self) -> OutboxState:
        return self._state if self._drainer is None else self._state.at(self._drainer.home)

    def _sweep(self, database: ResolvingConnection, now: float) -> None:
        if now >= self._sweep_at:
            kept_ms = int(self._state.options.markers_kept_s * 1000)
            after = database.delete_enclosed(kept_ms, self._swept_to)
            self._swept_to = after or ""
            if after is None:
                self._sweep_at = now + SWEEP_EVERY_S

    def _open(self) -> ResolvingConnection:
        if self._database is None:
            self._database = self._resource.open_for_resolver(cluster_of(self._client))
        return self._database

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _failed(self, error: Exception) -> None:
        say = self._log.debug if self._is_away else self._log.warning
        say("outbox is not drained", error=repr(error))
        self._is_away = True
        self._close()
