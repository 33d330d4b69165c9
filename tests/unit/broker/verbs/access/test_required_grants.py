"""The table verb x thing x grant: each request with each grant, over the real core; and none of it without users."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tools.images.follower import encoded
from txmq.broker import core
from txmq.broker.core import VERBS
from txmq.broker.state.principals import Permissions
from txmq.broker.verbs.access.required_grants import RULES, Who, rule_of
from txmq.protocol.grants import ADMINISTRATOR, Grant

from .verb_cases import CASES, EVERY, OTHER_NAMES, Case, World, grants_on

cases = pytest.mark.parametrize("case", CASES, ids=str)


SETTLING = {("settle", "resource"), ("settle", "group")}  # a holder of one, on anything, settles for others


def _suffices(case: Case, grants: set[Grant]) -> bool:
    return all(grants & need for need in case.needs)


def _world(case: Case) -> World:
    world = World()
    case.before(world)
    return world


@cases
def test_request_is_refused_without_each_grant_that_it_takes(case: Case) -> None:
    world = _world(case)
    before = encoded(world.made.state)
    tried: list[list[Grant]] = [[], *[[grant] for grant in EVERY], *([] if case.of_any else [grants_on(OTHER_NAMES)])]
    tried += [[grant for grant in EVERY if grant not in need] for need in case.needs]
    for grants in tried:
        if _suffices(case, set(grants)):
            continue
        world.allow(*grants)
        answer = case.ask(world)
        settles = not {(grant.may, grant.kind) for grant in grants}.isdisjoint(SETTLING)
        expected = (410, "fenced") if case.is_over and settles else (403, "forbidden")
        assert (answer.code, answer.error) == expected, (grants, answer)
    world.allow(ADMINISTRATOR)
    assert encoded(world.made.state) == before


@cases
def test_request_is_served_with_the_grants_that_it_takes(case: Case) -> None:
    chosen = [set(grants) for grants in product(*case.needs)] if all(case.needs) else []
    for grants in [*chosen, {ADMINISTRATOR}]:
        world = _world(case)
        world.allow(*grants)
        assert case.ask(world).code == 200, grants
        assert world.made.context.counters.refused == 0


@cases
def test_without_users_nothing_is_asked(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_arguments: Any) -> None:
        pytest.fail("permissions were asked")

    world = World(has_users=False)
    case.before(world)
    monkeypatch.setattr(Permissions, "__init__", asked)
    monkeypatch.setattr(core, "admit", asked)
    assert case.verb in {"acl", "quota", "user"} or case.ask(world).code == 200
    assert all(client.permissions is None for client in world.made.context.clients.values())


def test_every_verb_and_action_has_a_row_and_a_request() -> None:
    assert set(RULES) == set(VERBS)
    rows = {(verb, action) for verb, rule in RULES.items() for action in (rule if isinstance(rule, dict) else [b""])}
    asked = {(case.verb.encode(), case.action.encode()) for case in CASES}
    assert rows - asked == {(b"auth", b"")}  # test_auth
    assert asked <= rows


def test_what_has_no_row_is_served_to_administrators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.allow(*EVERY)
    assert rule_of(b"unheard", []).who is Who.ADMINISTRATORS
    assert rule_of(b"group", [b"unheard"]).who is Who.ADMINISTRATORS
    assert world.shop.ask("group", "unheard", "g", body=b"").error == "forbidden"
    monkeypatch.delitem(RULES, b"put")
    put = next(case for case in CASES if case.verb == "put")
    assert put.ask(world).error == "forbidden"
    world.allow(ADMINISTRATOR)
    assert put.ask(world).code == 200
