"""The applier with a real reader, broker and database: the copy is equal to the source, whatever is killed."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.binlog.replica import WAIT_S, Replica
from tests.stopped import until_stopped
from txmq.binlog.apply.applier import Applier
from txmq.binlog.errors import ConflictError, TargetError
from txmq.binlog.publish.topics import RowSelector
from txmq.binlog.status import newest_published
from txmq.runtime.threads import Signal, start_daemon
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.fork_server import ForkServer
from txmq.testing.processes.mariadb import MariaDB

NAMES = iter(f"a{number}" for number in range(1000))
KINDS = (
    "id BIGINT UNSIGNED PRIMARY KEY, i INT, d DECIMAL(30,10), f FLOAT, dd DOUBLE, b BIT(64), y YEAR, da DATE, "
    "tm TIME(3), dt DATETIME(6), ts TIMESTAMP(3) NULL, c CHAR(9), vc VARCHAR(90) CHARACTER SET latin1, tx TEXT, "
    "bi BINARY(6), vb VARBINARY(30), bl LONGBLOB, e ENUM('a','b'), s SET('x','y','z'), j JSON, u UUID, n INET6, "
    "g GEOMETRY, gen INT GENERATED ALWAYS AS (i + 1) STORED, inv INT INVISIBLE DEFAULT 3, `od%d ``name` INT"
)
VALUES = (
    "(1, -5, '12345678901234567890.0123456789', 1.1, 1e300, b'1', 0, '0000-00-00', '-838:59:59.999', "
    "'2026-03-29 02:30:00.000001', '2026-03-29 02:30:00.125', 'ü ', 'é€', '😀 %s', 'a\\0', X'00FF27', "
    "REPEAT(X'FF00', 50000), 'b', 'x,z', '{\"k\": [1, \"é\"]}', '123e4567-e89b-12d3-a456-426655440000', '::1', "
    "ST_GeomFromText('POINT(1 2)', 4326), DEFAULT, 7, 8)",
    "(18446744073709551615, NULL, NULL, NULL, NULL, X'FFFFFFFFFFFFFFFF', 1901, '2026-02-31', '00:00:00', "
    "'0000-00-00 00:00:00', 0, '', '', '', '', '', '', 'nothing', '', 'null', NULL, NULL, NULL, DEFAULT, NULL, NULL)",
    "(3, 0, 0, -0.25, 5e-324, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, "
    "NULL, NULL, NULL, DEFAULT, 1, 1)",
)


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[ForkServer]:
    """Appliers are forked."""
    with ForkServer(("txmq.cli.main", "txmq.binlog.apply.applier")) as made:
        yield made


@pytest.fixture
def replica(
    server: MariaDB, shared_broker: BrokerProcess, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Replica]:
    """Two empty databases, under a new name."""
    for database in ("shop", "copy_shop"):
        server.make_database_anew(database)
    with txmq.connect(shared_broker.address) as client:
        yield Replica(next(NAMES), server, shared_broker, client, tmp_path, getattr(request, "param", ""))


def test_every_kind_of_column_is_written_as_shown(replica: Replica) -> None:
    kinds = KINDS
    if Ability.NETWORK_TYPES not in replica.server.program.abilities:
        kinds = KINDS.replace("u UUID, n INET6", "u CHAR(36), n VARCHAR(39)")
    names = "(id,i,d,f,dd,b,y,da,tm,dt,ts,c,vc,tx,bi,vb,bl,e,s,j,u,n,g,gen,inv,`od%d ``name`)"
    with replica.reader():
        replica.execute(
            "SET SESSION sql_mode = '', time_zone = '+05:30'", f"CREATE TABLE kinds ({kinds})",
            *(f"INSERT INTO kinds {names} VALUES {values}" for values in VALUES),
            f"CREATE TABLE plain ({kinds.replace(' PRIMARY KEY', '')})",
            f"INSERT INTO plain {names} VALUES {VALUES[0]}, {VALUES[0]}, {VALUES[1]}",
            "UPDATE plain SET i = 4 WHERE i = -5 LIMIT 1", "DELETE FROM plain WHERE id > 3",
        )  # fmt: skip
    assert replica.apply().rows == 3 + 3 + 2 + 1
    replica.require_equal()
    shown = "*, inv, HEX(bi), f + 0e0, e + 0, da + 0, dt + 0, ts + 0, ST_AsText(g), ST_SRID(g)"
    for table in ("kinds", "plain"):
        assert replica.rows("shop", table, shown) == replica.rows("copy_shop", table, shown)


@pytest.mark.needs(Ability.BINARY_JSON)
@pytest.mark.parametrize("key", ["INT PRIMARY KEY", "INT"], ids=["key", "no key"])
def test_json_is_followed_by_what_its_text_tells(replica: Replica, key: str) -> None:
    document = "JSON_OBJECT('d', 1.50, 'on', DATE'2026-11-29', 'b', X'00FF', 'long', 12345678901234567890.5, 'n', 1e0)"
    with replica.reader():
        replica.execute(
            f"CREATE TABLE docs (id {key}, doc JSON, e VECTOR(2))",
            f"INSERT INTO docs VALUES (1, {document}, X'0000803F000020C0'), (2, {document}, NULL), (3, NULL, NULL)",
            "UPDATE docs SET doc = JSON_SET(doc, '$.n', CAST(2.25 AS DECIMAL(9,3))) WHERE id = 1",
            "UPDATE docs SET doc = JSON_ARRAY(0.10) WHERE id = 3", "DELETE FROM docs WHERE id > 1",
        )  # fmt: skip
    replica.apply()
    ours, theirs = (
        [(id_, json.loads(text), e) for id_, text, e in replica.rows(side, "docs", "id, CAST(doc AS CHAR), e")]
        for side in ("shop", "copy_shop")
    )
    assert ours == theirs
    ((_, document_there, _),) = theirs
    assert document_there == {
        "d": 1.5, "on": "2026-11-29", "b": "base64:type15:AP8=", "long": 12345678901234567890.5, "n": 2.25,
    }  # fmt: skip


def workload(seed: int) -> list[str]:
    """Statements over two tables with unique values, that change keys and columns."""
    drawn = random.Random(seed)
    found = [
        "CREATE TABLE users (id INT PRIMARY KEY, mail VARCHAR(20) UNIQUE, v INT)",
        "CREATE TABLE log (v INT, t VARCHAR(9))",
        *(f"INSERT INTO users VALUES ({id_}, 'm{id_}', 0)" for id_ in range(12)),
        "INSERT INTO log VALUES "
        + ", ".join([f"({number}, 'large')" for number in range(1, 181)]),  # a transaction of several parts
    ]
    for number in range(150):
        one, other = drawn.sample(range(12), 2)
        found += drawn.choice(
            (
                [f"UPDATE users SET v = v + 1 WHERE id IN ({one},{other})"],
                [
                    f"UPDATE users SET id = id + 100 WHERE id = {one}",
                    f"UPDATE users SET id = id - 100 WHERE id = {one + 100}",
                ],
                [
                    f"UPDATE users SET mail = 'free' WHERE id = {one}",
                    f"UPDATE users SET mail = 'm{one}' WHERE id = {one}",
                ],
                [f"DELETE FROM users WHERE id = {one}", f"INSERT INTO users (id, mail) VALUES ({one}, 'm{one}')"],
                [f"INSERT INTO log (v, t) VALUES ({number % 3}, 'x'), ({number % 3}, 'x')", "DELETE FROM log LIMIT 1"],
            )
        )
        if number % 40 == 20:
            found.append(f"ALTER TABLE users ADD COLUMN c{number} INT DEFAULT {number}")
        if number == 90:
            found += [
                "TRUNCATE log",
                "RENAME TABLE log TO journal",
                "CREATE TABLE log LIKE journal",
                "DROP TABLE journal",
            ]
            found.append("ALTER TABLE users ADD INDEX (v)")
    return found


POINTS = (
    "binlog.apply.filled:2", "binlog.apply.committed:3", "binlog.ddl.begun:1", "binlog.ddl.run:1",
    "binlog.ddl.noted:1", "binlog.ddl.run:1", "binlog.apply.committed:1", "binlog.apply.filled:9",
)  # fmt: skip


def test_killed_applier_repeats_nothing_and_skips_nothing(replica: Replica) -> None:
    with replica.reader():
        replica.execute(*workload(3))
    for point in POINTS:
        assert replica.apply_child(point) == -signal.SIGKILL, (point, replica.log.read_text())
    assert replica.apply_child() == 0, replica.log.read_text()
    replica.require_equal()
    states = replica.server.execute(f"SELECT state, COUNT(*) FROM state_{replica.name}.txmq_binlog_ddl GROUP BY state")
    assert states == [("done", 2 + 4 + 4 + 1)]


def test_killed_target_is_waited_for(replica: Replica) -> None:
    with replica.reader():
        replica.execute(*workload(4))
    child = replica.start_child("binlog.apply.filled:20:stop")
    until_stopped(child.pid, replica.log.read_text)
    replica.server.restart()
    child.send_signal(signal.SIGCONT)
    assert child.wait(WAIT_S) == 0, replica.log.read_text()
    replica.require_equal()


FROZEN = {
    "CREATE TABLE t (id INT PRIMARY KEY)": ("binlog.ddl.begun:1:stop", "the target is silent, and was running a"),
    "INSERT INTO t VALUES (1)": ("binlog.apply.filled:1:stop", "waiting for the target"),
}


@pytest.mark.parametrize("replica", ["silence_ms_max = 1000\nconnect_timeout_ms = 1000\n"], indirect=True)
def test_frozen_target_is_told_and_waited_for(replica: Replica) -> None:
    """Found: it was waited for without a word, and no connection was ever given up."""
    for statement, (point, told) in FROZEN.items():
        with replica.reader():
            replica.execute(statement)
        child = replica.start_child(point)
        until_stopped(child.pid, replica.log.read_text)
        replica.server.pause()
        try:
            child.send_signal(signal.SIGCONT)
            eventually(lambda told=told: told in replica.log.read_text(), replica.log.read_text)  # type: ignore[misc]
        finally:
            replica.server.resume()
        assert child.wait(WAIT_S) == 0, replica.log.read_text()
    replica.require_equal()


def test_messages_that_retention_took_are_missed_at_the_end(server: MariaDB, tmp_path: Path) -> None:
    """Found: a partition that was emptied before it was applied counted as applied."""
    server.make_database_anew("shop")
    server.make_database_anew("copy_shop")
    with (
        BrokerProcess(tmp_path / "broker", settings={"retention_check_interval_ms": 10}) as broker,
        txmq.connect(broker.address) as client,
    ):
        replica = Replica(next(NAMES), server, broker, client, tmp_path)
        with replica.reader():
            replica.execute("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        assert replica.apply().rows == 1
        with replica.reader():
            replica.execute("INSERT INTO t VALUES (2)")
        topic = f"{replica.name}.shop.t"
        client.topics.alter(topic, retention_ms=1)
        eventually(
            lambda: all(held.start == held.end for held in (client.offsets(topic, number) for number in range(3))),
            "retention takes all messages",
        )
        with pytest.raises(TargetError, match=r"messages \d to \d are gone: the topic's retention deleted them"):
            replica.apply()


def test_broker_that_is_away_is_waited_for(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    topics, away = Applier._topics, iter([txmq.errors.BrokerAwayError("away")] * 2)

    def asked(applier: Applier) -> list[str]:
        if (missing := next(away, None)) is not None:
            raise missing
        return topics(applier)

    monkeypatch.setattr(Applier, "_topics", asked)
    assert replica.apply().rows == 1
    replica.require_equal()


def test_topics_made_anew_are_applied_from_their_first_message(replica: Replica) -> None:
    """Found: the target's offsets were those of the former topics, and 101 of 300 rows were skipped."""
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY)", *(f"INSERT INTO t VALUES ({n})" for n in range(30)))
    replica.apply()
    for topic in Applier(replica.client, replica.settings)._topics():
        partitions = replica.client.topics.describe(topic).partitions
        replica.client.topics.delete(topic)
        replica.client.topics.create(topic, partitions=partitions)
    with replica.reader():
        replica.execute(*(f"INSERT INTO t VALUES ({n})" for n in range(100, 190)))
    assert replica.apply().rows == 90
    replica.require_equal()


