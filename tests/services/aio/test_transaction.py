"""Local transactions of ``txmq.aio`` against a real broker: all or none, which messages join, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from txmq.errors import TransactionStateError
from txmq.runtime import strands
from txmq.testing.processes.broker import BrokerProcess

Scenario = Callable[[txmq.aio.Client, txmq.aio.Producer], Awaitable[None]]


def _run(broker: BrokerProcess, topic: str, scenario: Scenario, *, timeout: float = 5.0) -> None:
    async def main() -> None:
        async with await txmq.aio.connect(broker.address, timeout=timeout) as client, client.producer() as producer:
            await client.topics.create(topic, partitions=2)
            await scenario(client, producer)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def _values(client: txmq.aio.Client, topic: str) -> list[bytes | None]:
    return [message.value async for message in client.browse(topic)]


def test_block_makes_its_messages_visible_together(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        async with producer.transaction() as tx:
            pending = await producer.send("together", b"0", partition=0)
            assert pending.status is txmq.SendStatus.PENDING
            await tx.send("together", b"1", partition=1)
            assert (await (await producer.send_async("together", b"2", partition=0))).offset is None
            assert len(await producer.send_many("together", [(b"k", b"3")] * 3)) == 3
            assert await client.offsets("together", 0) == txmq.PartitionRange("together", 0, 0, 0)
        assert tx.outcome is txmq.Outcome.COMMITTED
        assert await client.outcome(tx.txid) is txmq.Outcome.COMMITTED
        assert await tx.pending == ()
        await tx.wait_visible()
        results = await tx.results
        assert [(place.partition, place.offset) for place in results[:3]] == [(0, 0), (1, 0), (0, 1)]
        assert len(await _values(client, "together")) == 6
        with pytest.raises(TransactionStateError, match="is over"):
            await tx.send("together", b"late")
        with pytest.raises(TransactionStateError, match="for one block"):
            await tx.__aenter__()

    _run(shared_broker, "together", scenario)


def test_many_messages_of_a_block_do_not_keep_the_loop(
    shared_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: 50,000 held it for half a second."""
    monkeypatch.setattr(strands, "_KEEP_S", 0.0)

    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        async with producer.transaction():
            await producer.send_many("turns", [(b"k", b"%d" % number) for number in range(1000)])
            assert turns > 900
        counting.cancel()
        await asyncio.wait([counting])
        assert await _values(client, "turns") == [b"%d" % number for number in range(1000)]

    _run(shared_broker, "turns", scenario)


