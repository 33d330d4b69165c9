"""What a database's errors say: whether the transaction may be run again, and whether its savepoint is gone."""

from __future__ import annotations

import sqlite3
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


# What PostgreSQL 15 answers to RELEASE SAVEPOINT; only the first says that the body ended the transaction.
RELEASE_STATES = {
    "3B001": True,  # savepoint "txmq_body" does not exist
    "25P02": False,  # current transaction is aborted: a statement failed in it
    "57P01": False,  # terminating connection due to administrator command
    "57014": False,  # canceled
    "53200": False,  # out of memory
}


@pytest.mark.parametrize("raised", [_Psycopg, _Psycopg2, _pg8000])
@pytest.mark.parametrize(("state", "is_gone"), RELEASE_STATES.items())
def test_one_sqlstate_of_postgresql_says_that_the_savepoint_is_gone(raised: Any, state: str, is_gone: bool) -> None:
    assert POSTGRESQL.has_no_savepoint(raised(state)) is is_gone


def test_an_error_without_a_sqlstate_says_nothing_about_the_savepoint() -> None:
    assert not POSTGRESQL.has_no_savepoint(TypeError("of the driver's own"))


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


def test_sqlite_names_the_savepoint_that_is_gone() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    with pytest.raises(sqlite3.Error) as caught:
        connection.execute("RELEASE SAVEPOINT txmq_body")
    connection.close()
    assert SQLITE.has_no_savepoint(caught.value)
    assert not SQLITE.has_no_savepoint(sqlite3.OperationalError("database is locked"))
