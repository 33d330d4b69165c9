"""An older copy of a data directory is put back; a topic is made anew: consumers begin anew, and skip nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.older_copy import older_copy
from tests.services.loop_client import Connect
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.zookeeper import Ensemble

TOPIC, GROUP = "orders", "billing"
NUMBERS = itertools.count(1)
QUICK = txmq.ConsumerOptions(heartbeat_interval=0.1, offset_save_interval=0.05)
WITHIN_S = 60.0
Stores = Callable[[], Any]


@pytest.fixture(params=["broker", "file", "mysql", "zookeeper"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    """What makes the consumer's offset store; each call another object for the same offsets."""
    if request.param == "mysql":
        mariadb: MariaDB = request.getfixturevalue("mariadb")
        txmq.DatabaseOffsetStore(mariadb.connect).install()
        yield lambda: txmq.DatabaseOffsetStore(mariadb.connect)
        mariadb.execute("DROP TABLE txmq_offset")
    elif request.param == "zookeeper":
        ensemble: Ensemble = request.getfixturevalue("ensemble")
        address = f"zk://{ensemble.hosts}/put-back-{next(NUMBERS)}"
        txmq.ZooKeeperOffsetStore(address).install()
        yield lambda: txmq.ZooKeeperOffsetStore(address)
    elif request.param == "file":
        yield lambda: txmq.FileOffsetStore(str(tmp_path / "offsets"))
    else:
        yield lambda: None


def send(client: txmq.Client, first: int, count: int) -> None:
    """Numbers as messages."""
    client.producer().send_many(TOPIC, [(None, b"%d" % number) for number in range(first, first + count)])


def take(consumer: Any, heard: list[int]) -> None:
    """What there is by now, acknowledged."""
    for message in consumer.poll(500, timeout=0.2):
        heard.append(int(message.value or b""))
        message.ack()


def hear(consumer: Any, heard: list[int], numbers: range) -> None:
    """Until all of these were delivered."""

    def all_heard() -> bool:
        take(consumer, heard)
        return set(heard) >= set(numbers)

    eventually(all_heard, f"all of {numbers} are delivered", within_s=WITHIN_S)


@pytest.mark.parametrize("is_away", [False, True], ids=["lives", "away"])
def test_consumer_hears_all_that_follows_an_older_copy(
    broker: BrokerProcess, connect: Connect, stores: Stores, is_away: bool
) -> None:
    """20 messages, then 30 that are lost with the directory, then 40 others at the same offsets and above."""
    heard: list[int] = []
    with connect(broker.address) as client:
        client.topics.create(TOPIC)
        send(client, 0, 20)
        consumer = client.consumer(GROUP, [TOPIC], offset_store=stores(), options=QUICK)
        hear(consumer, heard, range(20))
        with older_copy(broker):
            send(client, 100, 30)
            hear(consumer, heard, range(100, 130))
            if is_away:
                consumer.close()
        broker.start()
        send(client, 200, 40)  # beyond the offset that was saved
        if is_away:
            consumer = client.consumer(GROUP, [TOPIC], offset_store=stores(), options=QUICK)
        with closing(consumer):
            hear(consumer, heard, range(200, 240))
            send(client, 300, 5)
            hear(consumer, heard, range(300, 305))
    assert sorted(number for number in heard if number >= 200) == [*range(200, 240), *range(300, 305)]


def test_topic_made_anew_is_heard_from_its_first_message(
    broker: BrokerProcess, connect: Connect, stores: Stores
) -> None:
    """Its offsets begin at 0 again; the group's consumer was away."""
    heard: list[int] = []
    with connect(broker.address) as client:
        client.topics.create(TOPIC)
        send(client, 0, 100)
        with client.consumer(GROUP, [TOPIC], offset_store=stores(), options=QUICK) as consumer:
            hear(consumer, heard, range(100))
        client.topics.delete(TOPIC)
        client.topics.create(TOPIC)
        send(client, 200, 150)
        with client.consumer(GROUP, [TOPIC], start="latest", offset_store=stores(), options=QUICK) as consumer:
            eventually(lambda: consumer.assignment, "it has begun")
            send(client, 350, 1)
            hear(consumer, heard, range(350, 351))
    if stores() is not None:  # the broker's goes by topic ids: the group is new to this one, and ``start`` applies
        assert sorted(heard) == [*range(100), *range(200, 351)]


def test_consumer_without_group_goes_on_behind_an_older_copy(broker: BrokerProcess, connect: Connect) -> None:
    heard: list[int] = []
    with connect(broker.address) as client:
        client.topics.create(TOPIC)
        send(client, 0, 20)
        with client.consumer(GROUP, [TOPIC], broadcast=True, start="earliest", options=QUICK) as consumer:
            hear(consumer, heard, range(20))
            with older_copy(broker):
                send(client, 100, 30)
                hear(consumer, heard, range(100, 130))
            broker.start()
            send(client, 200, 40)
            hear(consumer, heard, range(200, 240))
    assert sorted(heard) == [*range(20), *range(100, 130), *range(200, 240)]
