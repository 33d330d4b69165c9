"""Two XA resources of one database in one block: their marker rows would wait for each other until the deadline."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.xa.xa_support import FakeResource, Notes, XAFixture
from txmq.client.transaction import block as module
from txmq.errors import ConfigError


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> XAFixture:
    made = XAFixture("ab")
    monkeypatch.setattr(module, "resolver_of", lambda _client: Notes(made.home))
    return made


def test_two_resources_of_one_database_are_refused_by_its_identity(pair: XAFixture) -> None:
    a, twin = pair.resources[0], FakeResource(pair.databases[0])
    with pytest.raises(ConfigError, match="one database"):
        pair.home_block(a, twin)


class Unconnected(FakeResource):
    """A resource that learns which database it is when it first connects, as a real one does."""

    is_known = False

    @property
    def uuid(self) -> str | None:
        """None before the first connection."""
        return super().uuid if self.is_known else None

    def enlist(self, cluster: str, txid: str, timeout_s: float, connection: Any = None) -> Any:
        """Begin."""
        self.is_known = True
        return super().enlist(cluster, txid, timeout_s, connection)


def test_two_resources_of_one_database_are_refused_and_closed(pair: XAFixture) -> None:
    a, twin = Unconnected(pair.databases[0]), Unconnected(pair.databases[0])
    with pytest.raises(ConfigError, match="one database"), pair.home_block(a, twin):
        pytest.fail("the body runs")
    assert pair.databases[0].sessions == set()
    assert pair.home.requests == []
