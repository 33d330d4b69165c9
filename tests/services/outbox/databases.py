"""Databases that have an outbox, each through the drivers that are here."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import MySQLdb
import psycopg
import pymysql

from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

KINDS = (
    "sqlite", "sqlite-autocommit", "mysqlclient", "mysqlclient-autocommit", "pymysql", "psycopg", "psycopg-autocommit",
)  # fmt: skip
Connect = Callable[[], Any]


def connector(kind: str, folder: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Connect:
    """How a service of this kind opens a connection."""
    driver, _, mode = kind.partition("-")
    if driver == "sqlite":
        path = folder / "shop.db"
        level = None if mode else ""
        return lambda: sqlite3.connect(path, isolation_level=level, timeout=30.0)  # type: ignore[arg-type]
    if driver == "psycopg":
        return lambda: psycopg.connect(postgresql.conninfo(), autocommit=bool(mode))
    if driver == "pymysql":
        return lambda: pymysql.connect(**_of_pymysql(mariadb))
    return lambda: MySQLdb.connect(**mariadb.connect_arguments(), autocommit=bool(mode))


def _of_pymysql(mariadb: MariaDB) -> dict[str, Any]:
    given = mariadb.connect_arguments()
    return {{"passwd": "password", "db": "database"}.get(name, name): value for name, value in given.items()}
