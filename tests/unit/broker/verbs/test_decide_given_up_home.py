"""A home that is lost for ever reports nothing: an operator ends the wait of a decision for it."""

from __future__ import annotations

import pytest

from tools.images.homes import HomeNode

from ..homes_support import commit, listed, live_and_redone, prepare_branch, two_homes
from ..support import values

GIVEN_UP = {"heuristic": "hazard", "reason": "the%20disk%20burnt"}


def decided() -> tuple[HomeNode, HomeNode, str, str]:
    """A decision, and a part of it that is prepared at another home."""
    here, there = two_homes()
    of, txid = here.txid(1, 1), there.txid(1, 1)
    assert prepare_branch(there.session(), txid, of, ("a", 0, b"there")).code == 200
    assert commit(here.session(), of, ("a", 0, b"here"), homes=txid).code == 200
    return here, there, of, txid


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_decision_waits_no_longer_and_says_why(with_checkpoint: bool) -> None:
    here, _, of, txid = decided()
    assert here.connect().ask("complete", of, extensions={"branch": txid, **GIVEN_UP}).code == 200
    here = here.again(checkpoint=with_checkpoint)
    client = here.connect()
    assert (listed(client), here.state.sessions[1].owed, values(here)) == ([], 0, [b"here"])
    row = listed(client, state="heuristic")[0]
    fact = row["heuristics"][0]
    assert (row["kind"], row["outcome"], fact["what"]) == ("local", "committed", "heuristic-hazard")
    assert (fact["branch"], fact["resource"], fact["reason"]) == (txid, txid[17:33], "the disk burnt")
    assert row["parts"] == [{"topic": "a", "partition": 0, "offset": 0, "count": 1}]
    assert "parts" not in fact
    assert client.ask("forget", of).code == 200
    assert listed(client, state="heuristic") == []


def test_messages_of_a_partition_are_told_in_one_run() -> None:
    here, there = two_homes()
    client, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    prepare_branch(there.session(), txid, of, ("a", 0, b"there"))
    commit(client, of, ("a", 1, b"1"), ("a", 0, b"2"), ("a", 1, b"3"), homes=txid)
    client.ask("complete", of, extensions={"branch": txid, **GIVEN_UP})
    [row] = listed(client, state="heuristic")
    told = [(part["topic"], part["partition"], part["offset"], part["count"]) for part in row["parts"]]
    assert sorted(told) == [("a", 0, 0, 1), ("a", 1, 0, 2)]


def test_redo_finds_what_was_said() -> None:
    here, _, of, txid = decided()
    here.connect().ask("complete", of, extensions={"branch": txid, **GIVEN_UP})
    lived, redone = live_and_redone(here)
    assert lived == redone


def test_second_request_adds_nothing() -> None:
    here, _, of, txid = decided()
    client = here.connect()
    codes = [client.ask("complete", of, extensions={"branch": txid, **GIVEN_UP}).code for _ in range(2)]
    assert codes == [200, 200]
    assert len(listed(client, state="heuristic")[0]["heuristics"]) == 1
    assert here.context.counters.heuristics == 1


def test_home_that_has_reported_is_not_given_up() -> None:
    here, _, of, txid = decided()
    client = here.connect()
    assert client.ask("complete", of, extensions={"branch": txid}).code == 200
    assert client.ask("complete", of, extensions={"branch": txid, **GIVEN_UP}).code == 200
    assert listed(client, state="heuristic") == []


def test_home_that_comes_back_nevertheless_rolls_back() -> None:
    here, _, of, txid = decided()
    here.connect().ask("complete", of, extensions={"branch": txid, **GIVEN_UP})
    asked = here.connect().ask("outcome", of, extensions={"branch": txid, "owner": None})
    assert asked.text.startswith("rolled-back\n")


def test_word_that_is_none_is_refused() -> None:
    here, _, of, txid = decided()
    client = here.connect()
    assert client.ask("complete", of, extensions={"branch": txid, "heuristic": "perhaps"}).code == 400
    assert listed(client)[0]["homes"] == [{"txid": txid, "complete": False}]
