"""The sender to one home of several: batches may come from the senders to other homes, and go to them.

A batch changes senders between two homes as a value: the old core lets it go, the new one adopts it, and the threads
that wait for it are nudged and go on at the new sender (``Completion.moved_to``). Which batch goes where is decided in
``home_senders``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.client.producer.batches import Batch, BatchQueue, BatchState, TopicRef
from txmq.client.producer.completion import completion_of
from txmq.client.producer.sender import Sender
from txmq.client.transport.reconnecting import AWAY_S_MAX
from txmq.client.transport.reply import Waiter
from txmq.errors import ConnectionLostError, DeliveryUnknownError, TxmqError
from txmq.registry.topics import Topic

if TYPE_CHECKING:
    from txmq.client.producer.home_senders import HomeSenders

SILENT_S_MAX = 1.0  # a home that has answered nothing for so long counts as away


class HomeSender(Sender):
    """See the module's docstring. Thread safety: any thread.

    Attributes:
        router: what it is one of; set before the first message.
    """

    router: HomeSenders | None = None

    def step(self, waiter: Waiter, deadline: float) -> float:
        """As ``Sender.step``; takes batches elsewhere that are not sent here."""
        if self.core.returned and self.router is not None:
            with self._lock:
                due = self.core.due_returned()
            if due:
                self.router.rehome(self, due)
                return self.clock.monotonic()
        begun = super().step(waiter, deadline)
        if self._failure is not None and self.router is not None:
            self.router.leave(self)
        return begun

    def _connect_s_max(self) -> float:
        """Batches that may go elsewhere do not wait long for this home."""
        with self._lock:
            return AWAY_S_MAX if self.core.movable() else super()._connect_s_max()

    def _look_at_ended(self, ended: list[Batch], now: float) -> None:
        """A home that answers nothing may be frozen: without the connection it counts as away."""
        connection, router = self._connection, self.router
        if connection is None or router is None or not router.has_many:
            return
        since = [batch.created_at for batch in ended if isinstance(batch.error, DeliveryUnknownError)]
        if since and now - max(min(since), connection.lived_at) >= SILENT_S_MAX:
            connection.fail(ConnectionLostError(f"{connection.address} has not answered for {SILENT_S_MAX:g} s"))
            router.leave(self)

    def movable(self) -> list[Batch]:
        """Batches that may go to another partition, if they are not sent meanwhile."""
        with self._lock:
            return self.core.movable()

    def withdraw(self, batch: Batch) -> bool:
        """Let go of a movable batch; False if it has been sent meanwhile, ended, or another thread has taken it."""
        queue = batch.queue
        with self._lock:
            is_here = self.core.queue_of(queue.topic, queue.partition) is queue  # a core has queues of its own
            if not is_here or batch.transmission or batch.state is not BatchState.WAITING:
                return False
            self.core.withdraw([batch])
            self._futures -= len(completion_of(batch).futures)
        return True

    def take_returned(self, queue: BatchQueue) -> list[Batch]:
        """See ``ProducerCore.take_returned``; nothing if another thread has done so."""
        with self._lock:
            taken = self.core.take_returned(queue) if queue in self.core.returned else []
            self._futures -= sum(len(completion_of(batch).futures) for batch in taken)
            finished = self._take_finished()
        self._notify(finished)
        return taken

    def keep_returned(self, queue: BatchQueue, error: TxmqError | None) -> None:
        """See ``ProducerCore.keep_returned``."""
        with self._lock:
            if queue in self.core.returned:
                self.core.keep_returned(queue, self.clock.monotonic(), error)

    def fail_returned(self, queue: BatchQueue, error: TxmqError) -> None:
        """See ``ProducerCore.fail_returned``."""
        with self._lock:
            if queue in self.core.returned:
                self.core.fail_returned(queue, error)
            finished = self._take_finished()
        self._notify(finished)

    def bind_topic(self, topic: Topic, partition: int) -> bool:
        """See ``BatchQueue.bind_topic``."""
        with self._lock:
            topic_ref = TopicRef(topic.topic_id, topic.config.partitions)
            return self.core.queue_of(topic.config.name, partition).bind_topic(topic_ref)

    def adopt(self, topic: str, partition: int, batches: list[Batch]) -> None:
        """Send batches that another sender let go; the threads that wait for them go on here."""
        completions = [completion_of(batch) for batch in batches]
        with self._lock:
            self.core.adopt(topic, partition, batches)
            for completion in completions:
                completion.moved_to = self
                self._futures += len(completion.futures)
            self._pump(self.clock.monotonic())
        if any(completion.futures for completion in completions):
            self._start_background()
        for completion in completions:
            for waiter in completion.waiters:
                waiter.nudge()
