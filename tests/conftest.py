"""What all tests share: a clean environment, and a real broker or MariaDB for those that ask for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq.config import ENVIRONMENT_PREFIX, OTHER_PREFIXES
from txmq.testing.broker_process import BrokerProcess
from txmq.testing.mariadb import MariaDB


@pytest.fixture(autouse=True)
def without_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the person who runs the tests must not decide how they end."""
    for name in list(os.environ):
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(OTHER_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A real broker process on a free port, over an empty data directory."""
    with BrokerProcess(tmp_path / "broker") as process:
        yield process


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    """A real MariaDB with an empty database, one for each file of tests."""
    with MariaDB(tmp_path_factory.mktemp("mariadb")) as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: what began last would keep one of two workers busy alone, for two minutes."""
    items.sort(key=lambda item: "simulation" not in item.path.parts)
