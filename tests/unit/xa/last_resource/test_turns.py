"""A drainer that is called all the time; broker and tables are those of the drainer's tests."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.unit.xa.last_resource.test_drainer import SERIES, World
from txmq.errors import ConnectionLostError
from txmq.xa.database.outbox_series import NUMBERED_MAX, SeriesChangedError
from txmq.xa.last_resource import drainer
from txmq.xa.last_resource.drainer import PAGE_SIZE_MAX, DrainError


@pytest.fixture
def world() -> Iterator[World]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        yield World(connection)


def drain(world: World, turns: int = 50) -> None:
    for _ in range(turns):
        world.drainer.turn(world.database)


def test_turns_take_rows_in_order_and_away_behind_their_answers(world: World) -> None:
    rows = [f"row-{number}" for number in range(3 * PAGE_SIZE_MAX)]
    world.waiting(*rows[:PAGE_SIZE_MAX])
    drain(world, 3)
    world.waiting(*rows[PAGE_SIZE_MAX:])
    drain(world)
    assert (world.broker.taken, world.left()) == (rows, [])
    assert not +world.broker.open
    assert world.drainer.turn(world.database) == 0


def test_turn_numbers_rows_and_takes_others_away_in_one_commit(world: World) -> None:
    world.waiting("row-0")
    drain(world, 3)
    world.waiting("row-1")
    assert world.drainer.turn(world.database) == 1
    world.waiting("row-2")
    commits: list[str] = []
    world.connection.set_trace_callback(lambda statement: commits.append(statement))
    assert world.drainer.turn(world.database) == 1
    world.connection.set_trace_callback(None)
    assert sum(statement == "COMMIT" for statement in commits) == 1
    assert world.left() == ["row-2"]


def test_rows_that_may_not_be_numbered_yet_are_not_read(world: World) -> None:
    """One waits at the broker: of the numbers behind it only so many are given as that remembers."""
    world.broker.late = {"row-0"}
    world.waiting(*(f"row-{number}" for number in range(NUMBERED_MAX + 5)))
    drain(world, 8)
    assert world.left() == ["row-0", *(f"row-{NUMBERED_MAX + more}" for more in range(5))]
    pages = list[str]()
    world.connection.set_trace_callback(lambda said: pages.append(said) if "number = 0 AND" in said else None)
    assert world.drainer.turn(world.database) == 0
    world.connection.set_trace_callback(None)
    assert [said.rpartition(" ")[2] for said in pages] == ["0"]
    world.broker.answers["row-0"].late = False
    drain(world)
    assert world.left() == []


def test_turn_of_another_is_not_taken(world: World) -> None:
    world.outbox.hold(world.connection, "another", drainer.LEASE_MS)
    world.waiting("row-0")
    assert world.drainer.turn(world.database) is None
    world.outbox.let_go(world.connection, "another")
    drain(world, 3)
    assert world.broker.taken == ["row-0"]
    world.drainer.let_go(world.database)
    assert world.outbox.hold(world.connection, "another", drainer.LEASE_MS)


def test_turns_go_on_behind_rows_that_another_drainer_has_numbered(world: World) -> None:
    world.waiting("row-0")
    drain(world, 3)
    world.waiting("row-1", "row-2")
    world.outbox.number(world.connection)
    world.waiting("row-3")
    drain(world)
    assert (world.broker.taken, world.left()) == (["row-0", "row-1", "row-2", "row-3"], [])


def test_turns_go_on_beside_rows_that_are_parked(world: World) -> None:
    world.broker.gone = {"row-1"}
    world.waiting("row-0", "row-1", "row-2")
    drain(world)
    world.waiting("row-3")
    drain(world)
    assert world.broker.taken == ["row-0", "void", "row-2", "row-3"]
    assert world.left() == ["row-1"]


def test_turn_of_rows_numbered_anew_sends_nothing(world: World) -> None:
    world.waiting("row-0")
    drain(world, 3)
    world.waiting("row-1")
    world.outbox.begin_series(world.connection, "6" * 32, SERIES)
    with pytest.raises(SeriesChangedError):
        world.drainer.turn(world.database)
    assert world.broker.taken == ["row-0"]


def test_turn_over_another_connection_sends_nothing_until_compared(world: World) -> None:
    world.waiting("row-0")
    drain(world, 3)
    world.waiting("row-1")
    world.broker.live = object()
    with pytest.raises(ConnectionLostError):
        world.drainer.turn(world.database)
    assert world.broker.taken == ["row-0"]
    drain(world)
    assert (world.broker.taken, world.left()) == (["row-0", "row-1"], [])


def test_who_waits_is_told_when_the_row_is_placed(world: World) -> None:
    world.waiting("row-0", "row-1")
    waiter = world.state.watch("row-0")
    assert not waiter.wait(0.0)
    drain(world, 2)
    assert waiter.wait(0.0)
    assert world.state.watch("row-1").wait(0.0)


def test_database_that_was_restored_is_found_by_its_numbers(world: World) -> None:
    world.waiting("row-0")
    drain(world, 3)
    world.connection.execute("UPDATE txmq_marker_outbox_series SET number = 0")
    world.waiting("row-1")
    world.drainer.turn(world.database)
    with pytest.raises(DrainError):
        world.drainer.turn(world.database)
    assert (world.broker.taken, world.left()) == (["row-0"], ["row-1"])


def test_row_that_the_broker_takes_no_more_loses_no_message(world: World) -> None:
    """Behind rows that were taken, when numbers are given and read in one."""
    world.waiting("row-0")
    drain(world, 3)
    world.broker.request_size_bytes_max = 100
    world.waiting("large", size=101)
    world.waiting("row-1")
    drain(world)
    assert world.left() == ["large"]
    assert world.broker.taken == ["row-0", "void", "row-1"]


def test_row_of_another_user_is_not_tried_at_once(world: World) -> None:
    world.waiting("row-0")
    drain(world, 3)
    world.broker.forbidden = {"row-1"}
    world.waiting("row-1")
    drain(world)
    assert world.left() == ["row-1"]
    assert world.broker.taken == ["row-0", "void"]
