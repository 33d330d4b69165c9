"""Brokers that share a registry: each one a node on a simulated disk, and a worker that asks when it is told to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.images.homes import directory
from tools.images.node import Client, Node, small_settings
from tools.images.requests import batch
from tools.simulated.disk import SimDisk
from tools.simulated.embedded_registry import EmbeddedRegistry
from tools.simulated.zookeeper import SimZooKeeper
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.cluster.registry_asks import Ask, carry_out
from txmq.errors import TxmqError
from txmq.redo import entries, inspect
from txmq.registry.cluster_metadata import Candidate, Leadership, Registry, Standing, TopicMap
from txmq.registry.zookeeper.registry import ZooKeeperRegistry

CLUSTER, A, B = 0xC1A5, 0xA0, 0xB0


class Broker:
    """A broker with a registry. ``start`` counts the starts."""

    def __init__(
        self, registry: Registry, home: int, disk: SimDisk | None = None, start: int = 1, *,
        settings: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.registry, self.home, self.start, self.changes = registry, home, start, settings or {}
        self.view = ClusterView("zk://h1:2181/prod")
        disk = disk if disk is not None else directory(CLUSTER, home)
        small = small_settings(broker_name=f"broker-{home:x}", **self.changes)
        self.node = Node(disk, small, is_member=True, cluster=self.view, identity_seed=start)
        self.leadership: Leadership
        self.client: Client = self.node.connect()

    def draw(self, cluster: int = CLUSTER) -> Leadership:
        """Join, and draw the next epoch."""
        registration, journal = self.node.state.registration, self.node.store.journal
        self.registry.join(cluster, Standing.MEMBER if registration.epoch else Standing.USED)
        former, lock = frozenset(self.node.recovered.make_known()), f"lock of {self.home}"
        name, address = f"broker-{self.home:x}", f"10.0.0.{self.home}:8123"
        self.leadership = self.registry.lead(
            Candidate(self.home, name, address, self.node.recovered.identity.start, former, journal.epoch, lock)
        )
        return self.leadership

    def lead(self) -> Broker:
        """Lead the home, and serve."""
        self.draw()
        self.begin()
        self.registry.announce(self.leadership)
        self.refresh()
        return self

    def begin(self, topic_map: TopicMap | None = None) -> None:
        """The epoch is there, and a map: as a rule the registry's."""
        topics = topic_map or self.registry.topics()
        self.node.lead(self.leadership.epoch, topics, self.registry.homes(), self.registry.access())
        self.node.pump()

    def refresh(self) -> None:
        """The registry tells of a change."""
        self.node.core.registry_changed(self.registry.topics(), self.registry.homes(), self.registry.access())
        self.work()

    def asks(self) -> list[Ask]:
        """What the registry must be asked."""
        self.node.pump()
        return self.node.core.take_registry_asks()

    def carry_out(self, ask: Ask) -> None:
        """Ask the registry; the answer comes back."""
        try:
            result = carry_out(self.registry, self.home, ask)
        except TxmqError as error:
            self.node.core.registry_answered(ask.number, error)
        else:
            self.node.core.registry_answered(ask.number, result)
        self.node.pump()

    def carry_out_unheard(self, ask: Ask) -> None:
        """Ask the registry; the answer is lost."""
        carry_out(self.registry, self.home, ask)

    def work(self) -> None:
        """Carry out all asks."""
        while asks := self.asks():
            for ask in asks:
                self.carry_out(ask)

    def again(self, disk: SimDisk | None = None) -> Broker:
        """The next life of the process, which was killed; it does not lead yet."""
        disk = disk or self.node.kill()
        return Broker(self.registry, self.home, disk, self.start + 1, settings=self.changes)

    def ask(self, verb: str, *words: str | int, body: bytes | None = None, **extensions: str | int) -> tuple[int, str]:
        """Ask over the one connection, and let the registry's worker work."""
        told: Mapping[str, str | int | None] = {**extensions}
        opaque = self.client.send(verb, *words, extensions=told, body=body)
        self.work()
        answer = self.client.received.pop(opaque)
        return answer.code, answer.text

    def read(self, verb: str, *words: str | int, **extensions: str | int) -> dict[str, Any]:
        """The same, for an answer in JSON."""
        code, text = self.ask(verb, *words, body=None, **extensions)
        assert code == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def journaled(self) -> list[str]:
        """The kinds of all entries of the journal."""
        records = inspect.dump(self.node.disk)
        return [entries.NAMES[kind] for record in records for kind, _, _ in entries.split(record.payload)]


def alone() -> Broker:
    """One broker with the embedded registry."""
    return Broker(EmbeddedRegistry(CLUSTER, A), A)


def zookeeper(ensemble: SimZooKeeper) -> ZooKeeperRegistry:
    """The registry in ZooKeeper, over a session of its own."""
    return ZooKeeperRegistry(ensemble.open(), "/prod")


def pair() -> tuple[Broker, Broker]:
    """Two brokers that lead their homes, and know each other."""
    ensemble = SimZooKeeper()
    one, two = (Broker(zookeeper(ensemble), home).lead() for home in (A, B))
    one.refresh()
    return one, two


def puts(broker: Broker, topic: str, count: int) -> list[int]:
    """The codes of one put into each partition."""
    return [broker.ask("put", topic, number, body=batch(b"%d" % number))[0] for number in range(count)]


def with_messages() -> tuple[Broker, Broker]:
    """Two brokers with a topic, and a message in each of its partitions."""
    one, two = pair()
    one.ask("topic", "create", "a", partitions=2)
    one.ask("topic", "create", "keep")
    two.refresh()
    assert puts(one, "a", 1) == puts(two, "a", 2)[1:] == [200]
    return one, two
