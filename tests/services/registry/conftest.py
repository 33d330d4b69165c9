"""A real ZooKeeper: each test makes nodes of its own."""

from __future__ import annotations

import pytest

from txmq.testing.processes.zookeeper import Ensemble, ZooKeeper


@pytest.fixture(scope="module")
def zookeeper(ensemble: Ensemble) -> ZooKeeper:
    """The one server."""
    return ensemble.servers[0]
