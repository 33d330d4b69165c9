"""Direct sending of an ordered producer: pipelined, many messages in a batch, and given up at the first failure.

Theory of operation. Batches, sequences, batches in flight and waiting threads work as in every producer
(``producer/sender.py``, ``producer/core.py``), except for failures: nothing is tried again here. A refusal, a lost
connection or a deadline *gives up* the partition: no more of it is sent, and its queue (``direct_or_spooled``) takes
over the batches that are not acknowledged, in order, and spools them. A batch that was sent and not answered is handed
over with its sequence. A batch that was certainly refused, and those after it, are handed over without: the refusal
left a gap in the sequence, so the broker cannot have stored them.

Invariants:
    * A partition is sent to from ``begin`` on, until it is given up or handed over, and then not before the next
      ``begin``. In between ``start`` sends nothing.
    * Batches with a sequence are handed over first, then those without, in the order of sending.
    * The session's identity is on disk before a batch is sent in it (``spool_homes``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from txmq.client.producer.core import (
    SEQUENCE_MASK,
    Batch,
    BatchQueue,
    BatchState,
    ProducerCore,
    ProducerLimits,
    Record,
    TopicRef,
)
from txmq.client.producer.sender import Completion, Sender
from txmq.client.spooling.spool import SpoolIdentity
from txmq.client.transport.connection import Connection, Waiter
from txmq.client.transport.reconnecting import IDLE_CHECK_S
from txmq.errors import BrokerError, ConnectionLostError, RequestTimeoutError, TxmqError, UnavailableError
from txmq.log import records
from txmq.model import SendResult, SendStatus, TopicPartition
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Future

if TYPE_CHECKING:
    from txmq.client.spooling.spool_homes import Sessions

LOOK_AGAIN_S = 0.05  # a thread that reads answers does not see what another thread takes over
TAKEN_OVER_S = 0.005  # a thread that waits for that looks this often


class SpooledError(TxmqError):
    """Ends a batch that its queue has taken over; no caller sees it."""


class OrderedCompletion(Completion):
    """The end of one batch; message by message if its queue took it over."""

    __slots__ = ("outcomes",)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.outcomes: list[TxmqError | None] = []  # None: spooled

    def result(self, number: int) -> SendResult:
        """As ``Completion.result``, or SPOOLED."""
        batch = self.batch
        if not isinstance(batch.error, SpooledError):
            return super().result(number)
        error = self.outcomes[number]
        if error is not None:
            raise type(error)(*error.args)
        return SendResult(batch.queue.topic, batch.queue.partition, None, SendStatus.SPOOLED)


class Unsent(NamedTuple):
    """A batch that its queue takes over. ``sequence`` is None if it was certainly not stored."""

    batch: Batch
    sequence: int | None


class TakenOver(NamedTuple):
    """The state with which a partition's queue goes on.

    Attributes:
        identity: the session that the sequences count in; None if nothing was ever sent.
        sequence: the next sequence.
        floor: an offset that the partition had reached before any of the batches was sent, or None.
    """

    batches: list[Unsent]
    identity: SpoolIdentity | None
    sequence: int
    offset_at_least: int | None


class OrderedCore(ProducerCore):
    """A core that gives up instead of trying again; see the module's docstring."""

    def __init__(self, limits: ProducerLimits) -> None:
        super().__init__(limits)
        self.identity: SpoolIdentity | None = None  # the session that the sequences count in
        self.given_up: dict[BatchQueue, SpoolIdentity | None] = {}
        self.direct: set[TopicPartition] = set()  # partitions that may be sent to
        self._offsets_at_least: dict[BatchQueue, int] = {}

    def _new_batch(self, queue: BatchQueue, now: float, deadline: float) -> Batch:
        batch = super()._new_batch(queue, now, deadline)
        batch.owner = OrderedCompletion(batch)
        return batch

    def _poll_queue(self, queue: BatchQueue, now: float, sendable: list[Batch]) -> None:
        if queue not in self.given_up:
            super()._poll_queue(queue, now, sendable)

    def _give_out(self, batch: Batch, sequence: int) -> None:
        kept = batch.records
        super()._give_out(batch, sequence)
        batch.records = kept  # a refused batch is spooled message by message

    def give_up(self, partition: TopicPartition) -> bool:
        """Send no more of a partition until its queue has taken over. Returns whether batches of it are unfinished."""
        self.direct.discard(partition)
        queue = self.queue_of(*partition)
        self._give_up(queue)
        return bool(queue.batches)

    def _give_up(self, queue: BatchQueue) -> None:
        if queue.batches:
            self.direct.discard((queue.topic, queue.partition))
            self.given_up.setdefault(queue, self.identity)

    def answered(self, batch: Batch, base_offset: int) -> None:
        """As ``ProducerCore.answered``; notes how far the partition has got."""
        if batch.queue.batches and batch is batch.queue.batches[0]:  # otherwise one before it may have a lower offset
            self._offsets_at_least[batch.queue] = base_offset + batch.count
        super().answered(batch, base_offset)

    def refused(self, batch: Batch, transmission: int, error: BrokerError, _now: float) -> None:
        """The broker refused the only transmission: give up the partition."""
        if batch.state is BatchState.IN_FLIGHT and transmission == batch.transmission:
            batch.queue.in_flight -= 1
            batch.state, batch.refusal = BatchState.WAITING, error
            batch.is_uncertain = not is_certain(error)
            self._give_up(batch.queue)

    def disconnected(self) -> None:
        """The connection is lost: give up all partitions with unfinished batches."""
        super().disconnected()
        for queue in self._active:
            self._give_up(queue)

    def connected(self, session: int, epoch: int, in_flight_max: int) -> None:
        """A connection is bound to this session; partitions that are given up keep the sequences of their own."""
        self._is_connected = True
        self._in_flight_max = min(self.limits.in_flight_max, in_flight_max)
        if self._producer == (session, epoch):
            return
        self._producer = (session, epoch)
        self.direct.clear()  # each queue first asks how far its partition has got
        self._offsets_at_least = {
            queue: offset_at_least
            for queue, offset_at_least in self._offsets_at_least.items()
            if queue in self.given_up
        }
        for queue in self._queues.values():
            if queue not in self.given_up:
                queue.base_sequence = 0

    def expire(self, now: float, _reason: TxmqError | None = None) -> None:
        """Give up the partitions with a batch past its deadline."""
        if now < self.expires_at:
            return
        for queue in self._active:
            if any(batch.deadline <= now for batch in queue.batches):
                self._give_up(queue)
        waiting = (batch.deadline for queue in self._active if queue not in self.given_up for batch in queue.batches)
        self.expires_at = min(waiting, default=float("inf"))

    def abort(self, _reason: str) -> None:
        """Give up all partitions."""
        for queue in self._active:
            self._give_up(queue)

    def begin(self, partition: TopicPartition, sequence: int | None, topic_ref: TopicRef) -> bool:
        """Let a partition of this topic be sent to; ``sequence`` is the next one if nothing of it is unfinished.

        Returns:
            False if batches for another topic of that name are unfinished.
        """
        queue = self.queue_of(*partition)
        if topic_ref.topic_id and queue.topic_ref.topic_id != topic_ref.topic_id:
            if not queue.bind_topic(topic_ref):
                return False
            self._offsets_at_least.pop(queue, None)
        if sequence is not None:
            queue.base_sequence = sequence
        self.direct.add(partition)
        return True

    def hand_over(self, partition: TopicPartition) -> TakenOver:
        """Hand over all batches of a partition that are not acknowledged; none of them is sent again here."""
        queue = self.queue_of(*partition)
        self.direct.discard(partition)
        identity = self.given_up.pop(queue, self.identity)
        sequence, is_refused, unsent = queue.base_sequence, False, []
        for batch in list(queue.batches):
            if batch.state is not BatchState.DONE:
                is_refused = is_refused or not batch.is_uncertain
                unsent.append(Unsent(batch, None if is_refused else batch.sequence))
            if not is_refused:
                sequence = (sequence + batch.count) & SEQUENCE_MASK
            self._remove(batch)
        queue.stalled = False  # ``begin`` sets the next sequence
        return TakenOver(unsent, identity, sequence, self._offsets_at_least.pop(queue, None))

    def finish_spooled(self, batch: Batch, error: TxmqError) -> None:
        """Finish a batch that was handed over."""
        self._finish(batch, error)


