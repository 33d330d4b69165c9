"""Only a group of completed branches waits, once and for a moment; whatever else comes takes it along."""

from __future__ import annotations

from math import inf

import pytest

from tools.images.node import Client, Node
from txmq.broker.commit.commit_delay import WAIT_S, CommitDelay

from ..support import UUID, batch, node
from ..verbs.test_decide import OTHER_UUID, decide

NOW = 100.0


def decided(*uuids: str) -> tuple[Node, Client, str]:
    """A node with one decision."""
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    assert decide(client, txid, ("a", 0, batch(b"x")), uuids=uuids).code == 200
    return made, client, txid


def test_a_group_of_completed_branches_waits_once() -> None:
    made, client, txid = decided(UUID, OTHER_UUID)
    commit_delay, group = CommitDelay(), made.core.context.group
    client.send("complete", txid, extensions={"uuid": UUID})
    client.send("complete", txid, extensions={"uuid": OTHER_UUID})
    assert commit_delay.keeps(group, NOW)
    assert commit_delay.keeps(group, NOW + WAIT_S / 2)
    assert commit_delay.until == NOW + WAIT_S
    assert not commit_delay.keeps(group, NOW + WAIT_S)
    commit_delay.end()
    assert commit_delay.keeps(group, NOW + WAIT_S)  # the next one waits again


def test_nothing_waits_where_nothing_is_queued() -> None:
    commit_delay = CommitDelay()
    assert not commit_delay.keeps(node().core.context.group, NOW)
    assert commit_delay.until == inf


@pytest.mark.parametrize("company", ["put", "rollback", "outcome", "heuristic"])
def test_whatever_else_comes_takes_it_along(company: str) -> None:
    made, client, txid = decided(UUID, OTHER_UUID)
    commit_delay, group = CommitDelay(), made.core.context.group
    client.send("complete", txid, extensions={"uuid": UUID})
    assert commit_delay.keeps(group, NOW)
    if company == "put":
        client.send("put", "a", 0, body=batch(b"y"))
    elif company == "rollback":
        client.send("rollback", made.txid(1, 2))
    elif company == "outcome":  # its answer rests on what is in the group
        client.send("outcome", txid)
    else:
        extensions = {"uuid": OTHER_UUID, "heuristic": "hazard", "reason": "r"}
        client.send("complete", txid, extensions=extensions)
    assert not commit_delay.keeps(group, NOW)
    commit_delay.end()
    assert commit_delay.until == inf
