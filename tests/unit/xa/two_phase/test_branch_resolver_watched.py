"""Branches that their owner has left to the resolver of its own process: when it is told that nothing is in doubt."""

from __future__ import annotations

import pytest

from tests.crash_points import crash_at
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa.resolver import Resolver

from ..xa_support import FakeResource, XAFixture


@pytest.mark.parametrize("fails", [False, True])
def test_unanswered_rollback_is_durable_before_its_owner_hears_of_it(fails: bool) -> None:
    """Found: the branch came back with a crash of the database, below the session's floor: an operator's work."""
    world = XAFixture("a")
    with crash_at("client.xa.all_prepared"), pytest.raises(SimulatedCrash):
        world.transfer(b"x")
    (database,), resource = world.databases, FakeResource(world.databases[0])
    resolver = Resolver(world.home, [resource], world.home.clock)
    resolver.run_once()
    (xid,) = database.prepared
    database.rollback(xid)  # not forced: that failed, or the answer was lost
    told: list[bool] = []
    resolver.branch_resolver(resource, xid.gtrid.decode()).watch(
        xid.gtrid.decode(), lambda: told.append(bool(database.unforced))
    )
    if fails:
        database.faults["draw"].append("-")
        resolver.run_once()
        assert told == []
    resolver.run_once()
    resolver.run_once()
    assert told == [False]
