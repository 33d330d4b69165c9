"""Spark's sink and source at a broker with users: the password is in a file, on every executor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import txmq
from txmq.client.admin.users import Users
from txmq.testing.processes.broker import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 500
PASSWORD = "correct horse"


def test_what_sink_writes_source_reads_as_a_user(spark: SparkSession, tmp_path: Path) -> None:
    secret = tmp_path / "shop.password"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    with BrokerProcess(tmp_path / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("rows", partitions=2)
            Users(client.control, client.timeout).add("ops", PASSWORD)
        with txmq.connect(broker.address.replace("://", "://ops@"), password=PASSWORD) as client:
            users = Users(client.control, client.timeout)
            users.add("shop", PASSWORD)
            for words in ({"may": "write,read", "topic": "rows"}, {"may": "read", "group": "*"}):
                users.acl("grant", "shop", words)
        address = f"{broker.address.replace('://', '://shop@')}?password_file={secret}"
        frame = spark.range(0, ROWS, numPartitions=2).selectExpr("concat('k', id % 7) key", "concat('v', id) value")
        frame.write.format("txmq").options(bootstrap=address, topic="rows").mode("append").save()
        read = spark.read.format("txmq").options(bootstrap=address, topic="rows").load()
        assert {bytes(row.value) for row in read.select("value").collect()} == {b"v%d" % n for n in range(ROWS)}
        with pytest.raises(Exception, match="log in") as caught:
            spark.read.format("txmq").options(bootstrap=broker.address, topic="rows").load().collect()
        assert PASSWORD not in str(caught.value) + broker.logs()
