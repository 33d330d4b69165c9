"""Sessions whose client is away: what they keep, when they end, and what comes too late."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.growth import growth
from tools.images.check import comparable
from tools.images.node import Client, Node
from tools.images.requests import UUID, batch, listed_pages, part
from txmq.broker.verbs.session_expiry import REST_MS, SESSIONS_A_TICK
from txmq.redo import entries

from ..support import node, prepare, put, restarted, values
from ..verbs.test_decide import complete, decide

DAY_MS = 24 * 3600 * 1000


def _pass(broker: Node, ms: int) -> None:
    broker.clock.advance(ms / 1000)
    broker.core.tick(broker.clock.now_ms())
    broker.pump()


def _age(broker: Node, ms: int = DAY_MS) -> None:
    """Through both steps, and as many ticks as they take."""
    _pass(broker, REST_MS)
    _pass(broker, ms - REST_MS)


def test_owner_is_gone_even_if_the_clock_was_set_back() -> None:
    """It counted as just gone for as long as the clock was set back, and nobody settled what it had prepared."""
    broker = node()
    client, txid = broker.session(), broker.txid(1, 1)
    assert prepare(client, txid, ("a", 0, batch(b"x"))).code == 200
    broker.core.disconnected(client.client)
    broker.clock.jump(-DAY_MS)
    _pass(broker, 0)
    _pass(broker, 5000)
    ((row,),) = listed_pages(broker.connect())
    assert (row["txid"], row["owner_gone_ms"]) == (txid, 5000)
    assert broker.connect().ask("rollback", txid).code == 200
    _age(broker)
    assert 1 not in broker.state.sessions


def _committed(broker: Node, count: int) -> Client:
    """A client that was told the end of all its transactions but the last."""
    client = broker.session()
    session = broker.state.next_session - 1
    for n in range(1, count + 1):
        body = part("a", 0, batch(b"%d" % n))
        assert client.ask("commit", broker.txid(session, n), extensions={"floor": n - 1}, body=body).code == 200
    return client


# --- at rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
def test_session_at_rest_keeps_only_what_is_not_finished(checkpoint: bool) -> None:
    broker = node()
    _committed(broker, 50).disconnect()
    _pass(broker, REST_MS - 1)
    assert len(broker.state.sessions[1].outcomes) == 50
    _pass(broker, 1)
    session = broker.state.sessions[1]
    assert (list(session.outcomes), session.floor) == ([50], 49)
    if checkpoint:
        broker.checkpoint()
    before = comparable(broker.state)
    broker = restarted(broker)
    assert comparable(broker.state) == before
    again = broker.session("1.0")
    assert again.ask("commit", broker.txid(1, 50), body=part("a", 0, batch(b"50"))).text == "a 0 49 1\n"
    assert again.ask("commit", broker.txid(1, 49), body=part("a", 0, batch(b"49"))).error == "fenced"
    assert again.ask("commit", broker.txid(1, 51), body=part("a", 0, batch(b"51"))).code == 200
    assert len(values(broker)) == 51


def test_who_comes_back_in_time_has_lost_nothing() -> None:
    broker = node()
    _committed(broker, 5).disconnect()
    _pass(broker, REST_MS - 1)
    client = broker.session("1.0")
    _pass(broker, 2 * DAY_MS)
    assert len(broker.state.sessions[1].outcomes) == 5
    client.disconnect()
    _pass(broker, REST_MS - 1)
    assert len(broker.state.sessions[1].outcomes) == 5


def test_ten_thousand_finished_sessions_take_fraction_of_what_they_took() -> None:
    """2.5 GiB were 250 KB each; counted here are the outcomes, which that was."""
    broker = node()
    for _ in range(5):
        _committed(broker, 100).disconnect()
    _pass(broker, REST_MS)
    kept = [session.outcomes for session in broker.state.sessions.values()]
    assert [len(outcomes) for outcomes in kept] == [1] * 5
    assert max(map(sys.getsizeof, kept)) < 500


# --- ended -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
def test_aged_session_ends_and_its_later_requests_are_refused(checkpoint: bool) -> None:
    broker = node()
    client = _committed(broker, 2)
    put(client, producer=1)
    secret = broker.state.sessions[1].secret
    client.disconnect()
    _pass(broker, REST_MS)
    _pass(broker, DAY_MS - REST_MS - 1)
    assert 1 in broker.state.sessions
    _pass(broker, 1)
    assert broker.state.sessions == {}
    assert broker.partition("a").producers == {}
    if checkpoint:
        broker.checkpoint()
    broker = restarted(broker)
    assert broker.state.sessions == {}
    late = broker.connect()
    assert late.ask("hello", 1, "late", extensions={"session": f"1.0.{secret}"}).error == "fenced"
    for verb, words, body in (
        ("commit", {}, part("a", 0, batch(b"late"))),
        ("prepare", {}, part("a", 0, batch(b"late"))),
        ("rollback", {}, None),
        ("outcome", {"fence": None}, None),
    ):
        arguments = [broker.txid(1, 3), *(["half"] if verb == "prepare" else [])]
        answer = late.ask(verb, *arguments, extensions=words, body=body)
        assert (answer.code, answer.error) == (410, "fenced"), verb
    assert len(values(broker)) == 3
    broker.session()
    assert len(broker.state.sessions) == 1
    assert broker.newest_session > 1


def test_the_age_is_a_setting() -> None:
    broker = node(session_idle_ms_max=2 * REST_MS)
    broker.session().disconnect()
    _age(broker, 2 * REST_MS)
    assert broker.state.sessions == {}


def test_a_connected_session_never_ends() -> None:
    broker = node()
    client = broker.session()
    for _ in range(10):
        _pass(broker, DAY_MS)
    assert put(client, producer=1).code == 200


@pytest.mark.parametrize("checkpoint", [False, True])
def test_prepared_or_decided_transaction_keeps_its_session_until_settled(checkpoint: bool) -> None:
    broker = node()
    prepared, decided = broker.session(), broker.session()
    prepare(prepared, broker.txid(1, 1), ("a", 0, batch(b"1")))
    decide(decided, broker.txid(2, 1), ("a", 1, batch(b"2")))
    if checkpoint:
        broker.checkpoint()
    broker = restarted(broker)
    for _ in range(3):
        _age(broker)
    assert [session.owed for session in broker.state.sessions.values()] == [1, 1]
    other = broker.connect()
    assert other.ask("commit", broker.txid(1, 1), body=b"").code == 200
    assert complete(other, broker.txid(2, 1), UUID).code == 200
    _age(broker)
    assert broker.state.sessions == {}
    assert values(broker) == [b"1"]


def test_a_restart_begins_the_time_anew() -> None:
    broker = node()
    broker.session().disconnect()
    broker.clock.advance(30 * DAY_MS / 1000)
    broker = restarted(broker)
    _pass(broker, REST_MS)
    assert list(broker.state.sessions) == [1]
    assert broker.session("1.0")


def test_many_that_are_due_at_once_are_taken_in_steps() -> None:
    broker = node()
    for _ in range(SESSIONS_A_TICK + 5):
        broker.session().disconnect()
    broker.clock.advance(DAY_MS / 1000)
    left = []
    for _ in range(2):
        _pass(broker, 0)
        left.append(len(broker.state.sessions))
    assert left == [5, 0]


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_idle_tick_cost_does_not_grow_with_sessions() -> None:
    def ticking(sessions: int) -> Callable[[], object]:
        broker = node()
        for _ in range(sessions):
            broker.session().disconnect()

        def tick() -> None:
            for _ in range(1000):
                broker.core.tick(broker.clock.now_ms())

        return tick

    assert growth(lambda sessions: ticking(sessions), 20, 200) < 0.4  # a step is a tick of one session: 0.1 is even


def test_ending_session_touches_partitions_it_wrote_to_and_no_others() -> None:
    broker = node()
    client = broker.session()
    put(client, producer=1)
    assert list(broker.state.sequences.produced_in[1]) == [broker.partition("a")]
    client.ask("topic", "delete", "a")
    assert broker.state.sequences.produced_in == {}
    client.disconnect()
    _age(broker)
    assert (broker.state.sessions, broker.state.sequences.produced_in) == ({}, {})


def test_what_rests_is_journaled_in_one_entry() -> None:
    broker = node()
    for _ in range(3):
        _committed(broker, 3).disconnect()
    broker.clock.advance(REST_MS / 1000)
    broker.core.tick(broker.clock.now_ms())
    kinds = [kind for kind, _, _ in entries.split(broker.context.group.payload())]
    assert kinds == [entries.SESSIONS_AT_REST]