def test_missing_row_stops_the_applier_and_is_shown(replica: Replica) -> None:
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)", "INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    replica.apply()
    replica.server.execute("DELETE FROM copy_shop.t WHERE id = 2")
    with replica.reader():
        replica.execute("UPDATE t SET v = v + 10")
    with pytest.raises(
        ConflictError, match=r"shop\.t: message .* 0 of 1 rows are there.*'after': \{'id': 2, 'v': 12\}"
    ):
        replica.apply()
    replica.server.execute("INSERT INTO copy_shop.t VALUES (2, 2)")
    replica.apply()
    replica.require_equal()


def test_a_row_that_comes_and_goes_must_not_be_there(replica: Replica) -> None:
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    replica.apply()
    replica.server.execute("INSERT INTO copy_shop.t VALUES (1, 9)")
    with replica.reader():
        replica.execute("INSERT INTO t VALUES (1, 1)", "DELETE FROM t")
    with pytest.raises(ConflictError, match=r"Duplicate entry '1'.*'after': \{'id': 1, 'v': 1\}"):
        replica.apply()


SWAP_POINTS = ("binlog.ddl.marked:1", "binlog.ddl.begun:1", "binlog.ddl.run:1", "binlog.ddl.noted:1")


def test_killed_at_each_step_of_a_swap_swaps_once(replica: Replica) -> None:
    swap = "RENAME TABLE a TO c, b TO a, c TO b; -- swapped"
    with replica.reader():
        replica.execute(
            *(f"CREATE TABLE {name} (id INT PRIMARY KEY)" for name in "ab"), "INSERT INTO a VALUES (1)", swap,
            "INSERT INTO a VALUES (2)", swap, "INSERT INTO a VALUES (3)", swap,
        )  # fmt: skip
    for point in SWAP_POINTS:
        assert replica.apply_child(point) == -signal.SIGKILL, (point, replica.log.read_text())
    assert replica.apply_child() == 0, replica.log.read_text()
    replica.require_equal()
    tables = replica.server.execute(f"SHOW TABLES FROM state_{replica.name}")
    assert sorted(name for (name,) in tables) == ["txmq_binlog_ddl", "txmq_offset"]


