"""Databases that have an outbox, each through the drivers that are here."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import MySQLdb
import psycopg
import psycopg2
import pymysql

from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

KINDS = (
    "sqlite", "sqlite-autocommit", "mysqlclient", "mysqlclient-autocommit", "pymysql", "pymysql-autocommit", "mariadb",
    "mariadb-autocommit", "psycopg", "psycopg-autocommit", "psycopg2", "psycopg2-autocommit",
)  # fmt: skip
RELAYED = ("sqlite", "mysqlclient", "psycopg")
Connect = Callable[[], Any]
Fields = dict[str, Any]


def fields_of(kind: str, folder: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Fields:
    """What ``connector_of`` takes, JSON-able."""
    driver = kind.partition("-")[0]
    if driver == "sqlite":
        return {"kind": kind, "where": str(folder / "shop.db")}
    if driver in ("psycopg", "psycopg2"):
        return {"kind": kind, "where": postgresql.conninfo()}
    return {"kind": kind, "where": mariadb.connect_arguments()}


def connector_of(fields: Fields) -> Connect:
    """How a process opens a connection of this kind."""
    driver, _, mode = fields["kind"].partition("-")
    where = fields["where"]
    if driver == "sqlite":
        level = None if mode else ""
        return lambda: sqlite3.connect(where, isolation_level=level, timeout=30.0, check_same_thread=False)  # type: ignore[arg-type]
    if driver == "psycopg":
        return lambda: psycopg.connect(where, autocommit=bool(mode))
    if driver == "psycopg2":
        return lambda: _psycopg2(where, autocommit=bool(mode))
    if driver == "pymysql":
        return lambda: pymysql.connect(**of_pymysql(where), autocommit=bool(mode))
    if driver == "mariadb":
        return lambda: import_module("mariadb").connect(**of_pymysql(where), autocommit=bool(mode))
    return lambda: MySQLdb.connect(**where, autocommit=bool(mode))


def connector(kind: str, folder: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Connect:
    """How a service of this kind opens a connection."""
    return connector_of(fields_of(kind, folder, mariadb, postgresql))


def _psycopg2(where: str, *, autocommit: bool) -> Any:
    connection = psycopg2.connect(where)
    connection.autocommit = autocommit
    return connection


def of_pymysql(given: Fields) -> Fields:
    """The words of PyMySQL, aiomysql, asyncmy and MariaDB's connector for what MySQLdb takes."""
    words = {"passwd": "password", "db": "database"}
    return {words.get(name, name): value for name, value in given.items() if name != "charset"}
