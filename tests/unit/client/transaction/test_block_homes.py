"""Transactions of a client of several homes whose messages are all on one of them."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.crash_points import crash_at
from tests.unit.client.transaction.shop import Shop
from tests.unit.xa.support import quiet_resolver
from tests.unit.xa.xa_support import Database, FakeResource, Notes
from tools.simulated.broker import SimulatedBroker
from tools.simulated.cluster import SimulatedCluster
from tools.simulated.faults import Fault, lost
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.current import associated_branch
from txmq.client.transaction.half_message import CheckBacks, HalfMessage
from txmq.client.transaction.xa_resource import BrokerXAResource
from txmq.errors import (
    ConnectionLostError,
    OutcomeUnknownError,
    RequestTimeoutError,
    RolledBackError,
    SessionFullError,
    TransactionAwayError,
    TransactionTimeoutError,
    TxmqError,
    UnknownTopicError,
    XAError,
)
from txmq.log.records import Record
from txmq.model import Outcome, Resolution
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa.resolver import Resolver
from txmq.xa.xopen import XACode, XAFlag
from txmq.xid import TxId, Xid

A, B, C = b"\x00", b"\x01", b"\x02"  # keys of messages for the first, second, third home


@pytest.fixture
def cluster() -> SimulatedCluster:
    return SimulatedCluster()


def block(cluster: SimulatedCluster, *resources: Any, timeout: float = 30.0) -> Transaction:
    return Transaction(cluster, cluster, resources, timeout)


def requests(cluster: SimulatedCluster) -> list[list[str]]:
    return [home.requests for home in cluster.homes]


def home_of(txid: str) -> int:
    return TxId.parse(txid).home - 0xA1


# --- local -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_home_decides_alone_whichever_it_is(cluster: SimulatedCluster, number: int) -> None:
    with block(cluster) as tx:
        tx.send("orders", b"1", key=bytes([number]))
        tx.send("audit", b"2", key=bytes([number]))
    assert requests(cluster) == [["commit"] if n == number else [] for n in range(3)]
    assert home_of(tx.txid) == number
    assert [result.offset for result in tx.results] == [0, 0]
    assert cluster.homes[number].values("orders") == [b"1"]


def test_id_asked_for_early_keeps_its_home(cluster: SimulatedCluster) -> None:
    with block(cluster) as tx:
        tx.send("orders", b"1", key=A)
        assert home_of(tx.txid) == 0
    assert cluster.homes[0].values("orders") == [b"1"]


def test_home_of_the_messages_is_reached_not_any_other(cluster: SimulatedCluster) -> None:
    cluster.homes[0].is_away = True
    with block(cluster) as tx:
        tx.send("orders", b"1", key=B)
    assert cluster.homes[1].values("orders") == [b"1"]
    with pytest.raises(TransactionAwayError), block(cluster) as tx:
        tx.send("orders", b"2", key=A)
    assert tx.outcome is Outcome.ROLLED_BACK


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RequestTimeoutError("no answer in time"), TransactionTimeoutError),
        (ConnectionLostError("closed"), TransactionAwayError),
        (UnknownTopicError("orders"), RolledBackError),
    ],
)
def test_home_that_nobody_names_in_time_leaves_nothing(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch, error: TxmqError, told: type[RolledBackError]
) -> None:
    """Where the messages go is asked at the end of the block: no answer to that is no doubt about the outcome."""

    def link_for(*_slot: object) -> NoReturn:
        raise error

    with pytest.raises(told), block(cluster) as tx:
        tx.send("orders", b"1", key=A)
        monkeypatch.setattr(cluster.routes, "link_for", link_for)
    assert tx.outcome is Outcome.ROLLED_BACK
    assert requests(cluster) == [[], [], []]


@pytest.mark.parametrize("key", [A, B])
def test_parts_that_were_streamed_are_withdrawn_from_their_home(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch, key: bytes
) -> None:
    """Another home's name is not told at the end."""

    def link_for(*_slot: object) -> NoReturn:
        raise RequestTimeoutError("no answer in time")

    monkeypatch.setattr("txmq.client.transaction.block._STREAM_AT_BYTES", 50_000)
    with pytest.raises(TransactionTimeoutError), block(cluster) as tx:
        for _ in range(9):
            tx.send("orders", bytes(10_000), key=key)
        assert "put" in cluster.homes[key[0]].requests
        monkeypatch.setattr(cluster.routes, "link_for", link_for)
    assert cluster.homes[key[0]].requests[-1] == "rollback"
    assert tx.outcome is Outcome.ROLLED_BACK


