"""Half messages, foreign xids and operators: what is prepared for somebody else to settle."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import batch, part
from txmq.broker.verbs.check_backs import PAUSE_MS
from txmq.log import records
from txmq.protocol.half_messages import DueHalf, split_halves

from ..support import node, prepare, restarted, values

GROUP = "order-service"
XID = "1.00ff.01"


def half(client: Client, txid: str, value: bytes = b"x", **extensions: Any) -> Answer:
    """Prepare a half message."""
    return client.ask(
        "prepare", txid, "half", extensions={"group": GROUP, **extensions}, body=part("a", 0, batch(value))
    )


def foreign(client: Client, txid: str, xid: str = XID) -> Answer:
    """Prepare a branch of another transaction manager."""
    return client.ask("prepare", txid, "foreign", extensions={"xid": xid}, body=part("a", 0, batch(b"x")))


def due(client: Client, group: str = GROUP, **extensions: int) -> list[DueHalf]:
    """What ``checks`` hands out now."""
    answer = client.ask("checks", group, extensions=extensions)
    assert answer.code == 200, answer
    return split_halves(answer.body)


def pass_time(made: Node, seconds: float) -> None:
    """The broker's timer runs."""
    made.clock.advance(seconds)
    made.core.tick(made.clock.now_ms())
    made.pump()


def test_a_half_is_invisible_until_it_is_committed() -> None:
    made = node()
    client = made.session()
    assert half(client, made.txid(1, 1)).code == 200
    assert values(made) == []
    assert client.ask("commit", made.txid(1, 1), body=b"").text == "a 0 0 1\n"
    assert values(made) == [b"x"]


def test_nobody_is_asked_while_owner_lives_and_its_deadline_holds() -> None:
    made = node()
    client, other = made.session(), made.connect()
    half(client, made.txid(1, 1), deadline=made.clock.now_ms() + 5000)
    assert due(other) == []
    pass_time(made, 4.9)
    assert due(other) == []
    pass_time(made, 0.1)
    (found,) = due(other)
    assert (found.txid, found.attempt, found.age_ms) == (made.txid(1, 1), 1, 5000)


def test_half_message_of_gone_owner_is_handed_to_its_group() -> None:
    made = node()
    client, other = made.session(), made.connect()
    half(client, made.txid(1, 1))
    client.disconnect()
    assert due(other) == []
    pass_time(made, 1.0)
    assert due(other, "another-group") == []
    (found,) = due(other)
    ((topic, partition, content),) = found.parts
    (message,) = records.decode(content, topic, partition)
    assert (topic, partition, message.value) == ("a", 0, b"x")


def test_checks_back_off_and_never_end() -> None:
    made = node()
    client, other = made.session(), made.connect()
    half(client, made.txid(1, 1))
    client.disconnect()
    pass_time(made, 1.0)
    for attempt in range(1, 1001):
        (found,) = due(other)
        assert found.attempt == attempt
        pause_ms = PAUSE_MS.after(attempt - 1)
        pass_time(made, (pause_ms - 1) / 1000)
        assert due(other) == []
        pass_time(made, 0.001)
    assert values(made) == []
    assert other.ask("commit", made.txid(1, 1), body=b"").code == 200
    assert values(made) == [b"x"]


def test_member_that_waits_is_answered_when_half_becomes_due() -> None:
    made = node()
    client, other = made.session(), made.connect()
    half(client, made.txid(1, 1))
    opaque = other.send("checks", GROUP, extensions={"wait": 30_000})
    client.disconnect()
    pass_time(made, 0.5)
    assert opaque not in other.received
    pass_time(made, 0.5)
    (found,) = split_halves(other.received.pop(opaque).body)
    assert found.txid == made.txid(1, 1)


def test_a_member_that_waits_in_vain_gets_an_empty_answer() -> None:
    made = node()
    other = made.connect()
    opaque = other.send("checks", GROUP, extensions={"wait": 1000})
    made.pump()
    assert opaque not in other.received
    pass_time(made, 1.0)
    assert other.received.pop(opaque).body == b""


def test_a_member_that_has_gone_is_handed_nothing() -> None:
    made = node()
    client, gone, other = made.session(), made.connect(), made.connect()
    half(client, made.txid(1, 1))
    gone.send("checks", GROUP, extensions={"wait": 30_000})
    gone.disconnect()
    client.disconnect()
    pass_time(made, 1.0)
    assert [found.attempt for found in due(other)] == [1]


