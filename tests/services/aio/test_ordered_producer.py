"""Producers of ``txmq.aio`` that keep on disk what they cannot send, ordered ones and those with a retry store.

Against a real broker: order and once, through kills, cancellation and restarts.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from txmq import SendStatus
from txmq.errors import ClosedError, DirectoryInUseError, TransactionStateError
from txmq.testing.processes.broker import BrokerProcess, free_port

Scenario = Callable[[txmq.aio.Client], Awaitable[None]]
WAIT_S, SCENARIO_S = 60.0, 300.0  # a busy machine takes minutes for what is done in seconds
SELECTOR = txmq.KeyHashSelector()
KINDS = ["ordered", "plain"]


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that comes back under its address."""
    with BrokerProcess(tmp_path / "broker", listen=f"127.0.0.1:{free_port()}") as broker:
        yield broker


def _run(broker: BrokerProcess, topic: str, scenario: Scenario, *, partitions: int = 1) -> None:
    async def main() -> None:
        async with await txmq.aio.connect(broker.address) as client:
            await client.topics.create(topic, partitions=partitions)
            async with asyncio.timeout(SCENARIO_S):
                await scenario(client)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def _made(
    client: txmq.aio.Client, kind: str, spool: Path, timeout: float = 5.0
) -> txmq.aio.OrderedMessageProducer | txmq.aio.Producer:
    if kind == "ordered":
        return await client.ordered_producer(SELECTOR, str(spool), options=txmq.OrderedOptions(timeout=timeout))
    return client.producer(partition_selector=SELECTOR, retry_store=str(spool), timeout=timeout)


async def _stored(client: txmq.aio.Client, topic: str) -> list[bytes | None]:
    return [message.value async for message in client.browse(topic)]


