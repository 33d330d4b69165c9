"""An ordered producer that begins while its broker is away."""

from __future__ import annotations

from pathlib import Path

import pytest

import txmq
from tests.logged import said
from tests.services.loop_client import Connect
from txmq.testing.processes.broker import BrokerProcess, free_port

SELECTOR = txmq.KeyHashSelector()
OPTIONS = txmq.OrderedOptions(timeout=30.0, partitions={"t": 4})  # a broker that is gone is noticed at once
SPOOLED = txmq.SendStatus.SPOOLED


def _broker(tmp_path: Path) -> BrokerProcess:
    return BrokerProcess(tmp_path / "broker", listen=f"127.0.0.1:{free_port()}")


def _send(connect: Connect, address: str, tmp_path: Path, *values: bytes) -> list[txmq.SendStatus]:
    """One life of a producer."""
    with (
        connect(address, lazy=True) as client,
        client.ordered_producer(SELECTOR, str(tmp_path / "spool"), options=OPTIONS) as producer,
    ):
        return [producer.send("t", value, b"k").status for value in values]


def test_a_first_life_spools_by_the_declared_partitions(tmp_path: Path, connect: Connect) -> None:
    broker = _broker(tmp_path)
    assert _send(connect, broker.address, tmp_path, b"0", b"1") == [SPOOLED, SPOOLED]
    with broker, connect(broker.address) as client:
        client.topics.create("t", partitions=4)
        with client.ordered_producer(SELECTOR, str(tmp_path / "spool")) as producer:
            producer.flush()
            place = producer.send("t", b"2", b"k")
        assert (place.partition, place.offset) == (SELECTOR.partition_of(b"k", 4), 2)
        assert [message.value for message in client.browse("t")] == [b"0", b"1", b"2"]


def test_later_process_trusts_learnt_topics_over_declared_ones(tmp_path: Path, connect: Connect) -> None:
    with _broker(tmp_path) as broker:
        with connect(broker.address) as client:
            client.topics.create("t", partitions=7)
        assert _send(connect, broker.address, tmp_path, b"0") == [txmq.SendStatus.ACKNOWLEDGED]
        broker.kill()
        assert _send(connect, broker.address, tmp_path, b"1") == [SPOOLED]
        broker.start()
        with connect(broker.address) as client:
            with client.ordered_producer(SELECTOR, str(tmp_path / "spool")) as producer:
                producer.flush()
            assert client.offsets("t", SELECTOR.partition_of(b"k", 7)).end == 2


def test_topic_neither_learnt_nor_declared_is_refused_and_nothing_stored(tmp_path: Path, connect: Connect) -> None:
    address = _broker(tmp_path).address
    with (
        connect(address, timeout=0.2, lazy=True) as client,
        client.ordered_producer(SELECTOR, str(tmp_path / "spool")) as producer,
    ):
        with pytest.raises(txmq.errors.ConnectionLostError):
            producer.send("t", b"0", b"k")
        assert producer.spooled == 0


@pytest.mark.parametrize("partitions", [{"t": 0}, {"": 1}, {"t": "4"}])
def test_what_cannot_be_declared_is_refused(partitions: dict[str, int]) -> None:
    with pytest.raises(txmq.errors.ConfigError, match="partitions"):
        txmq.OrderedOptions(partitions=partitions).check()


def test_messages_waiting_on_disk_are_logged_once_then_sparingly(
    tmp_path: Path, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "txmq")
    with _broker(tmp_path) as broker, connect(broker.address) as client:
        client.topics.create("t", partitions=4)
        with client.ordered_producer(SELECTOR, str(tmp_path / "spool"), options=OPTIONS) as producer:
            producer.send("t", b"0", b"k")
            broker.kill()
            for number in range(50):
                assert producer.send("t", b"%d" % number, b"k").status is SPOOLED
            broker.start()
            producer.flush()
            assert producer.send_async("t", b"last", b"k").result(60.0).is_success
    lines = [line for line in said(caplog) if line.get("spool") is not None]
    assert [line["topic"] for line in lines if "wait on local disk" in line["event"]] == ["t"]
    assert len([line for line in lines if "cannot be drained yet" in line["event"] and "refused" in line["error"]]) <= 1
    assert "the spool is empty again" in {line["event"] for line in lines}
