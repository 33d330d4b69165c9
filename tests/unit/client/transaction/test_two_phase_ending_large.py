"""XA transactions larger than one request: parts are streamed ahead, before anything is prepared."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.xa.xa_support import Notes, XAFixture
from tools.simulated.faults import lost
from txmq.client.transaction import block as module
from txmq.errors import RolledBackError


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> XAFixture:
    """A home that takes 64 KiB a request, and a client that keeps 100 KiB at most."""
    monkeypatch.setattr(module, "_STREAM_AT_BYTES", 100 << 10)
    world = XAFixture("ab")
    notes = Notes(world.home)
    monkeypatch.setattr(module, "resolver_of", lambda _client: notes)
    world.home.session.request_size_bytes_max = 64 << 10
    return world


def _large(tx: Any) -> list[bytes]:
    values = [bytes([n]) * 10_000 for n in range(30)]
    for value in values:
        tx.send("orders", value, key=b"\x00")
    return values


def test_a_large_transaction_streams_its_parts_before_it_prepares(narrow: XAFixture) -> None:
    with narrow.block() as tx:
        values = _large(tx)
    assert narrow.home.values("orders") == values
    assert narrow.home.requests.index("decide") > narrow.home.requests.index("put")
    assert [result.offset for result in tx.results] == list(range(30))


@pytest.mark.parametrize("is_executed", [False, True])
def test_a_lost_part_prepares_nothing(narrow: XAFixture, is_executed: bool) -> None:
    narrow.home.faults["put"].extend([None, lost(is_executed=is_executed)])
    with pytest.raises(RolledBackError), narrow.block() as tx:
        try:
            _large(tx)
        except RolledBackError:
            tx.send("orders", b"small")
    assert "decide" not in narrow.home.requests
    assert not any(database.prepared for database in narrow.databases)
    assert narrow.home.states() == {tx.txid: "rolled-back"}


def test_lost_decide_of_streamed_parts_is_told_as_it_is(narrow: XAFixture) -> None:
    narrow.home.faults["decide"].append(lost(is_executed=False))
    with pytest.raises(RolledBackError), narrow.block() as tx:
        _large(tx)
    assert narrow.home.states() == {tx.txid: "rolled-back"}
    assert not any(database.prepared for database in narrow.databases)


def test_a_body_error_rolls_back_what_was_streamed(narrow: XAFixture) -> None:
    with pytest.raises(ZeroDivisionError), narrow.block() as tx:
        _large(tx)
        _ = 1 / 0
    assert narrow.home.requests[-1] == "rollback"
    assert narrow.home.states() == {tx.txid: "rolled-back"}
