"""Clusters in a real ZooKeeper, each under a name of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

NUMBERS = itertools.count(1)


@pytest.fixture
def alone(tmp_path: Path, ensemble: Ensemble) -> Iterator[Cluster]:
    """A cluster of one broker, not started; its session is as short as a busy machine allows."""
    made = Cluster(
        tmp_path, ensemble, chroot=f"/prod-{next(NUMBERS)}", size=1, settings={"registry_session_timeout_ms": 3000}
    )
    yield made
    made.kill()
