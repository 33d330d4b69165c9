"""What every XA resource promises, held against the real database and the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from tools.simulated.xa_answers import Fault, SimulatedError
from tools.simulated.xa_database import SimulatedXADatabase
from tools.simulated.xa_resource import SimulatedXAResource
from txmq.errors import ConfigError, RolledBackError, TransactionStateError, TransactionTimeoutError
from txmq.testing.eventually import eventually
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa.mysql.resource import MySQLResource
from txmq.xa.two_phase.resource_ports import Ended, PrepareUnknownError, Recovery, XABranch, XAResource

from .mysql_orders import CLUSTER, NAME, MySQLOrders, new_txid


class ResourceUnderTest(Protocol):
    """A resource, and a view of its database from outside."""

    resource: Any

    def enlist(self, timeout: float = 30.0, connection: Any = None, txid: str | None = None) -> Any:
        """Begin a branch."""

    def insert(self, branch: Any, number: int) -> None:
        """A row in the body."""

    def rows(self) -> list[int]:
        """The committed rows."""

    def recovery(self) -> Any:
        """A recovery, in another process."""

    def end_session(self, branch: Any) -> None:
        """The owner dies."""

    def restart(self) -> None:
        """Kill -9 of the server, and its restart."""

    def connect(self) -> Any:
        """A connection of the application's."""


class MariaDBUnderTest(MySQLOrders):
    """MariaDB."""

    def restart(self) -> None:
        """See ``ResourceUnderTest``."""
        self.server.restart()


class SimulationUnderTest:
    """The simulation."""

    def __init__(self) -> None:
        self.database = SimulatedXADatabase()
        self.resource = self._new_resource()
        self.resource.install()

    def _new_resource(self) -> SimulatedXAResource:
        return SimulatedXAResource(NAME, self.database, "5" * 32, lambda: 1_790_000_000_000)

    def connect(self) -> Any:
        """See ``ResourceUnderTest``."""
        return self.database.connect()

    def enlist(self, timeout: float = 30.0, connection: Any = None, txid: str | None = None) -> Any:
        """See ``ResourceUnderTest``."""
        return self.resource.enlist(CLUSTER, txid or new_txid(), timeout, connection)

    def insert(self, branch: Any, number: int) -> None:
        """See ``ResourceUnderTest``."""
        branch.connection.insert("orders", number)

    def rows(self) -> list[int]:
        """See ``ResourceUnderTest``."""
        return sorted(key for table, key in self.database.committed if table == "orders")  # type: ignore[misc]

    def recovery(self) -> Any:
        """See ``ResourceUnderTest``."""
        return self._new_resource().open_recovery(CLUSTER)

    def end_session(self, branch: Any) -> None:
        """See ``ResourceUnderTest``."""
        branch.abandon()

    def restart(self) -> None:
        """See ``ResourceUnderTest``."""
        self.database.crash()
        self.database.start()


@pytest.fixture(params=["real", "simulated"])
def subject(request: pytest.FixtureRequest, mariadb: MariaDB) -> Iterator[ResourceUnderTest]:
    if request.param == "simulated":
        yield SimulationUnderTest()
        return
    real = MariaDBUnderTest(mariadb)
    yield real
    real.resolve_everything()


def prepared(subject: ResourceUnderTest, number: int, connection: Any = None) -> Any:
    """A branch with one row, prepared."""
    branch = subject.enlist(connection=connection)
    subject.insert(branch, number)
    branch.end_body()
    branch.prepare()
    return branch


def test_types_fit_the_ports() -> None:
    def fits(real: MySQLResource, simulated: SimulatedXAResource) -> list[XAResource]:
        branch: XABranch = simulated.enlist(CLUSTER, new_txid(), 1.0)
        other: XABranch = real.enlist(CLUSTER, new_txid(), 1.0)
        recoveries: list[Recovery] = [real.open_recovery(CLUSTER), simulated.open_recovery(CLUSTER)]
        resources: list[XAResource] = [real, simulated, branch.resource, other.resource]
        return resources[: 2 + len(recoveries)]

    assert callable(fits)  # what it says is checked by mypy


def test_a_branch_commits_with_its_marker(subject: ResourceUnderTest) -> None:
    branch = prepared(subject, 1)
    assert subject.rows() == []
    assert branch.commit()
    assert subject.rows() == [1]
    assert subject.recovery().marker_outcome(branch.xid.gtrid.decode()) == "committed"
    assert branch.details() == {
        "bqual": branch.xid.bqual.decode(), "connection": branch.details()["connection"], "wrote": True,
        "marker": True, "table": "txmq_marker",
    }  # fmt: skip


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_branch_rolls_back_for_good(subject: ResourceUnderTest, is_prepared: bool) -> None:
    branch = subject.enlist()
    subject.insert(branch, 1)
    if is_prepared:
        branch.end_body()
        branch.prepare()
    assert branch.roll_back(prepared=is_prepared)
    subject.restart()
    recovery = subject.recovery()
    assert recovery.prepared() == []
    assert recovery.marker_outcome(branch.xid.gtrid.decode()) is None
    assert subject.rows() == []


