"""The next answer of ``browse``, asked for before it is needed, on a scripted broker."""

from __future__ import annotations

from collections import deque
from typing import cast

import pytest

from tests.unit.client.scripted import Fault, ScriptedBroker, ScriptedStream
from txmq.client.client import Client
from txmq.errors import OffsetOutOfRangeError, RequestTimeoutError
from txmq.log.batch import HEADER
from txmq.model import Message
from txmq.protocol import answers
from txmq.protocol.requests import Request

COUNT = 10
VALUES = [b"%d" % number for number in range(COUNT)]
SERVED = cast("Fault", None)


@pytest.fixture
def filled(broker: ScriptedBroker, client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Ten messages in partition 0, of which each answer brings one."""
    producer = client.producer()
    for value in VALUES:
        producer.send("t", value, partition=0)

    def get(_stream: ScriptedStream, request: Request) -> bytes:
        log, position, offset = broker.logs[0], 0, int(request[1][2])
        for _ in range(offset):
            position += 12 + HEADER.unpack_from(log, position)[1]
        body = bytes(log[position : position + 12 + HEADER.unpack_from(log, position)[1]])
        return answers.value_header(len(body), request[4]) + body

    monkeypatch.setattr(broker, "_get", get)
    broker.verbs.clear()
    return client


def _values(messages: list[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


def test_next_answer_is_asked_for_once_caller_has_come_back(broker: ScriptedBroker, filled: Client) -> None:
    browsing = filled.browse("t")
    asked = []
    for value in VALUES:
        assert next(browsing).value == value
        asked.append(broker.verbs.count("get"))
    assert list(browsing) == []
    assert asked == [1, 3, 4, 5, 6, 7, 8, 9, 10, 10]


@pytest.mark.parametrize("end", ["lost", "refused"])
def test_answer_that_fails_ahead_is_asked_for_again(broker: ScriptedBroker, filled: Client, end: str) -> None:
    def cut(stream: ScriptedStream) -> None:
        stream.is_over = True

    broker.faults["get"] = deque([SERVED, SERVED, cut if end == "lost" else OffsetOutOfRangeError("for now")])
    assert _values(list(filled.browse("t"))) == VALUES
    assert broker.verbs.count("get") == COUNT + 1


def test_broker_that_does_not_answer_ahead_is_told_in_time(broker: ScriptedBroker, filled: Client) -> None:
    broker.faults["get"] = deque([SERVED, SERVED, lambda _stream: None])
    browsing, begun = filled.browse("t"), broker.clock.now
    assert _values([next(browsing), next(browsing)]) == VALUES[:2]
    with pytest.raises(RequestTimeoutError):
        next(browsing)
    assert broker.clock.now - begun < 6.0


def test_read_that_is_left_leaves_the_connection_to_others(broker: ScriptedBroker, filled: Client) -> None:
    browsing, kept = filled.browse("t"), filled.browse("t")
    assert _values([next(browsing), next(browsing)]) == VALUES[:2]
    del browsing
    assert _values(list(kept)) == VALUES
    assert _values(filled.fetch("t", 0, 3)) == VALUES[3:4]
    assert len(broker.streams) == 2


def test_messages_are_those_of_the_offset_whoever_asked_ahead(broker: ScriptedBroker, filled: Client) -> None:
    browsing = filled.browse("t")
    assert _values([next(browsing), next(browsing)]) == VALUES[:2]
    assert _values(filled.fetch("t", 0, 7)) == VALUES[7:8]  # reads the answer that waits, and its own
    assert _values(list(browsing)) == VALUES[2:]
