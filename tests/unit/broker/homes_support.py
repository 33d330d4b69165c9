"""Several homes in one test: nodes of one cluster, each with topics ``a`` and ``b`` of its own, driven by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tools.images.node import Answer, Client, Node, small_settings
from txmq.broker.cluster.view import ClusterView
from txmq.testing.simulated.clock import SimClock
from txmq.testing.simulated.disk import SimDisk
from txmq.xid import TxId

from .support import batch, part

CLUSTER = 0xC1


class HomeNode(Node):
    """A node that is one home of a cluster."""

    def __init__(self, number: int, disk: SimDisk, clock: SimClock, **changes: object) -> None:
        super().__init__(disk, small_settings(**changes), clock=clock, identity_seed=number)
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


def two_homes(**changes: object) -> tuple[HomeNode, HomeNode]:
    """Two homes that share a clock."""
    clock = SimClock()
    one, two = (HomeNode(number, SimDisk(), clock, **changes) for number in (1, 2))
    return one, two


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
        snapshot["epoch"] = 0  # each life has its own
        snapshot["partitions"] = [[*row[:2], row[2][:2]] for row in snapshot["partitions"]]  # not when a segment began
    return lived, redone
