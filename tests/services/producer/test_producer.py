"""The producer against a real broker that goes away and comes back."""

from __future__ import annotations

import pytest

import txmq
from txmq.testing.processes.broker import BrokerProcess


def test_buffer_full_of_messages_in_doubt_empties_when_broker_returns(
    broker: BrokerProcess,
) -> None:
    value = bytes(60_000)
    with txmq.connect(broker.address) as client:
        client.topics.create("t")
        with client.producer(buffer_size_bytes=100_000) as producer:
            producer.send("t", b"first")
            broker.pause()
            with pytest.raises(txmq.DeliveryUnknownError):
                producer.send("t", value, timeout=2.0)
            broker.resume()
            assert producer.send("t", value, timeout=60.0).offset == 2
        assert len(list(client.browse("t"))) == 3
