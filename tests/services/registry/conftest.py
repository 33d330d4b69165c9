"""A real ZooKeeper for all files of this folder: each makes nodes of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leftovers import LASTING
from txmq.testing.processes.zookeeper import ZooKeeper


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    """A server that serves."""
    with ZooKeeper(tmp_path_factory.mktemp(f"{LASTING}-zookeeper")) as server:
        yield server
