"""One live conversation with a broker, shared by threads; no thread of its own.

Theory of operation.

*Waiting* (leader and followers). A thread that waits for something becomes the *leader* and reads answers for
everybody until its own has come; the others (*followers*) are listed and sleep. So a lone caller sends
and reads the socket itself: no hand-over between threads on its way (0.03 ms a round trip less than through a reader).
Followers whose answers one read brought wake each other in turn: the leader wakes the first, and whoever leaves the
list wakes the next; the last of them, where nobody reads any more, wakes one to lead. All of them at once would fight
for the interpreter's lock, which only one can have (24 us a hand-over between 64 threads; in turn 14).

*Sending*. A request is put into ``_out``; whoever finds the sending lock free writes what is there, his own and that of
threads that come meanwhile, in one piece; the others go on to wait. While followers are being woken one after another,
who are likely to send again, requests are held back, ``HELD_BACK_MAX`` at most: whoever takes the last name from the
list of those to be woken writes them (64 threads: a write for 5 transactions instead of 1.3).

Nothing here blocks while it holds a lock: what the socket does not take at once stays (``_stuck``), and whoever waits
writes it on. A callback (``Pending``) may therefore send.

Invariants:
    * Every request that ``start`` took is told exactly once: ``answered``, or ``lost`` with the link's failure. Where a
      KeyboardInterrupt struck while it was told, it is told ``lost`` too.
    * A link that failed stays failed; another one is made by ``connection``.
    * A broker's answer to a request nobody waits for any more (``abandon``) is taken and dropped.
    * A KeyboardInterrupt leaves no lock behind: what is held is held by ``with``, or is an attribute that a ``finally``
      gives back before any call (CPython raises it behind calls, so behind ``acquire``, too).
    * A follower in the list has a signal to come: where somebody is to be woken, a thread is awake that passes it on,
      because everybody who leaves the list, however it came to that, calls ``_pass_on``. A KeyboardInterrupt right in
      there could break the chain: therefore nobody sleeps longer than ``SLEEP_S_MAX`` without looking again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count

from txmq.client.transport.broken_answer import BrokenAnswerError
from txmq.client.transport.reply import Pending, Reply, Waiter
from txmq.client.transport.session import ClientSession
from txmq.errors import ConnectionLostError, RemoteProtocolError, TxmqError
from txmq.protocol import commands
from txmq.protocol.answers import AnswerReader
from txmq.protocol.commands import Stated, Word
from txmq.runtime.net import BUFFERS_PER_SEND_MAX, SLEEP_S_MAX
from txmq.runtime.ports import Buffer, Clock, Stream
from txmq.runtime.threads import Lock

HELD_BACK_MAX = 8  # requests that wait to be written with those of threads about to wake up
ABANDONED_MAX = 256  # requests given up on one link; a broker that answers none of them is as good as gone
_JOINED_SIZE_BYTES_MAX = 16 << 10  # copying that much costs less than telling the system of many pieces
_WRITE_WAIT_S = 0.05  # a follower with unsent bytes looks this often whether it can help


class Connection:
    """See the module's docstring.

    Attributes:
        failure: what ended it, or None.
        session: the session that ``hello`` bound it to, or None.
        used_at: monotonic time just before the last request.
        lived_at: monotonic time at which the broker lived: what was sent then, or later, is answered.
    """

    def __init__(self, stream: Stream, clock: Clock, address: str) -> None:
        self.clock, self.address = clock, address
        self.failure: TxmqError | None = None
        self.session: ClientSession | None = None
        self.used_at = self.lived_at = clock.monotonic()
        self._stream = stream
        self._answers = AnswerReader()
        self._pending: dict[bytes, tuple[Pending, float]] = {}  # and what ``used_at`` was
        self._abandoned: set[bytes] = set()
        self._numbers = count(1)
        self._out: deque[Sequence[Buffer]] = deque()  # requests nobody has begun to write
        self._rest: list[Buffer] = []  # begun; of whoever holds ``_sending``
        self._stuck = False  # the system takes no more for now
        self._sending = Lock()
        self._leading = Lock()  # held for a moment, to become the leader
        self._leader: object = None  # who reads
        self._answering: tuple[Pending, float] | None = None  # whose answer is being told
        self._followers: dict[Waiter, bool] = {}
        self._woken: deque[Waiter] = deque()  # followers that were answered, to be woken in turn
        self._send_error: BaseException | None = None

    # --- requests ----------------------------------------------------------------------------------------------------

    def request(
        self, deadline: float, verb: str, *arguments: Word,
        extensions: Mapping[str, Word | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> Reply:  # fmt: skip
        """Send a request; its answer is awaited with ``Reply.result``. Raises the link's failure: nothing was sent."""
        opaque = b"%x" % next(self._numbers)
        reply = Reply(self, deadline, opaque)
        self._start(reply, opaque, commands.request(verb, *arguments, extensions=extensions, body=body, opaque=opaque))
        if self._stuck:
            self.push(deadline)
        return reply

    def start(
        self, pending: Pending, verb: str, *arguments: Word, extensions: Mapping[str, Word | None] | None = None
    ) -> None:
        """Send a request whose answer is told to ``pending``. Raises the link's failure: nothing was sent."""
        opaque = b"%x" % next(self._numbers)
        self._start(pending, opaque, commands.request(verb, *arguments, extensions=extensions, opaque=opaque))

    def transaction(self, deadline: float, head: str, stated: Stated, body: Sequence[Buffer] | None) -> Reply:
        """``request`` for the hot path of transactions; see ``commands.transaction_line``."""
        opaque = b"%x" % next(self._numbers)
        reply = Reply(self, deadline, opaque)
        length = None if body is None else sum(map(len, body))
        self._start(reply, opaque, (commands.transaction_line(head, stated, length, opaque), *(body or ())))
        if self._stuck:
            self.push(deadline)
        return reply

    def put(self, pending: Pending, topic: bytes, partition: int, batch: bytearray) -> None:
        """Send one batch. Raises the link's failure: nothing was sent."""
        opaque = b"%x" % next(self._numbers)
        self._start(pending, opaque, (commands.put_line(topic, partition, len(batch), opaque), batch))

    def _start(self, pending: Pending, opaque: bytes, buffers: Sequence[Buffer]) -> None:
        self._pending[opaque] = pending, self.used_at
        # Listed first, looked second: ``fail`` either finds it in the list and tells it, or is seen here.
        if self.failure is not None and self._pending.pop(opaque, None) is not None:
            raise type(self.failure)(*self.failure.args)
        try:
            self._out.append(buffers)
            # Appended first, looked second: who empties the list of those to be woken looks at ``_out`` behind that.
            if not self._woken or len(self._out) >= HELD_BACK_MAX:
                self._flush()
        except BaseException as error:
            # Interrupted: else it might go out when its sender has long given it up.
            self._give_up_sending(error)
            raise

    def _flush(self) -> None:
        """Write what the system takes, unless another thread is at it, which then writes ours too."""
        while self._out and not self._sending.locked():
            with self._sending:  # if somebody was faster, for as long as a write takes, which does not block
                self._write()
            # Looked at again behind the release: who came in between found the lock taken and went to wait.
            if self._stuck:
                return

    def _write(self) -> None:
        """Write until all is written or the system takes no more; the caller holds ``_sending``."""
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
                taken = self._stream.send(rest)
                if taken == size:
                    rest.clear()
                    continue
                _drop(rest, taken)
                if rest:
                    self._stuck = True
                    return
        except OSError as error:
            # The reader finds the end of the stream and tells everybody: here the caller may hold locks of its own.
            self._give_up_sending(error)
        except BaseException as error:
            # Interrupted: how much of a request has been written is not known, so no other can follow it.
            self._give_up_sending(error)
            raise

    def _give_up_sending(self, error: BaseException) -> None:
        self._send_error, self._stuck = error, False
        self._out.clear()
        self._rest.clear()
        self._stream.shut_down()

    def abandon(self, opaque: bytes) -> None:
        """Nobody waits for this answer any more."""
        self._abandoned.add(opaque)
        if opaque not in self._pending:  # it came meanwhile
            self._abandoned.discard(opaque)
        elif len(self._abandoned) > ABANDONED_MAX:
            self.fail(ConnectionLostError(f"{self.address} left {ABANDONED_MAX} requests unanswered"))

    # --- answers -----------------------------------------------------------------------------------------------------

    def wait(self, waiter: Waiter, deadline: float) -> None:
        """Read answers, or sleep while another does, until ``waiter`` is done or nudged, the link fails, time is up."""
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
        """Wait until all that was sent is with the system, reading answers meanwhile. Not from a callback."""
        while self._stuck and self.failure is None:
            remaining = min(deadline - self.clock.monotonic(), _WRITE_WAIT_S)
            if remaining <= 0:
                return
            if self._leader is None:
                self._read_once(remaining)
            else:
                self._write_on(remaining)

    def _write_on(self, timeout: float) -> None:
        """Write when there is room, beside a leader who may be waiting for answers only."""
        if self._stream.wait_writable(timeout):
            self._write_stuck()

    def _write_stuck(self) -> None:
        if not self._sending.locked():
            with self._sending:
                self._write()
        self._flush()

    @property
    def has_unsent(self) -> bool:
        """Whether the system has not taken all yet; see ``push``."""
        return self._stuck

    def is_stale(self) -> bool:
        """Whether the link turns out to have ended, if nobody reads it; to be asked before it is used after a while."""
        while self._leader is None and self.failure is None and not self._stream.is_quiet():
            self.take_arrived()  # the end stands behind answers that nobody waited for
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
            # Listed first, looked second: whoever ends the wait, or stops reading, in between sees us or is seen.
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
        """For ``Reply``, from a callback: its answer has come."""
        if waiter in self._followers:  # else its thread has not gone to sleep, and looks before it does
            self._woken.append(waiter)

    def _pass_on(self) -> None:
        """Wake the next follower that was answered; where there is none and nobody reads, one to lead."""
        woken, followers = self._woken, self._followers
        while woken:
            try:
                waiter = woken.popleft()
            except IndexError:  # another thread took the last
                break
            if followers.pop(waiter, False):  # else it left by itself, and passed on
                waiter.signal.set()
                if not woken and self._out:
                    self._flush()
                return
        if self._out:
            self._flush()
        if followers and self._leader is None:
            try:
                waiter, _ = followers.popitem()  # the latest: likely to be answered last, and so to lead for longest
            except KeyError:
                return
            waiter.signal.set()

    def _has_stepped_down(self) -> None:
        if self.failure is not None:
            self._close()
        self._pass_on()

    def _close(self) -> None:
        """Give the descriptor back, once and when nobody uses it any more: a leader does it when it steps down."""
        with self._leading:
            if self._leader is not None:
                return
            self._leader = self  # for good
        with self._sending:
            self._stream.close()

    def _exchange(self, timeout: float) -> None:
        """Write what is stuck and read once, waiting up to ``timeout`` seconds; the caller is the leader."""
        try:
            if self._out:
                self._flush()
            if self._stuck:
                if not self._stream.wait(timeout, writable=True):
                    return
                self._write_stuck()
                timeout = 0.0
            arrived = self._stream.receive(timeout)
            if arrived:
                self._dispatch(arrived)
            elif arrived is not None:
                self.fail(ConnectionLostError(self._end_text()))
        except OSError as error:
            self.fail(ConnectionLostError(f"connection to {self.address} lost: {error}"))
        except RemoteProtocolError as error:
            self.fail(BrokenAnswerError(*error.args))
        except BaseException:
            # Interrupted between reading an answer and telling it: what was read is gone, so all of it is.
            lost = ConnectionLostError("interrupted while reading answers")
            self.fail(lost)
            if self._answering is not None:
                self._answering[0].lost(lost)
            raise

    def _dispatch(self, arrived: memoryview) -> None:
        pop = self._pending.pop
        for code, opaque, body, _ in self._answers.feed(arrived):
            self._answering = self._pending.get(opaque)
            asked = pop(opaque, None)
            if asked is not None:
                pending, self.lived_at = asked  # not the time of reading: an answer outlives a broker that freezes
                if self._abandoned:
                    self._abandoned.discard(opaque)
                pending.answered(code, body)
            elif self.failure is None:
                # A token of ``-`` comes before the broker closes; any other is not ours.
                self.fail(BrokenAnswerError(f"{self.address} answered {opaque!r}: {body[:200]!r}"))
        self._answering = None
        if self._answers.failure is not None:
            self.fail(BrokenAnswerError(*self._answers.failure.args))

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
            self._stuck = False
            self._out.clear()
            self._rest.clear()
        self._stream.shut_down()
        self._close()
        for opaque in list(self._pending):
            asked = self._pending.pop(opaque, None)
            if asked is not None:
                asked[0].lost(error)
        for follower in list(self._followers):
            follower.signal.set()

    def forget(self) -> None:
        """In a forked child: give back the descriptor and nothing else; the parent goes on using the conversation."""
        self.failure = ConnectionLostError("the connection belongs to the parent process")
        self._stream.close()


def _drop(buffers: list[Buffer], taken: int) -> None:
    """Take the first ``taken`` bytes away."""
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
