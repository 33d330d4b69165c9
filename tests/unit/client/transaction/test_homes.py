"""Local transactions over several homes: one decides, the others have prepared their parts."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import pytest

from tests.unit.client.transaction.moments import Moments
from tools.simulated.broker import SimulatedBroker
from tools.simulated.cluster import SimulatedCluster
from tools.simulated.faults import Fault, lost
from txmq.client.transaction.background_resolver import BackgroundResolver
from txmq.client.transaction.block import Transaction
from txmq.errors import (
    ConnectionLostError,
    DiskFullError,
    OutcomeUnknownError,
    OverloadedError,
    RolledBackError,
    SessionFullError,
    TransactionAwayError,
    TransactionConflictError,
    TransactionTimeoutError,
)
from txmq.model import Outcome, SendStatus
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xid import TxId

A, B, C = b"\x00", b"\x01", b"\x02"  # keys of messages for the first, second, third home
LARGE = 10_000  # bytes of a message, where few are kept in memory


@pytest.fixture
def cluster() -> SimulatedCluster:
    return SimulatedCluster()


def block(cluster: SimulatedCluster, timeout: float = 30.0) -> Transaction:
    return Transaction(cluster, cluster, (), timeout)


def transfer(cluster: SimulatedCluster, value: bytes = b"1", timeout: float = 30.0) -> Transaction:
    """A message for each home."""
    with block(cluster, timeout) as tx:
        for key in (A, B, C):
            tx.send("orders", value, key=key)
    return tx


def home_of(txid: str) -> int:
    return TxId.parse(txid).home - 0xA1


# --- all is well -----------------------------------------------------------------------------------------------------


def test_others_prepare_one_decides_and_then_they_are_told(cluster: SimulatedCluster) -> None:
    tx = transfer(cluster)
    assert [home.requests for home in cluster.homes] == [["commit"], ["prepare", "commit"], ["prepare", "commit"]]
    assert (tx.outcome, tx.pending, home_of(tx.txid)) == (Outcome.COMMITTED, (), 0)
    assert [(r.partition, r.offset, r.status) for r in tx.results] == [
        (number, 0, SendStatus.ACKNOWLEDGED) for number in range(3)
    ]
    assert {message.txid for home in cluster.homes for message in home.messages("orders")} == {tx.txid}
    cluster.talk()
    cluster.check()


def test_parts_of_all_homes_carry_their_keys(cluster: SimulatedCluster) -> None:
    transfer(cluster)
    with block(cluster) as tx:
        tx.send("orders", b"alone", key=B)
    bodies = [sent.body for home in cluster.homes for sent in home.sent if sent.body]
    assert len(bodies) == 4
    assert all(b" keys=" in body for body in bodies)


def test_messages_stay_in_order_at_each_home(cluster: SimulatedCluster) -> None:
    with block(cluster) as tx:
        for number in range(6):
            tx.send("orders", b"%d" % number, key=bytes([number % 2]))
    assert [home.values("orders") for home in cluster.homes] == [[b"0", b"2", b"4"], [b"1", b"3", b"5"], []]
    assert [(r.partition, r.offset) for r in tx.results] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_id_asked_for_early_decides_where_nothing_was_sent(cluster: SimulatedCluster) -> None:
    with block(cluster) as tx:
        assert home_of(tx.txid) == 0
        tx.send("orders", b"1", key=B)
    assert [home.requests for home in cluster.homes] == [["commit"], ["prepare", "commit"], []]
    assert [r.offset for r in tx.results] == [0]
    cluster.talk()
    cluster.check()


def test_savepoint_taken_back_leaves_its_home_out(cluster: SimulatedCluster) -> None:
    with block(cluster) as tx:
        tx.send("orders", b"1", key=A)
        tx.send("orders", b"2", key=B)
        tx._messages.take_back(1)
    assert [home.requests for home in cluster.homes] == [["commit"], [], []]


def test_exception_in_the_body_sends_nothing_to_any_home(cluster: SimulatedCluster) -> None:
    with pytest.raises(ValueError, match="body"), block(cluster) as tx:
        tx.send("orders", b"1", key=A)
        tx.send("orders", b"2", key=B)
        raise ValueError("body")
    assert (tx.outcome, [home.requests for home in cluster.homes]) == (Outcome.ROLLED_BACK, [[], [], []])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.client.transaction.block._STREAM_AT_BYTES", 4 * LARGE)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("last", [A, B])
def test_large_block_streams_to_every_home(cluster: SimulatedCluster, last: bytes) -> None:
    with block(cluster) as tx:
        for number in range(10):
            tx.send("orders", bytes(LARGE), key=bytes([number % 2]))
        tx.send("orders", b"last", key=last)
    assert [len(home.values("orders")) for home in cluster.homes] == [5 + (last == A), 5 + (last == B), 0]
    assert sorted(r.offset for r in tx.results if r.offset is not None) == sorted([*range(5), *range(5), 5])
    cluster.talk()
    cluster.check()


@pytest.mark.usefixtures("narrow")
def test_large_block_that_fails_is_withdrawn_everywhere(cluster: SimulatedCluster) -> None:
    with pytest.raises(ValueError, match="body"), block(cluster) as tx:
        for number in range(10):
            tx.send("orders", bytes(LARGE), key=bytes([number % 2]))
        raise ValueError("body")
    assert [set(home.states().values()) for home in cluster.homes] == [{"rolled-back"}, {"rolled-back"}, set()]


def test_ids_of_every_home_are_finished(cluster: SimulatedCluster) -> None:
    for _ in range(3):
        assert transfer(cluster).results[2].offset is not None
    assert [home.session.finished_through for home in cluster.homes] == [3, 3, 3]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("error", "is_retriable"),
    [(DiskFullError("full"), True), (OverloadedError("busy"), True), (TransactionConflictError("late"), True)],
)
def test_refused_prepare_rolls_back_everywhere(
    cluster: SimulatedCluster, number: int, error: Exception, is_retriable: bool
) -> None:
    cluster.homes[number].faults["prepare"].append(Fault(error))  # type: ignore[arg-type]
    with pytest.raises(RolledBackError) as caught:
        transfer(cluster)
    assert caught.value.retriable is is_retriable
    assert cluster.values("orders") == []
    cluster.check()
    assert transfer(cluster).outcome is Outcome.COMMITTED


def test_full_session_of_branch_home_is_left(cluster: SimulatedCluster) -> None:
    cluster.homes[1].faults["prepare"].append(Fault(SessionFullError("full")))
    full = cluster.homes[1].session
    with pytest.raises(RolledBackError):
        transfer(cluster)
    assert cluster.homes[1].session is not full
    assert transfer(cluster).outcome is Outcome.COMMITTED


def test_refused_decision_rolls_back_everywhere(cluster: SimulatedCluster) -> None:
    cluster.homes[0].faults["commit"].append(Fault(DiskFullError("full")))
    with pytest.raises(RolledBackError):
        transfer(cluster)
    assert cluster.values("orders") == []
    cluster.check()


def test_home_that_is_away_costs_nothing_elsewhere(cluster: SimulatedCluster) -> None:
    cluster.homes[2].is_away = True
    with pytest.raises(TransactionAwayError):
        transfer(cluster)
    assert [home.requests for home in cluster.homes] == [[], [], []]


def test_deadline_that_has_passed_sends_nothing(cluster: SimulatedCluster) -> None:
    with pytest.raises(TransactionTimeoutError), block(cluster, timeout=5.0) as tx:
        tx.send("orders", b"1", key=A)
        tx.send("orders", b"2", key=B)
        cluster.clock.advance(6.0)
    assert [home.requests for home in cluster.homes] == [[], [], []]


# --- answers that are lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_lost_prepare_is_sent_again_under_its_id(cluster: SimulatedCluster, number: int, is_executed: bool) -> None:
    cluster.homes[number].faults["prepare"].append(lost(is_executed=is_executed))
    assert transfer(cluster).outcome is Outcome.COMMITTED
    assert len(cluster.homes[number].branches()) == 1
    assert cluster.values("orders") == [b"1"] * 3


@pytest.mark.parametrize("is_executed", [False, True])
def test_lost_decision_is_sent_again_under_its_id(cluster: SimulatedCluster, is_executed: bool) -> None:
    cluster.homes[0].faults["commit"].append(lost(is_executed=is_executed))
    assert transfer(cluster).outcome is Outcome.COMMITTED
    assert cluster.values("orders") == [b"1"] * 3


@pytest.mark.parametrize("is_executed", [False, True])
def test_decision_without_answer_is_unknown_and_homes_agree(cluster: SimulatedCluster, is_executed: bool) -> None:
    cluster.homes[0].faults["commit"].append(lost(is_executed=is_executed))
    cluster.homes[0].faults["commit"].extend([lost(is_executed=False)] * 40)
    cluster.homes[0].faults["rollback"].extend([lost(is_executed=False)] * 40)
    with pytest.raises(OutcomeUnknownError) as caught:
        transfer(cluster)
    assert home_of(str(caught.value.txid)) == 0
    for home in cluster.homes:
        home.faults.clear()
        home.owner_dies()
    cluster.talk()
    cluster.check()
    assert cluster.values("orders") == [b"1"] * (3 if is_executed else 0)


def test_unseen_end_is_asked_for_later_at_every_home(cluster: SimulatedCluster) -> None:
    cluster.homes[0].faults["commit"].append(lost(is_executed=True))
    cluster.homes[0].faults["commit"].extend([lost(is_executed=False)] * 40)
    with pytest.raises(OutcomeUnknownError):
        transfer(cluster)
    cluster.homes[0].faults.clear()
    cluster.talk()
    for _ in range(2):
        assert transfer(cluster).results[2].offset is not None
    assert [home.session.finished_through for home in cluster.homes] == [3, 3, 3]


def test_home_lost_behind_the_decision_is_pending_until_told(cluster: SimulatedCluster) -> None:
    def leaves(home: SimulatedBroker, verb: str) -> None:
        cluster.homes[2].is_away |= verb == "commit"

    cluster.homes[0].witness = leaves
    tx = transfer(cluster)
    assert (tx.outcome, tx.pending) == (Outcome.COMMITTED, ("home 00000000000000a3",))
    assert [r.status for r in tx.results] == [SendStatus.ACKNOWLEDGED] * 2 + [SendStatus.PENDING]
    cluster.homes[0].witness = None
    cluster.homes[2].is_away = False
    cluster.homes[2].pending_commits.look()
    assert tx.pending == ()
    assert tx.results[2].offset == 0
    cluster.talk()
    cluster.check()


# --- what waits for a home that was told -----------------------------------------------------------------------------


def test_wait_tells_the_home_again_and_gives_up_in_time(cluster: SimulatedCluster) -> None:
    cluster.homes[1].faults["commit"].extend([lost(is_executed=False)] * 3)
    transfer(cluster)
    commits = cluster.homes[1].pending_commits
    assert commits
    cluster.homes[1].is_away = True
    with pytest.raises(ConnectionLostError):
        commits.wait(("orders", 1), cluster.clock.monotonic() + 2.0)
    commits.wait(("orders", 4), cluster.clock.monotonic())  # of the same home: the branch does not write to it
    cluster.homes[1].is_away = False
    commits.wait(("orders", 1), cluster.clock.monotonic() + 30.0)
    assert not commits
    assert cluster.homes[1].values("orders") == [b"1"]


def test_wait_goes_on_while_the_home_is_away(cluster: SimulatedCluster) -> None:
    cluster.homes[1].faults["commit"].extend([lost(is_executed=False)] * 10)
    transfer(cluster)
    began = cluster.clock.monotonic()
    with pytest.raises(ConnectionLostError):
        cluster.homes[1].pending_commits.wait(("orders", 1), began + 5.0)
    assert cluster.clock.monotonic() >= began + 5.0


@pytest.mark.parametrize("keys", [[A], [A, B]])
def test_partition_is_held_until_its_messages_are_placed(cluster: SimulatedCluster, keys: list[bytes]) -> None:
    """The home has decided, and places after an earlier transaction of the same key."""
    home = cluster.homes[0]
    earlier = home.prepare_earlier("orders")
    with block(cluster) as tx:
        for key in keys:
            tx.send("orders", b"1", key=key)
    commits = home.pending_commits
    assert (tx.outcome, commits.holds(("orders", 0))) == (Outcome.COMMITTED, True)
    assert home.session.finished_through == 0  # else the home may drop the outcome, and with it the place
    earlier()
    commits.wait(("orders", 0), cluster.clock.monotonic() + 30.0)
    assert not commits
    assert home.session.finished_through == 1
    assert tx.results[0].offset == 0


def test_next_transaction_at_home_tells_it_first(cluster: SimulatedCluster) -> None:
    cluster.homes[1].faults["commit"].append(lost(is_executed=False))
    transfer(cluster)
    transfer(cluster, b"2")
    assert cluster.homes[1].values("orders") == [b"1", b"2"]


def test_home_that_decided_alone_is_logged_and_forgotten(
    cluster: SimulatedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.homes[1].faults["commit"].append(Fault(TransactionConflictError("an operator rolled it back")))
    tx = transfer(cluster)
    assert [r.status for r in tx.results] == [
        SendStatus.ACKNOWLEDGED, SendStatus.PENDING, SendStatus.ACKNOWLEDGED,
    ]  # fmt: skip
    assert not cluster.homes[1].pending_commits
    assert "heuristic" in caplog.text


# --- the client dies, homes die --------------------------------------------------------------------------------------


def moments_of(make: type[SimulatedCluster] = SimulatedCluster) -> int:
    cluster = make(2)
    moments = Moments(cluster)
    two(cluster)
    return moments.passed


def two(cluster: SimulatedCluster, value: bytes = b"1") -> Transaction:
    with block(cluster) as tx:
        tx.send("orders", value, key=A)
        tx.send("orders", value, key=B)
    return tx


ALL = range(1, 7)  # prepare at B, commit at A, commit at B: before and after each


def test_a_transfer_has_six_moments() -> None:
    assert moments_of() == len(ALL)


@pytest.mark.parametrize("at", ALL)
def test_client_that_dies_at_any_moment_leaves_all_or_nothing(at: int) -> None:
    def dies() -> None:
        raise SimulatedCrash("client")

    cluster = SimulatedCluster(2)
    moments = Moments(cluster)
    moments.at[at] = dies
    with pytest.raises(SimulatedCrash):
        two(cluster)
    cluster.owner_dies()
    cluster.talk()
    cluster.check()
    assert [home.values("orders") for home in cluster.homes] in ([[], []], [[b"1"], [b"1"]])
    assert bool(cluster.values("orders")) is (at >= 4), "decided once the deciding home has executed it"


@pytest.mark.parametrize("second", [None, *ALL])
@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("number", [0, 1])
def test_homes_that_die_at_two_moments_agree_with_caller(number: int, first: int, second: int | None) -> None:
    cluster = SimulatedCluster(2)
    moments = Moments(cluster)

    def away(home: SimulatedBroker) -> None:
        home.is_away = True

    if second is not None:
        moments.at[second] = lambda: away(cluster.homes[1 - number])
    moments.at[first] = lambda: away(cluster.homes[number])
    told: Outcome | None
    try:
        told = two(cluster).outcome
    except OutcomeUnknownError:
        told = None
    except RolledBackError:
        told = Outcome.ROLLED_BACK
    for home in cluster.homes:
        home.is_away, home.witness = False, None
    for home in cluster.homes:
        home.pending_commits.look()
    cluster.owner_dies()
    cluster.talk()
    cluster.check()
    assert [home.values("orders") for home in cluster.homes] in ([[], []], [[b"1"], [b"1"]])
    if told is not None:
        assert bool(cluster.values("orders")) is (told is Outcome.COMMITTED)


@pytest.mark.parametrize("at", ALL)
def test_interrupt_at_any_moment_leads_to_an_end(at: int) -> None:
    def strikes() -> None:
        raise KeyboardInterrupt

    cluster = SimulatedCluster(2)
    moments = Moments(cluster)
    moments.at[at] = strikes
    with pytest.raises(KeyboardInterrupt), block(cluster) as tx:
        tx.send("orders", b"1", key=A)
        tx.send("orders", b"1", key=B)
    outcome = tx.outcome
    for home in cluster.homes:
        home.pending_commits.look()
    cluster.owner_dies()
    cluster.talk()
    cluster.check()
    assert bool(cluster.values("orders")) is (at >= 4)
    assert outcome is (Outcome.COMMITTED if at >= 4 else Outcome.ROLLED_BACK)


def test_messages_that_wait_for_their_place_get_offsets_when_asked(cluster: SimulatedCluster) -> None:
    earlier = cluster.homes[0].prepare_earlier("orders")
    cluster.homes[0].requests.clear()
    with block(cluster) as tx:
        tx.send("orders", b"1", key=A)
    assert tx.outcome is Outcome.COMMITTED
    earlier()
    assert [r.offset for r in tx.results] == [0]
    assert cluster.homes[0].requests == ["commit", "commit"]


def test_untold_home_is_told_in_the_background(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundResolver(cluster)
    monkeypatch.setattr("txmq.client.transaction.background_resolver.start_daemon", lambda _name, _run: None)
    monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _: background)
    cluster.homes[0].witness = lambda home, verb: setattr(cluster.homes[2], "is_away", verb == "commit")
    tx = transfer(cluster)
    assert tx.pending
    cluster.homes[0].witness, cluster.homes[2].is_away = None, False
    background.wake()
    assert not background.wait(0.0)
    assert not tx.pending
    assert cluster.values("orders") == [b"1"] * 3


def test_home_that_places_later_is_pending(cluster: SimulatedCluster) -> None:
    earlier = cluster.homes[0].prepare_earlier("orders")
    with block(cluster) as tx:
        tx.send("orders", b"1", key=A)
    assert (tx.outcome, tx.pending) == (Outcome.COMMITTED, ("home 00000000000000a1",))
    assert [result.offset for result in tx.results] == [None]
    earlier()
    assert ([result.offset for result in tx.results], len(tx.pending)) == ([0], 0)


def test_home_whose_answer_was_waited_for_in_vain_is_pending(cluster: SimulatedCluster) -> None:
    home = cluster.homes[1]
    home.faults["commit"].extend([lost(is_executed=False)] * 40)
    tx = transfer(cluster)
    home.is_away = True
    assert [r.offset for r in tx.results] == [0, None, 0]
    assert tx.pending == ("home 00000000000000a2",)
    home.faults.clear()
    home.is_away = False
    assert [len(tx.pending) for _ in range(2)] == [1, 0]  # the first look sends it again
