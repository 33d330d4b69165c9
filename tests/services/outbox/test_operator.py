"""What an operator does with an outbox: each message is sent once or dropped by name, whatever was restored or dies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.crash_points import at_moment
from txmq.client.relay.operator import Ends, Operator, agree, forget
from txmq.client.relay.relay import Relay
from txmq.errors import OutboxStoppedError
from txmq.outbox.tables import ADOPTED
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

from .databases import connector_of, fields_of
from .relaying import ROOT, started
from .test_relay import DRAIN_S, KILLED, TABLES, Shop, check

DRIVERS = {"sqlite": "sqlite3", "mysqlclient": "MySQLdb", "psycopg": "psycopg"}


def operator_of(shop: Shop) -> Operator:
    return Operator(shop.outbox, shop.connect)


def relay_of(client: txmq.Client, shop: Shop) -> Relay:
    return Relay(client, shop.outbox, shop.connect)


def keep(shop: Shop) -> None:
    """A backup of the outbox's tables."""
    for table in TABLES:
        run(shop.connection, f"DROP TABLE IF EXISTS kept_{table}")
        run(shop.connection, f"CREATE TABLE kept_{table} AS SELECT * FROM {table}")
    shop.connection.commit()


def put_back(shop: Shop) -> None:
    """The backup again."""
    for table in TABLES:
        run(shop.connection, f"DELETE FROM {table}")
        run(shop.connection, f"INSERT INTO {table} SELECT * FROM kept_{table}")
        run(shop.connection, f"DROP TABLE kept_{table}")
    shop.connection.commit()


def stopped(client: txmq.Client, shop: Shop) -> None:
    """A relay sends nothing."""
    with relay_of(client, shop) as relay, pytest.raises(OutboxStoppedError, match="says which one"):
        relay.drain(DRAIN_S)
    assert relay.sent == 0


def test_restored_database_is_adopted_and_loses_nothing(shop: Shop, client: txmq.Client) -> None:
    with relay_of(client, shop) as relay:
        shop.write(6)
        relay.drain(DRAIN_S)
    shop.write(3)
    keep(shop)
    with relay_of(client, shop) as relay:
        shop.write(3)
        relay.drain(DRAIN_S)
    put_back(shop)
    shop.write(3)
    stopped(client, shop)
    with operator_of(shop) as operator:
        sent = [row.id for row in operator.look(100).waiting][:2]
        adopted = operator.adopt(client, is_copy=False)
        assert adopted is not None
        assert adopted.parked == 4
        assert {row.why for row in operator.look(100).parked} == {ADOPTED}
        assert operator.drop(sent) == 2
        assert operator.release() == 2
        with relay_of(client, shop) as relay:
            relay.drain(DRAIN_S)
        check(client, shop.committed())
        assert operator.look(1).backlog[::2] == (0, 0)


def test_restored_broker_is_adopted_and_the_line_goes_on(sqlite_shop: Shop, tmp_path: Path) -> None:
    shop = sqlite_shop
    with BrokerProcess(tmp_path / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("orders")
            with relay_of(client, shop) as relay:
                shop.write(3)
                relay.drain(DRAIN_S)
        broker.stop()
        shutil.copytree(tmp_path / "data", tmp_path / "kept")
        broker.start()
        with txmq.connect(broker.address) as client, relay_of(client, shop) as relay:
            shop.write(3)
            relay.drain(DRAIN_S)
        broker.stop()
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "kept", tmp_path / "data")
        broker.start()
        shop.write(3)
        with txmq.connect(broker.address) as client, relay_of(client, shop) as relay:
            with pytest.raises(OutboxStoppedError):
                relay.drain(DRAIN_S)
            with operator_of(shop) as operator:
                assert operator.adopt(client, is_copy=False) is not None
                assert operator.release() == 2
            eventually(lambda: relay.stopped is None, "the relay that stopped goes on")
            relay.drain(DRAIN_S)
            check(client, [value for value in shop.committed() if value not in (b"3", b"4")])


def test_copy_that_is_adopted_goes_on_beside_its_original(
    sqlite_shop: Shop, client: txmq.Client, tmp_path: Path
) -> None:
    sqlite_shop.write(4)
    with relay_of(client, sqlite_shop) as relay:
        relay.drain(DRAIN_S)
        shutil.copy(sqlite_shop.fields["where"], tmp_path / "copy.db")
        sqlite_shop.write(6)
        relay.drain(DRAIN_S)
        copy = connector_of({"kind": "sqlite", "where": str(tmp_path / "copy.db")})
        with Operator(sqlite_shop.outbox, copy) as operator:
            uuid = operator.look().row.uuid
            adopted = operator.adopt(client, is_copy=True)
            assert adopted is not None
            assert adopted.row.uuid != uuid
        connection = copy()
        sqlite_shop.outbox.send(connection, "orders", b"1000")
        connection.commit()
        connection.close()
        with Relay(client, sqlite_shop.outbox, copy) as other:
            other.drain(DRAIN_S)
        sqlite_shop.write(3)
        relay.drain(DRAIN_S)
    check(client, [*sqlite_shop.committed(), b"1000"])


