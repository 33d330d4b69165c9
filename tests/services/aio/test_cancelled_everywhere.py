"""Cancellation at every await where features meet: with lent connections, savepoints, and acks in MySQL."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import chosen_program
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import MySQLResource

from .shops import MariaDBShop, Service, Shop, SQLiteShop, on_loop, serving

AWAITS_MAX = 200
Order = Callable[[Service, txmq.aio.Transaction, bytes], Awaitable[None]]


@pytest.fixture(params=["sqlite", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    if request.param == "sqlite":
        return SQLiteShop(tmp_path)
    return MariaDBShop(request.getfixturevalue("mariadb"))


async def _cancelled_everywhere(
    service: Service, new: Callable[[], txmq.aio.Transaction], order: Order = Service.order_in
) -> set[bytes]:
    """Orders, each cancelled one await later than the one before, until one is not; the values that were committed."""
    committed = set()
    for number in range(1, AWAITS_MAX):
        value, tx = b"%d" % number, new()
        cancelled = await asyncio.create_task(cancelled_at(_caught(order(service, tx, value)), number))
        await service.client.host.await_ends(60.0)
        is_there = value in await asyncio.to_thread(service.shop.rows)
        assert (tx.outcome is txmq.Outcome.COMMITTED) is is_there
        if is_there:
            committed.add(value)
            assert cancelled is None or getattr(cancelled, "txid", None) == tx.txid
        if cancelled is None:
            assert is_there
            return committed
    raise AssertionError("it does not end")


async def _caught(work: Awaitable[None]) -> asyncio.CancelledError | None:
    try:
        await work
    except asyncio.CancelledError as error:
        return error
    return None


def _lent(shop: Shop) -> Any:
    if isinstance(shop, SQLiteShop):
        return sqlite3.connect(shop.path, timeout=30.0, check_same_thread=False)
    return shop.connect()


def _state(connection: Any) -> str:
    with suppress(Exception):  # it is closed
        cursor = connection.cursor()
        if isinstance(connection, sqlite3.Connection):
            return "in a transaction" if connection.in_transaction else "idle"
        cursor.execute(f"SELECT {chosen_program().in_transaction}")
        return "in a transaction" if cursor.fetchone()[0] else "idle"
    return "closed"


@pytest.fixture(params=["sqlite", "mariadb", "xa"])
def lending(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    """Databases for both kinds of resources."""
    if request.param == "sqlite":
        return SQLiteShop(tmp_path)
    shop = MariaDBShop(request.getfixturevalue("mariadb"))
    if request.param == "xa":
        shop.resource = MySQLResource("shop", connect=shop.connect)  # type: ignore[assignment]
    return shop


def test_lent_connection_is_never_left_in_a_transaction(shared_broker: BrokerProcess, lending: Shop) -> None:
    """Found: of a block that was cancelled while it began, the transaction stayed open, and its locks held."""
    shop = lending

    async def work() -> None:
        topic, lent = f"lent-{type(shop).__name__}-{type(shop.resource).__name__}", list[Any]()
        async with serving(shared_broker, shop, topic) as service:

            def new() -> txmq.aio.Transaction:
                lent.append(_lent(shop))
                return service.producer.transaction(shop.resource.using(lent[-1]))

            done = await _cancelled_everywhere(service, new)
            assert set(await service.check()) == done
            assert {_state(connection) for connection in lent} == {"idle", "closed"}
            assert _state(lent[-1]) == "idle"
            for connection in lent:
                with suppress(Exception):  # it is closed
                    connection.close()

    on_loop(work)


def test_savepoints_leave_what_the_block_leaves(shared_broker: BrokerProcess, shop: Shop) -> None:
    async def order(service: Service, tx: txmq.aio.Transaction, value: bytes) -> None:
        async def taken_back() -> None:
            async with tx.savepoint(shop.resource):
                await service.write(tx, value)
                await tx.connection(shop.resource).execute("INSERT INTO absent VALUES (1)")

        async with tx:
            with pytest.raises(Exception, match="absent"):
                await taken_back()
            async with tx.savepoint(shop.resource):
                await service.write(tx, value)

    async def work() -> None:
        async with serving(shared_broker, shop, f"savepoints-{type(shop).__name__}") as service:
            done = await _cancelled_everywhere(service, lambda: service.producer.transaction(shop.resource), order)
            assert set(await service.check()) == done

    on_loop(work)


def test_acks_in_the_blocks_database_are_those_of_committed_rows(
    shared_broker: BrokerProcess, mariadb: MariaDB
) -> None:
    shop = MariaDBShop(mariadb)
    store = txmq.DatabaseOffsetStore(shop.connect)
    store.install()

    async def work() -> None:
        async with serving(shared_broker, shop, "acked") as service:
            await service.client.topics.ensure("requests")
            await service.producer.send_many("requests", [(None, b"%d" % number) for number in range(AWAITS_MAX)])
            async with await service.client.consumer("g", ["requests"], offset_store=store) as consumer:
                waiting = list[txmq.aio.Message]()

                async def order(service: Service, tx: txmq.aio.Transaction, value: bytes) -> None:
                    while not waiting:
                        waiting.extend(await consumer.poll(1))
                    (message,) = waiting
                    async with tx:
                        await service.write(tx, value)
                        await message.ack(tx.connection(shop.resource))

                def new() -> txmq.aio.Transaction:
                    saved = store.saved("g", ("requests", 0))
                    if waiting and saved is not None and saved.offset > waiting[0].offset:
                        waiting.clear()
                    return service.producer.transaction(shop.resource)

                done = await _cancelled_everywhere(service, new, order)
            saved = store.saved("g", ("requests", 0))
            assert saved is not None
            assert saved.offset == len(done)
            assert set(await service.check()) == done

    on_loop(work)
