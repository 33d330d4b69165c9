"""A conversation with another home: nothing is asked of a stranger, and silence ends it."""

from __future__ import annotations

import json
import random

import pytest

from tools.simulated.clock import SimRandom
from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.cluster.interbroker_conversation import SILENCE_S_MAX, HomeAnswer, InterbrokerConversation
from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.errors import ConnectionLostError, RemoteProtocolError
from txmq.protocol.answers import result

OWN = BrokerIdentity(0xC1, 0xA, "own")
HOME = 0xB
ASK = BranchAsk(7, HOME, "outcome", "t", {"branch": "b", "owner": None})


def greeting(home: int = HOME, cluster: int = OWN.cluster) -> bytes:
    return result(200, b"hello", json.dumps({"home": f"{home:016x}", "cluster": f"{cluster:016x}"}).encode())


def said(conversation: InterbrokerConversation[BranchAsk]) -> bytes:
    data, conversation.output = b"".join(conversation.output), []
    return data


def begun() -> InterbrokerConversation[BranchAsk]:
    return InterbrokerConversation(OWN, HOME, 0.0, SimRandom(random.Random(1)))


def greeted() -> InterbrokerConversation[BranchAsk]:
    conversation = begun()
    said(conversation)
    assert conversation.received(greeting(), 0.0) == []
    return conversation


def test_asks_wait_for_the_greeting() -> None:
    conversation = begun()
    conversation.ask(ASK)
    assert said(conversation) == b"hello 1 home-000000000000000a home=000000000000000b hello\r\n"
    conversation.received(greeting(), 0.0)
    assert said(conversation) == b"outcome t branch=b owner 7\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        greeting(home=0xDEAD),
        greeting(cluster=0xDEAD),
        result(409, b"hello", b"not-owner leader=x home=y"),
        result(200, b"hello", b"[]"),
        result(200, b"hello", b"no json"),
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_nothing_is_asked_of_another_home_at_the_address(answer: bytes) -> None:
    conversation = begun()
    conversation.ask(ASK)
    said(conversation)
    with pytest.raises(RemoteProtocolError):
        conversation.received(answer, 0.0)
    assert said(conversation) == b""


def test_answers_come_with_their_asks_in_any_order() -> None:
    conversation = greeted()
    other = ASK._replace(number=8, verb="complete", extensions={"branch": "b"})
    conversation.ask(ASK)
    conversation.ask(other)
    data = result(410, b"8", b"fenced gone") + result(200, b"7", b"committed\n")
    answers = [answer for at in range(len(data)) for answer in conversation.received(data[at : at + 1], 0.0)]
    assert answers == [HomeAnswer(other, 410, b"fenced gone\n"), HomeAnswer(ASK, 200, b"committed\n")]


def test_answer_that_was_not_asked_ends_the_conversation() -> None:
    with pytest.raises(RemoteProtocolError, match="not asked"):
        greeted().received(result(200, b"9", b""), 0.0)


def test_answer_that_is_too_long_ends_the_conversation() -> None:
    conversation = greeted()
    conversation.ask(ASK)
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        conversation.received(b"result 200 9999999 7\r\n", 0.0)


@pytest.mark.parametrize("is_greeted", [False, True])
def test_silence_ends_the_conversation(is_greeted: bool) -> None:
    conversation = greeted() if is_greeted else begun()
    conversation.ask(ASK)
    conversation.tick(1.0)
    conversation.tick(SILENCE_S_MAX)
    with pytest.raises(ConnectionLostError):
        conversation.tick(2 + SILENCE_S_MAX)


def test_late_answer_is_no_silence() -> None:
    conversation = greeted()
    conversation.ask(ASK)
    said(conversation)
    for second in range(1, 60):
        conversation.tick(float(second))
        assert said(conversation) == b"ping ping\r\n"
        conversation.received(result(200, b"ping", b"pong"), float(second))


def test_conversation_without_asks_may_be_silent() -> None:
    conversation = greeted()
    for second in range(60):
        conversation.tick(float(second))
    assert said(conversation) == b""
    conversation.ask(ASK)
    conversation.tick(60.0)
    conversation.tick(60.0 + SILENCE_S_MAX)
    with pytest.raises(ConnectionLostError):
        conversation.tick(61.0 + SILENCE_S_MAX)
