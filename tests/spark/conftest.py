"""One Spark session for the whole run, and a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import txmq
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.spark import start_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session; its settings are those of ``txmq.testing.processes.spark``."""
    session = start_session("txmq-tests")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker for the tests of one module; a test that kills it starts one of its own."""
    folder: Path = tmp_path_factory.mktemp("broker")
    with BrokerProcess(folder / "data") as process:
        yield process


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client of ``broker``."""
    with txmq.connect(broker.address) as connected:
        yield connected
