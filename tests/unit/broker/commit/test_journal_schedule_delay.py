"""Only a group of completed branches and delayable commits waits, for a moment; whatever else comes takes it along."""

from __future__ import annotations

from math import inf

import pytest

from tools.images.homes import HomeNode
from tools.images.node import Client, Node
from tools.images.requests import UUID, batch, part
from txmq.broker.commit.journal_schedule import WAIT_S, CommitDelay

from ..homes_support import prepare_branch, two_homes
from ..support import node, prepare, values
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


def prepared() -> tuple[HomeNode, HomeNode, Client]:
    """Two homes; the client of the second has two branches there, which the first one decides about."""
    here, there = two_homes()
    client = there.session()
    for counter in (1, 2):
        key = str(counter)
        txid, of = there.txid(1, counter), here.txid(1, counter)
        assert prepare_branch(client, txid, of, ("a", 0, b"x"), keys=key).code == 200
    return here, there, client


DELAYABLE: dict[str, str | int | None] = {"delayable": None}


def test_a_group_of_committed_branches_waits() -> None:
    _, there, client = prepared()
    commit_delay, group = CommitDelay(), there.core.context.group
    for counter in (1, 2):
        client.send("commit", there.txid(1, counter), extensions=DELAYABLE, body=b"")
        assert commit_delay.keeps(group, NOW)
    assert not commit_delay.keeps(group, NOW + WAIT_S)


@pytest.mark.parametrize("company", ["prepare", "commit again", "put", "local"])
def test_whatever_else_comes_takes_a_branch_commit_along(company: str) -> None:
    here, there, client = prepared()
    client.send("commit", there.txid(1, 1), extensions=DELAYABLE, body=b"")
    commit_delay, group = CommitDelay(), there.core.context.group
    assert commit_delay.keeps(group, NOW)
    if company == "prepare":
        of = here.txid(1, 3)
        client.send("prepare", there.txid(1, 3), "branch", extensions={"of": of}, body=part("a", 1, batch(b"z")))
    elif company == "commit again":  # its client waits for the places after all
        client.send("commit", there.txid(1, 1), body=b"")
    elif company == "put":
        client.send("put", "a", 0, body=batch(b"y"))
    else:
        client.send("commit", there.txid(1, 3), body=part("a", 1, batch(b"z")))
    assert not commit_delay.keeps(group, NOW)


def test_commit_of_a_branch_is_answered_when_forced() -> None:
    _, there, client = prepared()
    opaque = client.send("commit", there.txid(1, 1), body=b"")
    client.take()
    assert client.received == {}
    there.pump()
    assert client.received[opaque].text == "a 0 0 1\n"
    assert values(there) == [b"x"]


def last_resource() -> tuple[Node, Client]:
    """A node with two prepared transactions of a database, which wait for each other."""
    made = node()
    client = made.session()
    for counter in (1, 2):
        assert prepare(client, made.txid(1, counter), ("a", 0, batch(b"x")), keys="1").code == 200
    return made, client


def test_commit_that_no_caller_waits_for_is_delayed() -> None:
    made, client = last_resource()
    commit_delay, group = CommitDelay(), made.core.context.group
    client.send("commit", made.txid(1, 1), extensions=DELAYABLE, body=b"")
    assert commit_delay.keeps(group, NOW)
    client.send("commit", made.txid(1, 2), body=b"")
    assert not commit_delay.keeps(group, NOW)


def test_commits_that_waited_for_their_turn_are_delayed() -> None:
    made, client = last_resource()
    commit_delay, group = CommitDelay(), made.core.context.group
    client.send("commit", made.txid(1, 2), extensions=DELAYABLE, body=b"")
    assert not commit_delay.keeps(group, NOW)  # nothing is in it
    client.send("commit", made.txid(1, 1), extensions=DELAYABLE, body=b"")
    assert commit_delay.keeps(group, NOW)


def test_commit_sent_once_more_in_its_queue_hurries() -> None:
    made, client = last_resource()
    commit_delay, group = CommitDelay(), made.core.context.group
    client.send("commit", made.txid(1, 2), extensions=DELAYABLE, body=b"")
    client.send("commit", made.txid(1, 2), body=b"")
    client.send("commit", made.txid(1, 1), extensions=DELAYABLE, body=b"")
    assert not commit_delay.keeps(group, NOW)
