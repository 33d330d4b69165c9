"""The broker's sockets, threads and clock: the shell around the core and the commit pipeline.

One event loop (uvloop if it is installed). The requests of one read go through the core at once. Their group is
committed at the end of the loop's iteration, together with the requests of other connections
(``commit/pipeline.py`` says in which steps; this module runs them). ``Step.thread`` names the thread: the loop itself,
the one that writes the journal (``commit/journal_schedule.py`` chooses between these two), the one that writes
partition files, or the one for checkpoints and upkeep.

*Stalls.* ``LoopStalls`` keeps the longest time in the last minute that the loop took nothing up. Two things are seen: a
timer that fires late, and a callback that takes long. The time that the loop's thread waited for a processor since the
last timer is told apart; the rest is the broker's own: its work, and its waits for the disk and the interpreter's lock.

Invariants:
    * an answer is handed to the socket when the pipeline has released it, before the next step;
    * a journal that fails ends the broker: waiters get 503 (outcome unknown), nothing is retried;
    * ``stopped`` is set when no thread is at the files any more: with it the data directory's lock goes;
    * every queue is bounded: bodies by one byte budget, groups by ``QUEUED_BYTES_MAX`` (then nothing is read), answers
      by another one (``answer_budget``) and, each connection's, by the transport's high-water mark (then that one is
      not read, and dropped after ``write_timeout_ms``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.commit.data_directory import Store
from txmq.broker.commit.pipeline import CommitPipeline
from txmq.broker.commit.retention import DIFFERS_MS, RetentionClock, retire
from txmq.broker.commit.steps import LOOP, Step, StepThread
from txmq.broker.context import Read
from txmq.broker.core import Core
from txmq.broker.shell.answer_budget import AnswerBudget
from txmq.broker.shell.connection import Connection
from txmq.broker.shell.interbroker_links import InterbrokerLinks
from txmq.broker.shell.leader_link import LeaderLink
from txmq.broker.shell.reads import Reads
from txmq.broker.shell.replica_feeds import ReplicaFeeds
from txmq.broker.shell.throttle import Admission, Throttle
from txmq.broker.shell.tls_transport import BrokerTls, TlsTransport
from txmq.broker.state.deadlines import TICK_MS
from txmq.broker.verbs.access.audit_log import WARNINGS
from txmq.config import BrokerSettings
from txmq.errors import StorageError
from txmq.protocol.requests import ByteBudget
from txmq.runtime.clocks import SteadyClock
from txmq.runtime.logging import get_logger
from txmq.runtime.os_process import ProcessorWaits
from txmq.runtime.ports import Clock

if TYPE_CHECKING:
    from txmq.broker.shell.cluster_membership import RegistrySessionLoop

log = get_logger()
STOP_LINGER_S = 2.0  # for the last answers of a clean stop
QUEUED_BYTES_MAX = 32 << 20
CLOSED_A_TURN = 100  # each some 0.1 ms: thousands of handshakes may be over in one moment
READS_A_TURN = 500  # one message may wake 10,000 polls of each of many connections
STALL_NOTICED_S: Final = 0.002
STALL_WINDOW_S: Final = 60.0
_STALL_SLOT_S: Final = 10.0


class Server:
    """One broker that serves. Create, ``start``, await ``stopped``; ``stop`` ends it cleanly."""

    def __init__(
        self, core: Core, store: Store, settings: BrokerSettings, clock: SteadyClock, tls: BrokerTls | None = None
    ) -> None:
        self.core, self.store, self.settings = core, store, settings
        self.clock: Clock = clock
        self._ahead_ms = clock.ahead_ms
        self._tls = tls
        self.context = core.context
        self.pipeline = CommitPipeline(core, store, settings, clock)
        self.budget = ByteBudget(settings.memory_request_bytes_max)
        self.answers = AnswerBudget(settings.memory_answer_bytes_max)
        self.admission = Admission(settings)
        self.throttle = Throttle(core.state.principals)
        self.connections: set[Connection] = set()
        self.stopped: asyncio.Future[BaseException | None]
        self._loop: asyncio.AbstractEventLoop
        self._pools: dict[StepThread, ThreadPoolExecutor] = {
            thread: ThreadPoolExecutor(1, f"txmq-{thread.value}")
            for thread in StepThread
            if thread is not StepThread.LOOP
        }
        self._reads = Reads(core, store.files, self.throttle, clock, self._from_thread, self._flush)
        self._listeners: list[asyncio.Server] = []
        self.registry: RegistrySessionLoop | None = None  # of a broker that has one
        self._feeds = ReplicaFeeds(core, store, self._from_thread, self._flush)
        self.leader: LeaderLink | None = None  # of a replica
        self._homes: InterbrokerLinks | None = None
        if core.context.cluster is not None:
            self._homes = InterbrokerLinks(
                core, clock, self._schedule, self.fail, None if tls is None else tls.to_brokers
            )
        self._judged: list[Connection] = []  # whose deadlines are looked at still
        self.paused = False
        self._scheduled = self._failed = False
        self._processor_waits: ProcessorWaits
        self._stalls: LoopStalls
        self._tick_at = inf  # when it is due; the first is not judged, a start takes what it takes
        self._jobs = 0  # in threads
        self._ending: tuple[BaseException | None] | None = None  # with what error, from the first moment on
        self._wakes_at = inf
        self._alarm: asyncio.TimerHandle | None = None
        self._retention_at = 0.0
        self._retention_clock = RetentionClock(clock)
        self._is_clock_set = self._is_held_up = False
        self._timer: asyncio.TimerHandle | None = None

    # --- start and end -------------------------------------------------------------------------------------------

    async def start(
        self, host: str, port: int, backlog: int = 1024, *, plaintext_at: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """Listen. Returns the real address.

        Args:
            plaintext_at: with TLS, where connections without it are taken; the same address takes both.
        """
        self._loop = asyncio.get_running_loop()
        self.stopped = self._loop.create_future()
        self._loop.set_exception_handler(self._unexpected)
        takes_both = plaintext_at == (host, port)
        await self._listen(lambda: self._met(takes_plaintext=takes_both), host, port, backlog)
        if plaintext_at is not None and not takes_both:
            await self._listen(lambda: Connection(self), *plaintext_at, backlog)
        now = self.clock.monotonic()
        self._retention_at = now + self.settings.retention_check_interval_ms / 1000
        self._processor_waits = ProcessorWaits()
        self._stalls = LoopStalls(self._processor_waits.total_s)
        self._timer = self._loop.call_later(TICK_MS / 1000, self._tick)
        self._watch_disk()
        address = self._listeners[0].sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def _listen(self, accept: Callable[[], asyncio.BufferedProtocol], host: str, port: int, backlog: int) -> None:
        try:
            self._listeners.append(await self._loop.create_server(accept, host, port, backlog=backlog))
        except OSError:
            self._close_listeners()
            raise

    def _met(self, *, takes_plaintext: bool) -> asyncio.BufferedProtocol:
        if self._tls is None:
            return Connection(self)
        return TlsTransport(self, self._tls.to_clients.session(), takes_plaintext=takes_plaintext)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _unexpected(self, _loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        """A defect in a callback: state and journal may differ, so the broker stops; the restart reads the journal.

        Not one in what a connection's protocol does with its bytes: it ends that connection. What reaches the core is
        guarded there (``Connection``, ``InterbrokerLinks``), and stops the broker.
        """
        error = told.get("exception")
        if isinstance(error, OSError) and error.errno in (
            errno.ECONNRESET,
            errno.EPIPE,
            errno.ETIMEDOUT,
            errno.ENOTCONN,
        ):
            return
        if told.get("protocol") is not None and told.get("transport") is not None:
            log.error("connection closed: what it sent could not be read", error=repr(error), exc_info=error)
            told["transport"].abort()
            return
        self.fail(error if error is not None else RuntimeError(str(told.get("message"))))

    async def stop(self) -> None:
        """Stop cleanly: no new connections, everything accepted is committed and answered, a checkpoint is written."""
        self.context.stopping = self.pipeline.is_stopping = True
        self._close_listeners()
        self.core.tick(self.clock.now_ms())
        await self._drain()
        for connection in list(self.connections):
            connection.finish()
        await self._wait_for_connections()
        if self._timer is not None:
            self._timer.cancel()
        if self._homes is not None:
            self._homes.close()
        # The end of a connection rolls back what it streamed, which is journaled too: only now nothing more can come.
        await self._drain()
        self.pipeline.want_checkpoint()
        await self._drain()
        self._close(None)
        await self.stopped

    async def _drain(self) -> None:
        """Wait until everything accepted is forced, and no other thread is at the files."""
        self._pump()
        while not (self._failed or (self.pipeline.is_idle and not self.context.reads)):
            self._schedule()
            await asyncio.sleep(0.001)

    async def _wait_for_connections(self) -> None:
        """Let the last answers go out; a client that does not take them in time is cut off."""
        deadline = self.clock.monotonic() + STOP_LINGER_S
        while self.connections and not self._failed:
            if self.clock.monotonic() >= deadline:
                for connection in list(self.connections):
                    connection.cut()
            await asyncio.sleep(0.001)

    def fail(self, error: BaseException) -> None:
        """The journal or a file failed: answer every waiting request that the outcome is unknown, and end."""
        if self._failed:
            return
        self._failed = self.pipeline.has_failed = True
        log.error("failed; the broker stops, the restart reads what the disk holds", error=repr(error), exc_info=error)
        self._close_listeners()
        for connection in list(self.connections):
            connection.abandon()
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """End, when no thread writes to the files any more: only then may the lock of the data directory go."""
        if self._ending is None:
            self._ending = (error,)
            self._reads.close()
            self._feeds.close()
            if self._homes is not None:
                self._homes.close()
            if self.leader is not None:
                self.leader.close()
            for pool in self._pools.values():
                pool.shutdown(wait=False)
        self._end_if_quiet()

    def _end_if_quiet(self) -> None:
        if self._ending is not None and not self._jobs and not self.stopped.done():
            self.stopped.set_result(self._ending[0])

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make a call, in the order of the posts. For other threads."""
        self._from_thread(self._posted, call)

    def _posted(self, call: Callable[[], None]) -> None:
        if not self._failed:
            call()
            self._schedule()

    # --- called by connections ---------------------------------------------------------------------------------------

    def received(self) -> None:
        """Requests were taken in: commit and answer at the end of this iteration of the loop."""
        self._schedule()
        if not self.paused and self.context.queued_bytes() > QUEUED_BYTES_MAX:
            self.paused = True
            for connection in self.connections:
                connection.hold()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    # --- the path of a group -----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._scheduled = False
        if self._failed:
            return
        if self.context.moved:
            self.core.wake_memory()
        started = self.clock.monotonic()
        pipeline, context = self.pipeline, self.context
        if context.audited:  # before the record of what they tell of
            self._write_audit()
        while (step := pipeline.next_step(started)) is not None:
            if step.thread is not LOOP:
                self._run_in_thread(step)
                continue
            try:
                for part in step.parts():
                    part()
            except (OSError, StorageError) as error:
                self._step_failed(step, error)
                continue
            pipeline.done(step, started)
            if context.ready:
                for client in self.core.take_ready():
                    self._send(client)
        if self.paused and context.queued_bytes() < QUEUED_BYTES_MAX // 2:
            self.paused = False
            for connection in self.connections:
                connection.release()
        if context.followers.waiting:
            self._feeds.look()
        self._flush()
        if self.leader is not None:
            self.leader.tick()
        wake_at = pipeline.wake_at()
        if wake_at < self._wakes_at:
            self._wake_at(wake_at)
        elif wake_at == inf and self._alarm is not None:  # the group that waited has gone: a turn of the loop less
            self._alarm.cancel()
            self._alarm, self._wakes_at = None, inf
        now = self.clock.monotonic()
        if now - started >= STALL_NOTICED_S:
            self._stalls.worked(now, now - started)

    def _write_audit(self) -> None:
        lines, self.context.audited = self.context.audited, []
        for line in lines:
            (log.warning if line["event"] in WARNINGS else log.info)(audit=True, **line)

    def _run_in_thread(self, step: Step) -> None:
        self._jobs += 1
        done = partial(self._from_thread, self._ran_in_thread, step)
        self._pools[step.thread].submit(step.run).add_done_callback(done)

    def _ran_in_thread(self, step: Step, done: Future[None]) -> None:
        self._jobs -= 1
        error = done.exception()
        if error is not None:
            self._step_failed(step, error)
        elif not self._failed:
            self.pipeline.done(step, self.clock.monotonic())
            self._flush()
        self._pump()
        self._end_if_quiet()

    def _step_failed(self, step: Step, error: BaseException) -> None:
        if self.pipeline.failed(step, error, self.clock.monotonic()):
            self.fail(error)
        else:
            log.warning("no space or descriptors: tried again", step=type(step).__name__, error=str(error))

    def _wake_at(self, time: float) -> None:
        """Pump at that time at the latest."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._wakes_at = time
        delay_s = max(time - self.clock.monotonic(), 0.001)  # the loop counts in ms
        self._alarm = self._loop.call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._alarm, self._wakes_at = None, inf
        self._pump()

    # --- effects -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        core, context = self.core, self.context
        later: list[Read] = []
        while context.ready or context.reads or context.lookups:  # asked for first: mostly there is nothing
            reads = core.take_reads()
            later += reads[READS_A_TURN:]
            for read in reads[:READS_A_TURN]:
                self._reads.read(read)
            for lookup in core.take_lookups():
                self._reads.look_up(lookup)
            for client in core.take_ready():
                self._send(client)
        if context.closing:
            closing, context.closing = context.closing, []
            for client in closing:
                self._send(client)
        if later:
            context.reads = later
        if self.registry is not None:
            self._serve_registry(self.registry)
        for client in core.take_resumed():
            if isinstance(client.shell, Connection):
                client.shell.resumed()
        if self._homes is not None:
            self._homes.ask(core.take_branch_asks())
        answers = self.answers
        if later or ((answers.waiting or answers.is_fresh) and answers.turned()):
            self._schedule()

    def _serve_registry(self, registry: RegistrySessionLoop) -> None:
        asks = self.core.take_registry_asks()
        if asks:
            if self.context.audited:  # before what they tell of is done
                self._write_audit()
            registry.ask(asks)

    def _send(self, client: ClientConnection) -> None:
        connection = client.shell
        if isinstance(connection, Connection):
            connection.send()

    def _from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the broker has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._failed:
            return
        now = self.clock.monotonic()
        self._stalls.ticked(now, max(0.0, now - self._tick_at))
        self._next_tick(now)
        self._watch_disk()
        self._watch_clock()
        if not self._judged:
            self._judged = list(self.connections)
            self._check_deadlines()
        for taker in self.answers.stalled(self.context.liveness.now_ms):
            taker.cut_off()
        self.throttle.look()
        if self.throttle.waiting:
            self.throttle.turned(now)
        if self._homes is not None:
            self._homes.tick()
        self.core.tick(self.clock.now_ms(), is_reading=not self.paused)
        if self.context.followers.by_replica:
            self._feeds.tick()
        while self.context.alarms:
            log.error(**self.context.alarms.pop(0))
        if now >= self._retention_at and self.context.is_serving:
            self._retention_at = now + self.settings.retention_check_interval_ms / 1000
            retire(self.context.state, self.context.group_with_room, self._retention_clock.now_ms())
        self._schedule()
        ended = self.clock.monotonic()
        self._stalls.worked(ended, ended - now)

    def _check_deadlines(self) -> None:
        """Judge all that remain; once CLOSED_A_TURN of them are closed, the others have their turn first."""
        judged, closed = self._judged, 0
        while judged and closed < CLOSED_A_TURN and not self._failed:
            connection = judged.pop()
            closed += connection in self.connections and connection.check_deadlines()
        if judged:
            self._loop.call_soon(self._check_deadlines)

    def _next_tick(self, now: float) -> None:
        self._tick_at = now + TICK_MS / 1000
        self._timer = self._loop.call_later(TICK_MS / 1000, self._tick)

    def _watch_clock(self) -> None:
        ahead_ms = self._ahead_ms()
        is_set = abs(ahead_ms) > DIFFERS_MS
        if is_set != self._is_clock_set:
            self._is_clock_set = is_set
            log.warning(
                "the machine's clock was set: the broker's follows, and retention goes by the earlier one" if is_set
                else "the broker's clock is the machine's again", ahead_ms=ahead_ms,
            )  # fmt: skip

    def _watch_disk(self) -> None:
        free = self.store.disk.free_bytes()
        lacking, full = self.store.lacking, self.store.is_full(free, self.settings.disk_free_bytes_min)
        if (lacking is not None) != self._is_held_up:
            self._is_held_up = lacking is not None
            log.warning(
                "partition files cannot be written: what comes is kept in the journal and in memory" if lacking
                else "partition files are written again", error=str(lacking),
            )  # fmt: skip
        if full != self.context.disk_full:
            self.context.disk_full = full
            log.warning(
                "new messages are refused: the disk is nearly full, partition files cannot be written, or the journal "
                "cannot begin its next file" if full else "new messages are taken again",
                free_bytes=free, unapplied_bytes=self.store.unapplied_bytes,
            )  # fmt: skip
        self.context.shell_figures = {
            "disk_free_bytes": free,
            "unapplied_bytes": self.store.unapplied_bytes,
            "sync_ms_recent": round(self.pipeline.journal_thread.sync_ms, 3),
            "journal_lsn": self.store.journal.next_lsn,
            "journal_bytes_since_checkpoint": self.store.journal.next_lsn - self.store.checkpoint_lsn,
            "request_bytes_in_memory": self.budget.used,
            "answer_bytes_in_memory": self.answers.used,
            "answer_bytes_in_memory_max": self.answers.used_max,
            "connections_refused": self.admission.refused,
            "delayed_by_quota": self.throttle.delayed,
            "delayed_by_quota_ms": round(self.throttle.delayed_s * 1000),
            "delayed_by_quota_now": self.throttle.waiting,
            "refused_by_quota": self.throttle.refused,
            "clock_ahead_ms": self._ahead_ms(),
            **self._stalls.figures(),
        }


class LoopStalls:
    """Maxima by slots of ten seconds; the oldest slot is partly out of the window.

    Args:
        processor_waits_s: how long the loop's thread has waited for a processor so far.
    """

    def __init__(self, processor_waits_s: Callable[[], float]) -> None:
        self._waits_s = processor_waits_s
        self._waited_s = processor_waits_s()  # at the last tick
        self._slots: deque[list[float]] = deque()  # number, longest, longest without waits for a processor

    def ticked(self, now: float, late_s: float) -> None:
        """The timer fired so late."""
        waited_s, self._waited_s = self._waited_s, self._waits_s()
        self._saw(now, late_s, self._waited_s - waited_s)

    def worked(self, now: float, took_s: float) -> None:
        """A callback took so long; nothing is noted below ``STALL_NOTICED_S``."""
        if took_s >= STALL_NOTICED_S:
            self._saw(now, took_s, self._waits_s() - self._waited_s)

    def _saw(self, now: float, stall_s: float, waited_s: float) -> None:
        number, own_s = now // _STALL_SLOT_S, max(0.0, stall_s - waited_s)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append([number, stall_s, own_s])
            while self._slots[0][0] < number - STALL_WINDOW_S / _STALL_SLOT_S:
                self._slots.popleft()
            return
        newest = self._slots[-1]
        newest[1], newest[2] = max(newest[1], stall_s), max(newest[2], own_s)

    def figures(self) -> dict[str, float]:
        """For ``stats``, in ms."""
        return {
            "loop_stall_ms_max": round(max((slot[1] for slot in self._slots), default=0.0) * 1000, 1),
            "loop_stall_own_ms_max": round(max((slot[2] for slot in self._slots), default=0.0) * 1000, 1),
        }
