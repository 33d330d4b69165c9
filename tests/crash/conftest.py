"""What scenarios of kills and forks begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

import txmq
from tools.crash.directory import ORDERS, CampaignDirectory
from txmq.testing.processes.broker import BrokerProcess


@pytest.fixture
def campaign(tmp_path: Path, broker: BrokerProcess) -> CampaignDirectory:
    """A broker, a topic, a database."""
    made = CampaignDirectory(tmp_path)
    made.create(broker.address)
    with txmq.connect(broker.address) as client:
        client.topics.create(ORDERS)
        made.resource().install(client)
    return made
