"""How a data directory becomes a home: each order of deaths and starts results in the same cluster."""

from __future__ import annotations

import itertools
import random

import pytest

from tools.images.node import Node, small_settings
from tools.simulated.clock import SimClock, SimRandom
from tools.simulated.disk import SimDisk
from tools.simulated.zookeeper import SimZooKeeper
from txmq.broker.commit.data_directory import Joins, Recovered, open_store
from txmq.broker.shell.joining import (
    RETRY_S,
    enter,
    member,
    take_cluster,
    until_answered,
)
from txmq.errors import HomeInUseError, HomeSupersededError, RegistryAwayError, RegistryError
from txmq.redo import directory_identity
from txmq.registry.cluster_metadata import Brought, Standing
from txmq.registry.topics import Topic
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.runtime import crashpoints

ADDRESS = "10.0.0.1:8123"
SEEDS = itertools.count()
SETTINGS = small_settings(broker_name="")


class Start:
    """One start of a broker with a registry, as far as the registry is concerned."""

    def __init__(self, ensemble: SimZooKeeper, disk: SimDisk, lock: str = "lock") -> None:
        self.registry = ZooKeeperRegistry(ensemble.open())
        self.disk, self.lock, self.chance = disk, lock, SimRandom(random.Random(next(SEEDS)))
        self.clock = SimClock()

    def recover(self) -> Recovered:
        cluster_id = take_cluster(self.disk, self.chance, lambda: self.registry)
        recovered = open_store(
            self.disk,
            self.clock,
            self.chance,
            SETTINGS,
            is_member=True,
            joins=None if cluster_id is None else Joins(cluster_id),
        )
        self.member = member(recovered, ADDRESS, self.lock, SETTINGS, self.chance)
        return recovered

    def run(self) -> None:
        recovered = self.recover()
        try:
            self.entered = enter(self.registry, self.member, _nothing, _nothing, _nothing)
        finally:
            recovered.store.close()


def _nothing() -> None:
    pass


def _lone(topics: int, *queries: str) -> SimDisk:
    """The directory of a broker that was alone."""
    node = Node(SimDisk(), small_settings())
    client = node.connect()
    for number in range(topics + 1):
        assert client.ask("topic", "create", f"t{number}", extensions={"partitions": 2}).code == 200
    assert client.ask("topic", "delete", f"t{topics}").code == 200
    for epoch, name in enumerate(queries, 1):
        assert client.ask("query", "epoch", "*", body=b"").code == 200
        assert client.ask("query", "open", name, extensions={"epoch": epoch}, body=b"").code == 200
    return node.kill()


def test_an_empty_directory_takes_the_id_of_the_cluster() -> None:
    ensemble = SimZooKeeper()
    ZooKeeperRegistry(ensemble.open()).join(0xC1, Standing.USED)
    start = Start(ensemble, SimDisk())
    start.run()
    node = directory_identity.load(start.disk)
    assert node is not None
    assert (node.cluster_id, node.node_id) == (0xC1, start.entered.leadership.candidate.home)
    assert take_cluster(start.disk, start.chance, lambda: start.registry) is None


def test_a_directory_that_was_alone_publishes_its_topics() -> None:
    ensemble, disk = SimZooKeeper(), _lone(3)
    start = Start(ensemble, disk)
    start.run()
    home = start.entered.leadership.candidate.home
    found = {placed.topic.config.name: (placed.topic.topic_id, placed.homes) for placed in start.entered.topics.topics}
    assert found == {f"t{number}": (number + 1, (home, home)) for number in range(3)}
    assert start.registry.reserve_topic_ids(1) == range(5, 6)  # 4 is the id of the topic that was deleted


def test_a_directory_that_was_alone_publishes_its_queries() -> None:
    ensemble, disk = SimZooKeeper(), _lone(1, "q", "r")
    start = Start(ensemble, disk)
    start.run()
    home = start.entered.leadership.candidate.home
    assert start.registry.anchors("query", ["q", "r", "s"]) == {"q": home, "r": home}
    assert start.registry.draw_query_epoch() == 3


def test_a_member_publishes_queries_that_the_registry_misses() -> None:
    ensemble, disk = SimZooKeeper(), _lone(1, "q", "r")
    first = Start(ensemble, disk)
    first.run()
    home = first.entered.leadership.candidate.home
    first.registry.release_anchor("query", "r", home)  # as an ensemble that was restored
    again = Start(ensemble, disk)
    again.run()
    assert again.registry.anchors("query", ["q", "r"]) == {"q": home, "r": home}


