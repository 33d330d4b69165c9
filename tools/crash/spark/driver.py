"""The Spark driver of the campaigns, a process of its own: reads a topic, transforms, writes another one.

It lives until it is killed, or until the stop file is there: then it stops in the middle of whatever it does, drains
what is left and ends. A query that fails is started again from its checkpoint, as a supervisor would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.testing.processes.spark import start_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_S = 0.2  # for the stop file
TIMEOUT_S = 120  # for a broker that is away


class Stream(NamedTuple):
    """What a driver is told."""

    bootstrap: str
    source: str  # a topic
    sink: str  # another one
    rows_per_batch: int
    checkpoint: str
    stop_file: str


def start_query(session: SparkSession, stream: Stream, *, is_last: bool) -> Any:
    """Begin or go on where the checkpoint says."""
    source = session.readStream.format("txmq").options(
        bootstrap=stream.bootstrap, topic=stream.source, startingOffsets="earliest",
        maxOffsetsPerTrigger=stream.rows_per_batch, timeout=TIMEOUT_S,
    )  # fmt: skip
    frame = source.load().selectExpr("key", "concat(cast(value as string), ':', crc32(value)) value")
    writer = frame.writeStream.format("txmq").options(bootstrap=stream.bootstrap, topic=stream.sink, timeout=TIMEOUT_S)
    trigger: dict[str, Any] = {"availableNow": True} if is_last else {"processingTime": "0 seconds"}
    return writer.option("checkpointLocation", stream.checkpoint).trigger(**trigger).start()


def main() -> None:
    """``driver STREAM``, in JSON."""
    stream = Stream(**json.loads(sys.argv[1]))
    stop_file = Path(stream.stop_file)
    session = start_session("txmq-crash")
    while True:
        is_last = stop_file.exists()
        query = start_query(session, stream, is_last=is_last)
        try:
            while not query.awaitTermination(_LOOK_S):
                if not is_last and stop_file.exists():
                    query.stop()
        except Exception as error:  # noqa: BLE001  Spark wraps whatever ended the query
            print(f"the query failed: {error}", flush=True)
            continue
        if is_last:
            return


if __name__ == "__main__":
    main()
