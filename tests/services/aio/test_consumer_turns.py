"""Consumers of ``txmq.aio`` share the loop with other tasks while their messages are there."""

from __future__ import annotations

import asyncio

import pytest

import txmq
import txmq.aio
from txmq.runtime import strands
from txmq.testing.processes.broker import BrokerProcess

OPTIONS = txmq.ConsumerOptions(heartbeat_interval=0.05)


def test_messages_that_are_there_do_not_keep_the_loop(
    shared_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by iteration, nor by polls, nor by a handler that awaits nothing: heartbeats share the loop."""
    monkeypatch.setattr(strands, "_KEEP_S", 0.0)

    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await producer.send_many("keeps", [(None, b"%d" % number) for number in range(300)])
        for way in range(3):
            turns = [0]

            async def count(turns: list[int] = turns) -> None:
                while True:
                    turns[0] += 1
                    await asyncio.sleep(0)

            counting = asyncio.create_task(count())
            async with await client.consumer(f"keeps-{way}", ["keeps"], options=OPTIONS, start="earliest") as consumer:
                seen = await _turns_between(consumer, way, turns)
            counting.cancel()
            assert len(set(seen)) > 200 // (1, 10, 1)[way], way

    async def main() -> None:
        async with await txmq.aio.connect(shared_broker.address) as client, client.producer() as producer:
            await client.topics.create("keeps", partitions=1)
            await scenario(client, producer)

    asyncio.run(main())


async def _turns_between(consumer: txmq.aio.Consumer, way: int, turns: list[int]) -> list[int]:
    """How many turns of the loop there had been at each of 300 messages, or polls of ten."""
    seen: list[int] = []
    if way == 0:
        async for _ in consumer:
            seen.append(turns[0])
            if len(seen) == 300:
                return seen
    elif way == 1:
        found = 0
        while found < 300:
            found += len(await consumer.poll(10))
            seen.append(turns[0])
    else:

        async def handle(_: txmq.aio.Message) -> None:
            seen.append(turns[0])
            if len(seen) == 300:
                await consumer.close()

        await consumer.run(handle)
    return seen
