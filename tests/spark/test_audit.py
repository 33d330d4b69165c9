"""The audit whole: a real broker, real tables, Spark; the command, the job, the demo, the small proof."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import txmq
from tests.spark.audit_proof import prove, url_of
from tests.spark.faulty_orders import FaultyOrders
from tests.spark.shop import Shop, asked
from txmq.cli.audit_run import AuditCommand
from txmq.cli.demo.audit_run import Play
from txmq.errors import ConfigError
from txmq.spark.audit.rows import open_rows
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)  # on a machine with eight others


@pytest.fixture
def shop(client: txmq.Client, tmp_path: Path, request: pytest.FixtureRequest) -> Shop:
    return Shop(client, tmp_path / "shop.db", request.node.name.partition("[")[0][:100])


def test_audit_of_6_000_orders_finds_exactly_the_planted_faults(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    """``python -m tests.spark.audit_proof`` plants among as many as are wanted."""
    with MariaDB(tmp_path / "db") as database:
        world = FaultyOrders(client, database, 6_000, 5)
        world.make(tmp_path)
        proof = prove(spark, world, open_rows(spark, url_of(database), "orders"), broker.address)
    assert [line for line in proof.lines() if line[3:] != (1.0, 1.0)] == []
    assert min(planted for _, planted, *_ in proof.lines()) == 5
    assert proof.holds


def test_command_leaves_page_object_and_dataset_and_a_status(
    spark: SparkSession, broker: BrokerProcess, shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    at_ms = time.time_ns() // 1_000_000 - 60_000
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


def test_command_leaves_everything_to_its_owner_alone(broker: BrokerProcess, shop: Shop) -> None:
    """Rows and messages are in it, also in what Java writes."""
    shop.order(1, 0, message=False)
    directory = shop.path.with_name("private")
    command = [sys.executable, "-m", "txmq", "audit", "--topic", shop.topic, "--database", shop.url, "--memory", "1g"]
    command += ["--table", "orders", "--settle", "0ms", "--bootstrap", broker.address, "--output", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, umask=0o022)
    assert done.returncode == 1, done.stderr
    left = [directory, *directory.rglob("*")]
    assert {"audit.json", "audit.html", "findings", "spark.log", "_SUCCESS"} <= {path.name for path in left}
    assert [path for path in left if path.stat().st_mode & 0o077] == []


def test_no_password_of_an_address_is_told(broker: BrokerProcess, shop: Shop) -> None:
    request = asked(shop, broker, bootstrap="zk://me:sesame@zoo1/prod", table=None, database="mysql://u:sesame@h/d")
    facts = AuditCommand(request, as_json=True)._facts()
    assert (facts["bootstrap"], facts["table"]) == ("zk://***@zoo1/prod", "mysql://u:...@h/d")


def test_the_demo_finds_what_it_planted(spark: SparkSession, tmp_path: Path) -> None:
    report = Play(tmp_path, lambda text: None, orders=120).run(spark)
    assert report.holds, report
    assert [fault.kind for fault in report.faults] == ["phantom", "missing", "phantom", "duplicate", "out-of-order"]
    assert report.rows >= 120


def test_the_job_for_spark_submit_finds_what_is_missing(
    spark: SparkSession, broker: BrokerProcess, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In this session, which it must not stop: one of its own would take the machine ten seconds."""
    for number in range(10):
        shop.order(number, 0, message=number != 4)
    job = Path(__file__).resolve().parents[2] / "examples" / "spark_audit_job.py"
    words = ["--bootstrap", broker.address, "--topic", shop.topic, "--database", shop.url, "--table", "orders"]
    words += ["--match", "id = key", "--settle-ms", "0", "--output", str(tmp_path / "audit")]
    monkeypatch.setattr(sys, "argv", [str(job), *words])
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(job), run_name="__main__")
    assert ended.value.code == 1
    assert "1 missing" in capsys.readouterr().out
    told = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert [line["identity"] for line in told["findings"]["missing"]] == ["4"]


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


def test_impossible_audit_ends_with_status_2_and_one_line(broker: BrokerProcess, shop: Shop) -> None:
    directory = shop.path.with_name("none")
    command = [sys.executable, "-m", "txmq.cli.main", "audit", "--topic", shop.topic, "--database", shop.url]
    command += ["--table", "nothing", "--bootstrap", broker.address, "--output", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "txmq: the database has no table 'nothing'\n"
    assert not directory.exists()
