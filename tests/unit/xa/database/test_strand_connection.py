"""A driver's connection in a thread of its own: where it is used, and what becomes of it when a call is given up."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.simulated.stand_in import AnyClass
from txmq.errors import ConfigError
from txmq.runtime.strands import Host
from txmq.runtime.workers import WorkUnendedError
from txmq.xa.database.dbapi import driver_of, may_change_threads, run
from txmq.xa.database.resource import ConnectionPool
from txmq.xa.database.strand_connection import (
    GivenUp,
    LeftConnectionError,
    ThreadConnection,
    close_connection,
    lent,
    opened,
    return_lent,
)

LONG_S = 60.0


class Fake:
    """Notes in which thread it is used."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.closed = threading.Event()
        self.goes_on = threading.Event()
        self.interrupted = False

    def wait(self) -> None:
        self.threads.add(threading.get_ident())
        assert self.goes_on.wait(LONG_S)

    def interrupt(self) -> None:
        self.interrupted = True

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed.set()


def _in_strand(work: Callable[[], Any]) -> Any:
    async def main() -> Any:
        host = Host()
        try:
            return await host.run(work)
        finally:
            await host.close()

    return asyncio.run(main())


def test_only_a_strand_gives_its_connection_a_thread() -> None:
    assert isinstance(opened(Fake), Fake)
    made = _in_strand(lambda: opened(Fake))
    assert isinstance(made, ThreadConnection)
    made.close()
    assert made.driver_connection.closed.wait(LONG_S)
    assert threading.get_ident() not in made.driver_connection.threads


def test_connection_bound_to_its_thread_serves_any_strand(tmp_path: Path) -> None:
    connection = ThreadConnection(lambda: sqlite3.connect(tmp_path / "x.db"))
    assert driver_of(connection) is sqlite3
    assert may_change_threads(connection)
    run(connection, "CREATE TABLE t (x)")
    assert _in_strand(lambda: run(connection, "INSERT INTO t VALUES (?)", (1,))) == ([], 1)
    assert connection.in_transaction
    connection.commit()
    assert run(connection, "SELECT x FROM t")[0] == [(1,)]
    with pytest.raises(sqlite3.OperationalError, match="absent"):
        run(connection, "SELECT x FROM absent")
    connection.close()


def test_connection_whose_call_was_given_up_takes_nothing_more() -> None:
    made = ThreadConnection(Fake)
    inner: Fake = made.driver_connection
    ended = threading.Event()

    async def main() -> None:
        host = Host()
        task = asyncio.create_task(host.run(made.wait))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(LeftConnectionError):
            await host.run(made.wait)
        close_connection(made, ended.set)
        await host.close()

    asyncio.run(main())
    assert inner.interrupted
    assert not ended.is_set()
    assert not inner.closed.is_set()
    inner.goes_on.set()
    assert ended.wait(LONG_S)
    assert inner.closed.is_set()
    assert len(inner.threads) == 1


def test_connection_that_comes_too_late_is_closed() -> None:
    fake, may_connect = Fake(), threading.Event()

    def connect() -> Fake:
        assert may_connect.wait(LONG_S)
        return fake

    async def main() -> None:
        host = Host()
        task = asyncio.create_task(host.run(lambda: opened(connect)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_connect.set()
        await host.close()

    asyncio.run(main())
    assert fake.closed.wait(LONG_S)


def test_connection_that_is_made_aside_too_late_is_closed() -> None:
    fake, may_connect, given_up = Fake(), threading.Event(), GivenUp()

    def connect() -> Fake:
        assert may_connect.wait(LONG_S)
        return fake

    with pytest.raises(WorkUnendedError):
        opened(connect, given_up, 0.01, aside=True)
    assert given_up.count == 1
    may_connect.set()
    assert fake.closed.wait(LONG_S)
    assert given_up.count == 0
    assert opened(lambda: fake, given_up, LONG_S, aside=True) is fake


def test_connection_that_is_forgotten_is_closed_unless_lent() -> None:
    fake, mine = Fake(), Fake()

    def forget() -> None:
        opened(lambda: fake)
        lent(mine)

    _in_strand(forget)
    gc.collect()
    assert fake.closed.wait(LONG_S)
    assert not mine.closed.is_set()


def test_lent_connection_is_returned_open() -> None:
    mine = Fake()
    used = _in_strand(lambda: lent(mine))
    return_lent(used)
    return_lent(mine)
    with pytest.raises(LeftConnectionError):
        used.wait()
    assert not mine.closed.is_set()
    assert lent(mine) is mine


class _Session(AnyClass):
    def __init__(self, connection: Any) -> None:
        self.connection, self.is_bound_to_thread = connection, False


def test_threads_and_strands_have_idle_connections_of_their_own() -> None:
    pool = ConnectionPool[_Session]()
    of_thread, of_strand = _Session(Fake()), _Session(ThreadConnection(Fake))
    pool.give_back(of_thread)
    assert _in_strand(pool.take) is None
    _in_strand(lambda: pool.give_back(of_strand))
    assert pool.take() is of_thread
    assert pool.take() is None
    pool.give_back(of_thread)
    pool.close()
    assert of_thread.connection.closed.is_set()
    assert of_strand.connection.driver_connection.closed.wait(LONG_S)
    assert _in_strand(pool.take) is None


class _Asynchronous(Fake):
    def cursor(self) -> None:
        pass

    async def commit(self) -> None:
        pass

    async def rollback(self) -> None:
        pass


class _Closable:
    """Of a driver that has no DB-API names at all."""

    async def close(self) -> None:
        pass


class _Proxy:
    """What asyncpg's pool gives."""

    __module__ = "asyncpg.pool"


def test_connection_of_an_asynchronous_driver_is_refused_by_name() -> None:
    for connection in (_Asynchronous(), ThreadConnection(_Asynchronous), _Closable(), _Proxy()):
        with pytest.raises(ConfigError, match="asynchronous driver: give a connection of a DB-API one"):
            driver_of(connection)


def test_coroutine_function_in_place_of_connect_is_named() -> None:
    async def connect() -> _Asynchronous:
        return _Asynchronous()

    for connection in (connect(), ThreadConnection(connect)):
        with pytest.raises(ConfigError, match="connect= is a coroutine function"):
            driver_of(connection)
