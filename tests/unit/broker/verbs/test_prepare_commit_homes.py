"""Transactions over homes: one home decides, the others place; nothing is forgotten that a branch still needs."""

from __future__ import annotations

import pytest

from tools.images.homes import CLUSTER, HomeNode
from tools.images.requests import UUID, batch, part
from txmq.broker.verbs.decide import reported
from txmq.protocol.transaction_bodies import encode_branch

from ..homes_support import commit, listed, live_and_redone, open_query, prepare_branch, two_homes
from ..support import node, values

DETAILS = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
both = pytest.mark.parametrize("with_checkpoint", [False, True])


def decided_at(home: HomeNode, of: str, txid: str, value: bytes = b"here") -> None:
    """A local transaction with one branch is decided."""
    answer = commit(home.session("new"), of, ("a", 0, value), homes=txid)
    assert answer.code == 200, answer


# --- local -----------------------------------------------------------------------------------------------------------


@both
def test_both_homes_place_and_the_report_ends_the_decision(with_checkpoint: bool) -> None:
    here, there = two_homes()
    at, away = here.session(), there.session()
    of, txid = here.txid(1, 1), there.txid(1, 1)
    assert prepare_branch(away, txid, of, ("a", 1, b"x")).code == 200
    assert (values(there, "a", 1), listed(away)[0]["of"], listed(away)[0]["kind"]) == ([], of, "branch")
    assert commit(at, of, ("b", 0, b"y"), homes=txid).text == "b 0 0 1\n"
    assert values(here, "b") == [b"y"]
    here, there = here.again(checkpoint=with_checkpoint), there.again(checkpoint=with_checkpoint)
    assert listed(here.connect())[0]["homes"] == [{"txid": txid, "complete": False}]
    assert commit(there.connect(), txid).text == "a 1 0 1\n"
    assert values(there, "a", 1) == [b"x"]
    here, there = here.again(checkpoint=with_checkpoint), there.again(checkpoint=with_checkpoint)
    assert [part.of for part in there.state.branch_parts.unreported.values()] == [of]
    teller = here.connect()
    assert [teller.ask("complete", of, extensions={"branch": txid}).code for _ in range(2)] == [200, 200]
    assert listed(teller) == []
    assert teller.ask("outcome", of).text == "committed\nb 0 0 1\n"


def test_decision_needs_no_message_of_its_own_home() -> None:
    here, there = two_homes()
    client = here.session()
    assert commit(client, here.txid(1, 1)).error == "unknown-transaction"
    assert commit(client, here.txid(1, 1), homes=there.txid(1, 1)).code == 200
    assert client.ask("outcome", here.txid(1, 1)).text == "committed\n"


def test_decision_is_repeated_with_the_same_answer() -> None:
    here, there = two_homes()
    client, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    told = [commit(client, of, ("a", 0, b"x"), homes=txid).text for _ in range(2)]
    client.ask("complete", of, extensions={"branch": txid})
    told.append(commit(client, of, ("a", 0, b"x"), homes=txid).text)
    assert told == ["a 0 0 1\n"] * 3
    assert values(here) == [b"x"]


@both
def test_decision_that_a_branch_needs_is_pinned(with_checkpoint: bool) -> None:
    here, there = two_homes(session_idle_ms_max=60_000, outcomes_kept=1)
    client, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    commit(client, of, homes=txid)
    for counter in range(2, 6):
        commit(client, here.txid(1, counter), ("a", 0, b"x"), floor=counter)
    assert here.state.sessions[1].floor >= 1
    client.disconnect()
    here = here.again(checkpoint=with_checkpoint)
    for _ in range(5):
        here.clock.advance(70)
        here.core.tick(here.clock.now_ms())
        here.pump()
    asker = here.connect()
    assert asker.ask("outcome", of, extensions={"branch": txid, "owner": None}).text == "committed\n"
    asker.ask("complete", of, extensions={"branch": txid})
    assert asker.ask("outcome", of, extensions={"branch": txid}).error == "fenced"


@pytest.mark.parametrize(
    ("decision", "listed_one", "other"),
    [
        ("commit", "committed\n", "rolled-back\n"),
        ("rollback", "rolled-back\n", "rolled-back\n"),
        ("half", "prepared\n", "rolled-back\n"),
    ],
)
def test_branch_is_told_what_became_of_itself(decision: str, listed_one: str, other: str) -> None:
    here, there = two_homes()
    client, of = here.session(), here.txid(1, 1)
    if decision == "half":
        body = part("a", 0, batch(b"h"))
        words = {"group": "g", "homes": there.txid(1, 1)}
        assert client.ask("prepare", of, "half", extensions=words, body=body).code == 200
    elif decision == "commit":
        commit(client, of, homes=there.txid(1, 1))
    else:
        client.ask("rollback", of)
    asker = here.connect()
    told = [asker.ask("outcome", of, extensions={"branch": there.txid(1, n), "owner": None}).text for n in (1, 2)]
    assert [text.partition("owner")[0] for text in told] == [listed_one, other]


