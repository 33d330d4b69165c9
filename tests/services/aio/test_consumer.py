"""Consumers of ``txmq.aio`` against a real broker: the contract of ``txmq.Consumer``, cancellation, ends, stores."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

import pytest
import uvloop

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from txmq.client.consumer.offsets.file_store import FileOffsetStore
from txmq.errors import ClosedError, ConfigError
from txmq.testing.processes.broker import BrokerProcess, free_port

Scenario = Callable[[txmq.aio.Client, txmq.aio.Producer], Awaitable[None]]
OPTIONS = txmq.ConsumerOptions(heartbeat_interval=0.05, retry_delay=0.01, offset_save_interval=0.05)
WAIT_S, SCENARIO_S = 60.0, 300.0  # a busy machine takes minutes for what is done in seconds
RUNS: dict[str, Callable[..., None]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}


def _run(
    broker: BrokerProcess, topic: str, scenario: Scenario, *, partitions: int = 2, loop: str = "asyncio"
) -> None:  # fmt: skip
    async def main() -> None:
        async with await txmq.aio.connect(broker.address) as client, client.producer() as producer:
            await client.topics.create(topic, partitions=partitions)
            async with asyncio.timeout(SCENARIO_S):
                await scenario(client, producer)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    RUNS[loop](main())


async def _send(producer: txmq.aio.Producer, topic: str, count: int, first: int = 0) -> set[bytes]:
    values = [b"%d" % number for number in range(first, first + count)]
    await producer.send_many(topic, [(value, value) for value in values])
    return set(values)


async def _taken(consumer: txmq.aio.Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        for message in await consumer.poll():
            await message.ack()
            found.append(message.value or b"")
    return found


@pytest.mark.parametrize("loop", RUNS)
def test_iteration_and_polls_go_on_behind_what_was_acknowledged(shared_broker: BrokerProcess, loop: str) -> None:
    topic = f"goes-on-{loop}"

    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        sent = await _send(producer, topic, 40)
        found: list[bytes] = []
        async with await client.consumer(topic, [topic], options=OPTIONS) as consumer:
            async for message in consumer:
                await message.ack()
                found.append(message.value or b"")
                if len(found) == 20:
                    break
            assert set(consumer.assignment) <= {(topic, 0), (topic, 1)}
            assert consumer.assignment
            assert consumer.stopped == {}
        with pytest.raises(ClosedError):
            await consumer.poll()
        assert [message async for message in consumer] == []
        async with await client.consumer(topic, [topic]) as consumer:
            found += await _taken(consumer, 20)
            assert await consumer.poll(timeout=0.01) == []
        assert len(found) == 40
        assert set(found) == sent
        with txmq.connect(shared_broker.address) as twin, twin.consumer(topic, [topic]) as there:
            assert there.poll(timeout=0.5) == []

    _run(shared_broker, topic, scenario, loop=loop)


def test_pause_seek_and_saved_acks_are_those_of_threads(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await _send(producer, "control", 5)
        async with await client.consumer("control", ["control"], options=OPTIONS) as consumer:
            (first, *_) = found = await consumer.poll(5, timeout=WAIT_S)
            consumer.pause()
            assert await consumer.poll(timeout=0.05) == []
            await consumer.seek("control", 0, 0)
            consumer.resume()
            assert (await consumer.poll(timeout=WAIT_S))[0].offset == 0
            for message in found:
                await message.ack(sync=message is found[-1])
            assert first.consumer is consumer
            with pytest.raises(ConfigError, match="an offset or timestamp_ms"):
                await consumer.seek("control", 0)
            with pytest.raises(ConfigError, match="max_records"):
                await consumer.poll(0)
        with pytest.raises(ConfigError, match="expected a list of names"):
            await client.consumer("control", "control")

    _run(shared_broker, "control", scenario, partitions=1)


def test_rejected_message_comes_again_and_is_given_up(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await producer.send("rejects", b"bad")
        async with await client.consumer("rejects", ["rejects"], max_retries=2, options=OPTIONS) as consumer:
            for _ in range(3):
                (message,) = await consumer.poll(timeout=WAIT_S)
                await message.reject("no")
            assert await consumer.poll(timeout=0.1) == []
        dead = [message async for message in client.browse("rejects.dead-letter")]
        assert [(letter.value, letter.headers["txmq.dead.reason"]) for letter in dead] == [(b"bad", b"no")]

    _run(shared_broker, "rejects", scenario, partitions=1)


def test_handlers_of_partitions_overlap_each_in_order(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await producer.send_many("listens", [(b"%d" % (number % 7), b"%d" % number) for number in range(60)])
        at_work, most, failed = set[int](), 0, set[bytes]()
        found: dict[int, list[int]] = {0: [], 1: []}
        consumer = await client.consumer("listens", ["listens"], options=OPTIONS)

        async def handle(message: txmq.aio.Message) -> None:
            nonlocal most
            assert message.partition not in at_work
            at_work.add(message.partition)
            most = max(most, len(at_work))
            try:
                await asyncio.sleep(0.001)
                if message.value == b"13" and b"13" not in failed:
                    failed.add(b"13")
                    raise LookupError("once")
                found[message.partition].append(message.offset)
                if sum(map(len, found.values())) == 60:
                    await consumer.close()
            finally:
                at_work.discard(message.partition)

        await consumer.run(handle, threads=3)
        assert most == 2
        assert failed == {b"13"}
        assert all(offsets == list(range(len(offsets))) for offsets in found.values())
        described = (await client.groups.describe("listens"))["partitions"]
        assert sum(one["offset"] for one in described) == 60  # the one that has called ``close``, too
        with pytest.raises(ClosedError):
            await consumer.poll()

    _run(shared_broker, "listens", scenario)


def test_members_share_and_hand_over(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        sent, found = set[bytes](), list[bytes]()

        async def consume(consumer: txmq.aio.Consumer) -> None:
            async for message in consumer:
                found.append(message.value or b"")
                await message.ack()

        consumers = [await client.consumer("shared", ["shared"], options=OPTIONS) for _ in range(3)]
        tasks = [asyncio.create_task(consume(consumer)) for consumer in consumers]
        while sorted(slot[1] for one in consumers for slot in one.assignment) != [0, 1, 2, 3] or any(
            not one.assignment for one in consumers
        ):
            await asyncio.sleep(0.01)
        for number in range(20):
            sent |= await _send(producer, "shared", 20, 20 * number)
            if number == 10:
                await consumers[0].close()
        while set(found) != sent:
            await asyncio.sleep(0.01)
        assert len(found) == 400  # what is handed over in order comes once
        await asyncio.gather(*(consumer.close() for consumer in consumers), *tasks)

    _run(shared_broker, "shared", scenario, partitions=4)


@pytest.mark.parametrize("loop", RUNS)
def test_cancelled_poll_takes_no_message_along(shared_broker: BrokerProcess, loop: str) -> None:
    topic = f"polls-{loop}"

    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        found: list[bytes] = []
        async with await client.consumer(topic, [topic], options=OPTIONS) as consumer:
            await _send(producer, topic, 1)
            found += await _taken(consumer, 1)
            sending = asyncio.create_task(_trickle(producer))
            turn = 0
            while len(found) < 300:
                turn += 1
                polls = [asyncio.create_task(consumer.poll(1, WAIT_S)) for _ in range(3)]
                for _ in range(turn % 23):
                    await asyncio.sleep(0)
                for poll in polls:
                    poll.cancel()
                for ended in await asyncio.gather(*polls, return_exceptions=True):
                    assert isinstance(ended, list | asyncio.CancelledError)
                    if isinstance(ended, list):
                        found += [message.value or b"" for message in ended]
            await sending
        assert sorted(map(int, found)) == list(range(300))

    async def _trickle(producer: txmq.aio.Producer) -> None:
        for number in range(1, 300):
            await producer.send(topic, b"%d" % number)

    _run(shared_broker, topic, scenario, loop=loop)


@pytest.mark.parametrize("loop", RUNS)
def test_every_await_of_a_consumer_may_be_cancelled(shared_broker: BrokerProcess, loop: str) -> None:
    """Cancelled at the first await, the second, ...: nothing is left over, and no message is lost."""
    topic = f"awaits-{loop}"

    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        number, acked = 0, list[bytes]()
        sent = await _send(producer, topic, 1)

        async def life(own: txmq.aio.Client) -> None:
            async with await own.consumer(topic, [topic], options=OPTIONS) as consumer:
                async for message in consumer:
                    await message.ack()
                    acked.append(message.value or b"")
                    await message.ack(sync=True)
                    break
                await consumer.reject((await consumer.poll(1, WAIT_S))[0])
                await consumer.poll(1, WAIT_S)

        ended: object = None
        while isinstance(ended, asyncio.CancelledError) or number == 0:
            number += 1
            sent |= await _send(producer, topic, 2, 2 * number)
            async with await txmq.aio.connect(shared_broker.address) as own:
                before = asyncio.all_tasks()
                task = asyncio.create_task(cancelled_at(life(own), number))
                ended = (await asyncio.gather(task, return_exceptions=True))[0]
                await own.close()
                assert asyncio.all_tasks() <= before, number
        assert ended is None
        assert number > 2
        async with await client.consumer(topic, [topic], options=OPTIONS) as consumer:
            while set(acked) != sent:
                acked += await _taken(consumer, 1)

    _run(shared_broker, topic, scenario, loop=loop, partitions=1)


def test_cancelled_listener_leaves_the_group_and_its_message(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await _send(producer, "leaves", 10)
        for threads in (1, 3):
            consumer = await client.consumer("leaves", ["leaves"], options=OPTIONS)
            is_here = asyncio.Event()

            async def handle(_: txmq.aio.Message, is_here: asyncio.Event = is_here) -> None:
                is_here.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(consumer.run(handle, threads=threads))
            await is_here.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await consumer.close()
            while (await client.groups.describe("leaves"))["members"]:
                await asyncio.sleep(0.01)
        async with await client.consumer("leaves", ["leaves"]) as consumer:
            assert len(await _taken(consumer, 10)) == 10

    _run(shared_broker, "leaves", scenario)


@pytest.mark.parametrize("loop", RUNS)
def test_killed_broker_costs_no_message(tmp_path: Path, loop: str) -> None:
    topic = f"kills-{loop}"

    with BrokerProcess(tmp_path, listen=f"127.0.0.1:{free_port()}") as broker:

        async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
            sent, found = await _send(producer, topic, 50), set[bytes]()
            consumer = await client.consumer(topic, [topic], options=OPTIONS)

            async def handle(message: txmq.aio.Message) -> None:
                await asyncio.sleep(0)
                found.add(message.value or b"")

            listening = asyncio.create_task(consumer.run(handle, threads=2))
            for number in range(1, 3):
                while found != sent:
                    await asyncio.sleep(0.001)
                more = asyncio.create_task(_send(producer, topic, 50, 50 * number))
                await asyncio.sleep(0)
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
                try:
                    sent |= await more
                except txmq.DeliveryUnknownError:
                    sent |= await _send(producer, topic, 50, 50 * number)
            while found != sent:
                await asyncio.sleep(0.001)
            await consumer.close()
            await listening
            async with await client.consumer(topic, [topic]) as after:
                assert await after.poll(timeout=0.3) == []

        _run(broker, topic, scenario, loop=loop)


def test_client_that_closes_closes_its_consumers(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await _send(producer, "closes", 10)
        own = await txmq.aio.connect(shared_broker.address)
        consumer = await own.consumer("closes", ["closes"])
        assert len(await _taken(consumer, 10)) == 10
        await own.close()
        assert [one["offset"] for one in (await client.groups.describe("closes"))["partitions"]] == [10]
        with pytest.raises(ClosedError):
            await consumer.poll()
        await consumer.close()

    _run(shared_broker, "closes", scenario, partitions=1)


_LEFT_OPEN = """
import asyncio, sys, txmq.aio

