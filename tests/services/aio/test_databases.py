"""Databases in the blocks of ``txmq.aio``, on SQLite and MariaDB: what holds for threads holds for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import MySQLdb
import pytest

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from tools.simulated.clock import SimClock
from txmq.errors import RolledBackError, TransactionStateError
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import MySQLResource
from txmq.xa.database import resource as databases

from .shops import MariaDBShop, Service, Shop, SQLiteShop, TwoShops, on_loop, serving

TASKS = 64
_request: ContextVar[str] = ContextVar("request", default="none")


@pytest.fixture(params=["sqlite", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    if request.param == "sqlite":
        return SQLiteShop(tmp_path)
    return MariaDBShop(request.getfixturevalue("mariadb"))


Scenario = Callable[[Service], Awaitable[None]]


@pytest.fixture
def run(shared_broker: BrokerProcess, shop: Shop, request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Runs a scenario with a service of its own."""

    def run_scenario(scenario: Scenario) -> None:
        async def work() -> None:
            name = request.node.originalname.removeprefix("test_")
            async with serving(shared_broker, shop, f"{name}-{type(shop).__name__}") as service:
                await scenario(service)

        on_loop(work)

    return run_scenario


def test_row_and_message_are_both_there(run: Callable[[Scenario], None]) -> None:
    async def scenario(service: Service) -> None:
        tx = await service.order(b"1")
        assert tx.outcome is txmq.Outcome.COMMITTED
        assert [place.offset for place in await tx.results] == [0]
        assert await service.client.outcome(tx.txid) is txmq.Outcome.COMMITTED
        assert await service.check() == [b"1"]
        with pytest.raises(TransactionStateError, match="is over"):
            tx.connection(service.shop.resource)

    run(scenario)


def test_error_of_the_body_undoes_both(run: Callable[[Scenario], None]) -> None:
    async def scenario(service: Service) -> None:
        tx = service.producer.transaction(service.shop.resource)

        async def fail() -> None:
            async with tx:
                await service.write(tx, b"lost")
                raise LookupError

        with pytest.raises(LookupError):
            await fail()
        assert tx.outcome is txmq.Outcome.ROLLED_BACK
        await service.order(b"2")
        assert await service.check() == [b"2"]

    run(scenario)


def test_cursor_of_a_block_is_awaited(run: Callable[[Scenario], None]) -> None:
    async def scenario(service: Service) -> None:
        async with service.producer.transaction(service.shop.resource) as tx:
            connection = tx.connection(service.shop.resource)
            async with connection.cursor() as cursor:
                assert cursor.rowcount == -1
                await cursor.executemany(service.shop.insert, [(b"%03d" % number,) for number in range(150)])
                assert cursor.rowcount == 150
                await cursor.execute("SELECT value FROM orders ORDER BY value")
                assert cursor.description[0][0] == "value"
                assert await cursor.fetchone() == (b"000",)
                assert await cursor.fetchmany(2) == [(b"001",), (b"002",)]
                assert [value async for (value,) in cursor] == [b"%03d" % number for number in range(3, 150)]
            found = await connection.execute("SELECT COUNT(*) FROM orders")
            assert await found.fetchall() == [(150,)]
            await connection.execute("DELETE FROM orders")
            for name in ("commit", "rollback", "close"):
                assert not hasattr(connection, name)

    run(scenario)


def test_work_in_the_connections_thread_keeps_the_context(run: Callable[[Scenario], None]) -> None:
    async def scenario(service: Service) -> None:
        def write(connection: Any) -> str:
            cursor = connection.cursor()
            cursor.execute(service.shop.insert, (b"run",))
            cursor.execute(service.shop.take)
            return _request.get()

        async with service.producer.transaction(service.shop.resource) as tx:
            _request.set("this one")
            assert await tx.connection(service.shop.resource).run(write) == "this one"
            await tx.send(service.topic, b"run")
        assert await service.check() == [b"run"]

    run(scenario)


def test_statement_that_failed_dooms_unless_in_a_savepoint(run: Callable[[Scenario], None]) -> None:
    async def scenario(service: Service) -> None:
        resource = service.shop.resource
        async with service.producer.transaction(resource) as tx:
            await service.write(tx, b"kept")

            async def fail_in_part() -> None:
                async with tx.savepoint(resource):
                    await tx.send(service.topic, b"taken back")
                    await tx.connection(resource).execute("INSERT INTO absent VALUES (1)")

            with pytest.raises(Exception, match="absent"):
                await fail_in_part()
            async with tx.savepoint(resource):
                await service.write(tx, b"in it")
        doomed = service.producer.transaction(resource)

        async def fail() -> None:
            async with doomed:
                await service.write(doomed, b"doomed")
                with pytest.raises(Exception, match="absent"):
                    await doomed.connection(resource).execute("INSERT INTO absent VALUES (1)")

        with pytest.raises(RolledBackError, match="absent"):
            await fail()
        assert await service.check() == [b"kept", b"in it"]

    run(scenario)


