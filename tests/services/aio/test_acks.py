"""``tx.ack`` of ``txmq.aio``: consume, process, produce as one step; cancelled anywhere, one output an input."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from txmq.errors import ClosedError, TransactionError, TransactionStateError
from txmq.testing.processes.broker import BrokerProcess, free_port

Scenario = Callable[[txmq.aio.Client, txmq.aio.Producer], Awaitable[None]]
OPTIONS = txmq.ConsumerOptions(heartbeat_interval=0.05, retry_delay=0.01, offset_save_interval=0.05)
WAIT_S, SCENARIO_S = 60.0, 300.0  # a busy machine takes minutes for what is done in seconds
ENOUGH = 80


def _run(broker: BrokerProcess, topic: str, scenario: Scenario) -> None:
    async def main() -> None:
        async with await txmq.aio.connect(broker.address) as client, client.producer() as producer:
            await client.topics.create(topic, partitions=2)
            await client.topics.create(f"{topic}-out", partitions=2)
            async with asyncio.timeout(SCENARIO_S):
                await scenario(client, producer)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def _outputs(client: txmq.aio.Client, topic: str) -> list[int]:
    return sorted([int(message.value or b"") async for message in client.browse(f"{topic}-out")])


async def _step(producer: txmq.aio.Producer, topic: str, message: txmq.Message) -> None:
    async with producer.transaction() as tx:
        await producer.send(f"{topic}-out", message.value or b"", key=message.key)
        await tx.ack(message)


async def _fail(producer: txmq.aio.Producer, message: txmq.Message) -> None:
    async with producer.transaction() as tx:
        await tx.ack(message)
        raise LookupError


def test_offset_is_saved_with_the_decision(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await producer.send_many("steps", [(None, b"%d" % number) for number in range(20)])
        async with await client.consumer("steps", ["steps"], options=OPTIONS) as consumer:
            found = 0
            async for message in consumer:
                await _step(producer, "steps", message)
                found += 1
                if found == 10:
                    break
            (next_one,) = await consumer.poll(1, WAIT_S)
            with pytest.raises(LookupError):
                await _fail(producer, next_one)
            await _step(producer, "steps", next_one)
            with pytest.raises(TransactionStateError, match="acknowledged already"):
                await _step(producer, "steps", next_one)
        async with await client.consumer("steps", ["steps"], options=OPTIONS) as consumer:
            while found < 19:
                for message in await consumer.poll():
                    await _step(producer, "steps", message)
                    found += 1
            assert await consumer.poll(timeout=0.05) == []
        assert await _outputs(client, "steps") == list(range(20))

    _run(shared_broker, "steps", scenario)


def test_step_cancelled_at_every_await_has_one_output(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        number = 0
        async with await client.consumer("cancelled", ["cancelled"], options=OPTIONS) as consumer:
            ended: BaseException | None = BaseException()
            while ended is not None:
                number += 1
                await producer.send("cancelled", b"%d" % number, partition=0)
                (message,) = await consumer.poll(1, WAIT_S)
                task = asyncio.create_task(cancelled_at(_step(producer, "cancelled", message), number))
                ended = (await asyncio.gather(task, return_exceptions=True))[0]
                assert ended is None or isinstance(ended, asyncio.CancelledError)
                await client.host.await_ends(WAIT_S)
                if ended is not None:
                    txid = getattr(ended, "txid", None)
                    outcome = txmq.Outcome.ROLLED_BACK if txid is None else await client.outcome(txid)
                    if outcome is not txmq.Outcome.COMMITTED:
                        await _step(producer, "cancelled", message)
            assert number > 1
        assert await _outputs(client, "cancelled") == list(range(1, number + 1))
        async with await client.consumer("cancelled", ["cancelled"]) as consumer:
            assert await consumer.poll(timeout=0.2) == []

    _run(shared_broker, "cancelled", scenario)


def test_killed_broker_leaves_one_output_an_input(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, listen=f"127.0.0.1:{free_port()}") as broker:

        async def work(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
            async with await client.consumer("kills", ["kills"], options=OPTIONS) as consumer:
                while True:
                    for message in await consumer.poll(1, timeout=0.1):
                        try:
                            await _step(producer, "kills", message)
                        except TransactionError:
                            await message.reject()

        async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
            await producer.send_many("kills", [(b"%d" % n, b"%d" % n) for n in range(ENOUGH)])
            for number in range(6):
                workers = [asyncio.create_task(work(client, producer)) for _ in range(2)]
                while len(await _outputs(client, "kills")) < ENOUGH * (number + 1) // 6:
                    await asyncio.sleep(0.001)
                if number % 2:
                    await asyncio.to_thread(broker.kill)
                    await asyncio.to_thread(broker.start)
                for worker in workers:
                    worker.cancel()
                ended = await asyncio.gather(*workers, return_exceptions=True)
                assert all(isinstance(end, asyncio.CancelledError | ClosedError | txmq.TxmqError) for end in ended)
            assert await _outputs(client, "kills") == list(range(ENOUGH))

        _run(broker, "kills", scenario)