def ids_of_partitions(count: int) -> list[int]:
    """An id of each of so many partitions."""
    found = {RowSelector.partition_of(f"[{id_}]".encode(), count): id_ for id_ in range(100)}
    return [found[number] for number in range(count)]


@pytest.mark.parametrize("replica", ["", 'on_conflict = "overwrite"\n'], indirect=True, ids=["stop", "overwrite"])
def test_value_that_goes_round_three_partitions_is_applied(replica: Replica) -> None:
    """Found: the first partition has its value again, and of the others no one can go before the other one."""
    one, two, three = ids_of_partitions(3)
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT UNIQUE)")
        replica.execute(f"INSERT INTO t VALUES ({one}, 1), ({two}, 2), ({three}, 3)")
    replica.apply()
    with replica.reader():
        replica.execute(*(f"UPDATE t SET v = {v} WHERE id = {id_}" for id_, v in (
            (one, 9), (two, 1), (three, 2), (two, 3), (one, 1),
        )))  # fmt: skip
    applied = replica.apply()
    assert (applied.rows, applied.overwritten) == (5, 0)
    replica.require_equal()


@pytest.mark.parametrize("replica", ["", 'on_conflict = "overwrite"\n'], indirect=True, ids=["stop", "overwrite"])
def test_values_that_go_round_far_apart_are_applied(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: one partition had its value again long before the other one had read that it gave it up."""
    monkeypatch.setattr("txmq.binlog.apply.partition_queues.QUEUE_MAX", 20)
    monkeypatch.setattr("txmq.binlog.apply.applier.POLL_MAX", 20)
    monkeypatch.setattr("txmq.binlog.publish.change_messages.EPOCH_ROWS_MAX", 5)
    one, two, _ = ids_of_partitions(3)
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT UNIQUE, n INT)")
        replica.execute(f"INSERT INTO t VALUES ({one}, 1, 0), ({two}, 2, 0)")
    replica.apply()
    with replica.reader():
        replica.execute(
            f"UPDATE t SET v = 9 WHERE id = {one}", f"UPDATE t SET v = 1 WHERE id = {two}",
            *[f"UPDATE t SET n = n + 1 WHERE id = {two}"] * 300, f"UPDATE t SET v = 3 WHERE id = {two}",
            f"UPDATE t SET v = 1 WHERE id = {one}",
        )  # fmt: skip
    applied = replica.apply()
    assert (applied.rows, applied.overwritten) == (304, 0)
    replica.require_equal()


@pytest.mark.parametrize("replica", ["conflict_wait_ms = 600_000\n"], indirect=True)
def test_what_may_have_older_changes_on_their_way_waits(replica: Replica) -> None:
    """Of an ordered reader: one partition may be sent long before another one."""
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    published = newest_published(replica.client, replica.settings)
    with replica.reader():
        replica.execute("INSERT INTO t VALUES (2)")
    newest, positions = newest_published(replica.client, replica.settings), replica.settings.position_topic
    assert published.sent < newest.sent == newest.epoch
    producer = replica.client.producer()
    producer.send(positions, replace(newest, sent=published.epoch).to_json())
    ended = Signal()

    def work() -> None:
        replica.apply()
        ended.set()

    start_daemon("applier", work)
    eventually(lambda: has_rows(replica, 1), "the first change is applied")
    assert replica.rows("copy_shop", "t") == [(1,)]
    producer.send(positions, newest.to_json())
    assert ended.wait(WAIT_S)
    replica.require_equal()


def test_ordered_reader_that_has_ended_is_not_waited_for(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    newest = newest_published(replica.client, replica.settings)
    replica.client.producer().send(replica.settings.position_topic, replace(newest, sent=1).to_json())
    assert replica.apply().rows == 1
    assert "applied though older ones may come: the reader has not sent all" in caplog.text
    replica.require_equal()


def has_rows(replica: Replica, count: int) -> bool:
    """Whether the copy is there, with so many rows."""
    tables = replica.server.execute("SHOW TABLES FROM copy_shop LIKE 't'")
    return bool(tables) and len(replica.rows("copy_shop", "t")) == count


@pytest.mark.parametrize("replica", ['on_conflict = "overwrite"\n'], indirect=True)
def test_conflicts_are_overwritten_if_asked_for(replica: Replica) -> None:
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT UNIQUE)", "INSERT INTO t VALUES (1, 1), (2, 2)")
    replica.apply()
    replica.server.execute("DELETE FROM copy_shop.t WHERE id = 2")
    replica.server.execute("INSERT INTO copy_shop.t VALUES (8, 30)")
    with replica.reader():
        replica.execute(
            "UPDATE t SET v = v + 10 WHERE id = 2", "INSERT INTO t VALUES (3, 30)", "DELETE FROM t WHERE id = 1"
        )
    assert replica.apply().overwritten == 2
    replica.require_equal()


def test_a_table_made_of_a_select_has_its_rows(replica: Replica) -> None:
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)", "INSERT INTO t VALUES (1, 1), (2, 2)")
        replica.execute("CREATE TABLE u AS SELECT * FROM t", "UPDATE u SET v = 3 WHERE id = 1")
    replica.apply()
    replica.require_equal()


def test_a_refused_statement_can_be_skipped(replica: Replica) -> None:
    with replica.reader():
        replica.execute(
            "CREATE TABLE t (id INT PRIMARY KEY)", "ALTER TABLE shop.t ADD v INT", "INSERT INTO t VALUES (1, 1)"
        )
    with pytest.raises(TargetError, match="names the database shop, which is copy_shop in the target") as caught:
        replica.apply()
    replica.server.execute("ALTER TABLE copy_shop.t ADD v INT")
    replica.apply(skipped=[str(caught.value).rsplit(" ", 1)[1]])
    replica.require_equal()


def test_statement_of_a_topic_that_is_not_applied_stops(replica: Replica) -> None:
    """Found: it waited for that topic's partitions for ever, and said nothing."""
    replica.config.write_text(f'{replica.config.read_text()}topics = ["{replica.name}.shop.t"]\n')
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY)", "CREATE TABLE u (id INT PRIMARY KEY)")
        replica.execute("DROP TABLE u, t", "CREATE TABLE t (id INT PRIMARY KEY)")
    with pytest.raises(TargetError, match=rf"of the topic {replica.name}\.shop\.u as well, which is not") as caught:
        replica.apply()
    replica.server.execute("DROP TABLE copy_shop.t")
    replica.apply(skipped=[str(caught.value).rsplit(" ", 1)[1]])
    assert replica.rows("copy_shop", "t") == []