def test_a_query_of_another_home_is_refused_until_deleted() -> None:
    ensemble, disk = SimZooKeeper(), _lone(1, "q")
    founder = Start(ensemble, disk)
    who = founder.recover().identity
    founder.registry.join(who.cluster, Standing.USED, Brought(9, 9))
    other = Start(ensemble, SimDisk(), "another lock")
    other.run()
    home = other.entered.leadership.candidate.home
    other.registry.anchor("query", "q", home)
    with pytest.raises(RegistryError, match=rf"query 'q' .* one of home {home:016x}, .*txmq query delete q"):
        enter(founder.registry, founder.member, _nothing, _nothing, _nothing)
    other.registry.release_anchor("query", "q", home)
    enter(founder.registry, founder.member, _nothing, _nothing, _nothing)
    assert other.registry.anchors("query", ["q"]) == {"q": founder.member.candidate.home}
    assert other.registry.draw_query_epoch() == 10


@pytest.mark.parametrize(
    "point", ["registry.joined", "registry.led", "registry.topic_published", "registry.query_published"]
)
def test_starts_that_were_cut_off_are_repeated(point: str) -> None:
    ensemble, disk = SimZooKeeper(), _lone(3, "q", "r")

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
    start = Start(ensemble, disk)
    start.run()
    ids = [(placed.topic.config.name, placed.topic.topic_id) for placed in start.entered.topics.topics]
    assert ids == [("t0", 1), ("t1", 2), ("t2", 3)]
    home = start.entered.leadership.candidate.home
    assert start.registry.anchors("query", ["q", "r"]) == {"q": home, "r": home}
    assert start.registry.draw_query_epoch() == 3


def test_a_topic_that_was_deleted_is_not_made_anew() -> None:
    ensemble, disk = SimZooKeeper(), _lone(2)
    first = Start(ensemble, disk)
    first.run()
    first.registry.delete_topic(first.entered.topics.topics[0].topic)
    again = Start(ensemble, disk)
    again.run()
    assert [placed.topic.config.name for placed in again.entered.topics.topics] == ["t1"]


def test_another_topic_of_the_same_name_is_refused() -> None:
    ensemble, disk = SimZooKeeper(), _lone(1)
    founder = Start(ensemble, disk)
    who = founder.recover().identity
    founder.registry.join(who.cluster, Standing.USED, Brought(9))
    other = Start(ensemble, SimDisk(), "another lock")
    other.run()
    taken = Topic(other.registry.reserve_topic_ids(1)[0], founder.member.topics[0].config)
    other.registry.create_topic(taken, [other.entered.leadership.candidate.home] * 2)
    with pytest.raises(RegistryError, match="topic 't0' of this directory is another one in the cluster"):
        enter(founder.registry, founder.member, _nothing, _nothing, _nothing)


def test_a_copied_directory_is_refused() -> None:
    ensemble, disk = SimZooKeeper(), SimDisk()
    original = Start(ensemble, disk)
    original.run()
    copied = SimDisk(image=disk.model.build(()))
    original.registry.announce(original.entered.leadership)
    with pytest.raises(HomeInUseError):
        Start(ensemble, copied, "the copy's lock").run()
    Start(ensemble, disk).run()
    with pytest.raises(HomeSupersededError, match="is a copy, or was restored"):
        Start(ensemble, copied, "the copy's lock").run()


class Patience:
    """Tries of a step, in simulated time."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.clock, self.tries = list(errors), SimClock(), 0

    def step(self) -> str:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def run(self) -> str:
        return until_answered(self.step, self.clock, self.clock.sleep, in_use_s=2.0)


def test_a_registry_that_is_away_is_waited_for() -> None:
    patience = Patience(*(RegistryAwayError("away") for _ in range(200)))
    assert patience.run() == "done"
    assert patience.tries == 201
    assert patience.clock.monotonic() == pytest.approx(200 * RETRY_S)


def test_a_leader_that_stays_is_refused_in_the_end() -> None:
    patience = Patience(*(HomeInUseError("in use") for _ in range(200)))
    with pytest.raises(HomeInUseError):
        patience.run()
    assert patience.clock.monotonic() == pytest.approx(2.0 + RETRY_S)


def test_a_refusal_is_not_repeated() -> None:
    patience = Patience(HomeSupersededError("no"))
    with pytest.raises(HomeSupersededError):
        patience.run()
    assert patience.tries == 1
