"""``txmq.sqlalchemy`` with AsyncSession, on asyncpg and aiosqlite; requests that are cancelled anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from sqlalchemy import Connection, event, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session

import txmq
from tests.cancelled import cancelled_at
from tests.sqlalchemy_programs import Base, Order, outbox
from txmq.client.relay.relay import Relay
from txmq.errors import ConfigError, TransactionStateError
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.postgresql import PostgreSQL

from .databases import postgresql_url

DRAIN_S = 60.0
T = TypeVar("T")
Work = Callable[[AsyncEngine], Awaitable[None]]


@pytest.fixture(params=["asyncpg", "psycopg", "aiosqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path, postgresql: PostgreSQL) -> str:
    if request.param == "aiosqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"
    return postgresql_url(postgresql, request.param)


@asynccontextmanager
async def engine_of(url: str) -> AsyncIterator[AsyncEngine]:
    """With new tables."""
    engine = create_async_engine(url)
    if "sqlite" in url:
        event.listen(engine.sync_engine, "connect", _without_begin)
        event.listen(engine.sync_engine, "begin", _begin)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.drop_all)
        await connection.run_sync(Base.metadata.create_all)
    yield engine
    await engine.dispose()


def _without_begin(connection: Any, _record: Any) -> None:
    connection.isolation_level = None


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def played(url: str, work: Work) -> None:
    async def play() -> None:
        async with engine_of(url) as engine:
            await work(engine)

    asyncio.run(play())


async def take(session: AsyncSession, number: int) -> None:
    """An order and its message."""
    session.add(Order(id=number))
    outbox.send(session, "orders", b"%d" % number, b"key")
    await session.flush()


async def told(engine: AsyncEngine) -> tuple[list[int], list[int]]:
    """Rows, and messages as they are in their table."""
    async with AsyncSession(engine) as session:
        rows = (await session.scalars(select(Order.id).order_by(Order.id))).all()
        values = (await session.scalars(select(outbox.messages.c.value).order_by(outbox.messages.c.id))).all()
    return list(rows), [int(value) for value in values]


def test_async_session_commits_rows_and_messages(url: str) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await take(session, 1)
            with pytest.raises(IntegrityError):
                await in_savepoint(session, 1)
            await in_savepoint(session, 2)
            await session.commit()
            await take(session, 3)
            await session.rollback()
            outbox.send_many(session, [("orders", b"%d" % number) for number in range(4, 7)])
            session.add_all([Order(id=number) for number in range(4, 7)])
            await session.commit()
        assert await told(engine) == ([1, 2, 4, 5, 6], [1, 2, 4, 5, 6])

    played(url, work)


async def in_savepoint(session: AsyncSession, number: int) -> None:
    async with session.begin_nested():
        session.expunge_all()
        await take(session, number)


def test_late_listener_and_scoped_session_send(url: str) -> None:
    async def work(engine: AsyncEngine) -> None:
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)

        def late(session: Session) -> None:
            session.add(Order(id=2))
            outbox.send(scoped, "orders", b"2")

        event.listen(scoped().sync_session, "before_commit", late)
        scoped.add(Order(id=1))
        outbox.send(scoped, "orders", b"1")
        await scoped.commit()
        await scoped.remove()
        assert await told(engine) == ([1, 2], [1, 2])

    played(url, work)


def test_async_engine_is_named_by_bind(url: str) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with AsyncSession(binds={Order: engine}) as session:
            with pytest.raises(ConfigError, match="bind="):
                outbox.send(session, "orders", b"1")
            outbox.send(session, "orders", b"1", bind=engine)
            await session.commit()
        async with engine.connect() as connection, AsyncSession() as session:
            outbox.send(session, "orders", b"2", bind=connection)
            await session.commit()
        assert await told(engine) == ([], [1, 2])

    played(url, work)


def test_async_engine_in_autocommit_is_refused_by_the_commit(url: str) -> None:
    async def work(engine: AsyncEngine) -> None:
        alone = engine.execution_options(isolation_level="AUTOCOMMIT")
        if "sqlite" in url:
            event.remove(engine.sync_engine, "begin", _begin)
        async with AsyncSession(alone) as session:
            outbox.send(session, "orders", b"1")
            with pytest.raises(TransactionStateError, match="AUTOCOMMIT"):
                await session.commit()
        assert await told(engine) == ([], [])

    played(url, work)


def test_request_that_times_out_takes_its_messages_along(url: str) -> None:
    async def work(engine: AsyncEngine) -> None:
        reached = asyncio.Event()

        async def request() -> None:
            async with AsyncSession(engine) as session:
                await take(session, 1)
                reached.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(request())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with AsyncSession(engine) as session:
            await take(session, 2)
            await session.commit()
        assert await told(engine) == ([2], [2])

    played(url, work)


def test_request_cancelled_at_any_await_leaves_rows_equal_to_messages(url: str) -> None:
    async def work(engine: AsyncEngine) -> None:
        async def request(number: int) -> None:
            async with AsyncSession(engine) as session:
                await take(session, number)
                await session.commit()

        number = 0
        is_cancelled = True
        while is_cancelled:
            number += 1
            task = asyncio.create_task(as_coroutine(cancelled_at(request(number), number)))
            await asyncio.wait([task])
            is_cancelled = task.cancelled()
        rows, messages = await told(engine)
        assert rows == messages
        assert number > len(rows) > 0

    played(url, work)


async def as_coroutine(work: Awaitable[T]) -> T:
    """What ``create_task`` takes."""
    return await work


def test_messages_of_async_sessions_arrive_once_in_order(broker: BrokerProcess, postgresql: PostgreSQL) -> None:
    async def work(engine: AsyncEngine) -> None:
        with Relay(client, outbox, lambda: psycopg.connect(postgresql.conninfo())) as relay:
            for number in range(60):
                async with AsyncSession(engine) as session:
                    await take(session, number)
                    await (session.rollback() if number % 3 == 2 else session.commit())
            await asyncio.to_thread(relay.drain, DRAIN_S)

    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        played(postgresql_url(postgresql, "asyncpg"), work)
        found = [int(message.value or b"") for message in client.browse("orders")]
    assert found == [number for number in range(60) if number % 3 != 2]