SESSIONS = (
    ("SET timestamp = 1700000000.123456", "ALTER TABLE t ADD made TIMESTAMP(6) DEFAULT CURRENT_TIMESTAMP(6)"),
    ("SET time_zone = '+05:30'", "ALTER TABLE t ADD zoned TIMESTAMP DEFAULT '2026-01-01 00:00:00'"),
    ("SET time_zone = 'SYSTEM'", "ALTER TABLE t ADD local TIMESTAMP DEFAULT '2026-01-01 00:00:00'"),
    ("SET sql_mode = 'ANSI_QUOTES,PIPES_AS_CONCAT'", 'ALTER TABLE "t" ADD "piped" VARCHAR(9) AS (v || 1) STORED'),
    ("SET sql_mode = 'NO_BACKSLASH_ESCAPES'", "ALTER TABLE t ADD slash VARCHAR(9) DEFAULT '\\'"),
    ("SET sql_mode = ''", "ALTER TABLE t MODIFY v TINYINT"),
    ("SET NAMES latin1 COLLATE latin1_bin", "ALTER TABLE t ADD bytes VARCHAR(9) AS (HEX('\u00e9')) STORED"),
    ("SET explicit_defaults_for_timestamp = 0", "CREATE TABLE stamps (id INT PRIMARY KEY, at TIMESTAMP)"),
    ("SET auto_increment_increment = 3, auto_increment_offset = 2", "ALTER TABLE t ADD n INT AUTO_INCREMENT UNIQUE"),
    ("SET collation_server = latin2_bin, lc_time_names = 'de_DE'",
     "ALTER TABLE t ADD day VARCHAR(20) DEFAULT (DATE_FORMAT('2026-11-23', '%W'))"),
)  # fmt: skip


