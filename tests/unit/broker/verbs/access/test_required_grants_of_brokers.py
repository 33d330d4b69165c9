"""Who acts for whom between homes: a user who names another's transaction has no say in it, by way of a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tools.images.homes import Cluster, HomeNode
from tools.images.node import Answer, Client
from tools.images.requests import batch, part
from tools.simulated.disk import SimDisk
from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.verbs.access.required_grants import ACTS, RULES
from txmq.protocol.grants import ALL, Grant
from txmq.redo import entries

from ...homes_support import add_users, as_peer, commit, logged_in, prepare_branch, two_homes

UUID = "d" * 32


class World(NamedTuple):
    """Two homes with users: ``shop`` has a transaction at ``here``, ``mallory`` a session at ``there``."""

    cluster: Cluster
    here: HomeNode
    there: HomeNode
    shop: Client
    mallory: Client

    def txid(self, counter: int = 1) -> str:
        """A transaction of the shop's."""
        return _txid(self.here, self.shop, counter)

    def branch(self, counter: int = 1) -> str:
        """A transaction of Mallory's."""
        return _txid(self.there, self.mallory, counter)


def _txid(home: HomeNode, client: Client, counter: int = 1) -> str:
    session = client.client.session
    assert session is not None
    return home.txid(session.number, counter)


def made() -> World:
    here, there = two_homes()
    add_users(here, there)
    return World(Cluster(here, there), here, there, logged_in(here), logged_in(there, "mallory"))


def allow(world: World, *grants: Grant) -> None:
    """Give the shop these grants at the home that decides."""
    world.here.state.principals.fold(entries.GRANTED, {"user": "shop", "grants": grants})


# --- the table -------------------------------------------------------------------------------------------------------


class Asker(NamedTuple):
    """For whom a broker asks, and whether that user may settle the shop's transaction."""

    life: str
    is_served: bool


ASKERS = (
    Asker("shop~1", True), Asker("ops~1", True), Asker("settler~1", True), Asker("mallory~1", False),
    Asker("shop~0", False), Asker("shop~2", False), Asker("shop", False), Asker("ops", False), Asker("ops~7", False),
    Asker("-", False), Asker("~", False), Asker("nobody~1", False), Asker(".home-0000000000000001~1", False),
)  # fmt: skip


def _open(world: World, _own: str) -> str:
    return world.txid(5)


def _prepared(world: World, _own: str) -> str:
    words = {"resource": "db", "uuid": UUID, "table": "txmq_markers"}
    allow(world, Grant("write", "topic", ALL), Grant("install", "resource", UUID))
    body = part("a", 0, batch(b"p"))
    assert world.shop.ask("prepare", world.txid(6), "last-resource", extensions=words, body=body).code == 200
    return world.txid(6)


STATES: tuple[Callable[[World, str], str], ...] = (_open, _prepared)


def _settler(world: World) -> None:
    """``ops`` and whoever has ``settle`` on the database of a prepared transaction."""
    users = world.here.state.principals.users
    users["settler"] = type(users["shop"])("settler", None, None, (Grant("settle", "resource", UUID),), 1)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: " ".join([act[0].decode(), *sorted(map(bytes.decode, act[1]))]))
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("asker", ASKERS, ids=lambda asker: asker.life)
def test_act_is_served_as_its_user_would_be(
    act: tuple[bytes, frozenset[bytes]], state: Callable[[World, str], str], asker: Asker
) -> None:
    world = made()
    _settler(world)
    own = world.branch()
    txid = state(world, own)
    answer = _act(world, act, txid, own, asker.life)
    if not ACTS[act].asks:
        assert answer.error != "forbidden"
    else:
        is_of_database = asker.life == "settler~1" and state is _open  # nothing says that it is of that database
        is_served = asker.is_served and not is_of_database
        assert (answer.code == 403) is not is_served, answer
        if not is_served:
            assert asker.life in answer.body.decode()
    fenced = b"fence" in act[1] and answer.code == 200 and state is _open
    assert (world.shop.ask("outcome", txid).body == b"rolled-back\n") is fenced


def _act(world: World, act: tuple[bytes, frozenset[bytes]], txid: str, own: str, life: str) -> Answer:
    verb, words = act
    stated = {word.decode(): own if word in (b"branch", b"of") else None for word in words}
    return as_peer(world.there, world.here).ask(verb.decode(), txid, extensions={**stated, "for": life})


@pytest.mark.parametrize("act", [act for act in ACTS if b"branch" in act[1]])
def test_what_lists_a_branch_is_told_to_it_whoever_asks(act: tuple[bytes, frozenset[bytes]]) -> None:
    world = made()
    owner = logged_in(world.there)
    branch = _txid(world.there, owner)
    assert prepare_branch(owner, branch, world.txid(), ("a", 0, b"x")).code == 200
    assert commit(world.shop, world.txid(), ("a", 0, b"y"), homes=branch).code == 200
    answer = _act(world, act, world.txid(), branch, "shop~77")
    assert answer.code == 200
    assert answer.body == (b"" if act[0] == b"complete" else b"committed\n")


@pytest.mark.parametrize("act", ACTS)
def test_broker_names_transactions_of_its_own_home_only(act: tuple[bytes, frozenset[bytes]]) -> None:
    world = made()
    third = HomeNode(3, SimDisk(), world.here.clock)
    for own in (third.txid(1, 1), world.txid(2), "t"):
        answer = _act(world, act, world.txid(), own, "shop~1")
        assert (answer.code, answer.error) == (403, "forbidden")


@pytest.mark.parametrize("act", ACTS)
def test_only_brokers_say_for_whom_they_ask(act: tuple[bytes, frozenset[bytes]]) -> None:
    world = made()
    verb, words = act
    stated = {word.decode(): world.branch() if word in (b"branch", b"of") else None for word in words}
    answer = world.shop.ask(verb.decode(), world.txid(), extensions={**stated, "for": "shop~1"})
    assert answer.code in (400, 403)
    assert world.shop.ask("outcome", world.txid()).body == b"unknown\n"


def test_every_act_is_of_a_known_verb() -> None:
    assert {verb for verb, _ in ACTS} <= set(RULES)
    for (_, words), act in ACTS.items():
        assert act.own in words
        assert act.what
        assert act.whose


def test_every_ask_of_a_broker_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a life with branches asks: looks, fences, reports, reminders."""
    world = made()
    asked = set[tuple[bytes, frozenset[bytes]]]()
    for home in (world.here, world.there):
        take = home.core.take_branch_asks

        def watched(take: Callable[[], list[BranchAsk]] = take) -> list[BranchAsk]:
            asks = take()
            asked.update((ask.verb.encode(), frozenset(map(str.encode, ask.extensions)) - {b"for"}) for ask in asks)
            assert {ask.extensions["for"] for ask in asks} <= {"shop~1"}
            return asks

        monkeypatch.setattr(home.core, "take_branch_asks", watched)
    owner = logged_in(world.there)
    for counter in (1, 2):
        assert (
            prepare_branch(owner, _txid(world.there, owner, counter), world.txid(counter), ("a", 0, b"x")).code == 200
        )
    world.cluster.later(1)
    group = {"group": "g", "homes": _txid(world.there, owner)}
    allow(world, Grant("write", "topic", ALL), Grant("read", "group", ALL))
    assert (
        world.shop.ask("prepare", world.txid(1), "half", extensions=group, body=part("a", 0, batch(b"h"))).code == 200
    )
    world.cluster.later(3)
    assert commit(world.shop, world.txid(1)).code == 200
    world.cluster.later(3)
    world.shop.disconnect()
    world.cluster.later(5)
    assert asked == set(ACTS)
