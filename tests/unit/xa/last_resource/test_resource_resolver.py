"""What a resolver does with markers that are old."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.xa.support import LastResourceFixture, Quiet, quiet_resolver
from txmq.xa.database.marker_table import EXPIRED_SIZE
from txmq.xa.resolver import Resolver


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LastResourceFixture]:
    made = LastResourceFixture(tmp_path)
    made.order(b"first")  # the resource knows its database
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    return quiet_resolver(monkeypatch)


def test_markers_of_a_long_outage_leave_round_after_round(world: LastResourceFixture) -> None:
    """As many as a minute brings would be more than a sweep a minute takes."""
    old = [(f"old-{number}",) for number in range(2 * EXPIRED_SIZE + 1)]
    with world.outside() as connection:
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO txmq_marker VALUES (?, 'rolled-back', 0, 0, 0)", old)
        connection.execute("COMMIT")
    resolver = Resolver(world.home, [world.resource])
    for _ in range(4):
        resolver.run_once()
    assert not [txid for txid in world.markers() if txid.startswith("old-")]
    resolver.close()
