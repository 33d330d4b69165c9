"""A spool whose refused batches stay: what follows them waits, and the spool says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.client.spooling.queue_fixture import PARTITION, QueueFixture
from txmq.client.spooling.write_ahead import REFUSALS_MAX, WriteAheadSpool
from txmq.errors import TxmqError


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[WriteAheadSpool]:
    with WriteAheadSpool(str(tmp_path)) as made:
        yield made


@pytest.fixture
def world(tmp_path: Path, spool: WriteAheadSpool) -> QueueFixture:
    return QueueFixture(tmp_path, spool)


def spool_three(world: QueueFixture, *, first: bytes) -> None:
    """Messages that are only spooled."""
    world.way.is_away = True
    for value in (first, b"1", b"2"):
        world.send(value)
    world.way.is_away = False


def test_what_is_refused_stays_and_holds_what_is_behind_it(world: QueueFixture, spool: WriteAheadSpool) -> None:
    spool_three(world, first=b"poison")
    world.partition.refuses = lambda content: b"poison" in content
    for tried in range(1, REFUSALS_MAX + 3):
        with pytest.raises(TxmqError, match="poison"):
            world.queue.drain(world.clock.monotonic() + 1.0)
        assert spool.refusal == (None if tried < REFUSALS_MAX else "topic t, partition 0: poison")
    assert (spool.parked(), spool.count(PARTITION), world.partition.values) == ([], 3, [])
    world.partition.refuses = lambda _: False
    world.drain()
    assert world.partition.values == [b"poison", b"1", b"2"]


def test_what_nobody_can_send_is_put_aside_and_said(world: QueueFixture, spool: WriteAheadSpool) -> None:
    spool.append(PARTITION, b"\0" * 70, 1)
    assert spool.refusal is None
    world.queue.drain(world.clock.monotonic() + 1.0)
    assert "topic t, partition 0: damaged in the spool" in str(spool.refusal)
    assert len(spool.parked()) == 1
