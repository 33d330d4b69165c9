"""An outbox in front of two homes: one dies, and the application takes orders; each home gets its own, in order."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash_points import at_moment, crash_at
from txmq import Outcome
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble
from txmq.xa.last_resource import drainer
from txmq.xa.resolver import Resolver

from .outbox_drainer import NAME, When
from .outbox_shop import Shop

WHEN: tuple[When, ...] = ("away", "always")


@pytest.fixture(scope="module")
def two_homes(tmp_path_factory: pytest.TempPathFactory, ensemble: Ensemble) -> Iterator[Cluster]:
    settings = {"registry_session_timeout_ms": 3000}
    with Cluster(tmp_path_factory.mktemp("outbox"), ensemble, chroot="/outbox", size=2, settings=settings) as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path, two_homes: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(drainer, "LEASE_MS", 3_600_000)  # for ``Shop.held``
    made = Shop(two_homes.start(), tmp_path / "shop.db")
    yield made
    made.close()


def test_home_that_is_away_holds_up_no_other(shop: Shop) -> None:
    for places in ((0,), (1,), (0, 1)):
        assert shop.order(*places).pending == ()
    assert shop.waiting() == []
    lost = shop.away(1)
    lost.kill()
    both = shop.order(0, 1)
    assert both.pending == ("broker",)
    assert shop.order(1).pending == ("broker",)
    eventually(lambda: shop.values(0) == [1, 2, 3], "the home that is there has its part")
    eventually(lambda: len(shop.waiting()) == 2, "the other one's wait")
    tx = shop.order(0)
    assert [result.offset for result in tx.results] == [3]
    assert shop.client.outcome(both.txid) is Outcome.COMMITTED
    lost.start()
    both.wait_visible(30.0)
    shop.check()
    eventually(lambda: _goes_to_both(shop), "blocks go to both brokers again")


def _goes_to_both(shop: Shop) -> bool:
    """Whether a block does, behind nothing of its keys that waits."""
    eventually(lambda: not shop.waiting(), "the outbox is empty")
    return shop.order(0, 1).pending == ()


@pytest.mark.parametrize("point", ["client.homes.prepare_sent", "client.tx.prepare_sent", "client.tx.prepared"])
def test_home_that_dies_at_a_prepare_leaves_nothing(shop: Shop, point: str) -> None:
    shop.order(0, 1)
    lost = shop.away(1)
    with at_moment(point, lost.kill):
        shop.order(0, 1)
    lost.start()
    shop.check()


@pytest.mark.parametrize("point", ["client.outbox.filled", "client.outbox.committed"])
def test_client_that_dies_at_its_outbox_leaves_all_or_nothing(shop: Shop, point: str) -> None:
    owner = shop.process()
    shop.order(0, 1, process=owner)
    shop.order(0, 1)
    lost = shop.away(1)
    lost.kill()
    with pytest.raises(SimulatedCrash), crash_at(point):
        shop.order(0, 1, process=owner)
    shop.end(owner)
    lost.start()
    shop.check()


def test_service_starts_while_both_homes_are_away(shop: Shop) -> None:
    shop.order(0, 1)
    for broker in shop.cluster.brokers:
        broker.kill()
    process = shop.process()
    process[1].install(process[0])
    assert shop.order(0, 1, process=process).pending == ("broker",)
    assert shop.order(1, process=process).pending == ("broker",)
    assert len(set(shop.waiting())) == 2
    shop.cluster.start()
    shop.check()


@pytest.mark.parametrize("when", WHEN)
def test_homes_that_no_broker_tells_are_the_database_s(shop: Shop, when: When) -> None:
    """What the client knew of topics was found wrong, and then the brokers went."""
    process = shop.process(when)
    shop.order(0, 1, process=process)

    def lose_all() -> None:
        for broker in shop.cluster.brokers:
            broker.kill()
        process[0].routes.forget_topics()

    assert shop.order(0, 1, process=process, behind=lose_all).pending == ("broker",)
    assert len(set(shop.waiting())) == 2
    shop.cluster.start()
    shop.check()


@pytest.mark.parametrize(
    "point", ["chosen:2", "numbered:1", "numbered:2", "sent:1", "sent:2", "answered:2", "deleted:1", "deleted:2"]
)
def test_killed_drainer_of_two_homes_sends_nothing_twice(shop: Shop, point: str) -> None:
    shop.order(0, 1)
    with shop.held():
        for _ in range(3):
            shop.order(0, 1)
        shop.drain_until_dead(f"client.outbox.{point}")
    shop.check()


@pytest.mark.parametrize("point", ["chosen:2", "numbered:1", "numbered:2"])
def test_killed_pumps_of_two_homes_send_nothing_twice(shop: Shop, point: str) -> None:
    """One for each home: whichever comes first, before and behind the commit that numbers its rows."""
    shop.order(0, 1)
    with shop.held():
        for places in [(0, 1), (1,), (0,)] * 3:
            shop.order(*places)
        shop.drain_until_dead(f"client.outbox.{point}", "always")
        assert shop.waiting()
    always = shop.process("always")
    for _ in range(3):
        assert shop.order(0, 1, process=always).pending == ("broker",)
    shop.check()


def test_home_that_hangs_is_set_aside_until_it_answers(shop: Shop) -> None:
    shop.order(0, 1)
    hung = shop.away(1)
    client, resource = shop.process()
    resolver = Resolver(client, [resource])
    resolver.round()
    with shop.held():
        for _ in range(3):
            shop.order(0, 1)
    hung.pause()
    try:
        eventually(lambda: shop.values(0) == [1, 2, 3, 4], "the home that is there has its part")
        eventually(lambda: "is away" in str(_round(resolver)), "the other one is not asked any more")
        shop.order(0, 1)
        eventually(lambda: shop.values(0) == [1, 2, 3, 4, 5], "what comes meanwhile goes on")
    finally:
        hung.resume()
    shop.check()
    eventually(lambda: not _round(resolver), "it is asked again")
    resolver.close()


def _round(resolver: Resolver) -> list[tuple[str, Exception]]:
    resolver.round()
    return resolver.problems()


def test_restored_home_stops_alone_until_it_is_numbered_anew(shop: Shop, tmp_path: Path) -> None:
    """What it had taken since the backup has left the database: an operator goes on without it."""
    restored, backup = shop.away(1), tmp_path / "backup"
    shop.order(0, 1)
    with shop.held():
        shop.order(0, 1)
    eventually(lambda: shop.values(1) == [1, 2], "the outbox is drained")
    restored.pause()  # as a snapshot of its file system, without a restart since
    shutil.copytree(restored.data_dir, backup)
    restored.resume()
    with shop.held():
        shop.order(0, 1)
    eventually(lambda: shop.values(1) == [1, 2, 3] and not shop.waiting(), "the outbox is drained")
    restored.kill()
    shutil.rmtree(restored.data_dir)
    shutil.copytree(backup, restored.data_dir)
    shop.order(0, 1)
    shop.order(1)
    restored.start()
    home = shop.home_of(1)
    eventually(lambda: shop.state_of(1).problem is not None, "the drainer has found it")
    assert "the broker took 1 rows, and number 2 has left: was it restored?" in str(shop.state_of(1).problem)
    shop.order(0, 1)
    eventually(lambda: shop.values(0) == [1, 2, 3, 4, 5], "the other home has all of its own")
    eventually(lambda: shop.waiting() == [home] * 3, "only those of the restored home wait")
    assert shop.values(1) == [1, 2]
    before = shop.series()
    done = shop.txmq("renumber", "--yes", NAME)
    assert (done.exit_code, "was it restored?" in done.output) == (0, True), done.output
    changed = {name for name, numbering in shop.series().items() if numbering != before[name]}
    assert changed == {home}
    eventually(lambda: shop.values(1) == [1, 2, 4, 5, 6], "what waited has gone on, in order")
    assert shop.txmq("renumber", "--yes", NAME).exit_code != 0


def test_topic_made_anew_at_another_home_parks_its_rows(shop: Shop) -> None:
    """They were for another topic of that name; others of the former home go on."""
    topic = f"{shop.topic}-moves"
    shop.order(0, 1)
    shop.client.topics.create(topic, partitions=1)
    home = _home(shop, topic)
    place = 0 if shop.home_of(0) == home else 1
    with shop.held():
        shop.order(0, topic=topic)
        shop.order(place)
        _move(shop, topic)
    eventually(lambda: shop.run("SELECT state, home FROM txmq_marker_outbox") == [("parked", home)], "it is parked")
    assert shop.values(place) == [1, 2 + (place == 0)]
    ((reason,),) = shop.run("SELECT reason FROM txmq_marker_outbox")
    assert "stale-topic" in reason
    shop.order(0, topic=topic).wait_visible(30.0)
    assert [int(message.value or b"") for message in shop.client.browse(topic)] == [3 + (place == 0)]


def _home(shop: Shop, topic: str) -> str:
    shop.client.topics.describe(topic)
    return shop.home_of(0, topic)


def _move(shop: Shop, topic: str) -> None:
    """Delete it, and make it anew elsewhere: each goes to the home that has the fewest."""
    former = _home(shop, topic)
    for number in itertools.count():
        shop.client.topics.delete(topic)
        shop.client.topics.create(f"{topic}-{number}", partitions=1)
        shop.client.topics.create(topic, partitions=1)
        if _home(shop, topic) != former:
            return
