"""Which block ``producer.send`` stands in: each row of the table in ``txmq.client.transaction.current``."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

from tools.simulated.broker import SimulatedBroker
from txmq.client.producer.producer import Producer, ProducerSettings
from txmq.client.transaction import current
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.current import current_transaction
from txmq.errors import TransactionStateError
from txmq.model import Outcome, SendResult, SendStatus
from txmq.runtime.caller import run_alone

STRAY = r"tx\.send"


class Shop(Producer):
    """A producer that notes what goes out alone, of a broker in memory."""

    def __init__(self) -> None:
        self.home = SimulatedBroker()
        super().__init__(self.home, None, ProducerSettings())  # it asks no broker
        self.alone: list[bytes] = []

    def _partitions_of(self, topic: str, wait_s_max: float | None) -> int:
        return 1

    def _send_alone(self, topic: str, partition: int, record: Any, deadline: float, is_selected: bool) -> SendResult:
        self.alone.append(record[1])
        return SendResult(topic, partition, 0, SendStatus.ACKNOWLEDGED)

    @property
    def committed(self) -> list[bytes | None]:
        """What blocks have sent."""
        return self.home.values("orders")

    def say(self, value: bytes) -> SendResult:
        """A message that names no block."""
        return self.send("orders", value)


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    assert current._holding == {}, "a block that is over is held by no frame"
    assert current_transaction() is None


# --- where a block is entered and left in one go ---------------------------------------------------------------------


def test_in_with_and_in_what_it_calls_message_joins(shop: Shop) -> None:
    with shop.transaction():
        shop.say(b"1")
        list(map(shop.say, [b"2", b"3"]))
    with ExitStack() as stack:
        stack.enter_context(shop.transaction())
        shop.say(b"4")
    shop.say(b"5")
    assert (shop.committed, shop.alone) == ([b"1", b"2", b"3", b"4"], [b"5"])


def test_a_block_left_in_another_context_ends_and_poisons_neither(shop: Shop) -> None:
    inside = contextvars.copy_context()
    tx = shop.transaction()
    inside.run(tx.__enter__)
    tx.send("orders", b"1")
    contextvars.copy_context().run(tx.__exit__, None, None, None)
    assert (tx.outcome, shop.committed) == (Outcome.COMMITTED, [b"1"])
    inside.run(shop.say, b"2")
    assert shop.alone == [b"2"]


def test_a_block_left_in_another_thread_ends(shop: Shop) -> None:
    tx = shop.transaction()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tx.__enter__).result()
    tx.send("orders", b"1")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tx.__exit__, None, None, None).result()
    assert shop.committed == [b"1"]


# --- tasks and threads -----------------------------------------------------------------------------------------------


def test_a_task_and_a_thread_with_the_blocks_context_join(shop: Shop) -> None:
    async def work() -> None:
        with shop.transaction():
            await asyncio.gather(*(asyncio.to_thread(shop.say, b"%d" % number) for number in range(3)))

            async def in_a_task() -> None:
                shop.say(b"task")

            await asyncio.create_task(in_a_task())

    asyncio.run(work())
    assert sorted(value or b"" for value in shop.committed) == [b"0", b"1", b"2", b"task"]
    assert shop.alone == []


def test_blocks_of_tasks_that_take_turns_do_not_meet(shop: Shop) -> None:
    async def one(value: bytes) -> Transaction:
        with shop.transaction() as tx:
            await asyncio.sleep(0)
            shop.say(value)
            await asyncio.sleep(0)
        return tx

    async def all_of_them() -> list[Transaction]:
        return list(await asyncio.gather(*(one(b"%d" % number) for number in range(5))))

    done = asyncio.run(all_of_them())
    assert [len(tx.results) for tx in done] == [1] * 5


def test_a_context_that_outlives_its_block_sends_alone(shop: Shop) -> None:
    with shop.transaction():
        copied = contextvars.copy_context()
    copied.run(shop.say, b"late")
    assert shop.alone == [b"late"]


def _in_a_thread(work: Callable[[], object]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised in the test's own thread
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_thread_without_the_blocks_context_sends_alone(shop: Shop) -> None:
    with shop.transaction() as tx:
        _in_a_thread(lambda: shop.say(b"alone"))
        _in_a_thread(lambda: tx.send("orders", b"joins"))

        def mixed() -> None:
            tx.send("orders", b"joins, too")
            shop.say(b"stray")

        with pytest.raises(TransactionStateError, match=STRAY):
            _in_a_thread(mixed)
    assert (shop.committed, shop.alone) == ([b"joins", b"joins, too"], [b"alone"])


def test_what_was_used_and_is_over_is_in_nobodys_way(shop: Shop) -> None:
    elsewhere = contextvars.copy_context()
    with shop.transaction() as tx:
        elsewhere.run(tx.send, "orders", b"joins")
        with pytest.raises(TransactionStateError, match=STRAY):
            elsewhere.run(shop.say, b"stray")
        with pytest.raises(TransactionStateError, match=STRAY):
            elsewhere.run(shop.send_async, "orders", b"stray")
        with pytest.raises(TransactionStateError, match=STRAY):
            elsewhere.run(shop.send_many, "orders", [(None, b"stray")])
    elsewhere.run(shop.say, b"alone")
    assert (shop.committed, shop.alone) == ([b"joins"], [b"alone"])


# --- generators ------------------------------------------------------------------------------------------------------


def _import(shop: Shop, values: list[bytes]) -> Iterator[Transaction]:
    with shop.transaction() as tx:
        for value in values:
            shop.say(value)
            yield tx


def test_a_suspended_generator_captures_none_of_its_callers_messages(shop: Shop) -> None:
    for number, _ in enumerate(_import(shop, [b"in 1", b"in 2"])):
        shop.say(b"out %d" % number)
    assert (shop.committed, shop.alone) == ([b"in 1", b"in 2"], [b"out 0", b"out 1"])


def test_abandoned_generator_rolls_back_only_its_own_messages(shop: Shop) -> None:
    work = _import(shop, [b"in"])
    tx = next(work)
    shop.say(b"out")
    work.close()  # type: ignore[attr-defined]
    assert (tx.outcome, shop.committed, shop.alone) == (Outcome.ROLLED_BACK, [], [b"out"])


def test_dropped_generator_ends_its_block_and_is_freed(shop: Shop) -> None:
    work = _import(shop, [b"in"])
    tx = next(work)
    gone = weakref.ref(work)
    del work
    gc.collect()
    assert (gone(), tx.outcome, current._holding) == (None, Outcome.ROLLED_BACK, {})


def test_use_of_a_suspended_generators_block_is_refused_by_name(shop: Shop) -> None:
    work = _import(shop, [b"in"])
    tx = next(work)
    tx.send("orders", b"by name")
    with pytest.raises(TransactionStateError, match=STRAY):
        shop.say(b"stray")
    assert list(work) == []
    shop.say(b"out")
    assert (shop.committed, shop.alone) == ([b"in", b"by name"], [b"out"])


def test_a_callers_own_block_and_a_generators_do_not_mix(shop: Shop) -> None:
    work = _import(shop, [b"in 1", b"in 2"])
    inner = next(work)
    with shop.transaction() as own:
        shop.say(b"own 1")
        next(work)
        shop.say(b"own 2")
    assert (len(inner.results), len(own.results), shop.committed) == (2, 2, [b"own 1", b"own 2"])
    assert list(work) == []
    assert shop.committed == [b"own 1", b"own 2", b"in 1", b"in 2"]
    assert shop.alone == []


def test_what_is_run_alone_joins_no_generators_block(shop: Shop) -> None:
    def work() -> Iterator[None]:
        with shop.transaction():
            shop.say(b"in")
            run_alone(lambda: shop.say(b"alone"))
            yield
            run_alone(lambda: shop.say(b"alone, too"))

    assert list(work()) == [None]
    assert (shop.committed, shop.alone) == ([b"in"], [b"alone", b"alone, too"])


def test_two_generators_in_turns_keep_their_messages_apart(shop: Shop) -> None:
    for _ in zip(_import(shop, [b"a1", b"a2"]), _import(shop, [b"b1", b"b2", b"b3"]), strict=False):
        pass
    assert shop.alone == []
    assert shop.committed == [b"a1", b"a2"], "the other one was dropped before its end"


def test_generator_joins_its_block_in_whatever_context_it_goes_on(shop: Shop) -> None:
    work = _import(shop, [b"1", b"2", b"3"])
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(contextvars.copy_context().run, next, work).result()
        pool.submit(next, work, None).result()
    assert (shop.committed, shop.alone) == ([b"1", b"2", b"3"], [])


def test_task_begun_inside_a_generators_block_is_refused_by_name(shop: Shop) -> None:
    work = _import(shop, [b"in"])
    next(work)
    copied = contextvars.copy_context()
    with pytest.raises(TransactionStateError, match=STRAY):
        copied.run(shop.say, b"whose?")
    assert list(work) == []
    copied.run(shop.say, b"alone")
    assert (shop.committed, shop.alone) == ([b"in"], [b"alone"])


def test_an_asynchronous_generator_captures_none_of_its_callers_messages(shop: Shop) -> None:
    async def pages() -> AsyncIterator[None]:
        with shop.transaction():
            for number in range(2):
                await asyncio.sleep(0)
                shop.say(b"in %d" % number)
                yield

    async def read() -> None:
        async for _ in pages():
            await asyncio.sleep(0)
            shop.say(b"out")

    asyncio.run(read())
    assert (shop.committed, shop.alone) == ([b"in 0", b"in 1"], [b"out", b"out"])


# --- context managers made of generators -----------------------------------------------------------------------------


@contextmanager
def _unit_of_work(shop: Shop) -> Iterator[Transaction]:
    with shop.transaction() as tx:
        shop.say(b"begin")
        yield tx
        shop.say(b"end")


def test_body_of_context_manager_made_of_generator_joins(shop: Shop) -> None:
    with _unit_of_work(shop):
        shop.say(b"1")
    with ExitStack() as stack:
        stack.enter_context(_unit_of_work(shop))
        shop.say(b"2")
    assert (shop.committed, shop.alone) == ([b"begin", b"1", b"end", b"begin", b"2", b"end"], [])


def test_its_beginning_and_end_join_in_whatever_context_they_run(shop: Shop) -> None:
    unit = _unit_of_work(shop)
    with ThreadPoolExecutor(1) as pool:
        tx = pool.submit(unit.__enter__).result()
        tx.send("orders", b"body")
        pool.submit(unit.__exit__, None, None, None).result()
    assert (shop.committed, shop.alone) == ([b"begin", b"body", b"end"], [])


def test_generator_inside_such_a_with_is_suspended_like_others(shop: Shop) -> None:
    def work() -> Iterator[None]:
        with _unit_of_work(shop):
            shop.say(b"in")
            yield

    running = work()
    next(running)
    shop.say(b"out")
    assert list(running) == []
    assert (shop.committed, shop.alone) == ([b"begin", b"in", b"end"], [b"out"])


def test_the_body_of_an_asynchronous_context_manager_joins(shop: Shop) -> None:
    @asynccontextmanager
    async def unit() -> AsyncIterator[None]:
        with shop.transaction():
            await asyncio.sleep(0)
            yield

    async def work() -> None:
        async with unit():
            shop.say(b"1")
            await asyncio.gather(asyncio.to_thread(shop.say, b"2"))
        shop.say(b"3")

    asyncio.run(work())
    assert (shop.committed, shop.alone) == ([b"1", b"2"], [b"3"])


@pytest.fixture
def unit(shop: Shop) -> Iterator[Transaction]:
    with shop.transaction() as tx:
        yield tx
    assert (shop.committed, shop.alone) == ([b"in the test"], [])


def test_a_test_whose_fixture_holds_a_block_joins(shop: Shop, unit: Transaction) -> None:
    shop.say(b"in the test")
    assert len(unit.results) == 1


# --- a connection that is used elsewhere -----------------------------------------------------------------------------


def test_who_uses_blocks_connection_without_standing_in_it_is_refused(shop: Shop) -> None:
    """``tx.connection`` and the statements on what it returned; see also tests/services/transaction/test_fastapi.py."""
    elsewhere = contextvars.copy_context()
    with shop.transaction() as tx:
        with pytest.raises(TransactionStateError, match="takes no part"):
            elsewhere.run(tx.connection, None)  # type: ignore[arg-type]
        with pytest.raises(TransactionStateError, match=STRAY):
            elsewhere.run(shop.say, b"stray")
    assert shop.alone == []
