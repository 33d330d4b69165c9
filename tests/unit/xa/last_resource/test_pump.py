"""When a pump looks, waits, has the turn and leaves it; broker and tables are those of the drainer's tests."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from tests.unit.xa.last_resource.test_drainer import SERIES, World
from txmq.errors import ConnectionLostError
from txmq.xa.last_resource import drainer
from txmq.xa.last_resource.drainer import LOOK_EVERY_S
from txmq.xa.last_resource.outbox import OutboxOptions, OutboxState
from txmq.xa.last_resource.pump import (
    AWAY_S,
    BUSY,
    GATHER_BUSY_S,
    GATHER_S,
    IDLE_S,
    LOOK_S_MAX,
    REFUSED_S,
    SWEEP_EVERY_S,
    Pause,
    Pump,
)


class PumpWorld(World):
    """The same, with a pump in place of the drainer alone."""

    is_lone = True
    is_away = False

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.state = OutboxState(OutboxOptions(when="always"), self.broker.clock, "me")
        self.swept: list[int] = []
        self.broker.cluster = 0xC1
        world: Any = self
        self.pump = Pump(world, world, self.state, self.broker.clock, world)

    name = "shop"

    @property
    def session(self) -> Any:
        return self.broker

    @property
    def control(self) -> Any:
        return self.broker

    def look(self) -> None:
        """The home is there, or not."""
        if self.is_away:
            raise ConnectionLostError("planned")

    def open_for_resolver(self, cluster: str) -> Any:
        """The resource's."""
        world = self

        class Opened:
            connection, table, uuid, outbox = world.connection, world.database.table, world.database.uuid, world.outbox

            def delete_enclosed(self, kept_ms: int, after: str) -> str | None:
                world.swept.append(kept_ms)
                return None

            def close(self) -> None:
                """Nothing."""

        return cast("Any", Opened())

    def commit(self, row: str) -> None:
        """A block of this process."""
        self.waiting(row)
        self.state.added(1)

    def steps(self, count: int) -> list[Pause]:
        """So many, each behind the pause of the one before."""
        found = []
        for _ in range(count):
            found.append(self.pump.step())
            self.broker.clock.advance(found[-1].seconds)
        return found


@pytest.fixture
def world() -> Iterator[PumpWorld]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        yield PumpWorld(connection)


def test_row_is_sent_at_once_and_then_more_are_gathered(world: PumpWorld) -> None:
    assert world.pump.step() == Pause(LOOK_EVERY_S, is_ended_by_commits=True)
    world.commit("row-0")
    world.steps(2)
    assert world.broker.taken == ["row-0"]
    world.commit("row-1")
    assert world.steps(1) == [Pause(GATHER_S, is_ended_by_commits=False)]
    assert world.broker.taken == ["row-0", "row-1"]


def test_more_rows_are_gathered_for_longer(world: PumpWorld) -> None:
    for count, gather_s in ((BUSY - 1, GATHER_S), (BUSY, GATHER_BUSY_S)):
        for number in range(count):
            world.commit(f"row-{count}-{number}")
        assert world.pump.step() == Pause(gather_s, is_ended_by_commits=False)
        world.steps(3)  # answered


def test_rows_of_others_are_looked_for_more_and_more_seldom(world: PumpWorld) -> None:
    world.commit("row-0")
    pauses = world.steps(12)
    assert pauses[-1].is_ended_by_commits
    assert pauses[4].seconds < pauses[-1].seconds <= LOOK_S_MAX
    world.waiting("row-1")  # another process has committed it
    world.steps(1)
    assert world.broker.taken == ["row-0", "row-1"]


def test_turn_is_left_behind_a_second_without_rows(world: PumpWorld) -> None:
    world.commit("row-0")
    began = world.broker.clock.monotonic()
    world.steps(1)
    while world.outbox._run(world.connection, "SELECT until_ms FROM txmq_marker_outbox_series") != [(0,)]:
        world.steps(1)
        assert world.broker.clock.monotonic() < began + 2 * IDLE_S
    assert world.broker.clock.monotonic() >= began + IDLE_S
    world.waiting("row-1")  # whose owner was refused the turn
    world.steps(2)
    assert world.broker.taken == ["row-0", "row-1"]


def test_who_is_refused_looks_again_while_rows_wait(world: PumpWorld) -> None:
    world.outbox.hold(world.connection, "another", drainer.LEASE_MS)
    world.commit("row-0")
    assert world.steps(2) == [Pause(REFUSED_S, is_ended_by_commits=False)] * 2
    world.outbox.let_go(world.connection, "another")
    world.steps(3)
    assert world.broker.taken == ["row-0"]


def test_commits_wake_nobody_while_the_broker_is_away(world: PumpWorld) -> None:
    world.is_away = True
    world.commit("row-0")
    assert world.steps(2) == [Pause(AWAY_S, is_ended_by_commits=False)] * 2
    world.is_away = False
    world.steps(2)
    assert world.broker.taken == ["row-0"]


def test_markers_are_swept_by_who_has_the_turn(world: PumpWorld) -> None:
    world.pump.step()
    world.broker.clock.advance(SWEEP_EVERY_S)
    world.pump.step()
    assert world.swept == []
    world.commit("row-0")
    world.steps(3)
    assert world.swept == [120_000]


def test_end_drains_and_leaves_the_turn(world: PumpWorld) -> None:
    for number in range(300):
        world.commit(f"row-{number}")
    world.pump.end(world.broker.clock.monotonic() + 1.0)
    assert (len(world.broker.taken), world.left()) == (300, [])
    assert world.outbox.hold(world.connection, "another", drainer.LEASE_MS)
    assert world.outbox.series(world.connection).name == SERIES


def test_rows_behind_one_that_is_parked_keep_nobody_busy(world: PumpWorld) -> None:
    world.broker.gone = {"row-0"}
    world.waiting("row-0", "row-1", key="k")
    began = world.broker.clock.monotonic()
    steps = 0
    while world.broker.clock.monotonic() < began + 60.0:
        steps += 1
        world.steps(1)
        assert steps < 150
    assert world.left() == ["row-0", "row-1"]


def test_row_that_is_too_large_is_parked(world: PumpWorld) -> None:
    world.commit("row-0")
    world.steps(3)
    world.broker.request_size_bytes_max = 10
    world.waiting("row-1", "row-2")
    world.waiting("row-3", size=11)
    world.waiting("row-4")
    world.steps(12)
    assert [row for row in world.broker.taken if row != "void"] == ["row-0", "row-1", "row-2", "row-4"]
    assert world.left() == ["row-3"]