def test_tasks_that_meet_in_one_row_all_commit(run: Callable[[Scenario], None]) -> None:
    """A pool of fewer threads than tasks would stand still: all of them wait for one, which has none for its COMMIT."""

    async def scenario(service: Service) -> None:
        async def work(task: int) -> None:
            for number in range(2):
                tx = service.producer.transaction(service.shop.resource)
                async with tx:
                    await tx.connection(service.shop.resource).execute(service.shop.take)
                    await service.producer.send(service.topic, b"%d-%d" % (task, number), key=b"k")
                    value = (b"%d-%d" % (task, number),)
                    await tx.connection(service.shop.resource).execute(service.shop.insert, value)

        async with asyncio.timeout(60.0):
            await asyncio.gather(*(work(task) for task in range(TASKS)))
        assert len(await service.check()) == TASKS * 2

    run(scenario)


def test_loop_goes_on_while_a_statement_waits(run: Callable[[Scenario], None]) -> None:
    async def scenario(service: Service) -> None:
        with service.shop.stock_held():
            waiting = asyncio.create_task(service.order(b"waits"))
            for number in range(20):
                await service.producer.send(service.topic + "-other", b"%d" % number)
            assert not waiting.done()
        await waiting
        assert await service.check() == [b"waits"]

    async def with_topic(service: Service) -> None:
        await service.client.topics.ensure(service.topic + "-other")
        await scenario(service)

    run(with_topic)


def test_cancelled_statement_ends_the_block_at_once(shared_broker: BrokerProcess, mariadb: MariaDB) -> None:
    """Its connection takes no second statement while the first one runs: it is closed after that one."""
    shop = MariaDBShop(mariadb)

    async def work() -> None:
        async with serving(shared_broker, shop, "cancelled-statement") as service:
            await service.order(b"1")
            tx = service.producer.transaction(shop.resource)
            with shop.stock_held():
                task = asyncio.create_task(service.order_in(tx, b"2"))
                async with asyncio.timeout(60.0):
                    while not _is_waiting(shop):
                        await asyncio.sleep(0.005)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    async with asyncio.timeout(30.0):  # far below what the lock is waited for
                        await task
                assert tx.outcome is txmq.Outcome.ROLLED_BACK
                assert _is_waiting(shop)  # it runs still
            await service.order(b"3")
            assert await service.check() == [b"1", b"3"]
            assert await service.client.transactions.list(state="heuristic") == []

    on_loop(work)


def _is_waiting(shop: MariaDBShop) -> bool:
    return _waiting(shop) > 0


def _waiting(shop: MariaDBShop) -> int:
    """How many statements wait for the row that is held."""
    running = shop.database.execute("SELECT info FROM information_schema.processlist WHERE info LIKE 'UPDATE stock%'")
    return len(running)


