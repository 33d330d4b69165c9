"""Links and connections: leader and followers, lost answers, sessions, back-off, forks."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

import pytest

from tests.unit.client.scripted import ScriptedBroker, ScriptedStream, scripted_broker
from txmq.client.transport.connection import ABANDONED_MAX, Connection
from txmq.client.transport.reconnecting import AWAY_S_MAX, BACKOFF_S_MAX, JUST_HEARD_S, SILENT_S, ReconnectingConnection
from txmq.client.transport.reply import Waiter
from txmq.errors import (
    BrokerAwayError,
    ClosedError,
    ConnectionLostError,
    LocalProtocolError,
    OverloadedError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnknownTopicError,
)

CONNECT_TIMEOUT_S = 5.0


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> ScriptedBroker:
    return scripted_broker(monkeypatch)


def connection_to(broker: ScriptedBroker, addresses: int = 1) -> ReconnectingConnection:
    return ReconnectingConnection(
        [("host", number) for number in range(addresses)], "test", broker.clock, CONNECT_TIMEOUT_S
    )


def link_of(connection: ReconnectingConnection, broker: ScriptedBroker) -> Connection:
    return connection.connect(broker.clock.now + 5)


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
        connection.call("ping", timeout=1)
    broker.release()
    broker.hold = set()
    assert connection.call("offset", "t", 0, "latest", timeout=1) == b"0 0 0\n"
    assert len(broker.streams) == 1


def test_a_broker_that_answers_nothing_any_more_is_given_up(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.hold = {"ping"}
    for _ in range(ABANDONED_MAX + 1):
        with pytest.raises(RequestTimeoutError):
            connection.call("ping", timeout=0.1)
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


# --- lost connections ------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_told_to_everybody_who_waits(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.hold = {"ping"}
    replies = [connection.submit("ping", timeout=9) for _ in range(3)]
    broker.cut()
    for reply in replies:
        with pytest.raises(ConnectionLostError):
            reply.result()


def test_the_next_call_after_a_lost_connection_makes_another(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.lose_answer = {"ping": 1}
    with pytest.raises(ConnectionLostError):
        connection.call("ping", timeout=1)
    assert connection.call("ping", timeout=1) == b"pong\n"


def test_link_that_ended_while_idle_is_replaced_before_use(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.call("ping", timeout=1)
    broker.cut()
    broker.clock.now += 1
    assert connection.call("ping", timeout=1) == b"pong\n"


def test_requests_that_only_ask_are_repeated(broker: ScriptedBroker) -> None:
    broker.lose_answer = {"ping": 3}
    assert connection_to(broker).repeat("ping", timeout=5) == b"pong\n"


def test_refused_connection_is_reported_at_once_and_then_backs_off(broker: ScriptedBroker) -> None:
    broker.connections_refused = 2
    connection = connection_to(broker)
    started = broker.clock.now
    with pytest.raises(ConnectionLostError, match="refused"):
        connection.call("ping", timeout=5)
    assert broker.clock.now == started
    with pytest.raises(ConnectionLostError):
        connection.call("ping", timeout=5)
    assert broker.clock.now == pytest.approx(started + 0.02)
    assert connection.call("ping", timeout=5) == b"pong\n"
    assert broker.clock.now == pytest.approx(started + 0.06)


def test_callers_with_less_time_than_the_backoff_succeed_eventually(broker: ScriptedBroker) -> None:
    broker.connections_refused = 8
    connection = connection_to(broker)
    attempts = 0
    while broker.connections_refused:
        attempts += 1
        with pytest.raises(ConnectionLostError, match="refused"):
            connection.call("ping", timeout=0.3)
    assert broker.clock.now < 1000 + 6
    while not broker.streams:
        attempts += 1
        with suppress(ConnectionLostError):
            connection.call("ping", timeout=0.3)
    assert attempts < 20


def test_caller_waiting_for_a_failing_connect_is_told_the_cause(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection._maker = object()  # a thread that waits out the back-off, or for an answer
    with pytest.raises(BrokerAwayError, match="another thread is connecting"):
        connection.call("ping", timeout=0.3)
    connection._maker = None
    broker.connections_refused = 1
    with pytest.raises(ConnectionLostError, match="refused"):
        connection.call("ping", timeout=5)
    connection._maker = object()
    with pytest.raises(BrokerAwayError, match="refused"):
        connection.call("ping", timeout=0.3)


# --- the broker is away ----------------------------------------------------------------------------------------------


def waited(broker: ScriptedBroker, connection: ReconnectingConnection) -> float:
    """How long ``reach`` takes to find that the broker is away."""
    began = broker.clock.now
    with pytest.raises(BrokerAwayError):
        connection.reach(began + 600)
    return broker.clock.now - began


def test_recently_heard_link_is_not_asked_and_silent_one_is(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.reach(broker.clock.now + 600)
    connection.reach(broker.clock.now + 600)
    assert broker.verbs == ["hello"]
    broker.clock.now += 2 * SILENT_S
    connection.reach(broker.clock.now + 600)
    assert broker.verbs == ["hello", "ping"]


def test_answer_read_late_does_not_show_that_the_broker_lives(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.submit("ping", timeout=9)  # as ``complete`` of an XA branch: nobody waits for it
    broker.hold = {"ping"}
    broker.clock.now += 2 * SILENT_S
    assert waited(broker, connection) == pytest.approx(CONNECT_TIMEOUT_S)


def test_end_behind_answers_nobody_waited_for_is_seen_at_once(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.submit("ping", timeout=9)
    broker.cut()
    connection.reach(broker.clock.now + 600)
    assert len(broker.streams) == 2


def test_dead_broker_is_noticed_within_a_second_and_found_again(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.reach(broker.clock.now + 600)
    broker.cut()
    broker.connections_refused = 1 << 30
    for _ in range(3):
        assert waited(broker, connection) == pytest.approx(AWAY_S_MAX)
    broker.connections_refused = 1  # restarted while the next one tries
    connection.reach(broker.clock.now + 600)
    assert broker.verbs[-1] == "hello"
    assert connection.wait_s_max > AWAY_S_MAX


def test_fresh_answer_spares_only_one_look(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.call("ping", timeout=9)
    broker.clock.now += JUST_HEARD_S / 2
    connection.call("ping", timeout=9)
    broker.cut()
    connection.reach(broker.clock.now + 600)
    assert len(broker.streams) == 1
    connection.reach(broker.clock.now + 600)
    assert len(broker.streams) == 2


def test_answer_that_is_not_fresh_spares_no_look(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.call("ping", timeout=9)
    broker.clock.now += JUST_HEARD_S / 2
    connection.call("ping", timeout=9)
    broker.cut()
    broker.clock.now += 2 * JUST_HEARD_S
    connection.reach(broker.clock.now + 600)
    assert len(broker.streams) == 2


def test_broker_that_was_never_there_is_away_within_second(broker: ScriptedBroker) -> None:
    """A service that was started before its broker (``lazy``)."""
    connection = connection_to(broker)
    broker.connections_refused = 1 << 30
    for _ in range(2):
        assert waited(broker, connection) == pytest.approx(AWAY_S_MAX, abs=BACKOFF_S_MAX)


def test_frozen_broker_is_noticed_once_and_then_within_a_second(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.reach(broker.clock.now + 600)
    broker.hold = {"ping"}
    broker.clock.now += 2 * SILENT_S
    assert waited(broker, connection) == pytest.approx(CONNECT_TIMEOUT_S)
    for _ in range(2):
        assert waited(broker, connection) == pytest.approx(AWAY_S_MAX)
    broker.hold = set()
    broker.release()
    connection.reach(broker.clock.now + 600)
    assert len(broker.streams) == 1


def test_broker_that_accepts_and_never_answers_is_noticed(broker: ScriptedBroker) -> None:
    broker.faults["hello"] = deque([lambda _: None] * 1000)
    connection = connection_to(broker)
    assert waited(broker, connection) == pytest.approx(CONNECT_TIMEOUT_S, abs=1.0)
    assert waited(broker, connection) == pytest.approx(AWAY_S_MAX, abs=0.1)


def test_link_that_ended_before_abandoned_answers_is_known_as_ended(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    broker.hold = {"ping"}
    connection.submit("ping", timeout=9)  # as ``complete`` of an XA branch
    broker.cut()
    connection.reach(broker.clock.now + 600)
    assert len(broker.streams) == 2


def test_the_next_address_is_tried_where_one_refuses(broker: ScriptedBroker) -> None:
    broker.connections_refused = 1
    assert connection_to(broker, addresses=2).call("ping", timeout=1) == b"pong\n"


def test_a_closed_connection_refuses(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.call("ping", timeout=1)
    connection.close()
    with pytest.raises(ClosedError):
        connection.call("ping", timeout=1)
    assert broker.streams[0].is_closed


# --- sessions --------------------------------------------------------------------------------------------------------


def test_the_session_is_made_when_it_is_first_needed(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.call("ping", timeout=1)
    assert connection.session is None
    _, session = connection.connect_with_session(broker.clock.now + 1)
    assert session.id == 1
    assert connection.session is session
    assert broker.verbs == ["hello", "ping", "hello"]


def test_a_new_connection_resumes_the_session(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    _, session = connection.connect_with_session(broker.clock.now + 1)
    session.next_txid()
    ahead_ms = session.clock_ahead_ms
    broker.cut()
    broker.clock.now += 1
    broker.time_ms += 601_000
    link, resumed = connection.connect_with_session(broker.clock.now + 1)
    assert resumed is session
    assert (link.session, broker.streams[1].session) == (session, 1)
    assert session.clock_ahead_ms == ahead_ms + 600_000  # deadlines are told by the broker's clock of now


def test_brokers_clock_is_measured_again_on_link_that_is_there(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    link, session = connection.connect_with_session(broker.clock.now + 1)
    ahead_ms, broker.time_ms = session.clock_ahead_ms, broker.time_ms + 600_000
    connection.measure_clock(session, 1.0)
    assert session.clock_ahead_ms == ahead_ms + 600_000
    assert (link_of(connection, broker), link.session, broker.streams[0].session) == (link, session, 1)
    broker.fenced.add(1)
    broker.cut()
    broker.clock.now += 1
    broker.time_ms += 600_000
    connection.measure_clock(session, 1.0)  # speaks for another session now
    assert session.clock_ahead_ms == ahead_ms + 600_000


def test_a_session_the_broker_no_longer_knows_is_replaced(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.connect_with_session(broker.clock.now + 1)
    broker.fenced.add(1)
    broker.cut()
    broker.clock.now += 1
    _, session = connection.connect_with_session(broker.clock.now + 1)
    assert session.id == 2


def test_refused_greeting_is_callers_error_and_leaves_no_link(broker: ScriptedBroker) -> None:
    broker.faults["hello"] = deque([OverloadedError("sessions")])
    connection = connection_to(broker)
    with pytest.raises(OverloadedError):
        connection.call("ping", timeout=1)
    assert broker.streams[0].is_closed
    assert connection.call("ping", timeout=1) == b"pong\n"


def test_forked_child_begins_anew_and_leaves_parents_conversation_alone(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.connect_with_session(broker.clock.now + 1)
    connection.forked()
    assert connection.session is None
    assert (broker.streams[0].is_closed, broker.streams[0].is_over) == (True, False)
    assert connection.connect_with_session(broker.clock.now + 1)[1].id == 2


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
