"""The home that decides is lost for ever: an operator sees each of its parts here, and ends what waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from tools.images.homes import Cluster, HomeNode
from tools.images.node import Answer
from tools.images.requests import UUID

from ..homes_support import commit, listed, live_and_redone, prepare_branch, two_homes
from ..support import values
from .test_branch_resolving import held, is_quiet
from .test_cluster_branches import branches, figures

GIVEN_UP = {"heuristic": "hazard", "reason": "the%20disk%20burnt"}
both = pytest.mark.parametrize("with_checkpoint", [False, True])


def placed() -> tuple[Cluster, HomeNode, HomeNode]:
    """A part is placed at its home, and the home that decided was lost before it was told."""
    here, there = two_homes()
    cluster = Cluster(here, there)
    client = there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), ("a", 0, b"y"), homes=there.txid(1, 1))
    cluster.cut_off(here)
    assert commit(client, there.txid(1, 1)).code == 200
    cluster.later(5)
    return cluster, here, there


def give_up(home: HomeNode, txid: str, of: str) -> Answer:
    return home.connect().ask("complete", txid, extensions={"of": of, **GIVEN_UP})


def facts(home: HomeNode) -> list[dict[str, Any]]:
    return [fact for row in listed(home.connect(), state="heuristic") for fact in row["heuristics"]]


# --- placed, and the deciding home was not told ----------------------------------------------------------------------


@both
def test_part_that_nobody_is_told_of_is_listed(with_checkpoint: bool) -> None:
    cluster, here, there = placed()
    for is_again in (False, True):
        home = cluster.restart(there, checkpoint=with_checkpoint) if is_again else there
        cluster.later(2)
        for words in ({}, {"state": "placed"}, {"state": "all"}, {"txid": there.txid(1, 1)}):
            [row] = listed(home.connect(), **words)
            told = row["txid"], row["state"], row["kind"], row["of"], row["is_held"]
            assert told == (there.txid(1, 1), "placed", "branch", here.txid(1, 1), False)
            assert row["age_ms"] >= 2000
        assert listed(home.connect(), state="decided") == listed(home.connect(), state="prepared") == []
        assert figures(home)["in_doubt_age_ms_max"] >= 2000


@both
def test_operator_ends_the_wait_for_the_deciding_home(with_checkpoint: bool) -> None:
    cluster, here, there = placed()
    assert give_up(there, there.txid(1, 1), here.txid(1, 1)).code == 200
    asked = cluster.asked
    cluster.later(5)
    assert (cluster.asked, branches(there), values(there)) == (asked, [], [b"x"])
    there = cluster.restart(there, checkpoint=with_checkpoint)
    cluster.later(5)
    assert (cluster.asked, is_quiet(there), listed(there.connect())) == (asked, True, [])
    [fact] = facts(there)
    assert (fact["what"], fact["resource"], fact["branch"]) == (
        "heuristic-hazard", f"{here.identity.node:016x}", here.txid(1, 1),
    )  # fmt: skip
    [row] = listed(there.connect(), state="heuristic")
    assert row["parts"] == [{"topic": "a", "partition": 0, "offset": 0, "count": 1}]
    assert (fact["reason"], fact["outcome"], fact["kind"]) == ("the disk burnt", "committed", "branch")
    assert there.connect().ask("forget", there.txid(1, 1)).code == 200
    assert facts(there) == []


def test_redo_finds_that_it_was_given_up() -> None:
    _, here, there = placed()
    give_up(there, there.txid(1, 1), here.txid(1, 1))
    lived, redone = live_and_redone(there)
    assert lived == redone


def test_it_is_given_up_once() -> None:
    _, here, there = placed()
    assert [give_up(there, there.txid(1, 1), here.txid(1, 1)).code for _ in range(2)] == [200, 200]
    assert (len(facts(there)), there.context.counters.heuristics) == (1, 1)


def test_part_outlives_the_session_that_placed_it() -> None:
    cluster, here, there = placed()
    there.state.end_session(1)
    assert [row["txid"] for row in listed(there.connect())] == [there.txid(1, 1)]
    assert give_up(there, there.txid(1, 1), here.txid(1, 1)).code == 200
    cluster.later(2)
    assert is_quiet(there)


def test_held_part_is_shown_with_that() -> None:
    cluster, here, there = held()
    cluster.cut_off(here)
    cluster.later(1)
    [row] = listed(there.connect())
    assert (row["is_held"], values(there)) == (True, [])
    assert give_up(there, there.txid(1, 1), here.txid(1, 1)).code == 200
    cluster.pump()
    assert (values(there), is_quiet(there)) == ([b"x", b"behind"], True)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ({"of": "2819c0a9a0b6e771-db0886df688c2384-1-1"}, 404),  # not the transaction that it is a part of
        ({"heuristic": "perhaps"}, 400),
        ({"uuid": UUID}, 400),
    ],
)
def test_what_is_not_waited_for_is_not_given_up(words: dict[str, str], code: int) -> None:
    _, here, there = placed()
    words = {"of": here.txid(1, 1), **GIVEN_UP, **words}
    assert there.connect().ask("complete", there.txid(1, 1), extensions=words).code == code
    assert give_up(there, there.txid(1, 2), here.txid(1, 1)).code == 404
    without = there.connect().ask("complete", there.txid(1, 1), extensions={"of": here.txid(1, 1)})
    assert without.code == 400
    assert len(listed(there.connect())) == 1


def test_lost_home_that_comes_back_is_answered() -> None:
    cluster, here, there = placed()
    give_up(there, there.txid(1, 1), here.txid(1, 1))
    cluster.come_back(here)
    cluster.later(5)
    assert [row["state"] for row in listed(here.connect())] == ["decided"]
    assert here.connect().ask("complete", here.txid(1, 1), extensions={"branch": there.txid(1, 1)}).code == 200
    assert is_quiet(here, there)


# --- prepared: an operator decides, and then the part is placed or gone ----------------------------------------------


@pytest.mark.parametrize("was_decided", [False, True])
@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_prepared_part_is_decided_by_hand(verb: str, was_decided: bool) -> None:
    here, there = two_homes()
    cluster = Cluster(here, there)
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    owner = here.session()
    if was_decided:
        commit(owner, here.txid(1, 1), homes=there.txid(1, 1))
    cluster.cut_off(here)
    cluster.later(2)
    assert [(row["state"], row["of"]) for row in listed(there.connect())] == [("prepared", here.txid(1, 1))]
    assert give_up(there, there.txid(1, 1), here.txid(1, 1)).code == 409
    body = {"body": b""} if verb == "commit" else {}
    told = there.connect().ask(verb, there.txid(1, 1), extensions={"heuristic": "me"}, **body)
    assert told.code == 200
    cluster.later(2)
    if verb == "commit":
        assert [row["state"] for row in listed(there.connect())] == ["placed"]
        assert give_up(there, there.txid(1, 1), here.txid(1, 1)).code == 200
    assert (values(there), is_quiet(there)) == ([b"x"] * (verb == "commit"), True)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_home_that_rolled_back_ends_the_report(is_prepared: bool) -> None:
    """An operator has committed the part; the lost home comes back, and its owner rolls back."""
    here, there = two_homes()
    cluster = Cluster(here, there)
    of, txid = here.txid(1, 1), there.txid(1, 1)
    prepare_branch(there.session(), txid, of, ("a", 0, b"x"))
    owner = here.session()
    if is_prepared:
        owner.ask("prepare", of, "half", extensions={"group": "g", "homes": txid}, body=b"")
    cluster.cut_off(here)
    there.connect().ask("commit", txid, extensions={"heuristic": "me"}, body=b"")
    cluster.come_back(here)
    cluster.later(5)
    assert [row["state"] for row in listed(there.connect())] == ["placed"]
    assert owner.ask("rollback", of).code == 200
    cluster.later(5)
    assert (is_quiet(there), [fact["what"] for fact in facts(there)]) == (True, ["heuristic-commit"])


# --- known to be committed, and waits for another part that is in doubt ----------------------------------------------


def test_decision_that_is_known_says_what_it_waits_for() -> None:
    here, there = two_homes()
    cluster = Cluster(here, there)
    client = there.session()
    for counter in (1, 2):
        prepare_branch(client, there.txid(1, counter), here.txid(1, counter), ("a", 0, b"%d" % counter))
    commit(here.session(), here.txid(1, 2), homes=there.txid(1, 2))
    cluster.later(2)
    cluster.cut_off(here)
    first, second = listed(there.connect())
    assert ("is_decided" in first, second["is_decided"]) == (False, True)
    rows = {row["txid"]: row["waits_for"] for row in branches(there)}
    assert rows[there.txid(1, 2)] == "transactions before it, of the same keys"
    assert there.connect().ask("rollback", there.txid(1, 1), extensions={"heuristic": "me"}).code == 200
    cluster.later(1)
    assert [(row["txid"], row["state"]) for row in listed(there.connect())] == [(there.txid(1, 2), "placed")]
    assert values(there) == [b"2"]


def test_commit_that_waits_for_its_turn_is_told() -> None:
    here, there = two_homes()
    client = there.session()
    for counter in (1, 2):
        prepare_branch(client, there.txid(1, counter), here.txid(1, counter), ("a", 0, b"x"))
    client.send("commit", there.txid(1, 2), body=b"")
    there.pump()
    first, second = listed(there.connect())
    assert ("is_decided" in first, second["is_decided"]) == (False, True)