@pytest.mark.parametrize(("point", "parked"), [("relay.claim.committed", 4), ("relay.page.taken", 0)])
def test_adopt_settles_the_page_on_its_way(
    shop: Shop, client: txmq.Client, broker: BrokerProcess, point: str, parked: int
) -> None:
    shop.write(6)
    dying = started(broker.address, shop.fields, f"{point}:1")
    assert dying.wait(DRAIN_S) == KILLED
    with operator_of(shop) as operator, closing(shop.connect()) as late:
        assert operator.look().row.claim is not None
        if shop.fields["kind"] != "sqlite":  # which has one writer
            shop.outbox.send(late, "orders", b"7", b"late")
        adopted = operator.adopt(client, is_copy=True)
        assert adopted is not None
        assert adopted.parked == parked
        assert operator.release() == parked
        if shop.fields["kind"] == "sqlite":
            shop.outbox.send(late, "orders", b"7", b"late")
        late.commit()
    with relay_of(client, shop) as relay:
        relay.drain(DRAIN_S)
    check(client, [*shop.committed(), b"7"])


def test_page_of_a_paused_relay_is_refused_after_adopt(sqlite_shop: Shop, client: txmq.Client) -> None:
    sqlite_shop.write(6)
    released = list[int]()

    def meanwhile() -> None:
        with operator_of(sqlite_shop) as operator:
            operator.adopt(client, is_copy=True)
            released.append(operator.release())

    with at_moment("relay.claim.committed", meanwhile), relay_of(client, sqlite_shop) as relay:
        relay.drain(DRAIN_S)
        assert released == [4]
        sqlite_shop.write(3)
        relay.drain(DRAIN_S)
    check(client, sqlite_shop.committed())


def test_slow_operator_does_not_undo_what_another_did(sqlite_shop: Shop, client: txmq.Client) -> None:
    keep(sqlite_shop)
    with relay_of(client, sqlite_shop) as relay:
        relay.drain(DRAIN_S)
    put_back(sqlite_shop)
    sqlite_shop.write(3)

    def meanwhile() -> None:
        with operator_of(sqlite_shop) as other:
            assert other.look().is_led  # so that relays wait
            adopted = other.adopt(client, is_copy=False)
            assert adopted is not None
            assert other.release() == adopted.parked == 2
        with relay_of(client, sqlite_shop) as relay:
            relay.drain(DRAIN_S)

    with operator_of(sqlite_shop) as operator, at_moment("operator.settled", meanwhile):
        assert operator.adopt(client, is_copy=False) is None
    sqlite_shop.write(3)
    with relay_of(client, sqlite_shop) as relay:
        relay.drain(DRAIN_S)
    check(client, sqlite_shop.committed())


