"""What a database's errors say: whether the transaction may be run again, and whether they are its own answer."""

from __future__ import annotations

import sqlite3
from threading import Thread
from typing import Any

import pytest

from txmq.xa.database.dialects import MYSQL, POSTGRESQL, SQLITE


class _Psycopg(Exception):
    """As psycopg 3 raises it."""

    def __init__(self, state: str) -> None:
        super().__init__(f"recorded {state}")
        self.sqlstate = state


class _Psycopg2(Exception):
    """As psycopg2 raises it."""

    def __init__(self, state: str) -> None:
        super().__init__(f"recorded {state}")
        self.pgcode = state


def _pg8000(state: str) -> Exception:
    return Exception({"S": "ERROR", "C": state, "M": "recorded"})


class _Connector(Exception):
    """As MariaDB's connector raises it: a text, and the number beside it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"recorded {number}")
        self.errno = number


@pytest.mark.parametrize("raised", [_Psycopg, _Psycopg2, _pg8000])
def test_answer_of_postgresql_has_a_sqlstate(raised: Any) -> None:
    assert POSTGRESQL.is_answer(raised("23505"))
    assert not POSTGRESQL.is_answer(TimeoutError("of the socket"))


@pytest.mark.parametrize("raised", [lambda number: Exception(number, "recorded"), _Connector])
def test_number_of_mysql_tells_servers_answer_from_librarys_word(raised: Any) -> None:
    found = [MYSQL.is_answer(raised(number)) for number in (1213, 4031, 2013, 2014)]
    assert found == [True, True, False, False]
    assert MYSQL.is_lost(object(), raised(2013))
    assert not MYSQL.is_lost(object(), raised(1213))


@pytest.mark.parametrize(
    ("state", "may_pass"),
    [("40P01", True), ("40001", True), ("08006", True), ("57P01", True), ("53100", True), ("55P03", True),
     ("23505", False), ("42P01", False), ("22001", False), ("25P02", False)],
)  # fmt: skip
def test_postgresql_says_by_its_sqlstate_whether_it_may_pass(state: str, may_pass: bool) -> None:
    for raised in (_Psycopg(state), _Psycopg2(state), _pg8000(state)):
        assert POSTGRESQL.is_retriable(object(), raised) is may_pass


@pytest.mark.parametrize(
    ("number", "may_pass"), [(1205, True), (1213, True), (2013, True), (1062, False), (1146, False), (1406, False)]
)
def test_mysql_says_by_its_number_whether_it_may_pass(number: int, may_pass: bool) -> None:
    assert MYSQL.is_retriable(object(), Exception(number, "recorded")) is may_pass


def test_sqlite_says_by_its_code_whether_it_may_pass(tmp_path: Any) -> None:
    one, other = (sqlite3.connect(tmp_path / "a.db", isolation_level=None, timeout=0.0) for _ in range(2))
    one.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    one.execute("INSERT INTO t VALUES (1)")
    one.execute("BEGIN IMMEDIATE")
    found = {}
    for connection, sql in ((other, "BEGIN IMMEDIATE"), (one, "INSERT INTO t VALUES (1)"), (one, "SELECT * FROM no")):
        with pytest.raises(sqlite3.Error) as caught:
            connection.execute(sql)
        found[sql] = SQLITE.is_retriable(connection, caught.value)
    one.close()
    other.close()
    assert list(found.values()) == [True, False, False]


def test_sqlite_used_in_another_thread_says_nothing_of_the_transaction() -> None:
    """As a framework does that ends a block in another thread than it began in."""
    connection, raised = sqlite3.connect(":memory:"), list[Exception]()

    def look() -> None:
        try:
            connection.execute("ROLLBACK TO SAVEPOINT txmq_body")
        except sqlite3.Error as error:
            raised.append(error)

    thread = Thread(target=look)
    thread.start()
    thread.join()
    assert [SQLITE.is_of_driver(error) for error in raised] == [True]
    with pytest.raises(sqlite3.Error) as gone:
        connection.execute("ROLLBACK TO SAVEPOINT txmq_body")
    assert not SQLITE.is_of_driver(gone.value)
    connection.close()
