"""Spark's sink and source at brokers with users: the password is in a file, on every executor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import txmq
from txmq.client.admin.cluster import Users
from txmq.errors import BrokerError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 500
VALUES = {b"v%d" % number for number in range(ROWS)}
PASSWORD = "correct horse"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "shop.password"
    path.write_text(PASSWORD)
    path.chmod(0o600)
    return path


def add_shop(operator: txmq.Client) -> None:
    """A user who may do what sink and source need."""
    users = Users(operator.control, operator.timeout)
    users.add("shop", PASSWORD)
    for words in ({"may": "write,read", "topic": "rows"}, {"may": "read,settle", "group": "*"}):
        users.acl("grant", "shop", words)


def written_and_read(spark: SparkSession, address: str) -> set[bytes]:
    """What the source reads of what the sink wrote."""
    frame = spark.range(0, ROWS, numPartitions=2).selectExpr("concat('k', id % 7) key", "concat('v', id) value")
    frame.write.format("txmq").options(bootstrap=address, topic="rows").mode("append").save()
    read = spark.read.format("txmq").options(bootstrap=address, topic="rows").load()
    return {bytes(row.value) for row in read.select("value").collect()}


def refusal(spark: SparkSession, address: str, match: str) -> str:
    """What a reader is told."""
    with pytest.raises(Exception, match=match) as caught:
        spark.read.format("txmq").options(bootstrap=address, topic="rows").load().collect()
    return str(caught.value)


def test_what_sink_writes_source_reads_as_a_user(spark: SparkSession, tmp_path: Path, secret: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("rows", partitions=2)
            Users(client.control, client.timeout).add("ops", PASSWORD)
        with txmq.connect(broker.address.replace("://", "://ops@"), password=PASSWORD) as client:
            add_shop(client)
        address = f"{broker.address.replace('://', '://shop@')}?password_file={secret}"
        assert written_and_read(spark, address) == VALUES
        assert PASSWORD not in refusal(spark, broker.address, "log in") + broker.logs()


def test_sink_and_source_log_in_at_brokers_found_by_zookeeper(
    spark: SparkSession, ensemble: Ensemble, tmp_path: Path, secret: Path
) -> None:
    with Cluster(tmp_path, ensemble, chroot="/spark-users", size=2, credentials="brokers:secret") as cluster:
        with txmq.connect(cluster.address) as client:
            client.topics.create("rows", partitions=2)
            Users(client.control, client.timeout).add("ops", PASSWORD)
        eventually(lambda: _is_served(cluster, "ops"), "all homes know the administrator")
        with txmq.connect(cluster.registry_of("ops"), password=PASSWORD) as client:
            Users(client.control, client.timeout).add("guest", PASSWORD)
            add_shop(client)
            eventually(lambda: _is_served(cluster, "shop"), "all homes know the grants")
            address = f"{cluster.registry_of('shop')}&password_file={secret}"
            assert written_and_read(spark, address) == VALUES
            assert all(client.offsets("rows", partition).end for partition in range(2)), "both partitions have rows"
        guest = f"{cluster.registry_of('guest')}&password_file={secret}"
        said = refusal(spark, guest, "guest may do nothing with topic rows")
        said += refusal(spark, cluster.registry_of("").partition("?")[0], "log in")
        assert PASSWORD not in said + "".join(broker.logs() for broker in cluster.brokers)


def _is_served(cluster: Cluster, user: str) -> bool:
    """Whether each broker lets the user in, and both partitions may be read."""
    try:
        for broker in cluster.brokers:
            with txmq.connect(broker.address.replace("://", f"://{user}@"), password=PASSWORD) as client:
                assert [client.fetch("rows", number, 0, timeout=0.0) for number in range(2)] == [[], []]
    except BrokerError:
        return False
    return True
