"""One MariaDB with a binlog for a file of tests, and readers of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.binlog.reading import Reading
from txmq.testing.processes.mariadb import MariaDB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    with MariaDB(tmp_path_factory.mktemp("binlog"), binary_log=True) as started:
        yield started


@pytest.fixture
def reading(server: MariaDB, request: pytest.FixtureRequest) -> Iterator[Reading]:
    with Reading(server, **getattr(request, "param", {})) as begun:
        yield begun
