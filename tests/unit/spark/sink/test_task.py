"""Where the sink's batches are decided: at one home, or nowhere."""

from __future__ import annotations

import pytest

from tests.unit.client.scripted import ScriptedBroker, scripted_broker
from tests.unit.client.scripted_cluster import scripted_cluster
from txmq.client.client import Client
from txmq.errors import ConfigError
from txmq.spark.sink.options import SinkOptions, parse_options
from txmq.spark.sink.task import home_of


def options(**more: str) -> SinkOptions:
    return parse_options({"bootstrap": "txmq://host:1", **more}, is_streaming=False)


def test_sink_writes_at_the_one_home_of_its_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = scripted_cluster(monkeypatch, 1, 2)
    cluster.topics["u"] = [2, 2]
    with cluster.client(1) as client:
        client.ping()
        assert home_of(client, options(topic="u")).home == 2
        with pytest.raises(ConfigError, match="partitions of topic 't' are at 2 homes of the cluster"):
            home_of(client, options(topic="t"))
        with pytest.raises(ConfigError, match="of topics that rows name are at 2 homes"):
            home_of(client, options())
    assert not any("query" in home.verbs for home in cluster.homes.values())


def test_sink_asks_a_lone_broker_for_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    broker: ScriptedBroker = scripted_broker(monkeypatch)
    with Client([("host", 1)], clock=broker.clock) as client:
        client.ping()
        assert home_of(client, options(topic="t")) is client.routes.sole
    assert broker.verbs == ["hello", "ping"]
