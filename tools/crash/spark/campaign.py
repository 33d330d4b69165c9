"""Exactly once through Spark: from txmq, transformed, to txmq, with the driver and the broker killed at random.

Theory of operation. Each round puts messages into ``in``, waits until the streaming query has committed another batch,
lets it run for a random while, and kills: the driver (its Python and Java processes; its workers find out later, as
zombies do), the broker, or both. In the end the query drains what is left, and ``out`` must be ``in`` transformed: the
same count, the same checksum, each message once, with its key, and nothing left prepared.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import txmq
from tools.crash.processes import ROOT, CampaignError, pause
from tools.crash.spark.driver import IN, OUT
from txmq.model import TransactionKind
from txmq.spark.sink.queries import Queries
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.child import ChildProcess

PARTITIONS = 3
MESSAGES_PER_ROUND = 600
KEYS = 40
PATIENCE_S = 300.0  # for a batch to be committed, or the end: a loaded machine
KILL_AFTER_S_MAX = 2.0
_KINDS = ("driver", "broker", "driver", "both", "driver", "broker")
Row = tuple[bytes | None, bytes]


class DriverFailedError(txmq.TxmqError):
    """The driver's process ended, or did not end in time."""


class SparkDriver(ChildProcess):
    """The driver's processes."""

    failure = DriverFailedError
    title = "the Spark driver"

    def __init__(self, directory: Path, bootstrap: str) -> None:
        super().__init__(directory / "driver.log")
        self.stop_file = directory / "stop"
        self._command = [
            sys.executable, "-m", "tools.crash.spark.driver", bootstrap, str(directory / "checkpoint"),
            str(self.stop_file),
        ]  # fmt: skip

    def __enter__(self) -> Self:
        self.launch()
        return self

    def launch(self) -> None:
        """Start; it takes seconds until it does anything."""
        self._require_stopped()
        self._spawn(self._command, {**os.environ, "PYTHONPATH": str(ROOT)})

    def kill(self) -> None:
        """SIGKILL for Python and Java at once."""
        pid = self.pid
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)
        super().kill()


@dataclass(slots=True)
class SparkReport:
    """What a campaign did and found.

    Attributes:
        left_max: most transactions that a kill has left prepared.
    """

    kills: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    messages: int = 0
    checksum: int = 0
    left_max: int = 0
    complaints: list[str] = field(default_factory=list)


class SparkCampaign:
    """See the module's docstring."""

    def __init__(self, directory: Path, seed: int, say: Callable[[str], None]) -> None:
        self._directory, self._rng, self._say = directory, random.Random(seed), say
        self._sent = 0
        self.report = SparkReport()

    def run(self, kills: int) -> SparkReport:
        """Kill so often, then let it end, and compare.

        Raises:
            CampaignError: nothing moves any more.
        """
        with BrokerProcess(self._directory / "data") as broker, txmq.connect(broker.address, timeout=60.0) as client:
            client.topics.create(IN, partitions=PARTITIONS)
            client.topics.create(OUT, partitions=PARTITIONS)
            with SparkDriver(self._directory, broker.address) as driver:
                for number in range(kills):
                    self._round(client, broker, driver, _KINDS[number % len(_KINDS)])
                self._send(client)
                driver.stop_file.touch()
                status = driver.wait(PATIENCE_S)
                if status:
                    raise DriverFailedError(f"the driver ended with {status}\n{driver.log_tail()}")
            self._compare(client)
        return self.report

    def _round(self, client: txmq.Client, broker: BrokerProcess, driver: SparkDriver, kind: str) -> None:
        self._send(client)
        before = self._batch(client)

        def has_moved() -> bool:
            if not driver.is_running:
                raise CampaignError(f"the driver ended behind batch {before}\n{driver.log_tail()}")
            return self._batch(client) > before

        eventually(has_moved, f"a batch is committed behind number {before}", PATIENCE_S, CampaignError)
        pause(self._rng.uniform(0.0, KILL_AFTER_S_MAX))  # where the kill hits is what is random
        self._kill(client, broker, driver, kind)
        self.report.kills[kind] += 1
        self._say(f"killed {kind} at batch {self._batch(client)}; {self._sent} sent")

    def _kill(self, client: txmq.Client, broker: BrokerProcess, driver: SparkDriver, kind: str) -> None:
        if kind != "broker":
            driver.kill()
            if kind == "driver":
                left = [row for row in client.transactions.list() if row["kind"] == TransactionKind.SPARK.value]
                self.report.left_max = max(self.report.left_max, len(left))
        if kind != "driver":
            broker.kill()
            broker.start()
        if kind != "broker":
            driver.launch()

    def _send(self, client: txmq.Client) -> None:
        rows: list[Row] = []
        for number in range(self._sent, self._sent + MESSAGES_PER_ROUND):
            rows.append((b"k%d" % self._rng.randrange(KEYS), b"m%d" % number))
        self._sent += MESSAGES_PER_ROUND
        with client.producer() as producer:
            producer.send_many(IN, rows)

    def _batch(self, client: txmq.Client) -> int:
        """The newest committed batch of the one query; -1 before the first."""
        found = Queries(client).list()
        if len(found) > 1:
            raise CampaignError(f"one query writes, these are kept: {found}")
        batch = found[0]["batch"] if found else None
        return -1 if batch is None else int(batch)

    def _compare(self, client: txmq.Client) -> None:
        report = self.report
        report.batches = self._batch(client) + 1
        expected = Counter(_transformed(_row(message)) for message in client.browse(IN))
        seen = Counter(_row(message) for message in client.browse(OUT))
        report.messages, report.checksum = seen.total(), _checksum(seen)
        if (self._sent, self._sent) != (expected.total(), seen.total()):
            report.complaints.append(f"{self._sent} sent, {expected.total()} in, {seen.total()} out")
        if _checksum(expected) != report.checksum:
            report.complaints.append(f"checksum {report.checksum:#x}, expected {_checksum(expected):#x}")
        for what, rows in (("missing", expected - seen), ("too many", seen - expected)):
            if rows:
                report.complaints.append(f"{rows.total()} {what}, such as {[*rows.items()][:3]}")
        left = client.transactions.list()
        if left:
            report.complaints.append(f"{len(left)} transactions are left: {left[:3]}")


def _row(message: txmq.Message) -> Row:
    return message.key, message.value or b""


def _transformed(row: Row) -> Row:
    """What the driver's SQL makes of a row."""
    key, value = row
    return key, value + b":%d" % zlib.crc32(value)


def _checksum(rows: Counter[Row]) -> int:
    """Of a multiset: the sum over its rows."""
    return sum(zlib.crc32((key or b"") + b"\0" + value) * count for (key, value), count in rows.items())
