"""Programs that do what an operator does to the outbox of the real clients' database (``txmq outbox``)."""

from __future__ import annotations

from contextlib import closing, suppress

from txmq.xa.database.outbox_homes import PARKED, WAITING
from txmq.xa.database.outbox_tables import OutboxTables
from txmq.xa.last_resource.resolving import ResolvingConnection

from .application import Program
from .threads import pause

_LISTED_MAX = 100


class ParkingProgram(Program):
    """Keeps rows back, and lets them go: their numbers go to voids, whoever has read them before."""

    ends_with_the_world = False

    def main(self) -> None:
        """Until the world stops, and none is kept back."""
        resource, self._numbers = self.resource(), dict[str, int]()
        is_over = False
        while not is_over:
            pause(self.world.rng.uniform(0.02, 0.2))
            # The database's errors are drawn; or it is not installed yet.
            with suppress(Exception), closing(resource.open_for_operator()) as database:
                while not is_over:
                    is_over = not self._look(database) and self.shared.stopping
                    pause(self.world.rng.uniform(0.0, 0.1))
        resource.close()

    def _look(self, database: ResolvingConnection) -> bool:
        """Park a row, or release what is parked; whether any is, perhaps."""
        outbox, connection, rng = database.outbox, database.connection, self.world.rng
        assert outbox is not None
        found = {row: (state, number) for row, state, number, *_ in outbox.listed(connection, _LISTED_MAX)}
        parked = [row for row, (state, _) in found.items() if state == PARKED]
        if any(self._numbers.get(row) and not found[row][1] for row in parked):
            self.world.meet("a real row's number went to a void")
        self._numbers = {row: number for row, (_, number) in found.items()}
        waiting = [row for row, (state, _) in found.items() if state == WAITING]
        if waiting and not self.shared.stopping and rng.random() < 0.5:
            self._park(database, outbox, rng.choice(waiting))
            return True
        for row in parked:
            outbox.release(connection, row)
        return bool(parked)

    def _park(self, database: ResolvingConnection, outbox: OutboxTables, row: str) -> None:
        if outbox.park_waiting(database.connection, row, "by an operator"):
            self.world.meet("real rows were kept back")
            self.world.trace(self.host.name, "parks", row[34:])
