"""The audit of a binlog sync: a real database, its reader, and a copy of the topic in which things went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import txmq
from tests.services.binlog.replica import Replica
from txmq.cli.audit_run import AuditCommand, Request, binlog_of, table_of
from txmq.errors import ConfigError
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)  # on a machine with eight others
TABLE = "CREATE TABLE items (id INT PRIMARY KEY, v DOUBLE, b VARBINARY(9), n BIGINT UNSIGNED)"
XA = (
    "XA START 'a'", "INSERT INTO items VALUES (50, 1, '', 0)", "XA END 'a'", "XA PREPARE 'a'",
    "XA START 'b'", "INSERT INTO items VALUES (60, 1, '', 0)", "XA END 'b'", "XA PREPARE 'b'",
)  # fmt: skip


@pytest.fixture(scope="module")
def replica(broker: BrokerProcess, client: txmq.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A table's topic, with the changes of two binlog files and of XA transactions."""
    directory = tmp_path_factory.mktemp("binlog")
    with MariaDB(directory / "db", binary_log=True) as server:
        server.execute("CREATE OR REPLACE DATABASE shop")
        made = Replica("a", server, broker, client, directory)
        with made.reader():
            made.execute(
                TABLE, "INSERT INTO items SELECT seq, 1e300 / seq, X'00FF', 18446744073709551615 FROM seq_1_to_120",
                "UPDATE items SET v = NULL WHERE id < 20", "CREATE TABLE other (id INT)",
                "INSERT INTO other VALUES (1)", "FLUSH BINARY LOGS",
                "UPDATE items SET id = id + 1000 WHERE id = 7", "DELETE FROM items WHERE id = 9",
                *(f"UPDATE items SET v = {number} WHERE id = 3" for number in range(5)),
            )  # fmt: skip
            made.execute("DELETE FROM items WHERE id IN (50, 60)")
            for session in (XA[:4], XA[4:]):
                made.execute(*session)
            made.execute("UPDATE items SET v = 8 WHERE id = 8", "XA ROLLBACK 'b'", "XA COMMIT 'a'")
        yield made


def request_of(replica: Replica, broker: BrokerProcess, topic: str, directory: Path) -> Request:
    """``txmq audit`` of a topic of the sync whose file this is."""
    return Request(
        topic=topic, database=f"binlog:{replica.config}", table=None, match=(), compare=(), order=None, row_time=None,
        row_txid=None, transaction_size=None, together=(), since=None, until=None, from_offsets=None, to_offsets=None,
        settle="30s", interval=None, directory=directory, master="local[2]", memory="1g", bootstrap=broker.address,
    )  # fmt: skip


def audited(spark: SparkSession, client: txmq.Client, request: Request) -> int:
    """The command's status, in this session."""
    settings = binlog_of(request)
    assert settings is not None
    return AuditCommand(request, as_json=True).audited_binlog(spark, client, settings)


