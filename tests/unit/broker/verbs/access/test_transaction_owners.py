"""Whose a session and its transactions are: nobody else resumes, asks or settles without a grant."""

from __future__ import annotations

import json

import pytest

from tools.images.node import Client, Node
from tools.images.requests import UUID, batch, listed_pages, part
from txmq.broker.context import Context
from txmq.broker.state.transaction import Transaction
from txmq.broker.verbs import recover
from txmq.protocol.grants import ADMINISTRATOR, Grant

from ...support import prepare, restarted, values
from ..test_check_backs import foreign, half
from ..test_decide import decide, listed
from .access_support import add, lives, node, operator
from .verb_cases import EVERY, World

SETTLE = Grant("settle", "resource", UUID)
ALL_BUT_SETTLE = [grant for grant in EVERY if grant != SETTLE]


def secret_of(client: Client, session: int) -> str:
    """What resumes a session."""
    return f"{session:x}.0.{client.node.state.sessions[session].secret}"


def test_session_is_resumed_by_its_user_alone() -> None:
    world = World()
    world.allow(*EVERY)
    wish = secret_of(world.ops, 2)
    assert world.shop.ask("hello", 1, "me", extensions={"session": wish}).error == "forbidden"
    assert world.ops.client.session is not None  # its holder is not disturbed
    wrong = f"2.0.{'0' * 32}"
    assert world.shop.ask("hello", 1, "me", extensions={"session": wrong}).error == "fenced"
    again = operator(world.made)
    assert again.ask("hello", 1, "me", extensions={"session": wish}).code == 200
    world.allow(ADMINISTRATOR)
    assert world.shop.ask("hello", 1, "me", extensions={"session": wish}).error == "forbidden"


def test_session_keeps_its_user_through_kill_and_checkpoint() -> None:
    world = World()
    wish = secret_of(world.shop, 1)
    for life in lives(world.made):
        assert operator(life).ask("hello", 1, "me", extensions={"session": wish}).error == "forbidden"
        assert operator(life, "shop").ask("hello", 1, "me", extensions={"session": wish}).code == 200


def test_user_made_anew_inherits_nothing_of_the_former_one() -> None:
    world = World()
    world.allow(*ALL_BUT_SETTLE)
    assert prepare(world.shop, world.own(), ("a", 0, batch(b"x"))).code == 200
    assert world.shop.ask("put", "a", 0, extensions={"tx": world.own(2)}, body=batch(b"s")).code == 200
    wish = secret_of(world.shop, 1)
    ops = operator(world.made)
    assert ops.ask("user", "remove", "shop", body=b"").code == 200
    add(ops, "shop")
    _refuses_the_next_shop(world.made, world.own(), wish)
    for life in lives(world.made):
        _refuses_the_next_shop(life, world.own(), wish)
    assert operator(life).ask("rollback", world.own()).code == 200


def _refuses_the_next_shop(life: Node, txid: str, wish: str) -> None:
    shop = operator(life, "shop")
    for verb in ("outcome", "rollback"):
        assert shop.ask(verb, txid).error == "forbidden"
    assert shop.ask("commit", txid, body=b"").error == "forbidden"
    assert shop.ask("hello", 1, "me", extensions={"session": wish}).error == "fenced"  # clients take a new one
    assert listed(shop) == []
    principals = life.state.principals
    for counts in (principals.unsettled, principals.sessions, principals.streams, principals.payload_bytes):
        assert "shop" not in counts
    assert principals.unsettled["shop~0"] == 1
    assert [row["txid"] for row in listed(operator(life))] == [txid]


def test_former_users_connection_has_no_session_after_a_new_login() -> None:
    world = World()
    ops, former = operator(world.made), world.shop
    assert ops.ask("user", "remove", "shop", body=b"").code == 200
    assert ops.ask("user", "add", "shop", body=_of_certificate("CN=shop")).code == 200
    former.client.certificates = frozenset({"CN=shop"})
    assert former.ask("auth", "external", body=b"shop").code == 200
    assert former.client.session is None
    assert former.ask("outcome", world.own()).error == "forbidden"


def _of_certificate(name: str) -> bytes:
    return json.dumps({"keys": None, "certificate": name}).encode()


def test_session_of_nobody_is_the_users_who_resumes_it() -> None:
    made = node()
    client = made.session()
    assert prepare(client, made.txid(1, 1), ("a", 0, batch(b"x"))).code == 200
    add(client, "ops")
    add(operator(made), "shop")
    wish = secret_of(client, 1)
    shop = operator(made, "shop")
    assert shop.ask("outcome", made.txid(1, 1)).error == "forbidden"  # nobody's: not everybody's
    assert shop.ask("hello", 1, "me", extensions={"session": wish}).code == 200
    assert made.state.principals.unsettled == {"shop": 1}
    for life in lives(made):
        assert life.state.principals.unsettled == {"shop": 1}
        other = operator(life)
        assert other.ask("hello", 1, "me", extensions={"session": wish}).error == "forbidden"
        shop = operator(life, "shop")
        assert shop.ask("outcome", made.txid(1, 1)).text == "prepared\n"
        assert shop.ask("hello", 1, "me", extensions={"session": wish}).code == 200
    assert shop.ask("commit", made.txid(1, 1), body=b"").code == 200
    assert shop.node.state.principals.unsettled == {}


