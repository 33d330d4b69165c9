"""A client of a broker that is a script, and three homes that are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.homes import Cluster
from tests.unit.client.scripted import ScriptedBroker, scripted_broker
from txmq.client.client import Client


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> ScriptedBroker:
    return scripted_broker(monkeypatch)


@pytest.fixture
def client(broker: ScriptedBroker) -> Iterator[Client]:
    with Client([("host", 1)], clock=broker.clock) as opened:
        yield opened


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    opened = Cluster(monkeypatch)
    yield opened
    opened.routes.close()
