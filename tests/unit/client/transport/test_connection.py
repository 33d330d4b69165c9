"""One connection: requests, answers, leader and followers."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from tests.unit.client.scripted import ScriptedBroker, ScriptedStream, connection_to, link_of
from txmq.client.transport.connection import ABANDONED_MAX, SILENT_S_MAX, Connection, Waiter
from txmq.errors import (
    ConnectionLostError,
    LocalProtocolError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnknownTopicError,
)

# --- requests and answers --------------------------------------------------------------------------------------------


def test_a_call_returns_the_answers_body(broker: ScriptedBroker) -> None:
    assert connection_to(broker).call("ping", timeout=1) == b"pong\n"
    assert broker.verbs == ["hello", "ping"]


def test_a_refusal_is_raised_as_its_class(broker: ScriptedBroker) -> None:
    with pytest.raises(UnknownTopicError, match="no topic nope"):
        connection_to(broker).call("meta", "nope", timeout=1)


def test_what_protocol_cannot_carry_is_refused_before_anything_is_sent(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    with pytest.raises(LocalProtocolError):
        connection.call("meta", "a b", timeout=1)
    assert broker.verbs == ["hello"]
    assert connection.call("ping", timeout=1) == b"pong\n"


def test_answers_may_overtake_each_other(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.hold = {"offset"}
    first = connection.submit("offset", "t", 0, "latest", timeout=9)
    assert connection.call("ping", timeout=1) == b"pong\n"
    assert not first.done
    broker.release()
    assert first.result() == b"0 0 0\n"


def test_answers_and_requests_in_pieces_arrive_whole(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    link_of(connection, broker)
    stream = broker.streams[0]
    stream.takes = deque([1, 3, 0, 2])
    stream.reads = deque([1, 1, 1, 5])
    assert connection.call("offset", "t", 0, "latest", timeout=1) == b"0 0 0\n"


def test_without_answer_call_times_out_and_late_answer_is_dropped(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.hold = {"ping"}
    with pytest.raises(RequestTimeoutError):
        connection.call("ping", timeout=SILENT_S_MAX / 2)
    broker.release()
    broker.hold = set()
    assert connection.call("offset", "t", 0, "latest", timeout=1) == b"0 0 0\n"
    assert len(broker.streams) == 1


def test_answer_that_was_there_in_time_counts_for_late_caller(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    asked = connection.submit("offset", "t", 0, "latest", timeout=0.5)
    broker.clock.now += 0.6
    assert asked.result() == b"0 0 0\n"


def test_connection_on_which_nothing_comes_any_more_is_made_anew(broker: ScriptedBroker) -> None:
    """Found: a connection that a middle box has forgotten was asked again and again, for a quarter of an hour."""
    connection = connection_to(broker)
    broker.hold = {"ping"}
    for _ in range(10):
        with pytest.raises(RequestTimeoutError):
            connection.call("ping", timeout=SILENT_S_MAX / 10)
    assert connection.live is None
    broker.hold = set()
    assert connection.call("ping", timeout=1) == b"pong\n"
    assert len(broker.streams) == 2


def test_connection_with_one_slow_answer_is_kept(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.hold = {"ping"}
    asked = connection.submit("ping", timeout=3 * SILENT_S_MAX)
    broker.clock.now += 2 * SILENT_S_MAX
    connection.call("offset", "t", 0, "latest", timeout=1)
    with pytest.raises(RequestTimeoutError):
        asked.result()
    assert connection.live is not None


def test_a_broker_that_leaves_too_much_unanswered_is_given_up(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.hold = {"ping"}
    for _ in range(ABANDONED_MAX + 1):
        asked = connection.submit("ping", timeout=0.1)
        connection.call("offset", "t", 0, "latest", timeout=1)
        with pytest.raises(RequestTimeoutError):
            asked.result()
    broker.hold = set()
    assert connection.call("ping", timeout=1) == b"pong\n"
    assert len(broker.streams) == 2


def test_a_result_may_be_waited_for_twice(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.hold = {"ping"}
    reply = connection.submit("ping", timeout=60)
    with pytest.raises(RequestTimeoutError):
        reply.result(timeout=0.3)
    broker.release()
    assert reply.result() == b"pong\n"


@pytest.mark.parametrize("answer", [b"result 200 0 zzz\r\n", b"HTTP/1.1 400 Bad\r\n"])
def test_unrequested_answer_ends_the_link_and_leaves_executed_requests_open(
    broker: ScriptedBroker, answer: bytes
) -> None:
    connection = connection_to(broker)
    link_of(connection, broker)
    broker.streams[0].inbound += answer
    with pytest.raises(RemoteProtocolError) as caught:
        connection.call("ping", timeout=1)
    # As after a lost connection: a transaction that was told otherwise was told ROLLED BACK, and was committed.
    assert isinstance(caught.value, ConnectionLostError)


def test_a_peer_that_is_no_broker_is_found_out(broker: ScriptedBroker) -> None:
    broker.faults["hello"] = deque([lambda stream: stream.inbound.extend(b"HTTP/1.1 400 Bad\r\n")])
    with pytest.raises(RemoteProtocolError):
        connection_to(broker).call("ping", timeout=1)


# --- leader and followers --------------------------------------------------------------------------------------------


class Gate(ScriptedStream):
    """A stream whose reader sleeps for real until the test lets it go on."""

    def __init__(self, broker: ScriptedBroker) -> None:
        super().__init__(broker)
        self.is_waiting, self.may_go_on = threading.Event(), threading.Event()

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        self.is_waiting.set()
        assert self.may_go_on.wait(10)
        return super().receive()


def test_the_leader_reads_for_the_followers_and_hands_over(broker: ScriptedBroker) -> None:
    stream = Gate(broker)
    link = Connection(stream, broker.clock, "test")
    broker.hold = {"ping"}
    first = link.request(broker.clock.now + 50, "ping")
    leader = threading.Thread(target=first.result)
    leader.start()
    assert stream.is_waiting.wait(10)
    others = [link.request(broker.clock.now + 50, "ping") for _ in range(3)]
    results: list[bytes] = []
    followers = [threading.Thread(target=lambda reply=reply: results.append(reply.result())) for reply in others]
    for thread in followers:
        thread.start()
    # The first answer alone: the leader leaves, a follower takes over and finds the rest.
    mine, *rest = broker.held
    broker.held = rest
    stream.inbound += mine[1]
    stream.may_go_on.set()
    leader.join(10)
    broker.release()
    for thread in followers:
        thread.join(10)
    assert results == [b"pong\n"] * 3


def test_followers_wake_up_when_the_link_fails(broker: ScriptedBroker) -> None:
    stream = Gate(broker)
    link = Connection(stream, broker.clock, "test")
    broker.hold = {"ping"}
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            link.request(broker.clock.now + 50, "ping").result()
        except ConnectionLostError as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert stream.is_waiting.wait(10)
    link.fail(ConnectionLostError("cut"))
    stream.may_go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(failures) == 4
    assert stream.is_closed


def test_interrupt_while_answers_are_told_ends_link_and_tells_rest(broker: ScriptedBroker) -> None:
    link = Connection(ScriptedStream(broker), broker.clock, "test")

    class Interrupting:
        def answered(self, code: int, body: bytes) -> None:
            raise KeyboardInterrupt

        def lost(self, error: Exception) -> None:
            told.append(error)

    told: list[Exception] = []

    broker.hold = {"ping"}
    broker.faults["put"] = deque([UnknownTopicError("t")])
    link.put(Interrupting(), b"t", 0, bytearray(1))
    other = link.request(broker.clock.now + 5, "ping")
    with pytest.raises(KeyboardInterrupt):
        link.wait(Waiter(), broker.clock.now + 5)
    with pytest.raises(ConnectionLostError):
        other.result()
    assert len(told) == 1
