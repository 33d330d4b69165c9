"""What a driver raises is a refusal that somebody corrects, or the word for having no answer."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import psycopg
import pymysql
import pytest
from sqlalchemy.exc import OperationalError as SessionError

from txmq.xa.database.refusals import Refusal, described, naming, refusal_of

PORT = 'connection failed: connection to server at "127.0.0.1", port 5432 failed: '


def of_connector(words: str) -> Exception:
    """As of mysql.connector, whose errors have a number and an SQLSTATE."""
    made: Exception = pymysql.err.DatabaseError(words)
    made.errno, made.sqlstate = 1146, "42S02"  # type: ignore[attr-defined]
    return made


def postgresql(words: str) -> psycopg.Error:
    """Of a connection that was not made: libpq hands out no SQLSTATE."""
    return psycopg.OperationalError(f"{PORT}{words}\n")


REFUSED: list[tuple[BaseException, Refusal | None]] = [
    (pymysql.err.OperationalError(1045, "Access denied for user 'shop'@'db' (using password: YES)"), Refusal.LOGIN),
    (pymysql.err.OperationalError(1049, "Unknown database 'shop'"), Refusal.DATABASE),
    (pymysql.err.OperationalError(1044, "Access denied for user 'shop'@'%' to database 'x'"), Refusal.PRIVILEGE),
    (pymysql.err.OperationalError(1142, "INSERT command denied to user"), Refusal.PRIVILEGE),
    (pymysql.err.ProgrammingError(1146, "Table 'shop.txmq_offset' doesn't exist"), Refusal.TABLE),
    (pymysql.err.ProgrammingError(1064, "You have an error in your SQL syntax"), Refusal.CALL),
    (of_connector("Table doesn't exist"), Refusal.TABLE),
    (pymysql.err.OperationalError(2003, "Can't connect to MySQL server on 'db' (111)"), None),
    (pymysql.err.OperationalError(2006, "Server has gone away"), None),
    (pymysql.err.OperationalError(1205, "Lock wait timeout exceeded"), None),
    (pymysql.err.OperationalError(1040, "Too many connections"), None),
    (postgresql('FATAL:  password authentication failed for user "shop"'), Refusal.LOGIN),
    (postgresql('FATAL:  role "shop" does not exist'), Refusal.LOGIN),
    (postgresql('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "shop"'), Refusal.LOGIN),
    (postgresql('FATAL:  database "shop" does not exist'), Refusal.DATABASE),
    (postgresql('FATAL:  permission denied for database "shop"'), Refusal.PRIVILEGE),
    (postgresql("FATAL:  the database system is starting up"), None),
    (postgresql("Connection refused"), None),
    (psycopg.errors.UndefinedTable('relation "txmq_offset" does not exist'), Refusal.TABLE),
    (psycopg.errors.InsufficientPrivilege("permission denied for table txmq_offset"), Refusal.PRIVILEGE),
    (psycopg.errors.AdminShutdown("terminating connection"), None),
    (psycopg.errors.LockNotAvailable("canceling statement due to lock timeout"), None),
    (sqlite3.OperationalError("no such table: txmq_offset"), Refusal.TABLE),
    (sqlite3.OperationalError("unable to open database file"), Refusal.DATABASE),
    (sqlite3.OperationalError("attempt to write a readonly database"), Refusal.PRIVILEGE),
    (sqlite3.OperationalError("database is locked"), None),
    (ConnectionRefusedError(111, "Connection refused"), None),
    (TimeoutError(), None),
    (TypeError("connect() got an unexpected keyword argument 'pasword'"), Refusal.CALL),
]


@pytest.mark.parametrize(("error", "refusal"), REFUSED, ids=lambda found: str(found)[:60])
def test_driver_s_error_is_a_refusal_or_none(error: BaseException, refusal: Refusal | None) -> None:
    assert refusal_of(error) is refusal


def test_error_of_a_framework_is_its_driver_s() -> None:
    cause = postgresql('FATAL:  password authentication failed for user "shop"')
    outer = SessionError("SELECT 1", {}, cause)
    outer.__cause__ = cause
    assert refusal_of(outer) is Refusal.LOGIN


def test_a_framework_s_class_says_less_than_its_cause() -> None:
    class ProgrammingError(psycopg.Error):
        """Of Django: every class of PEP 249 once more."""

    outer = ProgrammingError('column "unit" does not exist')
    outer.__cause__ = psycopg.errors.UndefinedColumn('column "unit" does not exist')
    assert refusal_of(outer) is Refusal.TABLE


def test_connection_that_was_closed_is_no_refusal() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        pass
    with pytest.raises(sqlite3.ProgrammingError) as caught:
        connection.cursor()
    assert refusal_of(caught.value) is None
    assert refusal_of(ValueError("no active connection")) is None


def test_what_is_told_names_user_and_server_in_one_line() -> None:
    def connect() -> None:
        raise pymysql.err.OperationalError(1045, "Access denied for user 'shop'@'db'")

    fields = {"user": "shop", "passwd": "geheim", "host": "db", "port": 3306, "db": "orders"}
    with pytest.raises(pymysql.err.OperationalError) as caught:
        naming(connect, fields)()
    found = described(caught.value)
    assert found == "Access denied for user 'shop'@'db' (1045); user shop, database orders, server db, port 3306"
    assert "\n" not in described(postgresql("Connection refused"))
