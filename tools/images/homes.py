"""Several homes of one cluster: nodes that share a clock, and the conversations among them, driven by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from tools.images.node import SMALL, Client, Node
from tools.simulated.clock import SimClock, SimRandom
from tools.simulated.disk import SimDisk
from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.cluster.interbroker_conversation import InterbrokerConversation
from txmq.config import BrokerSettings
from txmq.protocol.answers import encode_all
from txmq.redo import directory_identity
from txmq.registry.cluster_metadata import HomeEntry, TopicMap
from txmq.xid import TxId

CLUSTER = 0xC1
_TOPICS = {"a": 2, "b": 1}


class _Identity(SimRandom):
    """Draws the numbers of ``node.json``."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(random.Random(0))
        self._numbers = list(numbers)

    def bits(self, count: int) -> int:
        return self._numbers.pop(0)


def directory(cluster: int, home: int) -> SimDisk:
    """An empty data directory of a home."""
    disk = SimDisk()
    directory_identity.load_or_create(disk, _Identity(cluster, home), SimClock())
    return disk


class HomeNode(Node):
    """A node that is one home of a cluster."""

    def __init__(
        self, number: int, disk: SimDisk, clock: SimClock, settings: BrokerSettings = SMALL, *,
        topics: Mapping[str, int] = _TOPICS,
    ) -> None:  # fmt: skip
        super().__init__(disk, settings, clock=clock, identity_seed=number, is_home=True)
        self.number = number
        if topics and not len(self.state.topics):
            client = self.connect()
            for name, partitions in topics.items():
                assert client.ask("topic", "create", name, extensions={"partitions": partitions}).code == 200
        self.identity = self.context.identity = replace(self.recovered.identity, cluster=CLUSTER)
        self.context.cluster = ClusterView()

    def txid(self, session: int, counter: int) -> str:
        """A transaction id of this home."""
        return str(TxId(CLUSTER, self.identity.node, session, counter))

    def again(self, *, checkpoint: bool = False) -> HomeNode:
        """The next life, from the journal or from a checkpoint."""
        if checkpoint:
            self.checkpoint()
        return HomeNode(self.number, self.kill(), self.clock, self.settings)


class HomeWire(Client):
    """A home's conversation with the leader of another one."""

    def __init__(self, asking: HomeNode, asked: HomeNode) -> None:
        super().__init__(asked)
        self.asking, self.asked = asking, asked
        principals = asking.state.principals
        self.conversation: InterbrokerConversation[BranchAsk] = InterbrokerConversation(
            asking.identity,
            asked.identity.node,
            asking.clock.monotonic(),
            asking.context.random,
            principals.between_brokers if principals.users else "",
        )

    def push(self) -> None:
        """Deliver what was said so far."""
        data, self.conversation.output = b"".join(self.conversation.output), []
        self.send_bytes(data)

    def take(self) -> None:
        data, self.client.out = encode_all(self.client.out), []
        answers = self.conversation.received(data, self.asking.clock.monotonic())
        if self.conversation.is_greeted:
            self.asking.core.context.branch_asks.reached(self.conversation.home)
        for answer in answers:
            self.asking.core.branch_answered(answer.ask, answer.code, answer.body)


class Cluster:
    """Homes that ask each other, as the shell does it, over connections that can be cut.

    Attributes:
        away: homes that cannot be reached.
        asks: what the homes sent, or tried to, each with the home that asked.
    """

    def __init__(self, *homes: HomeNode) -> None:
        self.homes = {home.identity.node: home for home in homes}
        self.away: set[int] = set()
        self.asks: list[tuple[int, BranchAsk]] = []
        self._wires: dict[tuple[int, int], HomeWire] = {}

    def pump(self) -> None:
        """Let everything happen that can."""
        for _ in range(20):
            for home in self.homes.values():
                home.pump()
            if not [ask for home in self.homes.values() for ask in self._send(home)]:
                return
        raise AssertionError("the homes ask each other without end")

    def talk(self) -> None:
        """The homes ask each other whatever they must; what they were sent is not committed."""
        for home in self.homes.values():
            self._send(home)

    def _send(self, home: HomeNode) -> list[object]:
        asks = home.core.take_branch_asks()
        self.asks += [(home.identity.node, ask) for ask in asks]
        for ask in asks:
            if ask.home in self.away or ask.home not in self.homes:
                home.core.home_lost(ask.home)
                continue
            wire = self._wires.get((home.identity.node, ask.home))
            if wire is not None and wire.conversation.secret != home.state.principals.between_brokers:
                del self._wires[home.identity.node, ask.home]
                wire = None
            if wire is None:
                wire = self._wires[home.identity.node, ask.home] = HomeWire(home, self.homes[ask.home])
            wire.conversation.ask(ask)
            while wire.conversation.output:
                wire.push()
                wire.asked.pump()
        return [*asks]

    def later(self, seconds: float) -> None:
        """Time passes, in ticks of a quarter of a second."""
        for _ in range(round(seconds * 4)):
            next(iter(self.homes.values())).clock.advance(0.25)
            for home in self.homes.values():
                home.core.tick(home.clock.now_ms())
            self.pump()

    def cut_off(self, home: HomeNode) -> None:
        """The connections of a home are lost, and none can be made."""
        number = home.identity.node
        self.away.add(number)
        self._lose(home)

    def come_back(self, home: HomeNode) -> None:
        """A home that was cut off can be reached; the registry tells of it only if its leader is another one."""
        self.away.discard(home.identity.node)
        told = [HomeEntry(number, "", node.state.epoch, f"h:{number}") for number, node in self.homes.items()]
        for node in self.homes.values():
            node.core.registry_changed(TopicMap(0, (), ()), told)

    def restart(self, home: HomeNode, *, checkpoint: bool = False) -> HomeNode:
        """A home dies and comes back; its connections are lost."""
        number = home.identity.node
        again = self.homes[number] = home.again(checkpoint=checkpoint)
        self._lose(home)
        return again

    def _lose(self, home: HomeNode) -> None:
        number = home.identity.node
        for pair, wire in list(self._wires.items()):
            if number in pair:
                del self._wires[pair]
                if wire.asked is home:
                    wire.asking.core.home_lost(number)
                else:
                    wire.disconnect()
