"""A session that the broker takes no more in (429 ``session-full``): its client goes on, and loses nothing."""

from __future__ import annotations

import pytest

import txmq
from tests.services.broker.wire import Wire
from txmq.broker.verbs.transaction_checks import UNFINISHED_OUTCOMES_MAX
from txmq.errors import RolledBackError, SessionFullError
from txmq.model import Outcome
from txmq.testing.processes.broker import BrokerProcess
from txmq.xid import TxId

_PIECE = 8_192  # fences sent before their answers are read
_FAR = 1 << 40  # counters that this client will not reach


def fill(broker: BrokerProcess, txid: str) -> None:
    """Fence ids of that session which nobody used, until it takes no more transactions."""
    known = TxId.parse(txid)
    head = f"outcome {TxId(known.cluster, known.home, known.session, _FAR)}"[:-10]
    with Wire(broker) as wire:
        for start in range(0, UNFINISHED_OUTCOMES_MAX + 1, _PIECE):
            numbers = range(start, min(start + _PIECE, UNFINISHED_OUTCOMES_MAX + 1))
            wire.send(b"".join(b"%s%010x fence %x\r\n" % (head.encode(), number + 1, number) for number in numbers))
            assert set(wire.hear(len(numbers)).codes) == {200}


def test_client_with_a_session_full_of_fences_uses_another(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address, timeout=30.0) as client, client.producer(timeout=30.0) as producer:
        client.topics.create("orders")
        with producer.transaction() as first:
            producer.send("orders", b"first")
        producer.send("orders", b"plain")
        fill(broker, first.txid)
        futures = [producer.send_async("orders", b"async") for _ in range(100)]
        with pytest.raises(RolledBackError) as refused, producer.transaction() as second:
            producer.send("orders", b"refused")
        assert isinstance(refused.value.__cause__, SessionFullError)
        assert second.outcome is Outcome.ROLLED_BACK
        with producer.transaction() as third:
            producer.send("orders", b"third")
        assert TxId.parse(third.txid).session != TxId.parse(first.txid).session
        assert third.outcome is client.outcome(third.txid) is client.outcome(first.txid) is Outcome.COMMITTED
        # The producer's batches stay with the session that numbered them: none is stored twice, none is unknown.
        assert [future.result(30.0).status for future in futures] == [txmq.SendStatus.ACKNOWLEDGED] * 100
        producer.send("orders", b"plain")
        values = [message.value for message in client.browse("orders")]
        assert sorted(values, key=str) == sorted([b"first", b"third", *[b"plain"] * 2, *[b"async"] * 100], key=str)