@pytest.mark.needs(Ability.CHECKS_SWITCHED_OFF)
def test_a_constraint_that_the_sources_rows_break_is_added(replica: Replica) -> None:
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (5)")
        replica.execute("SET check_constraint_checks = 0", "ALTER TABLE t ADD CONSTRAINT small CHECK (id < 2)")
    replica.apply()
    replica.require_equal()


def test_statements_run_in_the_session_of_the_source(replica: Replica) -> None:
    """Found: the applier ran them in its own, and the copy differed without a word."""
    replica.server.execute("ALTER DATABASE shop COLLATE latin1_german1_ci")
    replica.server.execute("DROP DATABASE copy_shop")
    with replica.reader():
        replica.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT, w VARCHAR(9))")
        replica.execute("INSERT INTO t VALUES (1, 300, 'a'), (2, 5, 'b'), (3, 7, 'c')")
        for session, statement in SESSIONS:
            replica.execute(session, statement)
    replica.apply()
    replica.require_equal()


@pytest.mark.needs(Ability.CHECKS_SWITCHED_OFF)
def test_rows_that_break_a_constraint_at_the_source_are_written(replica: Replica) -> None:
    with replica.reader():
        replica.execute(
            "CREATE TABLE t (id INT PRIMARY KEY CHECK (id < 2))", "SET check_constraint_checks = 0",
            "INSERT INTO t VALUES (5)",
        )  # fmt: skip
    replica.apply()
    replica.require_equal()


