"""``rollback ... voided``: the messages of a block come from its database's outbox, whatever was prepared."""

from __future__ import annotations

import pytest

from tools.images.requests import batch, part
from txmq.errors import TransactionConflictError

from ..support import node, prepare, restarted, values

BEFORE = ("nothing", "prepared", "rolled back", "fenced", "voided")
WORDS = {"voided": None}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_outcome_of_a_void_is_unknown_through_restarts(before: str, is_checkpointed: bool) -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    if before == "prepared":
        assert prepare(client, txid, ("a", 0, batch(b"x"))).code == 200
    elif before == "fenced":
        assert client.ask("outcome", txid, extensions={"fence": None}).text == "rolled-back\n"
    elif before != "nothing":
        assert client.ask("rollback", txid, extensions=WORDS if before == "voided" else None).code == 200
    assert client.ask("rollback", txid, extensions=WORDS).code == 200
    for _ in range(2):
        assert made.connect().ask("outcome", txid).text == "unknown\n"
        assert made.connect().ask("outcome", txid, extensions={"fence": None}).text == "unknown\n"
        assert values(made) == []
        if is_checkpointed:
            made.checkpoint()
        made = restarted(made)


def test_what_is_void_stays_void() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    assert client.ask("rollback", txid, extensions=WORDS).code == 200
    assert client.ask("rollback", txid).code == 200
    assert client.ask("commit", txid, body=part("a", 0, batch(b"x"))).error == TransactionConflictError.wire_name
    assert client.ask("commit", txid, body=b"").error == TransactionConflictError.wire_name
    assert prepare(client, txid, ("a", 0, batch(b"x"))).error == TransactionConflictError.wire_name
    assert (client.ask("outcome", txid).text, values(made)) == ("unknown\n", [])


def test_what_is_committed_cannot_be_voided() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    client.ask("commit", txid, body=part("a", 0, batch(b"x")))
    assert client.ask("rollback", txid, extensions=WORDS).error == TransactionConflictError.wire_name
    assert client.ask("outcome", txid).text.startswith("committed\n")
    assert values(made) == [b"x"]


def test_void_lets_those_behind_it_go() -> None:
    made = node()
    client, first, second = made.session(), made.txid(1, 1), made.txid(1, 2)
    for txid, value in ((first, b"1"), (second, b"2")):
        assert prepare(client, txid, ("a", 0, batch(value))).code == 200
    committing = client.send("commit", second, body=b"")
    made.pump()
    assert committing not in client.received
    assert client.ask("rollback", first, extensions=WORDS).code == 200
    assert (client.received[committing].text, values(made)) == ("a 0 0 1\n", [b"2"])
