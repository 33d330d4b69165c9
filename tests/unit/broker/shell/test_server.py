"""The server under load that never pauses, and its end; judged by counts of groups, never by the wall clock."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tools.images.requests import batch
from tools.simulated.clock import SimClock
from txmq.broker.commit.data_directory import open_store
from txmq.broker.commit.steps import StepThread
from txmq.broker.core import Core
from txmq.broker.shell.server import CLOSED_A_TURN, Server
from txmq.config import BrokerSettings
from txmq.protocol import requests
from txmq.protocol.requests import ByteBudget, Limits, RequestReader
from txmq.redo.checkpoint import list_lsns
from txmq.runtime.clocks import OSRandom, SteadyClock
from txmq.runtime.os_disk import OSDisk
from txmq.xid import TxId

GROUP_S = 0.005  # simulated, from one group to the next
GROUPS_BESIDE = 20  # committed while the helper's thread writes a checkpoint
MIB = 1 << 20


class CountedThread:
    """Stands in for a server's thread: a job ends when so many groups were committed meanwhile, however fast they are.

    Attributes:
        groups_beside: so many.
    """

    def __init__(self, groups_committed: Callable[[], int]) -> None:
        self.groups_beside = 0
        self._groups_committed = groups_committed
        self._jobs: deque[tuple[int, Callable[[], None], Future[None]]] = deque()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future = Future[None]()
        self._jobs.append((self._groups_committed(), job, future))
        self.run_due()
        return future

    def run_due(self) -> None:
        while self._jobs and self._groups_committed() >= self._jobs[0][0] + self.groups_beside:
            _, job, future = self._jobs.popleft()
            job()
            future.set_result(None)

    def shutdown(self, *, wait: bool) -> None:
        assert not self._jobs


class Load:
    """A server with a topic, in whose queue there is always another put."""

    def __init__(self, path: Path, value_bytes: int, **changes: Any) -> None:
        self.settings = BrokerSettings(data=str(path), disk_free_bytes_min=0, **changes)
        self.clock = SimClock()
        self.disk = OSDisk(str(path))
        recovered = open_store(self.disk, self.clock, OSRandom(), self.settings, files_lock=threading.Lock())
        self.store = recovered.store
        self.core = Core(recovered.identity, self.settings, recovered.state, self.clock.now_ms(), OSRandom())
        self.server = Server(self.core, self.store, self.settings, SteadyClock(self.clock))
        self._reader = RequestReader(Limits(), ByteBudget(1 << 30))
        self._client = self.core.connected("load")
        self._put = batch(bytes(value_bytes))
        self.checkpoints: set[int] = set()
        self._groups = self._requests = 0
        self._helper = CountedThread(lambda: self._groups)
        self.server._pools[StepThread.HELPER] = self._helper  # type: ignore[assignment]

    def request(self, verb: str, *words: str | int, body: bytes | None = None) -> None:
        self._requests += 1
        buffers = requests.request(verb, *words, body=None if body is None else [body], opaque=b"q%d" % self._requests)
        self.send(b"".join(buffers))

    def send(self, requests: bytes) -> None:
        self.core.receive(self._client, self._reader.feed(requests))
        self._client.out.clear()
        self.server.received()

    def txid(self, counter: int) -> bytes:
        session, identity = self._client.session, self.core.context.identity
        assert session is not None
        return str(TxId(identity.cluster, identity.node, session.number, counter)).encode()

    @property
    def is_answered(self) -> bool:
        return bool(self._client.out)

    @property
    def watermark(self) -> int:
        topics = self.core.context.state.partitions
        return topics[b"t", b"0"].high_watermark

    def _feed(self) -> None:
        context = self.core.context
        if context.counters.group_commits > self._groups:
            self._groups = context.counters.group_commits
            self.clock.advance(GROUP_S)
            self.checkpoints.update(list_lsns(self.disk))
        self._helper.run_due()
        while context.queued_bytes() < 2 * len(self._put):
            self.request("put", "t", 0, body=self._put)

    async def until(self, condition: Callable[[], bool], groups_max: int) -> None:
        """Feed until the condition holds; fails after so many groups."""
        self.request("topic", "create", "t")
        self._helper.groups_beside = GROUPS_BESIDE
        while not condition():
            self._feed()
            assert self._groups <= groups_max, f"not within {groups_max} groups"
            await asyncio.sleep(0)
        self._helper.groups_beside = 0
        self._helper.run_due()

    def run(
        self,
        test: Callable[[], Awaitable[None]],
        loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        """Serve while the test runs, and stop."""

        async def serve() -> None:
            await self.server.start("127.0.0.1", 0)
            try:
                await test()
            finally:
                await self.server.stop()
                await self.server.stopped
                self.store.close()

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(serve())


@pytest.mark.parametrize("sync", ["always", "interval", "never"])
@pytest.mark.parametrize("value_bytes", [4000, MIB + MIB // 8])
def test_checkpoint_ends_while_the_writer_thread_stays_busy(tmp_path: Path, sync: str, value_bytes: int) -> None:
    """Three checkpoints: the next one begins only when the one before has ended."""
    load = Load(tmp_path, value_bytes, sync=sync, inline_sync_size_bytes=0, checkpoint_interval_bytes=MIB)
    load.run(lambda: load.until(lambda: len(load.checkpoints) >= 3, 2_000 if value_bytes == 4000 else 300))


@pytest.mark.parametrize("sync", ["interval", "never"])
def test_relaxed_groups_that_are_not_written_inline_are_synced(tmp_path: Path, sync: str) -> None:
    """``never`` syncs once a second: 200 groups of the simulated clock."""
    load = Load(tmp_path, MIB + MIB // 8, sync=sync)
    load.run(lambda: load.until(lambda: load.watermark > 4, 220))  # the topic's own group is forced


def test_group_that_found_company_leaves_no_alarm(tmp_path: Path) -> None:
    load = Load(tmp_path, 100)
    prepare = b"prepare %b last-resource resource=db uuid=%b table=t deadline=0 %d p\r\n%b"
    part = b"t 0 %d\r\n%b" % (len(batch(b"x")), batch(b"x"))

    async def commit_in_company() -> None:
        load.request("topic", "create", "t")
        load.send(b"hello 1 owner session=new h\r\n")
        load.send(prepare % (load.txid(1), b"0" * 32, len(part), part))
        await asyncio.sleep(0.01)
        load.send(b"commit %b delayable 0 c\r\n" % load.txid(1))
        await asyncio.sleep(0)
        is_waiting = load.server._alarm is not None and load.watermark == 0
        load.request("put", "t", 0, body=batch(b"y"))
        await asyncio.sleep(0)
        assert (is_waiting, load.server._alarm) == (True, None)
        assert load.watermark == 2

    load.run(commit_in_company)


@pytest.mark.parametrize("work", ["write", "force"])
def test_answer_waits_for_writer_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    load = Load(tmp_path, 100, inline_sync_size_bytes=0)
    is_working, may_go_on = threading.Event(), threading.Event()
    carry_out = getattr(load.store, work)

    def carry_out_slowly(*arguments: Any) -> None:
        is_working.set()
        assert may_go_on.wait(30)
        carry_out(*arguments)

    monkeypatch.setattr(load.store, work, carry_out_slowly)

    async def ask_meanwhile() -> None:
        load.request("topic", "create", "t")
        while not is_working.is_set():
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        is_early = load.is_answered
        may_go_on.set()
        while not load.is_answered:
            await asyncio.sleep(0)
        assert not is_early

    load.run(ask_meanwhile)


@pytest.mark.parametrize("inline_bytes", [0, MIB])
def test_answer_leaves_behind_its_sync_before_partition_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    load, seen = Load(tmp_path, 100, inline_sync_size_bytes=inline_bytes), list[str]()

    def note(owner: Any, name: str, event: str) -> None:
        carry_out = getattr(owner, name)

        def noted(*given: Any) -> Any:
            result = carry_out(*given)
            seen.append(event)
            return result

        monkeypatch.setattr(owner, name, noted)

    for name in ("write", "force", "apply"):
        note(load.store, name, name)
    note(load.server, "_send", "answer")

    async def put() -> None:
        for request in (("topic", "create", "t"), ("put", "t", 0)):
            seen.clear()
            load.request(*request, body=batch(b"x") if request[0] == "put" else None)
            while "apply" not in seen:
                await asyncio.sleep(0)
            assert seen == ["write", "force", "answer", "apply"]

    load.run(put)


def test_failed_server_ends_after_its_writer_thread_has_left_files(tmp_path: Path) -> None:
    load = Load(tmp_path, 100, inline_sync_size_bytes=0)
    is_writing, may_go_on = threading.Event(), threading.Event()
    write = load.store.write

    def slow_write(group: Any) -> None:
        is_writing.set()
        assert may_go_on.wait(30)
        write(group)

    load.store.write = slow_write  # type: ignore[method-assign]

    async def fail_meanwhile() -> None:
        load.request("topic", "create", "t")
        while not is_writing.is_set():
            await asyncio.sleep(0)
        load.server.fail(OSError("the disk of a partition file"))
        for _ in range(100):
            await asyncio.sleep(0)
        ended_early = load.server.stopped.done()
        may_go_on.set()
        assert isinstance(await load.server.stopped, OSError)
        assert not ended_early, "the lock would be let go while the writer thread is at the journal"

    load.run(fail_meanwhile)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_cannot_be_read_ends_its_connection_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Whatever the exception: nothing of it has reached the core."""
    load, feed = Load(tmp_path, 10), RequestReader.feed

    def misread(reader: RequestReader, data: Any) -> Any:
        if bytes(data).startswith(b"odd"):
            raise LookupError("a defect")
        return feed(reader, data)

    monkeypatch.setattr(RequestReader, "feed", misread)

    async def test() -> None:
        [listener] = load.server._listeners
        port = listener.sockets[0].getsockname()[1]
        others, writer = await asyncio.open_connection("127.0.0.1", port)
        odd, odd_writer = await asyncio.open_connection("127.0.0.1", port)
        odd_writer.write(b"odd\r\n")
        assert await odd.read() == b""
        writer.write(b"ping 1\r\n")
        assert (await others.readline()).startswith(b"result 200 ")
        odd_writer.close()
        writer.close()

    load.run(test, loop)


def test_connections_that_end_in_one_moment_end_in_slices(tmp_path: Path) -> None:
    """Thousands of handshakes held the loop for 0.3 s."""
    load, closed = Load(tmp_path, 10), list[object]()

    class Late:
        def check_deadlines(self) -> bool:
            load.server.connections.discard(self)
            closed.append(self)
            return True

    async def test() -> None:
        load.server.connections.update(Late() for _ in range(5 * CLOSED_A_TURN + 1))  # type: ignore[misc]
        turns, before = 0, 0
        while load.server.connections:
            await asyncio.sleep(0)
            assert len(closed) - before <= CLOSED_A_TURN
            turns, before = turns + (len(closed) > before), len(closed)
        assert turns == 6

    load.run(test)
