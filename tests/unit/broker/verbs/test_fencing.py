"""Fences for one database: a user who may settle for it gets its branches rolled back, and touches nothing else."""

from __future__ import annotations

import pytest

from tools.images.node import Answer, Client
from tools.images.requests import UUID, batch, part
from txmq.broker.verbs import fencing
from txmq.protocol.grants import ADMINISTRATOR, Grant

from ..support import prepare, values
from .access.access_support import lives, operator
from .access.verb_cases import World
from .test_check_backs import foreign
from .test_decide import OTHER_UUID, complete, decide

SETTLE = Grant("settle", "resource", UUID)
ROLLED_BACK = "rolled-back\n"
X = ("a", 0, batch(b"x"))


def settler(*grants: Grant) -> World:
    """``shop`` may settle for one database; the transactions are the administrator's."""
    world = World()
    world.allow(*(grants or (SETTLE,)))
    return world


def of_branch(client: Client, txid: str, uuid: str = UUID, **words: None) -> Answer:
    """The outcome of a branch in a database."""
    return client.ask("outcome", txid, extensions={"uuid": uuid, **words})


def fence(client: Client, txid: str, uuid: str = UUID) -> Answer:
    """Have it rolled back there."""
    return of_branch(client, txid, uuid, fence=None)


def test_fence_refuses_decisions_with_the_database_and_no_others() -> None:
    world = settler()
    for counter in range(1, 6):
        assert fence(world.shop, world.others(counter)).text == ROLLED_BACK
    refused = decide(world.ops, world.others(1), X, uuids=(OTHER_UUID, UUID))
    assert (refused.error, "fenced" in refused.text) == ("transaction-conflict", True)
    assert values(world.made) == []
    assert decide(world.ops, world.others(2), X, uuids=(OTHER_UUID,)).code == 200
    assert world.ops.ask("commit", world.others(3), body=part(*X)).code == 200
    assert prepare(world.ops, world.others(4), X).error == "transaction-conflict"
    assert foreign(world.ops, world.others(4)).code == 200
    assert world.ops.ask("put", "a", 0, extensions={"tx": world.others(5)}, body=batch(b"x")).code == 200


def test_streamed_transaction_is_refused_behind_its_fence() -> None:
    world = settler()
    txid = world.others()
    assert world.ops.ask("put", "a", 0, extensions={"tx": txid}, body=batch(b"x")).code == 200
    assert fence(world.shop, txid).text == ROLLED_BACK
    assert decide(world.ops, txid).error == "transaction-conflict"
    assert decide(world.ops, txid, X).error == "transaction-conflict"
    assert world.ops.ask("rollback", txid).code == 200
    assert of_branch(world.shop, txid).text == ROLLED_BACK


def test_fence_of_another_database_is_no_fence_of_this_one() -> None:
    world = settler(Grant("settle", "resource", OTHER_UUID))
    txid = world.others()
    assert fence(world.shop, txid).error == "forbidden"
    assert fence(world.shop, txid, OTHER_UUID).text == ROLLED_BACK
    world.allow(SETTLE)
    assert of_branch(world.shop, txid).text == "unknown\n"
    assert decide(world.ops, txid, X).code == 200
    assert complete(world.ops, txid).code == 200
    assert values(world.made) == [b"x"]


def test_without_word_and_grant_nothing_is_told_or_fenced() -> None:
    world = settler()
    assert world.shop.ask("outcome", world.others(), extensions={"fence": None}).error == "forbidden"
    assert world.shop.ask("rollback", world.others()).error == "fenced"  # as what is over: nothing is done
    assert of_branch(world.shop, world.others(), OTHER_UUID).error == "forbidden"
    world.allow(Grant("install", "resource", UUID), Grant("write", "topic", "a"))
    assert fence(world.shop, world.others()).error == "forbidden"
    assert decide(world.ops, world.others(), X).code == 200


def test_fence_is_forced_before_its_answer_and_told_again() -> None:
    world = settler()
    world.made.disk.notes.clear()
    opaque = world.shop.send("outcome", world.others(), extensions={"uuid": UUID, "fence": None})
    world.shop.take()
    assert opaque not in world.shop.received
    world.made.pump()
    told = ("told", opaque, 200, ROLLED_BACK.encode())
    assert [event for event in world.made.disk.notes if event in (("forced",), told)][-2:] == [("forced",), told]
    journaled = world.made.context.counters.rolled_back, world.made.state.fences_of[UUID]
    assert fence(world.shop, world.others()).text == of_branch(world.shop, world.others()).text == ROLLED_BACK
    assert (world.made.context.counters.rolled_back, world.made.state.fences_of[UUID]) == journaled == (0, 1)


