"""One live conversation with a broker, shared by threads; it has no thread of its own.

Theory of operation.

*Waiting* (leader and followers). A thread that waits for an answer becomes the *leader* if no other thread reads, and
reads answers for all threads until its own has come. The other threads (*followers*) are listed and sleep. So a lone
caller sends and reads the socket itself, and no other thread is woken on the way. One read can answer several
followers. The leader wakes the first, and each follower wakes the next as it leaves. If nobody is reading when the last
one leaves, it makes a waiting follower the leader. Followers are woken one by one because only one of them can have the
interpreter's lock.

*Sending*. A request is appended to ``_out``. The thread that finds the sending lock free writes all that is in there,
those of other threads, too, in one piece; these go on to wait. While followers are being woken one after another, which
are likely to send again, requests are held back, at most ``HELD_BACK_MAX``; the thread that wakes the last of them
writes them all.

Nothing here blocks while it holds a lock. What the socket does not take at once is kept (``_stuck``), and a waiting
thread writes it later. A callback (``Pending``) may therefore send.

*Answers*. What a caller waits for is a ``Reply``; anything else that is told of an answer is a ``Pending``.

*An event loop* (``txmq.aio``) reads for all: it is appointed the leader once and for good, and wakes all whose answers
one read has brought. It also writes: requests of one turn of the loop leave by ``HELD_BACK_MAX``, the rest at its end.

Invariants:
    * Each request that ``start`` took ends exactly once: with ``answered``, or with ``lost`` and the connection's
      failure. If a KeyboardInterrupt strikes while ``answered`` is called, ``lost`` is called, too.
    * A connection that failed stays failed; ``ReconnectingConnection`` makes another one.
    * The answer to a request that was given up (``abandon``) is read and dropped. If nothing at all has come for
      ``SILENT_S_MAX`` then, though something was asked, the connection ends: the broker stands still, or a middle box
      has forgotten the connection.
    * A KeyboardInterrupt leaves no lock held. A lock is held by ``with``, or it is an attribute that a ``finally``
      clears before any call: CPython raises the interrupt after calls, so after ``acquire``, too.
    * A listed follower will be woken. While a follower has to be woken, a thread is awake that passes that on, because
      every thread that leaves the list calls ``_pass_on``. A KeyboardInterrupt inside ``_pass_on`` could break the
      chain, so no follower sleeps longer than ``SLEEP_S_MAX`` without looking again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Protocol

from txmq.client.transport.session import ClientSession
from txmq.errors import BrokenAnswerError, ConnectionLostError, RemoteProtocolError, RequestTimeoutError, TxmqError
from txmq.protocol import requests
from txmq.protocol.answers import AnswerReader, broker_error
from txmq.protocol.requests import Stated, Word
from txmq.runtime.net import BUFFERS_PER_SEND_MAX, SLEEP_S_MAX
from txmq.runtime.ports import Buffer, Clock, Stream
from txmq.runtime.threads import Lock, Signal

HELD_BACK_MAX = 8  # requests that wait to be written together with those of threads, or tasks, that run next
ABANDONED_MAX = 256  # requests given up on one connection; a broker that answers none of them is gone
SILENT_S_MAX = 1.0
_JOINED_SIZE_BYTES_MAX = 16 << 10  # copying this much costs less than one system call with many buffers
_WRITE_WAIT_S = 0.05  # a follower with unsent bytes tries this often to write them


class Pending(Protocol):
    """Receives the answer to one request; called by the thread that reads."""

    def answered(self, code: int, body: bytes) -> None:
        """The answer has come."""

    def lost(self, error: TxmqError) -> None:
        """No answer will come; whether the request was executed is not known."""


class Waiter:
    """Something one thread can wait for.

    Attributes:
        done: the wait is over.
        nudged: the thread has to come back from waiting and look again; it resets this itself.
    """

    __slots__ = ("__weakref__", "done", "nudged", "signal")

    def __init__(self) -> None:
        self.done = self.nudged = False
        self.signal = Signal()

    def nudge(self) -> None:
        """Make the thread come back from ``Connection.wait``."""
        self.nudged = True
        self.signal.set()

    def finish(self) -> None:
        """End the wait."""
        self.done = True
        self.signal.set()


class Reply(Waiter):
    """The answer to one request, as a thread waits for it."""

    __slots__ = ("_body", "_code", "_connection", "_deadline", "_error", "opaque")

    def __init__(self, connection: Connection, deadline: float, opaque: bytes) -> None:
        self.done = self.nudged = False  # as ``Waiter``
        self.signal = Signal()
        self._connection, self._deadline, self.opaque = connection, deadline, opaque
        self._code, self._body = 0, b""
        self._error: TxmqError | None = None

    def answered(self, code: int, body: bytes) -> None:
        self._code, self._body = code, body
        self.done = True
        self._connection.is_answered(self)

    def lost(self, error: TxmqError) -> None:
        if not self.done:
            self._error = error
            self.finish()

    def look(self) -> None:
        """Read what has arrived, without waiting."""
        if not self.done:
            self._connection.take_arrived()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the answer and return its body.

        Args:
            timeout: seconds from now; by default until the request's own deadline.

        Raises:
            BrokerError: the broker refused; its class says why.
            ConnectionLostError, RequestTimeoutError: whether the request was executed is not known.
        """
        connection = self._connection
        if not self.done:
            connection.wait(self, self._deadline if timeout is None else connection.clock.monotonic() + timeout)
            if not self.done:
                self.look()  # a caller that comes late: its answer may have been there in time
        if not self.done:
            if timeout is None:
                connection.abandon(self.opaque)
            raise RequestTimeoutError(f"no answer from {connection.address} in time")
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._code != 200:
            raise broker_error(self._code, self._body)
        return self._body