def test_messages_are_sent_in_order_and_refused_in_blocks(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        spool = str(tmp_path / "spool")
        async with await client.ordered_producer(SELECTOR, spool) as ordered:
            for number in range(20):
                result = await ordered.send("plain", b"%d" % number, key=b"k")
                assert (result.status, result.offset) == (SendStatus.ACKNOWLEDGED, number)
            futures = [await ordered.send_async("plain", b"%d" % number, key=b"k") for number in range(20, 40)]
            assert [(await future).offset for future in futures] == list(range(20, 40))
            await asyncio.gather(*(ordered.send("plain", b"many", key=b"%d" % number) for number in range(64)))
            await ordered.flush()
            assert ordered.spooled == 0
            assert await ordered.parked() == []
            with pytest.raises(DirectoryInUseError):
                await client.ordered_producer(SELECTOR, spool)
            async with client.producer() as producer, producer.transaction():
                with pytest.raises(TransactionStateError, match="cannot join a transaction"):
                    await ordered.send("plain", b"x")
        with pytest.raises(ClosedError):
            await ordered.send("plain", b"x")
        assert (await _stored(client, "plain"))[:40] == [b"%d" % number for number in range(40)]

    _run(shared_broker, "plain", scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_broker_keeps_order_and_each_message_once(own_broker: BrokerProcess, tmp_path: Path, kind: str) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with await _made(client, kind, tmp_path / "spool", timeout=1.0) as ordered:
            sent: dict[int, list[int]] = {task: [] for task in range(4)}
            statuses = set[SendStatus]()
            is_over = False

            async def work(task: int) -> None:
                number = 0
                while not is_over:
                    statuses.add((await ordered.send("kills", b"%d" % number, key=b"%d" % task)).status)
                    sent[task].append(number)
                    number += 1

            workers = [asyncio.create_task(work(task)) for task in sent]
            for _ in range(2):
                while min(map(len, sent.values())) < 20:
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(own_broker.kill)
                while not ordered.spooled:
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(own_broker.start)
                await asyncio.sleep(0.05)
            is_over = True
            await asyncio.gather(*workers)
            await ordered.flush(WAIT_S)
            assert statuses == {SendStatus.ACKNOWLEDGED, SendStatus.SPOOLED}
            found: dict[int, list[int]] = {task: [] for task in sent}
            async for message in client.browse("kills"):
                found[int(message.key or b"")].append(int(message.value or b""))
            assert found == sent

    _run(own_broker, "kills", scenario, partitions=3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_await_of_an_ordered_producer_may_be_cancelled(
    shared_broker: BrokerProcess, tmp_path: Path, kind: str
) -> None:
    topic = f"lives-{kind}"

    async def scenario(client: txmq.aio.Client) -> None:
        done: list[bytes] = []

        async def life(number: int) -> None:
            async with await _made(client, kind, tmp_path / "spool") as ordered:
                for part in range(3):
                    done.append(b"%d.%d" % (number, part))
                    await ordered.send(topic, done[-1], key=b"k")
                await ordered.flush()

        number = 0
        ended: BaseException | None = BaseException()
        while ended is not None:
            number += 1
            task = asyncio.create_task(cancelled_at(life(number), number))
            ended = (await asyncio.gather(task, return_exceptions=True))[0]
            assert ended is None or isinstance(ended, asyncio.CancelledError)
            await client.host.await_ends(WAIT_S)
        assert number > 4
        async with await client.ordered_producer(SELECTOR, str(tmp_path / "spool")) as ordered:
            await ordered.flush()
        assert await _stored(client, topic) == done  # what has begun goes to its end, in order

    _run(shared_broker, topic, scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_disk_is_touched_in_threads_only(
    own_broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    touching = set[str]()
    opened = sqlite3.connect

    class Watched(sqlite3.Connection):
        def execute(self, *given: Any) -> sqlite3.Cursor:
            touching.add(threading.current_thread().name)
            return super().execute(*given)

        def executemany(self, *given: Any) -> sqlite3.Cursor:
            touching.add(threading.current_thread().name)
            return super().executemany(*given)

    def connect(*given: Any, **named: Any) -> sqlite3.Connection:
        return opened(*given, **named, factory=Watched)

    monkeypatch.setattr("txmq.runtime.local_store.sqlite3.connect", connect)

    async def scenario(client: txmq.aio.Client) -> None:
        async with await _made(client, kind, tmp_path / "spool", timeout=0.2) as ordered:
            if kind == "plain":
                touching.clear()  # ``client.producer`` has opened the store, and cannot wait
            await ordered.send("disks", b"0")
            await ordered.flush(WAIT_S)  # a busy machine may have spooled it
            await asyncio.to_thread(own_broker.kill)
            results = await asyncio.gather(*(ordered.send("disks", b"x") for _ in range(40)))
            assert {result.status for result in results} == {SendStatus.SPOOLED}
            future = await ordered.send_async("disks", b"last")
            assert (await future).status is SendStatus.SPOOLED
            assert ordered.spooled == 41
            assert await ordered.parked() == []
            await asyncio.to_thread(own_broker.start)
            await ordered.flush(WAIT_S)
        assert len(await _stored(client, "disks")) == 42

    _run(own_broker, "disks", scenario)
    assert touching
    assert all(name.startswith("txmq-blocking") for name in touching)


_SENDER = """
import asyncio, sys, txmq, txmq.aio

async def main():
    client = await txmq.aio.connect(sys.argv[1], lazy=True, timeout=0.2)
    options = txmq.OrderedOptions(timeout=0.2, partitions={"processes": 1})
    ordered = await client.ordered_producer(txmq.KeyHashSelector(), sys.argv[2], options=options)
    for number in range(int(sys.argv[3]), int(sys.argv[3]) + 10):
        await ordered.send("processes", b"%d" % number)
    asyncio.create_task(ordered.send("processes", b"never awaited"))
    print(ordered.spooled, flush=True)
    if sys.argv[4] == "kill":
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_process_that_ends_or_is_killed_leaves_its_spool(own_broker: BrokerProcess, tmp_path: Path) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        await asyncio.to_thread(own_broker.kill)
        for number, end in enumerate(("kill", "leave", "kill")):
            command = [
                sys.executable, "-X", "dev", "-c", _SENDER, own_broker.address, str(tmp_path / "spool"),
                str(10 * number), end,
            ]  # fmt: skip
            ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=WAIT_S, check=False)
            assert (ended.returncode == 0) == (end == "leave"), ended.stderr
            assert b"destroyed" not in ended.stderr
            assert b"never retrieved" not in ended.stderr
        await asyncio.to_thread(own_broker.start)
        async with await client.ordered_producer(SELECTOR, str(tmp_path / "spool")) as ordered:
            await ordered.flush(WAIT_S)
        stored = [value for value in await _stored(client, "processes") if value != b"never awaited"]
        assert stored == [b"%d" % number for number in range(30)]

    _run(own_broker, "processes", scenario)


def test_many_messages_for_a_retry_store_share_the_loop(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        turns = 0
        turns_at_slices: list[int] = []

        class Pairs(list[tuple[bytes, bytes]]):
            def __getitem__(self, at: Any) -> Any:
                turns_at_slices.append(turns)
                return super().__getitem__(at)

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with client.producer(retry_store=str(tmp_path / "store")) as producer:
            counting = asyncio.create_task(count())
            results = await producer.send_many("many", Pairs((b"k", b"%d" % number) for number in range(5000)))
            counting.cancel()
            assert [result.offset for result in results] == list(range(5000))
        assert len(turns_at_slices) > 15
        assert sorted(set(turns_at_slices)) == turns_at_slices

    _run(shared_broker, "many", scenario)


def test_store_is_refused_as_txmq_refuses_it(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with client.producer(retry_store=str(tmp_path / "store")) as producer:
            with pytest.raises(DirectoryInUseError):
                client.producer(retry_store=str(tmp_path / "store"))
            with pytest.raises(txmq.errors.ConfigError, match="linger_ms"):
                client.producer(retry_store=str(tmp_path / "other"), linger_ms=5)
            assert (producer.spooled, client.producer().spooled) == (0, 0)
        with pytest.raises(ClosedError):
            await producer.send("refused", b"x")
        async with client.producer(retry_store=str(tmp_path / "store")) as again:
            assert (await again.send("refused", b"x")).is_success

    _run(shared_broker, "refused", scenario)
