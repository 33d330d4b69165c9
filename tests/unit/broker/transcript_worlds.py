"""Which brokers a transcript plays: one alone, homes that ask each other, or homes that share a registry.

Invariants
    * A request is carried out at its home alone: what homes ask each other goes on while time passes.
    * What the homes ask of a registry is done at once, unless the transcript holds it; an ask of a former life is
      answered to nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tools.images.homes import CLUSTER, Cluster, HomeNode
from tools.images.node import Node, small_settings
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from tools.simulated.embedded_registry import EmbeddedRegistry
from tools.simulated.zookeeper import SimZooKeeper
from txmq.broker.cluster.registry_asks import Ask, Result, carry_out
from txmq.errors import RegistryAwayError, TxmqError

from .group_support import pass_time
from .homes_support import SECRET, add_users
from .support import node, restarted
from .verbs.access.access_support import keys, operator
from .verbs.support import A, B, Broker, zookeeper


class Alone:
    """One broker; its home has no name."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.nodes: dict[str, Node] = {"": node(**settings)}

    @property
    def has_names(self) -> bool:
        """Whether connections name the home that they are to."""
        return "" not in self.nodes

    def pump(self) -> None:
        """Commit what was sent."""
        for each in self.nodes.values():
            each.pump()

    def pass_time(self, seconds: float) -> None:
        """Timers run all the while."""
        for each in self.nodes.values():
            pass_time(each, seconds)

    def restart(self, home: str, *, is_led: bool = True) -> None:
        """The process is killed; the next one recovers."""
        del is_led
        self.nodes[home] = restarted(self.nodes[home])

    def add_users(self, names: Sequence[str], password: str = "pencil") -> None:
        """All homes have these users with a password; the first one is an administrator."""
        made = next(iter(self.nodes.values()))
        for name in names:
            client = operator(made, names[0]) if made.state.principals.users else made.connect()
            body = json.dumps({"keys": keys(password), "certificate": None}).encode()
            opaque = client.send("user", "add", name, body=body)
            self.pump()
            assert client.received[opaque].code == 200
            client.disconnect()


class Homes(Alone):
    """Homes of one cluster, each with topics ``a`` and ``b`` of its own, and a registry for its queries."""

    def __init__(self, names: Sequence[str], settings: Mapping[str, object]) -> None:
        clock = SimClock()
        self.homes = {
            name: HomeNode(number, SimDisk(), clock, small_settings(**settings)) for number, name in enumerate(names, 1)
        }
        self.nodes = {**self.homes}
        self.cluster = Cluster(*self.homes.values())
        self._registries = {name: EmbeddedRegistry(CLUSTER, home.identity.node) for name, home in self.homes.items()}

    def pump(self) -> None:
        """Commit what was sent; the registry answers."""
        for name, home in self.homes.items():
            home.pump()
            for ask in home.core.take_registry_asks():
                home.core.registry_answered(ask.number, carry_out(self._registries[name], home.identity.node, ask))
                home.pump()

    def pass_time(self, seconds: float) -> None:
        """Timers run all the while, and the homes ask each other."""
        self.cluster.later(seconds)

    def restart(self, home: str, *, is_led: bool = True) -> None:
        """A home dies and comes back; its connections are lost."""
        del is_led
        self.nodes[home] = self.homes[home] = self.cluster.restart(self.homes[home])

    def hear_of_users(self, homes: Sequence[str], fields: Mapping[str, str]) -> None:
        """See ``homes_support.add_users``."""
        made = {name: int(value) for name, value in fields.items()}
        version = made.pop("version", 1)
        add_users(*(self.homes[home] for home in homes), secret=SECRET, version=version, **made)


class Registered(Alone):
    """Brokers that share a registry, each of which leads a home.

    Attributes:
        holding: homes whose asks are kept, and done when the transcript says so.
        held: the asks that are kept, with their homes, in their order.
    """

    def __init__(self, names: Sequence[str], settings: Mapping[str, object]) -> None:
        self.holding: set[str] = set()
        self.held: list[tuple[str, Broker, Ask]] = []
        self._results: dict[int, Result] = {}
        ensemble = SimZooKeeper()
        homes = (A, B, B + 0x10)
        self.brokers = {
            name: Broker(zookeeper(ensemble), home, settings=settings).lead()
            for name, home in zip(names, homes, strict=False)
        }
        self.nodes = {name: broker.node for name, broker in self.brokers.items()}
        self.refresh(names)

    def refresh(self, names: Sequence[str]) -> None:
        """Homes hear what the registry has."""
        for name in names:
            broker = self.brokers[name]
            registry = broker.registry
            broker.node.core.registry_changed(registry.topics(), registry.homes(), registry.access())
        self.pump()

    def pump(self) -> None:
        """Commit what was sent; the registry does what it is asked, unless that is held."""
        for name, broker in self.brokers.items():
            while asks := broker.asks():
                self.held += [(name, broker, ask) for ask in asks]
                if name not in self.holding:
                    for _ in asks:
                        self.answer(len(self.held))

    def collect(self) -> None:
        """What is asked by now, and nothing is committed for it, is held."""
        for name in sorted(self.holding):
            broker = self.brokers[name]
            self.held += [(name, broker, ask) for ask in broker.node.core.take_registry_asks()]

    def answer_all(self) -> None:
        """Everything that is held is done and answered, and nothing is held from now on."""
        self.holding.clear()
        while self.held:
            self.answer(1)

    def perform(self, place: int) -> None:
        """The registry does it; its answer is under way."""
        _, broker, ask = self.held[place - 1]
        try:
            self._results[id(ask)] = carry_out(broker.registry, broker.home, ask)
        except TxmqError as error:
            self._results[id(ask)] = error

    def fail(self, place: int) -> None:
        """The registry does not answer."""
        self._results[id(self.held[place - 1][2])] = RegistryAwayError("planned")
        self.answer(place)

    def answer(self, place: int) -> None:
        """The answer arrives."""
        self.deliver(place)
        self.pump()

    def deliver(self, place: int) -> None:
        """The answer arrives, and nothing is committed yet."""
        name, broker, ask = self.held[place - 1]
        if id(ask) not in self._results:
            self.perform(place)
        del self.held[place - 1]
        result = self._results.pop(id(ask))
        if self.brokers[name] is broker:
            broker.node.core.registry_answered(ask.number, result)
            broker.node.flush()

    def restart(self, home: str, *, is_led: bool = True) -> None:
        """The process is killed; the next one leads, or waits for the registry."""
        again = self.brokers[home] = self.brokers[home].again()
        self.nodes[home] = again.node
        self.held = [held for held in self.held if held[0] != home]
        if is_led:
            self.lead(home)

    def add_users(self, names: Sequence[str], password: str = "pencil") -> None:
        """See ``Alone``."""
        super().add_users(names, password)
        self.refresh([*self.brokers])

    def lead(self, home: str) -> None:
        """A broker that waits leads its home."""
        self.brokers[home].lead()
        self.pump()
