"""The transactional publisher: changes and position are one txmq transaction.

Theory of operation. A batch (``batching``) is published as one transaction, with the position message and the
acknowledgement of the one before it (``position_log``). If the broker is away, it is waited for (``commits``).

Invariant: a transaction of the source is seen all or none, unless it comes in parts.
"""

from __future__ import annotations

from collections.abc import Callable

from txmq.binlog.config import BinlogSettings
from txmq.binlog.publish.batching import BatchingPublisher
from txmq.binlog.publish.change_messages import Batch, Parked
from txmq.binlog.publish.commits import PositionCommits
from txmq.binlog.publish.ownership import refuse_spooled
from txmq.binlog.publish.parked_xa_changes import ParkedTopic
from txmq.binlog.publish.position_log import PositionLog, newest_position
from txmq.binlog.publish.published import Published
from txmq.binlog.publish.unread import Unread
from txmq.client import Client
from txmq.runtime.crashpoints import crash_point


class TransactionalPublisher(BatchingPublisher):
    """See the module's docstring. Used by one thread. The arguments are those of ``BatchingPublisher``."""

    def __init__(
        self, client: Client, settings: BinlogSettings, is_stopped: Callable[[], bool], unread: Unread | None = None
    ) -> None:  # fmt: skip
        super().__init__(client, settings, is_stopped, unread)
        self._commits = PositionCommits(client, self._publish, self._wait, lambda: self._gives_up)
        self._log: PositionLog | None = None

    def open(self) -> Published | None:
        settings = self._settings
        # Before this one joins the group: it would take the place of an ordered reader of the same machine.
        self._own_wait.answer(lambda: refuse_spooled(settings, newest_position(self._client, settings)))
        log = self._own_wait.answer(lambda: PositionLog(self._client, settings, self._ends_waits))
        self._log = log
        self._published = self._own_wait.answer(log.take)
        refuse_spooled(settings, self._published)
        return self._published

    def _parked(self) -> tuple[Parked, int]:
        topic = self._settings.parked_topic
        end = self._own_wait.answer(lambda: self._client.offsets(topic, 0).end)
        return ParkedTopic(self._client, topic, self._clock, self.flush), end

    def _made(self, topic: str) -> int:
        def made() -> int:
            self._client.topics.ensure(topic, self._publish.partitions)
            return self._client.topics.known(topic).config.partitions

        return self._own_wait.answer(made)

    def _commit(self, batch: Batch) -> None:
        log = self._log
        assert log is not None
        before, now_ms = self._published, self._clock.now_ms()
        messages, epoch = batch.numbered(before, now_ms, self._settings.parked_topic)
        published = batch.published(before, self._next_id(), now_ms, self._placing, epoch)
        self._commits.commit(log, "" if before is None else before.id, published, messages)
        self._published = published
        crash_point("binlog.position.read")

    def _leave(self) -> None:
        if self._log is not None:
            self._log.close()
