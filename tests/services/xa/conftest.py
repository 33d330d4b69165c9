"""What tests of XA branches on a real MariaDB begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from txmq.testing.processes.mariadb import MariaDB

from .mysql_orders import MySQLOrders


@pytest.fixture
def orders(mariadb: MariaDB) -> Iterator[MySQLOrders]:
    """A database with a table of orders; no branch is left prepared after the test."""
    made = MySQLOrders(mariadb)
    yield made
    made.resolve_everything()
