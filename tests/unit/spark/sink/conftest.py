"""The cluster that the sink's tests write to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.spark.sink.sink_cluster import Job, SinkCluster, sink_cluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SinkCluster:
    """Three homes."""
    return sink_cluster(monkeypatch, 1, 2, 3)


@pytest.fixture
def job(cluster: SinkCluster) -> Iterator[Job]:
    """One whose anchor is home 3; partition n is at home n + 1."""
    with cluster.client(1) as client:
        client.ping()
        made = Job(client)
        assert made.opened.home == 3
        cluster.requests()
        yield made