async def main():
    client = await txmq.aio.connect(sys.argv[1])
    consumer = await client.consumer("left", ["left"])
    async for message in consumer:
        await message.ack(sync=True)
        asyncio.create_task(consumer.poll(timeout=60.0))
        asyncio.create_task(message.reject())
        await asyncio.sleep(0)
        return consumer

asyncio.run(main())
print("over")
"""


def test_loop_that_ends_with_an_open_consumer_is_silent(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await _send(producer, "left", 2)
        command = [sys.executable, "-X", "dev", "-c", _LEFT_OPEN, shared_broker.address]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=WAIT_S, check=False)
        assert (ended.returncode, ended.stdout) == (0, b"over\n")
        assert b"destroyed" not in ended.stderr
        assert b"never" not in ended.stderr
        assert b"Traceback" not in ended.stderr
        async with await client.consumer("left", ["left"]) as consumer:
            assert len(await _taken(consumer, 1)) == 1

    _run(shared_broker, "left", scenario, partitions=1)


@pytest.mark.parametrize("loop", RUNS)
def test_sigterm_ends_listeners_and_reaches_the_former_handler(shared_broker: BrokerProcess, loop: str) -> None:
    topic = f"signals-{loop}"

    heard: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await _send(producer, topic, 10)
        consumers = [await client.consumer(f"{topic}-{number}", [topic]) for number in range(2)]
        finished, both = 0, asyncio.Barrier(2)

        async def handle(_: txmq.aio.Message) -> None:
            nonlocal finished
            await both.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            finished += 1

        await asyncio.gather(*(consumer.run(handle) for consumer in consumers))
        assert finished == 2
        for number in range(2):
            described = await client.groups.describe(f"{topic}-{number}")
            assert [one["offset"] for one in described["partitions"]] == [1]

    try:
        _run(shared_broker, topic, scenario, loop=loop, partitions=1)
        assert heard
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGTERM, former)


class _Watched(FileOffsetStore):
    """A store that notes which threads call it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.threads: set[str] = set()

    def save(self, group: str, positions: Sequence[txmq.OffsetPosition]) -> Collection[tuple[str, int]]:
        self.threads.add(threading.current_thread().name)
        return super().save(group, positions)


