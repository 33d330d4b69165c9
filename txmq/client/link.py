"""One live conversation with a broker, shared by threads; no thread of its own.

Theory of operation (leader and followers). A thread that waits for something takes the reading lock and reads answers
for everybody until its own has come (the *leader*); the others sleep until their answer was read, or until the leader
steps down and wakes one of them. So a lone caller sends and reads the socket itself: no hand-over between threads on
its way (0.03 ms a round trip less than through a reader thread).

Nothing here blocks while it holds a lock: what the socket does not take at once stays in ``_out``, and whoever waits
writes it on. A callback (``Pending``) may therefore send.

Invariants:
    * Every request that ``start`` took is told exactly once: ``answered``, or ``lost`` with the link's failure.
    * A link that failed stays failed; another one is made by ``connection``.
    * A broker's answer to a request nobody waits for any more (``abandon``) is taken and dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Protocol

from txmq.client.session import Session
from txmq.errors import ConnectionLostError, RemoteProtocolError, RequestTimeoutError, TxmqError, broker_error
from txmq.protocol import commands
from txmq.protocol.answers import AnswerReader
from txmq.protocol.commands import Word
from txmq.runtime.net import Stream
from txmq.runtime.ports import Buffer, Clock
from txmq.runtime.threads import Lock, Signal

ABANDONED_MAX = 256  # requests given up on one link; a broker that answers none of them is as good as gone
_WRITE_WAIT_S = 0.05  # a follower with unsent bytes looks this often whether it can help


class Pending(Protocol):
    """Who is told about the answer to one request; called by whichever thread reads."""

    def answered(self, code: int, body: bytes) -> None:
        """The broker's answer."""

    def lost(self, error: TxmqError) -> None:
        """There will be none; whether the request was executed is not known."""


class Waiter:
    """Something one thread can wait for.

    Attributes:
        done: it has happened.
        nudged: the thread is to come back and look what else there is to do; it resets this itself.
    """

    __slots__ = ("__weakref__", "done", "nudged", "signal")

    def __init__(self) -> None:
        self.done = self.nudged = False
        self.signal = Signal()

    def nudge(self) -> None:
        """Have the thread come back from ``Link.wait``."""
        self.nudged = True
        self.signal.set()

    def finish(self) -> None:
        """It has happened."""
        self.done = True
        self.signal.set()


