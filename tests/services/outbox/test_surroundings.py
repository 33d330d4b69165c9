"""What an outbox lives among: least privileges, other character sets, careful sessions, changing topics and brokers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import MySQLdb
import psycopg
import psycopg2
import pymysql
import pytest

import txmq
from tests.logged import said
from txmq.client.relay.operator import Operator
from txmq.client.relay.relay import Relay
from txmq.errors import ConfigError
from txmq.outbox.outbox import Outbox
from txmq.outbox.page import REFUSED
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run
from txmq.xa.database.dialects import mysql_variables

from .databases import Connect, fields_of, of_pymysql
from .test_relay import DRAIN_S, TABLES, Shop, check

INSTALLS = 8
ALL_BYTES = bytes(range(256))
KEY = "ключ €".encode()
HEADERS = {"имя €": ALL_BYTES}


def test_installs_at_once_make_one_outbox(shop: Shop) -> None:
    for table in TABLES:
        run(shop.connection, f"DROP TABLE {table}")
    shop.connection.commit()
    begin, mysql_like = threading.Barrier(INSTALLS), shop.fields["kind"] not in ("sqlite", "psycopg")

    def install(_: int) -> None:
        with closing(shop.connect()) as connection:
            if mysql_like and mysql_variables(
                connection, "innodb_snapshot_isolation"
            ):  # of MariaDB, as in 11.8 by default
                run(connection, "SET SESSION innodb_snapshot_isolation = ON")
            begin.wait()
            Outbox("orders-db").install(connection)

    with ThreadPoolExecutor(INSTALLS) as threads:
        list(threads.map(install, range(INSTALLS)))
    assert len(run(shop.connection, "SELECT uuid FROM txmq_outbox_relay")[0]) == 1


@pytest.fixture(params=["mysqlclient", "psycopg"])
def served(request: pytest.FixtureRequest, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Any:
    made = Shop(fields_of(request.param, tmp_path, mariadb, postgresql))
    yield made
    made.connection.close()


def as_user(shop: Shop, user: str, grants: dict[str, str]) -> Connect:
    """How a new user with these privileges connects."""
    where, connection = shop.fields["where"], shop.connection
    if shop.fields["kind"] == "psycopg":
        run(connection, f"DROP ROLE IF EXISTS {user}")
        run(connection, f"CREATE ROLE {user} LOGIN")
    else:
        run(connection, f"DROP USER IF EXISTS {user}@localhost")
        run(connection, f"CREATE USER {user}@localhost")
    for table, privileges in grants.items():
        to = user if shop.fields["kind"] == "psycopg" else f"{user}@localhost"
        run(connection, f"GRANT {privileges} ON {table} TO {to}")
    connection.commit()
    if shop.fields["kind"] == "psycopg":
        return lambda: psycopg.connect(where, user=user)
    return lambda: MySQLdb.connect(**where | {"user": user})


def test_users_need_the_privileges_that_the_page_names(served: Shop, client: txmq.Client) -> None:
    service = as_user(served, "txmq_service", {"txmq_outbox": "SELECT, INSERT"})
    relays = as_user(served, "txmq_relays", dict.fromkeys(TABLES, "SELECT, INSERT, UPDATE, DELETE"))
    with closing(service()) as connection:
        with served.outbox.transaction(connection) as tx:
            tx.send("orders", b"1", b"k")
        served.outbox.send(connection, "nowhere", b"2")
        connection.commit()
    with Relay(client, served.outbox, relays) as relay:
        relay.drain(DRAIN_S)
    with Operator(served.outbox, relays) as operator:
        assert operator.look().backlog.parked == 1
        assert operator.release() == 1
        client.topics.create("nowhere")
    with Relay(client, served.outbox, relays) as relay:
        relay.drain(DRAIN_S)
    check(client, [b"1"])
    check(client, [b"2"], "nowhere")
    for table in TABLES:
        run(served.connection, f"DROP TABLE {table}")
    served.connection.commit()


def test_refused_relay_says_what_to_correct_and_goes_on(
    served: Shop, client: txmq.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Found: a wrong password was told as a database that is away."""
    allowed = threading.Event()
    where = served.fields["where"]

    def connect() -> Any:
        if allowed.is_set():
            return served.connect()
        if isinstance(where, str):
            return psycopg.connect(where, user="txmq_stranger")
        return MySQLdb.connect(**where | {"user": "txmq_stranger", "passwd": "geheim"})

    served.write(1)
    with Relay(client, served.outbox, connect) as relay:
        eventually(lambda: relay.refusal, "it is refused")
        with pytest.raises(ConfigError, match=r"user or password are refused.*txmq_stranger"):
            relay.require_begun()
        allowed.set()
        eventually(lambda: relay.sent, "it goes on")
        relay.drain(DRAIN_S)
        relay.require_begun()
    check(client, served.committed())
    events = [line["event"] for line in said(caplog) if line["level"] != "info"]
    assert events == ["outbox cannot be relayed until somebody corrects it; it is tried again, more and more rarely"]


