"""Offsets in a real ZooKeeper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from txmq.client.consumer.offsets.offset_store import OffsetPosition, OffsetStore, StoredOffset
from txmq.client.consumer.offsets.zookeeper_store import ZooKeeperOffsetStore
from txmq.errors import StorageError
from txmq.testing.offset_store_contract import GROUP, SLOT, OffsetStoreContract
from txmq.testing.processes.broker import free_port
from txmq.testing.processes.zookeeper import ZooKeeper

_numbers = itertools.count(1)


class TestZooKeeperOffsetStore(OffsetStoreContract):
    """On a real ensemble, through kazoo."""

    @pytest.fixture(autouse=True)
    def _opened(self, zookeeper: ZooKeeper) -> Iterator[None]:
        self.address, self.stores = f"zk://{zookeeper.address}/offsets{next(_numbers)}", list[ZooKeeperOffsetStore]()
        self.open().install()  # type: ignore[attr-defined]
        yield
        for store in self.stores:
            store.leave(GROUP)

    def open(self) -> OffsetStore:
        self.stores.append(ZooKeeperOffsetStore(self.address.replace("zk://", "zk://billing:secret@")))
        return self.stores[-1]

    def test_other_clients_of_the_ensemble_do_not_read_it(self) -> None:
        store, generation = self.owner()
        assert not store.save(GROUP, [OffsetPosition(SLOT, generation, 5)])
        stranger = ZooKeeperOffsetStore(self.address)
        self.stores.append(stranger)
        with pytest.raises(StorageError, match="NoAuth"):
            stranger.load(GROUP, SLOT, generation + 1)
        assert store.load(GROUP, SLOT, generation) == StoredOffset(5)


def test_an_ensemble_that_is_away_is_the_stores_error() -> None:
    store = ZooKeeperOffsetStore(f"zk://127.0.0.1:{free_port()}")
    with pytest.raises(StorageError, match="no ZooKeeper server answers"):
        store.enter(GROUP)
