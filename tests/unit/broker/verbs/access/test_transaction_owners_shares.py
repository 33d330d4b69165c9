"""Shares: of sessions, open transactions and their bytes one user has half at most, however many sessions there are."""

from __future__ import annotations

from typing import Any

import pytest

from tools.images.node import Client
from tools.images.requests import batch, part
from txmq.broker.verbs.session_expiry import SESSION_IDLE_MS_MIN

from ...support import prepare, put, restarted, stated
from .access_support import add, lives, node, operator
from .verb_cases import EVERY, World

LARGE = b"x" * 8_000


def changed(world: World, **settings: int) -> None:
    """Other limits."""
    for name, value in settings.items():
        object.__setattr__(world.made.settings, name, value)


def stream(client: Client, txid: str, value: bytes = b"x") -> Any:
    """One part of an open transaction."""
    return client.ask("put", "a", 0, extensions={"tx": txid}, body=batch(value))


def counted(world: World) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """What users have: open transactions, bytes, sessions."""
    principals = world.made.state.principals
    return principals.streams, principals.payload_bytes, principals.sessions


def test_one_user_has_half_of_the_sessions_at_most() -> None:
    world = World()
    changed(world, sessions_max=4)
    second = operator(world.made, "shop")
    assert second.hello().code == 200
    refused = operator(world.made, "shop").hello()
    assert (refused.error, "half of sessions_max" in refused.text) == ("overloaded", True)
    assert operator(world.made).hello().code == 200
    assert counted(world)[2] == {"shop": 2, "ops": 2}
    second.disconnect()
    world.made.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    assert operator(world.made, "shop").hello().code == 200  # in the place of its own that is away
    assert counted(world)[2] == {"shop": 2, "ops": 2}
    assert 1 in world.made.state.sessions


def test_one_user_has_half_of_the_sequences_at_most() -> None:
    world = World()
    changed(world, sequences_max=4)
    first, second = operator(world.made, "shop"), operator(world.made, "shop")
    assert first.hello().code == second.hello().code == 200
    numbers = [client.client.session.number for client in (first, second) if client.client.session is not None]
    assert put(first, producer=numbers[0]).code == 200
    assert put(second, producer=numbers[1]).code == 200
    third = operator(world.made, "shop")
    assert third.hello().code == 200
    number = world.made.newest_session
    refused = put(third, producer=number)
    assert (refused.error, "half of sequences_max" in refused.text) == ("overloaded", True)
    first.disconnect()
    world.made.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    assert put(third, producer=number).code == 200  # in the place of its own that is away
    assert world.made.state.principals.sequences == {"shop": 2}
    assert numbers[0] not in world.made.state.sessions
    again = restarted(world.made)
    assert again.state.principals.sequences == {"shop": 2}


def test_user_made_anew_is_not_counted_for_the_former_one() -> None:
    """Found: the former one's sequences filled the half of whoever had the name next, until a restart."""
    world = World()
    changed(world, sequences_max=2)
    first = operator(world.made, "shop")
    assert first.hello().code == 200
    assert put(first, producer=world.made.newest_session).code == 200
    assert world.ops.ask("user", "remove", "shop", body=b"").code == 200
    add(world.ops, "shop")
    world.allow(*EVERY)
    anew = operator(world.made, "shop")
    assert anew.hello().code == 200
    assert put(anew, producer=world.made.newest_session).code == 200
    sequences = dict(world.made.state.principals.sequences)
    assert sorted(sequences.values()) == [1, 1]
    assert sequences["shop"] == 1
    assert restarted(world.made).state.principals.sequences == sequences


def test_users_that_come_and_go_leave_no_counts() -> None:
    """Each left a zero under a name that nobody has again."""
    world = World()
    principals = world.made.state.principals
    world.shop.disconnect()
    for _ in range(5):
        client = operator(world.made, "shop")
        assert client.hello().code == 200
        number = world.made.newest_session
        assert put(client, producer=number).code == 200
        txid = world.made.txid(number, 1)
        assert prepare(client, txid, ("a", 0, batch(b"p"))).code == 200
        assert client.ask("rollback", txid).code == 200
        assert client.ask("end", 1).code == 200
        assert world.ops.ask("user", "remove", "shop", body=b"").code == 200
        world.made.clock.advance(2 * 24 * 3600)
        for _ in range(2):
            world.made.core.tick(world.made.clock.now_ms())
            world.made.pump()
            world.made.clock.advance(2 * 24 * 3600)
        add(world.ops, "shop")
        world.allow(*EVERY)
    counts = (principals.unsettled, principals.sequences, principals.streams, principals.payload_bytes)
    assert counts == ({}, {}, {}, {})
    assert set(principals.sessions) <= {"ops"}


