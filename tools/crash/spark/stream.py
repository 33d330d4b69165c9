"""A Spark stream from topic to topic: the driver's processes, how far it is, and whether it was exactly once."""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import txmq
from tools.crash.doors import Grant
from tools.crash.processes import ROOT, CampaignError
from tools.crash.spark.driver import Stream
from txmq.spark.sink.queries import Queries
from txmq.testing.processes.child import ChildProcess

Row = tuple[bytes | None, bytes]


class DriverFailedError(txmq.TxmqError):
    """The driver's process ended, or did not end in time."""


class SparkDriver(ChildProcess):
    """The driver's processes."""

    failure = DriverFailedError
    title = "the Spark driver"

    def __init__(self, directory: Path, bootstrap: str, source: str, sink: str, rows_per_batch: int) -> None:
        super().__init__(directory / "driver.log")
        self._stop_file = directory / "stop"
        self._stream = Stream(
            bootstrap, source, sink, rows_per_batch, str(directory / "checkpoint"), str(self._stop_file)
        )

    def start(self) -> None:
        """Start; it takes seconds until it does anything."""
        self._require_stopped()
        command = [sys.executable, "-m", "tools.crash.spark.driver", json.dumps(self._stream._asdict())]
        self._spawn(command, {**os.environ, "PYTHONPATH": str(ROOT)})

    def kill(self) -> None:
        """SIGKILL for Python and Java at once."""
        pid = self.pid
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)
        super().kill()

    def finish(self, timeout: float) -> None:
        """Let it drain what is left and end.

        Raises:
            DriverFailedError: it does not, or not with status 0.
        """
        self._stop_file.touch()
        status = self.wait(timeout)
        if status:
            raise DriverFailedError(f"the driver ended with {status}\n{self.log_tail()}")


def stream_grants(source: str, sink: str) -> list[Grant]:
    """What the driver's user needs. The query has an id of Spark's for a name, so any name is granted."""
    return [Grant("read", "topic", source), Grant("write", "topic", sink), Grant("read,settle", "group", "*")]


def newest_batch(client: txmq.Client) -> int:
    """The newest committed batch of the one query; -1 before the first."""
    routes = client.routes
    found = routes.ask_each(routes.all_links(), lambda link, _: Queries(link).list())
    if len(found) > 1:
        raise CampaignError(f"one query writes, these are kept: {found}")
    batch = found[0]["batch"] if found else None
    return -1 if batch is None else int(batch)


class Comparison(NamedTuple):
    """What came out; ``complaints`` if it is not what went in, transformed, once and in order."""

    messages: int
    checksum: int
    complaints: list[str]


def compare(client: txmq.Client, source: str, sink: str) -> Comparison:
    """Hold what the stream wrote to what it read."""
    expected = [_transformed(_row(message)) for message in client.browse(source)]
    seen = [_row(message) for message in client.browse(sink)]
    wanted, found = Counter(expected), Counter(seen)
    complaints = []
    if len(expected) != len(seen):
        complaints.append(f"{len(expected)} in {source}, {len(seen)} in {sink}")
    checksum = _checksum(found)
    if _checksum(wanted) != checksum:
        complaints.append(f"checksum {checksum:#x}, expected {_checksum(wanted):#x}")
    for what, rows in (("missing", wanted - found), ("too many", found - wanted)):
        if rows:
            complaints.append(f"{rows.total()} {what}, such as {[*rows.items()][:3]}")
    if wanted == found:
        orders, seen_orders = _by_key(expected), _by_key(seen)
        complaints += [f"key {key!r} is out of order in {sink}" for key in orders if orders[key] != seen_orders[key]]
    return Comparison(len(seen), checksum, complaints)


def _by_key(rows: Iterable[Row]) -> dict[bytes | None, list[bytes]]:
    found: dict[bytes | None, list[bytes]] = defaultdict(list)
    for key, value in rows:
        found[key].append(value)
    return found


def _row(message: txmq.Message) -> Row:
    return message.key, message.value or b""


def _transformed(row: Row) -> Row:
    """What the driver's SQL makes of a row."""
    key, value = row
    return key, value + b":%d" % zlib.crc32(value)


def _checksum(rows: Counter[Row]) -> int:
    """Of a multiset: the sum over its rows."""
    return sum(zlib.crc32((key or b"") + b"\0" + value) * count for (key, value), count in rows.items())
