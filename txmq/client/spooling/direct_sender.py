"""Direct sending of an ordered producer: pipelined, many messages a batch, and given up at the first doubt.

Theory of operation. Batches, numbers, the flight and the threads that wait are those of every producer (``sender``,
``producer_core``). What differs is what becomes of a failure: nothing is tried again here. A refusal, a lost
connection or a deadline *gives up* the partition: nothing more of it goes out, and its lane takes over what is not
acknowledged, in order, and spools it (``ordered_queue``). What was sent and not answered is handed over with the number
it was sent by. What was refused for certain, and all behind it, left a gap in the numbers, so the broker cannot have
stored it: that is handed over without.

Invariants:
    * a partition is sent to from ``begin`` on, until it is given up or handed over, and then not before the next
      ``begin``: between them ``start`` asks no lane;
    * what is handed over is numbered ones first, then unnumbered ones, in the order of sending;
    * the session's identity is on disk before a batch goes out in it (``ordered_sessions``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from txmq.client.producer.batches import SEQUENCE_MASK, Batch, BatchQueue, BatchState, ProducerLimits, Record
from txmq.client.producer.core import ProducerCore
from txmq.client.producer.sender import Completion, Sender
from txmq.client.spooling.sessions import Sessions
from txmq.client.spooling.spool_rows import SpoolIdentity
from txmq.client.transport.connection import Connection
from txmq.client.transport.reconnecting import IDLE_CHECK_S
from txmq.client.transport.reply import Waiter
from txmq.errors import BrokerError, ConnectionLostError, RequestTimeoutError, TxmqError, UnavailableError
from txmq.log import records
from txmq.model import SendResult, SendStatus, TopicPartition
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Future

LOOK_AGAIN_S = 0.05  # who reads answers does not see what another thread takes over
TAKEN_OVER_S = 0.005  # who waits for that looks this often


class SpooledError(TxmqError):
    """Not an error to anybody: how a batch that its lane has taken over is finished."""


class OrderedCompletion(Completion):
    """The end of one batch, message by message where its lane took it over."""

    __slots__ = ("outcomes",)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.outcomes: list[TxmqError | None] = []  # None: spooled

    def result(self, number: int) -> SendResult:
        """As ``Completion.result``; SPOOLED where it is that."""
        batch = self.batch
        if not isinstance(batch.error, SpooledError):
            return super().result(number)
        error = self.outcomes[number]
        if error is not None:
            raise type(error)(*error.args)
        return SendResult(batch.queue.topic, batch.queue.partition, None, SendStatus.SPOOLED)


class Unsent(NamedTuple):
    """A batch that its lane takes over. ``sequence`` is None where it was certainly not stored."""

    batch: Batch
    sequence: int | None


class TakenOver(NamedTuple):
    """What a lane goes on with.

    Attributes:
        identity: the session the numbers count in; None where nothing was ever sent.
        sequence: the next number.
        floor: an offset the partition had reached before any of the batches was sent; None where that is not known.
    """

    batches: list[Unsent]
    identity: SpoolIdentity | None
    sequence: int
    offset_at_least: int | None


class OrderedCore(ProducerCore):
    """See the module's docstring."""

    def __init__(self, limits: ProducerLimits) -> None:
        super().__init__(limits)
        self.identity: SpoolIdentity | None = None  # whose numbers are in use
        self.given_up: dict[BatchQueue, SpoolIdentity | None] = {}
        self.direct: set[TopicPartition] = set()  # partitions that may be sent to
        self._offsets_at_least: dict[BatchQueue, int] = {}

    def _new_batch(self, queue: BatchQueue, now: float, deadline: float) -> Batch:
        batch = super()._new_batch(queue, now, deadline)
        batch.owner = OrderedCompletion(batch)
        return batch

    def _poll_queue(self, queue: BatchQueue, now: float, given: list[Batch]) -> None:
        if queue not in self.given_up:
            super()._poll_queue(queue, now, given)

    def _give_out(self, batch: Batch, sequence: int) -> None:
        kept = batch.records
        super()._give_out(batch, sequence)
        batch.records = kept  # spooled one by one where the batch is refused

    def give_up(self, partition: TopicPartition) -> bool:
        """Send no more of a partition until its lane has taken over; whether anything of it is under way."""
        self.direct.discard(partition)
        queue = self._queue(*partition)
        self._give_up(queue)
        return bool(queue.batches)

    def _give_up(self, queue: BatchQueue) -> None:
        if queue.batches:
            self.direct.discard((queue.topic, queue.partition))
            self.given_up.setdefault(queue, self.identity)

    def answered(self, batch: Batch, base_offset: int) -> None:
        """As ``ProducerCore``."""
        if batch.queue.batches and batch is batch.queue.batches[0]:  # else one before it is stored at a lower offset
            self._offsets_at_least[batch.queue] = base_offset + batch.count
        super().answered(batch, base_offset)

    def refused(self, batch: Batch, transmission: int, error: BrokerError, _now: float) -> None:
        """Its only transmission was refused."""
        if batch.state is BatchState.IN_FLIGHT and transmission == batch.transmission:
            batch.queue.in_flight -= 1
            batch.state, batch.refusal = BatchState.WAITING, error
            batch.is_uncertain = not is_certain(error)
            self._give_up(batch.queue)

    def disconnected(self) -> None:
        """Nothing that is in flight will be answered."""
        super().disconnected()
        for queue in self._active:
            self._give_up(queue)

    def connected(self, session: int, epoch: int, in_flight_max: int) -> None:
        """A connection that speaks for this session is there; what is given up keeps the numbers of its own."""
        self._is_connected = True
        self._in_flight_max = min(self.limits.in_flight_max, in_flight_max)
        if self._producer == (session, epoch):
            return
        self._producer = (session, epoch)
        self.direct.clear()  # each lane looks first how far its partition has got
        self._offsets_at_least = {
            queue: offset_at_least
            for queue, offset_at_least in self._offsets_at_least.items()
            if queue in self.given_up
        }
        for queue in self._queues.values():
            if queue not in self.given_up:
                queue.base_sequence = 0

    def expire(self, now: float, _reason: TxmqError | None = None) -> None:
        """Give up the partitions with something past its deadline."""
        if now < self.expires_at:
            return
        for queue in self._active:
            if any(batch.deadline <= now for batch in queue.batches):
                self._give_up(queue)
        waiting = (batch.deadline for queue in self._active if queue not in self.given_up for batch in queue.batches)
        self.expires_at = min(waiting, default=float("inf"))

    def abort(self, _reason: str) -> None:
        """Give up everything."""
        for queue in self._active:
            self._give_up(queue)

    def begin(self, partition: TopicPartition, sequence: int | None) -> None:
        """A partition may be sent to; with a number to go on with, where nothing of it is under way."""
        if sequence is not None:
            self._queue(*partition).base_sequence = sequence
        self.direct.add(partition)

    def hand_over(self, partition: TopicPartition) -> TakenOver:
        """Everything of a partition that is not acknowledged; it sends no more of this."""
        queue = self._queue(*partition)
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
        queue.stalled = False  # the next number comes with ``begin``
        return TakenOver(unsent, identity, sequence, self._offsets_at_least.pop(queue, None))

    def finish_spooled(self, batch: Batch, error: TxmqError) -> None:
        """What its lane made of a batch that was handed over."""
        self._finish(batch, None, error)