def test_relay_that_stops_meanwhile_does_not_hide_the_stop(
    sqlite_shop: Shop, client: txmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes the relay row: the next claim, and as little is taken of it."""
    keep(sqlite_shop)
    with relay_of(client, sqlite_shop) as relay:
        relay.drain(DRAIN_S)
    put_back(sqlite_shop)
    sqlite_shop.write(3)
    stopped(client, sqlite_shop)
    calls: list[str] = []
    with operator_of(sqlite_shop) as operator:
        ends = operator.ends

        def asked(*arguments: Any, **named: Any) -> Ends:
            found = ends(*arguments, **named)
            if not calls:
                calls.append("first")
                stopped(client, sqlite_shop)
            return found

        monkeypatch.setattr(operator, "ends", asked)
        assert operator.adopt(client, is_copy=False) is not None


def test_adopt_needs_no_session_while_the_broker_is_asked(
    client: txmq.Client, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    """MySQL ends one that is idle for ten seconds."""
    shop, sessions = Shop(fields_of("mysqlclient", tmp_path, mariadb, postgresql)), list[int]()
    shop.write(3)

    def connect() -> Any:
        connection = shop.connect()
        sessions.append(connection.thread_id())
        return connection

    def end_sessions() -> None:
        there, _ = run(shop.connection, "SELECT id FROM information_schema.processlist")
        for session in {int(one) for (one,) in there} & set(sessions):
            run(shop.connection, f"KILL {session}")

    with Operator(shop.outbox, connect) as operator, at_moment("operator.settled", end_sessions):
        adopted = operator.adopt(client, is_copy=True)
    assert sessions
    assert adopted is not None
    assert adopted.parked == 2
    shop.connection.close()


def test_outbox_that_agrees_with_the_broker_is_not_adopted(sqlite_shop: Shop, client: txmq.Client) -> None:
    with relay_of(client, sqlite_shop) as relay, operator_of(sqlite_shop) as operator:
        assert operator.adopt(client, is_copy=False) is None
        sqlite_shop.write(30)
        assert operator.adopt(client, is_copy=False) is None
        relay.drain(DRAIN_S)
        assert operator.look().backlog.parked == 0
    check(client, sqlite_shop.committed())


def test_operators_and_a_relay_at_work_lose_nothing(shop: Shop, client: txmq.Client) -> None:
    is_over, acts = threading.Event(), list[None]()

    def operate() -> None:
        try:
            with operator_of(shop) as operator:
                for _ in range(3):
                    operator.adopt(client, is_copy=True)
                    operator.release()
                    acts.append(None)
        finally:
            is_over.set()

    operating = threading.Thread(target=operate)
    with relay_of(client, shop) as relay:
        operating.start()
        while not is_over.is_set():
            shop.write(6)
        operating.join()
        assert len(acts) == 3
        relay.drain(DRAIN_S)
        with operator_of(shop) as operator:
            operator.release()
        relay.drain(DRAIN_S)
    found = sorted(int(message.value or b"") for message in client.browse("orders"))
    assert found == [int(value) for value in shop.committed()]


def test_parked_units_are_released_by_name_key_or_all(shop: Shop, client: txmq.Client) -> None:
    for messages in ([("no", b"1", b"a"), ("no", b"2", b"b")], [("no", b"3", b"c")], [("no", b"4", b"a")]):
        shop.outbox.send_many(shop.connection, messages)
    shop.outbox.send(shop.connection, "no", b"5")
    shop.connection.commit()
    with relay_of(client, shop) as relay, operator_of(shop) as operator:
        relay.drain(DRAIN_S)
        units = [row.unit or row.id for row in operator.look(9).parked]
        assert len(units) == 5
        assert operator.release([12345]) == operator.drop([12345]) == operator.release(key=("no", b"x")) == 0
        client.topics.create("no", partitions=1)
        assert operator.release(units[3:4]) == 1  # it still waits for another one of its key
        relay.drain(DRAIN_S)
        assert operator.look().backlog.parked == 5
        assert operator.release(key=("no", b"b")) == 2
        relay.drain(DRAIN_S)
        assert operator.drop(units[2:3]) == 1
        assert operator.release(units[4:]) == 1
        relay.drain(DRAIN_S)
        assert operator.release() == 1
        relay.drain(DRAIN_S)
    assert [message.value for message in client.browse("no")] == [b"1", b"2", b"5", b"4"]


def test_forgotten_outbox_begins_anew(sqlite_shop: Shop, client: txmq.Client) -> None:
    with relay_of(client, sqlite_shop) as relay:
        sqlite_shop.write(3)
        relay.drain(DRAIN_S)
    with operator_of(sqlite_shop) as operator:
        row = operator.look().row
        forget(client, row.uuid)
        assert operator.ends(client, row).last is None
        assert not agree(row, operator.ends(client, row))


# --- the commands, which die ------------------------------------------------------------------------------------------


def command(shop: Shop, broker: BrokerProcess, folder: Path, *words: str, crash: str = "") -> int:
    """``txmq outbox`` with these words, as a process."""
    where = shop.fields["where"]
    connect = {"database": where} if shop.fields["kind"] == "sqlite" else where
    connect = {"conninfo": where} if shop.fields["kind"] == "psycopg" else connect
    fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in connect.items())
    driver = DRIVERS[shop.fields["kind"]]
    (folder / "outbox.toml").write_text(
        f'bootstrap = "{broker.address}"\n[[outbox]]\nname = "orders-db"\n'
        f'driver = "{driver}"\nconnect = {{ {fields} }}\n'
    )
    config = ["--config", str(folder / "outbox.toml")]
    line = [sys.executable, "-m", "txmq.cli.main", "outbox", words[0], *config, *words[1:]]
    if not crash:
        return fork_server.run(line, timeout=DRAIN_S).returncode
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TXMQ_CRASH": crash}
    return subprocess.run(line, env=environment, timeout=DRAIN_S, check=False).returncode


def test_commands_that_die_leave_all_or_nothing(
    shop: Shop, client: txmq.Client, broker: BrokerProcess, tmp_path: Path
) -> None:
    keep(shop)
    shop.write(4)
    with relay_of(client, shop) as relay:
        relay.drain(DRAIN_S)
    put_back(shop)
    shop.write(3)

    def died(point: str, *words: str) -> Any:
        assert command(shop, broker, tmp_path, *words, crash=f"operator.{point}:1") == KILLED
        with operator_of(shop) as operator:
            look = operator.look(9)
        assert command(shop, broker, tmp_path, *words) == 0
        return look.backlog[::2]

    adopting = ("adopt", "--original", "--yes")
    stopped(client, shop)
    assert command(shop, broker, tmp_path, *adopting, crash="operator.settled:1") == KILLED
    assert died("adopted", *adopting) == (2, 0)
    assert command(shop, broker, tmp_path, *adopting) == 1
    with operator_of(shop) as operator:
        first, second = [str(row.id) for row in operator.look(9).parked]
    assert died("dropped", "drop", first, "--yes") == (0, 2)
    assert died("released", "release", second) == (0, 1)
    assert command(shop, broker, tmp_path, "run", "--once") == 0
    check(client, [value for value in shop.committed() if value != b"4"])