def test_every_row_change_has_its_message(
    spark: SparkSession, broker: BrokerProcess, replica: Replica, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of(replica, broker, "a.shop.items", tmp_path / "audit")
    status = audited(spark, replica.client, request)
    told = json.loads(capsys.readouterr().out)
    assert (status, told["findings"]) == (0, {})
    changes = 120 + 19 + 2 + 1 + 5 + 2 + 1 + 1
    assert told["totals"]["rows"] == changes
    assert {"missing", "phantom", "duplicate", "differs", "out-of-order", "gap"} <= set(told["counts"])
    assert audited(spark, replica.client, replace(request, table="shop.items")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["totals"]["rows"], told["totals"]["messages"]) == (118, 118)
    assert {"missing", "phantom", "differs"} <= set(told["counts"])


def copied(replica: Replica, directory: Path) -> Replica:
    """Another sync, whose topic lacks two messages, has one twice, two in the other order, and a changed one."""
    client = replica.client
    copy = Replica("c", replica.server, BrokerProcess(directory), client, directory)
    client.topics.create("c.shop.items", partitions=3)
    client.topics.create("c.positions", partitions=1)
    with client.producer() as producer, producer.transaction():
        for position in client.browse("a.positions"):
            producer.send("c.positions", position.value or b"", partition=0)
        messages = list(client.browse("a.shop.items"))
        threes = [place for place, message in enumerate(messages) if message.key == b"[3]"]
        messages[threes[-1]], messages[threes[-2]] = messages[threes[-2]], messages[threes[-1]]
        for message in messages:
            value = (message.value or b"").replace(b'"name":"a"', b'"name":"c"')
            count = {b"[20]": 0, b"[21]": 2}.get(message.key or b"", 1)
            if message.key == b"[9]" and b'"op":"d"' in value:
                count = 0
            if message.key == b"[22]":
                value = value.replace(b"18446744073709551615", b"18446744073709551614")
            for _ in range(count):
                producer.send(
                    "c.shop.items", value, key=message.key, headers=message.headers, partition=message.partition
                )
    return copy


def test_what_was_lost_doubled_swapped_or_changed_is_found(
    spark: SparkSession, broker: BrokerProcess, replica: Replica, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copied(replica, tmp_path)
    status = audited(spark, copy.client, request_of(copy, broker, "c.shop.items", tmp_path / "audit"))
    told = json.loads(capsys.readouterr().out)
    found = {kind: [line["key"] for line in lines] for kind, lines in told["findings"].items()}
    assert status == 1
    keys = {kind: sorted(keys) for kind, keys in found.items()}
    assert keys == {"missing": ["[20]", "[9]"], "duplicate": ["[21]"], "differs": ["[22]"], "out-of-order": ["[3]"]}
    (doubled,) = told["findings"]["duplicate"]
    (lost,) = (line for line in told["findings"]["missing"] if line["key"] == "[20]")
    assert doubled["topic"] == lost["topic"] == "c.shop.items"
    assert {"partition", "offset", "txid"} <= set(doubled)
    gtid, row, op = json.loads(lost["identity"])
    assert (gtid.split("-")[:2], row, op) == (["0", "1"], "19", "c")
    request = replace(request_of(copy, broker, "c.shop.items", tmp_path / "table"), table="shop.items")
    assert audited(spark, copy.client, request) == 1
    told = json.loads(capsys.readouterr().out)
    found = {kind: sorted(line["identity"] for line in lines) for kind, lines in told["findings"].items()}
    assert found == {"missing": ["[20]"], "phantom": ["[9]"], "differs": ["[22]", "[3]"]}


def test_table_is_judged_after_an_alter_as_before(
    spark: SparkSession, broker: BrokerProcess, replica: Replica, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last events are older than the ALTER, but for one; a row that the topic does not know of is still found."""
    with replica.reader():
        replica.execute(
            "ALTER TABLE items ADD COLUMN more INT DEFAULT 7, DROP COLUMN n", "UPDATE items SET more = 8 WHERE id = 5"
        )
    request = replace(request_of(replica, broker, "a.shop.items", tmp_path / "audit"), table="shop.items")
    assert audited(spark, replica.client, request) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["totals"]["rows"], told["totals"]["messages"]) == (118, 118)
    assert [count for what, count in told["unjudged"].items() if "ALTER" in what] == [117]
    replica.execute(
        "SET SESSION sql_log_bin = 0", "UPDATE items SET v = 99 WHERE id = 11", "DELETE FROM items WHERE id = 12"
    )
    assert audited(spark, replica.client, request) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {kind: [line["identity"] for line in lines] for kind, lines in found.items()} == {
        "differs": ["[11]"], "phantom": ["[12]"],
    }  # fmt: skip


def test_options_that_a_binlog_does_not_need_are_refused(replica: Replica, broker: BrokerProcess) -> None:
    request = request_of(replica, broker, "a.shop.items", Path())
    with pytest.raises(ConfigError, match="--follow: a binlog says by itself"):
        binlog_of(replace(request, interval="10s"))
    with pytest.raises(ConfigError, match="--row-time"):
        binlog_of(replace(request, row_time="created"))
    with pytest.raises(ConfigError, match=r"--table 'items': expected DATABASE\.TABLE"):
        table_of(replace(request, table="items"))
    with pytest.raises(ConfigError, match=r"cannot read nothing\.toml"):
        binlog_of(replace(request, database="binlog:nothing.toml"))
