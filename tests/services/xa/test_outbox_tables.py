"""The interleavings of an outbox's tables, on SQLite, and on a real MariaDB and PostgreSQL."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import MySQLdb
import psycopg
import pytest

from txmq.errors import ConfigError, RolledBackError
from txmq.protocol.grammar import is_hex32
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa import LastResource
from txmq.xa.database import outbox_series
from txmq.xa.database.dialects import MYSQL, POSTGRESQL, SQLITE, Dialect
from txmq.xa.database.marker_table import MarkerTable
from txmq.xa.database.outbox_homes import LONE
from txmq.xa.database.outbox_keys import ANY_KEY, OutboxKey
from txmq.xa.database.outbox_tables import OutboxTables
from txmq.xa.database.outbox_topics import TopicSize
from txmq.xa.last_resource.enclosing import Waiting

K, L, WHOLE = OutboxKey("orders-0", "1a"), OutboxKey("orders-0", "2b"), OutboxKey("orders-0", ANY_KEY)
MOVED, ELSEWHERE, OTHERS = OutboxKey("orders-1", "1a"), OutboxKey("orders-1", "3c"), OutboxKey("orders.x-0", "1a")
SERIES = "5" * 32
LOCKED = (MySQLdb.OperationalError, psycopg.errors.LockNotAvailable)
RC, RR = "READ COMMITTED", "REPEATABLE READ"
_numbers = itertools.count(1)


class World:
    """A database with a resource's tables, a row of the application's, and connections."""

    def __init__(self, connect: Callable[[], Any], isolation: str, dialect: Dialect) -> None:
        self._connect, self.isolation, self.dialect = connect, isolation, dialect
        self.opened: list[Any] = []
        resource = LastResource("shop", connect=self.connect)
        resource.install()
        connection, mark = self.connect(), self.dialect.placeholder
        self.outbox = OutboxTables("txmq_marker", self.dialect, mark)
        self.outbox.create(connection, SERIES)
        self.outbox.create(connection, "f" * 32)  # idempotent
        self.outbox.takes_packets = self.dialect is MYSQL
        self.table = MarkerTable("txmq_marker", self.dialect, mark)
        self.table.put_server(connection, self.table.found_server(connection))  # as ``install`` does with an outbox
        found = self.table.identity(connection)
        assert found is not None
        self.uuid = found.uuid
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE stock (id INTEGER PRIMARY KEY, left_over INTEGER)")
        cursor.execute("INSERT INTO stock VALUES (1, 10), (2, 10)")
        connection.commit()

    def connect(self) -> Any:
        connection = self._connect()
        level = "SESSION CHARACTERISTICS AS TRANSACTION" if self.dialect is POSTGRESQL else "SESSION TRANSACTION"
        if self.isolation:
            connection.cursor().execute(f"SET {level} ISOLATION LEVEL {self.isolation}")
            connection.cursor().execute(self.dialect.for_resolvers or "SET lock_timeout = '1s'")
            connection.commit()
        self.opened.append(connection)
        return connection

    def begin(self) -> Any:
        connection = self.connect()
        if self.dialect.begin:
            connection.cursor().execute(self.dialect.begin)
        return connection

    def mark(self, connection: Any, txid: str, *keys: OutboxKey) -> bool:
        """The marker's INSERT with the check; whether it got in."""
        condition, parameters = self.outbox.nobody_waits(keys)
        mark = self.dialect.placeholder
        cursor = connection.cursor()
        cursor.execute(
            "INSERT INTO txmq_marker (txid, outcome, deadline_ms, written_ms, seen) "
            f"SELECT {mark}, 'committed', 0, {self.dialect.now_ms}, 0 FROM txmq_marker_identity "
            f"WHERE id = 1 AND uuid = {mark} AND {condition.replace('?', mark)}",
            (txid, self.uuid, *parameters),
        )
        return bool(cursor.rowcount == 1)

    def run(self, statement: str) -> None:
        """One statement of its own."""
        connection = self.begin()
        connection.cursor().execute(statement)
        connection.commit()

    def outboxed(self, row_id: str, *keys: OutboxKey) -> None:
        """A transaction that waits, committed."""
        connection = self.begin()
        self.outbox.add(connection, row_id, row_id.encode(), keys)
        connection.commit()


