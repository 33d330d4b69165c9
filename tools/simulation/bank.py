"""Two XA databases of simulated processes: MariaDB's quirks (``tools.simulated.xa_database``), faults, deaths.

Every call takes simulated time. Requests and replies get lost, servers die before and after a call and start again,
sessions of a process that died end. Rows of one key form a chain, so that the order of their commits is known.
"""

from __future__ import annotations

from typing import Any

from tools.simulated.xa_answers import Fault
from tools.simulated.xa_database import SimulatedSession, SimulatedXADatabase
from tools.simulated.xa_resource import SimulatedXAResource
from txmq.xa.two_phase.resource_ports import listed_xid
from txmq.xid import Xid

from .threads import Host, pause, required_task
from .world import Simulation, Violation

NAMES = ("bank-a", "bank-b")
KEYS_FROM = 1000
_ROWS, _CHAIN = "rows", "chain"
_FAULTS = (Fault.REQUEST_LOST, Fault.REPLY_LOST, Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.CUT_OFF)
LOST_COMMITS = 0.3  # chance of an XA COMMIT; most branches end too soon to be left to a resolver
SLOW_ENDS, LOST_SIGHT = 0.8, 0.8


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
        """No more faults; a branch that a server has lost sight of needs a restart."""
        for server in self.servers:
            server.is_healed = True
            if server.lost_sight_of():
                server.crash()
            server.serve()

    def check(self) -> None:
        """Nothing is left in doubt, no marker of a finished transaction for ever."""
        for name, server in zip(NAMES, self.servers, strict=True):
            if server.prepared_xids():
                raise Violation(f"P5: prepared in {name} after healing: {server.prepared_xids()}")
            if server.lost_to_kills:
                raise Violation(f"P5: committed in {name} while a killed session ended: {server.lost_to_kills}")


class Server(SimulatedXADatabase):
    """One server that fails as the world draws it.

    Attributes:
        lost_to_kills: branches that it lost sight of because the killer of a session did not wait for its end.
    """

    def __init__(self, world: Simulation, number: int) -> None:
        super().__init__()
        self.world, self.number, self.is_healed = world, number, False
        self.fault = self._draw
        self.survives = lambda _xid: world.chance(0.5)
        self.ends_slowly, self.loses_sight = self._ends_slowly, self._loses_sight
        self.lost_to_kills: list[Xid] = []
        self._killed: dict[int, Host] = {}  # sessions, and the process that killed each and has not connected since

    def connect(self, *, autocommit: bool = False) -> SimulatedSession:
        """A session that ends with the process that opened it."""
        host = required_task().host
        self._killed = {number: killer for number, killer in self._killed.items() if killer is not host}
        pause(self.world.rng.uniform(0.0, 0.002))
        session = super().connect(autocommit=autocommit)
        host.on_death.append(session.close)
        return session

    def crash(self) -> None:
        """It starts again by itself."""
        super().crash()
        self._killed.clear()  # numbers of sessions begin anew
        self.world.meet("xa database died")
        self.world.after(self.world.rng.uniform(0.02, 0.3), self.serve)

    def _notice(self, session: SimulatedSession) -> None:
        """The client of a session has been cut off for long."""
        if not session.is_over:
            self.end_session(session)

    def kill(self, number: int) -> bool:
        """As another session asks."""
        self._killed[number] = required_task().host
        return super().kill(number)

    def _ends_slowly(self, session: SimulatedSession) -> bool:
        if self.is_healed or not self.world.chance(SLOW_ENDS):
            return False
        longest_s = 0.05 if session.number in self._killed else 0.5
        self.world.after(self.world.rng.uniform(0.0, longest_s), lambda: self.session_has_gone(session.number))
        return True

    def _loses_sight(self, xid: Xid) -> bool:
        if self.is_healed or not self.world.chance(LOST_SIGHT):
            return False
        self.world.meet("xa commit met the end of a session")
        self.world.trace(NAMES[self.number], "loses sight", xid)
        listed = listed_xid(xid)
        # Of a session that another process has killed meanwhile a resolver cannot know: it does not report DONE then.
        if listed is not None and self._killed.get(listed.connection) is required_task().host:
            self.lost_to_kills.append(xid)
        return True

    def serve(self) -> None:
        """Start, if it is down."""
        if not self.is_up:
            self.start()

    def _draw(self, session: SimulatedSession, call: str) -> Fault | None:
        pause(self.world.rng.uniform(0.0, 0.002))
        is_lost = call == "xa_commit" and self.world.chance(LOST_COMMITS)
        if self.is_healed or not (is_lost or self.world.chance(0.02)):
            return None
        fault = self.world.rng.choice((Fault.CUT_OFF, Fault.REQUEST_LOST) if is_lost else _FAULTS)
        if fault is Fault.CUT_OFF:  # until the server has noticed, or a resolver ends the session
            self.world.after(self.world.rng.uniform(0.5, 3.0), lambda: self._notice(session))
        self.world.trace(NAMES[self.number], call, fault.name)
        self.world.meet("xa answer lost")
        return fault
