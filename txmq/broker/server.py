"""The broker's sockets and its clock: the shell around the core.

One event loop (uvloop where there is one). What one read brought goes through the core at once; what it left in the
group is committed at the end of the loop's iteration, together with what other connections brought meanwhile.

*Who syncs.* The loop itself when the group is small (``inline_sync_size_bytes``) and recent syncs were fast
(``inline_sync_ms``): a hop to the writer thread and back costs more than the sync (p50 0.11 ms against 0.20; beside a
database that syncs the same disk, so that ours take 0.3 to 0.9 ms, 8 threads' XA transactions cost the broker 0.35 ms
of processor time each against 0.43, last-resource ones 0.29 against 0.43, under load). Otherwise the one writer
thread, so that a slow disk never stops reading and answering. Only one group is in flight at a time;
everything that arrives meanwhile is the next group, which is what makes group commit.

Invariants:
    * journal, sync, reply: an answer is handed to the socket after its record is forced (or written, where ``sync``
      says so);
    * a journal that fails ends the broker: waiters are told 503 (outcome unknown), nothing is retried;
    * every queue is bounded: bodies by one byte budget, groups by ``QUEUED_BYTES_MAX`` (then nothing is read), answers
      by another one (``answer_budget``) and, each connection's, by the transport's high-water mark (then that one is
      not read, and dropped after ``write_timeout_ms``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from txmq.broker.answer_budget import AnswerBudget
from txmq.broker.busy_poll import BusyPoll
from txmq.broker.connection import Connection
from txmq.broker.core import Core
from txmq.broker.group import Group
from txmq.broker.liveness import TICK_MS
from txmq.broker.patience import Patience
from txmq.broker.peer import Peer
from txmq.broker.reads import Reads
from txmq.broker.store import PendingCheckpoint, Store
from txmq.config import BrokerSettings
from txmq.errors import StorageError
from txmq.protocol.requests import ByteBudget
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.processor import preemptions

log = get_logger()
STOP_LINGER_S = 2.0  # for the last answers of a clean stop
QUEUED_BYTES_MAX = 32 << 20
INLINE_WRITE_SIZE_BYTES = 1 << 20  # into the page cache, without a sync: 0.2 ms
BACKGROUND_SYNC_MS = 1000  # sync = never: readers see what was forced, so it is forced now and then all the same


class Server:
    """One broker that serves. Create, ``start``, await ``stopped``; ``stop`` ends it cleanly."""

    def __init__(self, core: Core, store: Store, settings: BrokerSettings, clock: Clock) -> None:
        self.core, self.store, self.settings, self.clock = core, store, settings, clock
        self.context = core.context
        self.budget = ByteBudget(settings.memory_request_bytes_max)
        self.answers = AnswerBudget(settings.memory_answer_bytes_max)
        self.connections: set[Connection] = set()
        self.stopped: asyncio.Future[BaseException | None]
        self._loop: asyncio.AbstractEventLoop
        self._busy_poll: BusyPoll
        self._patience: Patience
        self._writer = ThreadPoolExecutor(1, "txmq-writer")
        self._helper = ThreadPoolExecutor(1, "txmq-checkpoint")
        self._reads = Reads(core, store.files, self._from_thread, self._flush)
        self._listener: asyncio.Server | None = None
        self._scheduled = self._in_flight = self._failed = False
        self.paused = False
        self._sync_ms = 0.0  # of recent syncs, smoothed
        self._unsynced: list[Group] = []
        self._forced_before = False  # whether one of them but the newest must be forced
        self._unsynced_messages = 0
        self._sync_due_at = 0.0
        self._last_write_at = 0.0
        self._marked = False  # a mark behind the recovered tail, and the next journal file, are made when it is idle
        self._checkpoint: PendingCheckpoint | None = None
        self._checkpoint_after: Group | None = None
        self._checkpoint_at = 0.0
        self._retention_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, backlog: int = 1024) -> tuple[str, int]:
        """Listen. Returns the real address."""
        self._loop = asyncio.get_running_loop()
        window_s = self.settings.busy_poll_us / 1e6
        self._busy_poll = BusyPoll(window_s, self.clock.monotonic, self._loop.call_soon, preemptions)
        self._patience = Patience(self._loop.call_later, self._schedule)
        self.stopped = self._loop.create_future()
        self._loop.set_exception_handler(self._unexpected)
        self._listener = await self._loop.create_server(lambda: Connection(self), host, port, backlog=backlog)
        now = self.clock.monotonic()
        self._checkpoint_at = now + self.settings.checkpoint_interval_ms / 1000
        self._retention_at = now + self.settings.retention_check_interval_ms / 1000
        self._timer = self._loop.call_later(TICK_MS / 1000, self._tick)
        address = self._listener.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    def _unexpected(self, _loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        """A defect in a callback: state and journal may differ, so the broker stops; the restart reads the journal."""
        error = told.get("exception")
        if isinstance(error, OSError) and error.errno in (
            errno.ECONNRESET,
            errno.EPIPE,
            errno.ETIMEDOUT,
            errno.ENOTCONN,
        ):
            return
        self.fail(error if error is not None else RuntimeError(str(told.get("message"))))

    async def stop(self) -> None:
        """Stop cleanly: no new connections, everything accepted is committed and answered, a checkpoint is written."""
        self.context.stopping = True
        if self._listener is not None:
            self._listener.close()
        self.core.tick(self.clock.now_ms())
        self._pump()
        await self._drain()
        self._flush()
        for connection in list(self.connections):
            connection.finish()
        await self._wait_for_connections()
        if self._timer is not None:
            self._timer.cancel()
        # The end of a connection rolls back what it streamed, which is journaled too: only now nothing more can come.
        await self._drain()
        if not self._failed and not self.store.has_unapplied:
            self.store.checkpoint_now(self.context.state)
        self._close(None)

    async def _drain(self) -> None:
        """Wait until everything accepted is forced, and no other thread is at the files."""
        while not self._failed and (
            self._in_flight or self._unsynced or self._checkpoint is not None or not self._nothing_queued()
        ):
            if self._unsynced and not self._in_flight:
                self._force(self._nothing)
            self._schedule()
            await asyncio.sleep(0.001)

    async def _wait_for_connections(self) -> None:
        """Let the last answers go out; who does not take them in time is cut off."""
        deadline = self.clock.monotonic() + STOP_LINGER_S
        while self.connections and not self._failed:
            if self.clock.monotonic() >= deadline:
                for connection in list(self.connections):
                    connection.cut()
            await asyncio.sleep(0.001)

    def fail(self, error: BaseException) -> None:
        """The journal or a file failed: tell everybody who waits that the outcome is unknown, and end."""
        if self._failed:
            return
        self._failed = True
        log.error("failed; the broker stops, the restart reads what the disk holds", error=repr(error), exc_info=error)
        for connection in list(self.connections):
            connection.abandon()
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self._reads.close()
        for pool in (self._writer, self._helper):
            pool.shutdown(wait=False)
        if not self.stopped.done():
            self.stopped.set_result(error)

    # --- called by connections ---------------------------------------------------------------------------------------

    def received(self) -> None:
        """Requests were taken in: commit and answer at the end of this iteration of the loop."""
        self._busy_poll.asked()
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)
        if not self.paused and self.context.queued_bytes() > QUEUED_BYTES_MAX:
            self.paused = True
            for connection in self.connections:
                connection.hold()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _nothing_queued(self) -> bool:
        return self.context.group.is_empty and not self.context.full

    @staticmethod
    def _nothing() -> None:
        return None

    # --- the path of a group -----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._scheduled = False
        if self._failed:
            return
        if self.context.moved:
            self.core.wake_memory()
        while not self._in_flight and not self._failed and not self._nothing_queued():
            if not (self.context.stopping or self.context.full) and self._patience.keeps(self.context.group):
                break
            self._patience.end()
            self._commit(self.core.seal())
        if self.paused and self.context.queued_bytes() < QUEUED_BYTES_MAX // 2:
            self.paused = False
            for connection in self.connections:
                connection.release()
        self._flush()
        self._busy_poll.answered()

    def _commit(self, group: Group) -> None:
        if self._checkpoint is None and self._nothing_queued() and self._due_for_checkpoint():
            # The state is taken here, in the loop: while the record is written, later requests move it on.
            self._checkpoint_after, self._checkpoint = group, self.store.begin_checkpoint(self.context.state)
        self._forced_before = self._somebody_waits_for_sync()
        self._unsynced.append(group)
        self._unsynced_messages += group.message_count
        self._marked = False
        crash_point("broker.put.accepted")
        must_sync = not self.context.relaxed or self._somebody_waits_for_sync()
        if self._fits_inline(group, must_sync):
            self._run_inline(group, must_sync)
            if not must_sync and not self._failed and self._due_for_sync():
                # Answered already, so nobody waits for this one: the writer thread syncs while the loop takes in more.
                self._force(self._nothing)
        else:
            self._run_in_writer(lambda: self._write_and_force(group, must_sync), lambda: self._after(must_sync, group))

    def _fits_inline(self, group: Group, must_sync: bool) -> bool:
        if not must_sync:
            return group.size_bytes <= INLINE_WRITE_SIZE_BYTES
        return (
            group.size_bytes <= self.settings.inline_sync_size_bytes and self._sync_ms <= self.settings.inline_sync_ms
        )

    def _due_for_sync(self) -> bool:
        if self._somebody_waits_for_sync():
            return True
        return self.settings.sync == "interval" and self._unsynced_messages >= self.settings.sync_interval_messages

    def _somebody_waits_for_sync(self) -> bool:
        # Only the newest can be told later that it must be forced (``Context.answer_settled``). Asking all of them, up
        # to 1000 with sync = interval, cost 40 us a put.
        return self._forced_before or (bool(self._unsynced) and self._unsynced[-1].forced)

    def _run_inline(self, group: Group, must_sync: bool) -> None:
        try:
            self._write_and_force(group, must_sync)
        except (OSError, StorageError) as error:
            self.fail(error)
            return
        self._after(must_sync, group)

    def _run_in_writer(self, job: Callable[[], None], after: Callable[[], None]) -> None:
        self._in_flight = True

        def done(future: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the broker has ended
                self._loop.call_soon_threadsafe(self._writer_done, future, after)

        self._writer.submit(job).add_done_callback(done)

    def _writer_done(self, future: Future[None], after: Callable[[], None]) -> None:
        self._in_flight = False
        error = future.exception()
        if error is not None:
            self.fail(error)
            return
        after()
        self._pump()

    def _write_and_force(self, group: Group, must_sync: bool) -> None:
        self.store.write(group)
        if self._checkpoint is not None and self._checkpoint_after is group:
            self.store.pin_checkpoint(self._checkpoint)
        if must_sync:
            self._sync()

    def _sync(self) -> None:
        started = self.clock.monotonic()
        if self.settings.sync_delay_ms:
            self.clock.sleep(self.settings.sync_delay_ms / 1000)
        self.store.force()
        took_ms = (self.clock.monotonic() - started) * 1000
        self._sync_ms += (took_ms - self._sync_ms) * 0.2

    def _after(self, synced: bool, group: Group) -> None:
        self._last_write_at = self.clock.monotonic()
        if not synced:
            self.core.written(group)
            if self._sync_due_at == 0.0:
                wait_ms = self.settings.sync_interval_ms if self.settings.sync == "interval" else BACKGROUND_SYNC_MS
                self._sync_due_at = self._last_write_at + wait_ms / 1000
                self._loop.call_later((wait_ms + 1) / 1000, self._idle_work)  # + 1: the loop counts in ms
            return
        self.context.counters.syncs += 1
        groups, self._unsynced, self._unsynced_messages, self._forced_before = self._unsynced, [], 0, False
        self._sync_due_at = 0.0
        for forced in groups:
            if self.context.relaxed:
                self.core.written(forced)
            self.core.forced(forced)
        self._flush()
        crash_point("broker.answers.sent")
        self._apply(groups)

    def _apply(self, groups: list[Group]) -> None:
        try:
            for group in groups:
                for applied in self.store.apply(group):
                    self.core.applied(applied)
        except (OSError, StorageError) as error:
            self.fail(error)
            return
        waits_for = self._checkpoint_after
        if self._checkpoint is not None and waits_for is not None and waits_for not in self._unsynced:
            self._checkpoint_after = None
            if self.store.has_unapplied:
                self._checkpoint = None  # the disk is full; a later group tries again
            else:
                self._start_checkpoint(self._checkpoint)

    def _force(self, after: Callable[[], None]) -> None:
        def forced() -> None:
            self._after(True, Group())
            after()

        self._run_in_writer(self._sync, forced)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        core, context = self.core, self.context
        while context.ready or context.reads or context.lookups:  # asked for first: mostly there is one answer at most
            for read in core.take_reads():
                self._reads.read(read)
            for lookup in core.take_lookups():
                self._reads.look_up(*lookup)
            for peer in core.take_ready():
                self._send(peer)
        if context.closing:
            closing, context.closing = context.closing, []
            for peer in closing:
                self._send(peer)
        if self.answers.turned():
            self._schedule()

    def _send(self, peer: Peer) -> None:
        connection = peer.shell
        if isinstance(connection, Connection):
            connection.send()

    def _from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._failed:
            return
        self._timer = self._loop.call_later(TICK_MS / 1000, self._tick)
        now = self.clock.monotonic()
        self._watch_disk()
        for connection in list(self.connections):
            connection.check_deadlines()
        for taker in self.answers.stalled(self.context.liveness.now_ms):
            taker.cut_off()
        self.core.tick(self.clock.now_ms(), is_reading=not self.paused)
        while self.context.alarms:
            log.error(**self.context.alarms.pop(0))
        if self.store.has_unapplied:
            self._apply_again()
        if now >= self._retention_at:
            self._retention_at = now + self.settings.retention_check_interval_ms / 1000
            self._retire()
        self._idle_work()
        self._schedule()

    def _idle_work(self) -> None:
        if self._in_flight or self._failed or self.stopped.done():
            return
        now = self.clock.monotonic()
        if self._unsynced and (self._due_for_sync() or (self._sync_due_at and now >= self._sync_due_at)):
            self._force(self._nothing)
        elif (
            not self._marked and not self._unsynced and (now - self._last_write_at) * 1000 >= self.settings.mark_idle_ms
        ):
            self._marked = True
            self._run_in_writer(self._mark, self._nothing)
        elif self._checkpoint is None and now >= self._checkpoint_at and self._nothing_queued() and not self._unsynced:
            self._checkpoint_at = now + self.settings.checkpoint_interval_ms / 1000
            if self.store.journal.next_lsn > self.store.checkpoint_lsn and not self.store.has_unapplied:
                self._checkpoint = self.store.begin_checkpoint(self.context.state)
                self.store.pin_checkpoint(self._checkpoint)
                self._start_checkpoint(self._checkpoint)

    def _mark(self) -> None:
        self.store.journal.mark()
        self.store.journal.prepare_next()

    def _watch_disk(self) -> None:
        free = self.store.disk.free_bytes()
        full = free < self.store.unapplied_bytes + self.settings.disk_free_bytes_min
        if full != self.context.disk_full:
            self.context.disk_full = full
            log.warning(
                "disk is nearly full: new messages are refused" if full else "disk has space again", free_bytes=free
            )
        self.context.shell_figures = {
            "disk_free_bytes": free,
            "unapplied_bytes": self.store.unapplied_bytes,
            "sync_ms_recent": round(self._sync_ms, 3),
            "journal_lsn": self.store.journal.next_lsn,
            "journal_bytes_since_checkpoint": self.store.journal.next_lsn - self.store.checkpoint_lsn,
            "request_bytes_in_memory": self.budget.used,
            "answer_bytes_in_memory": self.answers.used,
            "answer_bytes_in_memory_max": self.answers.used_max,
        }

    def _apply_again(self) -> None:
        try:
            for group in self.store.apply_pending():
                self.core.applied(group)
        except OSError as error:
            self.fail(error)

    def _retire(self) -> None:
        """Retention: journal the new log starts; files go when that is forced."""
        for partition in self.context.state.all_partitions():
            start, paths = partition.expired_segments(self.clock.now_ms())
            if paths:
                group = self.context.group_with_room()
                group.add_entry(entries.encode_log_start(partition.topic_id, partition.number, start))
                partition.set_log_start(start)
                group.unlinked.append((partition, paths))
                group.forced = True

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _due_for_checkpoint(self) -> bool:
        return self.store.due_for_checkpoint() and not self.store.has_unapplied

    def _start_checkpoint(self, pending: PendingCheckpoint) -> None:
        job = self._helper.submit(self.store.run_checkpoint, pending, self.context.state.epoch)
        job.add_done_callback(lambda done: self._from_thread(self._checkpoint_done, pending, done))

    def _checkpoint_done(self, pending: PendingCheckpoint, done: Future[None]) -> None:
        error = done.exception()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # The older checkpoint and the journal behind it are whole; the next one tries again.
            log.warning("no space for a checkpoint", error=str(error))
            self._checkpoint = None
        elif error is not None:
            self.fail(error)
        elif self._in_flight:
            self._loop.call_later(0.001, self._checkpoint_done, pending, done)
        else:
            self._checkpoint = None
            self.store.end_checkpoint(pending)