def test_half_messages_handed_out_at_once_are_limited() -> None:
    made = node()
    client, other = made.session(), made.connect()
    for counter in range(1, 6):
        half(client, made.txid(1, counter))
    client.disconnect()
    pass_time(made, 1.0)
    assert [len(due(other, limit=2)) for _ in range(4)] == [2, 2, 1, 0]


def test_a_restart_begins_the_checks_anew_and_loses_no_half() -> None:
    made = node()
    client = made.session()
    half(client, made.txid(1, 1))
    made.checkpoint()
    half(client, made.txid(1, 2))
    again = restarted(made)
    pass_time(again, 1.0)
    assert [found.txid for found in due(again.connect())] == [made.txid(1, 1), made.txid(1, 2)]


def test_a_half_needs_a_group() -> None:
    made = node()
    answer = made.session().ask("prepare", made.txid(1, 1), "half", body=part("a", 0, batch(b"x")))
    assert answer.error == "bad-request"


def test_halves_of_one_key_do_not_wait_for_each_other() -> None:
    made = node()
    client = made.session()
    half(client, made.txid(1, 1))
    half(client, made.txid(1, 2), b"y")
    assert client.ask("commit", made.txid(1, 2), body=b"").code == 200
    assert values(made) == [b"y"]


# --- foreign xids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
def test_foreign_branch_is_found_by_its_xid_after_restart(checkpoint: bool) -> None:
    made = node()
    client = made.session()
    assert foreign(client, made.txid(1, 1)).code == 200
    assert foreign(client, made.txid(1, 2), "2.aa.").code == 200
    if checkpoint:
        made.checkpoint()
    again = restarted(made)
    other = again.session()
    found = json.loads(other.ask("recover", extensions={"xid": XID}).body)["transactions"]
    assert [(row["txid"], row["xid"], row["kind"]) for row in found] == [(made.txid(1, 1), XID, "foreign")]
    assert foreign(other, again.txid(again.newest_session, 1)).error == "transaction-conflict"
    assert other.ask("commit", made.txid(1, 1), body=b"").code == 200
    assert foreign(other, again.txid(again.newest_session, 1)).code == 200


@pytest.mark.parametrize(
    "xid", ["1", "1.0.01", "-1.00.01", "1.00ff.0g", "1.." + "00" * 65, "1..", "01.00.00", "2147483648.00."]
)
def test_a_malformed_xid_is_refused(xid: str) -> None:
    made = node()
    assert foreign(made.session(), made.txid(1, 1), xid).error == "bad-request"


# --- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "outcome"), [("commit", "committed"), ("rollback", "rolled-back")])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_operator_settles_alone_and_that_is_kept(verb: str, outcome: str, checkpoint: bool) -> None:
    made = node()
    client, other = made.session(), made.connect()
    prepare(client, made.txid(1, 1), ("a", 0, batch(b"x")))
    body = {"body": b""} if verb == "commit" else {}
    answer = other.ask(verb, made.txid(1, 1), extensions={"heuristic": "ticket%2042"}, **body)
    assert answer.code == 200
    if checkpoint:
        made.checkpoint()
    again = restarted(made)
    assert values(again) == ([b"x"] if verb == "commit" else [])
    (row,) = json.loads(again.connect().ask("recover", extensions={"state": "heuristic"}).body)["transactions"]
    assert (row["outcome"], row["heuristics"][0]["reason"]) == (outcome, "ticket 42")
    assert row["heuristics"][0]["what"] == f"heuristic-{verb}"


def test_commit_by_an_operator_does_not_wait_for_earlier_ones() -> None:
    made = node()
    client, other = made.session(), made.connect()
    prepare(client, made.txid(1, 1), ("a", 0, batch(b"1")))
    prepare(client, made.txid(1, 2), ("a", 0, batch(b"2")))
    assert other.ask("commit", made.txid(1, 2), extensions={"heuristic": "now"}, body=b"").code == 200
    assert values(made) == [b"2"]


def test_settling_what_is_settled_records_nothing() -> None:
    made = node()
    client = made.session()
    prepare(client, made.txid(1, 1), ("a", 0, batch(b"1")))
    client.ask("commit", made.txid(1, 1), body=b"")
    assert client.ask("commit", made.txid(1, 1), extensions={"heuristic": "late"}, body=b"").code == 200
    assert json.loads(client.ask("recover", extensions={"state": "heuristic"}).body)["transactions"] == []
