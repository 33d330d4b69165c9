"""Settling branches on a real MariaDB for owners that have gone: what "not known" means, and what is durable when."""

from __future__ import annotations

import MySQLdb
import pytest

from txmq.errors import ConfigError
from txmq.testing.eventually import eventually
from txmq.testing.processes.database_programs import Ability
from txmq.xa import MySQLResource
from txmq.xa.database.mysql_server import xa
from txmq.xa.two_phase.resource_ports import Ended
from txmq.xid import FORMAT_ID, Xid, xid_sql

from .mysql_orders import CLUSTER, NAME, MySQLOrders, new_txid


def _prepare_by_hand(orders: MySQLOrders, xid: Xid, number: int | None = None) -> None:
    """Somebody else's branch, left by its owner."""
    connection = orders.connect()
    cursor = connection.cursor()
    cursor.execute(xa("START", xid))
    if number is not None:
        cursor.execute(f"INSERT INTO orders VALUES ({number}, '')")
    cursor.execute(xa("END", xid))
    cursor.execute(xa("PREPARE", xid))
    number = connection.thread_id()
    connection.close()
    eventually(
        lambda: not orders.execute(f"SELECT 1 FROM information_schema.processlist WHERE id = {number}"),
        "the server has ended the session",
    )


@pytest.mark.needs(Ability.ATTACHED_XA)
def test_a_branch_whose_owner_lives_is_not_known_and_listed(orders: MySQLOrders) -> None:
    branch, recovery = orders.prepared(1), orders.recovery()
    assert recovery.commit(branch.xid) is Ended.NOT_KNOWN
    assert recovery.rollback(branch.xid) is Ended.NOT_KNOWN
    assert [listed.xid for listed in recovery.prepared()] == [branch.xid]
    orders.end_session(branch)
    assert recovery.commit(branch.xid) is Ended.DONE
    assert recovery.commit(branch.xid) is Ended.NOT_KNOWN
    assert recovery.prepared() == []
    assert orders.rows() == [1]


@pytest.mark.needs(Ability.ATTACHED_XA)
def test_owners_session_is_killed_by_number_in_xid(orders: MySQLOrders) -> None:
    branch, recovery = orders.prepared(1), orders.recovery()
    (listed,) = recovery.prepared()
    assert (listed.xid, str(listed.txid), listed.uuid) == (branch.xid, branch.xid.gtrid.decode(), recovery.uuid)
    assert recovery.now_ms() < listed.deadline_ms < recovery.now_ms() + 31_000
    assert recovery.kill(listed.connection)
    eventually(lambda: recovery.commit(branch.xid) is Ended.DONE, "the owner's session has ended")
    assert not branch.commit()
    assert orders.rows() == [1]


@pytest.mark.needs(Ability.ATTACHED_XA)
def test_killed_session_has_gone_before_its_branch_is_ended(orders: MySQLOrders) -> None:
    """An XA COMMIT in between was acknowledged, and the row was gone: three of 341."""
    recovery = orders.recovery()
    for number in range(5):
        branch = orders.prepared(number)
        owner = branch.details()["connection"]
        assert recovery.kill(owner)
        assert orders.execute(f"SELECT 1 FROM information_schema.processlist WHERE id = {owner}") == []
        assert recovery.commit(branch.xid) is Ended.DONE
        assert orders.rows() == list(range(number + 1))


def test_commit_is_not_done_while_branch_holds_its_marker(orders: MySQLOrders, monkeypatch: pytest.MonkeyPatch) -> None:
    branch, recovery = orders.prepared(1), orders.recovery()
    orders.end_session(branch)
    with monkeypatch.context() as server_loses_sight:
        server_loses_sight.setattr("txmq.xa.mysql.resource.execute", lambda _connection, _statement: None)
        with pytest.raises(MySQLdb.OperationalError, match="1205"):
            recovery.commit(branch.xid)
    assert orders.rows() == []
    assert recovery.commit(branch.xid) is Ended.DONE
    assert orders.rows() == [1]


def test_only_session_in_transaction_is_killed_and_never_killers_own(orders: MySQLOrders) -> None:
    recovery, idle = orders.recovery(), orders.connect(autocommit=True)
    assert not recovery.kill(idle.thread_id())
    assert not recovery.kill(1 << 40)
    own = recovery._session.server.connection_id
    assert not recovery.kill(own)
    idle.ping()
    assert recovery.now_ms() > 0


@pytest.mark.needs(Ability.ATTACHED_XA)
def test_user_without_privilege_process_can_kill_its_own_sessions(orders: MySQLOrders) -> None:
    orders.execute("CREATE USER IF NOT EXISTS plain IDENTIFIED BY 'x'")
    orders.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {orders.database}.* TO plain")
    orders.let_recover("plain")
    resource = MySQLResource(NAME, connect=lambda: orders.connect(user="plain", passwd="x"))
    branch = resource.enlist(CLUSTER, new_txid(), 30.0)
    orders.insert(branch, 1)
    branch.end_body()
    branch.prepare()
    recovery = resource.open_recovery(CLUSTER)
    assert not recovery.kill(1 << 40)
    assert recovery.kill(branch.details()["connection"])
    eventually(lambda: recovery.rollback(branch.xid) is Ended.DONE, "the owner's session has ended")
    assert orders.rows() == []


