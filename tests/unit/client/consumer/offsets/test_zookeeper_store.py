"""Offsets in a simulated ZooKeeper: the contract, and what goes wrong in an ensemble."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import txmq
from tools.simulated.zookeeper import SimSession, SimZooKeeper
from txmq.client.consumer.offsets.offset_store import OffsetPosition, OffsetStore, StoredOffset
from txmq.client.consumer.offsets.zookeeper_store import ZooKeeperOffsetStore
from txmq.errors import ConfigError, StorageError
from txmq.testing.offset_store_contract import GROUP, SLOT, OffsetStoreContract

PATH = "/prod/txmq/consumers/billing/offsets/orders/0-1"
ADDRESS = "zk://h1,h2:2182/prod"


class EnsembleFixture:
    """A store in an ensemble that has its upper nodes, and the session that it opened last."""

    def __init__(self) -> None:
        self.ensemble = SimZooKeeper()
        self.store().install()

    def store(self, **given: Any) -> ZooKeeperOffsetStore:
        return ZooKeeperOffsetStore(ADDRESS, open_session=self._open, **given)

    def _open(self) -> SimSession:
        self.session = self.ensemble.open()
        return self.session

    def owner(self, generation: int) -> ZooKeeperOffsetStore:
        """A store that has loaded the partition."""
        store = self.store()
        store.load(GROUP, SLOT, generation)
        return store

    def set(self, path: str, value: bytes) -> None:
        """As an operator would."""
        self.ensemble.open().set_value(path, value, -1)


@pytest.fixture
def there() -> EnsembleFixture:
    return EnsembleFixture()


class TestZooKeeperOffsetStore(OffsetStoreContract):
    """In memory; tests/services/registry has a real ensemble."""

    @pytest.fixture(autouse=True)
    def _opened(self) -> None:
        self.there = EnsembleFixture()

    def open(self) -> OffsetStore:
        return self.there.store()


def test_the_offset_stands_behind_the_last_hyphen(there: EnsembleFixture) -> None:
    store = there.owner(3)
    assert not store.save(GROUP, [OffsetPosition(SLOT, 3, 132)])
    assert there.ensemble.nodes[PATH].value == b"3-132"
    assert not store.save(GROUP, [OffsetPosition(SLOT, 3, 133, '[[7,"a\\n-b"]]')])
    assert there.ensemble.nodes[PATH].value.rpartition(b"-")[2] == b"133"
    assert store.load(GROUP, SLOT, 3) == StoredOffset(133, '[[7,"a\\n-b"]]')


def test_an_ensemble_without_upper_nodes_is_an_error() -> None:
    store = ZooKeeperOffsetStore(ADDRESS, open_session=SimZooKeeper().open)
    asks: list[Callable[[], object]] = [lambda: store.enter(GROUP), lambda: store.load(GROUP, SLOT, 1)]
    for ask in asks:
        with pytest.raises(StorageError, match=r"/prod/txmq/consumers is not in ZooKeeper.*install\(\) once"):
            ask()


def test_an_ensemble_that_lost_its_data_takes_nothing_away(there: EnsembleFixture) -> None:
    store = there.owner(1)
    there.ensemble.nodes = SimZooKeeper().nodes
    with pytest.raises(StorageError, match="is not in ZooKeeper"):
        store.save(GROUP, [OffsetPosition(SLOT, 1, 5)])


def test_what_metaq_wrote_is_not_taken_for_an_offset(there: EnsembleFixture) -> None:
    there.owner(1)
    there.ensemble.open().delete(f"{PATH}/1", -1)
    there.set(PATH, b"0-4096")
    with pytest.raises(StorageError, match="choose another root"):
        there.store().load(GROUP, SLOT, 2)


@pytest.mark.parametrize("value", [b"7", b"4-", b"-5468925400123965440-132", b"4-1x"])
def test_a_value_that_cannot_be_read_is_an_error(there: EnsembleFixture, value: bytes) -> None:
    store = there.owner(4)
    there.set(PATH, value)
    with pytest.raises(StorageError, match="did not write"):
        store.load(GROUP, SLOT, 4)


def test_a_node_made_anew_takes_no_former_owners_save(there: EnsembleFixture) -> None:
    """The node has the versions that the former one had."""
    paused = there.owner(57)
    operator = there.ensemble.open()
    operator.delete(f"{PATH}/57", -1)
    operator.delete(PATH, -1)
    there.owner(1)
    assert list(paused.save(GROUP, [OffsetPosition(SLOT, 57, 9)])) == [SLOT]
    assert there.ensemble.nodes[PATH].value == b""


def test_a_server_that_lags_behind_hides_nothing(there: EnsembleFixture) -> None:
    before = there.owner(1)
    late = there.store()
    late.enter(GROUP)
    there.session.lag()
    assert not before.save(GROUP, [OffsetPosition(SLOT, 1, 5)])
    assert late.load(GROUP, SLOT, 2) == StoredOffset(5)
    assert list(before.save(GROUP, [OffsetPosition(SLOT, 1, 6)])) == [SLOT]


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_after_a_lost_answer_the_next_try_succeeds(there: EnsembleFixture, is_carried_out: bool) -> None:
    store = there.owner(1)
    position = OffsetPosition(SLOT, 1, 5)
    calls: list[Callable[[], object]] = [
        lambda: store.save(GROUP, [position]),
        lambda: store.load(GROUP, SLOT, 2),
    ]
    for call in calls:
        there.session.lose_next(is_carried_out=is_carried_out)
        with pytest.raises(StorageError, match="offset store at h1:2181,h2:2182"):
            call()
        assert there.session.wait_connected(0)
        assert call() in ([], StoredOffset(5))


def test_of_many_partitions_the_fenced_one_alone_is_refused(there: EnsembleFixture) -> None:
    store = there.store()
    positions = [OffsetPosition(("orders", number), 1, number) for number in range(450)]
    for position in positions:
        store.load(GROUP, position.slot, 1)
    there.store().load(GROUP, ("orders", 333), 2)
    assert list(store.save(GROUP, positions)) == [("orders", 333)]
    assert there.ensemble.nodes[PATH.replace("0-1", "0-332")].value == b"1-332"
    assert there.ensemble.nodes[PATH.replace("0-1", "0-449")].value == b"1-449"


def test_an_ensemble_is_asked_again_after_the_consumer_left(there: EnsembleFixture) -> None:
    store = there.owner(1)
    store.leave(GROUP)
    assert not store.save(GROUP, [OffsetPosition(SLOT, 1, 5)])


@pytest.mark.parametrize("address", [5, "txmq://h", "zk://", "zk://h/a b", "zk://h//a", "zk://h:x"], ids=repr)
def test_an_address_that_is_none_is_refused(address: Any) -> None:
    with pytest.raises(ConfigError, match=r"^address = .*: expected zk://"):
        txmq.ZooKeeperOffsetStore(address)


@pytest.mark.parametrize("root", ["txmq", "/", "", "/a/", "/..", None], ids=repr)
def test_a_root_that_is_no_path_is_refused(root: Any) -> None:
    with pytest.raises(ConfigError, match=r"^root = .*: expected a path"):
        txmq.ZooKeeperOffsetStore(ADDRESS, root=root)


def test_kazoo_is_not_loaded_before_the_store_connects() -> None:
    program = f"import sys, txmq; txmq.ZooKeeperOffsetStore({ADDRESS!r}); sys.exit('kazoo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