def test_connection_that_logs_in_as_another_user_loses_its_session() -> None:
    world = World()
    assert world.ops.ask("user", "remove", "shop", body=b"").code == 200
    add(world.ops, "card")
    world.ops.ask("acl", "grant", "card", extensions={"cluster": None})
    world.shop.client.binding = bytes(32)
    assert world.shop.ask("auth", "plain", body=b"\0card\0pencil").code == 200
    assert world.shop.client.session is None
    assert prepare(world.shop, world.own(), ("a", 0, batch())).error == "other-session"


def test_another_connection_of_the_user_settles_without_a_grant() -> None:
    world = World()
    world.allow(*EVERY)
    assert foreign(world.shop, world.own()).code == 200
    world.allow()
    other = operator(world.made, "shop")
    assert other.ask("outcome", world.own()).text == "prepared\n"
    assert [row["txid"] for row in listed(other)] == [world.own()]
    assert other.ask("parts", world.own()).code == 200
    assert other.ask("commit", world.own(), body=b"").code == 200


def test_others_transactions_are_listed_to_those_who_may_settle_them() -> None:
    world = World()
    assert prepare(world.ops, world.others(1), ("a", 0, batch())).code == 200
    assert half(world.ops, world.others(2), group="g").code == 200
    assert foreign(world.ops, world.others(3)).code == 200
    assert decide(world.ops, world.others(4), ("a", 1, batch())).code == 200
    for grants, shown in (
        ((), []), (ALL_BUT_SETTLE, [2]), ((SETTLE,), [1, 4]), ((Grant("settle", "resource", "f" * 32),), []),
        ((ADMINISTRATOR,), [1, 2, 3, 4]),
    ):  # fmt: skip
        world.allow(*grants)
        assert [row["txid"] for row in listed(world.shop)] == [world.others(counter) for counter in shown], grants
    world.allow(*EVERY)
    assert world.shop.ask("commit", world.others(3), body=b"").error == "forbidden"
    assert values(world.made) == []


def test_stranger_learns_nothing_of_a_transaction() -> None:
    world = World()
    assert prepare(world.ops, world.others(1), ("a", 0, batch())).code == 200
    assert half(world.ops, world.others(2), group="g").code == 200
    assert foreign(world.ops, world.others(3)).code == 200
    assert decide(world.ops, world.others(4), ("a", 1, batch())).code == 200
    assert world.ops.ask("commit", world.others(5), body=part("a", 0, batch())).code == 200
    world.allow(Grant("write", "topic", "a"), Grant("install", "resource", UUID))
    never = world.others(99)
    for verb, body in (
        ("outcome", None), ("rollback", None), ("commit", b""), ("complete", None), ("forget", None), ("parts", None),
        ("decide", b""),
    ):  # fmt: skip
        words = {"fence": None} if verb == "outcome" else {}
        told = {
            world.shop.ask(verb, txid, extensions=words, body=body).text.replace(txid, "-")
            for txid in (*(world.others(counter) for counter in range(1, 6)), never)
        }
        assert (len(told), UUID in str(told), "forbidden" in str(told)) == (1, False, True), told


def test_filtered_list_goes_on_over_pages() -> None:
    world = World()
    world.allow(*EVERY)
    for counter in range(1, 7):
        client, txid = (world.ops, world.others(counter)) if counter % 2 else (world.shop, world.own(counter))
        assert foreign(client, txid, f"1.00.0{counter}").code == 200
    found = [row["txid"] for page in listed_pages(world.shop, limit=1) for row in page]
    assert found == [world.own(counter) for counter in (2, 4, 6)]


def test_settling_by_hand_is_written_with_who_and_why() -> None:
    world = World()
    assert prepare(world.ops, world.others(1), ("a", 0, batch())).code == 200
    assert prepare(world.ops, world.others(2), ("a", 0, batch())).code == 200
    world.allow(SETTLE)
    words = {"heuristic": "database%20is%20lost"}
    assert world.shop.ask("commit", world.others(1), extensions=words, body=b"").code == 200
    assert world.shop.ask("rollback", world.others(2), extensions=words).code == 200
    lines = [line for line in world.made.context.audited if line["event"] == "settled by hand"]
    assert [(line["user"], line["txid"], line["what"], line["reason"]) for line in lines] == [
        ("shop", world.others(1), "heuristic-commit", "database is lost"),
        ("shop", world.others(2), "heuristic-rollback", "database is lost"),
    ]