class Reply(Waiter):
    """One request's answer, to be waited for."""

    __slots__ = ("_body", "_code", "_deadline", "_error", "_link", "opaque")

    def __init__(self, link: Link, deadline: float) -> None:
        super().__init__()
        self._link, self._deadline = link, deadline
        self._code, self._body = 0, b""
        self._error: TxmqError | None = None
        self.opaque = b""

    def answered(self, code: int, body: bytes) -> None:
        """See ``Pending``."""
        self._code, self._body = code, body
        self.finish()

    def lost(self, error: TxmqError) -> None:
        """See ``Pending``."""
        self._error = error
        self.finish()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the answer; its body.

        Args:
            timeout: seconds from now; by default what the request was given.

        Raises:
            BrokerError: the broker refused; its class says why.
            ConnectionLostError, RequestTimeoutError: whether the request was executed is not known.
        """
        link = self._link
        if not self.done:
            link.wait(self, self._deadline if timeout is None else link.clock.monotonic() + timeout)
        if not self.done and timeout is None:
            link.abandon(self.opaque)
        if not self.done:
            raise RequestTimeoutError(f"no answer from {link.address} in time")
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._code != 200:
            raise broker_error(self._code, self._body)
        return self._body


class _Nobody:
    """Takes the answers that were given up."""

    def answered(self, code: int, body: bytes) -> None:
        """Too late."""

    def lost(self, error: TxmqError) -> None:
        """Nobody waits."""


_NOBODY = _Nobody()


class Link:
    """See the module's docstring.

    Attributes:
        failure: what ended it, or None.
        session: the session that ``hello`` bound it to, or None.
        used_at: monotonic time of the last request.
    """

    def __init__(self, stream: Stream, clock: Clock, address: str) -> None:
        self.clock, self.address = clock, address
        self.failure: TxmqError | None = None
        self.session: Session | None = None
        self.used_at = clock.monotonic()
        self._stream = stream
        self._answers = AnswerReader()
        self._pending: dict[bytes, Pending] = {}
        self._abandoned = 0
        self._numbers = count(1)
        self._out: deque[Buffer] = deque()
        self._sending, self._reading = Lock(), Lock()
        self._followers: dict[Waiter, None] = {}
        self._send_error: OSError | None = None

    # --- requests ----------------------------------------------------------------------------------------------------

    def request(
        self, deadline: float, verb: str, *arguments: Word,
        extensions: Mapping[str, Word | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> Reply:  # fmt: skip
        """Send a request; its answer is awaited with ``Reply.result``. Raises the link's failure: nothing was sent."""
        reply = Reply(self, deadline)
        reply.opaque = b"%x" % next(self._numbers)
        self._start(
            reply,
            reply.opaque,
            commands.request(verb, *arguments, extensions=extensions, body=body, opaque=reply.opaque),
        )
        if self._out:
            self.push(deadline)
        return reply

    def put(self, pending: Pending, topic: bytes, partition: int, batch: bytearray) -> None:
        """Send one batch. Raises the link's failure: nothing was sent."""
        opaque = b"%x" % next(self._numbers)
        self._start(pending, opaque, [commands.put_line(topic, partition, len(batch), opaque), batch])

    def _start(self, pending: Pending, opaque: bytes, buffers: Sequence[Buffer]) -> None:
        with self._sending:
            if self.failure is not None:
                raise type(self.failure)(*self.failure.args)
            self._pending[opaque] = pending
            self._out.extend(buffers)
            self._flush()

    def _flush(self) -> None:
        """Write what the socket takes; the caller holds ``_sending``."""
        out = self._out
        try:
            while out and self._send_error is None:
                taken = self._stream.send(out)
                if not taken:
                    return
                self._drop_sent(taken)
        except OSError as error:
            # The reader finds the end of the stream and tells everybody: here the caller may hold locks of its own.
            self._send_error = error
            out.clear()
            self._stream.shut_down()

    def _drop_sent(self, taken: int) -> None:
        out = self._out
        while taken:
            first = memoryview(out[0]).cast("B")
            if taken < len(first):
                out[0] = first[taken:]
                return
            taken -= len(first)
            out.popleft()

    def abandon(self, opaque: bytes) -> None:
        """Nobody waits for this answer any more."""
        if self._pending.pop(opaque, None) is None:
            return
        self._pending[opaque] = _NOBODY
        self._abandoned += 1
        if self._abandoned > ABANDONED_MAX:
            self.fail(ConnectionLostError(f"{self.address} left {ABANDONED_MAX} requests unanswered"))

    # --- answers -----------------------------------------------------------------------------------------------------

    def wait(self, waiter: Waiter, deadline: float) -> None:
        """Read answers, or sleep while another does, until ``waiter`` is done or nudged, the link fails, time is up."""
        while not waiter.done and not waiter.nudged and self.failure is None:
            if self._reading.acquire(blocking=False):
                self._lead(waiter, deadline)
            else:
                self._follow(waiter, deadline)
            if not waiter.done and self.clock.monotonic() >= deadline:
                return

    def take_arrived(self) -> None:
        """Read what has arrived, without waiting; nothing if another thread reads."""
        if self._reading.acquire(blocking=False):
            try:
                if self.failure is None and self._stream.wait(0.0, writable=bool(self._out)):
                    self._exchange()
            finally:
                self._step_down()

    def push(self, deadline: float) -> None:
        """Wait until all that was sent is with the system, reading answers meanwhile. Not from a callback."""
        while self._out and self.failure is None:
            remaining = min(deadline - self.clock.monotonic(), _WRITE_WAIT_S)
            if remaining <= 0:
                return
            if self._reading.acquire(blocking=False):
                try:
                    if self.failure is None and self._stream.wait(remaining, writable=True):
                        self._exchange()
                finally:
                    self._step_down()
            else:
                self._write_on(remaining)

    def _write_on(self, timeout: float) -> None:
        """Write when there is room, beside a leader who may be waiting for answers only."""
        self._stream.wait_writable(timeout)
        with self._sending:
            self._flush()

    @property
    def has_unsent(self) -> bool:
        """Whether the system has not taken all yet; see ``push``."""
        return bool(self._out)

    def is_stale(self) -> bool:
        """Whether an idle link turns out to have ended; to be asked before it is used again after a while."""
        if not self._pending and not self._stream.is_quiet():
            self.take_arrived()
        return self.failure is not None

    def _lead(self, waiter: Waiter, deadline: float) -> None:
        try:
            while not waiter.done and not waiter.nudged and self.failure is None:
                remaining = deadline - self.clock.monotonic()
                if remaining <= 0:
                    return
                if self._stream.wait(remaining, writable=bool(self._out)):
                    self._exchange()
        finally:
            self._step_down()

    def _follow(self, waiter: Waiter, deadline: float) -> None:
        self._followers[waiter] = None
        try:
            # Listed first, tried again second: a leader that steps down in between sees us or leaves the lock.
            if self._reading.acquire(blocking=False):
                self._lead(waiter, deadline)
                return
            remaining = deadline - self.clock.monotonic()
            if self._out:
                self._write_on(min(remaining, _WRITE_WAIT_S))
            else:
                waiter.signal.wait(remaining)
        finally:
            self._followers.pop(waiter, None)
            # The call to lead may have come to one that was done, or out of time: it goes on to the next.
            if self._followers and self._reading.acquire(blocking=False):
                self._step_down()

    def _step_down(self) -> None:
        if self.failure is not None:
            self._stream.close()
        self._reading.release()
        if self._followers:
            for follower in list(self._followers):
                follower.signal.set()
                if self.failure is None:
                    return

    def _exchange(self) -> None:
        """Write and read once; the caller holds ``_reading``."""
        if self._out:
            with self._sending:
                self._flush()
        try:
            arrived = self._stream.receive()
            if arrived is None:
                return
            if not arrived:
                self.fail(ConnectionLostError(self._end_text()))
                return
            self._dispatch(arrived)
        except OSError as error:
            self.fail(ConnectionLostError(f"connection to {self.address} lost: {error}"))
        except RemoteProtocolError as error:
            self.fail(error)
        except BaseException:
            # Interrupted between reading an answer and telling it: what was read is gone, so all of it is.
            self.fail(ConnectionLostError("interrupted while reading answers"))
            raise

    def _dispatch(self, arrived: memoryview) -> None:
        pop = self._pending.pop
        for code, opaque, body, _ in self._answers.feed(arrived):
            pending = pop(opaque, None)
            if pending is not None:
                if pending is _NOBODY:
                    self._abandoned -= 1
                pending.answered(code, body)
            elif self.failure is None:
                # A token of ``-`` comes before the broker closes; any other is not ours.
                self.fail(RemoteProtocolError(f"{self.address} answered {opaque!r}: {body[:200]!r}"))
        if self._answers.failure is not None:
            self.fail(self._answers.failure)

    def _end_text(self) -> str:
        if self._send_error is not None:
            return f"connection to {self.address} lost: {self._send_error}"
        return f"{self.address} closed the connection"

    # --- ends --------------------------------------------------------------------------------------------------------

    def fail(self, error: TxmqError) -> None:
        """End the link; every unanswered request is told."""
        with self._sending:
            if self.failure is not None:
                return
            self.failure = error
            unanswered = list(self._pending.values())
            self._pending.clear()
            self._out.clear()
        self._stream.shut_down()
        if self._reading.acquire(blocking=False):  # else the leader closes when it steps down
            self._step_down()
        for pending in unanswered:
            pending.lost(error)

    def forget(self) -> None:
        """In a forked child: give back the descriptor and nothing else; the parent goes on using the conversation."""
        self.failure = ConnectionLostError("the connection belongs to the parent process")
        self._stream.close()
