"""What the audits of a binlog sync begin with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from txmq.binlog.config import BinlogSettings
from txmq.client.client import Client
from txmq.runtime.os_clock import OSClock
from txmq.runtime.ports import Clock
from txmq.spark.audit.rows import Rows
from txmq.spark.audit.spec import SETTLE_MS, AuditSpec
from txmq.spark.audit.topic import Notes, TopicAudit, ignore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class SyncAudit:
    """An audit of one topic of a sync.

    Attributes:
        bootstrap: the broker's address as the executors reach it; they reach the database as the settings say.
        settle_ms: how long what is on its way is waited for.
        say: told what is done, a line at a time.
    """

    spark: SparkSession
    client: Client
    bootstrap: str
    settings: BinlogSettings
    topic: str
    settle_ms: int = field(default=SETTLE_MS, kw_only=True)
    say: Notes = field(default=ignore, kw_only=True)
    clock: Clock = field(default_factory=OSClock, kw_only=True)

    def topic_audit(self, spec: AuditSpec) -> TopicAudit:
        """Of the topic; its rows are read elsewhere."""
        no_rows = Rows(self.spark, "", "", None)
        return TopicAudit(self.spark, self.client, self.bootstrap, no_rows, spec, clock=self.clock)
