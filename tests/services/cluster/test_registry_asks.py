"""A real broker dies around what it asks of its registry: done there or not, it is once, and the broker goes on."""

from __future__ import annotations

import json

import pytest

import txmq
from txmq.testing.eventually import WITHIN_S
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster

from .asking import asked, comes_back, dies_of, put


def _arm(broker: BrokerProcess, point: str) -> None:
    broker.restart(env={"TXMQ_CRASH": f"{point}:1"})


@pytest.mark.parametrize(("point", "is_there"), [("registry.topic_id_drawn", False), ("registry.carried_out", True)])
def test_topic_that_is_placed_when_the_broker_dies(alone: Cluster, point: str, is_there: bool) -> None:
    [broker] = alone.start().brokers
    _arm(broker, point)
    dies_of(broker, b"topic create orders partitions=2 1\r\n")
    assert asked(broker, "topic", "create", "orders", "partitions=2")[0] == (409 if is_there else 200)
    assert [put(broker, "orders", number)[0] for number in range(3)] == [200, 200, 404]


def test_partition_that_is_added_when_the_broker_dies(alone: Cluster) -> None:
    [broker] = alone.start().brokers
    assert asked(broker, "topic", "create", "orders")[0] == 200
    _arm(broker, "registry.carried_out")
    dies_of(broker, b"topic alter orders partitions=2 1\r\n")
    assert asked(broker, "topic", "alter", "orders", "partitions=2")[0] == 200
    code, body = asked(broker, "topic", "describe", "orders")
    assert (code, len(json.loads(body)["homes"])) == (200, 2)
    assert put(broker, "orders", 1)[0] == 200


def test_group_whose_anchor_is_fixed_when_the_broker_dies(alone: Cluster) -> None:
    [broker] = alone.start().brokers
    assert asked(broker, "topic", "create", "orders")[0] == 200
    assert put(broker, "orders", 0)[0] == 200
    _arm(broker, "registry.carried_out")
    options = txmq.ConsumerOptions(strategy="exclusive", heartbeat_interval=0.1)
    with (
        txmq.connect(broker.address) as client,
        client.consumer("group", ["orders"], start="earliest", options=options) as consumer,
    ):
        comes_back(broker)
        [message] = consumer.poll(1, WITHIN_S)
        message.ack(sync=True)
