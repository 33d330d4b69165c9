"""Users at a real broker: the first one ends anonymity, through kill -9 too; passwords are in no output."""

from __future__ import annotations

from pathlib import Path

import pytest

import txmq
from txmq.client.admin.cluster import Users
from txmq.errors import UnauthenticatedError
from txmq.testing.processes.broker import BrokerProcess


def _refused(address: str, password: str = "") -> None:
    with pytest.raises(UnauthenticatedError), txmq.connect(address, password=password) as client:
        client.topics.list()


def test_first_user_ends_anonymity_through_a_kill(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("a")
            Users(client.control, client.timeout).add("ops", "pencil")
            with pytest.raises(UnauthenticatedError):
                client.topics.list()
        for _ in range(2):
            named = broker.address.replace("txmq://", "txmq://ops@")
            _refused(broker.address)
            _refused(named, "wrong")
            _refused(broker.address.replace("txmq://", "txmq://nobody@"), "pencil")
            with txmq.connect(named, password="pencil") as client, client.producer() as producer:
                producer.send("a", b"hello")
                with producer.transaction() as tx:
                    tx.send("a", b"two")
            broker.kill()
            broker.start()
        with txmq.connect(broker.address.replace("txmq://", "txmq://ops@"), password="pencil") as client:
            assert [message.value for message in client.browse("a")] == [b"hello", b"two"] * 2
