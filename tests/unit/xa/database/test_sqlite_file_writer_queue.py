"""The queue of writers to one SQLite file: an end wakes a waiter, every end gives the lease back, none is needed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import pytest

from txmq.errors import HeuristicError, RolledBackError
from txmq.runtime.strands import Host
from txmq.runtime.threads import Signal
from txmq.xa.database.sqlite_file import SQLiteWriterQueue, WriterLease
from txmq.xa.last_resource import resource as last_resource

from ..support import LastResourceFixture

DEADLINE_S = 20.0


class Watched(SQLiteWriterQueue):
    """Says when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Event()

    def take(self, timeout_s: float) -> WriterLease | None:
        self.asked.set()
        return super().take(timeout_s)


def is_free(writers: SQLiteWriterQueue) -> bool:
    lease = writers.take(0.0)
    if lease is not None:
        lease.release()
    return lease is not None


def traced(world: LastResourceFixture, said: list[str]) -> Callable[[], Any]:
    """``connect`` whose statements are noted when they begin."""

    def connect() -> sqlite3.Connection:
        connection = world.connect()
        connection.set_trace_callback(lambda text: said.append(text) if text.startswith("BEGIN") else None)
        return connection

    return connect


def test_who_waits_asks_file_only_when_one_before_has_ended(world: LastResourceFixture) -> None:
    world.options["timeout"] = DEADLINE_S
    said: list[str] = []
    resource = world.new_resource()
    resource._connect = traced(world, said)
    resource.writers = writers = Watched()
    with ThreadPoolExecutor(1) as other:
        with world.block(resource=resource):
            writers.asked.clear()
            said.clear()

            def order() -> None:
                with world.block(resource=resource) as tx:
                    tx.connection(resource).execute("INSERT INTO orders (value) VALUES ('second')")

            waiting = other.submit(order)
            assert writers.asked.wait(DEADLINE_S)
            said.append("end of the first")
        waiting.result(DEADLINE_S)
    assert said == ["end of the first", "BEGIN IMMEDIATE"]
    assert is_free(writers)


def test_who_settles_waits_for_its_turn_as_well(world: LastResourceFixture) -> None:
    world.order(b"1")
    writers = world.resource.writers = Watched()
    cluster = f"{world.home.session.cluster:016x}"

    def resolve() -> bool:
        resolving = world.resource.open_for_resolver(cluster)
        try:
            said.append("settles")
            return resolving.table.insert_rolled_back(resolving.connection, "t", resolving.uuid, 1)
        finally:
            said.append("settled")
            resolving.close()

    said: list[str] = []
    lease = writers.take(0.0)
    assert lease is not None
    writers.asked.clear()
    with ThreadPoolExecutor(1) as other:
        resolved = other.submit(resolve)
        assert writers.asked.wait(DEADLINE_S)
        said.append("end of the lease")
        lease.release()
        resolved.result(DEADLINE_S)
    assert said == ["settles", "end of the lease", "settled"]
    assert is_free(writers)


def _raise(_tx: Any, _world: LastResourceFixture) -> None:
    raise ZeroDivisionError


def _fail(tx: Any, world: LastResourceFixture) -> None:
    tx.connection(world.resource).execute("INSERT INTO absent VALUES (1)")


def _commit(tx: Any, world: LastResourceFixture) -> None:
    tx.connection(world.resource).execute("COMMIT")


def _close(_tx: Any, world: LastResourceFixture) -> None:
    world.opened[-1].close()


def _lose(_tx: Any, world: LastResourceFixture) -> None:
    world.opened[-1].fail_behind = OSError("connection lost")


def _refuse(_tx: Any, world: LastResourceFixture) -> None:
    world.opened[-1].fail_before = sqlite3.OperationalError("disk I/O error")


@pytest.mark.parametrize("body", [_raise, _fail, _commit, _close, _lose, _refuse])
def test_every_end_gives_the_turn_back(
    world: LastResourceFixture, body: Callable[[Any, LastResourceFixture], None]
) -> None:
    try:
        with world.block() as tx:
            assert not is_free(world.resource.writers)
            body(tx, world)
    except (ZeroDivisionError, sqlite3.Error, RolledBackError, HeuristicError):
        pass
    assert is_free(world.resource.writers)
    world.order(b"next")
    assert is_free(world.resource.writers)


def test_a_begin_that_fails_gives_the_turn_back(world: LastResourceFixture) -> None:
    with world.outside() as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"), world.block():
            pass
    assert is_free(world.resource.writers)


def test_a_turn_that_is_lost_costs_one_busy_timeout(world: LastResourceFixture) -> None:
    assert world.resource.writers.take(0.0) is not None
    world.order(b"waits for the busy timeout, then asks the file")
    assert is_free(world.resource.writers)
    assert world.opened[-1].execute("PRAGMA busy_timeout").fetchone() == (50,)


def test_waiter_for_turn_does_not_wait_again_for_file(world: LastResourceFixture) -> None:
    world.order(b"opens its connection")
    said: list[str] = []
    world.opened[-1].set_trace_callback(said.append)
    assert world.resource.writers.take(0.0) is not None
    with world.outside() as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"), world.block():
            pass
    assert said[:3] == ["PRAGMA busy_timeout = 0", "BEGIN IMMEDIATE", "PRAGMA busy_timeout = 50"]


def test_a_turn_that_is_held_refuses_nobody_who_settles(
    world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.order(b"1")
    monkeypatch.setattr(last_resource, "RESOLVE_WAIT_S", 0.01)  # the busy timeout of a resolver
    assert world.resource.writers.take(0.0) is not None
    resolving = world.resource.open_for_resolver(f"{world.home.session.cluster:016x}")
    assert resolving.table.delete_expired_rolled_back(resolving.connection) == 0
    resolving.close()


def test_a_forked_child_begins_its_own_queue() -> None:
    writers = SQLiteWriterQueue()
    held = writers.take(0.0)
    writers.forked()
    assert is_free(writers)
    assert held is not None
    held.release()  # what the parent's thread does there
    assert is_free(writers)


def test_strands_get_the_turn_in_their_order() -> None:
    writers, order = SQLiteWriterQueue(), list[int]()

    def write(number: int) -> None:
        for _ in range(2):
            lease = writers.take(DEADLINE_S)
            assert lease is not None
            order.append(number)
            Signal().wait(0.001)
            lease.release()

    async def main() -> None:
        host = Host()
        await asyncio.gather(*(host.run(partial(write, number)) for number in range(3)))
        await host.close()

    asyncio.run(main())
    assert order == [0, 1, 2, 0, 1, 2]
    assert is_free(writers)


def test_cancelled_strand_leaves_the_turn_to_the_next_one() -> None:
    writers = SQLiteWriterQueue()

    async def main() -> None:
        host = Host()
        held = writers.take(0.0)
        assert held is not None
        tasks = [asyncio.create_task(host.run(lambda: writers.take(DEADLINE_S))) for _ in range(3)]
        await asyncio.sleep(0.001)
        tasks[0].cancel()
        held.release()
        tasks[1].cancel()
        lease = await tasks[2]
        assert lease is not None
        assert not is_free(writers)
        lease.release()
        await host.close()

    asyncio.run(main())
    assert is_free(writers)
