"""The shell around ``core``: one connection, one core, the threads that wait.

Theory of operation. The thread that waits for a batch does the work (``drive``): it connects, sends what ``poll`` gives
out, reads answers, and keeps the deadlines. So a single ``send`` goes out and comes back on the caller's own thread. A
background thread is started by the first ``send_async``, for whose batches no thread waits, and drives in the same way
while such batches are unfinished.

A session numbers the batches of one core only, so each sender has a connection and a session of its own; the client's
first sender shares the transactions' (``SenderPool``).

Invariants:
    * The core is used under ``_lock`` only, and what ``poll`` gives out is passed to the connection under the same
      lock, so the order on the wire is the order of the sequences.
    * Nothing sleeps, and no user code runs, while the lock is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from txmq.client.producer.core import Batch, BatchQueue, ProducerCore, ProducerLimits, Record
from txmq.client.transport.connection import Connection, Waiter
from txmq.client.transport.reconnecting import (
    BACKOFF_S,
    IDLE_CHECK_S,
    ReconnectingConnection,
)
from txmq.client.transport.session import ClientSession
from txmq.errors import (
    BrokerAwayError,
    ClosedError,
    ConnectionLostError,
    RequestTimeoutError,
    StaleTopicError,
    TxmqError,
    UnknownTopicError,
)
from txmq.model import SendResult, SendStatus
from txmq.protocol.answers import broker_error
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Future, Lock, start_daemon, watch_forks

BACKGROUND_WAIT_S_MAX = 1.0
LEFTOVERS_POLL_S = 0.02
_FOREVER_S = 86_400.0


class Completion:
    """The end of one batch, for the threads and futures that wait for it; ``Batch.owner``.

    Attributes:
        is_queued: its futures are complete, or a thread is to complete them.
    """

    __slots__ = ("batch", "done", "futures", "is_queued", "moved_to", "waiters")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.done = self.is_queued = False
        self.moved_to: Sender | None = None  # the sender that has it now, if it is not the first one
        self.waiters: list[Waiter] = []
        self.futures: list[tuple[int, Future[SendResult]]] = []

    def waiter(self) -> Waiter:
        """A waiter for one thread: several threads may share a batch."""
        waiter = Waiter()
        self.waiters.append(waiter)
        if self.done:  # looked at second, because ``finish`` sets it first
            waiter.finish()
        return waiter

    def finish(self) -> None:
        """End all waits for the batch."""
        self.done = True
        for waiter in self.waiters:
            waiter.finish()

    def result(self, number: int) -> SendResult:
        """The result of message ``number`` of the batch. Raises the error it ended with."""
        batch = self.batch
        if batch.error is not None:
            raise type(batch.error)(*batch.error.args)
        assert batch.base_offset is not None
        queue = batch.queue
        return SendResult(queue.topic, queue.partition, batch.base_offset + number, SendStatus.ACKNOWLEDGED)

    def complete_futures(self) -> None:
        """Set the futures. That runs the application's callbacks, so never on a thread that reads for others."""
        for number, future in self.futures:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self.result(number))
            except TxmqError as error:
                future.set_exception(error)


def unsent(topic: str, partition: int, count: int, error: TxmqError) -> Completion:
    """The completion of a batch that was not sent, with its one future."""
    batch = Batch(BatchQueue(topic, partition), 0.0, 0.0)
    batch.count, batch.error, batch.is_finished = count, error, True
    completion = completion_of(batch)
    completion.futures.append((0, Future()))
    completion.finish()
    completion.complete_futures()
    return completion


def completion_of(batch: Batch) -> Completion:
    """The batch's completion, made when it is first asked for."""
    completion = batch.owner
    if completion is None:
        completion = batch.owner = Completion(batch)
    assert isinstance(completion, Completion)
    return completion


class _PutReply:
    """Carries one transmission's answer to the core."""

    __slots__ = ("batch", "connection", "sender", "transmission")

    def __init__(self, sender: Sender, connection: Connection, batch: Batch) -> None:
        self.sender, self.connection, self.batch, self.transmission = sender, connection, batch, batch.transmission

    def answered(self, code: int, body: bytes) -> None:
        self.sender.take_answer(self.batch, self.transmission, code, body)

    def lost(self, error: TxmqError) -> None:
        self.sender.take_loss(self.connection)


