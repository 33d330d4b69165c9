"""Branches of an external transaction manager over several homes: one has the xid, the others follow it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.transaction.moments import Moments
from tools.simulated.broker import SimulatedBroker
from tools.simulated.cluster import SimulatedCluster
from tools.simulated.faults import Fault, lost
from txmq.client.transaction import current, xa_resource
from txmq.client.transaction.current import associated_branch
from txmq.client.transaction.xa_resource import BrokerXAResource
from txmq.errors import DiskFullError, TopicClosedError, XAError
from txmq.model import Outcome
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa.xopen import XACode, XAFlag
from txmq.xid import Xid

XID = Xid(7, b"global", b"branch")
BOTH = [[b"v"], [b"v"]]
NONE: list[list[bytes]] = [[], []]
TWO_PHASES, ONE_PHASE = range(1, 17), range(1, 11)  # two moments of each request


@pytest.fixture(autouse=True)
def thread() -> Iterator[None]:
    token = current._associated.set(())
    yield
    current._associated.reset(token)


@pytest.fixture
def cluster() -> SimulatedCluster:
    return SimulatedCluster(2)


@pytest.fixture
def resource(cluster: SimulatedCluster) -> BrokerXAResource:
    return BrokerXAResource(cluster, 5.0)


def send(cluster: SimulatedCluster, number: int, value: bytes = b"v") -> None:
    branch = associated_branch(cluster)
    assert branch is not None
    partition, record = cluster.route("orders", (bytes([number]), value, None, None))
    branch.add("orders", partition, *record)


def idle(resource: BrokerXAResource, cluster: SimulatedCluster, value: bytes = b"v") -> None:
    resource.start(XID)
    for number in range(len(cluster.homes)):
        send(cluster, number, value)
    resource.end(XID)


def values(cluster: SimulatedCluster) -> list[list[bytes | None]]:
    return [home.values("orders") for home in cluster.homes]


def homes_settle(cluster: SimulatedCluster) -> None:
    for home in cluster.homes:
        home.is_away, home.witness = False, None
        home.faults.clear()
    for home in cluster.homes:
        home.pending_commits.look()
    cluster.owner_dies()
    cluster.talk()
    cluster.check()


# --- all is well -----------------------------------------------------------------------------------------------------


def test_others_prepare_first_and_are_told_behind_the_commit(
    cluster: SimulatedCluster, resource: BrokerXAResource
) -> None:
    idle(resource, cluster)
    assert resource.prepare(XID) is XACode.XA_OK
    sessions = [home.session for home in cluster.homes]
    assert values(cluster) == NONE
    cluster.talk()
    assert [list(home.states().values()) for home in cluster.homes] == [["prepared"], ["prepared"]]
    assert resource.recover() == [XID]
    assert resource.commit(XID) is XACode.XA_OK
    assert values(cluster) == BOTH
    assert cluster.homes[1].requests == ["recover", "prepare", "recover", "recover", "commit"]
    assert resource.recover() == []
    homes_settle(cluster)
    assert [session.finished_through for session in sessions] == [1, 1]


def test_one_phase_is_one_transaction_over_homes(cluster: SimulatedCluster, resource: BrokerXAResource) -> None:
    idle(resource, cluster)
    assert resource.commit(XID, XAFlag.TMONEPHASE) is XACode.XA_OK
    assert [home.requests for home in cluster.homes] == [["recover", "commit"], ["recover", "prepare", "commit"]]
    assert values(cluster) == BOTH
    homes_settle(cluster)


@pytest.mark.parametrize("flags", [XAFlag.TMNOFLAGS, XAFlag.TMONEPHASE])
def test_branch_left_before_is_asked_for_at_commit(
    cluster: SimulatedCluster, resource: BrokerXAResource, flags: XAFlag
) -> None:
    away, session = cluster.homes[1], cluster.homes[1].session
    idle(resource, cluster)
    resource.prepare(XID)
    away.faults["rollback"].extend([lost(is_executed=False)] * 40)
    resource.rollback(XID)
    away.faults.clear()
    assert ([*session.lost], session.finished_through) == ([1], 0)
    cluster.talk()
    idle(resource, cluster)
    if flags is XAFlag.TMNOFLAGS:
        resource.prepare(XID)
    assert resource.commit(XID, flags) is XACode.XA_OK
    assert session.known_outcome(1) is Outcome.ROLLED_BACK
    homes_settle(cluster)
    assert ([*session.lost], session.finished_through, values(cluster)) == ([], 2, BOTH)


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("call", ["commit", "rollback"])
def test_any_process_finishes_and_tells_the_homes(
    cluster: SimulatedCluster, resource: BrokerXAResource, call: str, is_same: bool
) -> None:
    idle(resource, cluster)
    resource.prepare(XID)
    finisher = resource if is_same else BrokerXAResource(cluster, 5.0)
    assert getattr(finisher, call)(XID) is XACode.XA_OK
    assert values(cluster) == (BOTH if call == "commit" else NONE)
    cluster.talk()  # the owner is there: nothing is fenced
    cluster.check()
    with pytest.raises(XAError) as caught:
        getattr(finisher, call)(XID)
    assert caught.value.xa_code is XACode.XAER_NOTA


def test_large_branch_streams_to_every_home(
    cluster: SimulatedCluster, resource: BrokerXAResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xa_resource, "_STREAM_AT_BYTES", 10)
    idle(resource, cluster, b"large" * 10)
    cluster.clock.advance(60.0)  # a transaction manager takes its time: each call has the whole timeout
    assert resource.prepare(XID) is XACode.XA_OK
    assert all("put" in home.requests for home in cluster.homes)
    resource.commit(XID)
    assert values(cluster) == [[b"large" * 10]] * 2


def test_large_branch_is_withdrawn_everywhere(
    cluster: SimulatedCluster, resource: BrokerXAResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xa_resource, "_STREAM_AT_BYTES", 10)
    idle(resource, cluster, b"large" * 10)
    assert resource.rollback(XID) is XACode.XA_OK
    assert [list(home.states().values()) for home in cluster.homes] == [["rolled-back"]] * 2


# --- refusals, and homes that are away -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("error", "code"), [(TopicClosedError("closed"), XACode.XA_RBOTHER), (DiskFullError("full"), XACode.XA_RBTRANSIENT)]
)
def test_refused_prepare_rolls_back_everywhere(
    cluster: SimulatedCluster, resource: BrokerXAResource, number: int, error: Exception, code: XACode
) -> None:
    idle(resource, cluster)
    cluster.homes[number].faults["prepare"].append(Fault(error))  # type: ignore[arg-type]
    with pytest.raises(XAError) as caught:
        resource.prepare(XID)
    assert caught.value.xa_code is code
    cluster.check()
    assert (values(cluster), resource.recover()) == (NONE, [])


def test_home_of_a_branch_that_does_not_answer_rolls_back(
    cluster: SimulatedCluster, resource: BrokerXAResource
) -> None:
    idle(resource, cluster)
    cluster.homes[1].faults["prepare"].extend([lost(is_executed=True)] * 40)
    with pytest.raises(XAError):
        resource.prepare(XID)
    assert "prepare" not in cluster.homes[0].requests
    homes_settle(cluster)
    assert values(cluster) == NONE


def test_refusal_behind_a_lost_answer_may_be_a_commit(cluster: SimulatedCluster, resource: BrokerXAResource) -> None:
    """Another process has committed what was prepared, before its prepare was sent again."""
    idle(resource, cluster)
    decides, passed = cluster.homes[0], 0

    def meanwhile(home: SimulatedBroker, verb: str) -> None:
        nonlocal passed
        passed += verb == "prepare"
        if passed == 3:
            home.witness = None
            cluster.homes[1].is_away = True  # the other process cannot tell it
            assert BrokerXAResource(cluster, 5.0).commit(XID) is XACode.XA_OK
            cluster.homes[1].is_away = False

    decides.witness = meanwhile
    decides.faults["prepare"].append(lost(is_executed=True))
    with pytest.raises(XAError):
        resource.prepare(XID)
    homes_settle(cluster)
    assert values(cluster) == BOTH


def test_home_that_is_away_is_named_and_hides_no_other() -> None:
    cluster = SimulatedCluster(3)
    resource = BrokerXAResource(cluster, 5.0)
    resource.start(XID)
    send(cluster, 0)
    send(cluster, 1)
    resource.end(XID)
    resource.prepare(XID)
    cluster.homes[2].is_away = True
    with pytest.raises(XAError, match="home 00000000000000a3") as caught:
        resource.recover()
    assert caught.value.xa_code is XACode.XAER_RMFAIL
    assert BrokerXAResource(cluster, 5.0).commit(XID) is XACode.XA_OK
    assert cluster.values("orders") == [b"v"] * 2


# --- the client dies, homes die --------------------------------------------------------------------------------------


class Manager:
    """A transaction manager, and its log: what it has decided."""

    def __init__(self, cluster: SimulatedCluster, *, is_one_phase: bool) -> None:
        self.cluster, self.is_one_phase = cluster, is_one_phase
        self.resource = BrokerXAResource(cluster, 5.0)
        self.log = "nothing"

    def run(self) -> None:
        self.log = "started"
        idle(self.resource, self.cluster)
        if not self.is_one_phase:
            self.log = "preparing"
            self.resource.prepare(XID)
        self.log = "committing"
        self.resource.commit(XID, XAFlag.TMONEPHASE if self.is_one_phase else XAFlag.TMNOFLAGS)
        self.log = "committed"

    def recover(self) -> None:
        """In another process: commit what was decided, roll back the rest."""
        resource = BrokerXAResource(self.cluster, 5.0)
        for xid in resource.recover():
            if self.log == "committing":
                resource.commit(xid)
            else:
                resource.rollback(xid)

    def go_on(self) -> None:
        """In the same process, once the homes are back."""
        flags = XAFlag.TMONEPHASE if self.is_one_phase else XAFlag.TMNOFLAGS
        if self.log == "committing":
            self.log = "committed" if self.answer("commit", flags) else "rolled back"
        elif self.log not in ("committed", "rolled back"):
            self.answer("rollback")

    def answer(self, call: str, *flags: XAFlag) -> bool:
        """Whether it ended so; after a commit in two phases a branch that is not there has ended so before."""
        try:
            getattr(self.resource, call)(XID, *flags)
        except XAError as error:
            if error.xa_code not in (XACode.XAER_NOTA, XACode.XA_RBCOMMFAIL):
                raise
            return error.xa_code is XACode.XAER_NOTA and not self.is_one_phase
        return True


def passed(*, is_one_phase: bool) -> int:
    cluster = SimulatedCluster(2)
    moments = Moments(cluster)
    Manager(cluster, is_one_phase=is_one_phase).run()
    return moments.passed


def test_every_moment_is_tried() -> None:
    assert (passed(is_one_phase=False), passed(is_one_phase=True)) == (len(TWO_PHASES), len(ONE_PHASE))


def dies(cluster: SimulatedCluster, at: int, *, is_one_phase: bool) -> Manager:
    def die() -> None:
        raise SimulatedCrash("client")

    Moments(cluster).at[at] = die
    manager = Manager(cluster, is_one_phase=is_one_phase)
    with pytest.raises(SimulatedCrash):
        manager.run()
    for home in cluster.homes:
        home.witness = None
    cluster.owner_dies()
    return manager


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("at", TWO_PHASES)
def test_client_that_dies_leaves_what_another_process_finishes(
    cluster: SimulatedCluster, at: int, is_late: bool
) -> None:
    manager = dies(cluster, at, is_one_phase=False)
    if is_late:
        cluster.talk()
    manager.recover()
    cluster.talk()
    cluster.check()
    assert values(cluster) == (BOTH if manager.log == "committing" else NONE)


@pytest.mark.parametrize("at", ONE_PHASE)
def test_client_that_dies_in_one_phase_leaves_all_or_nothing(cluster: SimulatedCluster, at: int) -> None:
    dies(cluster, at, is_one_phase=True)
    cluster.talk()
    cluster.check()
    assert values(cluster) == (BOTH if at >= 8 else NONE), "decided once the deciding home has executed it"
    assert BrokerXAResource(cluster, 5.0).recover() == []


@pytest.mark.parametrize("is_one_phase", [False, True])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("first", TWO_PHASES)
@pytest.mark.parametrize("later", [None, 1, 2, 3, 5])
def test_homes_that_die_agree_with_the_manager(
    cluster: SimulatedCluster, first: int, later: int | None, number: int, is_one_phase: bool
) -> None:
    moments = Moments(cluster)

    def away(home: SimulatedBroker) -> None:
        home.is_away = True

    moments.at[first] = lambda: away(cluster.homes[number])
    if later is not None:
        moments.at[first + later] = lambda: away(cluster.homes[1 - number])
    manager = Manager(cluster, is_one_phase=is_one_phase)
    try:
        manager.run()
    except XAError as error:
        if error.xa_code is not XACode.XAER_RMFAIL:
            manager.log = "rolled back"
    for home in cluster.homes:
        home.is_away, home.witness = False, None
    manager.go_on()
    homes_settle(cluster)
    assert values(cluster) == (BOTH if manager.log == "committed" else NONE)
    assert BrokerXAResource(cluster, 5.0).recover() == []
