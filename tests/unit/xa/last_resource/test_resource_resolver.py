"""What a resolver does with markers that are old: those that leave, and those that may have left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.xa.support import LastResourceFixture, Quiet, quiet_resolver
from txmq.model import Outcome
from txmq.xa import LastResource
from txmq.xa.database.marker_table import EXPIRED_SIZE, OUTBOXED, ROLLED_BACK
from txmq.xa.database.outbox_tables import OUTBOXED_KEPT_MS
from txmq.xa.last_resource.resolving import Unresolved
from txmq.xa.resolver import Resolver


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LastResourceFixture]:
    made = LastResourceFixture(tmp_path)
    made.resource = LastResource("orders-db", connect=made.connect, outbox=True)
    made.resource.install(made.home)
    made.order(b"first")  # the resource knows its database
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    return quiet_resolver(monkeypatch)


def write_markers(world: LastResourceFixture, outcome: str, *txids: str) -> None:
    with world.outside() as connection:
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO txmq_marker VALUES (?, ?, 0, 0, 0)", [(txid, outcome) for txid in txids])
        connection.execute("COMMIT")


@pytest.mark.parametrize("outcome", [OUTBOXED, ROLLED_BACK])
def test_markers_of_a_long_outage_leave_round_after_round(world: LastResourceFixture, outcome: str) -> None:
    """As many as a minute brings would be more than a sweep a minute takes."""
    write_markers(world, outcome, *(f"old-{number}" for number in range(2 * EXPIRED_SIZE + 1)))
    resolver = Resolver(world.home, [world.resource])
    for _ in range(4):
        resolver.run_once()
    assert not [txid for txid in world.markers() if txid.startswith("old-")]
    resolver.close()


def left_long_ago(world: LastResourceFixture, age_ms: int) -> tuple[str, list[str]]:
    """A block whose COMMIT, with its messages, was not answered; and what it is told of its end."""
    _, txid = world.home.session.next_txid()
    until_ms, ends = int(time.time() * 1000) + OUTBOXED_KEPT_MS // 2 - age_ms, list[str]()
    item = Unresolved(txid, None, 0, lambda: ends.append(txid), proves_until_ms=until_ms)
    world.resource.unresolved.append(item)
    return txid, ends


@pytest.mark.parametrize("is_late", [False, True])
def test_marker_that_may_have_been_swept_proves_no_rollback(world: LastResourceFixture, is_late: bool) -> None:
    """Its process reached no database for a day; others have drained its row and removed its marker since."""
    txid, ends = left_long_ago(world, OUTBOXED_KEPT_MS if is_late else 0)
    resolver = Resolver(world.home, [world.resource])
    resolver.run_once()
    assert world.home.states().get(txid) == (None if is_late else Outcome.ROLLED_BACK.value)
    assert (txid in world.markers()) is not is_late
    assert (ends, list(world.resource.unresolved)) == ([txid], [])
    resolver.close()


def test_old_marker_that_is_there_proves_what_it_says(world: LastResourceFixture) -> None:
    txid, ends = left_long_ago(world, OUTBOXED_KEPT_MS)
    write_markers(world, OUTBOXED, txid)
    resolver = Resolver(world.home, [world.resource])
    resolver.run_once()
    assert (ends, world.home.states().get(txid)) == ([txid], Outcome.ROLLED_BACK.value), "there it is void"
    resolver.close()
