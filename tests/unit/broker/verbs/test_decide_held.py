"""Rows before messages at each home: parts are held until the databases have committed, or the hold is over."""

from __future__ import annotations

import pytest

from tools.images.homes import HomeNode
from tools.images.requests import UUID, batch, part
from txmq.protocol.transaction_bodies import encode_branch

from ..homes_support import commit, listed, prepare_branch, two_homes
from ..support import put, values

DETAILS = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
both = pytest.mark.parametrize("with_checkpoint", [False, True])


def xa(home: HomeNode, of: str, homes: str, *contents: tuple[str, int, bytes]) -> str:
    """An XA decision with one database and branches at other homes."""
    body = encode_branch("db", UUID, DETAILS)
    body += b"".join(part(topic, number, batch(value), "7") for topic, number, value in contents)
    client = home.session()
    answer = client.ask("decide", of, extensions={"branches": 1, "homes": homes}, body=body)
    assert answer.code == 200, answer
    return answer.text


@both
def test_report_is_answered_when_the_databases_have_committed(with_checkpoint: bool) -> None:
    here, there = two_homes()
    of, txid = here.txid(1, 1), there.txid(1, 1)
    assert xa(here, of, txid, ("a", 0, b"x")) == "a 0 0 1\n"
    here = here.again(checkpoint=with_checkpoint)
    reporter = here.connect()
    opaque = reporter.send("complete", of, extensions={"branch": txid})
    here.pump()
    assert (opaque in reporter.received, values(here)) == (False, [])
    row = listed(reporter)[0]
    assert (row["kind"], row["homes"], row["is_held"]) == ("xa", [{"txid": txid, "complete": True}], True)
    assert reporter.ask("complete", of, extensions={"uuid": UUID}).code == 200
    assert (reporter.received.pop(opaque).code, values(here)) == (200, [b"x"])
    assert listed(reporter) == []


def test_databases_may_be_complete_before_the_branch_home_reports() -> None:
    here, there = two_homes()
    of, txid = here.txid(1, 1), there.txid(1, 1)
    xa(here, of, txid, ("a", 0, b"x"))
    client = here.connect()
    client.ask("complete", of, extensions={"uuid": UUID})
    assert (values(here), here.state.sessions[1].owed) == ([b"x"], 1)
    assert client.ask("complete", of, extensions={"branch": txid}).code == 200
    assert (listed(client), here.state.sessions[1].owed) == ([], 0)


def test_report_is_answered_when_the_hold_is_over() -> None:
    here, there = two_homes()
    of, txid = here.txid(1, 1), there.txid(1, 1)
    xa(here, of, txid, ("a", 0, b"x"))
    reporter = here.connect()
    opaque = reporter.send("complete", of, extensions={"branch": txid})
    here.clock.advance(60)
    here.core.tick(here.clock.now_ms())
    here.pump()
    assert (reporter.received.pop(opaque).code, values(here)) == (200, [b"x"])


@both
def test_xa_decision_waits_for_its_place_then_its_rows(with_checkpoint: bool) -> None:
    here, there = two_homes()
    client = here.session()
    prepare_branch(client, here.txid(1, 1), there.txid(1, 1), ("a", 0, b"first"))
    of = here.txid(2, 1)
    assert xa(here, of, there.txid(1, 2), ("a", 0, b"x")) == "a 0 - 1\n"
    here = here.again(checkpoint=with_checkpoint)
    client = here.session("1.0")
    commit(client, here.txid(1, 1))
    assert client.ask("outcome", of).text == "committed\na 0 1 1\n"
    assert values(here) == [b"first"]
    here = here.again(checkpoint=with_checkpoint)
    client = here.connect()
    client.ask("complete", of, extensions={"uuid": UUID})
    assert values(here) == [b"first", b"x"]


@both
def test_rows_may_be_there_before_the_place(with_checkpoint: bool) -> None:
    here, there = two_homes()
    client = here.session()
    prepare_branch(client, here.txid(1, 1), there.txid(1, 1), ("a", 0, b"first"))
    of = here.txid(2, 1)
    xa(here, of, there.txid(1, 2), ("a", 0, b"x"))
    client.ask("complete", of, extensions={"uuid": UUID})
    here = here.again(checkpoint=with_checkpoint)
    client = here.session("1.0")
    commit(client, here.txid(1, 1))
    assert values(here) == [b"first", b"x"]
    client.ask("complete", of, extensions={"branch": there.txid(1, 2)})
    assert ([row["state"] for row in listed(client)], here.state.sessions[2].owed) == (["placed"], 0)


@both
def test_held_branch_is_hidden_until_the_hold_is_over(with_checkpoint: bool) -> None:
    here, there = two_homes()
    client, txid = there.session(), there.txid(1, 1)
    prepare_branch(client, txid, here.txid(1, 1), ("a", 0, b"x"), held=None)
    assert commit(client, txid).text == "a 0 0 1\n"
    put(there.connect(), b"behind")
    there = there.again(checkpoint=with_checkpoint)
    assert values(there) == []
    there.clock.advance(31)
    there.core.tick(there.clock.now_ms())
    there.pump()
    assert values(there) == [b"x", b"behind"]
    assert "before their rows" in there.context.alarms[0]["event"]
    assert len(there.state.branch_parts.unreported) == 1
    assert values(there.again(checkpoint=with_checkpoint)) == [b"x", b"behind"]
