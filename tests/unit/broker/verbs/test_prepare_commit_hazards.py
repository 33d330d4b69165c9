"""``rollback ... hazard=``: a database whose transaction the block's body has ended by itself, kept until forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import UUID, batch, listed_pages, part
from txmq.broker.verbs.branches import heuristics as kept

from ..support import node, prepare, restarted, values

OTHER_UUID = "f" * 32


def hazard(client: Client, txid: str, uuid: str = UUID, **changed: str) -> Answer:
    """What an owner, or its resolver, tells."""
    words = {"hazard": "the%20body", "resource": "orders-db", "uuid": uuid, "kind": "last-resource", **changed}
    return client.ask("rollback", txid, extensions={word: said for word, said in words.items() if said})


def heuristics(of: Node) -> dict[str, list[dict[str, Any]]]:
    """What ``recover state=heuristic`` lists: the facts of each transaction."""
    return {row["txid"]: row["heuristics"] for page in listed_pages(of.connect(), state="heuristic") for row in page}


@pytest.mark.parametrize("before", ["nothing", "prepared", "rolled back"])
def test_it_is_kept_once_whatever_broker_had_and_through_restarts(before: str) -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    if before == "prepared":
        assert prepare(client, txid, ("a", 0, batch(b"x"))).code == 200
    elif before == "rolled back":
        assert client.ask("rollback", txid).code == 200
    assert hazard(client, txid).code == 200
    assert hazard(client, txid).code == 200
    for _ in range(2):
        ((found,),) = heuristics(made).values()
        assert (found["what"], found["reason"], found["resource"]) == ("heuristic-hazard", "the body", "orders-db")
        assert (found["outcome"], found["kind"], values(made)) == ("rolled-back", "last-resource", [])
        made = restarted(made)
    assert made.connect().ask("outcome", txid).text == "rolled-back\n"
    assert made.connect().ask("forget", txid).code == 200
    assert heuristics(restarted(made)) == {}


def test_each_database_of_a_transaction_is_kept_for_itself() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    assert [hazard(client, txid, uuid, kind="xa").code for uuid in (UUID, OTHER_UUID, UUID)] == [200, 200, 200]
    assert [fact["uuid"] for fact in heuristics(made)[txid]] == [UUID, OTHER_UUID]


def test_what_is_committed_is_not_rolled_back_by_it() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    client.ask("commit", txid, body=part("a", 0, batch(b"x")))
    assert hazard(client, txid).error == "transaction-conflict"
    assert heuristics(made) == {}


@pytest.mark.parametrize("changed", [{"resource": "-"}, {"uuid": ""}, {"kind": "half"}])
def test_hazard_without_a_place_is_refused_without_a_trace(changed: dict[str, str]) -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    assert hazard(client, txid, **changed).code == 400
    assert client.ask("outcome", txid).text == "unknown\n"
    assert heuristics(made) == {}


def test_there_is_an_end_to_how_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "HEURISTICS_MAX", 2)
    made = node()
    client = made.session()
    codes = [hazard(client, made.txid(1, number)).code for number in (1, 2, 3)]
    assert (codes, len(heuristics(made))) == ([200, 200, 429], 2)
    assert client.ask("forget", made.txid(1, 1)).code == 200
    assert hazard(client, made.txid(1, 3)).code == 200


def test_hazards_of_finished_transactions_are_not_kept() -> None:
    """So a client finishes it when it is told, and not before."""
    made = node(outcomes_kept=1)
    client = made.session()
    for counter in (2, 3, 4):
        assert client.ask("rollback", made.txid(1, counter), extensions={"floor": counter - 1}).code == 200
    assert hazard(client, made.txid(1, 1)).code == 410
    assert heuristics(made) == {}
