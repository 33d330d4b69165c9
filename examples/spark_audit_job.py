"""The audit as a job for spark-submit: one topic against one table, on any cluster.

    spark-submit --master yarn examples/spark_audit_job.py --bootstrap txmq://broker:8123 --topic orders \
        --database mysql://app@db/shop --table orders --match "id = json:$.id" --output audit-orders

Ends with status 1 if it found something. The executors need txmq with PySpark, and mysqlclient for MySQL and
MariaDB (docs/how-to/spark.md); the password comes from AUDIT_DATABASE_PASSWORD.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import txmq
from txmq.addresses import without_password
from txmq.spark.audit.report import save, summary_of, verdict
from txmq.spark.audit.rows import open_rows
from txmq.spark.audit.spec import AuditSpec, parse_row_time, parse_terms
from txmq.spark.audit.topic import TopicAudit


def options() -> argparse.Namespace:
    """The words of ``txmq audit`` that a job needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--bootstrap", "--topic", "--database"):
        parser.add_argument(name, required=True)
    parser.add_argument("--match", action="append", required=True)
    parser.add_argument("--compare", action="append", default=[])
    for name in ("--table", "--order", "--row-time", "--row-txid", "--dataset"):
        parser.add_argument(name)
    parser.add_argument("--settle-ms", type=int, default=30_000)
    parser.add_argument("--output", type=Path, default=Path("audit"))
    return parser.parse_args()


def main() -> int:
    """Audit, write what was found, and say it in a line."""
    given = options()
    spark = SparkSession.builder.appName(f"audit of {given.topic}").getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", "UTC")  # of times that are text without a zone
    spec = AuditSpec(
        given.topic,
        parse_terms(given.match),
        parse_terms(given.compare),
        order=given.order,
        row_time=None if given.row_time is None else parse_row_time(given.row_time),
        row_txid=given.row_txid,
        settle_ms=given.settle_ms,
    )
    with txmq.connect(given.bootstrap) as client:
        rows = open_rows(spark, given.database, given.table, os.environ.get("AUDIT_DATABASE_PASSWORD"))
        result = TopicAudit(spark, client, given.bootstrap, rows, spec, say=print).run()
        facts = {"table": given.table, "database": without_password(given.database), "bootstrap": given.bootstrap}
        print(verdict(save(result, summary_of(result, facts), given.output, given.dataset)))
    spark.stop()
    return 0 if result.is_clean else 1 if result.has_findings else 2  # 2: there was nothing to judge


if __name__ == "__main__":
    try:
        sys.exit(main())
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
