"""From which process a consumer reads, and when it moves to another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.simulated.clock import SimClock
from txmq.client.read_place import ASIDE_S, SILENT_S, ReadPlace
from txmq.errors import BrokerAwayError

LEADER, ONE, TWO = ("leader", 1), ("replica", 1), ("replica", 2)


class Home:
    """A home as its link and the routes know it, and a place to read from."""

    def __init__(self, read_from: str) -> None:
        self.clock, self.is_away, self.replicas = SimClock(), False, [ONE, TWO]
        self.connection: Any = SimpleNamespace(reads=0)
        link: Any = SimpleNamespace(was_silent=self._was_silent, greeted=lambda *_: None, addresses=lambda _: [LEADER])
        self.link = link
        self.link.is_away = False
        routes: Any = SimpleNamespace(replicas_of=lambda _: self.replicas, require_home=lambda *_: 1)
        self.place = ReadPlace(link, routes, self.clock, prefers_replicas=read_from == "replica")

    def _was_silent(self) -> None:
        self.link.is_away = True

    def addresses(self) -> list[tuple[str, int]]:
        return list(self.place.addresses(self.clock.monotonic() + 1.0))

    def greeted(self, address: tuple[str, int]) -> None:
        self.place.greeted({} if address == LEADER else {"replica": True}, address)

    def moves(self, asked_s_ago: float | None = None) -> bool:
        asked_at = None if asked_s_ago is None else self.clock.monotonic() - asked_s_ago
        return self.place.should_move(cast("Any", self.connection), asked_at)


@pytest.mark.parametrize(("read_from", "first"), [("replica", ONE), ("any", LEADER)])
def test_preferred_process_is_tried_first(read_from: str, first: tuple[str, int]) -> None:
    home = Home(read_from)
    assert home.addresses()[0] == first
    assert sorted(home.addresses()) == sorted([LEADER, ONE, TWO])


def test_leader_is_read_from_until_replicas_are_tried_again() -> None:
    home = Home("replica")
    home.greeted(LEADER)  # so the replicas, which come first, did not answer
    assert not home.moves()
    assert home.addresses() == [LEADER]
    home.clock.advance(ASIDE_S + 0.1)
    assert home.moves()
    assert home.addresses() == [ONE, TWO, LEADER]


def test_replica_that_refuses_is_left_at_once() -> None:
    home = Home("replica")
    home.greeted(ONE)
    assert not home.moves()
    home.place.refused()
    assert home.moves()
    assert home.addresses() == [TWO, LEADER]


def test_refusal_of_the_leader_sets_nobody_aside() -> None:
    home = Home("any")
    home.greeted(LEADER)
    home.place.refused()
    assert not home.moves()
    assert LEADER in home.addresses()


def test_replica_that_is_silent_while_it_is_asked_is_left() -> None:
    home = Home("replica")
    home.greeted(ONE)
    assert not home.moves()
    home.clock.advance(100.0)
    assert not home.moves(), "nothing is asked"
    assert not home.moves(asked_s_ago=SILENT_S - 0.5)
    home.connection.reads += 1
    assert not home.moves(asked_s_ago=SILENT_S + 0.5), "bytes of a long answer have come"
    home.clock.advance(SILENT_S + 0.1)
    assert home.moves(asked_s_ago=2 * SILENT_S)


def test_any_goes_to_a_replica_and_back_with_its_leader() -> None:
    home = Home("any")
    home.greeted(LEADER)
    assert not home.moves()
    home.link.is_away = True
    assert home.moves()
    assert home.addresses() == [ONE, TWO]
    home.greeted(ONE)
    assert not home.moves()
    home.link.is_away = False
    assert home.moves()
    assert home.addresses()[0] == LEADER


def test_replica_that_answers_after_its_leader_did_not_is_kept() -> None:
    """The leader was tried first: else it would be tried again at once, and for ever."""
    home = Home("any")
    home.greeted(TWO)
    assert home.link.is_away
    assert not home.moves()


def test_home_without_replicas_is_read_at_its_leader() -> None:
    for read_from in ("replica", "any"):
        home = Home(read_from)
        home.replicas = []
        assert home.addresses() == [LEADER]
        home.greeted(LEADER)
        home.link.is_away = True
        assert not home.moves()


def test_replicas_are_told_where_no_leader_is_known() -> None:
    home = Home("any")

    def nobody(_deadline: float) -> list[tuple[str, int]]:
        raise BrokerAwayError("the home is given up")

    home.link.addresses = nobody
    assert home.addresses() == [ONE, TWO]
    home.replicas = []
    with pytest.raises(BrokerAwayError):
        home.addresses()
