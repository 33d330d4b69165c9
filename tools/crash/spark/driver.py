"""The Spark driver of the campaign, a process of its own: reads topic ``in``, transforms, writes topic ``out``.

It lives until it is killed, or until the stop file is there: then it stops in the middle of whatever it does, drains
what is left and ends. A query that fails is started again from its checkpoint, as a supervisor would.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txmq.testing.processes.spark import start_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IN, OUT = "in", "out"
ROWS_PER_BATCH = 150
_LOOK_S = 0.2  # for the stop file
TIMEOUT_S = 120  # for a broker that is away


def start_query(session: SparkSession, bootstrap: str, checkpoint: str, *, is_last: bool) -> Any:
    """Begin or go on where the checkpoint says."""
    source = session.readStream.format("txmq").options(
        bootstrap=bootstrap, topic=IN, startingOffsets="earliest", maxOffsetsPerTrigger=ROWS_PER_BATCH,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    frame = source.load().selectExpr("key", "concat(cast(value as string), ':', crc32(value)) value")
    writer = frame.writeStream.format("txmq").options(bootstrap=bootstrap, topic=OUT, timeout=TIMEOUT_S)
    trigger: dict[str, Any] = {"availableNow": True} if is_last else {"processingTime": "0 seconds"}
    return writer.option("checkpointLocation", checkpoint).trigger(**trigger).start()


def main() -> None:
    """``spark_driver BOOTSTRAP CHECKPOINT STOP_FILE``."""
    bootstrap, checkpoint, stop_file = sys.argv[1:]
    session = start_session("txmq-crash")
    while True:
        is_last = Path(stop_file).exists()
        query = start_query(session, bootstrap, checkpoint, is_last=is_last)
        try:
            while not query.awaitTermination(_LOOK_S):
                if not is_last and Path(stop_file).exists():
                    query.stop()
        except Exception as error:  # noqa: BLE001  Spark wraps whatever ended the query
            print(f"the query failed: {error}", flush=True)
            continue
        if is_last:
            return


if __name__ == "__main__":
    main()
