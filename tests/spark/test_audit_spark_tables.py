"""Tables that only Spark reaches: through JDBC (Derby, whose driver comes with PySpark), and Parquet datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import txmq
from txmq.addresses import without_password
from txmq.cli.audit_run import AuditCommand, Request
from txmq.errors import ConfigError
from txmq.spark.audit.audit import audit
from txmq.spark.audit.rows import open_rows
from txmq.spark.audit.spec import AuditSpec, RowTime, parse_terms
from txmq.testing.processes.broker import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)  # on a machine with eight others
ORDERS, DELETED, SLIPPED_IN, CHANGED, AGED = 50, 7, 100, 9, 20
EXPECTED = {"phantom": ["7"], "missing": ["100"], "differs": ["9"], "late": ["20"]}
Row = tuple[int, str, datetime]


@pytest.fixture(scope="module")
def now() -> datetime:
    """Some minutes ago, to the microsecond: rows are of then."""
    return datetime.now(UTC) - timedelta(minutes=5)


@pytest.fixture(scope="module")
def topic(client: txmq.Client) -> str:
    """Messages of all orders; their times are of now, which is within the margin of 10 minutes."""
    client.topics.create("foreign", partitions=2)
    with client.producer() as producer:
        producer.send_many(
            "foreign", [(b"c%d" % (n % 5), json.dumps({"id": n, "amount": f"{n}.50"}).encode()) for n in range(ORDERS)]
        )
    return "foreign"


@pytest.fixture(scope="module")
def rows(now: datetime) -> list[Row]:
    """One is deleted, one slipped in, one changed, one of long ago."""
    found = [(n, f"{n}.50", now) for n in range(ORDERS) if n not in (DELETED, CHANGED, AGED)]
    aged = (AGED, f"{AGED}.50", now - timedelta(days=2))
    return [*found, (SLIPPED_IN, "1.00", now), (CHANGED, "0.01", now), aged]


@pytest.fixture
def derby(spark: SparkSession, rows: list[Row], tmp_path: Path) -> Iterator[str]:
    """The table ``orders`` in a Derby database in Java's memory; its URL."""
    java = spark._jvm.java
    java.lang.System.setProperty("derby.stream.error.file", str(tmp_path / "derby.log"))
    url = f"jdbc:derby:memory:{tmp_path.name}"
    connection = java.sql.DriverManager.getConnection(f"{url};create=true")
    statement = connection.createStatement()
    statement.execute("CREATE TABLE orders (id BIGINT PRIMARY KEY, amount DECIMAL(12,2), created TIMESTAMP)")
    for number, amount, at in rows:
        statement.execute(f"INSERT INTO orders VALUES ({number}, {amount}, '{at:%Y-%m-%d %H:%M:%S.%f}')")
    connection.close()
    yield url
    with pytest.raises(Exception, match="dropped"):
        java.sql.DriverManager.getConnection(f"{url};drop=true")


@pytest.fixture
def parquet(spark: SparkSession, rows: list[Row], tmp_path: Path) -> str:
    """The same as a dataset, its times without a zone, as pandas writes them; its URL."""
    frame = spark.createDataFrame(rows, "ID long, AMOUNT string, created timestamp")
    spark_frame = frame.selectExpr(
        "ID", "cast(AMOUNT as decimal(12,2)) AMOUNT", "cast(created as timestamp_ntz) CREATED"
    )
    spark_frame.write.parquet(str(tmp_path / "orders dataset"))
    return f"parquet:{tmp_path}/orders dataset"


def asked(topic: str, url: str, broker: BrokerProcess, directory: Path) -> Request:
    """``txmq audit`` of the last hour."""
    return Request(
        topic=topic, database=url, table="orders", match=("ID = json:$.id",), compare=("AMOUNT = json:$.amount",),
        order="ID", row_time="CREATED", row_txid=None, transaction_size=None, together=(), since="1h", until=None,
        from_offsets=None, to_offsets=None, settle="4m", interval=None, directory=directory, master="local[2]",
        memory="1g", bootstrap=broker.address,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["derby", "parquet"])
def test_a_table_that_only_spark_reaches_is_audited(
    kind: str, spark: SparkSession, broker: BrokerProcess, client: txmq.Client, topic: str, tmp_path: Path,
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    url: str = request.getfixturevalue(kind)
    command = AuditCommand(asked(topic, url, broker, tmp_path / "audit"), as_json=True)
    assert command.audited(spark, client, *command.prepare()) == 1
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {kind: [line["identity"] for line in lines] for kind, lines in told["findings"].items() if lines} == EXPECTED
    assert told["totals"]["rows"] == ORDERS - 1


def test_the_directory_of_a_stopped_broker_is_audited_without_it(spark: SparkSession, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as stopped, txmq.connect(stopped.address) as its_client:
        its_client.topics.create("orders", partitions=2)
        with its_client.producer() as producer:
            for number in (1, 2, 3):
                producer.send("orders", b"", key=b"%d" % number)
        stopped.stop()
    spark.range(2, 5).write.parquet(str(tmp_path / "rows"))
    messages = spark.read.format("txmq").option("topic", "orders").load(str(tmp_path / "data"))
    result = audit(messages, spark.read.parquet(str(tmp_path / "rows")), AuditSpec("orders", parse_terms(["id = key"])))
    assert sorted((row["kind"], row["identity"]) for row in result.findings.collect()) == [
        ("missing", "4"), ("phantom", "1"),
    ]  # fmt: skip


def test_what_java_cannot_do_is_told_in_a_line(spark: SparkSession, derby: str, tmp_path: Path) -> None:
    spec = AuditSpec("t", parse_terms(["ID = key"]), row_time=RowTime("CREATED"))
    with pytest.raises(ConfigError, match=r"no driver for jdbc:nosuch://u:\.\.\.@h/d\?Password=\.\.\.&x=1: .*--jars"):
        open_rows(spark, "jdbc:nosuch://u:s3cret@h/d?Password=s3cret&x=1", "orders").read(spec.columns)
    with pytest.raises(ConfigError, match="no column 'id'; it has ID, AMOUNT, CREATED"):
        open_rows(spark, derby, "orders").read(["id"])
    with pytest.raises(Exception, match="NOSUCH"):
        open_rows(spark, derby, "nosuch").read(spec.columns)
    with pytest.raises(Exception, match="Path does not exist"):
        open_rows(spark, f"parquet:{tmp_path}/none", None).read(spec.columns)
    zones = spark._jvm.java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone("Europe/Berlin"))
    try:
        assert open_rows(spark, derby, "orders").read(["ID"]).count() == ORDERS
        with pytest.raises(ConfigError, match=r"time zone is Europe/Berlin, .* -Duser.timezone=UTC"):
            open_rows(spark, derby, "orders").read(spec.columns)
    finally:
        zones.setDefault(before)


def test_password_is_given_to_driver_and_shown_to_nobody() -> None:
    rows = open_rows(None, "jdbc:derby:memory:x", "orders", "s3cret")
    assert rows.password == "s3cret"
    assert "s3cret" not in repr(rows)
    for url in (
        "jdbc:mysql://h/d?user=u&password=s3cret",
        "jdbc:sqlserver://h;PASSWORD=s3cret;x=1",
        "mysql://u:s3cret@h",
    ):
        assert "s3cret" not in without_password(url)
    assert without_password("mysql://u:a@b@h:1/d?unix_socket=/run/x@y") == "mysql://u:...@h:1/d?unix_socket=/run/x@y"
    assert without_password("jdbc:derby:memory:x") == "jdbc:derby:memory:x"
