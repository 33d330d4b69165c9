"""Transactions whose topic is deleted and created anew under its name before they end."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.transaction.shop import Shop
from tests.unit.client.transaction.test_block_homes import A, B, C, _join, block
from tests.unit.xa.support import quiet_resolver
from tests.unit.xa.xa_support import Database, FakeResource, Notes
from tools.simulated.cluster import SimulatedCluster
from txmq.client.transaction.half_message import CheckBacks, HalfMessage
from txmq.client.transaction.xa_resource import BrokerXAResource
from txmq.errors import RolledBackError, StaleTopicError, XAError
from txmq.model import Outcome, Resolution
from txmq.xa.xopen import XACode
from txmq.xid import Xid


@pytest.fixture
def cluster() -> SimulatedCluster:
    return SimulatedCluster()


@pytest.fixture
def shop(tmp_path: Path, cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    quiet_resolver(monkeypatch)
    made = Shop(tmp_path / "orders.db", cluster)
    yield made
    made.resource.close()
    for connection in made.opened:
        connection.close()


def create_anew(cluster: SimulatedCluster) -> None:
    cluster.recreate("orders")


def _refused(cluster: SimulatedCluster, keys: tuple[bytes, ...], *resources: Any, value: bytes = b"1") -> None:
    """The topic is another one by the end of the block; run again, the block is for that one."""
    with pytest.raises(RolledBackError, match="has id 3 now, not 1") as caught, block(cluster, *resources) as tx:
        for resource in resources:
            tx.connection(resource).add(b"row")
        for key in keys:
            tx.send("orders", value, key=key)
            tx.send("audit", b"beside", key=key)
        create_anew(cluster)
    assert tx.outcome is Outcome.ROLLED_BACK
    assert caught.value.retriable
    assert isinstance(caught.value.__cause__, StaleTopicError)
    assert (cluster.values("orders"), cluster.values("audit")) == ([], [])
    with block(cluster, *resources) as tx:
        for resource in resources:
            tx.connection(resource).add(b"again")
        for key in keys:
            tx.send("orders", b"again", key=key)
    cluster.talk()
    assert cluster.values("orders") == [b"again"] * len(keys)


@pytest.mark.parametrize("keys", [(B,), (A, B), (A, B, C)])
def test_local_transaction_is_refused_whole(cluster: SimulatedCluster, keys: tuple[bytes, ...]) -> None:
    _refused(cluster, keys)


@pytest.mark.parametrize("keys", [(B,), (A, B)])
def test_large_transaction_is_refused_by_its_parts(
    cluster: SimulatedCluster, keys: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.client.transaction.block._STREAM_AT_BYTES", 50_000)
    _refused(cluster, keys, value=bytes(20_000))


@pytest.mark.parametrize("keys", [(A,), (A, B)])
def test_xa_transaction_rolls_its_databases_back(
    cluster: SimulatedCluster, keys: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(cluster)
    monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _: notes)
    database = Database("a", 1, cluster.clock)
    _refused(cluster, keys, FakeResource(database))
    assert (database.rows, database.prepared) == ([b"again"], {})


@pytest.mark.parametrize("keys", [(A,), (A, B)])
def test_last_resource_rolls_its_rows_back(shop: Shop, cluster: SimulatedCluster, keys: tuple[bytes, ...]) -> None:
    shop.order(b"before", *keys)
    create_anew(cluster)
    with pytest.raises(RolledBackError, match="has id 3 now, not 1"):
        shop.order(b"refused", *keys)
    shop.order(b"again", *keys)
    assert shop.rows() == [b"before", b"again"]
    assert cluster.values("orders") == [b"again"] * len(keys), "the topic was deleted with its messages"


def test_half_message_is_refused_before_its_block(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.client.transaction.half_message.start_daemon", lambda _name, _run: None)
    group = CheckBacks(cluster, "g", lambda _: Resolution.UNKNOWN)
    cluster.routes.topic_id("orders")
    create_anew(cluster)
    with pytest.raises(RolledBackError, match="has id 3 now, not 1"):
        HalfMessage(cluster, group, 30.0, None).prepare("orders", 1, (b"k", b"v", [], 1))
    with HalfMessage(cluster, group, 30.0, None).prepare("orders", 1, (b"k", b"v", [], 1)):
        pass
    assert cluster.values("orders") == [b"v"]


def _ended(resource: BrokerXAResource, cluster: SimulatedCluster, xid: Xid) -> None:
    resource.start(xid)
    _join(cluster, B)
    resource.end(xid)


def test_external_branch_votes_no(cluster: SimulatedCluster) -> None:
    resource, xid = BrokerXAResource(cluster, 30.0), Xid(7, b"global", b"branch")
    _ended(resource, cluster, xid)
    create_anew(cluster)
    with pytest.raises(XAError) as refused:
        resource.prepare(xid)
    assert refused.value.xa_code is XACode.XA_RBOTHER
    _ended(resource, cluster, xid)
    assert resource.prepare(xid) is XACode.XA_OK
    assert resource.commit(xid) is XACode.XA_OK
    assert cluster.values("orders") == [b"1"]
