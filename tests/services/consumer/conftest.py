"""What tests of retries begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import txmq
from tests.services.loop_client import Connect
from txmq.testing.processes.broker import BrokerProcess

from .retrying import TOPIC


@pytest.fixture
def client(broker: BrokerProcess, connect: Connect) -> Iterator[txmq.Client]:
    """A client of a broker with three messages in one partition; files with other topics have clients of their own."""
    with connect(broker.address) as made:
        made.topics.create(TOPIC)
        for value in (b"one", b"bad", b"two"):
            made.producer().send(TOPIC, value, key=b"k")
        yield made
