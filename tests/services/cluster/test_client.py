"""One client over three real brokers, found by their addresses or through ZooKeeper."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

import txmq
import txmq.aio
from txmq.cli.main import main
from txmq.errors import BrokerAwayError, DataLossError, PartialResultError, RegistryError
from txmq.spark.segment_files import plan
from txmq.spark.source.options import parse
from txmq.testing.eventually import eventually
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

PARTITIONS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, ensemble: Ensemble) -> Iterator[Cluster]:
    """Three brokers that know each other."""
    settings = {"registry_session_timeout_ms": 3000}
    with Cluster(tmp_path_factory.mktemp("cluster"), ensemble, chroot="/client", settings=settings) as made:
        yield made


@pytest.mark.parametrize("way", ["registry", "addresses", "one address"])
def test_every_call_works_over_homes(cluster: Cluster, way: str) -> None:
    address = {"registry": cluster.registry, "addresses": cluster.address}.get(way, cluster.brokers[1].address)
    topic = f"orders-{len(way)}"
    with txmq.connect(address) as client, client.producer() as producer:
        client.topics.create(topic, partitions=PARTITIONS)
        sent = [producer.send(topic, b"%d" % number, partition=number) for number in range(PARTITIONS)]
        assert [result.offset for result in sent] == [0] * PARTITIONS
        assert [message.value for message in client.browse(topic)] == [b"%d" % number for number in range(PARTITIONS)]
        assert [client.fetch(topic, number, 0)[0].value for number in (5, 0)] == [b"5", b"0"]
        assert client.offset_for(topic, 3, 0) == 0
        assert {row["home"] for row in client.topics.watermarks(topic)} == {
            f"{link.home:016x}" for link in client.routes.links()
        }
        assert client.transactions.list() == []
        assert client.transactions.resources() == []
        assert client.stats("json").count('"version"') == 3
        client.ping()
        client.topics.delete(topic)


def test_event_loop_reaches_every_home(cluster: Cluster) -> None:
    async def calls() -> None:
        async with await txmq.aio.connect(cluster.registry) as client, client.producer() as producer:
            await client.topics.create("loop", partitions=PARTITIONS)
            sent = await asyncio.gather(
                *(producer.send("loop", b"%d" % number, partition=number % PARTITIONS) for number in range(60))
            )
            assert {(place.partition, place.offset) for place in sent} == {
                (partition, offset) for partition in range(PARTITIONS) for offset in range(10)
            }
            assert len(await producer.send_many("loop", [(b"%d" % number, b"x") for number in range(600)])) == 600
            async with producer.transaction() as tx:
                for number in range(PARTITIONS):
                    await producer.send("loop", b"tx", partition=number)
            assert len([one async for one in client.browse("loop")]) == 660 + PARTITIONS
            assert {place.status for place in await tx.results} == {txmq.SendStatus.ACKNOWLEDGED}
            assert await client.outcome(tx.txid) is tx.outcome is txmq.Outcome.COMMITTED
            assert await tx.pending == ()
            assert len({row["home"] for row in await client.topics.watermarks("loop")}) == 3
            assert (await client.stats("json")).count('"version"') == 3
            await client.topics.delete("loop")

    asyncio.run(calls())


def _stats_are_told_home_by_home(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["txmq", "stats", "registry", "--bootstrap", cluster.registry])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 1
    assert told.err.startswith("txmq: 1 of 3 homes did not answer: broker-2 (")
    tables = told.out.strip("\n").split("\n\n")
    assert sorted(table.splitlines()[1].split()[2] for table in tables) == ["broker-0", "broker-1"]


def test_homes_go_on_beside_one_that_is_killed(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = cluster.brokers[2]
    with txmq.connect(cluster.registry, timeout=3.0) as client, client.producer(timeout=3.0) as producer:
        client.topics.create("parts", partitions=PARTITIONS)
        for number in range(PARTITIONS):
            producer.send("parts", b"v", partition=number)
        home = next(link.home for link in client.routes.all_links() if "broker broker-2" in link.stats())
        killed.kill()
        homes = client.routes.homes_of("parts")
        assert homes is not None
        for number, owner in enumerate(homes):
            if owner == home:
                with pytest.raises(BrokerAwayError):
                    client.offsets("parts", number)
            else:
                assert producer.send("parts", b"w", partition=number).offset == 1
        with pytest.raises(PartialResultError) as told:
            client.topics.watermarks("parts")
        assert {row["partition"] for row in told.value.found} == {n for n, owner in enumerate(homes) if owner != home}
        options = parse({"path": str(killed.data_dir), "topic": "parts"}, is_stream=False)
        with pytest.raises(DataLossError, match=r"parts has partitions .* at other homes"):
            plan(options, str(killed.data_dir), 1)
        _stats_are_told_home_by_home(cluster, capsys, monkeypatch)
        killed.start()
        eventually(lambda: not client.routes.link_of_home(home).is_away, "the home is heard again")
        assert [client.offsets("parts", n).end for n, owner in enumerate(homes) if owner == home] == [1, 1]


def test_place_without_a_cluster_is_told(ensemble: Ensemble) -> None:
    with pytest.raises(RegistryError, match="/nothing/txmq/cluster is not in ZooKeeper"):
        txmq.connect(f"zk://{ensemble.hosts}/nothing")
