"""A branch and its connection, of which it lets go once."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import socket
import time
from typing import cast

import pytest

from txmq.model import Outcome
from txmq.xa.database.installation import DatabaseSession
from txmq.xa.last_resource.branch import Branch

from ..support import LastResourceFixture, quiet_resolver


@pytest.mark.parametrize("raises", [False, True])
def test_interrupt_behind_return_of_connection_leaves_it_pooled_once(
    world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """Found: it was returned twice, so that two blocks had it at a time; or it was closed in the pool."""
    world.order(b"first")
    resource, give_back = world.resource, world.resource.give_back

    def interrupted(session: DatabaseSession) -> None:
        monkeypatch.undo()
        quiet_resolver(monkeypatch)
        give_back(session)
        raise KeyboardInterrupt

    monkeypatch.setattr(resource, "give_back", interrupted)
    with pytest.raises(ZeroDivisionError if raises else KeyboardInterrupt), world.block() as tx:
        world.insert(tx, b"x")
        _ = 1 / (not raises)
    assert tx.outcome is (Outcome.ROLLED_BACK if raises else Outcome.COMMITTED)
    sessions = [resource._pool.take(), resource._pool.take()]
    assert [session is None for session in sessions] == [False, True], "one connection was ever made"
    resource.give_back(cast(DatabaseSession, sessions[0]))
    assert world.order(b"next").outcome is Outcome.COMMITTED
    world.check()
    assert len(world.opened) == 2, "that of the installation, and the one of the pool"


def test_late_end_of_block_leaves_the_limit_of_the_next(world: LastResourceFixture) -> None:
    """An interrupted block ends once more what it has given back, when another one uses the connection already."""
    world.order(b"first")
    session = world.resource._pool.take()
    assert session is not None
    ours, peer = socket.socketpair()
    with ours, peer:
        peer.settimeout(5.0)
        session.descriptor = ours.fileno
        first = Branch(world.resource, session, is_own=True, timeout_s=5.0)
        first.roll_back()
        assert world.resource._pool.take() is session
        second = Branch(world.resource, session, is_own=True, timeout_s=5.0)
        first.finish()
        first.abandon()
        with second._limit:
            second._limit.look(time.monotonic() + 60.0)
        assert peer.recv(1) == b"", "the call that waits too long is ended"
        second.abandon()