def test_database_of_another_collation_stops_at_a_new_table(replica: Replica) -> None:
    with replica.reader():
        replica.execute("ALTER DATABASE shop COLLATE latin1_german1_ci", "CREATE TABLE t (v VARCHAR(9))")
    message = (
        r"copy_shop has the collation utf8mb4_\w+, and latin1_german1_ci at the source: (ALTER DATABASE .*): CREATE"
    )
    with pytest.raises(TargetError, match=message) as stopped:
        replica.apply()
    (advice,) = re.findall(message, str(stopped.value))
    replica.server.execute(advice)
    replica.apply()
    replica.require_equal()


# --- a writer of one topic --------------------------------------------------------------------------------------------


def forged(replica: Replica, table: str, op: str, of: dict[str, str] | None = None, **fields: object) -> None:
    """What somebody else than the reader writes into all partitions of a table's topic."""
    topic = f"{replica.name}.shop.{table}"
    partitions = replica.client.topics.describe(topic).partitions
    source = {"gtid": "0-666-1", "db": "shop", "table": table, **(of or {})}
    left_open: dict[str, object] = {
        "emptied": [],
        "moved": [],
        "concerned": [],
        "read": [],
        "session": {},
        "collation": "",
    }
    value = json.dumps({"op": op, **left_open, **fields, "source": source}).encode()
    with replica.client.producer() as producer:
        for partition in range(partitions):
            producer.send(topic, value, partition=partition, headers={"txmq.op": op.encode()})


