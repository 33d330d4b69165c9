"""The resolver of XA branches where the broker refuses one of several: the others are resolved all the same."""

from __future__ import annotations

import pytest

from tests.crash_points import crash_at
from tests.logged import said
from tools.simulated.faults import Fault
from txmq.client.transaction import block as module
from txmq.errors import NeverIssuedError, OverloadedError
from txmq.runtime.crashpoints import SimulatedCrash

from ..xa_support import Notes, XAFixture


def _left_prepared(monkeypatch: pytest.MonkeyPatch, *values: bytes) -> tuple[XAFixture, Notes]:
    """Transactions whose owner died before it had them decided."""
    world = XAFixture("a")
    notes = Notes(world.home)
    monkeypatch.setattr(module, "resolver_of", lambda _client: notes)
    for value in values:
        with crash_at("client.xa.all_prepared"), pytest.raises(SimulatedCrash):
            world.transfer(value)
    world.die()
    return world, notes


def test_refused_fence_is_asked_again_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A session has room for so many fences; a branch of one that is full stays prepared, and nothing is guessed."""
    world, notes = _left_prepared(monkeypatch, b"1", b"2", b"3")
    full = Fault(OverloadedError("full"))
    asked = [None] * 3  # before it fences them
    world.home.faults["outcome"].extend([*asked, full, None, None, *asked[:1], full])
    resolver, prepared = world.resolver(), world.databases[0].prepared
    assert resolver.run_once() == 2
    assert len(prepared) == 1
    (xid,) = prepared
    assert resolver.run_once() == 0
    assert len(prepared) == 1
    assert resolver.run_once() == 1
    world.check()
    assert world.databases[0].rows == []
    lines = said(caplog)
    assert len([line for line in lines if line.get("txid") == xid.gtrid.decode() and "fence" in line["event"]]) == 1
    notes.resolver.close()


def test_branch_of_a_session_that_a_restored_broker_lost_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The decision may be what was lost, and another branch may be committed: an operator resolves it."""
    world, notes = _left_prepared(monkeypatch, b"1")
    world.home.faults["outcome"].extend([Fault(NeverIssuedError("was never issued here"))] * 2)
    resolver = world.resolver()
    for _ in range(2):
        assert resolver.run_once() == 0
    assert len(world.databases[0].prepared) == 1
    (line,) = [line for line in said(caplog) if "restored" in line["event"]]
    ((_, hanging),) = resolver.hanging()
    assert "restored" in hanging.why
    assert line["txid"] == hanging.txid
    notes.resolver.close()