class Sender:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, connection: ReconnectingConnection, clock: Clock, limits: ProducerLimits) -> None:
        self.reconnecting, self.clock = connection, clock
        self.core = ProducerCore(limits)
        self.on_unknown_topic: Callable[[str], None] = lambda _topic: None
        self._lock = Lock()
        self._connection: Connection | None = None
        self._session: ClientSession | None = None  # the core's sequences count in it
        self._failure: TxmqError | None = None  # the reason why there is no connection
        self._backoff_s = 0.0  # before the next attempt to connect
        self._background: Waiter | None = None
        self._futures = 0  # not complete
        self._completed: deque[Completion] = deque()  # finished, their futures not complete
        self._unreported: deque[Batch] = deque()  # finished, and those that wait have yet to be told
        self._closed = False
        watch_forks(self)

    @property
    def limits(self) -> ProducerLimits:
        """The core's settings; to be set only while nothing is unfinished."""
        return self.core.limits

    @limits.setter
    def limits(self, limits: ProducerLimits) -> None:
        self.core.limits = limits

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self, topic: str, partition: int, record: Record, deadline: float, is_movable: bool | None = None
    ) -> SendResult:
        """Send one message and wait for its acknowledgement.

        Args:
            is_movable: see ``Batch``; None if there is one home.
        """
        completion, number = self._append(topic, partition, record, deadline, None, is_movable)
        self.drive(completion)
        return completion.result(number)

    def send_async(
        self, topic: str, partition: int, record: Record, deadline: float, is_movable: bool | None = None
    ) -> Future[SendResult]:
        """As ``send``, without waiting: the future is done when the message is acknowledged or failed."""
        future = self._new_future()
        self._append(topic, partition, record, deadline, future, is_movable)
        self._drive_in_background(deadline)
        return future

    def _new_future(self) -> Future[SendResult]:
        return Future()

    def _drive_in_background(self, deadline: float) -> None:
        self._start_background()
        connection = self._connection
        if connection is not None and connection.has_unsent:
            connection.push(deadline)

    def _append(
        self, topic: str, partition: int, record: Record, deadline: float, future: Future[SendResult] | None,
        is_movable: bool | None,
    ) -> tuple[Completion, int]:  # fmt: skip
        self._wait_for_room(len(record[1]), deadline)
        now = self._look_at_connection()
        with self._lock:
            self._refuse_closed()
            if is_movable is not None:
                self.core.separate(topic, partition, is_movable=is_movable)
            batch, number = self.core.append(topic, partition, record, now, deadline)
            if is_movable:
                batch.is_movable = True
            completion = completion_of(batch)
            if future is not None:
                completion.futures.append((number, future))
                self._futures += 1
            self._pump_new(now)
        return completion, number

    def add(self, topic: str, partition: int, content: bytearray, count: int, deadline: float) -> Completion:
        """Send an encoded batch; ``drive`` waits for it."""
        return self._add(topic, partition, content, count, deadline)

    def add_async(
        self, topic: str, partition: int, content: bytearray, count: int, deadline: float, is_movable: bool
    ) -> Completion:  # fmt: skip
        """As ``add``; the completion's one future is done when the batch is finished."""
        completion = self._add(topic, partition, content, count, deadline, self._new_future(), is_movable)
        self._drive_in_background(deadline)
        return completion

    def _add(
        self, topic: str, partition: int, content: bytearray, count: int, deadline: float,
        future: Future[SendResult] | None = None, is_movable: bool = False,
    ) -> Completion:  # fmt: skip
        self._wait_for_room(len(content), deadline)
        now = self._look_at_connection()
        with self._lock:
            self._refuse_closed()
            batch = self.core.add(topic, partition, content, count, now, deadline)
            batch.is_movable = is_movable
            completion = completion_of(batch)
            if future is not None:
                completion.futures.append((0, future))
                self._futures += 1
            self._pump_new(now)
        return completion

    def take_arrived(self) -> None:
        """Read answers that have arrived, and send what they made room for."""
        connection = self._connection
        if connection is not None:
            connection.take_arrived()

    def _wait_for_room(self, size: int, deadline: float) -> None:
        """Wait until the buffer has room; one message always fits an empty buffer."""
        core = self.core
        while core.buffered_bytes and core.buffered_bytes + size > core.limits.buffer_size_bytes:
            if self.clock.monotonic() >= deadline:
                raise RequestTimeoutError(
                    f"buffer_size_bytes {core.limits.buffer_size_bytes} is in use: nothing was sent"
                )
            self.make_room(deadline)

    def make_room(self, deadline: float) -> None:
        """Work until the oldest batch is finished."""
        with self._lock:
            unfinished = self.core.unfinished_batches()
            oldest = completion_of(unfinished[0]) if unfinished else None
        if oldest is not None:
            self.drive(oldest, deadline)
        elif self.core.buffered_bytes:
            # The buffer is full of batches that ended as "unknown" and are still repeated: no other thread waits.
            self.step(Waiter(), min(deadline, self.clock.monotonic() + LEFTOVERS_POLL_S))

    def _look_at_connection(self) -> float:
        """Find out if an idle connection has ended before a message is sent on it. Returns the time."""
        now, connection = self.clock.monotonic(), self._connection
        if connection is not None:
            if now - connection.used_at > IDLE_CHECK_S:
                connection.is_stale()
            connection.used_at = now
        return now

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("the producer is closed")

    # --- waiting -----------------------------------------------------------------------------------------------------

    def drive(self, completion: Completion, deadline: float = float("inf")) -> None:
        """Work until a batch is finished, at its own deadline at the latest."""
        if completion.done:
            return
        waiter = completion.waiter()
        while not waiter.done:
            sender = completion.moved_to or self
            if sender.step(waiter, deadline) >= deadline:
                return

    def step(self, waiter: Waiter, deadline: float) -> float:
        """One round: deadlines, sending, waiting for answers. Returns the time it began."""
        waiter.nudged = False
        now = self.clock.monotonic()
        with self._lock:
            self.core.expire(now, self._failure)
            self._pump(now)
            finished = self._take_finished()
            wakeup = min(self.core.next_wakeup(), deadline)
            connection = self._connection
        if finished:
            self._notify(finished)
            self._look_at_ended(finished, now)
        if waiter.done or now >= deadline:
            return now
        if (
            connection is None
            or connection.failure is not None
            or self.core.needs_session
            or self.core.needs_connection
        ):
            self._connect(min(self.core.expires_at, deadline, now + self._connect_s_max()))
        else:
            connection.wait(waiter, min(wakeup, now + _FOREVER_S))
        return now

    def _connect_s_max(self) -> float:
        """How long one attempt to connect may last."""
        return _FOREVER_S

    def _look_at_ended(self, ended: list[Batch], now: float) -> None:
        """For senders that are one of several: these batches have ended without an answer."""

    def flush(self, deadline: float) -> None:
        """Wait until everything sent so far is acknowledged or failed.

        Raises:
            RequestTimeoutError: the deadline came first; what is unfinished goes on.
        """
        self.await_all(self.unfinished(), deadline)

    def unfinished(self) -> list[Completion]:
        """What is sent from here on is not waited for; open batches are closed."""
        with self._lock:
            self.core.close_open()
            return [completion_of(batch) for batch in self.core.unfinished_batches()]

    def await_all(self, completions: Iterable[Completion], deadline: float) -> None:
        """Wait for these batches. Raises as ``flush``."""
        for completion in completions:
            self.drive(completion, deadline)
            if not completion.done:
                raise RequestTimeoutError("not everything was acknowledged in time; it goes on being sent")

    def _pump_new(self, now: float) -> None:
        self._pump(now)

    def _pump(self, now: float) -> None:
        """Send what may be sent; the caller holds the lock. ``put`` neither blocks nor calls back."""
        connection = self._connection
        if connection is None or connection.failure is not None:
            return
        for batch in self.core.poll(now):
            assert batch.content is not None
            reply, queue = _PutReply(self, connection, batch), batch.queue
            try:
                connection.put(reply, queue.topic_bytes, queue.partition, batch.content, queue.topic_ref.topic_id)
            except (
                TxmqError
            ):  # the connection failed meanwhile: nothing of this batch was sent, and the others are lost
                self.core.disconnected()
                return

    # --- answers, on the thread that reads ---------------------------------------------------------------------------

    def take_answer(self, batch: Batch, transmission: int, code: int, body: bytes) -> None:
        """The broker answered one transmission."""
        error = None if code == 200 else broker_error(code, body)
        now = self.clock.monotonic()
        with self._lock:
            if error is None:
                self._backoff_s = 0.0
                self.core.answered(batch, int(body))
            else:
                self.core.refused(batch, transmission, error, now)
            self._pump(now)
            finished = self._take_finished()
            # A refusal moves the next wake-up: the threads that wait have to look again.
            concerned = [] if error is None and not self.core.returned else self._waiters()
        if isinstance(error, UnknownTopicError | StaleTopicError):
            self.on_unknown_topic(batch.queue.topic)
        self._notify(finished)
        for waiter in concerned:
            waiter.nudge()

    def _waiters(self) -> list[Waiter]:
        waiters = [waiter for batch in self.core.unfinished_batches() for waiter in completion_of(batch).waiters]
        return waiters if self._background is None else [*waiters, self._background]

    def take_loss(self, connection: Connection) -> None:
        """A connection failed."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self.core.disconnected()

    def _take_finished(self) -> list[Batch]:
        """What ``_notify`` is to tell, of this round and of one that Ctrl-C has ended; the caller holds the lock."""
        self._unreported += self.core.take_finished()
        return list(self._unreported)

    def _notify(self, finished: list[Batch]) -> None:
        """Tell those that wait. An interrupt may strike at each call here: the next round tells again."""
        with_futures = False
        for batch in finished:
            completion = completion_of(batch)
            completion.finish()
            if completion.futures:
                with_futures = True
                if not completion.is_queued:  # no call between these two
                    completion.is_queued = True
                    self._completed.append(completion)
        background = self._background
        if with_futures and background is not None:
            background.finish()
        for batch in finished:
            with suppress(ValueError):  # another thread has told, too
                self._unreported.remove(batch)

    # --- the connection ----------------------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        """Get a connection that is bound to the session; a failure is kept, and shows when a batch expires.

        Attempts after the first one since the broker last took a batch wait for a back-off: a broker that refuses the
        session, or each of its batches, is not asked as fast as it can answer.
        """
        self._wait_out_backoff(deadline)
        with self._lock:
            connection, session = self._connection, self._session
            renews, reconnects = self.core.needs_session, self.core.needs_connection
        try:
            if renews and session is not None:
                self.reconnecting.renew_session(session, deadline)
            elif reconnects and connection is not None:
                connection.fail(ConnectionLostError("another connection took over the session"))
            connection, session = self.reconnecting.connect_with_session(deadline)
        except RequestTimeoutError as error:  # the greeting's: nothing was sent
            self._failure = BrokerAwayError(str(error))
            return
        except TxmqError as error:
            self._failure = error
            return
        with self._lock:
            self._failure = None
            if self._connection is not connection:
                if self._connection is not None:
                    self.core.disconnected()
                self._connection, self._session = connection, session
                self.core.connected(session.id, session.epoch, session.in_flight_max)

    def _wait_out_backoff(self, deadline: float) -> None:
        wait = min(self._backoff_s, deadline - self.clock.monotonic())
        self._backoff_s = BACKOFF_S.following(self._backoff_s)
        if wait > 0 and not self._closed:
            self.clock.sleep(wait)

    # --- the background ----------------------------------------------------------------------------------------------

    def _start_background(self) -> None:
        with self._lock:
            if self._background is not None:
                background, starts = self._background, False
            else:
                background, starts = Waiter(), True
                self._background = background
        if starts:
            start_daemon("txmq-producer", lambda: self._run_background(background))
        else:
            background.signal.set()

    def _run_background(self, background: Waiter) -> None:
        while self._background is background and not self._closed:
            background.done = False
            while self._completed:
                completion = self._completed.popleft()
                with self._lock:
                    self._futures -= len(completion.futures)
                completion.complete_futures()
            if not self._futures:
                background.signal.wait(_FOREVER_S)
                continue
            # A shorter linger may begin meanwhile.
            wait = max(self.limits.linger_s, 0.001) if self.limits.linger_s else BACKGROUND_WAIT_S_MAX
            self.step(background, self.clock.monotonic() + wait)

    # --- ends --------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, not even a batch that ended as "unknown"."""
        return not self.core.buffered_bytes

    def close(self) -> None:
        """Give up what is unfinished and close the connection."""
        self.stop()
        self.reconnecting.close()

    def stop(self) -> None:
        """Give up what is unfinished; nothing more is sent."""
        self._closed = True
        with self._lock:
            self.core.abort("the client was closed")
            finished = self._take_finished()
        self._notify(finished)
        while self._completed:
            self._completed.popleft().complete_futures()
        if self._background is not None:
            self._background.finish()

    def forked(self) -> None:
        """In a forked child: start anew; the parent sends its own batches."""
        self._lock = Lock()
        self.core = ProducerCore(self.core.limits)
        self._connection = self._background = self._session = None
        self._futures = 0
        self._completed.clear()
        self._unreported.clear()
