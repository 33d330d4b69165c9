"""A driver on a standalone cluster: sink, source, a stream, then the audit as a job; prints what it saw as JSON.

Nothing is set that a cluster's administrator would set: 200 partitions a shuffle are Spark's default.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from txmq.spark.datasource import TxmqDataSource

if TYPE_CHECKING:
    from pyspark import SparkContext

BATCHES = 4  # of the stream, so that something is killed between two
JOB = Path(__file__).resolve().parents[2] / "examples" / "spark_audit_job.py"


def tasks_done(context: SparkContext) -> int:
    """How many tasks this application has run so far."""
    consumed = context.statusTracker()
    jobs = [job for number in consumed.getJobIdsForGroup(None) if (job := consumed.getJobInfo(number)) is not None]
    stages = {stage: consumed.getStageInfo(stage) for job in jobs for stage in job.stageIds}
    return sum(stage.numCompletedTasks for stage in stages.values() if stage is not None)


def main(registry: str, brokers: str, database: str, directory: str, rows: str) -> None:
    """Write ``rows`` messages, read them, stream them to another topic, audit them against the table.

    Sink and audit find the brokers through the registry, the sources by their addresses.
    """
    spark = SparkSession.builder.appName("txmq on a cluster").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(TxmqDataSource)  # txmq is installed from a checkout here
    messages = spark.range(int(rows)).selectExpr("cast(id as string) as key", "cast('' as binary) as value")
    messages.write.format("txmq").mode("append").option("bootstrap", registry).option("topic", "orders").save()
    read = spark.read.format("txmq").option("bootstrap", brokers).option("topic", "orders").load()
    seen = {"master": spark.sparkContext.master, "read": read.select("key").distinct().count()}
    stream = spark.readStream.format("txmq").option("bootstrap", brokers).option("topic", "orders")
    stream = stream.options(startingOffsets="earliest", maxOffsetsPerTrigger=str(int(rows) // BATCHES)).load()
    copy = stream.select("key", "value").writeStream.format("txmq").option("bootstrap", registry)
    copy = copy.option("topic", "copies").option("checkpointLocation", f"{directory}/checkpoint")
    copy.trigger(availableNow=True).start().awaitTermination()
    before = tasks_done(spark.sparkContext)
    sys.argv = [str(JOB), "--bootstrap", registry, "--topic", "orders", "--database", database, "--table", "orders"]
    sys.argv += ["--match", "id = key", "--settle-ms", "0", "--output", f"{directory}/audit"]
    SparkSession.stop = lambda session: None  # its tasks are counted after it
    try:
        runpy.run_path(str(JOB), run_name="__main__")
    except SystemExit as ended:
        seen |= {"status": ended.code, "tasks": tasks_done(spark.sparkContext) - before}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