def test_branches_of_others_are_not_listed(orders: MySQLOrders) -> None:
    ours = orders.prepared(1)
    orders.end_session(ours)
    foreign = [
        # Another transaction manager; MariaDB tells xids apart by gtrid and bqual alone.
        Xid(FORMAT_ID + 1, new_txid().encode(), ours.xid.bqual),
        Xid(FORMAT_ID, ours.xid.gtrid.replace(b"c1", b"c2", 1), ours.xid.bqual),  # another cluster
        Xid(FORMAT_ID, ours.xid.gtrid, b"e" * 32 + ours.xid.bqual[32:]),  # another database of this server
        Xid(FORMAT_ID, b"\xff\x00\xfe", b"\x80'"),  # binary
        Xid(7, b"abc", b""),
    ]
    for number, xid in enumerate(foreign, 100):
        _prepare_by_hand(orders, xid, number)
    recovery = orders.recovery()
    assert [listed.xid for listed in recovery.prepared()] == [ours.xid]
    assert {xid_sql(xid) for xid in foreign} <= set(orders.server.prepared())


@pytest.mark.needs(Ability.ENDS_EMPTY_BRANCHES)
def test_foreign_empty_branch_is_rolled_back_with_its_own_code(orders: MySQLOrders) -> None:
    """MariaDB answers XA_RBROLLBACK (1402) to whoever ends a branch that wrote nothing, and it has ended."""
    recovery = orders.recovery()
    uuid = recovery.uuid.encode()
    first, second = (Xid(FORMAT_ID, new_txid().encode(), uuid + b".1.%d" % number) for number in (1, 2))
    _prepare_by_hand(orders, first)
    _prepare_by_hand(orders, second)
    assert len(recovery.prepared()) == 2
    assert recovery.rollback(first) is Ended.ROLLED_BACK
    assert recovery.commit(second) is Ended.ROLLED_BACK
    assert recovery.prepared() == []


def _restarted_after_rollbacks(orders: MySQLOrders, count: int, *, forced: bool) -> int:
    """How many acknowledged rollbacks a kill takes back."""
    branches = [orders.prepared(number) for number in range(count)]
    for branch in branches:
        orders.end_session(branch)
    recovery = orders.recovery()
    assert [recovery.rollback(branch.xid) for branch in branches] == [Ended.DONE] * count
    if forced:
        recovery.force()
    orders.server.restart()
    recovery = orders.recovery()
    back = recovery.prepared()
    for listed in back:
        assert recovery.rollback(listed.xid) is Ended.DONE
    recovery.force()
    recovery.close()
    return len(back)


def test_a_rollback_is_durable_only_when_forced(orders: MySQLOrders) -> None:
    if Ability.FORGETS_ROLLBACKS in orders.server.program.abilities:
        assert _restarted_after_rollbacks(orders, 5, forced=False) > 0  # what force is there for
    assert _restarted_after_rollbacks(orders, 5, forced=True) == 0


def test_an_owners_rollback_of_a_prepared_branch_is_durable(orders: MySQLOrders) -> None:
    branches = [orders.prepared(number) for number in range(3)]
    assert all(branch.roll_back(prepared=True) for branch in branches)
    orders.server.restart()
    assert orders.recovery().prepared() == []
    assert orders.rows() == []


def test_an_acknowledged_commit_is_durable(orders: MySQLOrders) -> None:
    branches = [orders.prepared(number) for number in range(3)]
    orders.end_session(branches[0])
    assert orders.recovery().commit(branches[0].xid) is Ended.DONE
    assert branches[1].commit()
    assert branches[2].commit()
    orders.server.restart()
    assert orders.rows() == [0, 1, 2]


def test_marker_row_is_outcome_and_not_readable_while_in_doubt(orders: MySQLOrders) -> None:
    branch, recovery = orders.prepared(1), orders.recovery()
    txid = branch.xid.gtrid.decode()
    with pytest.raises(MySQLdb.OperationalError, match="1205"):
        recovery.marker_outcome(txid)
    assert branch.commit()
    assert recovery.marker_outcome(txid) == "committed"
    recovery.delete_committed([txid, new_txid()])
    recovery.delete_committed([])
    assert recovery.marker_outcome(txid) is None
    assert recovery.marker_outcome(new_txid()) is None


def test_removing_markers_does_not_stand_in_way_of_new_ones(orders: MySQLOrders) -> None:
    txids = [new_txid() for _ in range(4)]
    for number in (0, 3):
        branch = orders.enlist(txid=txids[number])
        branch.end_body()
        branch.prepare()
        assert branch.commit()
    recovery = orders.recovery()
    recovery._connection.autocommit(False)
    for txid in txids:
        recovery._session.table._run(recovery._connection, "DELETE FROM txmq_marker WHERE txid = ?", (txid,))
    for number in (1, 2):  # between those that are being removed
        branch = orders.enlist(txid=txids[number] + "f")
        branch.end_body()
        assert branch.roll_back(prepared=False)


def test_a_missing_table_is_an_error_never_an_absent_marker(orders: MySQLOrders) -> None:
    recovery = orders.recovery()
    orders.execute("DROP TABLE txmq_marker")
    with pytest.raises(MySQLdb.ProgrammingError):
        recovery.marker_outcome(new_txid())
    with pytest.raises(ConfigError, match="marker"):
        orders.recovery()


def test_another_database_is_no_place_to_settle(orders: MySQLOrders) -> None:
    orders.execute(f"UPDATE txmq_marker_identity SET uuid = '{'f' * 32}'")
    with pytest.raises(ConfigError, match="another database answers"):
        orders.resource.open_recovery(CLUSTER)


def test_a_server_that_is_away_is_the_drivers_error(orders: MySQLOrders) -> None:
    recovery = orders.recovery()
    orders.server.kill()
    try:
        with pytest.raises(MySQLdb.OperationalError):
            recovery.prepared()
        with pytest.raises(MySQLdb.OperationalError):
            recovery.commit(Xid(FORMAT_ID, b"x", b""))
        with pytest.raises(MySQLdb.OperationalError):
            orders.recovery()
    finally:
        orders.server.start()
    recovery.close()
    assert orders.recovery().prepared() == []