@pytest.mark.parametrize("driver", ["mysqlclient", "pymysql", "psycopg", "psycopg2"])
def test_bytes_pass_connections_in_latin_1(
    driver: str, client: txmq.Client, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    shop = Shop(fields_of(driver, tmp_path, mariadb, postgresql))
    where = shop.fields["where"]
    connect: dict[str, Connect] = {
        "mysqlclient": lambda: MySQLdb.connect(**where | {"charset": "latin1"}),
        "pymysql": lambda: pymysql.connect(**of_pymysql(where), charset="latin1"),
        "psycopg": lambda: psycopg.connect(where, client_encoding="latin1"),
        "psycopg2": lambda: psycopg2.connect(where, client_encoding="latin1"),
    }
    with closing(connect[driver]()) as connection:
        shop.outbox.send(connection, "orders", ALL_BYTES * 3, KEY, headers=HEADERS)
        connection.commit()
    with Relay(client, shop.outbox, connect[driver]) as relay:
        relay.drain(DRAIN_S)
    (message,) = client.browse("orders")
    assert (message.value, message.key, dict(message.headers)) == (ALL_BYTES * 3, KEY, HEADERS)
    shop.connection.close()


def test_relay_works_in_a_careful_session(
    client: txmq.Client, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    """As of ``mysql --safe-updates``."""
    shop = Shop(fields_of("mysqlclient", tmp_path, mariadb, postgresql))
    careful = "SET SESSION sql_safe_updates = 1, sql_select_limit = 2"

    def connect() -> Any:
        return MySQLdb.connect(**shop.fields["where"], init_command=careful)

    shop.write(9)
    shop.write(1, "nowhere")
    with Relay(client, shop.outbox, connect) as relay:
        relay.drain(DRAIN_S)
    with Operator(shop.outbox, connect) as operator:
        assert operator.drop([row.id for row in operator.look(10).parked]) == 1
    check(client, shop.committed()[:-1])
    shop.connection.close()


def test_topic_made_anew_or_grown_takes_what_waits(sqlite_shop: Shop, client: txmq.Client) -> None:
    with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
        sqlite_shop.write(6)
        relay.drain(DRAIN_S)
        client.topics.delete("orders")
        client.topics.create("orders", partitions=2)
        before = len(sqlite_shop.committed())
        sqlite_shop.write(6)
        relay.drain(DRAIN_S)
        check(client, sqlite_shop.committed()[before:])
    client.topics.alter("orders", partitions=4)
    grown = [("orders", b"%d" % number, b"k%d" % number) for number in range(100, 120)]
    sqlite_shop.outbox.send_many(sqlite_shop.connection, grown)
    sqlite_shop.connection.commit()
    with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
        relay.drain(DRAIN_S)
    assert max(message.partition for message in client.browse("orders")) > 1
    assert run(sqlite_shop.connection, "SELECT COUNT(*) FROM txmq_outbox_parked")[0] == [(0,)]


def test_row_over_the_requests_of_a_restarted_broker_is_parked(sqlite_shop: Shop, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker, txmq.connect(broker.address) as client:
        client.topics.create("orders")
        with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
            sqlite_shop.write(1)
            relay.drain(DRAIN_S)
    sqlite_shop.outbox.send(sqlite_shop.connection, "orders", b"x" * (3 << 20), b"large")
    sqlite_shop.connection.commit()
    sqlite_shop.write(3)
    sizes = dict.fromkeys(("request_size_bytes_max", "batch_size_bytes_max"), 1 << 20)
    with BrokerProcess(tmp_path / "data", settings=sizes) as broker, txmq.connect(broker.address) as client:
        with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
            relay.drain(DRAIN_S)
        check(client, sqlite_shop.committed())
    assert run(sqlite_shop.connection, "SELECT why FROM txmq_outbox_parked")[0] == [(REFUSED,)]
