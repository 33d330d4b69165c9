"""What a session whose client is away costs, and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.growth import growth
from tools.images.node import Node
from tools.images.requests import batch, part
from txmq.broker.verbs.session_expiry import REST_MS

from ..support import node, put

DAY_MS = 24 * 3600 * 1000


def _pass(broker: Node, ms: int) -> None:
    broker.clock.advance(ms / 1000)
    broker.core.tick(broker.clock.now_ms())
    broker.pump()


def test_ten_thousand_finished_sessions_take_fraction_of_what_they_took() -> None:
    """2.5 GiB were 250 KB each; counted here are the outcomes, which that was."""
    broker = node()
    for session in range(1, 6):
        client = broker.session()
        for n in range(1, 101):
            client.ask("commit", broker.txid(session, n), extensions={"floor": n - 1}, body=part("a", 0, batch(b"x")))
        client.disconnect()
    _pass(broker, REST_MS)
    kept = [session.outcomes for session in broker.state.sessions.values()]
    assert [len(outcomes) for outcomes in kept] == [1] * 5
    assert max(map(sys.getsizeof, kept)) < 500


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
    _pass(broker, REST_MS)
    _pass(broker, DAY_MS)
    assert (broker.state.sessions, broker.state.sequences.produced_in) == ({}, {})
