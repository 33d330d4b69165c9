"""Several homes in one test: nodes of one cluster, each with topics ``a`` and ``b`` of its own, driven by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tools.images.node import Answer, Client, Node, small_settings
from tools.images.requests import batch, part
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from txmq.broker.cluster import asks
from txmq.broker.cluster.home_conversation import HomeConversation
from txmq.broker.cluster.view import ClusterView
from txmq.broker.state.access.records import user_record
from txmq.protocol.answers import encode_all
from txmq.protocol.grants import ADMINISTRATOR, ALL, Grant
from txmq.protocol.peers import peer_name, peer_password
from txmq.protocol.scram import ScramAttempt
from txmq.registry.access import Access
from txmq.registry.port import Home, TopicMap
from txmq.xid import TxId

CLUSTER = 0xC1
SECRET = "b07" * 20
_GRANTS = {
    "ops": [ADMINISTRATOR],
    "shop": [Grant("write", "topic", ALL), Grant("read", "topic", ALL)],
    "mallory": [Grant("write", "topic", "b")],
}


class HomeNode(Node):
    """A node that is one home of a cluster."""

    def __init__(self, number: int, disk: SimDisk, clock: SimClock, **changes: object) -> None:
        super().__init__(disk, small_settings(**changes), clock=clock, identity_seed=number, is_home=True)
        self.number, self._changes = number, changes
        if not len(self.state.topics):
            client = self.connect()
            assert client.ask("topic", "create", "a", extensions={"partitions": 2}).code == 200
            assert client.ask("topic", "create", "b").code == 200
        self.identity = self.context.identity = replace(self.recovered.identity, cluster=CLUSTER)
        self.context.cluster = ClusterView()

    def txid(self, session: int, counter: int) -> str:
        """A transaction id of this home."""
        return str(TxId(CLUSTER, self.identity.node, session, counter))

    def again(self, *, checkpoint: bool = False) -> HomeNode:
        """The next life, from the journal or from a checkpoint."""
        if checkpoint:
            self.checkpoint()
        return HomeNode(self.number, self.kill(), self.clock, **self._changes)


class HomeWire(Client):
    """A home's conversation with the leader of another one."""

    def __init__(self, asking: HomeNode, asked: HomeNode) -> None:
        super().__init__(asked)
        self.asking, self.asked = asking, asked
        principals = asking.state.principals
        self.conversation = HomeConversation(
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
        asked: how many asks the homes had sent, or tried to.
    """

    def __init__(self, *homes: HomeNode) -> None:
        self.homes = {home.identity.node: home for home in homes}
        self.away: set[int] = set()
        self.asked = 0
        self._wires: dict[tuple[int, int], HomeWire] = {}

    def pump(self) -> None:
        """Let everything happen that can."""
        for _ in range(20):
            for home in self.homes.values():
                home.pump()
            if not [ask for home in self.homes.values() for ask in self._send(home)]:
                return
        raise AssertionError("the homes ask each other without end")

    def _send(self, home: HomeNode) -> list[object]:
        asks = home.core.take_branch_asks()
        self.asked += len(asks)
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
        told = [Home(number, "", node.state.epoch, f"h:{number}") for number, node in self.homes.items()]
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


def add_users(*homes: HomeNode, secret: str = SECRET, version: int = 1, **made: int) -> None:
    """Users ``ops``, ``shop`` and ``mallory``, as each of the homes would have read them in their registry.

    Args:
        made: by name, the version that made the user; 0: is no more.
    """
    for home in homes:
        view = home.context.cluster
        assert view is not None
        view.homes = view.homes | {other.identity.node: Home(other.identity.node, "", 1, None) for other in homes}
        users = {
            f"user.{name}": user_record(None, f"CN={name}", grants, made.get(name, 1))
            for name, grants in _GRANTS.items()
            if made.get(name, 1)
        }
        access = Access(version, {**users, "secret": {"mock": "5ec", "between_brokers": secret}})
        home.core.registry_changed(TopicMap(0, (), ()), list(view.homes.values()), access)
        home.pump()


def logged_in(home: HomeNode, user: str = "shop") -> Client:
    """A session of a user, logged in by certificate."""
    client = home.connect()
    client.client.certificates = frozenset({f"CN={user}"})
    assert client.ask("auth", "external", body=user.encode()).code == 200
    assert client.hello("new").code == 200
    return client


def as_peer(asking: HomeNode, asked: HomeNode, at: HomeNode | None = None, secret: str = SECRET) -> Client:
    """A connection to ``asked``, or ``at`` another home, that tries to log in as the broker of a home."""
    client = (at or asked).connect()
    password = peer_password(secret, asking.identity.node, asked.identity.node)
    attempt = ScramAttempt(peer_name(asking.identity.node), password, "nonce")
    first = client.ask("auth", "scram-sha-256", body=attempt.first()).body
    answer = client.ask("auth", "scram-sha-256", body=attempt.final(first.removesuffix(b"\n")))
    assert (answer.code == 200) is bool(client.client.user)
    return client


def two_homes(**changes: object) -> tuple[HomeNode, HomeNode]:
    """Two homes that share a clock."""
    clock = SimClock()
    one, two = (HomeNode(number, SimDisk(), clock, **changes) for number in (1, 2))
    return one, two


def open_query(home: HomeNode, driver: Client, name: str = "q") -> None:
    """Draw epoch 1 and open a query whose anchor is this home; the registry answers at once."""
    _ask_registry(home, driver, 1, "epoch", "*")
    _ask_registry(home, driver, home.state.home, "open", name, epoch=1)


def _ask_registry(home: HomeNode, driver: Client, value: int, *words: str, **extensions: int) -> None:
    opaque = driver.send("query", *words, extensions=dict(extensions), body=b"")
    home.pump()
    for ask in home.core.take_registry_asks():
        home.core.registry_answered(ask.number, asks.Answer(value=value))
    home.pump()
    assert driver.received.pop(opaque).code == 200


def prepare_branch(
    client: Client, txid: str, of: str, *contents: tuple[str, int, bytes], keys: object = 7, **extensions: Any
) -> Answer:
    """Prepare a branch of another home's transaction."""
    body = b"".join(part(topic, partition, batch(value), str(keys)) for topic, partition, value in contents)
    return client.ask("prepare", txid, "branch", extensions={"of": of, **extensions}, body=body)


def commit(client: Client, txid: str, *contents: tuple[str, int, bytes], keys: object = 7, **extensions: Any) -> Answer:
    """Commit, with messages or without."""
    body = b"".join(part(topic, partition, batch(value), str(keys)) for topic, partition, value in contents)
    return client.ask("commit", txid, extensions=extensions, body=body)


def listed(client: Client, **extensions: str) -> list[dict[str, Any]]:
    """What ``recover`` lists."""
    found: list[dict[str, Any]] = json.loads(client.ask("recover", extensions=extensions).body)["transactions"]
    return found


def live_and_redone(node: HomeNode) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state as it is, and as the next life finds it."""
    lived, redone = node.state.snapshot(), node.again().state.snapshot()
    for snapshot in (lived, redone):
        snapshot |= {"epoch": 0, "life": "", "generation_floor": 0}  # each life has its own
        snapshot["partitions"] = [[*row[:2], row[2][:2]] for row in snapshot["partitions"]]  # not when a segment began
    return lived, redone
