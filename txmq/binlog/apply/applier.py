"""The applier: the topics of a sync into the tables of a second database, exactly once, in order per key.

Theory of operation. One process of the group has all partitions; others stand by. Its consumer's messages go into
queues, one for each partition, and threads with connections of their own write them: the changes of a batch and the
partition's offset are one transaction of the target (``target.py``). So a kill anywhere repeats nothing and skips
nothing, and partitions are written at the same time. Statements wait until every partition has reached them
(``partition_queues.py``), and are run once (``ddl.py``). The markers ``begin`` and ``end`` of large transactions are
passed over: each partition commits for itself.

If a batch does not fit the target, its changes are applied one by one. A value that must be unique may be in use only
because another partition is behind, or further: the change waits for a while, and the other partitions go on. No
partition passes another one by more than what is in memory, so all that leads the topic's partitions to one moment of
the source can then be written in one transaction. If it still does not fit, it is a conflict.

The process begins anew, with a new consumer, if topics were made or a partition was another process's meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from txmq.binlog.apply.accepted_events import Accepted
from txmq.binlog.apply.applier_session import Applied, Replica, Session
from txmq.binlog.apply.ddl import TargetStatements
from txmq.binlog.apply.tables import TargetTables
from txmq.binlog.apply.target import connector
from txmq.binlog.apply.topics import applied_topics
from txmq.binlog.config import BinlogSettings
from txmq.client import Client, DatabaseOffsetStore
from txmq.errors import ConfigError, FencedError, StorageError, TxmqError
from txmq.model import TopicPartition
from txmq.runtime.backoff import Backoff
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.threads import Signal, until_terminated

TOPICS_S = 1.0  # between two looks, while there are no topics
PAUSE_S = Backoff(0.1, 5.0)


class Applier:
    """See the module's docstring. ``stop`` from any thread; the rest by one.

    Args:
        skipped: ids of transactions whose statements are not run.
    """

    def __init__(self, client: Client, settings: BinlogSettings, *, skipped: Collection[str] = ()) -> None:
        if settings.publish.by == "transaction":
            raise ConfigError('publish.by = "transaction": the changes of a row are in no order then, and not applied')
        self._client, self._settings = client, settings
        self._sparingly = Sparingly(get_logger(group=settings.apply_group), client.clock)
        connect, tables = connector(settings.apply), TargetTables(settings.apply.database)
        store = DatabaseOffsetStore(connect, table=settings.offset_table)
        accepted = Accepted(settings, skipped)
        statements = TargetStatements(
            connect, connector(settings.apply, is_patient=True), tables, store, settings.apply_group,
            settings.apply.state_database, skipped, accepted,
        )  # fmt: skip
        self._replica = Replica(connect, tables, store, statements, accepted, skipped)
        self._woken, self._is_stopped = Signal(), False
        self.applied = Applied()

    def stop(self) -> None:
        """End when what is being written is written."""
        self._is_stopped = True
        self._woken.set()

    def run(self, *, until_end: bool = False) -> Applied:
        """Apply until ``stop``.

        Args:
            until_end: end when all is applied that the topics hold now.

        Raises:
            BinlogError: what stopped it; nothing after it was applied in that partition.
        """
        pause_s = PAUSE_S.first
        ends: dict[TopicPartition, int] | None = None
        while not self._is_stopped:
            try:
                if until_end and ends is None:
                    ends = self._ends(self._topics())
                self._replica.statements.install()
                if self._run_session(ends):
                    break
                pause_s = PAUSE_S.first
            except TxmqError as error:
                if not (error.retriable or isinstance(error, (FencedError, StorageError))):
                    raise
                self._sparingly.warning("beginning anew", error=str(error))
                self._woken.wait(pause_s)
                pause_s = PAUSE_S.following(pause_s)
        return self.applied

    def _run_session(self, ends: dict[TopicPartition, int] | None) -> bool:
        """Apply with one consumer; True at the end."""
        if ends is not None and not ends:
            return True
        topics = self._topics()
        if not topics:
            self._woken.wait(TOPICS_S)
            return False
        session = Session(self._client, self._settings, self._replica, self.applied, topics)
        return session.run(ends, lambda: self._is_stopped, self._topics)

    def _topics(self) -> list[str]:
        return applied_topics(self._client, self._settings)

    def _ends(self, topics: Iterable[str]) -> dict[TopicPartition, int]:
        ends = {}
        for topic in topics:
            for partition in range(self._client.topics.known(topic).config.partitions):
                end = self._client.offsets(topic, partition).end
                if end:  # perhaps deleted by now, and not applied
                    ends[topic, partition] = end
        return ends


def apply_binlog(settings: BinlogSettings, client: Client, *, skipped: Collection[str], until_end: bool) -> Applied:
    """Apply until SIGTERM or Ctrl-C, or until the end of what is there.

    Raises:
        BinlogError: what stopped it.
        ConfigError: a setting cannot be used.
    """
    applier = Applier(client, settings, skipped=skipped)
    with until_terminated(applier.stop):
        return applier.run(until_end=until_end)
