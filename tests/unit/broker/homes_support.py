"""Several homes in one test: nodes of one cluster, each with topics ``a`` and ``b`` of its own, driven by hand."""

from __future__ import annotations

import json
from typing import Any

from tools.images.homes import HomeNode
from tools.images.node import Answer, Client, small_settings
from tools.images.requests import batch, part
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from txmq.broker.cluster import registry_asks
from txmq.broker.state.principals import user_record
from txmq.protocol.grants import ADMINISTRATOR, ALL, Grant
from txmq.protocol.scram import ScramAttempt, peer_name, peer_password
from txmq.registry.cluster_metadata import Access, HomeEntry, TopicMap

SECRET = "b07" * 20
_GRANTS = {
    "ops": [ADMINISTRATOR],
    "shop": [Grant("write", "topic", ALL), Grant("read", "topic", ALL)],
    "mallory": [Grant("write", "topic", "b")],
}


def add_users(*homes: HomeNode, secret: str = SECRET, version: int = 1, **made: int) -> None:
    """Users ``ops``, ``shop`` and ``mallory``, as each of the homes would have read them in their registry.

    Args:
        made: by name, the version that made the user; 0: is no more.
    """
    for home in homes:
        view = home.context.cluster
        assert view is not None
        view.homes = view.homes | {other.identity.node: HomeEntry(other.identity.node, "", 1, None) for other in homes}
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
    one, two = (HomeNode(number, SimDisk(), clock, small_settings(**changes)) for number in (1, 2))
    return one, two


def open_query(home: HomeNode, driver: Client, name: str = "q") -> None:
    """Draw epoch 1 and open a query whose anchor is this home; the registry answers at once."""
    _ask_registry(home, driver, 1, "epoch", "*")
    _ask_registry(home, driver, home.state.home, "open", name, epoch=1)


def _ask_registry(home: HomeNode, driver: Client, value: int, *words: str, **extensions: int) -> None:
    opaque = driver.send("query", *words, extensions=dict(extensions), body=b"")
    home.pump()
    for ask in home.core.take_registry_asks():
        home.core.registry_answered(ask.number, registry_asks.Answer(value=value))
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
