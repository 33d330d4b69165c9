"""The producer against a real broker: what was acknowledged is read; the broker goes away and comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import txmq
from tests.services.loop_client import Connect
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


def _kept(client: txmq.Client) -> tuple[int, int]:
    """Sessions and sequences that the broker keeps."""
    figures = json.loads(client.stats("json"))["broker"]
    return figures["sessions"], figures["sequences"]


def test_clients_that_close_leave_nothing(broker: BrokerProcess, connect: Connect, tmp_path: Path) -> None:
    """Each left a session and a sequence for each partition, for a day."""
    spool = str(tmp_path / "spool")
    with txmq.connect(broker.address) as looks:
        looks.topics.create("t", partitions=2)
        for number in range(6):
            with connect(broker.address) as client:
                with client.producer() as one, client.producer() as other:
                    for producer in (one, other):
                        assert [producer.send("t", b"v", partition=n).partition for n in (0, 1)] == [0, 1]
                with client.ordered_producer(txmq.KeyHashSelector(), spool) as ordered:
                    assert ordered.send("t", b"v", b"k").status is txmq.SendStatus.ACKNOWLEDGED
                assert _kept(looks) == (2, 4)
            assert _kept(looks) == (0, 0)
            if number == 2:
                broker.kill()
                broker.start()
        with connect(broker.address) as client, client.producer() as producer:
            with producer.transaction() as tx:
                producer.send("t", b"v")
            producer.send("t", b"v")
        assert _kept(looks) == (1, 0)
        assert looks.outcome(tx.txid) is txmq.Outcome.COMMITTED
        broker.kill()
        broker.start()
        assert _kept(looks) == (1, 0)
        assert looks.outcome(tx.txid) is txmq.Outcome.COMMITTED
        assert sum(looks.offsets("t", n).end for n in (0, 1)) == 6 * 5 + 2


def test_reads_behind_send_many_find_all_of_it(broker: BrokerProcess) -> None:
    pairs = [(b"%d" % number, bytes(50_000)) for number in range(80)]  # 4 MB: groups that a thread writes to the files
    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("t", partitions=2)
        for sent in range(80, 40 * 80, 80):
            last = producer.send_many("t", pairs)[-1]
            assert last.offset is not None
            assert client.fetch("t", last.partition, last.offset, timeout=0.0)[-1].offset == last.offset
            assert sum(client.offsets("t", number).end for number in range(2)) == sent