@pytest.fixture(params=["sqlite", RC, "postgresql"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "sqlite":
        made = World(lambda: sqlite3.connect(tmp_path / "shop.db", timeout=1.0), "", SQLITE)
    elif request.param == "postgresql":
        made = _on_postgresql(request.getfixturevalue("postgresql"), RC)
    else:
        made = _on_mariadb(request.getfixturevalue("mariadb"), request.param)
    yield made
    _end(made)


@pytest.fixture
def snapshots(mariadb: MariaDB) -> Iterator[World]:
    """At REPEATABLE READ."""
    made = _on_mariadb(mariadb, RR)
    yield made
    _end(made)


def _on_mariadb(server: MariaDB, isolation: str) -> World:
    name = f"outbox{next(_numbers)}"
    server.execute(f"CREATE DATABASE {name}")
    return World(lambda: server.connect(db=name), isolation, MYSQL)


def _on_postgresql(server: PostgreSQL, isolation: str) -> World:
    name = f"outbox{next(_numbers)}"
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return World(lambda: psycopg.connect(server.conninfo(name)), isolation, POSTGRESQL)


def _end(world: World) -> None:
    for connection in world.opened:
        with suppress(MySQLdb.Error, sqlite3.Error, psycopg.Error):
            connection.close()


@pytest.mark.parametrize(
    ("waits", "ours", "gets_in"),
    [
        (K, K, False),
        (K, L, True),
        (K, ELSEWHERE, True),
        (K, OTHERS, True),
        (OTHERS, K, True),
        (K, MOVED, False),
        (MOVED, K, False),
        (WHOLE, K, False),
        (K, WHOLE, False),
        (WHOLE, MOVED, True),
    ],
)
def test_marker_gets_in_if_nobody_of_its_keys_waits(
    world: World, waits: OutboxKey, ours: OutboxKey, gets_in: bool
) -> None:
    world.outboxed("t1", waits)
    connection = world.begin()
    assert world.mark(connection, "t2", ours) is gets_in
    assert waits.collides(ours) is not gets_in
    connection.rollback()


def test_topics_never_become_older(world: World) -> None:
    topics = world.outbox.topics
    connection = world.begin()
    for told in (TopicSize(3, 4), TopicSize(3, 2), TopicSize(2, 9), TopicSize(3, 8), TopicSize(4, 1), TopicSize(3, 16)):
        topics.tell(connection, [("orders", told), ("audit", TopicSize(1, 1))])
    assert topics.newest(connection) == {"orders": TopicSize(4, 1), "audit": TopicSize(1, 1)}
    assert topics.newest(connection, ["orders", "unknown"]) == {"orders": TopicSize(4, 1)}
    connection.rollback()


def test_marker_of_many_partitions_looks_at_each(world: World) -> None:
    world.outboxed("t1", K)
    connection = world.begin()
    assert world.mark(connection, "t2", ELSEWHERE, L)
    assert not world.mark(connection, "t3", ELSEWHERE, L, K)
    assert world.mark(connection, "t4")
    connection.rollback()


def test_who_committed_the_same_row_before_is_seen(world: World) -> None:
    """T1 has the row, and waits in the outbox; T2 waits for the row, and then finds T1's key."""
    first = world.begin()
    first.cursor().execute("UPDATE stock SET left_over = 9 WHERE id = 1")
    world.outbox.add(first, "t1", b"1", [K])
    if world.isolation:
        second = world.begin()
        second.cursor().execute("SELECT left_over FROM stock WHERE id = 2")  # its snapshot, if it has one
        first.commit()
    else:
        first.commit()
        second = world.begin()
    second.cursor().execute("UPDATE stock SET left_over = 8 WHERE id = 1")
    assert not world.mark(second, "t2", K)
    second.rollback()


def test_marker_waits_for_no_other_writer_of_the_outbox(world: World) -> None:
    if not world.isolation:
        return  # one writer
    first = world.begin()
    world.outbox.add(first, "t1", b"1", [K])
    second = world.begin()
    assert world.mark(second, "t2", K)  # they have no row in common: no order between them
    third = world.begin()
    world.outbox.add(third, "t3", b"3", [K])
    for connection in (third, second, first):
        connection.commit()


def test_marker_waits_for_them_at_repeatable_read(snapshots: World) -> None:
    """So such a connection is refused (``Installation.require_current``)."""
    first = snapshots.begin()
    snapshots.outbox.add(first, "t1", b"1", [K])
    with pytest.raises(LOCKED, match=r"Lock wait|lock timeout"):
        snapshots.mark(snapshots.begin(), "t2", K)


def test_connection_at_repeatable_read_is_refused_by_name(snapshots: World) -> None:
    resource = LastResource("shop", connect=snapshots.connect, outbox=True)
    resource.install()
    with pytest.raises(ConfigError, match="its transactions are REPEATABLE READ"):
        resource.enlist("0" * 16, snapshots.connect())
    branch = resource.enlist("0" * 16)  # its own are set
    assert branch.roll_back()
    resource.close()


def test_numbers_follow_the_order_of_keys_without_gaps(world: World) -> None:
    connection = world.connect()
    for number in range(5):
        world.outboxed(f"t{9 - number}", K)
    assert (world.outbox.number(connection, 3), world.outbox.number(connection, 3)) == (3, 2)
    rows = world.outbox.numbered(connection, 0, 10)
    assert [(row.number, row.id) for row in rows] == [(1, "t9"), (2, "t8"), (3, "t7"), (4, "t6"), (5, "t5")]
    world.outbox.delete(connection, rows)
    world.outboxed("later", K)
    assert world.outbox.number(connection) == 1
    assert [row.number for row in world.outbox.numbered(connection, 0, 10)] == [6]


def test_row_that_is_not_committed_is_numbered_later(world: World) -> None:
    if not world.isolation:
        return
    open_one = world.begin()
    world.outbox.add(open_one, "first", b"1", [K])
    world.outboxed("second", L)
    connection = world.connect()
    assert world.outbox.number(connection) == 1
    open_one.commit()
    assert world.outbox.number(connection) == 1
    assert [row.id for row in world.outbox.numbered(connection, 0, 10)] == ["second", "first"]


def test_drainers_wait_for_each_other_and_give_no_number_twice(world: World) -> None:
    if not world.isolation:
        return
    world.outboxed("t1", K)
    first = world.begin()
    first.cursor().execute("SELECT number FROM txmq_marker_outbox_series WHERE id = 1 FOR UPDATE")
    with pytest.raises(LOCKED, match=r"Lock wait|lock timeout"):
        world.outbox.number(world.connect())
    first.rollback()
    assert world.outbox.number(world.connect()) == 1


def test_row_leaves_with_its_keys_and_by_its_number(world: World) -> None:
    world.outboxed("t1", K, MOVED)
    connection = world.connect()
    world.outbox.number(connection)
    (row,) = world.outbox.numbered(connection, 0, 10)
    assert (row.batches, row.state) == (b"t1", "waiting")
    world.outbox.delete(connection, [row])
    assert world.outbox.numbered(connection, 0, 10) == []
    second = world.begin()
    assert world.mark(second, "t2", K, MOVED)
    second.rollback()


def test_one_drains_until_its_turn_ends(world: World) -> None:
    connection = world.connect()
    assert world.outbox.hold(connection, "one", 5000)
    assert world.outbox.hold(connection, "one", 5000)
    assert not world.outbox.hold(connection, "two", 5000)
    assert not world.outbox.hold(connection, "two", 6000)


def test_turn_from_before_a_clock_was_set_back_ends(world: World) -> None:
    connection = world.connect()
    assert world.outbox.hold(connection, "one", 3_600_000)
    assert world.outbox.hold(connection, "two", 5000)


def test_parked_row_keeps_later_ones_of_its_keys_behind_it(world: World) -> None:
    connection = world.connect()
    for row_id, key in (("t1", K), ("t2", L), ("t3", K), ("t4", L)):
        world.outboxed(row_id, key)
    assert world.outbox.number(connection, 3) == 3
    first, second, third = world.outbox.numbered(connection, 0, 10)
    world.outbox.park(connection, first, "unknown-topic: gone")
    assert [row.state for row in world.outbox.numbered(connection, 0, 10)] == ["parked", "waiting", "recalled"]
    world.outboxed("t5", K)
    assert world.outbox.number(connection) == 1  # t4: t5 is behind the parked one
    world.outbox.voided(connection, first)
    world.outbox.voided(connection, third)
    assert [row.id for row in world.outbox.numbered(connection, 0, 10)] == ["t2", "t4"]
    assert world.outbox.number(connection) == 0
    assert world.outbox.release(connection, "t1")
    assert not world.outbox.release(connection, "t1")
    assert world.outbox.number(connection) == 3
    assert [row.id for row in world.outbox.numbered(connection, 4, 10)] == ["t1", "t3", "t5"]
    assert second.id == "t2"


def test_numbers_stay_within_what_a_broker_remembers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_series, "NUMBERED_MAX", 3)
    connection = world.connect()
    for number in range(5):
        world.outboxed(f"t{number}", K)
    assert world.outbox.number(connection, 9) == 3
    rows = world.outbox.numbered(connection, 0, 10)
    world.outbox.delete(connection, rows[1:])
    assert world.outbox.number(connection, 9) == 0  # the first one is not settled
    world.outbox.delete(connection, rows[:1])
    assert world.outbox.number(connection, 9) == 2


def test_new_series_numbers_everything_anew(world: World) -> None:
    connection = world.connect()
    world.outboxed("t1", K)
    world.outbox.number(connection)
    assert not world.outbox.begin_series(connection, "7" * 32, former="6" * 32)
    assert world.outbox.begin_series(connection, "6" * 32, former=SERIES)
    assert world.outbox.series(connection) == ("6" * 32, 0)
    assert world.outbox.numbers(connection) == {}
    assert world.outbox.number(connection) == 1


def test_outboxed_marker_leaves_a_day_behind_its_row(world: World) -> None:
    connection = world.connect()
    world.outboxed("t1", K)
    for txid in ("t1", "t2"):
        world.table.insert_outboxed(connection, txid, world.uuid, 1 << 50)
    connection.cursor().execute("UPDATE txmq_marker SET written_ms = written_ms - 90000000")
    connection.commit()
    assert world.outbox.delete_expired_markers(connection) == 1
    assert (world.table.outcome_of(connection, "t1"), world.table.outcome_of(connection, "t2")) == ("outboxed", None)


def test_messages_that_exceed_a_statement_are_refused_before(mariadb: MariaDB) -> None:
    world = _on_mariadb(mariadb, RC)
    resource = LastResource("shop", connect=world.connect, outbox=True)
    resource.install()
    branch = resource.enlist("0" * 16)
    branch.end_body()
    ((packet,),) = mariadb.execute("SELECT @@max_allowed_packet")
    with pytest.raises(RolledBackError, match="max_allowed_packet"):
        branch.fill_outbox("t1", 30.0, [Waiting(LONE, bytes(int(packet) // 2), [K])])
    branch.fill_outbox("t1", 30.0, [Waiting(LONE, b"\\" * (int(packet) // 2 - 4096), [K])])  # each is written as two
    branch.commit()
    branch.finish()
    assert world.outbox.waits(world.connect(), "t1")
    resource.close()
    _end(world)


A, B = f"{0xA:016x}", f"{0xF << 60:016x}"


def test_each_home_has_numbers_of_its_own(world: World) -> None:
    connection = world.connect()
    views = [world.outbox.at(home) for home in (A, B)]
    for view in views:
        view.begin(connection, SERIES)
        view.begin(connection, "f" * 32)
        assert view.series(connection) == (SERIES, 0)
    for number, home in enumerate((A, B, A)):
        world.outbox.add(connection, f"t{number}", b"x", [OutboxKey(f"t{number}-0", "1a")], home)
    connection.commit()
    assert [view.number(connection) for view in (*views, world.outbox)] == [2, 1, 0]
    first, second = (view.numbered(connection, 0, 9) for view in views)
    assert [[(row.number, row.id) for row in rows] for rows in (first, second)] == [[(1, "t0"), (2, "t2")], [(1, "t1")]]
    views[1].delete(connection, second)
    assert views[0].numbers(connection) == {1: "t0", 2: "t2"}
    assert world.outbox.homes(connection) == [A]


def test_key_that_moved_homes_waits_for_its_former_one(world: World) -> None:
    connection = world.connect()
    world.outbox.at(A).begin(connection, SERIES)
    there = world.outbox.at(B)
    there.begin(connection, SERIES)
    for row_id, key, home in (("t1", K, A), ("t2", MOVED, B), ("t3", ELSEWHERE, B), ("t4", MOVED, B)):
        world.outbox.add(connection, row_id, b"x", [key], home)
    connection.commit()
    assert there.number(connection) == 1
    assert [row.id for row in there.numbered(connection, 0, 9)] == ["t3"]
    assert world.outbox.at(A).number(connection) == 1
    world.outbox.at(A).delete(connection, world.outbox.at(A).numbered(connection, 0, 9))
    assert there.number(connection) == 2


def test_key_waits_for_none_of_topics_whose_names_begin_alike(world: World) -> None:
    connection = world.connect()
    there = world.outbox.at(B)
    there.begin(connection, SERIES)
    world.outbox.add(connection, "t1", b"x", [OutboxKey("orders-dlq-0", "1a")], A)
    world.outbox.add(connection, "t2", b"x", [MOVED], B)
    connection.commit()
    assert there.number(connection) == 1


def test_numbering_of_a_lone_broker_retires_behind_homes(world: World) -> None:
    """An older txmq drains by it, whichever home a row is for: every broker refuses the name."""
    connection = world.connect()
    world.outboxed(f"{1:016x}-{A}-1-1", K)
    assert world.outbox.number(connection) == 1
    world.outbox.tell_topics(connection, {"orders": TopicSize(1, 1, (0xA,))})
    for row in range(2, 4):
        retired, _ = world.outbox.series(connection)
        assert not is_hex32(retired.encode())
        world.outboxed(f"{1:016x}-{A}-1-{row}", L)
        numbers = world.outbox.numbers(connection)
        with suppress(OverflowError, MySQLdb.Error, psycopg.Error):  # there is none behind the highest one
            world.outbox.number(connection)
        assert world.outbox.numbers(connection) == numbers
        world.outbox.at(A).begin(connection, "f" * 32)
        world.outbox.create(connection, "f" * 32)
        assert world.outbox.at(A).series(connection).name == SERIES
    assert world.outbox.at(A).number(connection) == 2


def test_row_numbered_while_an_operator_parks_it_is_parked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, park = world.connect(), world.outbox.park
    world.outboxed("t1", K)

    def park_late(*arguments: Any) -> bool:
        world.outbox.number(connection)
        return park(*arguments)

    monkeypatch.setattr(world.outbox, "park", park_late)
    assert world.outbox.park_waiting(connection, "t1", "by an operator")
    assert [row.state for row in world.outbox.numbered(connection, 0, 9)] == ["parked"]
    assert not world.outbox.park_waiting(connection, "t1", "by an operator")


def test_rows_of_before_are_told_from_what_came_later(world: World) -> None:
    connection = world.connect()
    for txid, key in (("t1", K), ("t2", K), ("t3", L)):
        world.outboxed(txid, key)
    world.run("UPDATE txmq_marker_outbox SET written_ms = seq")
    assert world.outbox.park_waiting(connection, "t1", "by an operator")
    assert [world.outbox.older(connection, until_ms) for until_ms in range(4)] == [0, 1, 2, 3]
    assert [world.outbox.has_older(connection, until_ms) for until_ms in (2, 3)] == [False, True]  # t2 is behind t1
    assert world.outbox.release(connection, "t1")
    assert [world.outbox.has_older(connection, until_ms) for until_ms in (0, 1)] == [False, True]
    world.outbox.number(connection)
    assert [world.outbox.has_older(connection, until_ms) for until_ms in (0, 1)] == [False, True]


def test_rows_of_a_lone_broker_go_on_as_its_homes(world: World) -> None:
    connection = world.connect()
    world.outboxed(f"{1:016x}-{A}-1-1", K)
    world.outbox.number(connection)
    world.outboxed(f"{1:016x}-{A}-1-2", L)
    for home, count in ((B, 0), (A, 1)):
        world.outbox.at(home).begin(connection, "f" * 32)
        assert world.outbox.at(home).number(connection) == count
    assert world.outbox.at(A).series(connection) == (SERIES, 2)


def test_tables_of_before_get_their_columns(world: World) -> None:
    connection, name = world.connect(), "txmq_marker_outbox"
    cursor = connection.cursor()
    if world.dialect is not MYSQL:
        cursor.execute("DROP INDEX txmq_marker_outbox_homes")
    else:
        cursor.execute(f"ALTER TABLE {name} DROP KEY home")
    cursor.execute(f"ALTER TABLE {name} DROP COLUMN home")
    cursor.execute(f"ALTER TABLE {name}_topics DROP COLUMN homes")
    cursor.execute(
        f"INSERT INTO {name} (number, id, state, written_ms, size_bytes, reason, batches) "
        "VALUES (0, 't1', 'waiting', 0, 1, '', 'x')"
    )
    connection.commit()
    world.outbox.create(connection, "f" * 32)
    assert world.outbox.is_there(connection)
    assert world.outbox.number(connection) == 1
    assert world.outbox.series(connection) == (SERIES, 1)


def test_transaction_waits_as_long_as_one_of_its_rows(world: World) -> None:
    connection = world.connect()
    world.outboxed("t1-1", K)
    assert world.outbox.waits(connection, "t1")
    assert not world.outbox.waits(connection, "t")
