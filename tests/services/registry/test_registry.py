"""The registry on a real ZooKeeper keeps the contract, and survives a server that is killed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.services.registry.scripts import RealWorld
from tests.unit.registry.contract import CLUSTER, A, candidate, topic
from tests.unit.registry.retiring_contract import RetiringContract
from txmq.addresses import Credentials
from txmq.errors import RegistryAwayError, RegistryError
from txmq.registry.cluster_metadata import HomeEntry, PlacedTopic, Registry, Standing, TopicMap
from txmq.registry.zookeeper.kazoo_session import KazooSession
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes.zookeeper import ZooKeeper

CHROOTS = (f"/cluster-{number}/prod" for number in itertools.count())


def _session(registry: Registry) -> KazooSession:
    assert isinstance(registry, ZooKeeperRegistry)
    assert isinstance(registry._session, KazooSession)
    return registry._session


class TestOnRealZooKeeper(RetiringContract):
    """See ``RetiringContract``."""

    @pytest.fixture(autouse=True)
    def world(self, zookeeper: ZooKeeper) -> Iterator[None]:
        """The server, and the sessions with it."""
        self.real, self.opened = RealWorld(zookeeper), list[KazooSession]()
        yield
        for session in self.opened:
            session.close()

    def fresh(self) -> Registry:
        """See ``RegistryContract``."""
        self.chroot = next(CHROOTS)
        return self.another()

    def another(self) -> Registry:
        """See ``RetiringContract``."""
        self.opened.append(self.real.open(Credentials("txmq", "secret")))
        return ZooKeeperRegistry(self.opened[-1], self.chroot)

    def expire(self, registry: Registry) -> None:
        """See ``RetiringContract``."""
        self.real.expire(_session(registry))

    def settle(self, registry: Registry) -> None:
        """See ``RegistryContract``."""
        self.real.settle(_session(registry))


def test_a_killed_server_comes_back_with_all_of_it(zookeeper: ZooKeeper) -> None:
    world, chroot = RealWorld(zookeeper), next(CHROOTS)
    registry = ZooKeeperRegistry(world.open(), chroot)
    registry.join(CLUSTER, Standing.USED)
    registry.announce(registry.lead(candidate()))
    placed = registry.create_topic(topic(1), [A, A])
    told: list[str] = []
    registry.topics(lambda: told.append("topics"))
    zookeeper.kill()
    eventually(lambda: told, "the lost watch")
    zookeeper.start()
    assert _session(registry).wait_connected(WITHIN_S)
    assert registry.topics() == TopicMap(1, (placed,), ())
    assert registry.homes() == [HomeEntry(A, "broker-a0", 1, "10.0.0.1:8123")]
    registry.close()


def test_a_call_repeated_after_a_freeze_has_one_effect(zookeeper: ZooKeeper) -> None:
    session = RealWorld(zookeeper).open()
    registry = ZooKeeperRegistry(session, next(CHROOTS))
    registry.join(CLUSTER, Standing.USED)
    registry.lead(candidate())
    zookeeper.pause()
    try:
        session._timeout = 0.2
        with pytest.raises(RegistryAwayError, match="repeat when it is back"):
            registry.create_topic(topic(1), [A, A])
    finally:
        session._timeout = WITHIN_S
        zookeeper.resume()
    assert registry.create_topic(topic(1), [A, A]) == PlacedTopic(topic(1), (A, A), 1)
    assert registry.topics().version == 1
    registry.close()


def test_a_registry_with_credentials_is_closed_to_others(zookeeper: ZooKeeper) -> None:
    chroot = next(CHROOTS)
    session = KazooSession(
        zookeeper.address, session_timeout_ms=20_000, call_timeout_ms=60_000, credentials=Credentials("txmq", "secret")
    )
    registry = ZooKeeperRegistry(session, chroot)
    registry.join(CLUSTER, Standing.USED)
    registry.announce(registry.lead(candidate()))
    stranger = ZooKeeperRegistry(RealWorld(zookeeper).open(), chroot)
    with pytest.raises(RegistryError, match="give the credentials under which the nodes were made"):
        stranger.join(CLUSTER, Standing.EMPTY)
    registry.change_access(A, 0, {"user.ops": {}})
    for closed in (stranger.access, lambda: stranger.change_access(A, 1, {"quota.topic.a": {}}), stranger.topics):
        with pytest.raises(RegistryError, match="give the credentials"):
            closed()
    assert stranger.homes() == registry.homes()  # so clients find their brokers
    stranger.close()
    registry.close()


def test_users_are_in_closed_nodes_or_nowhere(zookeeper: ZooKeeper) -> None:
    registry = ZooKeeperRegistry(RealWorld(zookeeper).open(), next(CHROOTS))
    registry.join(CLUSTER, Standing.USED)
    registry.announce(registry.lead(candidate()))
    for refused in (
        lambda: registry.change_access(A, 0, {"user.ops": {}}), lambda: registry.publish_access(A, {"user.ops": {}}),
    ):  # fmt: skip
        with pytest.raises(RegistryError, match="nodes are open to whoever reaches it"):
            refused()
    assert registry.change_access(A, 0, {"quota.topic.a": {"n": 1}}).version == 1
    registry.close()
