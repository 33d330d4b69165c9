"""Producers that close, and the client that does: what of their sessions the broker still has to know."""

from __future__ import annotations

from collections import deque

import pytest

from tests.unit.client.scripted import ScriptedBroker, ScriptedStream
from txmq.client.client import Client
from txmq.client.producer.home_senders import IDLE_MAX
from txmq.client.transport.reconnecting import END_S_MAX
from txmq.errors import DeliveryUnknownError, OtherSessionError


def test_close_of_the_client_ends_the_sessions_of_its_producers(broker: ScriptedBroker, client: Client) -> None:
    producers = [client.producer() for _ in range(3)]
    for producer in producers:
        producer.send("t", b"v", partition=0)
    assert len(broker.sequences) == 3
    client.close()
    assert (broker.sequences, broker.verbs.count("end")) == ({}, 3)


def test_sender_is_used_again_with_its_session(broker: ScriptedBroker, client: Client) -> None:
    for number in range(20):
        with client.producer() as producer:
            assert producer.send("t", b"v", partition=0).offset == number
    assert (len(broker.sequences), broker.verbs.count("end")) == (1, 0)


def test_session_ends_with_a_producer_that_no_other_follows(broker: ScriptedBroker, client: Client) -> None:
    """A hundred producers at a time left a hundred connections and sessions, as long as the client was there."""
    producers = [client.producer() for _ in range(IDLE_MAX + 5)]
    for producer in producers:
        producer.send("t", b"v", partition=0)
    for producer in producers[1:]:
        producer.close()
    assert (len(broker.sequences), broker.verbs.count("end")) == (IDLE_MAX + 1, 4)
    producers[0].close()  # its session is that of the client's transactions
    assert broker.verbs.count("end") == 4
    client.producer().send("t", b"v", partition=0)
    assert sum(not stream.is_closed for stream in broker.streams) <= IDLE_MAX + 2


def test_counter_of_the_newest_transaction_is_stated(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer()
    with producer.transaction():
        producer.send("t", b"v", partition=0)
    client.close()
    assert broker.ended_after == [1]


def test_close_waits_for_no_answer_for_long(broker: ScriptedBroker, client: Client) -> None:
    client.producer().send("t", b"v", partition=0)
    broker.hold.add("end")
    began = broker.clock.now
    client.close()
    assert began + END_S_MAX <= broker.clock.now < began + 2 * END_S_MAX


@pytest.mark.parametrize("is_refused", [False, True])
def test_close_says_nothing_again(broker: ScriptedBroker, client: Client, is_refused: bool) -> None:
    def cut(stream: ScriptedStream) -> None:
        stream.is_over = True

    client.producer().send("t", b"v", partition=0)
    broker.faults["end"] = deque([OtherSessionError("taken over") if is_refused else cut])
    client.close()
    assert broker.verbs.count("end") == 1


def test_session_without_connection_is_left_to_its_day(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer()
    producer.send("t", b"0", partition=0)
    broker.lose_answer = {"put": 1}
    broker.connections_refused = 1000
    with pytest.raises(DeliveryUnknownError):
        producer.send("t", b"1", partition=0, timeout=0.5)
    client.close()
    assert broker.verbs.count("end") == 0