def test_fence_of_another_users_transaction_is_written() -> None:
    world = World()
    world.allow(ADMINISTRATOR)
    for client, txid in ((world.shop, world.own(1)), (world.shop, world.others(1)), (world.ops, world.own(2))):
        assert client.ask("outcome", txid, extensions={"fence": None}).text == "rolled-back\n"
    lines = [line for line in world.made.context.audited if line["event"] == "fenced"]
    assert [(line["user"], line["txid"]) for line in lines] == [("shop", world.others(1)), ("ops", world.own(2))]


def test_unsettled_transactions_of_a_user_are_bounded_over_sessions() -> None:
    world = World()
    world.allow(*EVERY)
    limit = {"unsettled_max": 2}
    assert world.ops.ask("quota", "set", "user", "shop", extensions=limit).code == 200
    assert prepare(world.shop, world.own(1), ("a", 0, batch())).code == 200
    assert decide(world.shop, world.own(2), ("a", 0, batch())).code == 200
    second = operator(world.made, "shop")
    assert second.hello().code == 200
    for client, txid in ((world.shop, world.own(3)), (second, world.made.txid(3, 1))):
        refused = prepare(client, txid, ("a", 0, batch()))
        assert (refused.error, "unsettled_max" in refused.text) == ("overloaded", True)
        assert half(client, txid, group="g").error == "overloaded"
        assert decide(client, txid, ("a", 0, batch())).error == "overloaded"
    assert prepare(world.ops, world.others(), ("a", 0, batch())).code == 200
    world.made = restarted(world.made)
    assert world.made.state.principals.unsettled == {"shop": 2, "ops": 1}
    world.allow(*EVERY)
    shop = operator(world.made, "shop")
    assert shop.hello("1.0").code == 200
    assert shop.ask("rollback", world.own(1)).code == 200
    assert prepare(shop, world.own(3), ("a", 0, batch())).code == 200


def test_one_user_has_half_of_the_unsettled_at_most() -> None:
    world = World()
    world.allow(*EVERY)
    object.__setattr__(world.made.settings, "transactions_open_max", 4)
    for counter in (1, 2):
        assert prepare(world.shop, world.own(counter), ("a", 0, batch())).code == 200
    assert prepare(world.shop, world.own(3), ("a", 0, batch())).error == "overloaded"
    assert prepare(world.ops, world.others(), ("a", 0, batch())).code == 200


def test_second_who_settles_for_others_hears_it_is_over() -> None:
    world = World()
    for counter in (1, 2, 3):
        assert prepare(world.ops, world.others(counter), ("a", 0, batch())).code == 200
    assert half(world.ops, world.others(4), group="g").code == 200
    assert world.ops.ask("commit", world.others(1), body=b"").code == 200
    assert world.ops.ask("rollback", world.others(2)).code == 200
    assert world.ops.ask("rollback", world.others(4)).code == 200
    over = [world.others(counter) for counter in (1, 2, 4, 99)]  # the last one never was
    for grant in (SETTLE, Grant("settle", "resource", "f" * 32), Grant("settle", "group", "g")):
        world.allow(grant)
        for verb, body in (("commit", b""), ("rollback", None)):
            told = {world.shop.ask(verb, txid, body=body).text.replace(txid, "-") for txid in over}
            assert (len(told), "over, or another user's" in str(told)) == (1, True), told
        assert world.shop.ask("outcome", over[0]).error == "forbidden"
    assert not [line for line in world.made.context.audited if line.get("verb") in ("commit", "rollback")]
    world.allow(Grant("settle", "resource", "f" * 32))
    assert world.shop.ask("rollback", world.others(3)).error == "forbidden"  # it is left, and not theirs
    world.allow(Grant("write", "topic", "a"), Grant("read", "topic", "a"))
    assert {world.shop.ask("rollback", txid).error for txid in over} == {"forbidden"}


def test_list_of_what_others_have_in_doubt_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is not shown is not made, and one answer looks at so many: 20,000 prepared took 0.3 s of the loop."""
    world, made, make = World(), list[str](), recover._prepared_row
    for counter in range(1, 26):
        assert prepare(world.ops, world.others(counter), ("a", 0, batch())).code == 200
    assert prepare(world.shop, world.own(), ("a", 0, batch())).code == 200
    world.allow()
    monkeypatch.setattr(recover, "LOOKS_MAX", 10)

    def noted(context: Context, transaction: Transaction) -> recover.Row:
        made.append(str(transaction.session))
        return make(context, transaction)

    monkeypatch.setattr(recover, "_prepared_row", noted)
    pages = listed_pages(world.shop)
    assert [[row["txid"] for row in page] for page in pages] == [[], [], [world.own()]]
    assert made == ["1"]
    made.clear()
    assert [len(page) for page in listed_pages(world.ops)] == [26]
    assert len(made) == 26