def test_an_error_in_the_body_dooms_the_branch(subject: ResourceUnderTest) -> None:
    assert prepared(subject, 1).commit()
    branch = subject.enlist()
    with pytest.raises(Exception, match="1062"):
        subject.insert(branch, 1)
    subject.insert(branch, 2)
    with pytest.raises(RolledBackError):
        branch.end_body()
    assert branch.roll_back(prepared=False)
    assert subject.rows() == [1]


def test_a_deadline_that_has_passed_dooms_the_branch(subject: ResourceUnderTest) -> None:
    branch = subject.enlist(timeout=-1.0)
    subject.insert(branch, 1)
    branch.end_body()
    with pytest.raises(PrepareUnknownError) as caught:
        branch.prepare()
    assert isinstance(caught.value.__cause__, TransactionTimeoutError)
    assert branch.roll_back(prepared=True)
    assert (subject.rows(), subject.recovery().prepared()) == ([], [])


def test_the_connection_is_the_bodys_until_end_body(subject: ResourceUnderTest) -> None:
    branch = subject.enlist()
    branch.end_body()
    with pytest.raises(TransactionStateError, match="over"):
        subject.insert(branch, 1)
    assert branch.roll_back(prepared=False)


def test_a_branch_that_is_not_prepared_ends_with_its_owner(subject: ResourceUnderTest) -> None:
    branch = subject.enlist()
    subject.insert(branch, 1)
    branch.end_body()
    subject.end_session(branch)
    assert subject.recovery().prepared() == []
    assert subject.rows() == []


@pytest.mark.needs(Ability.ATTACHED_XA)
@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_prepared_branch_of_a_gone_owner_is_finished_by_another(subject: ResourceUnderTest, verb: str) -> None:
    branch, recovery = prepared(subject, 1), subject.recovery()
    end = getattr(recovery, verb)
    assert end(branch.xid) is Ended.NOT_KNOWN
    (listed,) = recovery.prepared()
    assert listed.xid == branch.xid
    assert (str(listed.txid), listed.connection) == (branch.xid.gtrid.decode(), branch.details()["connection"])
    assert recovery.kill(listed.connection)
    eventually(lambda: end(branch.xid) is Ended.DONE, "the owner's session has ended")
    assert end(branch.xid) is Ended.NOT_KNOWN
    assert recovery.prepared() == []
    assert not recovery.kill(listed.connection)
    assert subject.rows() == ([1] if verb == "commit" else [])
    assert not branch.commit()


def test_prepared_branches_survive_crashes(subject: ResourceUnderTest) -> None:
    branches = [prepared(subject, number) for number in range(3)]
    subject.restart()
    assert not branches[0].commit()
    assert not branches[1].roll_back(prepared=True)
    recovery = subject.recovery()
    assert {listed.xid for listed in recovery.prepared()} == {branch.xid for branch in branches}
    assert recovery.commit(branches[0].xid) is Ended.DONE
    assert recovery.rollback(branches[1].xid) is Ended.DONE
    recovery.force()
    subject.restart()
    recovery = subject.recovery()
    assert [listed.xid for listed in recovery.prepared()] == [branches[2].xid]
    assert subject.rows() == [0]


@pytest.mark.needs(Ability.FORGETS_ROLLBACKS)
def test_unforced_rollback_by_another_may_be_lost_in_a_crash(subject: ResourceUnderTest) -> None:
    branches = [prepared(subject, number) for number in range(4)]
    for branch in branches:
        subject.end_session(branch)
    recovery = subject.recovery()
    assert {recovery.rollback(branch.xid) for branch in branches} == {Ended.DONE}
    subject.restart()
    recovery = subject.recovery()
    back = recovery.prepared()
    assert back
    assert {recovery.rollback(listed.xid) for listed in back} == {Ended.DONE}
    recovery.force()
    subject.restart()
    assert subject.recovery().prepared() == []


def test_a_marker_in_doubt_is_not_readable(subject: ResourceUnderTest) -> None:
    branch, recovery = prepared(subject, 1), subject.recovery()
    with pytest.raises(Exception, match="1205"):
        recovery.marker_outcome(branch.xid.gtrid.decode())
    assert branch.commit()
    recovery.delete_committed([branch.xid.gtrid.decode()])
    assert recovery.marker_outcome(branch.xid.gtrid.decode()) is None


