"""The broker that the contracts of transactions are held against: a real one, and the one in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import txmq
from tools.simulated.broker import SimulatedBroker
from txmq.testing.processes.broker import BrokerProcess


@pytest.fixture(scope="module")
def real(shared_broker: BrokerProcess) -> Iterator[Any]:
    """A client of a real broker with the topic orders."""
    with txmq.connect(shared_broker.address) as client:
        client.topics.create("orders")
        yield client


@pytest.fixture(params=["fake", "real"])
def client(request: pytest.FixtureRequest) -> Any:
    """A client of either; the files of this folder that are no contracts have clients of their own."""
    return SimulatedBroker() if request.param == "fake" else request.getfixturevalue("real")