class OrderedSender(Sender):
    """Sends directly; see the module's docstring. Thread safety: any thread.

    Args:
        on_given_up: called if the queues of ``given_up`` have to take over; from any thread, without locks.
    """

    core: OrderedCore

    def __init__(
        self, sessions: Sessions, clock: Clock, limits: ProducerLimits, on_given_up: Callable[[], None]
    ) -> None:
        super().__init__(sessions.main, clock, limits)
        self.core = OrderedCore(limits)
        self._sessions, self._on_given_up = sessions, on_given_up

    # --- for a partition's queue, under its lock ---------------------------------------------------------------------

    def follow(self, deadline: float) -> SpoolIdentity:
        """Connect in the session in which new batches are numbered, and return it.

        Raises:
            ConnectionLostError, RequestTimeoutError: the broker cannot be reached.
        """
        known, followed = self._connection, self.core.identity
        # A session is given up by failing its connection: one that has not failed is bound to it.
        if followed is not None and known is not None and known.failure is None and not self._is_idle(known):
            return followed
        connection, identity, in_flight_max = self._sessions.bound(deadline)
        with self._lock:
            if self._connection is not connection or identity != self.core.identity:
                if self._connection is not None:
                    self.core.disconnected()
                self._connection, self.core.identity = connection, identity
                self.core.connected(identity.session, identity.epoch, in_flight_max)
        return identity

    def _is_idle(self, connection: Connection) -> bool:
        """Whether it was unused for so long that it has to be checked."""
        return self.clock.monotonic() - connection.used_at > IDLE_CHECK_S

    def begin(self, partition: TopicPartition, sequence: int | None, topic_ref: TopicRef) -> bool:
        """See ``OrderedCore.begin``."""
        with self._lock:
            return self.core.begin(partition, sequence, topic_ref)

    def start(
        self, partition: TopicPartition, record: Record, deadline: float, future: Future[SendResult] | None,
        topic_id: int,
    ) -> tuple[Completion, int] | None:  # fmt: skip
        """Send one message after all others of its partition; None if its queue has to call ``begin`` first."""
        now = self._look_at_connection()
        with self._lock:
            connection = self._connection
            if connection is None or connection.failure is not None or partition not in self.core.direct:
                return None
            if topic_id and self.core.queue_of(*partition).topic_ref.topic_id != topic_id:
                return None
            batch, number = self.core.append(*partition, record, now, deadline)
            completion = batch.owner
            assert isinstance(completion, OrderedCompletion)
            if future is not None:
                completion.futures.append((number, future))
                self._futures += 1
            self._pump(now)
        crash_point("client.ordered.sent")
        return completion, number

    def encoded(self, record: Record) -> bytes:
        """Encode a message as a batch of its own."""
        return bytes(records.encode([record], compression=self.limits.compression))

    def wait_for_room(self, size: int, deadline: float) -> None:
        """Wait while the buffer is full; batches past their deadline leave it for the spool."""
        with suppress(RequestTimeoutError):
            self._wait_for_room(size, deadline)

    def see_to_futures(self, deadline: float) -> None:
        """Let the background thread wait for batches that no other thread waits for."""
        self._start_background()
        connection = self._connection
        if connection is not None and connection.has_unsent:
            connection.push(deadline)

    def is_given_up(self, partition: TopicPartition) -> bool:
        """Whether a partition's queue has to take over first."""
        if not self.core.given_up:
            return False
        with self._lock:
            return self._is_given_up(partition)

    def _is_given_up(self, partition: TopicPartition) -> bool:
        return any((queue.topic, queue.partition) == partition for queue in self.core.given_up)

    def hand_over(self, partition: TopicPartition) -> TakenOver:
        """See ``OrderedCore.hand_over``."""
        with self._lock:
            return self.core.hand_over(partition)

    def finish(self, batch: Batch, outcomes: list[TxmqError | None]) -> None:
        """End the waits for a batch that was handed over, message by message; None means spooled."""
        completion = batch.owner
        assert isinstance(completion, OrderedCompletion)
        completion.outcomes = outcomes
        with self._lock:
            self.core.finish_spooled(batch, SpooledError("spooled"))
            finished = self._take_finished()
        self._notify(finished)

    # --- for threads that wait ---------------------------------------------------------------------------------------

    def given_up(self) -> list[TopicPartition]:
        """Partitions whose queues have to take over."""
        with self._lock:
            return [(queue.topic, queue.partition) for queue in self.core.given_up]

    def give_up(self, partition: TopicPartition) -> bool:
        """Give up a partition as after a failure. Returns whether batches of it are unfinished."""
        with self._lock:
            return self.core.give_up(partition)

    def await_taken_over(self) -> None:
        """Wait a moment while the queues take over."""
        self._on_given_up()
        self.clock.sleep(TAKEN_OVER_S)

    def step(self, waiter: Waiter, deadline: float) -> float:
        waiter.nudged = False
        now = self.clock.monotonic()
        with self._lock:
            self.core.expire(now)
            self._pump(now)
            finished = self._take_finished()
            wakeup = min(self.core.next_wakeup(), deadline, now + LOOK_AGAIN_S)
            connection, is_given_up = self._connection, bool(self.core.given_up)
        self._notify(finished)
        if is_given_up:
            self._on_given_up()
        if waiter.done or now >= deadline:
            return now
        if is_given_up or connection is None or connection.failure is not None:
            waiter.signal.wait(TAKEN_OVER_S)
        else:
            connection.wait(waiter, wakeup)
        return now

    def _connect(self, deadline: float) -> None:
        raise ConnectionLostError("a partition's queue connects before it sends")


def is_certain(error: TxmqError) -> bool:
    """Whether this answer to the only transmission of a batch says that it was not stored."""
    return isinstance(error, BrokerError) and not isinstance(error, UnavailableError) and type(error) is not BrokerError
