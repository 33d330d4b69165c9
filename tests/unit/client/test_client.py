"""Sending one by one, in the background, and in transactions, on a scripted broker."""

from __future__ import annotations

from collections import deque

import pytest

import txmq
from tests.unit.client.scripted import ScriptedBroker
from txmq.client.client import Client
from txmq.client.producer import sender
from txmq.client.transaction.current import current_transaction
from txmq.errors import (
    ClosedError,
    ConfigError,
    ConnectionLostError,
    DeliveryUnknownError,
    DiskFullError,
    ForbiddenError,
    LocalProtocolError,
    OtherSessionError,
    OverloadedError,
    RequestTimeoutError,
    TooLargeError,
    TopicClosedError,
    TransactionStateError,
    UnknownTopicError,
)
from txmq.model import Message, SendResult, SendStatus
from txmq.runtime.threads import Forked
from txmq.testing.eventually import eventually


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No background thread, which would turn the clock while it waits."""
    monkeypatch.setattr(sender, "start_daemon", lambda _name, _run: None)


# --- send ------------------------------------------------------------------------------------------------------------


def test_a_message_is_sent_and_read_back_whole(client: Client) -> None:
    result = client.producer().send("t", b"v", key=b"k", headers={"h": b"x"}, tag="T", partition=1)
    assert result == SendResult("t", 1, 0, SendStatus.ACKNOWLEDGED)
    [message] = client.fetch("t", 1, 0)
    assert (message.value, message.key, message.headers, message.tag) == (b"v", b"k", {"h": b"x"}, "T")
    assert message.timestamp_ms == client.clock.now_ms()


def test_lost_answer_is_asked_for_again_and_stores_nothing_twice(broker: ScriptedBroker, client: Client) -> None:
    broker.lose_answer = {"put": 2}
    producer = client.producer()
    assert [producer.send("t", b"%d" % n, partition=0).offset for n in range(3)] == [0, 1, 2]
    assert values(client.fetch("t", 0, 0)) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("verb", ["hello", "put"])
def test_who_is_refused_again_and_again_asks_now_and_then(client: Client, broker: ScriptedBroker, verb: str) -> None:
    """A session that the broker does not give, or a connection that it does not take a batch from."""
    error = OverloadedError("sessions_max") if verb == "hello" else OtherSessionError("not this connection's session")
    producer = client.producer()
    if verb == "put":
        producer.send("t", b"0", partition=0)
    client.topics.refresh("t")
    broker.verbs.clear()
    broker.faults[verb] = deque([error] * 1000)
    with pytest.raises((OverloadedError, RequestTimeoutError, ConnectionLostError, DeliveryUnknownError)):
        producer.send("t", b"1", partition=0, timeout=2.0)
    assert 2 <= broker.verbs.count(verb) <= 20
    broker.faults.clear()
    assert producer.send("t", b"2", partition=0, timeout=5.0).is_success


def test_batch_refused_after_a_takeover_goes_out_on_another_connection(client: Client, broker: ScriptedBroker) -> None:
    producer = client.producer()
    producer.send("t", b"0", partition=0)
    broker.faults["put"] = deque([OtherSessionError("not this connection's session")])
    assert producer.send("t", b"1", partition=0).offset == 1
    assert values(client.fetch("t", 0, 0)) == [b"0", b"1"]
    assert (
        len({id(stream) for stream in broker.streams if not stream.is_over}) == 2
    )  # the sender's new one, the reader's


def test_missing_grant_is_told_at_once_and_costs_no_connection(client: Client, broker: ScriptedBroker) -> None:
    producer = client.producer()
    producer.send("t", b"0", partition=0)
    streams = len(broker.streams)
    broker.faults["put"] = deque([ForbiddenError("shop may not write topic t")])
    with pytest.raises(ForbiddenError, match="may not write"):
        producer.send("t", b"1", partition=0, timeout=600.0)
    assert producer.send("t", b"2", partition=0).offset == 1
    assert len(broker.streams) == streams


@pytest.mark.parametrize("error", [DiskFullError("full"), OverloadedError("busy")])
def test_a_refusal_that_may_pass_is_tried_again(
    broker: ScriptedBroker, client: Client, error: txmq.BrokerError
) -> None:
    broker.faults["put"] = deque([error, error])
    assert client.producer().send("t", b"v", partition=0).offset == 0


def test_a_refusal_that_lasts_is_raised_when_time_is_up(broker: ScriptedBroker, client: Client) -> None:
    broker.faults["put"] = deque([DiskFullError("full")] * 1000)
    with pytest.raises(DiskFullError):
        client.producer().send("t", b"v", timeout=2.0)


def test_refusal_for_good_is_raised_and_next_message_takes_number(broker: ScriptedBroker, client: Client) -> None:
    broker.faults["put"] = deque([TopicClosedError("closed")])
    producer = client.producer()
    with pytest.raises(TopicClosedError):
        producer.send("t", b"v", partition=0)
    assert producer.send("t", b"v", partition=0).offset == 0


def test_broker_that_cannot_be_reached_is_said_with_reason(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer()
    producer.send("t", b"v")
    broker.cut()
    broker.clock.now += 1
    broker.connections_refused = 100
    with pytest.raises(ConnectionLostError, match="nothing was stored: cannot connect"):
        producer.send("t", b"v", timeout=1.0)


def test_a_broker_that_does_not_answer_leaves_the_delivery_unknown(broker: ScriptedBroker, client: Client) -> None:
    broker.hold = {"put"}
    with pytest.raises(DeliveryUnknownError):
        client.producer().send("t", b"v", timeout=1.0)


def test_a_session_lost_on_the_way_leaves_the_delivery_unknown(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer()
    producer.send("t", b"1", partition=0)
    broker.fenced.add(1)
    broker.lose_answer = {"put": 1}
    with pytest.raises(DeliveryUnknownError):
        producer.send("t", b"2", partition=0)
    assert producer.send("t", b"3", partition=0).offset == 2


def test_the_topic_is_looked_up_again_once_it_was_unknown(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer()
    broker.faults["put"] = deque([UnknownTopicError("deleted")])
    with pytest.raises(UnknownTopicError):
        producer.send("t", b"v")
    before = broker.verbs.count("meta")
    producer.send("t", b"v")
    assert broker.verbs.count("meta") == before + 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"topic": "nope", "value": b""}, UnknownTopicError),
        ({"topic": "a b", "value": b""}, LocalProtocolError),
        ({"topic": 7, "value": b""}, TypeError),
        ({"topic": "t", "value": "text"}, TypeError),
        ({"topic": "t", "value": None}, TypeError),
        ({"topic": "t", "value": b"", "key": "text"}, TypeError),
        ({"topic": "t", "value": b"", "headers": {"h": "text"}}, TypeError),
        ({"topic": "t", "value": b"", "headers": {"txmq.txid": b"x"}}, LocalProtocolError),
        ({"topic": "t", "value": b"", "headers": {"tag": b"x"}}, LocalProtocolError),
        ({"topic": "t", "value": b"", "partition": 2}, LocalProtocolError),
        ({"topic": "t", "value": b"", "partition": "1"}, TypeError),
        ({"topic": "t", "value": b"x" * (17 << 20)}, TooLargeError),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    broker: ScriptedBroker, client: Client, arguments: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.producer().send(**arguments)  # type: ignore[arg-type]
    assert "put" not in broker.verbs


def test_the_brokers_own_limit_counts_once_it_is_known(client: Client) -> None:
    producer = client.producer()
    producer.send("t", b"v")
    with pytest.raises(TooLargeError):  # the scripted broker takes 1 MiB
        producer.send("t", b"x" * (1 << 20))


def test_a_selector_of_ones_own_chooses(client: Client) -> None:
    class ByTag:
        def select(self, topic: str, partitions: int, message: Message) -> int:
            return {"a": 0, "b": 1, "c": 2}[message.tag or ""]

    producer = client.producer(partition_selector=ByTag())
    assert [producer.send("t", b"v", tag=tag).partition for tag in "ab"] == [0, 1]
    with pytest.raises(LocalProtocolError):
        producer.send("t", b"v", tag="c")


# --- send_async, flush, close ----------------------------------------------------------------------------------------


def test_futures_are_done_after_flush_in_order(client: Client) -> None:
    producer = client.producer()
    futures = [producer.send_async("t", b"%d" % number, partition=0) for number in range(100)]
    producer.flush()
    assert [future.result(10).offset for future in futures] == list(range(100))
    assert values(client.fetch("t", 0, 0)) == [b"%d" % number for number in range(100)]


def test_a_futures_callback_may_send_and_wait(client: Client) -> None:
    producer = client.producer()
    answers: list[SendResult] = []
    future = producer.send_async("t", b"first", partition=0)
    future.add_done_callback(lambda _: answers.append(producer.send("t", b"second", partition=0)))
    future.result(10)
    client.producer().send("t", b"elsewhere", partition=1)
    eventually(lambda: bool(answers), "the callback has run")
    assert [result.offset for result in answers] == [1]


def test_a_failed_future_holds_what_send_would_raise(broker: ScriptedBroker, client: Client) -> None:
    broker.faults["put"] = deque([TopicClosedError("closed")])
    future = client.producer().send_async("t", b"v")
    with pytest.raises(TopicClosedError):
        future.result(10)


@pytest.mark.usefixtures("alone")
def test_flush_says_when_it_is_not_done(broker: ScriptedBroker, client: Client) -> None:
    broker.hold = {"put"}
    producer = client.producer()
    producer.send_async("t", b"v", timeout=60)
    with pytest.raises(RequestTimeoutError):
        producer.flush(timeout=1.0)


@pytest.mark.usefixtures("alone")
def test_lingering_messages_share_a_request(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer(linger_ms=60_000)
    for number in range(10):
        producer.send_async("t", b"%d" % number, partition=0, timeout=600)
    producer.flush()
    assert broker.verbs.count("put") == 1


def test_close_waits_for_what_was_sent(client: Client) -> None:
    with client.producer(linger_ms=60_000) as producer:
        future = producer.send_async("t", b"v", partition=0, timeout=600)
    assert future.result(10).offset == 0
    with pytest.raises(ClosedError):
        producer.send("t", b"v")


@pytest.mark.usefixtures("alone")
def test_caller_that_fills_the_buffer_waits_until_its_timeout(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer(buffer_size_bytes=2000)
    for _ in range(10):
        producer.send_async("t", b"x" * 900, partition=0)
    assert broker.ends[0] >= 8
    producer.flush()
    broker.hold = {"put"}
    producer.send_async("t", b"x" * 1500, partition=0, timeout=600)
    with pytest.raises(RequestTimeoutError, match="buffer_size_bytes 2000 is in use: nothing was sent"):
        producer.send_async("t", b"x" * 900, partition=0, timeout=1.0)


def test_closing_the_client_gives_up_what_is_unanswered(broker: ScriptedBroker) -> None:
    broker.hold = {"put"}
    with Client([("host", 1)], clock=broker.clock) as client:
        future = client.producer().send_async("t", b"v", timeout=600)
    with pytest.raises(DeliveryUnknownError):
        future.result(10)


def test_two_concurrent_producers_have_sessions_and_a_third_reuses_one(broker: ScriptedBroker, client: Client) -> None:
    first, second = client.producer(), client.producer()
    for producer in (first, second, first):
        producer.send("t", b"v", partition=0)
    second.close()
    client.producer().send("t", b"v", partition=0)
    assert (client.session.id, broker.next_session) == (1, 3)
    assert broker.ends == {0: 4}


@pytest.mark.usefixtures("alone")
def test_forked_child_sends_under_another_session_and_nothing_of_parents(
    broker: ScriptedBroker, client: Client
) -> None:
    producer = client.producer(linger_ms=60_000)
    producer.send("t", b"before", partition=0, timeout=600)
    producer.send_async("t", b"parent", partition=0, timeout=600)
    concerned: list[Forked] = [client.control, *client.senders._senders, client.senders, client]
    for one in concerned:
        one.forked()  # what the child does first
    producer.send_async("t", b"child", partition=0, timeout=600)
    producer.flush()
    assert values(client.fetch("t", 0, 0)) == [b"before", b"child"]
    assert client.session.id == 2


# --- transactions ----------------------------------------------------------------------------------------------------


def test_a_send_joins_the_block_it_stands_in(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer()
    results: list[SendResult] = []
    with pytest.raises(ZeroDivisionError), producer.transaction():  # noqa: PT012  the block is what is tested
        results += [producer.send("t", b"1"), producer.send_async("t", b"2").result(0)]
        results += producer.send_many("t", [(b"k", b"3")])
        _ = 1 / 0
    assert [result.status for result in results] == [SendStatus.PENDING] * 3
    assert current_transaction() is None
    assert "put" not in broker.verbs


def test_a_send_to_another_client_cannot_join(broker: ScriptedBroker, client: Client) -> None:
    with Client([("host", 1)], clock=broker.clock) as other:
        elsewhere = other.producer()
        with pytest.raises(TransactionStateError), client.producer().transaction():
            elsewhere.send("t", b"v")


def test_one_text_is_not_taken_for_a_list_of_topics(client: Client) -> None:
    with pytest.raises(ConfigError, match="orders"):
        client.consumer("billing", "orders")
