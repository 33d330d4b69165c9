"""Idle connections that are bound to threads (sqlite3's): kept by them, closed with them."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from txmq.xa.database import resource

from ..support import LastResourceFixture


def _in_a_thread(world: LastResourceFixture, value: bytes) -> None:
    thread = threading.Thread(target=world.order, args=(value,))
    thread.start()
    thread.join()


def test_connection_is_reused_by_its_thread_and_no_other(world: LastResourceFixture) -> None:
    world.opened.clear()
    for number in range(3):
        world.order(b"%d" % number)
    assert len(world.opened) == 1
    _in_a_thread(world, b"other")
    assert len(world.opened) == 2
    world.check()


def test_a_thread_that_ends_closes_what_it_kept(world: LastResourceFixture) -> None:
    _in_a_thread(world, b"other")
    kept = weakref.ref(world.opened.pop())
    gc.collect()
    assert kept() is None
    world.check()


def test_close_closes_what_is_idle_and_the_resource_goes_on(world: LastResourceFixture) -> None:
    world.order(b"1")
    kept = weakref.ref(world.opened.pop())
    world.resource.close()
    gc.collect()
    assert kept() is None
    world.order(b"2")
    world.check()


def test_connections_of_parent_are_neither_used_nor_closed_by_children(
    world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.order(b"1")
    of_parent = world.opened[-1]
    monkeypatch.setattr(resource, "current_process", lambda: -1)
    assert world.resource._pool.take() is None
    world.resource.close()
    monkeypatch.undo()
    assert of_parent.execute("SELECT COUNT(*) FROM orders").fetchone() == (1,), "still open"
