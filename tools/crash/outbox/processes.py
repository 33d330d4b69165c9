"""The processes of the outbox campaign, by the names that its plan uses."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from tools.crash.campaign import await_death as await_death_of_broker
from tools.crash.directory import BROKER_SETTINGS
from tools.crash.doors import OPERATOR, Doors, user_of
from tools.crash.faults import POINT_S, Fault, Victim, Victims, await_death
from tools.crash.outbox.databases import COPY, Database
from tools.crash.outbox.directory import SERVICE, OutboxCampaignDirectory
from tools.crash.outbox.plan import BROKER, RELAYS
from tools.crash.processes import CampaignError, Child, pause
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

RELAY_USER, READER = "relay", "r"
STOPPED = "outbox stopped"
LOG_SHOWN = 1500


class Processes(Victims):
    """All of them.

    Args:
        databases: by name; ended by whoever has begun them.
        rule: taken away from the relays.

    Attributes:
        points_hit: how often each crash point was the place of a death.
    """

    def __init__(
        self, world: OutboxCampaignDirectory, databases: Mapping[str, Database], seeds: random.Random, doors: Doors,
        rule: str = "",
    ) -> None:  # fmt: skip
        self._world, self._databases, self._seeds, self._doors, self._rule = world, databases, seeds, doors, rule
        self.points_hit = Counter[str]()
        self.broker = BrokerProcess(world.broker, settings=BROKER_SETTINGS, tls=doors.tls)
        self.services = {name: Child(f"{SERVICE}-{name}", world.directory, self._service) for name in databases}
        self.relays = {name: Child(name.replace(" ", "-"), world.directory, self._relay) for name in RELAYS}
        self.relay_of_copy = Child(COPY, world.directory, self._relay)
        self.reader = Child(READER, world.directory, self._reader)

    def _service(self, name: str) -> list[str]:
        database = user_of(name).removeprefix(f"{SERVICE}-")
        return [
            "tools.crash.outbox.service", str(self._world.directory), database, name, str(self._seeds.getrandbits(32)),
        ]  # fmt: skip

    def _relay(self, name: str) -> list[str]:
        config = COPY if user_of(name) == COPY else RELAY_USER
        return ["tools.crash.outbox.relay", str(self._world.config(config)), *([self._rule] if self._rule else [])]

    def _reader(self, name: str) -> list[str]:
        return ["tools.crash.outbox.reader", str(self._world.directory), self.address(READER), name]

    def address(self, user: str = OPERATOR) -> str:
        """Of the broker, for a user."""
        return self._doors.address([self.broker], user)

    @property
    def clients(self) -> list[Child]:
        """All that must not end by themselves."""
        return [*self.services.values(), *self.relays.values(), self.reader]

    def kill(self) -> None:
        """All but the databases."""
        for child in (*self.clients, self.relay_of_copy):
            child.kill()
        self.broker.kill()

    def refuse_dead(self) -> None:
        """Raises: CampaignError: a client has ended by itself."""
        for child in self.clients:
            if not child.is_running:
                log = self._world.directory / f"{child.name}.log"
                text = log.read_text("utf-8", "replace")[-LOG_SHOWN:]
                raise CampaignError(f"{child.name} ended by itself, with {child.status}\n{text}")

    def stops(self, outbox: str, *, of_copy: bool = False) -> int:
        """How often relays have told that an outbox has stopped."""
        relays = [self.relay_of_copy] if of_copy else [*self.relays.values()]
        logs = [self._world.directory / f"{relay.name}.log" for relay in relays]
        lines = (line for log in logs if log.exists() for line in log.read_text("utf-8", "replace").splitlines())
        return sum(_is_stop(line, outbox) for line in lines if STOPPED in line)

    # --- harm --------------------------------------------------------------------------------------------------------

    def named(self, name: str) -> Victim:
        kind, _, which = name.partition(" ")
        if kind == BROKER:
            return self.broker
        if kind == SERVICE:
            return self.services[which]
        if name in self.relays:
            return self.relays[name]
        server = self._databases[which].server
        assert server is not None, f"{name} is a server"
        return server

    def _crash(self, victims: Sequence[Victim], fault: Fault) -> None:
        point = fault.point.partition(":")[0]
        if fault.victims[0] == BROKER:
            self.points_hit[point] += 1
            self.broker.kill()
            self.broker.launch(env={"TXMQ_CRASH": fault.point})
            await_death_of_broker(self.broker, fault.point)
            pause(fault.away_s)
            self.broker.start(env={})
            return
        client = self.child(fault.victims[0])
        others = [relay for relay in self.relays.values() if relay is not client]
        for relay in self.relays.values():  # the other one would send
            relay.kill()
        stops = self._all_stops()
        client.start(fault.point)
        eventually(
            lambda: not client.is_running or self._all_stops() != stops, f"{client.name} reaches {fault.point}",
            POINT_S, CampaignError,
        )  # fmt: skip
        if not client.is_running:  # else an outbox has stopped, and never gets there: that is judged in the end
            await_death(client, fault.point)
            self.points_hit[point] += 1
        self._kill([*victims, *others], fault)

    def _all_stops(self) -> list[int]:
        return [self.stops(name) for name in self._databases]


def _is_stop(line: str, outbox: str) -> bool:
    try:
        found = json.loads(line)
    except ValueError:  # a kill has torn it
        return False
    return bool(found.get("event") == STOPPED and found.get("outbox") == outbox)