def test_statements_that_were_given_up_are_bounded(
    shared_broker: BrokerProcess, mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests given up while a row is locked leave a connection each: no more than a few, however many come."""
    monkeypatch.setattr(databases, "GIVEN_UP_MAX", 3)
    shop = MariaDBShop(mariadb)

    async def work() -> None:
        async with serving(shared_broker, shop, "given-up") as service:

            async def late(number: int) -> None:
                """Cancelled when its statement waits, unless it is refused before."""
                task = asyncio.create_task(service.order(b"late %d" % number))
                async with asyncio.timeout(60.0):
                    while not task.done() and _waiting(shop) <= number:
                        await asyncio.sleep(0.005)
                task.cancel()
                await task

            with shop.stock_held():
                for number in range(3):
                    with pytest.raises(asyncio.CancelledError):
                        await late(number)
                opened = len(shop.opened)
                for number in range(3, 8):
                    with pytest.raises(RolledBackError, match="run on that were given up") as refused:
                        await late(number)
                    assert refused.value.retriable
                assert len(shop.opened) == opened
            async with asyncio.timeout(60.0):
                while _is_waiting(shop):
                    await asyncio.sleep(0.005)
                while await _is_refused(service.order(b"next")):
                    await asyncio.sleep(0.005)
            assert await service.check() == [b"next"]

    on_loop(work)


async def _is_refused(order: Awaitable[object]) -> bool:
    try:
        await order
    except RolledBackError:
        return True
    return False


def test_timeout_around_a_statement_dooms_the_block(shared_broker: BrokerProcess, mariadb: MariaDB) -> None:
    shop = MariaDBShop(mariadb)

    async def work() -> None:
        async with serving(shared_broker, shop, "timeout-statement") as service:

            async def block() -> None:
                async with service.producer.transaction(shop.resource) as tx:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.3):
                            await service.write(tx, b"late")

            with shop.stock_held(), pytest.raises(RolledBackError, match="cancelled while it ran"):
                await block()
            await service.order(b"next")
            assert await service.check() == [b"next"]

    on_loop(work)


def test_block_may_be_cancelled_at_every_await(run: Callable[[Scenario], None]) -> None:
    async def scenario(service: Service) -> None:
        await service.order(b"0")
        outcomes, told = set(), list[str | None]()

        async def order(tx: txmq.aio.Transaction, value: bytes) -> None:
            try:
                await service.order_in(tx, value)
            except asyncio.CancelledError as error:
                told.append(getattr(error, "txid", None))
                raise

        for number in range(1, 200):
            value = b"%d" % number
            tx = service.producer.transaction(service.shop.resource)
            task = asyncio.create_task(cancelled_at(order(tx, value), number))
            ended = (await asyncio.gather(task, return_exceptions=True))[0]
            await service.client.host.await_ends(60.0)
            rows = await asyncio.to_thread(service.shop.rows)
            txid = tx.inner.txid_or_none
            if value in rows:
                assert txid is not None
                assert await service.client.outcome(txid) is txmq.Outcome.COMMITTED
            assert tx.outcome is (txmq.Outcome.COMMITTED if value in rows else txmq.Outcome.ROLLED_BACK) or (
                tx.outcome is txmq.Outcome.UNKNOWN and value not in rows
            )
            outcomes.add(value in rows)
            if ended is None:
                break
            assert isinstance(ended, asyncio.CancelledError)
            if value in rows:
                assert told[-1] == txid
        await service.check()
        assert number > 5
        assert outcomes == {True, False}

    run(scenario)


def test_threads_and_tasks_use_one_resource(shared_broker: BrokerProcess, shop: Shop) -> None:
    """A service with synchronous and asynchronous endpoints; each kind has connections of its own."""

    async def scenario() -> None:
        async with serving(shared_broker, shop, topic) as service:
            for number in range(3):
                await service.order(b"task-%d" % number)
                await asyncio.to_thread(order, b"thread-%d" % number)
            assert len(await service.check()) == 6

    def order(value: bytes) -> None:
        with (
            txmq.connect(shared_broker.address) as client,
            client.producer() as producer,
            producer.transaction(shop.resource) as tx,
        ):
            cursor = tx.connection(shop.resource).cursor()
            cursor.execute(shop.insert, (value,))
            producer.send(topic, value, key=b"k")
            cursor.execute(shop.take)

    topic = f"both-{type(shop).__name__}"
    on_loop(scenario)


def test_loop_that_shuts_down_leaves_no_order_torn(shared_broker: BrokerProcess, shop: Shop) -> None:
    """asyncio.run cancels what is under way, the ends of blocks, too."""

    async def interrupted(after: int) -> None:
        client = await txmq.aio.connect(shared_broker.address)
        producer = client.producer()
        await client.topics.ensure(topic)
        await asyncio.to_thread(shop.resource.install)
        service = Service(client, producer, shop, topic)
        tasks = [asyncio.create_task(service.order(b"%d-%d" % (after, number))) for number in range(16)]
        for _ in range(after):
            await asyncio.sleep(0)
        await asyncio.wait(tasks, timeout=0.002 * after)

    async def check() -> None:
        async with serving(shared_broker, shop, topic) as service:
            await service.order(b"last")
            await service.check()

    topic = f"shutdown-{type(shop).__name__}"
    for after in (0, 1, 3, 9, 27):
        asyncio.run(interrupted(after))
        shop.resource.close()
    on_loop(check)


def test_two_mariadb_databases_commit_by_two_phases(shared_broker: BrokerProcess, mariadb: MariaDB) -> None:
    async def work() -> None:
        two = TwoShops(mariadb)
        async with await txmq.aio.connect(shared_broker.address) as client, client.producer() as producer:
            await client.topics.ensure("two-phase")
            await asyncio.to_thread(two.install)
            orders = [
                two.order(producer, producer.transaction(*two.resources), b"%d" % each, "two-phase")
                for each in range(16)
            ]
            await asyncio.gather(*orders)
            found = sorted([message.value or b"" async for message in client.browse("two-phase")])
            assert found == sorted(two.shops[0].rows()) == sorted(two.shops[1].rows())
            assert len(found) == 16
            two.close()

    on_loop(work)


def test_branch_starts_with_its_first_statement_in_the_connections_thread(
    shared_broker: BrokerProcess, mariadb: MariaDB
) -> None:
    sent: list[bytes] = []

    class Noting(MySQLdb.connections.Connection):  # type: ignore[misc]  # the driver has no types
        def query(self, query: Any) -> None:
            sent.append(query if isinstance(query, bytes) else query.encode())
            super().query(query)

    async def work() -> None:
        shop = MariaDBShop(mariadb)
        arguments = mariadb.connect_arguments() | {"db": shop.database.database}
        resource = MySQLResource("xa", connect=lambda: Noting(**arguments), clock=SimClock())
        async with await txmq.aio.connect(shared_broker.address) as client, client.producer() as producer:
            await client.topics.ensure("late-start")
            await asyncio.to_thread(resource.install)
            for value in (b"a", b"b"):
                sent.clear()
                async with producer.transaction(resource) as tx:
                    await tx.connection(resource).execute(shop.insert, (value,))
                    await producer.send("late-start", value)
            words = (b"XA START", b"INTO orders", b"XA PREPARE", b"XA COMMIT")
            found = [[word for word in words if word in query] for query in sent]  # a resolver sends others
            assert [some for some in found if some] == [[*words[:2]], [words[2]], [words[3]]]
            assert shop.rows() == [b"a", b"b"]
            resource.close()

    on_loop(work)


def test_two_phases_may_be_cancelled_at_every_await(shared_broker: BrokerProcess, mariadb: MariaDB) -> None:
    async def work() -> None:
        two, topic = TwoShops(mariadb), "two-phase-cancelled"
        async with await txmq.aio.connect(shared_broker.address) as client, client.producer() as producer:
            await client.topics.ensure(topic)
            await asyncio.to_thread(two.install)
            outcomes: dict[txmq.Outcome, set[bytes]] = {outcome: set() for outcome in txmq.Outcome}
            ended: BaseException | None = BaseException()
            number = 0
            while ended is not None:
                number += 1
                assert number < 200
                for resource in two.resources:  # each block makes its connections, so that none has fewer awaits
                    resource.close()
                tx = producer.transaction(*two.resources)
                task = asyncio.create_task(cancelled_at(two.order(producer, tx, b"%d" % number, topic), number))
                ended = None
                try:
                    await task
                except asyncio.CancelledError as error:  # gather would give another one
                    ended = error
                await client.host.await_ends(60.0)
                outcomes[tx.outcome].add(b"%d" % number)
                if ended is not None and tx.outcome is txmq.Outcome.COMMITTED:
                    assert getattr(ended, "txid", None) == tx.txid
            assert outcomes[txmq.Outcome.ROLLED_BACK]
            async with asyncio.timeout(60.0):
                while await client.transactions.list() or await asyncio.to_thread(two.prepared):
                    await asyncio.sleep(0.01)
            found = [message.value or b"" async for message in client.browse(topic)]
            assert set(found) == outcomes[txmq.Outcome.COMMITTED]  # unknown: it had not begun
            assert sorted(found) == sorted(two.shops[0].rows()) == sorted(two.shops[1].rows())
        two.close()

    on_loop(work)


def test_connection_of_the_caller_stays_open_and_his(shared_broker: BrokerProcess, mariadb: MariaDB) -> None:
    shop = MariaDBShop(mariadb)

    async def work() -> None:
        async with serving(shared_broker, shop, "lent") as service:
            mine = shop.connect()
            for number in range(2):
                tx = await service.order(b"%d" % number, shop.resource.using(mine))
                assert tx.outcome is txmq.Outcome.COMMITTED
            cursor = mine.cursor()
            cursor.execute("SELECT COUNT(*) FROM orders")
            assert cursor.fetchone() == (2,)
            mine.close()
            with pytest.raises(MySQLdb.Error):
                await service.order(b"3", shop.resource.using(mine))
            assert len(await service.check()) == 2

    on_loop(work)
