"""Branches of an external transaction manager: every state x call, and what the resource refuses by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tools.simulated.broker import SimulatedBroker
from tools.simulated.faults import Fault, lost
from txmq.client.transaction import current, xa_resource
from txmq.client.transaction.current import associated_branch
from txmq.client.transaction.xa_resource import (
    TRANSITIONS,
    BranchState,
    BrokerXAResource,
    Call,
    ExternalBranch,
    listed_xid,
)
from txmq.errors import ConnectionLostError, RolledBackError, TopicClosedError, TransactionStateError, XAError
from txmq.xa import XACode, XAFlag
from txmq.xid import Xid

XID, OTHER = Xid(7, b"g", b"b"), Xid(7, b"g", b"c")
ENDS = {BranchState.ENDED}


@pytest.fixture
def home() -> SimulatedBroker:
    return SimulatedBroker()


@pytest.fixture
def resource(home: SimulatedBroker) -> Iterator[BrokerXAResource]:
    token = current._associated.set(())
    yield BrokerXAResource(home, 5.0)
    current._associated.reset(token)


def send(home: SimulatedBroker, value: bytes = b"v") -> None:
    branch = associated_branch(home)
    assert branch is not None
    branch.add("orders", 0, None, value, (), 1_700_000_000_000)


def idle(resource: BrokerXAResource, home: SimulatedBroker, xid: Xid = XID, value: bytes = b"v") -> None:
    resource.start(xid)
    send(home, value)
    resource.end(xid)


@pytest.mark.parametrize(("state", "call"), list(itertools.product(BranchState, Call)))
def test_every_state_and_call_leads_somewhere_or_is_protocol_error(
    home: SimulatedBroker, state: BranchState, call: Call
) -> None:
    branch = ExternalBranch(home, XID, 1.0)
    branch.state = state
    expected = TRANSITIONS.get((state, call))
    if expected is not None:
        assert branch.next_state(call) is expected
        return
    with pytest.raises(XAError, match=state.value) as caught:
        branch.next_state(call)
    assert (caught.value.xa_code, branch.state) == (XACode.XAER_PROTO, state)


def test_nothing_leads_out_of_the_end_and_prepared_only_there() -> None:
    assert [pair for pair in TRANSITIONS if pair[0] is BranchState.ENDED] == []
    assert {following for (state, _), following in TRANSITIONS.items() if state is BranchState.PREPARED} == ENDS
    assert {state for (state, call) in TRANSITIONS if call is Call.PREPARE} == {
        BranchState.IDLE, BranchState.ROLLBACK_ONLY
    }  # fmt: skip


def test_two_phases_commit_what_was_sent_between_start_and_end(
    home: SimulatedBroker, resource: BrokerXAResource
) -> None:
    idle(resource, home)
    assert (resource.prepare(XID), home.values("orders"), resource.recover()) == (XACode.XA_OK, [], [XID])
    assert (resource.commit(XID), home.values("orders"), resource.recover()) == (XACode.XA_OK, [b"v"], [])
    assert home.requests == ["recover", "prepare", "recover", "recover", "commit", "recover"]


def test_a_branch_without_messages_is_read_only_and_over(home: SimulatedBroker, resource: BrokerXAResource) -> None:
    resource.start(XID)
    resource.end(XID)
    assert resource.prepare(XID) is XACode.XA_RDONLY
    with pytest.raises(XAError) as caught:
        resource.commit(XID)
    assert caught.value.xa_code == XACode.XAER_NOTA


def test_a_suspended_branch_takes_nothing_until_it_is_resumed(
    home: SimulatedBroker, resource: BrokerXAResource
) -> None:
    resource.start(XID)
    send(home, b"1")
    resource.end(XID, XAFlag.TMSUSPEND)
    assert associated_branch(home) is None
    resource.start(OTHER)
    resource.end(OTHER)
    resource.start(XID, XAFlag.TMRESUME)
    send(home, b"2")
    resource.end(XID)
    resource.start(XID, XAFlag.TMJOIN)
    send(home, b"3")
    resource.end(XID)
    resource.commit(XID, XAFlag.TMONEPHASE)
    assert home.values("orders") == [b"1", b"2", b"3"]


def test_a_failed_branch_can_only_be_rolled_back(home: SimulatedBroker, resource: BrokerXAResource) -> None:
    resource.start(XID)
    send(home)
    assert resource.end(XID, XAFlag.TMFAIL) is XACode.XA_OK
    with pytest.raises(XAError) as caught:
        resource.start(XID, XAFlag.TMJOIN)
    assert caught.value.xa_code == XACode.XA_RBROLLBACK
    assert resource.rollback(XID) is XACode.XA_OK
    assert (home.values("orders"), home.states()) == ([], {})


@pytest.mark.parametrize("is_executed", [True, False])
def test_a_lost_answer_to_prepare_is_asked_for_again(
    home: SimulatedBroker, resource: BrokerXAResource, is_executed: bool
) -> None:
    idle(resource, home)
    home.faults["prepare"].append(lost(is_executed=is_executed))
    assert resource.prepare(XID) is XACode.XA_OK
    assert list(home.states().values()) == ["prepared"]


def test_a_prepare_nobody_answered_is_fenced_by_the_rollback(home: SimulatedBroker, resource: BrokerXAResource) -> None:
    idle(resource, home)
    home.faults["prepare"].extend([lost(is_executed=False)] * 9)
    with pytest.raises(XAError) as caught:
        resource.prepare(XID)
    assert caught.value.xa_code == XACode.XAER_RMFAIL
    assert resource.rollback(XID) is XACode.XA_OK
    assert list(home.states().values()) == ["rolled-back"]  # though it never arrived: it may still be on its way


def test_a_refused_prepare_has_rolled_the_branch_back(home: SimulatedBroker, resource: BrokerXAResource) -> None:
    idle(resource, home)
    home.faults["prepare"].append(Fault(TopicClosedError("closed")))
    with pytest.raises(XAError) as caught:
        resource.prepare(XID)
    assert caught.value.xa_code == XACode.XA_RBOTHER
    with pytest.raises(XAError) as caught:
        resource.rollback(XID)
    assert caught.value.xa_code == XACode.XAER_NOTA


@pytest.mark.parametrize(("is_executed", "values"), [(True, [b"v"]), (False, [])])
def test_a_one_phase_commit_nobody_answered_is_asked_for_again(
    home: SimulatedBroker, resource: BrokerXAResource, is_executed: bool, values: list[bytes]
) -> None:
    idle(resource, home)
    home.faults["commit"].extend([lost(is_executed=is_executed)] * 9)
    with pytest.raises(XAError) as caught:
        resource.commit(XID, XAFlag.TMONEPHASE)
    assert caught.value.xa_code == XACode.XAER_RMFAIL
    home.faults["commit"].clear()
    if is_executed:
        assert resource.commit(XID, XAFlag.TMONEPHASE) is XACode.XA_OK
    else:
        with pytest.raises(XAError) as caught:
            resource.commit(XID, XAFlag.TMONEPHASE)
        assert caught.value.xa_code == XACode.XA_RBCOMMFAIL
    assert home.values("orders") == values


def test_broker_that_is_away_is_no_answer_about_branch(home: SimulatedBroker, resource: BrokerXAResource) -> None:
    idle(resource, home)
    resource.prepare(XID)
    for verb in ("recover", "commit"):
        home.faults[verb].extend([Fault(ConnectionLostError("away"))] * 400)
        with pytest.raises(XAError) as caught:
            resource.commit(XID)
        assert caught.value.xa_code == XACode.XAER_RMFAIL
        home.faults[verb].clear()
    assert resource.commit(XID) is XACode.XA_OK


def test_what_outgrows_one_request_goes_ahead_and_commits_with_rest(
    home: SimulatedBroker, resource: BrokerXAResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xa_resource, "_STREAM_AT_BYTES", 10)
    idle(resource, home, value=b"large" * 10)
    assert "put" in home.requests
    resource.prepare(XID)
    resource.commit(XID)
    assert home.values("orders") == [b"large" * 10]


def test_part_that_is_refused_leaves_branch_to_be_rolled_back(
    home: SimulatedBroker, resource: BrokerXAResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xa_resource, "_STREAM_AT_BYTES", 10)
    resource.start(XID)
    home.faults["put"].append(Fault(TopicClosedError("closed")))
    with pytest.raises(RolledBackError):
        send(home)
    with pytest.raises(TransactionStateError, match="rollback only"):
        send(home)
    with pytest.raises(XAError) as caught:
        resource.end(XID)
    assert caught.value.xa_code == XACode.XA_RBROLLBACK
    assert resource.rollback(XID) is XACode.XA_OK
    assert home.values("orders") == []


@pytest.mark.parametrize(
    ("xid", "flags", "code"),
    [
        (Xid(-1, b"g", b""), 0, XACode.XAER_INVAL),
        (Xid(1, b"", b""), 0, XACode.XAER_INVAL),
        (Xid(1, b"g" * 65, b""), 0, XACode.XAER_INVAL),
        (Xid(1, b"g", b"b" * 65), 0, XACode.XAER_INVAL),
        (XID, XAFlag.TMJOIN | XAFlag.TMRESUME, XACode.XAER_INVAL),
        (XID, XAFlag.TMONEPHASE, XACode.XAER_INVAL),
        (XID, XAFlag.TMASYNC, XACode.XAER_ASYNC),
        (XID, XAFlag.TMJOIN, XACode.XAER_NOTA),
        (XID, XAFlag.TMRESUME, XACode.XAER_NOTA),
    ],
)
def test_start_refuses_what_the_specification_refuses(
    resource: BrokerXAResource, xid: Xid, flags: int, code: XACode
) -> None:
    with pytest.raises(XAError) as caught:
        resource.start(xid, flags)
    assert caught.value.xa_code == code


def test_one_thread_has_one_branch_and_one_xid_one_branch(home: SimulatedBroker, resource: BrokerXAResource) -> None:
    resource.start(XID)
    with pytest.raises(XAError) as caught:
        resource.start(OTHER)
    assert caught.value.xa_code == XACode.XAER_PROTO
    send(home)
    resource.end(XID)
    for _ in range(2):  # idle here, then prepared in the broker
        with pytest.raises(XAError) as caught:
            resource.start(XID)
        assert caught.value.xa_code == XACode.XAER_DUPID
        if home.states() == {}:
            resource.prepare(XID)


def test_a_scan_begins_with_its_flag_and_answers_once(home: SimulatedBroker, resource: BrokerXAResource) -> None:
    with pytest.raises(XAError) as caught:
        resource.recover(XAFlag.TMNOFLAGS)
    assert caught.value.xa_code == XACode.XAER_INVAL
    idle(resource, home)
    resource.prepare(XID)
    assert resource.recover(XAFlag.TMSTARTRSCAN) == [XID]
    assert resource.recover(XAFlag.TMNOFLAGS) == []
    assert resource.recover(XAFlag.TMENDRSCAN) == []
    with pytest.raises(XAError):
        resource.recover(XAFlag.TMENDRSCAN)


def test_xid_is_found_in_every_row_that_tells_it() -> None:
    text = "7.67.62"
    assert listed_xid({"kind": "foreign", "xid": text}) == XID
    assert listed_xid({"kind": "foreign", "xid": f"2147483648{text[1:]}"}) is None  # an older broker kept it
    assert listed_xid({"kind": "local", "heuristics": [{"uuid": "u"}, {"xid": text}]}) == XID
    assert listed_xid({"kind": "local", "heuristics": []}) is None
