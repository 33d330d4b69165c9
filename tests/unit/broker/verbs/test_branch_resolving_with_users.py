"""Branches between homes that have users: brokers prove to each other that they are of one cluster, and which homes."""

from __future__ import annotations

import json
from base64 import b64encode

import pytest

from tools.images.homes import Cluster, HomeNode, HomeWire
from tools.simulated.disk import SimDisk
from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.cluster.interbroker_conversation import InterbrokerConversation
from txmq.broker.state.refusals import FREE_MAX
from txmq.errors import RemoteProtocolError
from txmq.protocol.answers import result
from txmq.protocol.scram import ScramAttempt

from ..homes_support import SECRET, add_users, as_peer, logged_in, prepare_branch, two_homes


def made() -> tuple[Cluster, HomeNode, HomeNode]:
    """Two homes with users that ask each other."""
    here, there = two_homes()
    add_users(here, there)
    return Cluster(here, there), here, there


def test_conversation_from_before_there_were_users_is_begun_anew() -> None:
    here, there = two_homes()
    cluster = Cluster(here, there)
    owner = there.session()
    prepare_branch(owner, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    deciding = here.session()
    cluster.later(2)
    [wire] = cluster._wires.values()
    assert wire.conversation.is_greeted
    add_users(here, there)
    wire.conversation.ask(BranchAsk(99, here.identity.node, "outcome", here.txid(1, 1), {}))
    with pytest.raises(RemoteProtocolError, match="has users, of whom this home has yet to hear"):
        _converse(wire)
    deciding.disconnect()
    cluster.later(10)
    assert not there.state.unsettled


def test_nobody_else_logs_in_as_a_broker() -> None:
    _cluster, here, there = made()
    stranger = HomeNode(3, SimDisk(), here.clock)
    assert as_peer(here, there).client.user
    for client in (
        as_peer(here, there, secret="guessed"),
        as_peer(here, there, at=here),  # what one home was told is relayed to another
        as_peer(stranger, there),  # a home that the registry does not know
    ):
        assert not client.client.user
        assert client.ask("outcome", there.txid(1, 1)).code == 401
    assert logged_in(there)  # nobody else at the address waits for that


def test_broker_waits_for_no_failed_logins_of_its_address() -> None:
    """A client on its machine has a wrong password, and tries for ever."""
    _cluster, here, there = made()
    for _ in range(FREE_MAX + 1):
        client, attempt = there.connect(), ScramAttempt("shop", "wrong", "nonce")
        first = client.ask("auth", "scram-sha-256", body=attempt.first())
        client.send("auth", "scram-sha-256", body=attempt.final(first.body.removesuffix(b"\n")))
    assert client.client.waiting is not None
    assert as_peer(here, there).client.user


@pytest.mark.parametrize("theirs", ["another", ""])
def test_nothing_is_asked_of_what_does_not_know_the_secret(theirs: str) -> None:
    here, there = two_homes()
    add_users(here)
    if theirs:
        add_users(there, here, secret=theirs)
    conversation = _begun(here, there)
    conversation.ask(BranchAsk(7, there.identity.node, "outcome", "t", {}))
    wire = HomeWire(here, there)
    wire.conversation = conversation
    with pytest.raises(RemoteProtocolError, match=r"takes no login of this broker: 40[01]"):
        _converse(wire)
    assert not conversation.is_greeted


def test_what_answers_a_login_without_the_secret_is_not_believed() -> None:
    here, there = two_homes()
    conversation = _begun(here, there)
    told = json.dumps({"home": f"{there.identity.node:016x}", "cluster": f"{here.identity.cluster:016x}"})
    conversation.received(result(200, b"hello", told.encode()), 0.0)
    conversation.received(result(200, b"auth", _server_first(conversation)), 0.0)
    conversation.output.clear()
    with pytest.raises(RemoteProtocolError, match="does not know the cluster's secret"):
        conversation.received(result(200, b"auth", b"v=" + b64encode(bytes(32))), 0.0)
    assert not conversation.output


def _begun(here: HomeNode, there: HomeNode) -> InterbrokerConversation[BranchAsk]:
    return InterbrokerConversation(here.identity, there.identity.node, 0.0, here.context.random, SECRET)


def _server_first(conversation: InterbrokerConversation[BranchAsk]) -> bytes:
    """Of an impostor that makes a salt up."""
    said = b"".join(conversation.output)
    nonce = said.rpartition(b"r=")[2]
    return b"r=" + nonce + b"more,s=" + b64encode(bytes(16)) + b",i=4096"


def _converse(wire: HomeWire) -> None:
    while wire.conversation.output:
        wire.push()
        wire.asked.pump()
