"""Exactly once through Spark: from txmq, transformed, to txmq, with the driver and the broker killed at random.

Theory of operation. Each round puts messages into ``in``, waits until the streaming query has committed another batch,
lets it run for a random while, and kills: the driver (its Python and Java processes; its workers find out later, as
zombies do), the broker, or both. In the end the query drains what is left, and ``out`` must be ``in`` transformed: the
same count, the same checksum, each message once, with its key, and nothing left prepared.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import txmq
from tools.crash.doors import OPEN, Doors
from tools.crash.processes import CampaignError, pause
from tools.crash.spark.stream import Row, SparkDriver, compare, newest_batch, stream_grants
from txmq.model import TransactionKind
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

IN, OUT, DRIVER = "in", "out", "driver"
ROWS_PER_BATCH = 150
PARTITIONS = 3
MESSAGES_PER_ROUND = 600
KEYS = 40
PATIENCE_S = 300.0  # for a batch to be committed, or the end: a loaded machine
KILL_AFTER_S_MAX = 2.0
_KINDS = ("driver", "broker", "driver", "both", "driver", "broker")


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

    def __init__(self, directory: Path, seed: int, say: Callable[[str], None], doors: Doors = OPEN) -> None:
        self._doors = doors
        self._directory, self._rng, self._say = directory, random.Random(seed), say
        self._sent = 0
        self.report = SparkReport()

    def run(self, kills: int) -> SparkReport:
        """Kill so often, then let it end, and compare.

        Raises:
            CampaignError: nothing moves any more.
        """
        with BrokerProcess(self._directory / "data", tls=self._doors.tls) as broker:
            self._doors.close([broker])
            with txmq.connect(self._doors.address([broker]), timeout=60.0) as client:
                self._play(client, broker, kills)
            self.report.complaints += self._doors.refused([broker])
        return self.report

    def _play(self, client: txmq.Client, broker: BrokerProcess, kills: int) -> None:
        client.topics.create(IN, partitions=PARTITIONS)
        client.topics.create(OUT, partitions=PARTITIONS)
        self._doors.admit([broker], {DRIVER: stream_grants(IN, OUT)})
        address = self._doors.address([broker], DRIVER)
        with SparkDriver(self._directory, address, IN, OUT, ROWS_PER_BATCH) as driver:
            for number in range(kills):
                self._round(client, broker, driver, _KINDS[number % len(_KINDS)])
            self._send(client)
            driver.finish(PATIENCE_S)
        self._compare(client)

    def _round(self, client: txmq.Client, broker: BrokerProcess, driver: SparkDriver, kind: str) -> None:
        self._send(client)
        before = newest_batch(client)

        def has_moved() -> bool:
            if not driver.is_running:
                raise CampaignError(f"the driver ended behind batch {before}\n{driver.log_tail()}")
            return newest_batch(client) > before

        eventually(has_moved, f"a batch is committed behind number {before}", PATIENCE_S, CampaignError)
        pause(self._rng.uniform(0.0, KILL_AFTER_S_MAX))  # where the kill hits is what is random
        self._kill(client, broker, driver, kind)
        self.report.kills[kind] += 1
        self._say(f"killed {kind} at batch {newest_batch(client)}; {self._sent} sent")

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
            driver.start()

    def _send(self, client: txmq.Client) -> None:
        rows: list[Row] = []
        for number in range(self._sent, self._sent + MESSAGES_PER_ROUND):
            rows.append((b"k%d" % self._rng.randrange(KEYS), b"m%d" % number))
        self._sent += MESSAGES_PER_ROUND
        with client.producer() as producer:
            producer.send_many(IN, rows)

    def _compare(self, client: txmq.Client) -> None:
        report = self.report
        report.batches = newest_batch(client) + 1
        report.messages, report.checksum, complaints = compare(client, IN, OUT)
        report.complaints += complaints
        if report.messages != self._sent:
            report.complaints.append(f"{self._sent} sent, {report.messages} out")
        left = client.transactions.list()
        if left:
            report.complaints.append(f"{len(left)} transactions are left: {left[:3]}")
