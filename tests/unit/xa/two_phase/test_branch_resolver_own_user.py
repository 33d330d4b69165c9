"""The resolver of XA branches under a user of its own: it names its database, and acts on nothing but the answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash_points import crash_at
from tests.logged import said
from tools.simulated.connection import Sent
from tools.simulated.faults import Fault, GivenReply, Reply
from txmq.client.transaction import block as module
from txmq.errors import ForbiddenError
from txmq.runtime.crashpoints import SimulatedCrash

from ..xa_support import Notes, XAFixture


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> XAFixture:
    """Three transactions whose owner has died before it decided."""
    made = XAFixture("a")
    notes = Notes(made.home)
    monkeypatch.setattr(module, "resolver_of", lambda _client: notes)
    for value in (b"1", b"2", b"3"):
        with crash_at("client.xa.all_prepared"), pytest.raises(SimulatedCrash):
            made.transfer(value)
    made.die()
    return made


def watched(world: XAFixture, told: bytes | None = None) -> list[str]:
    """The words of each ``outcome``; what a fence is ``told``, if that is given."""
    asked = list[str]()

    def noted(sent: Sent, take: Callable[[], Reply]) -> Reply:
        if sent.verb == "outcome":
            asked.append(" ".join(sent.line.split(" ")[2:-1]))
            if told is not None and "fence" in asked[-1]:
                return GivenReply(told)
        return take()

    world.home.intercept = noted
    return asked


def test_each_question_names_the_database(world: XAFixture) -> None:
    asked = watched(world)
    uuid = world.databases[0].uuid
    assert world.resolver().run_once() == 3
    assert asked == [f"owner uuid={uuid}"] * 3 + [f"fence uuid={uuid}"] * 3
    world.check()


@pytest.mark.parametrize("told", [b"unknown\n", b"committed\n", b"prepared\n"])
def test_branch_is_left_unless_the_broker_says_rolled_back(world: XAFixture, told: bytes) -> None:
    watched(world, told)
    assert world.resolver().run_once() == 0
    assert len(world.databases[0].prepared) == 3


@pytest.mark.parametrize("knows", [True, False])
def test_refused_branch_is_said_once_and_delays_no_other(
    world: XAFixture, caplog: pytest.LogCaptureFixture, knows: bool
) -> None:
    world.home.session.fences_by_database = knows
    world.home.faults["outcome"].extend([Fault(ForbiddenError("settle")), None, None])
    resolver = world.resolver()
    assert resolver.run_once() == 2
    assert len(world.databases[0].prepared) == 1
    assert len([line for line in said(caplog) if "another user's" in line["event"]]) == 1
    assert resolver.run_once() == 1