def test_large_block_streams_to_its_home(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.client.transaction.block._STREAM_AT_BYTES", 50_000)
    with block(cluster) as tx:
        for _ in range(9):
            tx.send("orders", bytes(10_000), key=C)
    assert set(cluster.homes[2].requests) == {"put", "commit"}
    assert len(cluster.homes[2].values("orders")) == 9


def test_full_session_is_left_at_its_home_only(cluster: SimulatedCluster) -> None:
    cluster.homes[1].faults["commit"].append(Fault(SessionFullError("full")))
    sessions = [home.session for home in cluster.homes]
    with pytest.raises(RolledBackError), block(cluster) as tx:
        tx.send("orders", b"1", key=B)
    assert [home.session is session for home, session in zip(cluster.homes, sessions, strict=True)] == [
        True, False, True,
    ]  # fmt: skip


# --- last resource ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path, cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    quiet_resolver(monkeypatch)
    made = Shop(tmp_path / "orders.db", cluster)
    yield made
    made.resource.close()
    for connection in made.opened:
        connection.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_last_resource_prepares_at_the_home_of_its_messages(shop: Shop, cluster: SimulatedCluster, number: int) -> None:
    tx = shop.order(b"1", bytes([number]))
    assert (home_of(tx.txid), cluster.homes[number].requests) == (number, ["prepare", "commit"])
    assert (shop.rows(), cluster.homes[number].values("orders")) == ([b"1"], [b"1"])


def test_last_resource_whose_home_is_away_leaves_nothing(shop: Shop, cluster: SimulatedCluster) -> None:
    cluster.homes[2].is_away = True
    with pytest.raises(TransactionAwayError):
        shop.order(b"1", C)
    assert (shop.rows(), requests(cluster)) == ([], [[], [], []])


def test_resolver_finishes_what_is_in_doubt_at_any_home(shop: Shop, cluster: SimulatedCluster) -> None:
    with crash_at("client.tx.db_committed"), pytest.raises(SimulatedCrash):
        shop.order(b"1", B)
    with crash_at("client.tx.marker_inserted"), pytest.raises(SimulatedCrash):
        shop.order(b"2", C)
    for connection in shop.opened:
        connection.close()
    shop.resource.close()
    shop.resource.writers.renew()
    cluster.owner_dies()
    resolver = Resolver(cluster, [shop.new_resource()], cluster.clock)
    assert len(resolver.round()) == 2
    resolver.close()
    assert (shop.rows(), cluster.values("orders")) == ([b"1"], [b"1"])
    assert [set(home.states().values()) for home in cluster.homes] == [set(), {"committed"}, {"rolled-back"}]


def test_what_this_process_left_is_reported_to_its_own_home(shop: Shop, cluster: SimulatedCluster) -> None:
    cluster.homes[1].faults["commit"].extend([lost(is_executed=False)] * 40)
    tx = shop.order(b"1", B)
    assert tx.pending == ("broker",)
    cluster.homes[1].faults.clear()
    cluster.homes[1].pending_commits.settle()
    assert not tx.pending
    assert cluster.homes[1].values("orders") == [b"1"]
    assert "commit" not in cluster.homes[0].requests + cluster.homes[2].requests


# --- XA --------------------------------------------------------------------------------------------------------------


def test_xa_takes_its_id_where_the_last_one_wrote(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(cluster)
    monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _: notes)
    resource = FakeResource(Database("a", 1, cluster.clock))
    decided_at = []
    for key in (B, B, C, C):
        with block(cluster, resource) as tx:
            tx.connection(resource).add(b"1")
            tx.send("orders", b"1", key=key)
        decided_at.append(home_of(tx.txid))
    assert decided_at == [0, 1, 1, 2]
    cluster.homes[2].is_away = True
    for _ in range(2):
        with block(cluster, resource) as tx:
            tx.connection(resource).add(b"1")
            tx.send("orders", b"1", key=B)
    assert home_of(tx.txid) == 1


def test_branches_of_every_home_are_finished_by_one_resolver(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(cluster)
    monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _: notes)
    database = Database("a", 1, cluster.clock)
    resource = FakeResource(database)
    cluster.homes[0].is_away = True  # ids come from the second home
    for point, value in (("client.xa.decided", b"1"), ("client.xa.all_prepared", b"2")):
        with crash_at(point), pytest.raises(SimulatedCrash), block(cluster, resource) as tx:
            tx.connection(resource).add(value)
            tx.send("orders", value, key=B)
    cluster.homes[0].is_away = False
    for session in list(database.sessions):
        database.end_session(session)
    cluster.owner_dies()
    resolver = Resolver(cluster, [FakeResource(database)], cluster.clock)
    assert len(resolver.round()) == 2
    assert (database.rows, database.prepared, cluster.values("orders")) == ([b"1"], {}, [b"1"])


# --- an end that was not seen ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize("kind", ["local", "last resource", "xa", "half"])
def test_every_kind_asks_for_a_lost_end(
    cluster: SimulatedCluster, shop: Shop, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    first = cluster.homes[0]
    first.faults["commit"].extend([lost(is_executed=True)] * 5000)
    with pytest.raises(OutcomeUnknownError), block(cluster, timeout=5.0) as tx:
        tx.send("orders", b"0", key=A)
    first.faults.clear()
    assert ([*first.session.lost], first.session.finished_through) == ([1], 0)
    if kind == "half":
        with half(cluster, CheckBacks(cluster, "g", lambda _: Resolution.UNKNOWN), 0):
            pass
    elif kind == "last resource":
        shop.order(b"1", A)
    else:
        notes, resource = Notes(cluster), FakeResource(Database("a", 1, cluster.clock))
        monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _: notes)
        with block(cluster, *([resource] if kind == "xa" else [])) as tx:
            if kind == "xa":
                tx.connection(resource).add(b"1")
            tx.send("orders", b"1", key=A)
    assert first.session.known_outcome(1) is Outcome.COMMITTED
    assert ([*first.session.lost], first.session.finished_through) == ([], 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_while_it_asks_leaves_it_to_the_next(
    cluster: SimulatedCluster, shop: Shop, error: type[BaseException]
) -> None:
    first = cluster.homes[0]
    first.faults["commit"].extend([lost(is_executed=False)] * 5000)
    with pytest.raises(OutcomeUnknownError), block(cluster, timeout=5.0) as tx:
        tx.send("orders", b"0", key=A)
    first.faults.clear()
    first.faults["outcome"].append(Fault(error(), is_executed=True))  # type: ignore[arg-type]
    with pytest.raises(error):
        shop.order(b"1", A)
    assert (shop.rows(), cluster.values("orders"), [*first.session.lost]) == ([], [], [1])
    shop.order(b"2", A)
    assert (shop.rows(), cluster.values("orders"), [*first.session.lost]) == ([b"2"], [b"2"], [])


def test_untold_rollback_waits_for_no_earlier_end(cluster: SimulatedCluster) -> None:
    first, second, _ = cluster.homes
    first.session.next_txid()  # an earlier transaction, which waits for others: it holds the session's floor
    second.faults["prepare"].extend([lost(is_executed=True), *[lost(is_executed=False)] * 40])
    for home in (first, second):
        home.faults["rollback"].extend([lost(is_executed=False)] * 40)
    with pytest.raises(RolledBackError), block(cluster) as tx:
        for key in (A, B, C):
            tx.send("orders", b"1", key=key)
    for home in (first, second):
        home.faults.clear()
    assert "prepared" in second.states().values()
    with block(cluster) as tx:  # of the first home alone
        tx.send("orders", b"2", key=A)
    cluster.talk()
    assert "prepared" not in second.states().values()
    assert cluster.values("orders") == [b"2"]


# --- half messages and foreign branches ------------------------------------------------------------------------------


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.client.transaction.half_message.start_daemon", lambda _name, _run: None)


def half(cluster: SimulatedCluster, group: CheckBacks, number: int) -> HalfMessage:
    record: Record = (b"k", b"v", [], 1_700_000_000_000)
    return HalfMessage(cluster, group, 30.0, None).prepare("orders", number, record)


@pytest.mark.usefixtures("no_thread")
def test_half_message_lives_at_the_home_of_its_partition(cluster: SimulatedCluster) -> None:
    group = CheckBacks(cluster, "g", lambda _: Resolution.UNKNOWN)
    with half(cluster, group, 1) as message:
        assert cluster.homes[1].states() == {message.txid: "prepared"}
    assert (home_of(message.txid), cluster.homes[1].values("orders")) == (1, [b"v"])
    assert cluster.homes[0].requests == cluster.homes[2].requests == []


@pytest.mark.usefixtures("no_thread")
def test_check_backs_of_every_home_are_answered(cluster: SimulatedCluster) -> None:
    group = CheckBacks(cluster, "g", lambda _: Resolution.COMMIT)
    for number in range(3):
        half(cluster, group, number)
    cluster.clock.advance(31.0)  # their deadline has passed
    assert group.poll() == 3
    assert cluster.values("orders") == [b"v"] * 3


@pytest.mark.usefixtures("no_thread")
def test_decision_that_did_not_arrive_waits_for_its_own_home(cluster: SimulatedCluster) -> None:
    group = CheckBacks(cluster, "g", lambda _: Resolution.UNKNOWN)
    message = half(cluster, group, 2)
    cluster.homes[2].is_away = True
    message.commit()
    assert message.pending == ("broker",)
    cluster.homes[2].is_away = False
    group.report_decisions()
    assert not message.pending
    assert cluster.values("orders") == [b"v"]


def test_each_home_has_a_thread_also_a_new_one(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("txmq.client.transaction.half_message.start_daemon", lambda name, _run: started.append(name))
    group = CheckBacks(cluster, "g", lambda _: Resolution.UNKNOWN)
    group.start()
    group.start()
    assert len(started) == 3
    monkeypatch.setattr(cluster.routes, "links", lambda: (*cluster.homes, SimulatedBroker(home=0xB1)))
    group.start()
    assert len(started) == 4
    group.stop()
    monkeypatch.setattr(cluster.routes, "links", lambda: (*cluster.homes, SimulatedBroker(), SimulatedBroker()))
    group.start()
    assert len(started) == 4


@pytest.mark.parametrize("number", [0, 2])
def test_foreign_branch_is_prepared_and_found_at_its_home(cluster: SimulatedCluster, number: int) -> None:
    resource, other = BrokerXAResource(cluster, 30.0), BrokerXAResource(cluster, 30.0)
    xid = Xid(7, b"global", b"branch")
    resource.start(xid)
    _join(cluster, bytes([number]))
    resource.end(xid)
    assert resource.prepare(xid) is XACode.XA_OK
    assert list(cluster.homes[number].states().values()) == ["prepared"]
    assert other.recover(XAFlag.TMSTARTRSCAN) == [xid]
    with pytest.raises(XAError):
        other.start(xid)
    assert other.commit(xid) is XACode.XA_OK
    assert cluster.homes[number].values("orders") == [b"1"]


def test_no_branch_is_called_absent_while_a_home_is_away(cluster: SimulatedCluster) -> None:
    cluster.homes[2].is_away = True
    with pytest.raises(XAError) as caught:
        BrokerXAResource(cluster, 30.0).commit(Xid(7, b"global", b"branch"))
    assert caught.value.xa_code is XACode.XAER_RMFAIL


def _join(cluster: SimulatedCluster, key: bytes) -> None:
    branch = associated_branch(cluster)
    assert branch is not None
    partition, record = cluster.route("orders", (key, b"1", None, None))
    branch.add("orders", partition, *record)