class Connection:
    """A connection to one broker; see the module's docstring.

    Attributes:
        failure: the error that ended it, or None.
        session: the session that ``hello`` bound to it, or None.
        stream: what it writes to and reads from.
        used_at: monotonic time just before the last request.
        reads: how often something has come.
        lived_at: monotonic time at which the broker was alive: it has answered a request that was sent then.
    """

    def __init__(self, stream: Stream, clock: Clock, address: str) -> None:
        self.clock, self.address = clock, address
        self.failure: TxmqError | None = None
        self.session: ClientSession | None = None
        # ``_counted_at``: the ``lived_at`` that ``is_there`` has counted; the greeting's counts for nothing.
        self.used_at = self.lived_at = self._counted_at = clock.monotonic()
        self.stream = stream
        self._answers = AnswerReader()
        self._pending: dict[bytes, tuple[Pending, float, int]] = {}  # with ``used_at`` and ``_reads`` as they were then
        self.reads = 0  # that brought something
        self._abandoned: set[bytes] = set()
        self._numbers = count(1)
        self._out: deque[Sequence[Buffer]] = deque()  # requests of which nothing is written yet
        self._rest: list[Buffer] = []  # begun; only for the holder of ``_sending``
        self._stuck = False  # the socket takes no more for now
        self._sending = Lock()
        self._leading = Lock()  # held for a moment, to become the leader
        self._leader: object = None  # the waiter that reads
        self._answering: tuple[Pending, float, int] | None = None  # the request whose answer is being delivered
        self._followers: dict[Waiter, bool] = {}
        self._woken: deque[Waiter] = deque()  # followers that were answered, to be woken in turn
        self._send_error: BaseException | None = None
        self._gather: Callable[[], None] | None = None  # asks an event loop to ``write`` soon

    # --- requests ----------------------------------------------------------------------------------------------------

    def request(
        self, deadline: float, verb: str, *arguments: Word,
        extensions: Mapping[str, Word | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> Reply:  # fmt: skip
        """Send a request; ``Reply.result`` waits for the answer.

        Raises:
            TxmqError: the connection's failure; nothing was sent.
        """
        opaque = b"%x" % next(self._numbers)
        reply = Reply(self, deadline, opaque)
        self._start(reply, opaque, requests.request(verb, *arguments, extensions=extensions, body=body, opaque=opaque))
        if self._stuck:
            self.push(deadline)
        return reply

    def start(
        self, pending: Pending, verb: str, *arguments: Word, extensions: Mapping[str, Word | None] | None = None
    ) -> None:
        """Send a request whose answer goes to ``pending``. Raises as ``request``."""
        opaque = b"%x" % next(self._numbers)
        self._start(pending, opaque, requests.request(verb, *arguments, extensions=extensions, opaque=opaque))

    def transaction(self, deadline: float, head: str, fields: Stated, body: Sequence[Buffer] | None) -> Reply:
        """As ``request``, unchecked (``commands.transaction_line``)."""
        opaque = b"%x" % next(self._numbers)
        reply = Reply(self, deadline, opaque)
        length = None if body is None else sum(map(len, body))
        line = requests.transaction_line(head, fields, length, opaque)
        self._start(reply, opaque, (line, *(body or ())))
        if self._stuck:
            self.push(deadline)
        return reply

    def put(self, pending: Pending, topic: bytes, partition: int, batch: bytearray, topic_id: int = 0) -> None:
        """Send one batch, for the topic of this id alone unless that is 0. Raises as ``request``."""
        opaque = b"%x" % next(self._numbers)
        self._start(pending, opaque, (requests.put_line(topic, partition, len(batch), opaque, topic_id), batch))

    def _start(self, pending: Pending, opaque: bytes, buffers: Sequence[Buffer]) -> None:
        self._pending[opaque] = pending, self.used_at, self.reads
        # Listed first, looked second: ``fail`` either finds the request in the list, or its failure is seen here.
        if self.failure is not None and self._pending.pop(opaque, None) is not None:
            raise type(self.failure)(*self.failure.args)
        try:
            self._out.append(buffers)
            if self._gather is not None and len(self._out) < HELD_BACK_MAX:
                if len(self._out) == 1:
                    self._gather()
                return
            # Appended first, looked second: the thread that empties ``_woken`` looks at ``_out`` after that.
            if not self._woken or len(self._out) >= HELD_BACK_MAX:
                self._flush()
        except BaseException as error:
            # Interrupted: otherwise the request could go out long after its sender has given it up.
            self._give_up_sending(error)
            raise

    def _flush(self) -> None:
        """Write what the socket takes, unless another thread is writing: it then writes these requests, too."""
        while self._out and not self._sending.locked():
            with self._sending:  # another thread may hold it, for as long as a write takes, which does not block
                self._write()
            # Looked at again after the release: a thread that came in between found the lock taken and went to wait.
            if self._stuck:
                return

    def _write(self) -> None:
        """Write until all is written or the socket takes no more; the caller holds ``_sending``."""
        out, rest = self._out, self._rest
        try:
            while True:
                if self._send_error is not None:
                    out.clear()
                    return
                while out and len(rest) < BUFFERS_PER_SEND_MAX:
                    rest.extend(out.popleft())
                if not rest:
                    self._stuck = False
                    return
                size = sum(map(len, rest))
                if size <= _JOINED_SIZE_BYTES_MAX:
                    rest[:] = [b"".join(rest)]
                taken = self.stream.send(rest)
                if taken == size:
                    rest.clear()
                    continue
                _drop_sent(rest, taken)
                if rest:
                    self._stuck = True
                    return
        except OSError as error:
            # The reader finds the end of the stream and fails the connection: the caller may hold locks of its own.
            self._give_up_sending(error)
        except BaseException as error:
            # Interrupted: how much of a request has been written is not known, so no other can follow it.
            self._give_up_sending(error)
            raise

    def _give_up_sending(self, error: BaseException) -> None:
        self._send_error, self._stuck = error, False
        self._out.clear()
        self._rest.clear()
        self.stream.shut_down()

    def write_now(self) -> None:
        """Hand all requests to the kernel before this returns, but what the socket does not take."""
        with self._sending:  # after another thread that is writing
            if self._out or self._rest:
                self._write()

    def abandon(self, opaque: bytes) -> None:
        """Give up waiting for an answer: it is dropped when it comes."""
        self._abandoned.add(opaque)
        asked = self._pending.get(opaque)
        if asked is None:  # it came meanwhile
            self._abandoned.discard(opaque)
        elif asked[2] == self.reads and self._has_been_silent():
            self.fail(ConnectionLostError(f"{self.address} did not answer in time, and nothing else came"))
        elif len(self._abandoned) > ABANDONED_MAX:
            self.fail(ConnectionLostError(f"{self.address} left {ABANDONED_MAX} requests unanswered"))

    def _has_been_silent(self) -> bool:
        """Whether nothing has come for long after requests that wait; another thread may read meanwhile."""
        now, waiting = self.clock.monotonic(), list(self._pending.values())
        since = min((used_at for _, used_at, reads in waiting if reads == self.reads), default=now)
        return now - since >= SILENT_S_MAX and self.stream.is_quiet()

    # --- answers -----------------------------------------------------------------------------------------------------

    def wait(self, waiter: Waiter, deadline: float) -> None:
        """Read answers, or sleep while another thread reads.

        Returns when ``waiter`` is done or nudged, when the connection fails, or at the deadline.
        """
        while not waiter.done and not waiter.nudged and self.failure is None:
            if self._leader is None:
                self._lead(waiter, deadline)
            else:
                self._follow(waiter, deadline)
            if not waiter.done and self.clock.monotonic() >= deadline:
                return

    def take_arrived(self) -> None:
        """Read what has arrived, without waiting; nothing if another thread reads."""
        if self._leader is None:
            self._read_once(0.0)

    def push(self, deadline: float) -> None:
        """Wait until the socket has taken all requests, and read answers meanwhile. Not from a callback."""
        while self._stuck and self.failure is None:
            remaining = min(deadline - self.clock.monotonic(), _WRITE_WAIT_S)
            if remaining <= 0:
                return
            if self._leader is None:
                self._read_once(remaining)
            else:
                self._write_on(remaining)

    def _write_on(self, timeout: float) -> None:
        """Write when there is room, while a leader may be waiting for answers only."""
        if self.stream.wait_writable(timeout):
            self.write()

    def write(self) -> None:
        """Write what the socket takes."""
        if not self._sending.locked():
            with self._sending:
                self._write()
        self._flush()

    def appoint(self, reader: object, gather: Callable[[], None]) -> None:
        """Let an event loop read, and write: it is asked by ``gather`` to call ``write`` at the end of its turn."""
        self._leader, self._gather = reader, gather

    def read_arrived(self) -> None:
        """For the event loop: read once what has arrived, and wake all whose answers it brought."""
        if self.failure is None:
            self._exchange(0.0)
        while self._woken:
            self._pass_on()
        if self.failure is not None:
            self._leader = None
            self._has_stepped_down()

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has not taken all requests yet; see ``push``."""
        return self._stuck

    def is_there(self, now: float, heard_within_s: float, lived_within_s: float) -> bool:
        """Whether the broker answers, as far as that can be known without asking it.

        It does if a request sent since ``now - heard_within_s`` is answered, where each answer counts once; or if the
        connection is sound, and the broker has lived since ``now - lived_within_s``.
        """
        lived_at = self.lived_at
        if self.failure is None and lived_at != self._counted_at and now - lived_at <= heard_within_s:
            self._counted_at = lived_at
            return True
        return not self.is_stale() and now - self.lived_at <= lived_within_s

    def is_stale(self) -> bool:
        """Whether the connection has ended; asked before it is used after a while in which nobody read it."""
        while self._leader is None and self.failure is None and not self.stream.is_quiet():
            self.take_arrived()  # the end of the stream comes after answers that nobody waited for
        return self.failure is not None

    def _lead(self, waiter: Waiter, deadline: float) -> None:
        try:
            self._run_for_leader(waiter)
            while self._leader is waiter and not waiter.done and not waiter.nudged and self.failure is None:
                remaining = deadline - self.clock.monotonic()
                if remaining <= 0:
                    return
                self._exchange(remaining)
                if self._woken:
                    self._pass_on()
        finally:
            if self._leader is waiter:
                self._leader = None
            self._has_stepped_down()

    def _read_once(self, timeout: float) -> None:
        reader = object()
        try:
            self._run_for_leader(reader)
            if self._leader is reader and self.failure is None:
                self._exchange(timeout)
        finally:
            if self._leader is reader:
                self._leader = None
            self._has_stepped_down()

    def _run_for_leader(self, candidate: object) -> None:
        with self._leading:
            if self._leader is None:
                self._leader = candidate

    def _follow(self, waiter: Waiter, deadline: float) -> None:
        followers = self._followers
        followers[waiter] = True
        try:
            # Listed first, looked second: a thread that ends this wait meanwhile sees the entry, or is seen.
            if waiter.done or waiter.nudged or self.failure is not None or self._leader is None:
                return
            remaining = min(deadline - self.clock.monotonic(), SLEEP_S_MAX)
            if self._stuck:
                self._write_on(min(remaining, _WRITE_WAIT_S))
            else:
                waiter.signal.wait(remaining)
        finally:
            followers.pop(waiter, None)
            self._pass_on()

    def is_answered(self, waiter: Waiter) -> None:
        """A follower's answer has come; called by ``Reply`` from a callback."""
        if waiter in self._followers:  # otherwise its thread is awake, and looks before it sleeps
            self._woken.append(waiter)

    def _pass_on(self) -> None:
        """Wake the next follower that was answered; if there is none and nobody reads, wake one to lead."""
        woken, followers = self._woken, self._followers
        while woken:
            try:
                waiter = woken.popleft()
            except IndexError:  # another thread took the last
                break
            if followers.pop(waiter, False):  # otherwise it left by itself, and passed on
                waiter.signal.set()
                if not woken and self._out and self._gather is None:
                    self._flush()
                return
        if self._out and self._gather is None:
            self._flush()
        if followers and self._leader is None:
            try:
                waiter, _ = followers.popitem()  # the latest: probably answered last, so it leads for longest
            except KeyError:
                return
            waiter.signal.set()

    def _has_stepped_down(self) -> None:
        if self.failure is not None:
            self._close()
        if self._woken or self._out or self._followers:
            self._pass_on()

    def _close(self) -> None:
        """Close the socket, once and when no thread uses it: a leader does it when it steps down."""
        with self._leading:
            if self._leader is not None:
                return
            self._leader = self  # for good
        with self._sending:
            self.stream.close()

    def _exchange(self, timeout: float) -> None:
        """Write what is stuck and read once, waiting up to ``timeout`` seconds; the caller is the leader."""
        try:
            if self._out:
                self._flush()
            if self._stuck:
                if not self.stream.wait(timeout, writable=True):
                    return
                self.write()
                timeout = 0.0
            arrived = self.stream.receive(timeout)
            if arrived:
                self._dispatch(arrived)
            elif arrived is not None:
                self.fail(ConnectionLostError(self._end_text()))
        except OSError as error:
            self.fail(ConnectionLostError(f"connection to {self.address} lost: {error}"))
        except RemoteProtocolError as error:
            self.fail(BrokenAnswerError(*error.args))
        except BaseException:
            # Interrupted between reading an answer and delivering it: the answer is gone, so the connection fails.
            lost = ConnectionLostError("interrupted while reading answers")
            self.fail(lost)
            if self._answering is not None:
                self._answering[0].lost(lost)
            raise

    def _dispatch(self, arrived: memoryview) -> None:
        pop = self._pending.pop
        self.reads += 1
        for code, opaque, body, _ in self._answers.feed(arrived):
            self._answering = self._pending.get(opaque)
            asked = pop(opaque, None)
            if asked is not None:
                pending, self.lived_at, _ = (
                    asked  # not the time of reading: an answer may be read after its broker froze
                )
                if self._abandoned:
                    self._abandoned.discard(opaque)
                pending.answered(code, body)
            elif self.failure is None:
                # A token ``-`` comes before the broker closes; any other was never sent.
                told = (
                    body[:200].decode("ascii", "replace").strip() if opaque == b"-" else f"{opaque!r}: {body[:200]!r}"
                )
                self.fail(BrokenAnswerError(f"{self.address} answered {told}"))
        self._answering = None
        if self._answers.failure is not None:
            self.fail(BrokenAnswerError(*self._answers.failure.args))

    def _end_text(self) -> str:
        if self._send_error is not None:
            return f"connection to {self.address} lost: {self._send_error}"
        return f"{self.address} closed the connection"

    # --- ends --------------------------------------------------------------------------------------------------------

    def fail(self, error: TxmqError) -> None:
        """End the connection: every unanswered request is lost."""
        with self._sending:
            if self.failure is not None:
                return
            self.failure = error
            self._stuck = False
            self._out.clear()
            self._rest.clear()
        self.stream.shut_down()
        self._close()
        for opaque in list(self._pending):
            asked = self._pending.pop(opaque, None)
            if asked is not None:
                asked[0].lost(error)
        for follower in list(self._followers):
            follower.signal.set()

    def forget(self) -> None:
        """In a forked child: close the descriptor and nothing else; the parent goes on using the connection."""
        self.failure = ConnectionLostError("the connection belongs to the parent process")
        self.stream.close()


def _drop_sent(buffers: list[Buffer], taken: int) -> None:
    """Remove the first ``taken`` bytes: the socket took them."""
    whole = 0
    for buffer in buffers:
        size = memoryview(buffer).nbytes
        if taken < size:
            if taken:
                buffers[whole] = memoryview(buffer).cast("B")[taken:]
            break
        taken -= size
        whole += 1
    del buffers[:whole]
