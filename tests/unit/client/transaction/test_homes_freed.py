"""A client that is closed and let go of is freed whole, whatever it had under way."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from tools.simulated.cluster import SimulatedCluster
from tools.simulated.faults import lost
from txmq.client.transaction.background_resolver import resolver_of, stop_resolver
from txmq.client.transaction.block import Transaction


def _closed_with_an_open_commit() -> list[weakref.ref[Any]]:
    cluster = SimulatedCluster()
    cluster.homes[1].faults["commit"].append(lost(is_executed=False))
    with Transaction(cluster, cluster, (), 30.0) as tx:
        for key in (b"\x00", b"\x01"):
            tx.send("orders", b"1", key=key)
    assert cluster.homes[1].pending_commits
    resolver = weakref.ref(resolver_of(cluster))
    stop_resolver(cluster)
    return [resolver, *(weakref.ref(kept) for kept in (cluster, *cluster.homes))]


def test_closed_client_is_freed_with_a_commit_open() -> None:
    freed = _closed_with_an_open_commit()
    gc.collect()
    gc.collect()  # what compiled objects kept
    assert [kept() for kept in freed] == [None] * 5


def _killed_with_a_resolver() -> weakref.ref[object]:
    cluster = SimulatedCluster()
    resolver_of(cluster)
    return weakref.ref(cluster)


def test_client_dropped_without_close_is_freed() -> None:
    freed = _killed_with_a_resolver()
    gc.collect()
    gc.collect()  # what compiled objects kept
    assert freed() is None