class OrderedSender(Sender):
    """See the module's docstring. Thread safety: any thread.

    Args:
        on_given_up: somebody is to see that the lanes of ``given_up`` take over; called from any thread, without locks.
    """

    core: OrderedCore

    def __init__(
        self, sessions: Sessions, clock: Clock, limits: ProducerLimits, on_given_up: Callable[[], None]
    ) -> None:
        super().__init__(sessions.main, clock, limits)
        self.core = OrderedCore(limits)
        self._sessions, self._on_given_up = sessions, on_given_up

    # --- of a lane, under its lock -----------------------------------------------------------------------------------

    def follow(self, deadline: float) -> SpoolIdentity:
        """Be connected, in the session that new batches are numbered in.

        Raises:
            ConnectionLostError, RequestTimeoutError: the broker cannot be reached.
        """
        known, followed = self._connection, self.core.identity
        # A session is given up by failing its connection: one that has not failed speaks for it.
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
        """Whether it was unused for so long that it has to be looked at."""
        return self.clock.monotonic() - connection.used_at > IDLE_CHECK_S

    def begin(self, partition: TopicPartition, sequence: int | None) -> None:
        """See ``OrderedCore.begin``."""
        with self._lock:
            self.core.begin(partition, sequence)

    def start(
        self, partition: TopicPartition, record: Record, deadline: float, future: Future[SendResult] | None
    ) -> tuple[Completion, int] | None:
        """Send one message behind all of its partition; None, and nothing is done, where its lane has to look first."""
        now = self._look_at_connection()
        with self._lock:
            connection = self._connection
            if connection is None or connection.failure is not None or partition not in self.core.direct:
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
        """A message as a batch of its own."""
        return bytes(records.encode([record], compression=self.limits.compression))

    def wait_for_room(self, size: int, deadline: float) -> None:
        """Wait while much is under way; past the deadline that is given up, and in the spool."""
        with suppress(RequestTimeoutError):
            self._wait_for_room(size, deadline)

    def see_to_futures(self, deadline: float) -> None:
        """Have the background wait for what nobody else waits for."""
        self._start_background()
        connection = self._connection
        if connection is not None and connection.has_unsent:
            connection.push(deadline)

    def is_given_up(self, partition: TopicPartition) -> bool:
        """Whether its lane has to take over first."""
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
        """Tell those who wait for a batch that was handed over, message by message; None is spooled."""
        completion = batch.owner
        assert isinstance(completion, OrderedCompletion)
        completion.outcomes = outcomes
        with self._lock:
            self.core.finish_spooled(batch, SpooledError("spooled"))
            finished = self.core.take_finished()
        self._notify(finished)

    # --- of those who wait -------------------------------------------------------------------------------------------

    def given_up(self) -> list[TopicPartition]:
        """Partitions whose lanes have to take over."""
        with self._lock:
            return [(queue.topic, queue.partition) for queue in self.core.given_up]

    def give_up(self, partition: TopicPartition) -> bool:
        """As if something of it had failed; whether anything of it is under way."""
        with self._lock:
            return self.core.give_up(partition)

    def await_taken_over(self) -> None:
        """Let the lanes take over what is given up."""
        self._on_given_up()
        self.clock.sleep(TAKEN_OVER_S)

    def _step(self, waiter: Waiter, deadline: float) -> float:
        waiter.nudged = False
        now = self.clock.monotonic()
        with self._lock:
            self.core.expire(now)
            self._pump(now)
            finished = self.core.take_finished()
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
        raise ConnectionLostError("a lane connects before it sends")


def is_certain(error: TxmqError) -> bool:
    """Whether this answer to the only transmission of a batch says that it was not stored."""
    return isinstance(error, BrokerError) and not isinstance(error, UnavailableError) and type(error) is not BrokerError
