"""``txmq.testing.processes.proxy``: whoever goes through it reaches the broker no more when it is cut."""

from __future__ import annotations

import pytest

import txmq
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.proxy import Proxy


def test_cut_proxy_parts_its_clients_from_the_broker(broker: BrokerProcess) -> None:
    with (
        Proxy(broker.port) as proxy, txmq.connect(proxy.address, timeout=2.0, lazy=True) as far,
        txmq.connect(broker.address) as near,
    ):  # fmt: skip
        near.topics.create("t")
        eventually(lambda: _names(far) == ["t"], "it reaches the broker")
        proxy.cut()
        with pytest.raises(txmq.errors.ConnectionLostError):
            far.topics.list()
        assert _names(near) == ["t"]
        proxy.mend()
        eventually(lambda: _names(far) == ["t"], "it reaches the broker again")


def _names(client: txmq.Client) -> list[str]:
    try:
        return [topic.name for topic in client.topics.list()]
    except txmq.errors.ConnectionLostError:
        return []
