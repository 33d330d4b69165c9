"""The processes of the cluster's campaign, by the names that its plan uses, and how they come to harm."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tools.crash.cluster.directory import PULSE, STREAMED, ClusterCampaignDirectory
from tools.crash.cluster.plan import BANKERS, DRIVER, MEMBERS, WORKERS
from tools.crash.directory import PARTITIONS as SQLITE_PARTITIONS
from tools.crash.directory import RESOURCE
from tools.crash.doors import OPERATOR, Doors, Grant, may, user_of
from tools.crash.faults import Fault, Victim, Victims, await_death
from tools.crash.groups.campaign import MEMBER_GRANTS
from tools.crash.groups.directory import TOPIC as GROUP_TOPIC
from tools.crash.ordered.directory import PARTITIONS as ORDERED_PARTITIONS
from tools.crash.processes import CampaignError, Child, pause
from tools.crash.spark.stream import SparkDriver, stream_grants
from tools.crash.xa.directory import SERVER_OF, XA_PARTITIONS
from txmq.testing.processes.cluster import Cluster

RESOLVER = "resolver"
ROWS_PER_BATCH = 2000


class Processes(Victims):
    """All of them; see the module's docstring.

    Attributes:
        driver: of the Spark stream, if there is one.
        worker: of transactions on the SQLite file, and of plain sends.
        banker: of transactions on the MariaDB servers.
    """

    def __init__(self, world: ClusterCampaignDirectory, cluster: Cluster, seeds: random.Random, doors: Doors) -> None:
        self._world, self._seeds, self._doors = world, seeds, doors
        self.cluster = cluster
        self.driver: SparkDriver | None = None
        self.workers = [self._child(f"w{n}", "tools.crash.worker", is_seeded=True) for n in range(WORKERS)]
        self.bankers = [self._child(f"x{n}", "tools.crash.xa.worker", is_seeded=True) for n in range(BANKERS)]
        self.members = [self._child(f"m{n}", "tools.crash.groups.member") for n in range(MEMBERS)]
        self.pulse = self._child("u", "tools.crash.cluster.pulse")
        self.ordered = self._child("o", "tools.crash.ordered.worker")
        self._rounds = self._child("g", "tools.crash.groups.producer")
        self._readers = [self._child("r", "tools.crash.reader"), self._child("rx", "tools.crash.xa.reader")]
        self._resolver = Child(RESOLVER, world.directory, self._resolver_command)

    def _child(self, name: str, module: str, *, is_seeded: bool = False) -> Child:
        def command(run_name: str) -> list[str]:
            seed = [str(self._seeds.getrandbits(32))] if is_seeded else []
            return [module, str(self._world.directory), self.address(user_of(run_name)), run_name, *seed]

        return Child(name, self._world.directory, command)

    def _resolver_command(self, _name: str) -> list[str]:
        return ["txmq.cli.main", "resolver", "--config", str(self._world.resolver_config)]

    def address(self, user: str = OPERATOR) -> str:
        """Of all brokers, for a user."""
        return self._doors.address(self.cluster.brokers, user)

    def grants(self, databases: Mapping[str, str]) -> dict[str, list[Grant]]:
        """What each process needs; ``databases``: their uuids by the names of resources."""
        shop, banks = [databases[RESOURCE]], [databases[name] for name in SERVER_OF]
        transacting = may("write", "topic", SQLITE_PARTITIONS) + may("install,settle", "resource", shop)
        banking = may("write", "topic", XA_PARTITIONS) + may("install,settle", "resource", banks)
        return {
            **{worker.name: transacting for worker in self.workers},
            **{banker.name: banking for banker in self.bankers},
            **{member.name: list(MEMBER_GRANTS) for member in self.members},
            **{reader.name: self._world.reader_grants() for reader in self._readers},
            self.pulse.name: may("write", "topic", [PULSE]),
            self.ordered.name: may("write,read", "topic", ORDERED_PARTITIONS),
            self._rounds.name: may("write", "topic", [GROUP_TOPIC]),
            RESOLVER: self._world.resolver_grants(databases.values()),
            DRIVER: stream_grants(PULSE, STREAMED),
        }

    @property
    def writers(self) -> list[Child]:
        """All clients but the group and the resolver."""
        return [*self.workers, *self.bankers, self.pulse, self._rounds, self.ordered, *self._readers]

    @property
    def children(self) -> list[Child]:
        """All clients but the Spark stream."""
        return [*self.writers, *self.members, self._resolver]

    def start_clients(self, *, has_stream: bool) -> None:
        """Begin."""
        for child in self.children:
            child.start()
        if has_stream:
            directory = self._world.directory / "stream"
            directory.mkdir()
            self.driver = SparkDriver(directory, self.address(DRIVER), PULSE, STREAMED, ROWS_PER_BATCH)
            self.driver.start()

    def kill(self) -> None:
        """All but the ensemble."""
        for victim in (*self.children, self.driver, self.cluster):
            if victim is not None:
                victim.kill()
        self._world.close()

    def refuse_dead(self) -> None:
        """Raises: CampaignError: a client has ended by itself."""
        for child in self.children:
            if not child.is_running:
                raise CampaignError(f"{child.name} ended by itself, with {child.status}; see {child.name}.log")
        if self.driver is not None and not self.driver.is_running:
            raise CampaignError(f"the Spark driver ended\n{self.driver.log_tail()}")

    # --- harm --------------------------------------------------------------------------------------------------------

    def named(self, name: str) -> Victim:
        """The process of that name."""
        if name == DRIVER:
            assert self.driver is not None, "the plan has a driver only if there is a stream"
            return self.driver
        kind, _, number = name.partition(" ")
        found: dict[str, Sequence[Victim]] = {
            "zookeeper": self.cluster.ensemble.servers, "broker": self.cluster.brokers, "database": self._world.servers,
            "worker": self.workers, "banker": self.bankers, "member": self.members, "ordered": [self.ordered],
            "resolver": [self._resolver],
        }  # fmt: skip
        return found[kind][int(number or 0)]

    def _spool(self, victims: Sequence[Victim], fault: Fault) -> None:
        """What must be spooled, or taken out of the spool, must first find no broker, and then one."""
        *servers, client = victims
        assert isinstance(client, Child), "the ordered producer"
        for server in servers:
            server.kill()
        client.kill()
        client.start(fault.point)
        pause(fault.away_s)
        for server in servers:
            server.start()
        await_death(client, fault.point)
        client.start()