def test_stranger_runs_no_sql_in_the_target(replica: Replica) -> None:
    """A ``ddl`` message was run as it stood, by the applier's user: with several statements, too."""
    with replica.reader():
        replica.execute("CREATE TABLE mine (id INT PRIMARY KEY)", "CREATE TABLE prices (id INT PRIMARY KEY)")
        replica.execute("INSERT INTO prices VALUES (1)")
    replica.apply()
    topic = f"{replica.name}.shop.mine"
    said: dict[str, Any] = {"database": "shop", "concerned": [["shop", "mine"]], "additive": True, "topics": {topic: 3}}
    for gtid, kind, text in (
        ("0-666-1", "alter", "ALTER TABLE mine ADD a INT; DROP TABLE copy_shop.prices"),
        ("0-666-2", "drop", "DROP TABLE prices"),
        ("0-666-3", "other", "CREATE USER mallory"),
    ):
        forged(replica, "mine", "ddl", ddl=text, kind=kind, of={"gtid": gtid}, **said)
        with pytest.raises(TargetError, match=f"of transaction {gtid} in topic {topic} is not run"):
            replica.apply(skipped=[f"0-666-{number}" for number in range(1, int(gtid[-1]))])
        assert replica.rows("copy_shop", "prices") == [(1,)]
    assert replica.server.execute("SELECT user FROM mysql.user WHERE user = 'mallory'") == []
    replica.apply(skipped=["0-666-1", "0-666-2", "0-666-3"])
    replica.require_equal()


def test_stranger_changes_no_row_of_another_topics_table(replica: Replica) -> None:
    with replica.reader():
        replica.execute("CREATE TABLE mine (id INT PRIMARY KEY)", "CREATE TABLE prices (id INT PRIMARY KEY)")
        replica.execute("INSERT INTO prices VALUES (1)")
    replica.apply()
    forged(replica, "mine", "d", before={"id": 1}, after=None, of={"table": "prices"})
    with pytest.raises(TargetError, match=r"has a change of shop\.prices, whose topic is"):
        replica.apply()
    assert replica.rows("copy_shop", "prices") == [(1,)]


def test_stranger_drops_no_database_with_tables_of_other_topics(replica: Replica) -> None:
    replica.config.write_text(replica.config.read_text().replace('database = "copy_{database}"\n', ""))
    with replica.reader():
        replica.execute("CREATE TABLE mine (id INT PRIMARY KEY)", "CREATE TABLE prices (id INT PRIMARY KEY)")
    topic = f"{replica.name}.shop.mine"
    said: dict[str, Any] = {"database": "shop", "emptied": [["shop", ""]], "additive": False, "topics": {topic: 3}}
    forged(replica, "mine", "ddl", ddl="DROP DATABASE shop", kind="database", **said)
    with pytest.raises(TargetError, match=r"shop\.prices is there, whose topic does not have it"):
        replica.apply(skipped=[gtid for gtid in _published_statements(replica) if gtid != "0-666-1"])
    assert replica.rows("shop", "prices") == []


def _published_statements(replica: Replica) -> set[str]:
    found = set()
    for table in ("mine", "prices"):
        for message in replica.client.browse(f"{replica.name}.shop.{table}"):
            found.add(json.loads(message.value or b"")["source"]["gtid"])
    return found


KEYED = 'statement_key = "a key of sixteen letters and more"\n'


def test_statements_with_a_key_are_the_readers_own(replica: Replica) -> None:
    replica.config.write_text(KEYED + replica.config.read_text())
    with replica.reader():
        replica.execute(*workload(5))
    replica.apply()
    replica.require_equal()
    topic = f"{replica.name}.shop.users"
    said: dict[str, Any] = {
        "database": "shop",
        "concerned": [["shop", "users"]],
        "additive": True,
        "topics": {topic: 3},
    }
    forged(replica, "users", "ddl", ddl="ALTER TABLE users ADD mine INT", kind="alter", code="0" * 64, **said)
    with pytest.raises(TargetError, match="it has not the code that statement_key makes"):
        replica.apply()
