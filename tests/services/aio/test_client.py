"""``txmq.aio`` against a real broker: the contract of the client, sends that share batches, cancellation, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from txmq.log.batch import headers
from txmq.testing.processes.broker import BrokerProcess, free_port

Scenario = Callable[[txmq.aio.Client], Awaitable[None]]


def _run(broker: BrokerProcess, scenario: Scenario, *, timeout: float = 5.0) -> None:
    async def main() -> None:
        async with await txmq.aio.connect(broker.address, timeout=timeout) as client:
            await scenario(client)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@asynccontextmanager
async def _topic(client: txmq.aio.Client, name: str, partitions: int = 1) -> AsyncIterator[txmq.aio.Producer]:
    await client.topics.create(name, partitions=partitions)
    async with client.producer() as producer:
        await producer.send(name, b"first", partition=0)
        yield producer


def test_operators_calls_answer_as_those_of_the_synchronous_client(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "calls", 2) as producer:
            sent = [await producer.send("calls", b"%d" % number, key=b"%d" % number) for number in range(20)]
            assert all(result.is_success for result in sent)
            many = await producer.send_many("calls", [(None, b"x"), (b"k", b"y")] * 5000)
            assert len({(result.partition, result.offset) for result in many}) == 10_000
        with txmq.connect(shared_broker.address) as twin:
            assert [one async for one in client.browse("calls")] == list(twin.browse("calls"))
            assert await client.topics.describe("calls") == twin.topics.describe("calls")
            assert await client.topics.watermarks("calls") == twin.topics.watermarks("calls")
            assert await client.fetch("calls", 1, 3, 100) == twin.fetch("calls", 1, 3, 100)
            assert await client.fetch_raw("calls", 0, 0) == twin.fetch_raw("calls", 0, 0)
            assert await client.offsets("calls", 0) == twin.offsets("calls", 0)
            assert await client.offset_for("calls", 1, 0) == 0
            assert await client.groups.list() == twin.groups.list()
            assert await client.transactions.list() == []
            assert "calls" in await client.stats("topics")
        await client.ping()
        await client.topics.alter("calls", partitions=3)
        assert len(await client.topics.watermarks("calls")) == 3
        await client.topics.ensure("calls")
        await client.topics.delete("calls")
        with pytest.raises(txmq.UnknownTopicError):
            await client.topics.describe("calls")
        with pytest.raises(txmq.UnknownTopicError):
            _ = [one async for one in client.browse("calls")]

    _run(shared_broker, scenario)


def test_sends_of_one_turn_share_a_batch_per_partition(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "turns", 2) as producer:
            places = await asyncio.gather(
                *(producer.send("turns", b"%d" % number, partition=number % 2) for number in range(64))
            )
            assert [place.offset for place in places if place.partition == 0] == list(range(1, 33))
            for partition, first in ((0, 1), (1, 0)):
                raw = await client.fetch_raw("turns", partition, first)
                assert [(base, count) for _, _, base, count, _ in headers(raw)] == [(first, 32)]

    _run(shared_broker, scenario)


def test_messages_of_a_task_keep_their_order(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "order") as producer:

            async def work(task: int) -> None:
                for number in range(50):
                    await producer.send("order", b"%d" % number, key=b"%d" % task)

            await asyncio.gather(*(work(task) for task in range(8)))
            found: dict[bytes | None, list[bytes | None]] = {}
            async for message in client.browse("order"):
                found.setdefault(message.key, []).append(message.value)
            assert found.pop(None) == [b"first"]
            assert found == {b"%d" % task: [b"%d" % number for number in range(50)] for task in range(8)}

    _run(shared_broker, scenario)


def test_futures_of_send_async_hold_results_and_errors(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "futures") as producer:
            futures = [await producer.send_async("futures", b"x") for _ in range(3)]
            assert [(await future).offset for future in futures] == [1, 2, 3]
            with pytest.raises(txmq.errors.TooLargeError):
                await producer.send_async("futures", bytes(17 << 20))
            last = await producer.send_async("futures", b"last")
            await producer.flush()
            assert last.done()

    _run(shared_broker, scenario)


def test_cancelled_send_leaves_the_others_alone(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "cancelled") as producer:
            tasks = [asyncio.create_task(producer.send("cancelled", b"%d" % number)) for number in range(20)]
            for turns in range(10):
                await asyncio.sleep(0)
                tasks[turns].cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            kept = [b"%d" % number for number, end in enumerate(ended) if isinstance(end, txmq.SendResult)]
            stored = [message.value async for message in client.browse("cancelled")]
            assert len(stored) == len(set(stored))
            assert set(kept) <= set(stored)
            assert len(kept) >= 10

    _run(shared_broker, scenario)


def test_every_await_of_a_client_may_be_cancelled(shared_broker: BrokerProcess) -> None:
    """Cancelled at the first await, at the second, ...: what was begun ends, and nothing is left over."""

    async def life() -> None:
        async with await txmq.aio.connect(shared_broker.address) as client:
            await client.topics.ensure("lives")
            async with client.producer() as producer:
                await producer.send("lives", b"x")

    async def main() -> None:
        for number in range(1, 200):
            task = asyncio.create_task(cancelled_at(life(), number))
            ended = (await asyncio.gather(task, return_exceptions=True))[0]
            closing = asyncio.all_tasks() - {asyncio.current_task()}
            if closing:
                await asyncio.wait(closing, timeout=60.0)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            if ended is None:
                assert number > 5
                return
            assert isinstance(ended, asyncio.CancelledError)
        pytest.fail("the life of a client does not end")

    asyncio.run(main())


def test_broker_that_comes_back_has_each_message_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("again")
    with BrokerProcess(directory, listen=f"127.0.0.1:{free_port()}") as broker:

        async def scenario(client: txmq.aio.Client) -> None:
            async with _topic(client, "t", 2) as producer:
                tasks = [asyncio.create_task(producer.send("t", b"%d" % number, timeout=60.0)) for number in range(100)]
                await asyncio.sleep(0)
                await asyncio.to_thread(broker.kill)
                later = [asyncio.create_task(producer.send("t", b"later", timeout=60.0)) for _ in range(100)]
                await asyncio.to_thread(broker.start)
                results = await asyncio.gather(*tasks, *later)
                assert len({(place.partition, place.offset) for place in results}) == 200
                assert len([one async for one in client.browse("t")]) == 201

        _run(broker, scenario)


def test_broker_away_is_told_as_to_threads(broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "t") as producer:
            await asyncio.to_thread(broker.kill)
            with pytest.raises(txmq.BrokerAwayError):
                await producer.send("t", b"x", timeout=0.3)
            with pytest.raises(txmq.BrokerAwayError):
                await client.ping()

    _run(broker, scenario)
    with pytest.raises(txmq.BrokerAwayError, match="is a broker running there"):
        asyncio.run(txmq.aio.connect(broker.address, timeout=0.3))

    async def lazy() -> None:
        async with await txmq.aio.connect(broker.address, timeout=0.3, lazy=True) as client:
            with pytest.raises(txmq.BrokerAwayError):
                await client.topics.list()

    asyncio.run(lazy())


def test_frozen_broker_leaves_a_send_unknown_and_the_loop_free(broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "t") as producer:
            broker.pause()
            turns = 0
            waiting = asyncio.create_task(producer.send("t", b"x", timeout=0.5))
            while not waiting.done():
                turns += 1
                await asyncio.sleep(0)
            broker.resume()
            with pytest.raises(txmq.DeliveryUnknownError):
                await waiting
            assert turns > 100
            assert (await producer.send("t", b"y", timeout=60.0)).offset == 2

    _run(broker, scenario)


def test_sender_that_was_woken_for_nothing_wakes_again(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "woken") as producer:
            sender = producer.inner._senders.single
            assert sender is not None
            assert sender._background is not None
            sender._background.nudge()  # as for messages that went to another home before it ran
            for _ in range(20):
                await asyncio.sleep(0)
            async with asyncio.timeout(60.0):
                assert (await producer.send("woken", b"x")).offset == 1

    _run(shared_broker, scenario)


def test_full_buffer_makes_senders_wait(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        await client.topics.create("full")
        async with client.producer(buffer_size_bytes=100_000, compression="lz4") as producer:
            sent = await asyncio.gather(*(producer.send("full", bytes(30_000)) for _ in range(40)))
            assert [place.offset for place in sent] == list(range(40))

    _run(shared_broker, scenario)


def test_large_message_leaves_by_and_by(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        await client.topics.create("large")
        async with client.producer() as producer:
            sent = await asyncio.gather(*(producer.send("large", bytes(8 << 20)) for _ in range(4)))
            assert [place.offset for place in sent] == list(range(4))

    _run(shared_broker, scenario)


def test_closed_client_and_producer_refuse_and_closing_ends_sends(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        await client.topics.create("closed")
        producer = client.producer()
        unfinished = [asyncio.create_task(producer.send("closed", b"x")) for _ in range(5)]
        await asyncio.sleep(0)
        await client.close()
        ended = await asyncio.gather(*unfinished, return_exceptions=True)
        assert all(isinstance(end, txmq.TxmqError | txmq.SendResult) for end in ended)
        with pytest.raises(txmq.errors.ClosedError):
            await producer.send("closed", b"x")
        with pytest.raises(txmq.errors.ClosedError):
            await client.ping()
        await client.close()

    _run(shared_broker, scenario)


def test_send_inside_a_synchronous_block_is_refused(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with _topic(client, "blocks") as producer:
            with (
                txmq.connect(shared_broker.address) as other,
                other.producer() as theirs,
                theirs.transaction(),
                pytest.raises(txmq.errors.TransactionStateError),
            ):
                await producer.send("blocks", b"x")
            assert [message.value async for message in client.browse("blocks")] == [b"first"]

    _run(shared_broker, scenario)


def test_two_loops_have_clients_of_their_own(shared_broker: BrokerProcess) -> None:
    async def keep() -> txmq.aio.Client:
        async with await txmq.aio.connect(shared_broker.address) as client:
            return client

    client = asyncio.run(keep())
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        asyncio.run(client.ping())


def test_uvloop_runs_it_as_well(shared_broker: BrokerProcess) -> None:
    import uvloop

    async def main() -> None:
        async with await txmq.aio.connect(shared_broker.address) as client, _topic(client, "uvloop") as producer:
            sent = await asyncio.gather(*(producer.send("uvloop", bytes(200_000)) for _ in range(20)))
            assert [place.offset for place in sent] == list(range(1, 21))

    uvloop.run(main())
