"""The ending of a block with a last resource: what is left of it when it is over."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.xa.support import LastResourceFixture, quiet_resolver
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.homes import HomePart
from txmq.client.transaction.last_resource_ending import LastResourceEnding


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LastResourceFixture]:
    quiet_resolver(monkeypatch)
    made = LastResourceFixture(tmp_path)
    yield made
    made.close()


def order(world: LastResourceFixture) -> None:
    with world.block() as tx:
        world.insert(tx, b"x")


def blocks() -> list[object]:
    return [one for one in gc.get_objects() if issubclass(type(one), Transaction | LastResourceEnding | HomePart)]


@contextmanager
def no_garbage(world: LastResourceFixture) -> Iterator[None]:
    """What is done here leaves no block to the garbage collector."""
    gc.collect()
    gc.disable()
    before = {id(one) for one in blocks()}  # of other tests, which something may hold
    try:
        yield
        world.home.pending_commits.look()
        assert [one for one in blocks() if id(one) not in before] == []
    finally:
        gc.enable()


def test_committed_block_leaves_nothing_to_garbage_collector(world: LastResourceFixture) -> None:
    order(world)
    with no_garbage(world):
        order(world)
        order(world)  # takes the answer to the commit of the one before, if that was not there
