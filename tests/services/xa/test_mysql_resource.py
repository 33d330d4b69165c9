"""``MySQLResource`` against a real MariaDB: the life of a branch, and every trap that the server holds ready."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import MySQLdb
import MySQLdb.connections
import pytest

from tools.simulated.clock import SimClock
from txmq.errors import HeuristicError, RolledBackError, TransactionStateError, TransactionTimeoutError
from txmq.testing.eventually import eventually
from txmq.xa import MySQLResource
from txmq.xa.database.mysql_server import xa
from txmq.xa.mysql.branch import MySQLBranch
from txmq.xa.mysql.resource import FRESH_S
from txmq.xa.two_phase.resource_ports import Ended, PrepareUnknownError, decode_bqual
from txmq.xid import FORMAT_ID, xid_sql

from .mysql_orders import NAME, MySQLOrders, new_txid


def end(branch: MySQLBranch) -> None:
    """The end of the block, up to the decision."""
    branch.end_body()
    branch.prepare()


# --- the life of a branch --------------------------------------------------------------------------------------------


def test_prepared_branch_is_invisible_until_commit_then_has_its_marker(orders: MySQLOrders) -> None:
    branch = orders.prepared(1)
    assert orders.rows() == []
    assert orders.markers() == {}
    assert len(orders.listed()) == 1
    assert branch.commit()
    assert orders.rows() == [1]
    assert list(orders.markers().values()) == ["committed"]
    assert orders.listed() == []


def test_the_xid_says_transaction_resource_deadline_and_connection(orders: MySQLOrders) -> None:
    txid = new_txid()
    branch = orders.enlist(timeout=30.0, txid=txid)
    now_ms = orders.execute("SELECT CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)")[0][0]
    details = branch.details()
    bqual = decode_bqual(details["bqual"].encode())
    assert (branch.xid.format_id, branch.xid.gtrid) == (FORMAT_ID, txid.encode())
    assert bqual is not None
    assert bqual.uuid == orders.resource.uuid
    assert abs(bqual.deadline_ms - now_ms - 30_000) < 5_000
    assert bqual.connection == details["connection"]
    cursor = branch.connection.cursor()
    cursor.execute("SELECT CONNECTION_ID()")
    assert cursor.fetchone() == (details["connection"],)
    assert (details["wrote"], details["marker"]) == (True, True)
    assert branch.roll_back(prepared=False)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_rollback_leaves_nothing_and_the_connection_is_used_again(orders: MySQLOrders, is_prepared: bool) -> None:
    branch = orders.enlist()
    orders.insert(branch, 1)
    if is_prepared:
        branch.end_body()
        branch.prepare()
    number = branch.details()["connection"]
    assert branch.roll_back(prepared=is_prepared)
    assert (orders.rows(), orders.markers(), orders.listed()) == ([], {}, [])
    following = orders.enlist()
    assert following.details()["connection"] == number
    assert following.roll_back(prepared=False)


def test_a_rollback_before_end_body_ends_the_body(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    cursor = branch.connection.cursor()
    assert branch.roll_back(prepared=False)
    with pytest.raises(TransactionStateError, match="over"):
        cursor.execute("SELECT 1")


def test_each_end_gives_the_connection_back_once(orders: MySQLOrders) -> None:
    branch = orders.prepared(1)
    assert branch.commit()
    branch.finish()
    branch.abandon()
    assert branch.commit()
    assert branch.roll_back(prepared=True)
    first, second = orders.enlist(), orders.enlist()
    assert first.details()["connection"] != second.details()["connection"]
    assert first.roll_back(prepared=False)
    assert second.roll_back(prepared=False)
    assert orders.rows() == [1]


# --- what dooms a branch ---------------------------------------------------------------------------------------------


def test_failed_statement_dooms_branch_even_if_body_goes_on(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    orders.insert(branch, 1)
    with pytest.raises(MySQLdb.IntegrityError):
        orders.insert(branch, 1)
    orders.insert(branch, 2)
    with pytest.raises(RolledBackError, match="Duplicate"):
        branch.end_body()
    assert branch.roll_back(prepared=False)
    assert (orders.rows(), orders.listed()) == ([], [])


def test_a_lock_wait_that_times_out_dooms_the_branch(orders: MySQLOrders) -> None:
    holder = orders.enlist()
    orders.insert(holder, 1)
    branch = orders.enlist()
    branch.connection.cursor().execute("SET SESSION innodb_lock_wait_timeout = 1")
    orders.insert(branch, 2)
    with pytest.raises(MySQLdb.OperationalError, match="1205"):
        orders.insert(branch, 1)
    with pytest.raises(RolledBackError, match="1205"):
        branch.end_body()
    assert branch.roll_back(prepared=False)
    assert holder.roll_back(prepared=False)
    assert orders.rows() == []


def test_a_deadlocks_victim_is_doomed_and_its_connection_used_again(orders: MySQLOrders) -> None:
    orders.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    branches = [orders.enlist(), orders.enlist()]
    for number, branch in enumerate(branches, 1):
        branch.connection.cursor().execute(f"UPDATE orders SET value = 'c' WHERE id = {number}")
    errors: list[Exception] = []

    def lock(branch_number: int, row: int) -> None:
        try:
            branches[branch_number].connection.cursor().execute(f"UPDATE orders SET value = 'd' WHERE id = {row}")
        except MySQLdb.OperationalError as error:
            errors.append(error)

    thread = threading.Thread(target=lock, args=(0, 2))
    thread.start()
    lock(1, 1)
    thread.join()
    assert [error.args[0] for error in errors] == [1213]
    doomed = [branch for branch in branches if branch._guard.error is not None]
    survivor = next(branch for branch in branches if branch._guard.error is None)
    number = doomed[0].details()["connection"]
    with pytest.raises(RolledBackError, match="1213"):
        doomed[0].end_body()
    assert doomed[0].roll_back(prepared=False)
    following = orders.enlist()
    assert following.details()["connection"] == number
    assert following.roll_back(prepared=False)
    survivor.end_body()
    survivor.prepare()
    assert survivor.commit()


def test_later_statement_of_one_text_that_failed_unread_dooms_branch(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    cursor = branch.connection.cursor()
    cursor.execute("INSERT INTO orders VALUES (1, ''); INSERT INTO orders VALUES (1, '')")
    with pytest.raises(RolledBackError, match="Duplicate"):
        branch.end_body()
    assert branch.roll_back(prepared=False)
    assert orders.rows() == []


def test_unread_results_of_several_statements_in_one_text_all_succeed(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    branch.connection.cursor().execute("INSERT INTO orders VALUES (1, ''); SELECT 5; INSERT INTO orders VALUES (2, '')")
    branch.end_body()
    branch.prepare()
    assert branch.commit()
    assert orders.rows() == [1, 2]


@pytest.mark.parametrize("statement", ["COMMIT", "BEGIN", "CREATE TABLE u (i INT)", "XA PREPARE 'x'", "XA END 'x'"])
def test_statements_that_xa_refuses_doom_the_branch(orders: MySQLOrders, statement: str) -> None:
    branch = orders.enlist()
    orders.insert(branch, 1)
    with pytest.raises(MySQLdb.OperationalError):
        branch.connection.cursor().execute(statement)
    with pytest.raises(RolledBackError):
        branch.end_body()
    assert branch.roll_back(prepared=False)
    assert orders.rows() == []


def _end_by_hand(branch: MySQLBranch, *verbs: str) -> None:
    for verb in verbs:
        name, _, rest = verb.partition(" ")
        branch.connection.cursor().execute(f"{xa(name, branch.xid)} {rest}")


@pytest.mark.parametrize("verb", ["COMMIT ONE PHASE", "ROLLBACK"])
def test_body_that_ends_branch_by_itself_is_heuristic(orders: MySQLOrders, verb: str) -> None:
    branch = orders.enlist()
    orders.insert(branch, 1)
    _end_by_hand(branch, "END", verb)
    with pytest.raises(HeuristicError, match="by itself"):
        end(branch)
    assert branch.roll_back(prepared=False)
    assert branch.ended_by_body
    assert (orders.rows(), orders.markers()) == ([1] if verb.startswith("COMMIT") else [], {})
    assert orders.prepared(2).commit()


@pytest.mark.parametrize("verbs", [("END",), ("END", "PREPARE")])
def test_body_that_ends_its_work_by_itself_is_rolled_back(orders: MySQLOrders, verbs: tuple[str, ...]) -> None:
    branch = orders.enlist()
    orders.insert(branch, 1)
    _end_by_hand(branch, *verbs)
    with pytest.raises(RolledBackError, match="could not be ended"):
        end(branch)
    assert branch.roll_back(prepared=False)
    assert not branch.ended_by_body
    assert (orders.rows(), orders.listed(), orders.markers()) == ([], [], {})


def test_work_behind_manual_end_is_undone_and_connection_dropped(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    number = branch.details()["connection"]
    _end_by_hand(branch, "END", "ROLLBACK")
    orders.insert(branch, 1)  # in a transaction of its own, since the connection is not in autocommit
    with pytest.raises(HeuristicError):
        end(branch)
    assert branch.roll_back(prepared=False)
    following = orders.enlist()
    assert following.details()["connection"] != number
    assert following.roll_back(prepared=False)
    assert (orders.rows(), orders.markers()) == ([], {})


def test_deadline_passed_on_the_databases_clock_admits_no_marker(orders: MySQLOrders) -> None:
    branch = orders.enlist(timeout=-1.0)
    orders.insert(branch, 1)
    with pytest.raises(PrepareUnknownError, match="without its marker") as caught:
        end(branch)
    assert isinstance(caught.value.__cause__, TransactionTimeoutError)
    assert branch.roll_back(prepared=True)
    assert (orders.rows(), orders.markers(), orders.listed()) == ([], {}, [])


def test_identity_that_changes_under_open_connection_lets_no_marker_in(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    orders.insert(branch, 1)
    orders.execute(f"UPDATE txmq_marker_identity SET uuid = '{'f' * 32}'")
    with pytest.raises(PrepareUnknownError, match="without its marker"):
        end(branch)
    assert branch.roll_back(prepared=True)
    assert (orders.rows(), orders.listed()) == ([], [])


def test_body_without_foreign_key_checks_gets_its_marker_in(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    branch.connection.cursor().execute("SET foreign_key_checks = 0")
    orders.insert(branch, 1)
    end(branch)
    assert branch.commit()
    assert (orders.rows(), list(orders.markers().values())) == ([1], ["committed"])


def test_branch_costs_four_round_trips_and_six_with_single_statements(orders: MySQLOrders) -> None:
    seen: list[Any] = []

    class Noting(MySQLdb.connections.Connection):  # type: ignore[misc]  # the driver has no types
        def query(self, query: Any) -> None:
            seen.append(query)
            super().query(query)

    for number, (is_packed, trips) in enumerate(((True, 4), (False, 6))):
        arguments = orders.server.connect_arguments() | {"db": orders.database, "multi_statements": is_packed}
        connection = Noting(**arguments)
        branch = orders.enlist(connection=connection)
        seen[:-1] = []  # before it began, it was verified
        orders.insert(branch, number)
        end(branch)
        assert branch.commit()
        assert len(seen) == trips, seen
        assert any("txmq_marker_identity" in str(query) for query in seen) is not is_packed  # else its foreign key does
        connection.close()
    assert orders.rows() == [0, 1]


def test_branch_on_a_connection_in_use_costs_three_round_trips(orders: MySQLOrders) -> None:
    seen: list[str] = []

    class Noting(MySQLdb.connections.Connection):  # type: ignore[misc]  # the driver has no types
        def query(self, query: Any) -> None:
            seen.append(str(query))
            super().query(query)

    clock = SimClock()
    arguments = orders.server.connect_arguments() | {"db": orders.database}
    orders.resource = MySQLResource(NAME, connect=lambda: Noting(**arguments), clock=clock)
    trips = []
    for number, passed_s in enumerate((0.0, FRESH_S / 2, 0.0, 2 * FRESH_S)):
        clock.advance(passed_s)
        seen.clear()
        branch = orders.prepared(number)
        assert branch.commit()
        trips.append(len(seen))
    assert trips[1:] == [3, 3, 4], seen
    assert (orders.rows(), orders.listed()) == ([0, 1, 2, 3], [])
    orders.resource.close()


def test_late_branch_dooms_and_its_connection_is_used_again(orders: MySQLOrders) -> None:
    assert orders.prepared(1).commit()
    branch = orders.enlist()
    number = branch.details()["connection"]
    with pytest.raises(MySQLdb.IntegrityError):
        orders.insert(branch, 1)
    with pytest.raises(RolledBackError, match="a statement failed"):
        end(branch)
    assert branch.roll_back(prepared=False)
    cursor = orders.enlist().connection.cursor()
    assert (cursor.execute("SELECT id, CONNECTION_ID() FROM orders"), cursor.fetchall()) == (1, ((1, number),))


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_marker_that_is_refused_leaves_nothing_prepared(orders: MySQLOrders, is_packed: bool) -> None:
    branch = orders.enlist(connection=orders.connect(multi_statements=is_packed))
    orders.insert(branch, 1)
    txid = branch.xid.gtrid.decode()
    orders.execute(f"INSERT INTO txmq_marker VALUES ('{txid}', 'rolled-back', 0, 0, 0, NULL)")
    with pytest.raises(RolledBackError, match="Duplicate"):
        end(branch)
    assert orders.listed() == []
    assert branch.roll_back(prepared=False)
    assert orders.rows() == []


# --- deaths ----------------------------------------------------------------------------------------------------------


def test_an_unprepared_branch_ends_with_its_connection(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    orders.insert(branch, 1)
    branch.end_body()
    orders.end_session(branch)
    assert (orders.rows(), orders.listed()) == ([], [])


def test_killed_session_before_prepare_leaves_it_unknown_and_nothing_prepared(orders: MySQLOrders) -> None:
    branch = orders.enlist()
    orders.insert(branch, 1)
    branch.end_body()
    orders.execute(f"KILL {branch.details()['connection']}")
    with pytest.raises(PrepareUnknownError):
        branch.prepare()
    assert not branch.roll_back(prepared=True)
    assert (orders.rows(), orders.listed()) == ([], [])


def test_prepare_at_a_frozen_server_is_unknown_and_found_later(orders: MySQLOrders) -> None:
    branch = orders.enlist(connection=orders.connect(read_timeout=4))
    orders.insert(branch, 1)
    branch.end_body()
    orders.server.pause()
    try:
        with pytest.raises(PrepareUnknownError):
            branch.prepare()
        assert not branch.roll_back(prepared=True)
    finally:
        orders.server.resume()
    recovery = orders.recovery()
    eventually(recovery.prepared, "the branch is listed: what was sent is carried out when it goes on")
    eventually(lambda: recovery.rollback(branch.xid) is Ended.DONE, "the branch is rolled back")
    recovery.force()
    assert orders.rows() == []


@pytest.mark.parametrize("state", ["active", "idle"])
def test_server_ends_branch_whose_owner_stands_still(orders: MySQLOrders, state: str) -> None:
    branch = orders.enlist(timeout=1.0)
    orders.insert(branch, 1)
    if state == "idle":
        branch.connection.cursor().execute(f"XA END {xid_sql(branch.xid)}")
    # Waits for the row.
    with closing(orders.connect(autocommit=True)) as other:
        other.query("SET SESSION innodb_lock_wait_timeout = 20")
        other.query("INSERT INTO orders VALUES (1, 'other')")
    assert branch.roll_back(prepared=False)
    assert orders.rows() == [1]


def test_patience_with_owners_follows_their_deadlines(orders: MySQLOrders) -> None:
    """A connection is told once what all its blocks need, and again when they need more."""
    told = list[str]()
    orders.resource.close()
    for timeout in (3.0, 3.0, 100.0):
        branch = orders.enlist(timeout=timeout)
        cursor = branch.connection.cursor()
        cursor.execute("SHOW SESSION VARIABLES WHERE Variable_name IN ('idle_transaction_timeout', 'wait_timeout')")
        told.append(min((value for _, value in cursor.fetchall() if value != "0"), key=int))
        assert branch.roll_back(prepared=False)
    assert told == ["4", "4", "128"]


def test_smaller_limit_that_connect_has_set_stays(orders: MySQLOrders) -> None:
    variable = orders.server.program.idle_timeout
    orders.resource.close()
    orders.arguments = {"init_command": f"SET SESSION {variable} = 3"}
    branch = orders.enlist(timeout=100.0)
    cursor = branch.connection.cursor()
    cursor.execute(f"SELECT @@{variable}")
    assert cursor.fetchall() == ((3,),)
    assert branch.roll_back(prepared=False)


def test_killed_session_before_commit_leaves_branch_to_resolver(orders: MySQLOrders) -> None:
    branch = orders.prepared(1)
    orders.execute(f"KILL {branch.details()['connection']}")
    assert not branch.commit()
    recovery = orders.recovery()
    eventually(lambda: recovery.commit(branch.xid) is Ended.DONE, "the branch is committed")
    assert orders.rows() == [1]
    recovery.close()


def test_connection_ended_by_the_server_dooms_only_an_immediate_branch(orders: MySQLOrders) -> None:
    clock = SimClock()
    orders.resource = orders.new_resource(clock=clock)
    numbers = []
    for number, passed_s in enumerate((FRESH_S / 2, 2 * FRESH_S)):
        branch = orders.prepared(10 + number)
        numbers.append(branch.details()["connection"])
        assert branch.commit()
        orders.execute(f"KILL {numbers[-1]}")
        clock.advance(passed_s)
        if passed_s < FRESH_S:
            doomed = orders.enlist()
            with pytest.raises(MySQLdb.OperationalError):
                orders.insert(doomed, 1)
            assert doomed.roll_back(prepared=False)
            assert not doomed.ended_by_body
    assert orders.prepared(2).details()["connection"] not in numbers
    assert orders.rows() == [10, 11]


def test_prepared_branches_survive_server_kills_and_are_committed_by_others(orders: MySQLOrders) -> None:
    branches = [orders.prepared(number) for number in (1, 2, 3)]
    orders.server.restart()
    assert not branches[0].commit()
    recovery = orders.recovery()
    assert {listed.xid for listed in recovery.prepared()} == {branch.xid for branch in branches}
    assert recovery.commit(branches[0].xid) is Ended.DONE
    assert recovery.rollback(branches[1].xid) is Ended.DONE
    recovery.force()
    orders.server.restart()
    recovery = orders.recovery()
    assert [listed.xid for listed in recovery.prepared()] == [branches[2].xid]
    assert recovery.commit(branches[2].xid) is Ended.DONE
    assert orders.rows() == [1, 3]
    assert recovery.marker_outcome(branches[0].xid.gtrid.decode()) == "committed"
    assert recovery.marker_outcome(branches[1].xid.gtrid.decode()) is None
    recovery.close()
