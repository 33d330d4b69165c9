"""Connections that come back: lost ones, a broker that is away, sessions, forks."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import pytest

from tests.unit.client.scripted import CONNECT_TIMEOUT_S, ScriptedBroker, ScriptedStream, connection_to, link_of
from txmq.client.transport.reconnecting import AWAY_S_MAX, BACKOFF_S, JUST_HEARD_S, SILENT_S, ReconnectingConnection
from txmq.errors import (
    BrokerAwayError,
    ClosedError,
    ConnectionLostError,
    OverloadedError,
)
from txmq.protocol.requests import Request
from txmq.runtime import net
from txmq.runtime.threads import Attempt

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
    other = Attempt()
    assert connection._turn.take(other)  # a thread that waits out the back-off, or for an answer
    with pytest.raises(BrokerAwayError, match="another thread is connecting"):
        connection.call("ping", timeout=0.3)
    connection._turn.leave(other)
    broker.connections_refused = 1
    with pytest.raises(ConnectionLostError, match="refused"):
        connection.call("ping", timeout=5)
    assert connection._turn.take(Attempt())
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


def test_open_request_beside_fresh_answer_costs_no_look(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.call("ping", timeout=9)
    broker.clock.now += JUST_HEARD_S / 2
    connection.call("ping", timeout=9)
    broker.hold = {"ping"}
    connection.submit("ping", timeout=9)  # as the commit of a last resource
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
        assert waited(broker, connection) == pytest.approx(AWAY_S_MAX, abs=BACKOFF_S.most)


def test_frozen_broker_is_noticed_once_and_then_within_a_second(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.reach(broker.clock.now + 600)
    broker.hold = {"ping", "hello"}
    broker.clock.now += 2 * SILENT_S
    assert waited(broker, connection) == pytest.approx(CONNECT_TIMEOUT_S)
    for _ in range(2):
        assert waited(broker, connection) == pytest.approx(AWAY_S_MAX, abs=0.1)
    broker.hold = set()
    connection.reach(broker.clock.now + 600)


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


def test_addresses_that_are_silent_share_the_time(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the first address took all of the time, at each attempt, and the second one was never tried."""

    def dial(host: str, port: int, timeout: float) -> ScriptedStream:
        if port < 2:
            broker.clock.now += timeout
            raise TimeoutError("timed out")
        return broker.connect(host, port, timeout)

    monkeypatch.setattr(net, "connect", dial)
    started_at = broker.clock.now
    assert connection_to(broker, addresses=3).call("ping", timeout=CONNECT_TIMEOUT_S) == b"pong\n"
    assert broker.clock.now - started_at == pytest.approx(CONNECT_TIMEOUT_S * 2 / 3)


def test_address_that_never_greets_leaves_time_for_the_next(broker: ScriptedBroker) -> None:
    broker.faults["hello"] = deque([lambda _: None])
    assert connection_to(broker, addresses=2).call("ping", timeout=CONNECT_TIMEOUT_S) == b"pong\n"


def test_a_closed_connection_refuses(broker: ScriptedBroker) -> None:
    connection = connection_to(broker)
    connection.call("ping", timeout=1)
    connection.close()
    with pytest.raises(ClosedError):
        connection.call("ping", timeout=1)
    assert broker.streams[0].is_closed


def test_close_beside_a_connect_leaves_no_connection_open(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, serve = connection_to(broker), broker.serve

    def close_and_serve(stream: ScriptedStream, request: Request) -> None:
        connection.close()
        serve(stream, request)

    monkeypatch.setattr(broker, "serve", close_and_serve)
    with pytest.raises(ClosedError):
        connection.call("ping", timeout=1)
    assert [stream.is_closed for stream in broker.streams] == [True]


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
    broker.request_size_bytes_max = 1 << 16
    link, resumed = connection.connect_with_session(broker.clock.now + 1)
    assert resumed is session
    assert (link.session, broker.streams[1].session) == (session, 1)
    assert session.clock_ahead_ms == ahead_ms + 600_000  # deadlines are told by the broker's clock of now
    assert session.request_size_bytes_max == 1 << 16


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
