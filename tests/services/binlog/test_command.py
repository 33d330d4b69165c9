"""``txmq binlog run`` and ``status`` against a real MariaDB and a real broker."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import txmq
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import ForkServer, Process
from txmq.testing.processes.mariadb import MariaDB

WAIT_S = 60.0
COMMAND = [sys.executable, "-m", "txmq.cli.main", "binlog"]


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[ForkServer]:
    """Commands are forked."""
    with ForkServer(("txmq.cli.main", "txmq.binlog.status", "txmq.binlog.reader")) as made:
        yield made


class Run:
    """One configuration, its reader, and what was published."""

    def __init__(self, directory: Path, server: MariaDB, broker: BrokerProcess, client: txmq.Client) -> None:
        self.server, self.client = server, client
        self.log, self.config = directory / "log", directory / "binlog.toml"
        self.config.write_text(
            f'name = "s"\nbootstrap = "{broker.address}"\n[source]\nport = {server.port}\nuser = "root"\n'
            'tables = ["shop.*"]\nexclude = ["shop.secrets"]\nstart = "earliest"\n'
            '[snapshot]\nmode = "never"\n'
            "[publish]\npartitions = 2\nsession_timeout_ms = 4000\n"
        )
        self.process: Process | None = None

    def start(self) -> None:
        """Start the reader."""
        self.process = fork_server.start_logged([*COMMAND, "run", "--config", str(self.config)], self.log, os.environ)

    def stop(self) -> int:
        """SIGTERM; its status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def status(self) -> dict[str, Any]:
        """What the command says, as JSON."""
        done = fork_server.run([*COMMAND, "status", "--config", str(self.config), "--json"], timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def published(self, topic: str) -> list[tuple[str, Any]]:
        """Op and id of every row event."""
        if topic not in {one.name for one in self.client.topics.list()}:
            return []
        events = [json.loads(message.value or b"") for message in self.client.browse(topic)]
        return [(one["op"], (one["after"] or one["before"])["id"]) for one in events if one["op"] in "cud"]

    def until(self, count: int, topic: str = "s.shop.orders") -> None:
        """Wait until so many row events are there."""

        def text() -> str:
            return f"{len(self.published(topic))} of {count} events; {self.log.read_text()}"

        eventually(lambda: len(self.published(topic)) >= count, text, WAIT_S)


@pytest.fixture
def run(tmp_path: Path, server: MariaDB, broker: BrokerProcess) -> Iterator[Run]:
    """A database with two tables, one of which is excluded."""
    server.execute("DROP TABLE IF EXISTS orders, secrets")
    server.execute(server.program.reset_binary_log)
    for table in ("orders", "secrets"):
        server.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v VARCHAR(20))")
    with txmq.connect(broker.address) as client:
        made = Run(tmp_path, server, broker, client)
        yield made
        if made.process is not None:
            made.process.kill()
            made.process.wait(WAIT_S)


def test_changes_are_published_once_through_stops_and_outages(run: Run, broker: BrokerProcess) -> None:
    run.start()
    run.server.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    run.server.execute("INSERT INTO secrets VALUES (1, 'hidden')")
    run.until(2)
    assert run.stop() == 0
    assert f"stopped; published up to {run.server.binlog_gtids()[:4]}" in run.log.read_text()
    run.server.execute("UPDATE orders SET v = 'c' WHERE id = 1")
    run.start()
    run.until(3)
    run.server.kill()  # the database's outage
    run.server.start()
    run.server.execute("DELETE FROM orders WHERE id = 2")
    run.until(4)
    broker.kill()
    run.server.execute("INSERT INTO orders VALUES (3, 'd')")
    broker.start()
    run.until(5)
    assert sorted(run.published("s.shop.orders")) == [("c", 1), ("c", 2), ("c", 3), ("d", 2), ("u", 1)]
    assert "s.shop.secrets" not in {one.name for one in run.client.topics.list()}
    assert run.stop() == 0


