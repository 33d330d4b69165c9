"""Clusters of one broker in a real ZooKeeper, and replicas of it."""

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
    """A cluster of one broker, which leads, with small journal files; checkpoints come often."""
    made = Cluster(
        tmp_path, ensemble, chroot=f"/replicas-{next(NUMBERS)}", size=1,
        settings={
            "registry_session_timeout_ms": 3000, "checkpoint_interval_ms": 1000, "journal_file_size_bytes": 1 << 20,
            "group_size_bytes_max": 64 << 10, "request_size_bytes_max": 256 << 10, "batch_size_bytes_max": 256 << 10,
        },
    )  # fmt: skip
    yield made
    made.kill()