def test_branch_that_has_reported_is_listed_no_more() -> None:
    here, there = two_homes()
    client, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    commit(client, of, homes=txid)
    client.ask("complete", of, extensions={"branch": txid})
    assert client.ask("outcome", of, extensions={"branch": txid}).text == "rolled-back\n"
    assert client.ask("outcome", of).text == "committed\n"


def test_unknown_transaction_is_fenced_for_a_branch() -> None:
    here, there = two_homes()
    client, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    asker = here.connect()
    ask = {"branch": txid, "owner": None}
    assert asker.ask("outcome", of, extensions=ask).text == "unknown\nowner connected\n"
    assert asker.ask("outcome", of, extensions={**ask, "fence": None}).text.startswith("rolled-back\n")
    assert commit(client, of, homes=txid).error == "transaction-conflict"


def test_late_prepare_of_a_branch_is_refused() -> None:
    here, there = two_homes(outcomes_kept=1)
    client, txid = there.session(), there.txid(1, 1)
    prepare_branch(client, txid, here.txid(1, 1), ("a", 0, b"x"))
    assert client.ask("rollback", txid).code == 200
    assert prepare_branch(client, txid, here.txid(1, 1), ("a", 0, b"x")).error == "transaction-conflict"
    for counter in (2, 3):
        commit(client, there.txid(1, counter), ("b", 0, b"v"), floor=counter)
    assert prepare_branch(client, txid, here.txid(1, 1), ("a", 0, b"x")).error == "fenced"
    assert values(there) == []


def test_report_of_a_branch_that_is_not_listed_is_refused() -> None:
    here, there = two_homes()
    client, of = here.session(), here.txid(1, 1)
    commit(client, of, homes=there.txid(1, 1))
    refused = client.ask("complete", of, extensions={"branch": there.txid(1, 2)})
    assert refused.error == "fenced"  # nothing waits for it
    assert listed(client)[0]["homes"] == [{"txid": there.txid(1, 1), "complete": False}]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_broker_that_is_alone_has_no_branches() -> None:
    made = node()
    client, other = made.session(), f"{CLUSTER:016x}-{5:016x}-1-1"
    asked: list[tuple[str, tuple[str, ...], dict[str, str | int | None]]] = [
        ("prepare", ("branch",), {"of": other}),
        ("commit", (), {"homes": other}),
        ("decide", (), {"homes": other, "branches": 1}),
        ("prepare", ("half",), {"homes": other, "group": "g"}),
    ]
    for verb, arguments, words in asked:
        body = encode_branch("db", UUID, DETAILS) if verb == "decide" else b""
        refused = client.ask(verb, made.txid(1, 1), *arguments, extensions=words, body=body)
        assert (refused.error, "alone" in refused.text) == ("bad-request", True), (verb, refused)
    assert listed(client) == []


@pytest.mark.parametrize("of", ["", "own", "nonsense", "0000000000000001-0000000000000002-1-1"])
def test_branch_names_a_transaction_of_another_home_of_the_cluster(of: str) -> None:
    here, _ = two_homes()
    words: dict[str, str | int | None] = {"of": here.txid(1, 9) if of == "own" else of} if of else {}
    client = here.session()
    refused = client.ask("prepare", here.txid(1, 1), "branch", extensions=words, body=part("a", 0, batch(b"x")))
    assert refused.error == "bad-request"


def test_words_of_other_homes_are_refused_where_they_mean_nothing() -> None:
    here, there = two_homes()
    client, txid = here.session(), there.txid(1, 1)
    last = {"resource": "db", "uuid": UUID, "table": "t"}
    asked = [
        client.ask("prepare", here.txid(1, 1), "half", extensions={"group": "g", "of": txid}, body=b""),
        client.ask("prepare", here.txid(1, 1), "half", extensions={"group": "g", "held": None}, body=b""),
        client.ask("prepare", here.txid(1, 1), "last-resource", extensions={**last, "homes": txid}, body=b""),
        commit(client, here.txid(1, 1), homes=f"{txid},{there.txid(1, 2)}"),
        commit(client, here.txid(1, 1), homes=",".join(f"{CLUSTER:016x}-{n:016x}-1-1" for n in range(90, 123))),
    ]
    assert [answer.error for answer in asked] == ["bad-request"] * 5


# --- kinds that are decided later ------------------------------------------------------------------------------------