def test_user_at_its_half_ends_no_session_of_another() -> None:
    world = World()
    changed(world, sessions_max=4)
    away = operator(world.made)
    assert away.hello().code == 200
    away.disconnect()
    assert operator(world.made, "shop").hello().code == 200
    world.made.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    assert operator(world.made, "shop").hello().error == "overloaded"
    assert counted(world)[2] == {"shop": 2, "ops": 2}


def test_open_transactions_count_as_unsettled_ones() -> None:
    world = World()
    world.allow(*EVERY)
    changed(world, transactions_open_max=6)
    assert prepare(world.shop, world.own(1), ("a", 0, batch())).code == 200
    for counter in (2, 3):
        assert stream(world.shop, world.own(counter)).code == 200
    assert stream(world.shop, world.own(4)).error == "overloaded"
    assert prepare(world.shop, world.own(4), ("a", 0, batch())).error == "overloaded"
    assert stream(world.shop, world.own(3)).code == 200  # of one that is open
    assert stream(world.ops, world.others()).code == 200
    assert counted(world)[0] == {"shop": 2, "ops": 1}
    assert world.shop.ask("rollback", world.own(2)).code == 200
    assert stream(world.shop, world.own(4)).code == 200
    words = stated([batch(b"x")])
    assert world.shop.ask("commit", world.own(4), extensions=words, body=b"").code == 200
    assert counted(world)[0] == {"shop": 1, "ops": 1}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_bytes_of_one_user_are_half_at_most(*, is_streamed: bool) -> None:
    world = World()
    world.allow(*EVERY)
    changed(world, prepared_bytes_max=40_000, transaction_size_bytes_max=10_000)

    def send(client: Client, txid: str) -> Any:
        return stream(client, txid, LARGE) if is_streamed else prepare(client, txid, ("a", 0, batch(LARGE)))

    assert send(world.shop, world.own(1)).code == send(world.shop, world.own(2)).code == 200
    refused = send(world.shop, world.own(3))
    assert (refused.error, "half of prepared_bytes_max" in refused.text) == ("overloaded", True)
    assert world.shop.ask("commit", world.own(3), body=part("a", 0, batch(LARGE))).error == "overloaded"
    assert send(world.ops, world.others(1)).code == 200
    assert counted(world)[1]["shop"] == 2 * len(batch(LARGE))
    assert world.shop.ask("rollback", world.own(1)).code == 200
    assert send(world.shop, world.own(3)).code == 200


def test_one_transaction_may_always_be_as_large_as_any() -> None:
    world = World()
    world.allow(*EVERY)
    changed(world, prepared_bytes_max=17_000, transaction_size_bytes_max=17_000)
    assert stream(world.shop, world.own(1), LARGE).code == stream(world.shop, world.own(1), LARGE).code == 200


def test_shares_are_counted_anew_through_kill_and_checkpoint() -> None:
    world = World()
    world.allow(*EVERY)
    assert prepare(world.shop, world.own(1), ("a", 0, batch(b"one"))).code == 200
    assert stream(world.shop, world.own(2)).code == 200
    size = len(batch(b"one"))
    world.made.checkpoint()
    for life in lives(world.made):  # what was open is rolled back by each start
        principals = life.state.principals
        assert principals.streams == {}
        assert principals.payload_bytes == {"shop": size}
        assert principals.sessions == {"shop": 1, "ops": 1}


def test_shares_of_a_session_of_nobody_go_to_its_user() -> None:
    made = node()
    client = made.session()
    assert prepare(client, made.txid(1, 1), ("a", 0, batch(b"x"))).code == 200
    add(client, "ops")
    assert made.state.principals.payload_bytes == made.state.principals.sessions == {}
    wish = f"1.0.{made.state.sessions[1].secret}"
    assert operator(made).ask("hello", 1, "me", extensions={"session": wish}).code == 200
    assert made.state.principals.payload_bytes == {"ops": len(batch(b"x"))}
    assert made.state.principals.sessions == {"ops": 1}
    assert operator(made).ask("rollback", made.txid(1, 1)).code == 200
    assert made.state.principals.payload_bytes == {}
    made.state.end_session(1)
    assert made.state.principals.sessions == {}