@pytest.mark.needs(Ability.ATTACHED_XA)
def test_a_connection_of_the_caller_is_given_back_idle(subject: ResourceUnderTest) -> None:
    connection = subject.connect()
    assert prepared(subject, 1, connection).commit()
    assert prepared(subject, 2, connection).roll_back(prepared=True)
    branch = prepared(subject, 3, connection)
    with pytest.raises(TransactionStateError):
        subject.enlist(connection=connection)
    assert branch.commit()
    assert subject.rows() == [1, 3]


def test_a_txid_that_is_none_is_refused(subject: ResourceUnderTest) -> None:
    with pytest.raises(ValueError, match="not a transaction id"):
        subject.enlist(txid="x")


# --- the simulation alone: faults that a real server does not do on request -----------------------------------------


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("call", ["xa_start", "insert", "xa_end", "xa_prepare", "xa_commit"])
def test_branch_under_every_fault_is_committed_whole_or_not(fault: Fault, call: str) -> None:
    subject = SimulationUnderTest()
    left = [fault]
    subject.database.fault = lambda _session, name: left.pop() if name == call and left else None
    is_committed = False
    branch: Any = None
    try:
        branch = prepared(subject, 1)
        is_committed = branch.commit()
    except (SimulatedError, RolledBackError, PrepareUnknownError):
        if branch is not None:
            branch.abandon()
    assert not left
    assert not is_committed
    subject.database.start()
    recovery = subject.recovery()
    for listed in recovery.prepared():
        assert recovery.kill(listed.connection) is (fault is Fault.CUT_OFF)
        assert recovery.commit(listed.xid) is Ended.DONE
    markers = sum(table == "txmq_marker" for table, _ in subject.database.committed)
    assert len(subject.rows()) == markers
    # Carried out, or at the decision already: somebody finishes it.
    was_prepared = call == "xa_commit" or (call == "xa_prepare" and fault in (Fault.REPLY_LOST, Fault.CRASH_AFTER))
    assert len(subject.rows()) == was_prepared


def test_commit_that_loses_sight_is_not_done_before_restart() -> None:
    subject = SimulationUnderTest()
    branch, recovery = prepared(subject, 1), subject.recovery()
    subject.database.ends_slowly, subject.database.loses_sight = lambda _session: True, lambda _xid: True
    subject.end_session(branch)
    with pytest.raises(SimulatedError, match="1205"):
        recovery.commit(branch.xid)
    assert (recovery.prepared(), recovery.commit(branch.xid), subject.rows()) == ([], Ended.NOT_KNOWN, [])
    with pytest.raises(SimulatedError, match="1205"):
        recovery.marker_outcome(branch.xid.gtrid.decode())
    subject.restart()
    assert [listed.xid for listed in subject.recovery().prepared()] == [branch.xid]
    assert (subject.recovery().commit(branch.xid), subject.rows()) == (Ended.DONE, [1])


def test_killed_session_is_waited_for() -> None:
    subject = SimulationUnderTest()
    branch, recovery = prepared(subject, 1), subject.recovery()
    owner, looks = branch.details()["connection"], []
    subject.database.ends_slowly, subject.database.loses_sight = lambda _session: True, lambda _xid: True

    def look(_session: object, call: str) -> None:
        if call == "processlist":
            looks.append(call)
            if len(looks) == 3:
                subject.database.session_has_gone(owner)

    subject.database.fault = look
    assert recovery.kill(owner)
    assert len(looks) == 3
    assert (recovery.commit(branch.xid), subject.rows()) == (Ended.DONE, [1])


def test_a_database_that_is_not_installed_or_another_is_refused() -> None:
    database = SimulatedXADatabase()
    resource = SimulatedXAResource(NAME, database, "5" * 32, lambda: 0)
    with pytest.raises(ConfigError, match="install"):
        resource.enlist(CLUSTER, new_txid(), 1.0)
    resource.install()
    resource.install()
    with pytest.raises(ConfigError, match="another"):
        SimulatedXAResource("other", database, "6" * 32, lambda: 0).open_recovery(CLUSTER)


def test_a_deadlocks_victim_can_only_be_rolled_back() -> None:
    subject = SimulationUnderTest()
    session = subject.database.connect()
    branch = subject.enlist(connection=session)
    subject.insert(branch, 1)
    with pytest.raises(SimulatedError, match="1213"):
        session.become_deadlock_victim()
    branch.end_body()
    with pytest.raises(RolledBackError, match="1399"):
        branch.prepare()
    assert branch.roll_back(prepared=False)
    assert not session.is_in_transaction
    assert subject.rows() == []
