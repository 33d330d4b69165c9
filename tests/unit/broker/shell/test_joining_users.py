"""What a home brings of users and takes, before it serves: each order of deaths and starts, unsafe registries."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tools.images.node import Node, small_settings
from tools.simulated.clock import SimClock, SimRandom
from tools.simulated.disk import SimDisk
from tools.simulated.zookeeper import SimZooKeeper
from txmq.broker.commit.data_directory import Joins, open_store
from txmq.broker.shell.first_administrator import content_of
from txmq.broker.shell.joining import Entered, enter, member, take_cluster, take_users, users_of
from txmq.config import BrokerSettings
from txmq.errors import ConfigError, RegistryConflictError, RegistryError
from txmq.protocol.scram import keys_of
from txmq.registry.cluster_metadata import NO_ACCESS
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.runtime import crashpoints
from txmq.runtime.private_files import write_private

SEEDS = itertools.count()
SETTINGS = small_settings(broker_name="")
OPEN = small_settings(broker_name="", registry="zk://127.0.0.1")


def _closed(first_administrator: str = "") -> BrokerSettings:
    registry = "zk://brokers:secret@127.0.0.1"
    return small_settings(broker_name="", registry=registry, first_administrator=first_administrator)


CLOSED = _closed()


class Start:
    """One start of a broker with a registry, up to the moment at which it would serve."""

    def __init__(self, ensemble: SimZooKeeper, disk: SimDisk, settings: BrokerSettings = CLOSED) -> None:
        self.registry, self.disk, self.settings = ZooKeeperRegistry(ensemble.open()), disk, settings
        self.chance = SimRandom(random.Random(next(SEEDS)))

    def run(self) -> Entered:
        clock = SimClock()
        cluster = take_cluster(self.disk, self.chance, lambda: self.registry)
        recovered = open_store(
            self.disk,
            clock,
            self.chance,
            self.settings,
            is_member=True,
            joins=None if cluster is None else Joins(cluster),
        )
        try:
            who = member(recovered, "10.0.0.1:8123", "lock", self.settings, self.chance)
            return enter(self.registry, who, _nothing, _nothing, _nothing)
        finally:
            recovered.store.close()


def _nothing() -> None:
    pass


def _lone(*users: str) -> SimDisk:
    """The directory of a broker that was alone, and has users; the first is the administrator."""
    node = Node(SimDisk(), SETTINGS)
    client = node.connect()
    for user in users:
        body = b'{"keys": null, "certificate": "CN=%b"}' % user.encode()
        client.client.user = users[0]
        assert client.ask("user", "add", user, body=body).code == 200
    assert client.ask("quota", "set", "topic", "a", extensions={"bytes_per_s": 9}).code == 200
    return node.kill()


def test_lone_broker_brings_users_and_quotas() -> None:
    ensemble = SimZooKeeper()
    entered = Start(ensemble, _lone("ops", "shop")).run()
    records = entered.access.records
    assert records.keys() == {"user.ops", "user.shop", "quota.topic.a", "secret"}
    assert records["user.ops"]["grants"] == [["cluster", "cluster", "*"]]
    assert records["secret"]["mock"] != records["secret"]["between_brokers"] != ""
    assert Start(ensemble, SimDisk()).run().access == entered.access


@pytest.mark.parametrize("point", ["registry.joined", "registry.led", "registry.users_published"])
def test_deaths_of_who_brings_users_let_nobody_in(point: str) -> None:
    ensemble, disk = SimZooKeeper(), _lone("ops")

    def die(name: str) -> None:
        if name == point:
            raise crashpoints.SimulatedCrash(name)

    crashpoints.set_hook(die)
    try:
        for _ in range(2):
            with pytest.raises(crashpoints.SimulatedCrash):
                Start(ensemble, disk).run()
    finally:
        crashpoints.set_hook(None)
    if point != "registry.users_published":
        with pytest.raises(RegistryConflictError, match="brings users to the cluster, and has yet to publish them"):
            Start(ensemble, SimDisk()).run()
    entered = Start(ensemble, disk).run()
    assert entered.access.version == 1
    assert Start(ensemble, SimDisk()).run().access == entered.access


def test_registry_is_the_truth_about_users_that_were_brought() -> None:
    ensemble, disk = SimZooKeeper(), _lone("ops", "shop")
    start = Start(ensemble, disk)
    entered = start.run()  # and dies before its journal says that they are the registry's
    start.registry.change_access(1, entered.access.version, {"user.shop": None})
    again = Start(ensemble, disk).run().access
    assert "user.shop" not in again.records


@pytest.mark.parametrize(("settings", "reason"), [(OPEN, "give the registry's address a name and a password")])
def test_users_are_not_brought_where_others_could_write_them(settings: BrokerSettings, reason: str) -> None:
    ensemble = SimZooKeeper()
    with pytest.raises(RegistryError, match=reason):
        Start(ensemble, _lone("ops"), settings).run()
    Start(ensemble, SimDisk(), settings).run()  # nothing of it stands in the registry
    assert ZooKeeperRegistry(ensemble.open()).access() == NO_ACCESS


def test_users_are_not_taken_from_where_others_could_write_them() -> None:
    ensemble = SimZooKeeper()
    Start(ensemble, _lone("ops")).run()
    with pytest.raises(RegistryError, match="give the registry's address a name and a password"):
        Start(ensemble, SimDisk(), OPEN).run()


def test_registry_that_lost_changes_is_refused() -> None:
    ensemble, disk = SimZooKeeper(), _lone("ops")
    node = Node(disk, SETTINGS)
    node.state.principals.registry_version = 7
    node.pump()
    start = Start(ensemble, SimDisk())
    start.run()
    access = start.registry.access()
    own = users_of(node.state.principals, CLOSED, start.chance)
    with pytest.raises(RegistryError, match=f"have version {access.version}, and this home's journal 7"):
        take_users(start.registry, 1, own, _nothing)


# --- the first administrator, of a file ------------------------------------------------------------------------------


def _with_file(path: Path, content: str = "") -> BrokerSettings:
    write_private(str(path), content or content_of("ops", keys_of("pencil", bytes(16))))
    return _closed(str(path))


def test_first_administrator_is_there_before_anybody_is_served(tmp_path: Path) -> None:
    ensemble, settings = SimZooKeeper(), _with_file(tmp_path / "first")
    entered = Start(ensemble, SimDisk(), settings).run()
    assert entered.access.records.keys() == {"user.ops", "secret"}
    other = _with_file(tmp_path / "other", content_of("root", keys_of("pencil", bytes(16))))
    assert Start(ensemble, SimDisk(), other).run().access == entered.access  # the second broker makes none
    broken = _closed("/nowhere")
    assert Start(ensemble, SimDisk(), broken).run().access == entered.access  # nor looks at the file


def test_death_behind_the_first_administrator_makes_no_second(tmp_path: Path) -> None:
    ensemble, settings, disk = SimZooKeeper(), _with_file(tmp_path / "first"), SimDisk()

    def die(name: str) -> None:
        if name == "registry.first_user_made":
            raise crashpoints.SimulatedCrash(name)

    crashpoints.set_hook(die)
    try:
        with pytest.raises(crashpoints.SimulatedCrash):
            Start(ensemble, disk, settings).run()
    finally:
        crashpoints.set_hook(None)
    assert Start(ensemble, disk, settings).run().access.version == 1


@pytest.mark.parametrize("content", ["{}", '{"user": 7, "keys": null, "certificate": "CN=a"}', "no json"])
def test_file_that_is_none_lets_nobody_in(tmp_path: Path, content: str) -> None:
    settings = _with_file(tmp_path / "first", content)
    with pytest.raises(ConfigError, match="expected a file as txmq broker init --admin NAME writes it"):
        Start(SimZooKeeper(), SimDisk(), settings).run()
