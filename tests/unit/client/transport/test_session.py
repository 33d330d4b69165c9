"""Sessions: transaction ids and the floor."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.simulated.broker import SimulatedBroker
from tools.simulated.faults import Fault
from txmq.client.transaction.conversation import Conversation
from txmq.client.transaction.prepared import repeat_prepare
from txmq.client.transport.session import ClientSession, parse_hello
from txmq.errors import RemoteProtocolError, TransactionConflictError, UnavailableError
from txmq.xid import TxId

FIELDS: dict[str, Any] = {
    "cluster": "00000000000000c1", "home": "00000000000000a1", "session": "1f", "epoch": 2,
    "secret": "ab" * 16, "in_flight_max": 8,
    "request_size_bytes_max": 1 << 24, "protocol": 1,
}  # fmt: skip


def test_txids_count_up_under_the_session() -> None:
    session = ClientSession(FIELDS)
    assert [session.next_txid()[1] for _ in range(2)] == [
        "00000000000000c1-00000000000000a1-1f-1",
        "00000000000000c1-00000000000000a1-1f-2",
    ]


def test_the_text_of_a_txid_is_the_txids() -> None:
    session = ClientSession(FIELDS)
    for counter in range(1, 20):
        txid = TxId(session.cluster, session.home, session.id, counter)
        assert session.next_txid() == (counter, str(txid))


@given(st.permutations(list(range(1, 30))))
def test_the_floor_is_the_highest_with_all_below_finished(order: list[int]) -> None:
    session = ClientSession(FIELDS)
    finished: set[int] = set()
    for counter in order:
        session.finished(counter)
        finished.add(counter)
        assert session.finished_through == next(n for n in range(30) if n + 1 not in finished)


@pytest.mark.parametrize("missing", ["cluster", "home", "session", "epoch", "secret", "in_flight_max"])
def test_answer_to_hello_that_lacks_field_is_peers_fault(missing: str) -> None:
    with pytest.raises(RemoteProtocolError):
        ClientSession({name: value for name, value in FIELDS.items() if name != missing})


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"protocol": 2}', b"\xff"])
def test_what_is_no_answer_to_hello_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_hello(body)


def test_an_answer_to_hello_is_read() -> None:
    assert parse_hello(json.dumps(FIELDS).encode()) == FIELDS


def test_a_counter_that_is_finished_twice_changes_nothing() -> None:
    session = ClientSession(FIELDS)
    for counter in (2, 1, 1, 2, 3):
        session.finished(counter)
    assert session.finished_through == 3


def test_a_session_knows_how_far_the_brokers_clock_is_ahead() -> None:
    assert ClientSession(FIELDS | {"time_ms": 5_000}, monotonic_ms=2_000).clock_ahead_ms == 3_000


def test_a_prepare_states_its_deadline_by_the_brokers_clock() -> None:
    broker = SimulatedBroker()
    broker.session.clock_ahead_ms -= 3_600_000
    home = Conversation(broker, broker.clock, 30.0)
    home.begin()
    assert home.deadline_ms == broker.clock.now_ms() - 3_600_000 + 30_000
    broker.clock.jump(-600_000)  # ours is set: the broker's is not
    assert home.deadline_ms == broker.clock.now_ms() + 600_000 - 3_600_000 + 30_000


def test_prepare_after_a_refused_one_states_a_current_deadline() -> None:
    broker = SimulatedBroker()
    home = Conversation(broker, broker.clock, 30.0)
    home.begin()
    stated_ms = home.deadline_ms
    broker.clock.jump(600_000)  # the broker's, too
    broker.faults["prepare"].append(Fault(TransactionConflictError("the deadline has passed")))
    with pytest.raises(TransactionConflictError):
        repeat_prepare(home, "half", {"deadline": stated_ms}, [])
    assert home.deadline_ms == stated_ms + 600_000
    broker.clock.jump(600_000)
    home.was_refused(UnavailableError(""))
    broker.clock.advance(31.0)
    home.was_refused(TransactionConflictError("the deadline has passed"))
    assert home.deadline_ms == stated_ms + 600_000


def test_outcome_kept_for_a_resolver_is_not_finished_by_others() -> None:
    session = ClientSession(FIELDS)
    session.keep(1)
    session.saw_outcome(1)
    session.saw_outcome(2)
    assert session.finished_through == 0
    session.finished(1)
    assert session.finished_through == 2
