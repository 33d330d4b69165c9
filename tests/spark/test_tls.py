"""Spark's sink and source over TLS with client certificates, the files being on every executor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import txmq
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.processes.broker import BrokerProcess, address_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 500


def test_what_sink_writes_source_reads_over_tls(spark: SparkSession, tmp_path: Path) -> None:
    files = CertificateAuthority(tmp_path / "tls").issue("both")
    with BrokerProcess(tmp_path / "data", tls=files) as broker, txmq.connect(broker.address) as client:
        client.topics.create("rows", partitions=2)
        frame = spark.range(0, ROWS, numPartitions=2).selectExpr("concat('k', id % 7) key", "concat('v', id) value")
        frame.write.format("txmq").options(bootstrap=broker.address, topic="rows").mode("append").save()
        read = spark.read.format("txmq").options(bootstrap=address_of([broker]), topic="rows").load()
        assert {bytes(row.value) for row in read.select("value").collect()} == {b"v%d" % n for n in range(ROWS)}
        with pytest.raises(Exception, match="certificate"):
            spark.read.format("txmq").options(
                bootstrap=f"txmqs://{broker.host}:{broker.port}?ca={files.ca}", topic="rows", timeout="5"
            ).load().collect()
