"""A session that is full: whichever request is refused for it, nothing happened, and the next one has another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.client.scripted import ScriptedBroker, ScriptedStream
from tests.unit.xa.support import LastResourceFixture, quiet_resolver
from tests.unit.xa.xa_support import Notes
from tools.simulated.broker import SimulatedBroker
from tools.simulated.faults import Fault
from tools.simulated.xa_database import SimulatedXADatabase
from tools.simulated.xa_resource import SimulatedXAResource
from txmq.client.client import Client
from txmq.client.home_link import FORMER_MAX
from txmq.client.transaction import block as module
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.half_message import CheckBacks, HalfMessage
from txmq.errors import ClosedError, RolledBackError, SessionFullError
from txmq.model import Outcome, Resolution, SendStatus
from txmq.protocol import answers
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import encode_result_line
from txmq.xid import TxId

FULL = Fault(SessionFullError("full"))


def local(home: SimulatedBroker) -> None:
    with Transaction(home, home) as tx:
        tx.send("orders", b"v")


def streamed(home: SimulatedBroker) -> None:
    with Transaction(home, home) as tx:
        tx.send("orders", bytes(2000))


def half(home: SimulatedBroker) -> None:
    desk = CheckBacks(home, "g", lambda _: Resolution.UNKNOWN)
    HalfMessage(home, desk, 30.0, None).prepare("orders", 0, (b"k", b"v", [], 1_700_000_000_000)).commit()


@pytest.fixture
def last_resource(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LastResourceFixture]:
    quiet_resolver(monkeypatch)
    world = LastResourceFixture(tmp_path)
    yield world
    world.close()


def session_of(home: SimulatedBroker, place: int = -1) -> int:
    return TxId.parse(list(home.states())[place]).session


def check_recovery(home: SimulatedBroker, verb: str, transact: Callable[[], object]) -> None:
    """The first is refused and leaves nothing, the second has the next session."""
    home.faults[verb].append(FULL)
    full = home.session
    with pytest.raises(RolledBackError):
        transact()
    assert home.values("orders") == []
    assert home.session.id == full.id + 1
    transact()
    assert len(home.values("orders")) == 1
    assert session_of(home) == full.id + 1


@pytest.mark.parametrize(("verb", "transact"), [("commit", local), ("put", streamed), ("prepare", half)])
def test_the_next_transaction_has_another_session(
    verb: str, transact: Callable[[SimulatedBroker], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.client.transaction.half_message.start_daemon", lambda _name, _run: None)
    monkeypatch.setattr("txmq.client.transaction.block._STREAM_AT_BYTES", 1000)
    home = SimulatedBroker()
    check_recovery(home, verb, lambda: transact(home))
    assert home.clock.monotonic() == SimulatedBroker().clock.monotonic()  # nobody waited for room that does not come


def test_the_next_one_with_a_last_resource_has(last_resource: LastResourceFixture) -> None:
    check_recovery(last_resource.home, "prepare", lambda: last_resource.order(b"v"))
    assert last_resource.rows() == [b"v"]


def test_the_next_one_with_xa_resources_has(monkeypatch: pytest.MonkeyPatch) -> None:
    home, database = SimulatedBroker(), SimulatedXADatabase()
    resource = SimulatedXAResource("a", database, f"{1:032x}", home.clock.now_ms)
    resource.install()
    notes = Notes(home)
    monkeypatch.setattr(module, "resolver_of", lambda _client: notes)

    def transact() -> None:
        with Transaction(home, home, (resource,)) as tx:
            tx.connection(resource).insert("rows", b"v")
            tx.send("orders", b"v")

    check_recovery(home, "decide", transact)
    assert len([row for row in database.committed if row[0] == "rows"]) == 1


def test_refusal_of_older_session_does_not_leave_one_of_now(client: Client) -> None:
    full = client.session
    client.leave_session(full)
    following = client.session
    client.leave_session(full)
    assert client.session is following
    assert (full.id, following.id) == (1, 2)


def commits(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Have the broker commit; the sessions of those that asked."""
    asked: list[int | None] = []

    def commit(stream: ScriptedStream, request: Request) -> bytes:
        asked.append(stream.session)
        return answers.result(200, request[4], encode_result_line("t", 0, 0, 1))

    monkeypatch.setattr(broker, "_commit", commit, raising=False)
    return asked


def test_a_block_goes_on_in_the_session_of_its_id(
    broker: ScriptedBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = commits(broker, monkeypatch)
    with client.producer().transaction() as tx:
        tx.send("t", b"v", partition=0)
        assert TxId.parse(tx.txid).session == 1
        for number in range(2, FORMER_MAX + 4):  # its connection is let go meanwhile
            client.leave_session(client.session)
            assert client.session.id == number
    assert (asked, tx.outcome) == ([1], Outcome.COMMITTED)
    assert sum(not stream.is_closed for stream in broker.streams) == FORMER_MAX + 2  # the block's own, made again


def test_producer_goes_on_in_session_that_numbers_its_batches(client: Client) -> None:
    producer = client.producer()
    assert producer.send("t", b"1", partition=0).offset == 0
    client.leave_session(client.session)
    assert client.session.id == 2
    result = producer.send("t", b"2", partition=0)  # else the broker of these tests finds another producer id
    assert (result.status, result.offset) == (SendStatus.ACKNOWLEDGED, 1)


def test_outcome_lost_and_found_in_a_left_session_is_told(client: Client) -> None:
    session = client.session
    counter, txid = session.next_txid()
    session.found(counter, Outcome.COMMITTED)
    client.leave_session(session)
    assert client.session is not session
    assert client.outcome(txid) is Outcome.COMMITTED


def test_a_client_that_is_closed_closes_what_it_left(broker: ScriptedBroker) -> None:
    with Client([("host", 1)], clock=broker.clock) as client:
        client.leave_session(client.session)
        full = client.session
    assert [stream.is_closed for stream in broker.streams] == [True, True]
    client.leave_session(full)
    with pytest.raises(ClosedError):
        client.ping()
