"""Two XA databases of simulated processes: MariaDB's quirks (``txmq.testing.simulated.xa_database``), faults, deaths.

Every call takes simulated time. Requests and replies get lost, servers die before and after a call and start again,
sessions of a process that died end. Rows of one key form a chain, so that the order of their commits is known.
"""

from __future__ import annotations

from typing import Any

from txmq.testing.simulated.xa_answers import Fault
from txmq.testing.simulated.xa_database import SimulatedSession, SimulatedXADatabase
from txmq.testing.simulated.xa_resource import SimulatedXAResource

from .threads import pause, required_task
from .world import Simulation, Violation

NAMES = ("bank-a", "bank-b")
KEYS_FROM = 1000
_ROWS, _CHAIN = "rows", "chain"
_FAULTS = (Fault.REQUEST_LOST, Fault.REPLY_LOST, Fault.CRASH_BEFORE, Fault.CRASH_AFTER)


class Bank:
    """Both servers, and what was written where."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.servers = [Server(world, number) for number in range(len(NAMES))]
        self._written: dict[str, tuple[int, ...]] = {}  # row: the servers that must have it

    def resources(self) -> list[SimulatedXAResource]:
        """Both, as the process that asks sees them."""
        return [
            SimulatedXAResource(name, server, f"{number + 1:032x}", self.world.clock.now_ms)
            for number, (name, server) in enumerate(zip(NAMES, self.servers, strict=True))
        ]

    def write(self, row: str, key: int, connections: dict[int, Any]) -> int:
        """Insert a row in some servers, and append it to its key's chain in the first; its place there."""
        self._written[row] = tuple(connections)
        for connection in connections.values():
            connection.insert(_ROWS, row)
        first = next(iter(connections.values()))
        place = 1
        while first.read(_CHAIN, (key, place)) is not None:
            place += 1
        first.insert(_CHAIN, (key, place), row)
        return place

    def has(self, row: str) -> bool:
        """Whether a row is committed.

        Raises:
            Violation: in one server and not in the other.
        """
        found = {(_ROWS, row) in self.servers[number].committed for number in self._written[row]}
        if len(found) > 1:
            raise Violation(f"P3: {row} is in one database only")
        return found == {True}

    def is_readable(self, row: str) -> bool:
        """Whether a row is committed everywhere."""
        return all((_ROWS, row) in self.servers[number].committed for number in self._written[row])

    def heal(self) -> None:
        """No more faults."""
        for server in self.servers:
            server.is_healed = True
            server.serve()

    def check(self) -> None:
        """Nothing is left in doubt, no marker of a finished transaction for ever."""
        for name, server in zip(NAMES, self.servers, strict=True):
            if server.prepared_xids():
                raise Violation(f"P5: prepared in {name} after healing: {server.prepared_xids()}")


class Server(SimulatedXADatabase):
    """One server that fails as the world draws it."""

    def __init__(self, world: Simulation, number: int) -> None:
        super().__init__()
        self.world, self.number, self.is_healed = world, number, False
        self.fault = self._draw
        self.survives = lambda _xid: world.chance(0.5)

    def connect(self, *, autocommit: bool = False) -> SimulatedSession:
        """A session that ends with the process that opened it."""
        host = required_task().host
        pause(self.world.rng.uniform(0.0, 0.002))
        session = super().connect(autocommit=autocommit)
        host.on_death.append(session.close)
        return session

    def crash(self) -> None:
        """It starts again by itself."""
        super().crash()
        self.world.meet("xa database died")
        self.world.after(self.world.rng.uniform(0.02, 0.3), self.serve)

    def serve(self) -> None:
        """Start, if it is down."""
        if not self.is_up:
            self.start()

    def _draw(self, _session: SimulatedSession, call: str) -> Fault | None:
        pause(self.world.rng.uniform(0.0, 0.002))
        if self.is_healed or not self.world.chance(0.02):
            return None
        fault = self.world.rng.choice(_FAULTS)
        self.world.trace(NAMES[self.number], call, fault.name)
        self.world.meet("xa answer lost")
        return fault