def test_fence_holds_through_kill_and_checkpoint() -> None:
    world = settler()
    assert fence(world.shop, world.others(1)).text == ROLLED_BACK
    assert fence(world.shop, world.others(2)).text == ROLLED_BACK
    world.allow(Grant("settle", "resource", OTHER_UUID))
    assert fence(world.shop, world.others(2), OTHER_UUID).text == ROLLED_BACK
    assert world.ops.ask("commit", world.others(2), body=part(*X)).code == 200
    for life in lives(world.made):
        world.made = life
        world.allow(SETTLE)
        assert dict(life.state.fences_of) == {UUID: 2, OTHER_UUID: 1}
        owner, shop = operator(life), operator(life, "shop")
        assert owner.hello(f"2.{life.state.sessions[2].epoch}").code == 200
        assert decide(owner, life.txid(2, 1), X).error == "transaction-conflict"
        assert [of_branch(shop, life.txid(2, counter)).text for counter in (1, 2)] == [ROLLED_BACK] * 2
        assert owner.ask("outcome", life.txid(2, 1)).text == "unknown\n"
        assert owner.ask("outcome", life.txid(2, 2)).text.startswith("committed\n")


def test_fence_stands_among_the_outcomes_of_a_checkpoint() -> None:
    world = settler()
    assert fence(world.shop, world.others(1)).text == ROLLED_BACK
    (row,) = [row for row in world.made.state.snapshot()["sessions"] if row[0] == 2]
    ((counter, outcome),) = row[6]
    assert (counter, outcome) == (1, f"fenced {UUID}")


def test_transactions_of_no_branch_there_are_as_if_absent() -> None:
    world = settler()
    assert prepare(world.ops, world.others(1), X, uuid=OTHER_UUID).code == 200
    assert foreign(world.ops, world.others(2)).code == 200
    assert decide(world.ops, world.others(3), X, uuids=(OTHER_UUID,)).code == 200
    absent = world.others(99)
    told = {of_branch(world.shop, txid).text for txid in (*map(world.others, (1, 2, 3)), absent)}
    assert told == {"unknown\n"}
    assert of_branch(world.shop, absent, owner=None).text == "unknown\nowner connected\n"
    for counter in (1, 2, 3):
        assert fence(world.shop, world.others(counter)).text == ROLLED_BACK
    assert world.ops.ask("commit", world.others(1), body=b"").code == 200
    assert world.ops.ask("commit", world.others(2), body=b"").code == 200
    assert complete(world.ops, world.others(3), OTHER_UUID).code == 200
    assert len(values(world.made)) == 3
    assert {of_branch(world.shop, world.others(counter)).text for counter in (1, 2, 3)} == {ROLLED_BACK}


def test_what_is_over_is_told_as_it_is() -> None:
    world = settler()
    assert decide(world.ops, world.others(1), X).code == 200
    assert of_branch(world.shop, world.others(1)).text.startswith("committed\na 0 ")
    assert complete(world.ops, world.others(1)).code == 200
    assert fence(world.shop, world.others(1)).text == "committed\n"  # of whose database it was is not known any more
    assert world.ops.ask("rollback", world.others(2)).code == 200
    assert fence(world.shop, world.others(2)).text == ROLLED_BACK
    assert world.made.state.fences_of[UUID] == 0
    session = world.made.state.sessions[2]
    session.floor = 4
    assert fence(world.shop, world.others(4)).error == "fenced"
    assert fence(world.shop, world.made.txid(77, 1)).error == "never-issued"


def test_who_may_settle_anyway_fences_the_whole_transaction() -> None:
    world = settler(ADMINISTRATOR)
    assert fence(world.shop, world.own(1)).text == fence(world.shop, world.others(1)).text == ROLLED_BACK
    assert not world.made.state.fences_of
    assert world.ops.ask("commit", world.others(1), body=part(*X)).error == "transaction-conflict"
    nobody = World(has_users=False)
    assert fence(nobody.shop, nobody.others()).text == ROLLED_BACK
    assert nobody.ops.ask("commit", nobody.others(), body=part(*X)).error == "transaction-conflict"


def test_fences_of_a_database_take_no_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "FENCES_OF_DATABASE_MAX", 2)
    world = settler()
    for counter in (1, 2):
        assert fence(world.shop, world.others(counter)).text == ROLLED_BACK
    assert fence(world.shop, world.others(3)).error == "overloaded"
    assert fence(world.shop, world.others(2)).text == ROLLED_BACK
    world.allow(Grant("settle", "resource", OTHER_UUID))
    assert fence(world.shop, world.others(3), OTHER_UUID).text == ROLLED_BACK


def test_fences_leave_with_what_is_finished_and_with_the_session() -> None:
    world = settler()
    for counter in (1, 9):
        assert fence(world.shop, world.others(counter)).text == ROLLED_BACK
    words = {"floor": 5}
    assert world.ops.ask("commit", world.others(6), extensions=words, body=part(*X)).code == 200
    made, session = world.made, world.made.state.sessions[2]
    assert session.has_finished_outcomes
    made.state.rest_sessions([2])
    assert (session.fences, made.state.fences_of[UUID]) == ({9: (UUID,)}, 1)
    assert fence(world.shop, world.others(1)).error == "fenced"
    assert decide(world.ops, world.others(1), X).error == "fenced"
    made.state.end_session(2)
    assert not made.state.fences_of


def test_fence_is_in_the_log_with_who_did_it() -> None:
    world = settler()
    assert fence(world.shop, world.others()).text == ROLLED_BACK
    assert fence(world.shop, world.others()).text == ROLLED_BACK
    lines = [line for line in world.made.context.audited if line["event"] == "fenced"]
    assert [(line["user"], line["txid"]) for line in lines] == [("shop", world.others())]