def test_stores_that_block_are_called_in_threads(
    shared_broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting: list[str] = []
    opened = sqlite3.connect

    def connect(*given: object, **named: object) -> sqlite3.Connection:
        connecting.append(threading.current_thread().name)
        return opened(*given, **named)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr("txmq.runtime.local_store.sqlite3.connect", connect)

    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await _send(producer, "stores", 10)
        store = _Watched(str(tmp_path / "offsets"))
        options = txmq.ConsumerOptions(
            heartbeat_interval=0.05, retry_delay=0.01, offset_save_interval=0.05, deferred_delay=0.01
        )
        found, has_failed = set[bytes](), False
        for _ in range(2):
            consumer = await client.consumer(
                "stores", ["stores"], max_retries=0, offset_store=store, retry_store=str(tmp_path / "retries"),
                options=options,
            )  # fmt: skip

            async def handle(message: txmq.aio.Message, consumer: txmq.aio.Consumer = consumer) -> None:
                nonlocal has_failed
                if message.value == b"3" and not has_failed:
                    has_failed = True
                    raise LookupError("once")
                found.add(message.value or b"")
                if len(found) % 10 == 0:
                    await consumer.close()

            await consumer.run(handle)
            await _send(producer, "stores", 10, 10)
        assert found == {b"%d" % number for number in range(20)}
        assert all(name.startswith("txmq-blocking") for name in [*store.threads, *connecting])
        assert store.threads
        assert connecting

    _run(shared_broker, "stores", scenario, partitions=1)


def test_retry_topic_keeps_what_fails(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await _send(producer, "retries", 3)
        options = txmq.ConsumerOptions(heartbeat_interval=0.05, retry_delay=0.01, deferred_delay=0.01)
        consumer = await client.consumer("retries", ["retries"], max_retries=0, retry_store="topic", options=options)
        order: list[bytes] = []

        async def handle(message: txmq.aio.Message) -> None:
            order.append(message.value or b"")
            if order == [b"0"]:
                raise LookupError("once")
            if len(order) == 4:
                await consumer.close()

        await consumer.run(handle)
        assert sorted(order) == [b"0", b"0", b"1", b"2"]
        assert [message.value async for message in client.browse("retries.retry")] == [b"0"]

    _run(shared_broker, "retries", scenario, partitions=1)