def test_error_of_the_body_rolls_back_and_goes_on(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        tx = producer.transaction()

        async def fail() -> None:
            async with tx:
                await producer.send("body", b"x")
                raise LookupError("its own")

        with pytest.raises(LookupError, match="its own"):
            await fail()
        assert tx.outcome is txmq.Outcome.ROLLED_BACK
        await producer.send("body", b"alone")
        assert await _values(client, "body") == [b"alone"]

    _run(shared_broker, "body", scenario)


def test_only_the_task_that_entered_joins_without_a_name(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        async with producer.transaction() as tx:
            with pytest.raises(TransactionStateError, match=r"use tx\.send"):
                await asyncio.create_task(producer.send("tasks", b"stray"))
            await asyncio.gather(*(tx.send("tasks", b"%d" % number, partition=0) for number in range(5)))
        after = asyncio.create_task(producer.send("tasks", b"after", partition=0))
        assert (await after).offset == 5

    _run(shared_broker, "tasks", scenario)


def test_blocks_do_not_nest_and_know_their_client(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        async with await txmq.aio.connect(shared_broker.address) as other, producer.transaction():
            theirs = other.producer()
            with pytest.raises(TransactionStateError, match="do not nest"):
                async with producer.transaction():
                    pass
            with pytest.raises(TransactionStateError, match="another client"):
                await theirs.send("nest", b"x")
        assert await _values(client, "nest") == []

    _run(shared_broker, "nest", scenario)


def test_block_in_an_async_context_manager_is_joined(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        @asynccontextmanager
        async def unit() -> AsyncIterator[txmq.aio.Transaction]:
            async with producer.transaction() as tx:
                yield tx

        async with unit() as tx:
            assert (await producer.send("unit", b"x", partition=0)).status is txmq.SendStatus.PENDING
        assert tx.outcome is txmq.Outcome.COMMITTED

    _run(shared_broker, "unit", scenario)


def test_many_tasks_have_blocks_of_their_own(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        async def work(task: int) -> None:
            for number in range(10):
                async with producer.transaction():
                    await producer.send("many", b"%d" % number, key=b"%d" % task)

        await asyncio.gather(*(work(task) for task in range(16)))
        found: dict[bytes | None, list[bytes | None]] = {}
        async for message in client.browse("many"):
            found.setdefault(message.key, []).append(message.value)
        assert found == {b"%d" % task: [b"%d" % number for number in range(10)] for task in range(16)}

    _run(shared_broker, "many", scenario)


def test_large_transaction_is_streamed_by_several_tasks(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        async with producer.transaction() as tx:
            await asyncio.gather(*(tx.send("streamed", bytes(3 << 20), partition=0) for _ in range(12)))
        assert [place.offset for place in await tx.results] == list(range(12))

    _run(shared_broker, "streamed", scenario)


def test_block_may_be_cancelled_at_every_await(shared_broker: BrokerProcess) -> None:
    """Its messages are both there or none is, as the outcome says that is asked for by its id."""

    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        outcomes, told = set(), list[tuple[str | None, ...]]()
        for number in range(1, 200):
            tx = producer.transaction()

            async def block(tx: txmq.aio.Transaction = tx, number: int = number) -> None:
                try:
                    async with tx:
                        await producer.send("cancel", b"%d" % number, partition=0)
                        await tx.send("cancel", b"%d" % number, partition=1)
                except asyncio.CancelledError as error:
                    told.append((getattr(error, "txid", None), *getattr(error, "__notes__", ())))
                    raise

            task = asyncio.create_task(cancelled_at(block(), number))
            ended = (await asyncio.gather(task, return_exceptions=True))[0]
            await client.host.await_ends(60.0)
            txid = tx.inner.txid_or_none
            outcome = txmq.Outcome.ROLLED_BACK if txid is None else await client.outcome(txid)
            outcomes.add(outcome)
            there = (await _values(client, "cancel")).count(b"%d" % number)
            assert there == (2 if outcome is txmq.Outcome.COMMITTED else 0)
            assert tx.outcome in (outcome, txmq.Outcome.UNKNOWN)
            if ended is None:
                break
            assert isinstance(ended, asyncio.CancelledError)
            if outcome is txmq.Outcome.COMMITTED:
                assert told[-1][0] == txid is not None
                assert txid in str(told[-1][1])
        assert number > 2
        assert txmq.Outcome.COMMITTED in outcomes

    _run(shared_broker, "cancel", scenario)


def test_client_that_closes_lets_ends_go_to_their_end(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        async with await txmq.aio.connect(shared_broker.address) as closing, closing.producer() as theirs:
            tx = theirs.transaction()

            async def block() -> None:
                async with tx:
                    await theirs.send("closing", b"x", partition=0)
                    ended.set()

            ended = asyncio.Event()
            task = asyncio.create_task(block())
            await ended.wait()
            await asyncio.sleep(0)
            task.cancel()
        assert tx.outcome is txmq.Outcome.COMMITTED
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await _values(client, "closing") == [b"x"]

    _run(shared_broker, "closing", scenario)


def test_broker_away_refuses_a_block_before_its_body(broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client, producer: txmq.aio.Producer) -> None:
        await producer.send("away", b"x")
        await asyncio.to_thread(broker.kill)
        with pytest.raises(txmq.errors.TransactionAwayError):
            async with producer.transaction():
                pytest.fail("the body must not run")
        with pytest.raises(txmq.BrokerAwayError):
            await producer.send("away", b"x", timeout=0.2)

    _run(broker, "away", scenario)
