"""The producer against a real broker: what was acknowledged is read; the broker goes away and comes back."""

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


def test_reads_behind_send_many_find_all_of_it(broker: BrokerProcess) -> None:
    pairs = [(b"%d" % number, bytes(50_000)) for number in range(80)]  # 4 MB: groups that a thread writes to the files
    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("t", partitions=2)
        for sent in range(80, 40 * 80, 80):
            last = producer.send_many("t", pairs)[-1]
            assert last.offset is not None
            assert client.fetch("t", last.partition, last.offset, timeout=0.0)[-1].offset == last.offset
            assert sum(client.offsets("t", number).end for number in range(2)) == sent