@both
def test_half_message_with_branches_is_decided_by_its_commit(with_checkpoint: bool) -> None:
    here, there = two_homes()
    client, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    words = {"group": "g", "homes": txid}
    assert client.ask("prepare", of, "half", extensions=words, body=part("a", 0, batch(b"h"))).code == 200
    here = here.again(checkpoint=with_checkpoint)
    client = here.session("1.0")
    assert listed(client)[0]["homes"] == [txid]
    assert commit(client, of).text == "a 0 0 1\n"
    here = here.again(checkpoint=with_checkpoint)
    asker = here.connect()
    assert asker.ask("outcome", of, extensions={"branch": txid}).text == "committed\n"
    assert values(here) == [b"h"]
    asker.ask("complete", of, extensions={"branch": txid})
    assert listed(asker) == []


@both
def test_foreign_transaction_with_branches_is_found_by_its_xid(with_checkpoint: bool) -> None:
    here, there = two_homes()
    client, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    words = {"xid": "7.0a.0b", "homes": txid}
    assert client.ask("prepare", of, "foreign", extensions=words, body=part("a", 0, batch(b"h"))).code == 200
    here = here.again(checkpoint=with_checkpoint)
    assert here.connect().ask("outcome", of, extensions={"branch": txid}).text == "prepared\n"
    assert [row["homes"] for row in listed(here.connect(), xid="7.0a.0b")] == [[txid]]
    decided = here.connect().ask("commit", of, extensions={"heuristic": "operator"}, body=b"")
    assert decided.text == "a 0 0 1\n"
    here = here.again(checkpoint=with_checkpoint)
    asker = here.connect()
    assert asker.ask("outcome", of, extensions={"branch": txid}).text == "committed\n"
    for _ in range(2):  # before and after the report
        found = listed(asker, state="all", xid="7.0a.0b")
        assert [(row["txid"], row["state"], row["outcome"]) for row in found] == [(of, "heuristic", "committed")]
        (row,) = listed(asker, state="all")
        assert "7.0a.0b" in (row.get("xid"), *(fact["xid"] for fact in row.get("heuristics", ())))
        asker.ask("complete", of, extensions={"branch": txid})


@both
def test_batch_decides_for_the_branches_of_its_winners(with_checkpoint: bool) -> None:
    here, there = two_homes()
    client = here.session()
    open_query(here, client)
    for counter in (1, 2):
        numbers: dict[str, str | int | None] = {"epoch": 1, "batch": 0, "task": 0, "attempt": counter}
        words = {"query": "q", "homes": there.txid(1, counter), **numbers}
        assert client.ask("prepare", here.txid(1, counter), "spark", extensions=words, body=b"").code == 200
    winner = f"{here.txid(1, 1)}\n".encode()
    decided = client.ask("query", "commit", "q", extensions={"epoch": 1, "batch": 0}, body=winner)
    assert decided.code == 200, decided
    here = here.again(checkpoint=with_checkpoint)
    asker = here.connect()
    told = [asker.ask("outcome", here.txid(1, n), extensions={"branch": there.txid(1, n)}).text for n in (1, 2)]
    assert told == ["committed\n", "rolled-back\n"]
    asker.ask("complete", here.txid(1, 1), extensions={"branch": there.txid(1, 1)})
    assert (listed(asker), here.state.sessions[1].owed) == ([], 0)


def test_part_of_a_last_resource_names_its_transaction() -> None:
    here, there = two_homes()
    client, of = there.session(), here.txid(1, 1)
    words = {"resource": "db", "uuid": UUID, "table": "t", "of": of}
    body = part("a", 0, batch(b"x"), "7")
    assert client.ask("prepare", there.txid(1, 1), "last-resource", extensions=words, body=body).code == 200
    assert [(row["kind"], row["of"]) for row in listed(client, uuid=UUID)] == [("last-resource", of)]
    assert commit(client, there.txid(1, 2), ("a", 0, b"y"), keys=8).text == "a 0 0 1\n"
    assert commit(client, there.txid(1, 1)).text == "a 0 1 1\n"  # without a word from the other home
    assert there.state.branch_parts.unreported == {}


# --- the fold --------------------------------------------------------------------------------------------------------


def test_state_is_the_same_live_and_redone_at_each_step() -> None:
    here, there = two_homes()
    for step in range(6):
        here, there = two_homes()
        client, of, txid = there.session(), here.txid(1, 9), there.txid(1, 1)
        prepare_branch(client, txid, of, ("a", 0, b"x"), held=None)
        if step >= 1:
            commit(client, there.txid(1, 2), ("a", 0, b"y"), homes=here.txid(1, 8))
        if step >= 2:
            commit(client, txid)
        if step >= 3:
            client.ask("complete", there.txid(1, 2), extensions={"branch": here.txid(1, 8)})
        if step >= 4:
            there.clock.advance(60)
            there.core.tick(there.clock.now_ms())
        if step >= 5:
            reported(there.context, (1, 1))
        there.pump()
        lived, redone = live_and_redone(there)
        assert lived == redone, step