def test_an_xa_transaction_is_published_when_it_is_committed(run: Run) -> None:
    run.start()
    with closing(run.server.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
        for gtrid, row in ((b"one", 1), (b"two", 2)):
            xid = f"X'{gtrid.hex()}',X'62',1"
            cursor.execute(f"XA START {xid}")
            cursor.execute(f"INSERT INTO orders VALUES ({row}, 'xa')")
            cursor.execute(f"XA END {xid}")
            cursor.execute(f"XA PREPARE {xid}")
            if row == 1:
                run.server.execute("INSERT INTO orders VALUES (10, 'between')")
                run.until(1)
                eventually(lambda: len(run.status()["parked"]) == 1, "its rows are parked", WAIT_S)
                assert run.stop() == 0
                run.start()
                cursor.execute(f"XA COMMIT {xid}")
            else:
                cursor.execute(f"XA ROLLBACK {xid}")
    run.server.execute("INSERT INTO orders VALUES (11, 'last')")
    run.until(3)
    assert sorted(run.published("s.shop.orders")) == [("c", 1), ("c", 10), ("c", 11)]
    eventually(lambda: run.status()["parked"] == {}, "nothing is parked", WAIT_S)


def test_a_first_start_waits_for_what_is_prepared(run: Run) -> None:
    run.config.write_text(run.config.read_text().replace("earliest", "now"))
    with closing(run.server.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
        for statement in ("XA START 'a'", "INSERT INTO orders VALUES (1, 'xa')", "XA END 'a'", "XA PREPARE 'a'"):
            cursor.execute(statement)
        run.start()
        eventually(lambda: "waiting for prepared XA transactions" in run.log.read_text(), "it waits", WAIT_S)
        assert "X'61',X'',1" in run.log.read_text()
        cursor.execute("XA COMMIT 'a'")
    eventually(lambda: "reading the binlog" in run.log.read_text(), "it begins", WAIT_S)
    run.server.execute("INSERT INTO orders VALUES (2, 'b')")
    run.until(1)
    assert run.published("s.shop.orders") == [("c", 2)]


def test_status_says_how_far_the_reader_is(run: Run) -> None:
    run.start()
    run.server.execute("INSERT INTO orders VALUES (1, 'a')")
    run.until(1)
    eventually(lambda: run.status()["lag_bytes"] == 0, "the reader is level", WAIT_S)
    found = run.status()
    assert (found["name"], found["rows"], found["lag_s"], found["database"]) == ("s", 1, 0.0, "answers")
    assert found["reader"] is not None
    assert run.stop() == 0
    run.server.execute("INSERT INTO orders VALUES (2, 'b')")
    run.config.write_text(run.config.read_text() + '[apply]\npassword = { env = "OF_THE_APPLIER_ALONE" }\n')
    behind = run.status()
    assert behind["reader"] is None
    assert behind["lag_bytes"] > 0
    assert behind["lag_s"] >= 0
    shown = fork_server.run([*COMMAND, "status", "--config", str(run.config)], timeout=WAIT_S).stdout.decode()
    assert "lag_bytes" in shown
    assert found["gtids"] in shown


def test_status_says_how_far_the_applier_is(run: Run) -> None:
    plain = run.config.read_text()
    place = f'[apply]\nuser = "root"\ndatabase = "copy"\nstate_database = "state"\nport = {run.server.port}\n'
    run.server.make_database_anew("copy")
    run.server.execute("DROP DATABASE IF EXISTS state")
    run.start()
    run.server.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    run.until(2)
    assert run.stop() == 0
    assert run.status()["apply"] is None
    run.config.write_text(plain + place)
    before = run.status()["apply"]
    held = {one["partition"]: one["end"] for one in before["partitions"]}
    assert sum(held.values()) == 2 + 2  # two rows, and the table's CREATE in both partitions
    assert (before["applier"], before["lag"], before["target"]) == (None, 4, "answers")
    assert before["lag_s"] > 0
    assert {one["offset"] for one in before["partitions"]} == {None}
    done = fork_server.run([*COMMAND, "apply", "--config", str(run.config), "--until-end"], timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    after = run.status()["apply"]
    assert (after["lag"], after["lag_s"], after["target"]) == (0, 0.0, "answers")
    assert {one["partition"]: one["offset"] for one in after["partitions"]} == held
    run.server.execute("DROP DATABASE state")
    run.config.write_text(plain + place.replace(str(run.server.port), "1"))
    away = run.status()
    assert (away["apply"]["lag"], away["apply"]["partitions"], away["database"]) == (None, [], "answers")
    assert "offset store state.txmq_offset: " in away["apply"]["target"]
    shown = fork_server.run([*COMMAND, "status", "--config", str(run.config)], timeout=WAIT_S)
    assert shown.returncode == 0
    assert away["apply"]["target"] in shown.stdout.decode()


def test_stats_says_what_the_broker_knows_of_a_sync(run: Run, broker: BrokerProcess) -> None:
    def stats(*words: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "txmq.cli.main", "stats", *words, "--bootstrap", broker.address]
        done = fork_server.run(command, timeout=WAIT_S)
        assert done.returncode == status, done.stderr
        return done.stdout.decode()

    for topic in ("gps.positions", "other.positions", "other.parked"):
        run.client.topics.create(topic, partitions=1)
    assert json.loads(stats("binlog", "--json")) == []
    run.start()
    run.server.execute("INSERT INTO orders VALUES " + ", ".join([f"({number}, 'a')" for number in range(1, 61)]))
    run.until(60)
    end = run.server.binlog_gtids()
    eventually(lambda: run.status()["gtids"] == end, "all is published", WAIT_S)
    (found,) = json.loads(stats("binlog", "--json"))
    told = run.status()
    assert found == {name: told[name] for name in found}
    assert (found["name"], found["rows"], found["rows_per_s"], found["delay_s"] >= 0) == ("s", 60, 1.0, True)
    assert stats("binlog").splitlines()[1].split()[:5] == ["s", told["reader"], end, "60", "1.0"]
    assert "stats binlog" in stats("help")
    with run.client.producer() as producer:
        producer.send("other.positions", b"no position")
    (_, problem) = json.loads(stats("binlog", "--json", status=1))
    assert "is no position" in problem["problem"]


def test_ordered_mode_outlasts_an_outage_and_status_shows_its_spool(run: Run, broker: BrokerProcess) -> None:
    spool = run.config.with_name("spool")
    run.config.write_text(f'{run.config.read_text()}mode = "ordered"\nspool = "{spool}"\n')
    run.start()
    run.server.execute("INSERT INTO orders VALUES (1, 'a')")
    run.until(1)
    eventually(lambda: run.status()["spool"]["messages"] == 0, "it has left the spool", WAIT_S)
    broker.kill()
    run.server.execute("INSERT INTO orders VALUES (2, 'b'), (3, 'c')")
    eventually(lambda: run.status()["rows"] == 3, "the reader goes on", WAIT_S)
    found = run.status()
    assert found["spool"]["messages"] == 2
    assert 0 < found["spool"]["size_bytes"] < found["spool"]["size_bytes_max"] == 1 << 30
    assert (found["reader"], found["lag_bytes"], found["spool"]["path"]) == (None, 0, str(spool))
    shown = fork_server.run([*COMMAND, "status", "--config", str(run.config)], timeout=WAIT_S).stdout.decode()
    assert "2 messages, " in shown
    broker.start()
    run.until(3)
    assert run.stop() == 0
    assert sorted(run.published("s.shop.orders")) == [("c", 1), ("c", 2), ("c", 3)]
    assert run.status()["spool"] is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "--config", "none.toml"], "cannot read none.toml"),
        (["status", "--config", "{config}"], "no reader named 's' has published anything"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, words: list[str], text: str) -> None:
    done = fork_server.run([*COMMAND, *(word.format(config=run.config) for word in words)], timeout=WAIT_S)
    assert done.returncode != 0
    assert text in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_statements_stop_the_reader_or_pass_as_the_settings_say(run: Run) -> None:
    passing = run.config.read_text().replace("earliest", "now")
    run.config.write_text(passing + 'ddl = "stop"\n')
    run.start()
    eventually(lambda: "reading the binlog" in run.log.read_text(), "it begins", WAIT_S)
    run.server.execute("ALTER TABLE orders ADD COLUMN w INT")  # additive: goes on
    run.server.execute("INSERT INTO orders VALUES (1, 'a', 7)")
    run.until(1)
    run.server.execute("ALTER TABLE orders DROP COLUMN v")
    run.server.execute("INSERT INTO orders VALUES (2, 8)")
    assert run.process is not None
    assert run.process.wait(WAIT_S) == 1
    last = run.log.read_text().splitlines()[-1]
    assert "stopped before transaction" in last
    assert "ALTER TABLE orders DROP COLUMN v" in last
    assert run.published("s.shop.orders") == [("c", 1)]
    run.config.write_text(passing)
    run.start()
    run.server.execute("RENAME TABLE orders TO sold")
    run.server.execute("INSERT INTO sold VALUES (3, 9)")
    run.until(1, "s.shop.sold")
    assert sorted(run.published("s.shop.orders")) == [("c", 1), ("c", 2)]
    assert run.stop() == 0
    run.server.execute("DROP TABLE sold")


def test_what_stops_the_reader_is_one_line(run: Run) -> None:
    run.start()
    run.until(0)
    run.server.execute("SET GLOBAL binlog_row_metadata = 'MINIMAL'")
    try:
        run.server.execute("INSERT INTO orders VALUES (1, 'a')")
        assert run.process is not None
        assert run.process.wait(WAIT_S) == 1
        assert "binlog_row_metadata" in run.log.read_text().splitlines()[-1]
    finally:
        run.server.execute("SET GLOBAL binlog_row_metadata = 'FULL'")
