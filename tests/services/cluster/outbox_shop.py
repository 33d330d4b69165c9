"""A shop with an outbox in front of two homes."""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

import txmq
from tests.services.cluster import outbox_drainer
from tests.services.cluster.outbox_drainer import HOLDER, NAME, When
from txmq import Outcome
from txmq.cli.main import app
from txmq.runtime import crashpoints
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.fork_server import start_logged
from txmq.xa import LastResource
from txmq.xa.last_resource import drainer
from txmq.xa.last_resource.outbox import OutboxState

PARTITIONS = 2
_NOW_MS = "(julianday('now') - 2440587.5) * 86400000"
_NUMBERINGS = "SELECT id, series, number FROM txmq_marker_outbox_series WHERE series <> 'retired'"
_numbers = itertools.count(1)


class Shop:
    """Orders in a database, and a message for each, to partitions of two homes."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self.cluster, self._path = cluster, path
        self._opened: list[txmq.Client] = []
        self._connections: dict[LastResource, list[sqlite3.Connection]] = {}
        self.client, self.resource = self.process()
        eventually(lambda: len(self.client.routes.all_links()) == len(cluster.brokers), "both homes are known")
        eventually(self._is_spread, "each home has a partition")
        with closing(self.connect()) as connection:
            connection.execute("CREATE TABLE sold (place INTEGER PRIMARY KEY, pieces INTEGER)")
            connection.executemany("INSERT INTO sold VALUES (?, 0)", [(place,) for place in range(PARTITIONS)])
            connection.commit()
        self.resource.install(self.client)

    def _is_spread(self) -> bool:
        """Whether a new topic is at both homes: a broker spreads it over those that it sees led at that moment."""
        self.topic = f"orders-{next(_numbers)}"
        self.client.topics.create(self.topic, partitions=PARTITIONS)
        self.client.topics.describe(self.topic)  # so that the client knows the homes
        return len({self.home_of(place) for place in range(PARTITIONS)}) == PARTITIONS

    def connect(self) -> sqlite3.Connection:
        return outbox_drainer.connect(str(self._path))

    def process(self, when: When = "away") -> tuple[txmq.Client, LastResource]:
        """One more, as far as brokers and database can tell."""
        connections = list[sqlite3.Connection]()

        def connect() -> sqlite3.Connection:
            connections.append(self.connect())
            return connections[-1]

        client, resource = outbox_drainer.open_shop(self.cluster.address, connect, when)
        self._opened.append(client)
        self._connections[resource] = connections
        return client, resource

    def end(self, process: tuple[txmq.Client, LastResource]) -> None:
        """It is gone. The connection of its block has the file's lock, and its threads may refer to it yet."""
        client, resource = process
        for connection in self._connections[resource]:
            connection.close()
        client.close()

    def order(
        self, *places: int, process: tuple[txmq.Client, LastResource] | None = None, topic: str = "",
        behind: Callable[[], None] = lambda: None,
    ) -> txmq.Transaction:  # fmt: skip
        """One piece in each of these places, and its number as a message for the partition.

        Args:
            behind: called at the end of the block's body.
        """
        client, resource = process or (self.client, self.resource)
        with client.producer().transaction(resource, timeout=60.0) as tx:
            connection = tx.connection(resource)
            for place in places:
                connection.execute("UPDATE sold SET pieces = pieces + 1 WHERE place = ?", (place,))
                ((pieces,),) = connection.execute("SELECT pieces FROM sold WHERE place = ?", (place,)).fetchall()
                tx.send(topic or self.topic, str(pieces).encode(), key=b"k%d" % place, partition=place)
            behind()
        assert tx.outcome is Outcome.COMMITTED
        return tx

    def away(self, place: int) -> BrokerProcess:
        """The broker of a partition."""
        link = self.client.routes.link_of_home(int(self.home_of(place), 16))
        leader = link.address
        if leader is None:
            link.control.call("ping", timeout=30.0)
            leader = link.address
        assert leader is not None
        (found,) = [broker for broker in self.cluster.brokers if broker.port == leader[1]]
        return found

    def waiting(self) -> list[str]:
        """The home of each row in the outbox."""
        return [str(home) for (home,) in self.run("SELECT home FROM txmq_marker_outbox ORDER BY seq")]

    def run(self, statement: str) -> list[Any]:
        """One statement of its own."""
        with closing(self.connect()) as connection, connection:
            return connection.execute(statement).fetchall()

    def home_of(self, place: int, topic: str = "") -> str:
        """The home of a partition, as rows name it."""
        homes = self.client.routes.homes_of(topic or self.topic)
        assert homes is not None
        return f"{homes[place]:016x}"

    def state_of(self, place: int, resource: LastResource | None = None) -> OutboxState:
        """What a process knows of the outbox of a partition's home."""
        outbox = (resource or self.resource).outbox
        assert outbox is not None
        return outbox.at(self.home_of(place))

    def series(self) -> dict[str, tuple[str, int]]:
        """The numbering of each home: name, and the highest number."""
        return {f"{int(key) % (1 << 64):016x}": (str(name), int(number)) for key, name, number in self.run(_NUMBERINGS)}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Blocks go to the outbox, and nobody drains; at the end both homes are there, and all drain."""
        for place in range(PARTITIONS):
            home = self.home_of(place)
            eventually(lambda home=home: home in self.series(), "the home has its numbering")  # type: ignore[misc]
            self.state_of(place).trip()
        self.run(f"UPDATE txmq_marker_outbox_series SET holder = '{HOLDER}', until_ms = {_NOW_MS} + {drainer.LEASE_MS}")
        yield
        self.run("UPDATE txmq_marker_outbox_series SET until_ms = 0")

    def drain_until_dead(self, point: str, when: When = "away") -> None:
        """A process that has the turn drains, and is killed where ``TXMQ_CRASH`` says."""
        command = [
            sys.executable,
            "-m",
            "tests.services.cluster.outbox_drainer",
            self.cluster.address,
            str(self._path),
            when,
        ]
        log = self._path.with_name("drainer.log")
        child = start_logged(command, log, {**os.environ, crashpoints.VARIABLE: point})
        assert child.wait(60.0) == -signal.SIGKILL, log.read_text()

    def txmq(self, *words: str) -> Result:
        """A command of the operator's, about the database and both homes."""
        config = self._path.with_name("resolver.toml")
        config.write_text(
            f'bootstrap = "{self.cluster.address}"\n[[resource]]\nname = "{NAME}"\nkind = "last-resource"\n'
            f'driver = "sqlite3"\noutbox = true\nconnect = {{ database = "{self._path}" }}\n'
        )
        return CliRunner().invoke(app, ["outbox", *words, "--config", str(config)])

    def values(self, place: int) -> list[int]:
        """What readers of a partition see."""
        end = self.client.offsets(self.topic, place).end
        found = list[int]()
        while len(found) < end:
            found += [int(m.value or b"") for m in self.client.fetch(self.topic, place, len(found))]
        return found

    def check(self) -> None:
        """Each piece is a message, once, in order; nothing waits in the database or at a home."""
        for place, pieces in self.run("SELECT place, pieces FROM sold"):
            expected = list(range(1, int(pieces) + 1))
            eventually(partial(self._has, int(place), expected), f"partition {place} has its messages")
        eventually(lambda: not self.waiting(), "the outbox is empty")
        eventually(lambda: not list(self.client.transactions.list(state="in-doubt")), "nothing is in doubt")

    def _has(self, place: int, expected: list[int]) -> bool:
        return self.values(place) == expected

    def close(self) -> None:
        for client in self._opened:
            client.close()
