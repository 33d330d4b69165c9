"""HalfMessage messages and check-backs: what the application says goes, whoever dies, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chains import has_circle
from tests.crash_points import crash_at
from tests.logged import said
from tools.simulated.broker import SimulatedBroker
from tools.simulated.cluster import SimulatedCluster
from tools.simulated.connection import Sent
from tools.simulated.faults import Fault, GivenReply, Reply, lost
from txmq.client.transaction.half_message import CheckBacks, CheckRequest, HalfMessage
from txmq.errors import (
    DiskFullError,
    FencedError,
    HeuristicCommitError,
    HeuristicRollbackError,
    OutcomeUnknownError,
    RequestTimeoutError,
    RolledBackError,
    TransactionStateError,
    TransactionTimeoutError,
    UnavailableError,
)
from txmq.log.records import TAG_HEADER
from txmq.model import Outcome, Resolution, SendStatus
from txmq.protocol.transaction_bodies import DueHalf, encode_half
from txmq.runtime.crashpoints import SimulatedCrash

COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN


class Group:
    """A member of the group: what it was asked, and what it answers."""

    def __init__(self, home: SimulatedBroker | SimulatedCluster) -> None:
        self.home = home
        self.asked: list[CheckRequest] = []
        self.answer: Callable[[CheckRequest], Any] = lambda _: UNKNOWN
        self.group = CheckBacks(home, "g", self._check)

    def _check(self, half: CheckRequest) -> Resolution:
        self.asked.append(half)
        resolution: Resolution = self.answer(half)
        return resolution

    def poll(self) -> int:
        """Ask for what is due when the next check-back of each is."""
        self.home.clock.advance(61.0)
        return self.group.poll()

    def half(self, value: bytes = b"v", timeout: float = 30.0) -> HalfMessage:
        record = (b"42", value, [(TAG_HEADER, b"T"), ("h", b"x")], 1_700_000_000_000)
        return HalfMessage(self.home, self.group, timeout, None).prepare("orders", 0, record)


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.client.transaction.half_message.start_daemon", lambda _name, _run: None)


@pytest.fixture
def home() -> SimulatedBroker:
    return SimulatedBroker()


@pytest.fixture
def group(home: SimulatedBroker) -> Group:
    return Group(home)


# --- the block -------------------------------------------------------------------------------------------------------


def test_message_is_prepared_before_block_and_out_behind_it(home: SimulatedBroker, group: Group) -> None:
    with group.half(b"created") as half:
        assert home.states() == {half.txid: "prepared"}
        assert (home.values("orders"), half.outcome, half.result.status) == ([], Outcome.UNKNOWN, SendStatus.PENDING)
    assert (home.values("orders"), half.outcome, half.pending) == ([b"created"], Outcome.COMMITTED, ())
    assert (half.result.status, half.result.offset) == (SendStatus.ACKNOWLEDGED, 0)


def test_commit_and_rollback_work_inside_and_outside_the_block(home: SimulatedBroker, group: Group) -> None:
    with group.half(b"1") as first:
        first.rollback()
        first.rollback()
    second = group.half(b"2")
    second.commit()
    second.commit()
    assert (first.outcome, second.outcome) == (Outcome.ROLLED_BACK, Outcome.COMMITTED)
    assert home.values("orders") == [b"2"]
    with pytest.raises(TransactionStateError, match="decided before"):
        second.rollback()
    with pytest.raises(TransactionStateError), second:
        pass


@pytest.mark.parametrize(("answer", "state"), [(COMMIT, "committed"), (ROLLBACK, "rolled-back"), (UNKNOWN, "prepared")])
def test_what_a_block_did_that_raised_the_checker_says(
    home: SimulatedBroker, group: Group, answer: Resolution, state: str
) -> None:
    group.answer = lambda _: answer
    with pytest.raises(KeyError) as caught, group.half() as half:
        raise KeyError("the connection was lost while the row committed")
    assert home.states() == {half.txid: state}
    [asked] = group.asked
    assert (asked.txid, asked.key, asked.value, asked.topic, asked.attempt) == (half.txid, b"42", b"v", "orders", 0)
    assert (asked.message.tag, asked.message.headers, asked.message.offset) == ("T", {"h": b"x"}, -1)
    assert bool(getattr(caught.value, "__notes__", [])) is (answer is UNKNOWN)


def test_ctrl_c_in_block_leaves_half_to_check_backs(home: SimulatedBroker, group: Group) -> None:
    with pytest.raises(KeyboardInterrupt), group.half() as half:
        raise KeyboardInterrupt
    assert (home.states(), group.asked) == ({half.txid: "prepared"}, [])


# --- preparing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_executed", [True, False])
def test_a_lost_answer_to_prepare_is_asked_for_again(home: SimulatedBroker, group: Group, is_executed: bool) -> None:
    home.faults["prepare"].append(lost(is_executed=is_executed))
    with group.half():
        pass
    assert home.values("orders") == [b"v"]


def test_a_refused_half_means_that_nothing_happened(home: SimulatedBroker, group: Group) -> None:
    home.faults["prepare"].append(Fault(DiskFullError("full")))
    with pytest.raises(RolledBackError) as caught:
        group.half()
    assert isinstance(caught.value.__cause__, DiskFullError)
    assert (home.states(), "rollback" in home.requests) == ({}, False)


def test_unanswered_prepare_is_rolled_back_as_its_work_never_began(home: SimulatedBroker, group: Group) -> None:
    home.faults["prepare"].extend([Fault(RequestTimeoutError("late"), is_executed=True)])
    with pytest.raises(TransactionTimeoutError):
        group.half()
    assert list(home.states().values()) == ["rolled-back"]


def test_error_of_unsent_expired_half_message_is_no_own_cause(home: SimulatedBroker, group: Group) -> None:
    home.faults["prepare"].append(lost(is_executed=False))
    with pytest.raises(TransactionTimeoutError) as caught:
        group.half(timeout=0.0001)
    assert not has_circle(caught.value)


def test_possibly_prepared_half_message_is_rolled_back_later(home: SimulatedBroker, group: Group) -> None:
    home.faults["prepare"].append(Fault(RequestTimeoutError("late"), is_executed=True))
    home.faults["rollback"].extend([lost(is_executed=False)] * 5)
    with pytest.raises(TransactionTimeoutError):
        group.half()
    assert list(home.states().values()) == ["prepared"]
    home.faults["rollback"].clear()
    group.group.report_decisions()
    assert list(home.states().values()) == ["rolled-back"]


# --- deciding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_executed", [True, False])
def test_a_lost_answer_to_commit_is_asked_for_again(home: SimulatedBroker, group: Group, is_executed: bool) -> None:
    home.faults["commit"].extend([lost(is_executed=is_executed), Fault(UnavailableError("starting"))])
    with group.half() as half:
        pass
    assert (half.outcome, home.values("orders")) == (Outcome.COMMITTED, [b"v"])


def test_absent_broker_is_told_later_and_the_block_ends_normally(home: SimulatedBroker, group: Group) -> None:
    home.faults["commit"].extend([lost(is_executed=False)] * 10)
    with group.half() as half:
        pass
    assert (half.pending, half.outcome, home.states()) == (("broker",), Outcome.UNKNOWN, {half.txid: "prepared"})
    home.faults["commit"].clear()
    group.group.report_decisions()
    assert (half.pending, half.outcome, home.values("orders")) == ((), Outcome.COMMITTED, [b"v"])


def test_a_commit_behind_a_durable_rollback_raises(home: SimulatedBroker, group: Group) -> None:
    half = group.half()
    home.call("rollback", half.txid, timeout=1.0)
    with pytest.raises(HeuristicRollbackError) as caught:
        half.commit()
    assert (caught.value.txid, half.outcome, home.values("orders")) == (half.txid, Outcome.ROLLED_BACK, [])


def test_a_rollback_behind_a_durable_commit_raises(home: SimulatedBroker, group: Group) -> None:
    half = group.half()
    home.call("commit", half.txid, body=())
    with pytest.raises(HeuristicCommitError):
        half.rollback()
    assert half.outcome is Outcome.COMMITTED


def test_broker_that_keeps_nothing_of_it_leaves_outcome_unknown(home: SimulatedBroker, group: Group) -> None:
    half = group.half()
    home.faults["commit"].append(Fault(FencedError("long ago")))
    with pytest.raises(OutcomeUnknownError):
        half.commit()
    assert half.outcome is Outcome.UNKNOWN


def test_ctrl_c_while_broker_is_told_does_not_undo_decision(
    home: SimulatedBroker, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = group.half()

    def interrupt(*_: Any, **__: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(home.control, "call", interrupt)
        with pytest.raises(KeyboardInterrupt):
            half.commit()
    group.group.report_decisions()
    assert (half.outcome, home.values("orders")) == (Outcome.COMMITTED, [b"v"])


@pytest.mark.parametrize("point", ["client.half.prepared", "client.half.decided", "client.check.answered"])
def test_whoever_dies_another_member_decides(home: SimulatedBroker, group: Group, point: str) -> None:
    if point == "client.check.answered":
        group.answer = lambda _: COMMIT
        group.half()
        with crash_at(point), pytest.raises(SimulatedCrash):
            group.poll()
    else:
        with crash_at(point), pytest.raises(SimulatedCrash), group.half():
            pass
    assert list(home.states().values()) == ["prepared"]
    other = Group(home)
    other.answer = lambda _: COMMIT
    other.poll()
    assert home.values("orders") == [b"v"]


# --- check-backs -----------------------------------------------------------------------------------------------------


def test_a_member_answers_for_an_owner_that_is_gone(home: SimulatedBroker, group: Group) -> None:
    mine, yours = group.half(b"mine"), group.half(b"yours")
    other = Group(home)
    other.answer = lambda half: COMMIT if half.value == b"mine" else ROLLBACK
    assert other.poll() == 2
    assert (home.states(), home.values("orders")) == ({mine.txid: "committed", yours.txid: "rolled-back"}, [b"mine"])
    [first, _] = other.asked
    assert (first.txid, first.attempt, first.key, first.message.tag) == (mine.txid, 1, b"42", "T")
    assert (first.message.offset, first.message.txid) == (-1, mine.txid)


def test_a_thousand_times_unknown_never_drops_it(home: SimulatedBroker, group: Group) -> None:
    half = group.half()
    for _ in range(1000):
        assert group.poll() == 1
    assert home.states() == {half.txid: "prepared"}
    assert [asked.attempt for asked in group.asked] == list(range(1, 1001))
    group.answer = lambda _: COMMIT
    group.poll()
    assert (home.values("orders"), group.poll()) == ([b"v"], 0)


@pytest.mark.parametrize("answer", [None, True, "commit"])
def test_no_resolution_is_unknown_and_logged(
    home: SimulatedBroker, group: Group, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    half = group.half()
    group.answer = lambda _: answer
    group.poll()
    assert home.states() == {half.txid: "prepared"}
    assert said(caplog)[0]["event"] == "the checker answered no Resolution"


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_a_checker_that_raises_has_said_unknown_and_is_logged(
    home: SimulatedBroker, group: Group, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    """Found: SystemExit ended the thread, and nobody was asked in this process any more."""
    half = group.half()

    def fail(_: CheckRequest) -> Any:
        raise kind("mine")

    group.answer = fail
    assert group.poll() == 1
    trace = caplog.records[0].exc_info
    [line] = said(caplog)
    assert (line["event"], line["txid"], line["level"]) == ("the checker failed", half.txid, "error")
    assert kind.__name__ in line["error"]
    assert trace is not None
    assert trace[0] is kind
    assert home.states() == {half.txid: "prepared"}


def test_an_answer_that_cannot_be_delivered_is_asked_for_again(home: SimulatedBroker, group: Group) -> None:
    group.half()
    group.answer = lambda _: COMMIT
    home.faults["commit"].extend([lost(is_executed=False)] * 3)
    group.poll()
    assert home.values("orders") == []
    home.faults["commit"].clear()
    group.poll()
    assert (home.values("orders"), len(group.asked)) == ([b"v"], 2)


def test_late_checker_settles_nothing_and_logs_it(
    home: SimulatedBroker, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    half = group.half()

    def late(_: CheckRequest) -> Resolution:
        half.commit()
        return ROLLBACK

    group.answer = late
    group.poll()
    assert home.values("orders") == [b"v"]
    assert said(caplog)[0]["event"] == "a half message was decided otherwise before"


def test_unreadable_half_message_does_not_delay_the_others(
    home: SimulatedBroker, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    sound = group.half(b"sound")
    deleted = encode_half(DueHalf("c-a-7-9", 1, 5, ()))  # its topic is gone

    def with_deleted(sent: Sent, take: Callable[[], Reply]) -> Reply:
        return GivenReply(deleted + take().result()) if sent.verb == "checks" else take()

    home.intercept = with_deleted
    group.answer = lambda _: COMMIT
    assert group.poll() == 2
    assert (home.states()[sound.txid], len(group.asked)) == ("committed", 1)
    assert said(caplog)[0]["event"] == "a half message cannot be read"


def test_late_decision_that_meets_another_is_logged_and_dropped(
    home: SimulatedBroker, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    home.faults["commit"].extend([lost(is_executed=False)] * 10)
    with group.half() as half:
        pass
    home.faults["commit"].clear()
    home.call("rollback", half.txid, timeout=1.0)
    group.group.report_decisions()
    assert (half.outcome, half.pending) == (Outcome.ROLLED_BACK, ())
    assert said(caplog)[0]["event"] == "a half message ended otherwise than decided"


def test_half_that_waits_for_place_holds_its_partition() -> None:
    cluster = SimulatedCluster(2)
    home = cluster.homes[0]
    group = Group(cluster)
    earlier = home.prepare_earlier("orders")
    half = group.half()
    half.commit()
    commits = home.pending_commits
    assert (half.outcome, half.pending, commits.holds(("orders", 0))) == (Outcome.COMMITTED, (), True)
    assert home.session.finished_through == 0  # else the home may drop the outcome, and with it the place
    earlier()
    assert (half.result.status, half.result.offset) == (SendStatus.ACKNOWLEDGED, 0)
    assert (bool(commits), home.session.finished_through) == (False, 1)
