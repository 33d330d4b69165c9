"""``HomeLink``: a home that does not answer is waited for once."""

from __future__ import annotations

import pytest

from tests.unit.client.scripted import ScriptedBroker
from tests.unit.client.scripted_cluster import scripted_cluster
from txmq.client.client import Client
from txmq.client.home_link import LOOK_S
from txmq.errors import BrokerAwayError
from txmq.testing.eventually import eventually


def test_home_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = scripted_cluster(monkeypatch, 1, 2)
    with cluster.client(1) as client:
        client.ping()
        client.offsets("t", 1)
        link = client.routes.link_of_home(2)
        link.look()
        cluster.homes[2].hold |= {"ping", "hello"}
        cluster.clock.now += LOOK_S
        with pytest.raises(BrokerAwayError, match="does not answer"):
            link.look()
        with monkeypatch.context() as patched:
            patched.delattr(type(link.control), "reach")
            with pytest.raises(BrokerAwayError, match=r"home 0{15}2 at .* is away"):
                link.look()
        cluster.homes[2].hold.clear()
        eventually(lambda: not link.is_away, "it answers a thread")
        link.look()


def test_broker_that_is_alone_is_not_looked_at(broker: ScriptedBroker, client: Client) -> None:
    client.ping()
    broker.connections_refused = 1
    broker.cut()
    asked = list(broker.verbs)
    client.routes.any_link().look()
    assert broker.verbs == asked
