"""Half messages of ``txmq.aio`` at a real broker: checkers that are awaited, cancellation, brokers that die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from txmq import Outcome, Resolution
from txmq.errors import ConfigError, TransactionStateError
from txmq.testing.processes.broker import BrokerProcess, free_port

Scenario = Callable[[txmq.aio.Client], Awaitable[None]]
WAIT_S, SCENARIO_S = 60.0, 300.0  # a busy machine takes minutes for what is done in seconds


def _run(broker: BrokerProcess, topic: str, scenario: Scenario) -> None:
    async def main() -> None:
        async with await txmq.aio.connect(broker.address) as client:
            await client.topics.create(topic)
            async with asyncio.timeout(SCENARIO_S):
                await scenario(client)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def _visible(client: txmq.aio.Client, topic: str) -> list[bytes | None]:
    return [message.value async for message in client.browse(topic)]


async def _never(_: txmq.CheckRequest) -> Resolution:
    return Resolution.UNKNOWN


async def _ended(client: txmq.aio.Client, txid: str) -> Outcome:
    while (outcome := await client.outcome(txid)) is Outcome.UNKNOWN:
        await asyncio.sleep(0.01)
    return outcome


def test_end_of_the_block_lets_the_message_out(shared_broker: BrokerProcess) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        async with client.producer(group="ends", checker=_never) as producer:
            async with await producer.half("ends", b"in", key=b"k") as half:
                assert await _visible(client, "ends") == []
                assert (await half.result).status is txmq.SendStatus.PENDING
                assert half.outcome is Outcome.UNKNOWN
            assert (half.outcome, half.pending, (await half.result).offset) == (Outcome.COMMITTED, (), 0)
            dropped = await producer.half("ends", b"out")
            await dropped.rollback()
            assert await client.outcome(dropped.txid) is Outcome.ROLLED_BACK
            with pytest.raises(TransactionStateError, match="decided before"):
                await dropped.commit()
            async with producer.transaction():
                with pytest.raises(TransactionStateError, match="outside of this block"):
                    await producer.half("ends", b"inside")
            assert await _visible(client, "ends") == [b"in"]
        async with client.producer() as without:
            with pytest.raises(ConfigError, match="producer group"):
                await without.half("ends", b"x")
        with pytest.raises(ConfigError, match="a callable"):
            client.producer(group="ends")

    _run(shared_broker, "ends", scenario)


@pytest.mark.parametrize("answer", [Resolution.COMMIT, Resolution.ROLLBACK])
@pytest.mark.parametrize("failure", [LookupError, asyncio.CancelledError])
def test_body_that_fails_has_its_checker_awaited(
    shared_broker: BrokerProcess, answer: Resolution, failure: type[BaseException]
) -> None:
    topic = f"fails-{answer.value}-{failure.__name__}"
    asked: list[txmq.CheckRequest] = []

    async def check(half: txmq.CheckRequest) -> Resolution:
        await asyncio.sleep(0)
        asked.append(half)
        return answer

    async def scenario(client: txmq.aio.Client) -> None:
        async def body() -> None:
            async with await producer.half(topic, b"x", key=b"42"):
                raise failure("its own")

        async with client.producer(group=topic, checker=check) as producer:
            with pytest.raises(failure, match="its own"):
                await body()
            assert [(half.value, half.attempt) for half in asked] == [(b"x", 0)]
            is_out = answer is Resolution.COMMIT
            assert await _visible(client, topic) == ([b"x"] if is_out else [])
            wanted = Outcome.COMMITTED if is_out else Outcome.ROLLED_BACK
            assert await client.outcome(asked[0].txid) is wanted

    _run(shared_broker, topic, scenario)


def test_another_member_answers_for_an_owner_that_has_gone(shared_broker: BrokerProcess) -> None:
    asked: list[int] = []

    async def check(half: txmq.CheckRequest) -> Resolution:
        asked.append(half.attempt)
        await asyncio.sleep(0.001)
        if len(asked) == 1:
            raise LookupError("the first answer is none")
        return Resolution.COMMIT

    async def scenario(client: txmq.aio.Client) -> None:
        async with await txmq.aio.connect(shared_broker.address) as owner:
            half = await owner.producer(group="gone", checker=_never).half("gone", b"left", timeout=1.0)
        client.producer(group="gone", checker=check)
        assert await _ended(client, half.txid) is Outcome.COMMITTED
        assert await _visible(client, "gone") == [b"left"]
        assert len(asked) >= 2

    _run(shared_broker, "gone", scenario)


def test_checker_at_work_does_not_hold_up_the_end(broker: BrokerProcess) -> None:
    asked = asyncio.Event()

    async def check(_: txmq.CheckRequest) -> Resolution:
        asked.set()
        await asyncio.Event().wait()
        return Resolution.COMMIT

    async def main() -> None:
        client = await txmq.aio.connect(broker.address)
        await client.topics.create("at-work")
        owner = await txmq.aio.connect(broker.address)
        await owner.producer(group="at-work", checker=_never).half("at-work", b"left", timeout=1.0)
        await owner.close()
        client.producer(group="at-work", checker=check)
        await asyncio.wait_for(asked.wait(), WAIT_S)

    asyncio.run(asyncio.wait_for(main(), WAIT_S))  # the loop cancels all that it still has


def test_every_await_of_a_half_message_may_be_cancelled(shared_broker: BrokerProcess) -> None:
    """The work is done, or not; after any cancellation the message says the same."""
    done: set[bytes] = set()

    async def check(half: txmq.CheckRequest) -> Resolution:
        return Resolution.COMMIT if half.value in done else Resolution.ROLLBACK

    async def scenario(client: txmq.aio.Client) -> None:
        async def life(value: bytes) -> None:
            async with await producer.half("cancels", value):
                await asyncio.sleep(0)
                done.add(value)
                await asyncio.sleep(0)

        async with client.producer(group="cancels", checker=check) as producer:
            number = 0
            ended: BaseException | None = BaseException()
            while ended is not None:
                number += 1
                task = asyncio.create_task(cancelled_at(life(b"%d" % number), number))
                ended = (await asyncio.gather(task, return_exceptions=True))[0]
                assert ended is None or isinstance(ended, asyncio.CancelledError)
                await client.host.await_ends(WAIT_S)
            assert number > 3
            assert set(await _visible(client, "cancels")) == done
            assert not [one for one in await client.transactions.list() if one["owner_connected"]]

    _run(shared_broker, "cancels", scenario)


def test_decision_reaches_a_broker_that_was_away(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, listen=f"127.0.0.1:{free_port()}") as broker:

        async def scenario(client: txmq.aio.Client) -> None:
            async with client.producer(group="away", checker=_never) as producer:
                half = await producer.half("away", b"x")
                await asyncio.to_thread(broker.kill)
                deciding = asyncio.create_task(half.commit())
                await asyncio.sleep(0)
                deciding.cancel()
                with suppress(asyncio.CancelledError):
                    await deciding
                await asyncio.to_thread(broker.start)
                while half.outcome is Outcome.UNKNOWN:
                    await asyncio.sleep(0.01)
                assert await _visible(client, "away") == [b"x"]

        _run(broker, "away", scenario)
