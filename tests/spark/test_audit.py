"""The audit whole: a real broker, real tables, Spark; the command, the rounds that go on, the demo, the small proof."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import txmq
from tests.spark.audit_proof import prove, url_of
from tests.spark.audit_world import AuditWorld
from txmq.cli.audit_run import AuditCommand, Request
from txmq.cli.demo_audit_run import Play
from txmq.errors import ConfigError
from txmq.spark.audit_follow import Follower
from txmq.spark.audit_rows import open_rows
from txmq.spark.audit_spec import AuditSpec, RowTime, TimeUnit, parse_terms
from txmq.spark.audit_topic import TopicAudit
from txmq.testing.broker_process import BrokerProcess
from txmq.testing.mariadb import MariaDB

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)  # on a machine with eight others
SETTLE_MS = 1_000


class TurnedClock:
    """The real time, and what it was turned ahead by."""

    def __init__(self) -> None:
        from txmq.runtime.os_clock import OSClock

        self.real, self.ahead_ms = OSClock(), 0

    def now_ms(self) -> int:
        return self.real.now_ms() + self.ahead_ms

    def monotonic(self) -> float:
        return self.real.monotonic()

    def sleep(self, seconds: float) -> None:
        self.ahead_ms += int(seconds * 1000)


class Shop:
    """A table in SQLite and a topic, side by side."""

    def __init__(self, client: txmq.Client, path: Path, topic: str) -> None:
        self.client, self.path, self.topic = client, path, topic
        client.topics.ensure(topic, partitions=2)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, created INTEGER NOT NULL)")

    def order(self, number: int, at_ms: int, *, row: bool = True, message: bool = True) -> None:
        if row:
            with closing(sqlite3.connect(self.path)) as connection, connection:
                connection.execute("INSERT INTO orders VALUES (?, ?)", (number, at_ms))
        if message:
            with self.client.producer() as producer:
                producer.send(self.topic, b"", key=str(number).encode())

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"


@pytest.fixture
def shop(client: txmq.Client, tmp_path: Path, request: pytest.FixtureRequest) -> Shop:
    return Shop(client, tmp_path / "shop.db", request.node.name.partition("[")[0][:100])


def asked(shop: Shop, broker: BrokerProcess, **changes: Any) -> Request:
    """``txmq audit`` of the shop."""
    directory = shop.path.with_name("audit")
    plain = Request(
        topic=shop.topic, database=shop.url, table="orders", match=(), compare=(), order=None, row_time="created:ms",
        row_txid=None, transaction_size=None, together=(), since=None, until=None, from_offsets=None, to_offsets=None,
        settle="1s", interval=None, directory=directory, master="local[2]", memory="1g", bootstrap=broker.address,
    )  # fmt: skip
    return replace(plain, **changes)


def test_20_000_orders_with_faults_of_every_kind_exactly_those_are_found(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    with MariaDB(tmp_path / "db") as database:
        world = AuditWorld(client, database, 20_000, 5)
        world.make(tmp_path)
        proof = prove(spark, world, open_rows(spark, url_of(database), "orders"), broker.address)
    assert [line for line in proof.lines() if line[3:] != (1.0, 1.0)] == []
    assert min(planted for _, planted, *_ in proof.lines()) == 5
    assert proof.holds


def test_the_command_leaves_page_object_and_dataset_and_says_by_its_status_what_it_found(
    spark: SparkSession, broker: BrokerProcess, shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    at_ms = TurnedClock().now_ms() - 60_000
    for number in range(10):
        shop.order(number, at_ms + number, row=number != 3)
    command = AuditCommand(asked(shop, broker), as_json=True)
    assert command.audited(spark, shop.client, *command.prepare()) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["counts"]["phantom"] == 1
    assert [line["identity"] for line in told["findings"]["phantom"]] == ["3"]
    directory = asked(shop, broker).directory
    assert json.loads((directory / "audit.json").read_text()) == told
    assert "1 phantom" in (directory / "audit.html").read_text()
    assert [row["identity"] for row in spark.read.parquet(told["dataset"]).collect()] == ["3"]
    assert told["match"] == ["id = key"]  # nothing was named: primary key = key


def test_rounds_go_on_where_the_last_one_ended_and_tell_each_fault_once(
    spark: SparkSession, broker: BrokerProcess, shop: Shop, tmp_path: Path
) -> None:
    clock, told = TurnedClock(), list[dict[str, object]]()
    spec = AuditSpec(
        shop.topic, parse_terms(["id = key"]), row_time=RowTime("created", TimeUnit.MILLISECONDS), settle_ms=SETTLE_MS
    )
    job = TopicAudit(spark, shop.client, broker.address, open_rows(spark, shop.url, "orders"), spec, clock=clock)
    began_ms = clock.now_ms()
    shop.order(1, began_ms)
    shop.order(2, began_ms, row=False)
    shop.order(3, clock.now_ms() + 3_000, message=False)  # not older than the margin in the first round
    follower = Follower(job, tmp_path / "audit", began_ms - 1, told.append)
    clock.ahead_ms = SETTLE_MS + 1_000
    first = follower.round()
    assert first is not None
    assert [(line["kind"], line["identity"]) for line in told] == [("phantom", "2")]
    told.clear()
    again = Follower(job, tmp_path / "audit", began_ms - 1, told.append)  # a restart
    assert again.progress == follower.progress
    clock.ahead_ms = SETTLE_MS + 30_000
    assert again.round() is not None
    assert [(line["kind"], line["identity"]) for line in told] == [("missing", "3")]
    clock.ahead_ms = -3_600_000  # nothing is older than the margin that was not audited
    assert again.round() is None
    other = replace(job, spec=replace(spec, topic="other"))
    with pytest.raises(ConfigError, match="give another directory"):
        Follower(other, tmp_path / "audit")


def test_the_demo_finds_what_it_planted(spark: SparkSession, tmp_path: Path) -> None:
    report = Play(tmp_path, lambda text: None, orders=120).run(spark)
    assert report.holds, report
    assert [fault.kind for fault in report.faults] == ["phantom", "missing", "phantom", "duplicate", "out-of-order"]
    assert report.rows >= 120


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"match": ("nr = key",)}, "no column 'nr'; it has id, created"),
        ({"match": ("id = body",)}, "expected key, header:NAME"),
        ({"row_time": None, "since": "2h"}, "--row-time COLUMN"),
        ({"row_time": "created"}, "created holds numbers"),
        ({"since": "yesterday"}, "a time with its zone"),
        ({"from_offsets": "[1]"}, "expected offsets by partition"),
        ({"row_time": None, "interval": "10s"}, "--row-time COLUMN"),
        ({"interval": "10s", "until": "1h"}, "--follow takes --from"),
        ({"settle": "soon"}, "--settle 'soon': expected a number"),
        ({"table": "nothing"}, "no table 'nothing'"),
    ],
)
def test_what_cannot_be_audited_is_refused_before_spark_starts(
    broker: BrokerProcess, shop: Shop, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        AuditCommand(asked(shop, broker, **changes), as_json=False).prepare()


def test_an_audit_that_cannot_be_made_ends_with_status_2_and_one_line(broker: BrokerProcess, shop: Shop) -> None:
    directory = shop.path.with_name("none")
    command = [sys.executable, "-m", "txmq.cli.main", "audit", "--topic", shop.topic, "--database", shop.url]
    command += ["--table", "nothing", "--bootstrap", broker.address, "--output", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "txmq: the database has no table 'nothing'\n"
    assert not directory.exists()
