"""XA decisions in the broker: offsets at once, visible when every branch has completed, kept through restarts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import UUID, batch, listed_pages, part
from txmq.broker.verbs.session_expiry import SESSION_IDLE_MS_MIN
from txmq.protocol.branches import encode_branch

from ..support import checkpoint_under_way, node, put, restarted, stated, values

OTHER_UUID = "f" * 32


def decide(client: Client, txid: str, *contents: tuple[str, int, bytes], uuids: tuple[str, ...] = (UUID,)) -> Answer:
    """Decide with one branch a uuid."""
    details = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
    body = b"".join(encode_branch(f"db{number}", uuid, details) for number, uuid in enumerate(uuids))
    body += b"".join(part(*content) for content in contents)
    return client.ask("decide", txid, extensions={"branches": len(uuids)}, body=body)


def complete(client: Client, txid: str, uuid: str = UUID, **extensions: str) -> Answer:
    """Report one branch."""
    return client.ask("complete", txid, extensions={"uuid": uuid, **extensions})


def listed(client: Client, **extensions: str) -> list[dict[str, Any]]:
    """What ``recover`` lists."""
    found: list[dict[str, Any]] = json.loads(client.ask("recover", extensions=extensions).body)["transactions"]
    return found


def lives(of: Node, *, checkpoint: bool) -> Node:
    """The next life, from the journal or from a checkpoint."""
    if checkpoint:
        of.checkpoint()
    return restarted(of)


def test_offsets_are_assigned_at_once_readers_wait_for_branches() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    put(client, b"before", producer=1)
    answer = decide(client, txid, ("a", 0, batch(b"x")), ("b", 0, batch(b"y")), uuids=(UUID, OTHER_UUID))
    assert (answer.code, answer.text) == (200, "a 0 1 1\nb 0 0 1\n")
    put(client, b"behind", producer=1, sequence=1)
    assert values(made) == [b"before"]
    assert complete(client, txid).code == 200
    assert (values(made), values(made, "b")) == ([b"before"], [])
    assert complete(client, txid, OTHER_UUID).code == 200
    assert (values(made), values(made, "b")) == ([b"before", b"x", b"behind"], [b"y"])
    assert listed(client) == []


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_restart_keeps_the_decision_and_what_it_holds(checkpoint: bool) -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    put(client, b"before", producer=1)
    decide(client, txid, ("a", 0, batch(b"x", b"y")), ("a", 1, batch(b"z")))
    put(client, b"behind", producer=1, sequence=1)
    again = lives(made, checkpoint=checkpoint)
    client = again.session("1.0")
    put(client, b"later", producer=1, sequence=2)
    assert (values(again), values(again, "a", 1)) == ([b"before"], [])
    (row,) = listed(client, state="decided")
    assert (row["txid"], row["state"], row["is_held"]) == (txid, "decided", True)
    assert [(b["uuid"], b["complete"], b["connection"]) for b in row["branches"]] == [(UUID, False, 7)]
    assert client.ask("outcome", txid).text == "committed\na 0 1 2\na 1 0 1\n"
    assert complete(client, txid).code == 200
    assert values(again) == [b"before", b"x", b"y", b"behind", b"later"]
    assert values(again, "a", 1) == [b"z"]
    last = lives(again, checkpoint=checkpoint)
    assert values(last) == [b"before", b"x", b"y", b"behind", b"later"]
    assert complete(last.session("1.0"), txid).code == 200


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_branch_that_completed_stays_complete_after_a_restart(checkpoint: bool) -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    decide(client, txid, ("a", 0, batch(b"x")), uuids=(UUID, OTHER_UUID))
    complete(client, txid)
    again = lives(made, checkpoint=checkpoint)
    client = again.session("1.0")
    assert [b["complete"] for b in listed(client)[0]["branches"]] == [True, False]
    assert [row["txid"] for row in listed(client, uuid=OTHER_UUID)] == [txid]
    assert listed(client, uuid=UUID) == []
    complete(client, txid, OTHER_UUID)
    assert values(again) == [b"x"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_transaction_behind_hold_is_seen_whole_or_not_at_all(checkpoint: bool) -> None:
    made = node()
    client, held, behind = made.session(), made.txid(1, 1), made.txid(1, 2)
    decide(client, held, ("a", 0, batch(b"x")))
    body = part("a", 0, batch(b"p")) + part("a", 1, batch(b"q"))
    assert client.ask("commit", behind, body=body).code == 200
    assert (values(made), values(made, "a", 1)) == ([], [])
    again = lives(made, checkpoint=checkpoint)
    assert (values(again), values(again, "a", 1)) == ([], [])
    complete(again.session("1.0"), held)
    assert (values(again), values(again, "a", 1)) == ([b"x", b"p"], [b"q"])


def test_decisions_leave_in_the_order_of_their_offsets() -> None:
    made = node()
    client, first, second = made.session(), made.txid(1, 1), made.txid(1, 2)
    decide(client, first, ("a", 0, batch(b"1")))
    decide(client, second, ("a", 0, batch(b"2")), ("b", 0, batch(b"2")))
    complete(client, second)
    assert (values(made), values(made, "b")) == ([], [])
    complete(client, first)
    assert (values(made), values(made, "b")) == ([b"1", b"2"], [b"2"])


def test_repeated_decision_gets_its_answer_before_and_after_completion() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    first = decide(client, txid, ("a", 0, batch(b"x")))
    assert decide(client, txid, ("a", 0, batch(b"x"))) == first
    complete(client, txid)
    assert decide(client, txid, ("a", 0, batch(b"x"))) == first
    assert values(made) == [b"x"]


def test_fenced_cannot_be_decided_and_decided_cannot_be_rolled_back() -> None:
    made = node()
    client = made.session()
    assert client.ask("rollback", made.txid(1, 1)).code == 200
    assert decide(client, made.txid(1, 1), ("a", 0, batch(b"x"))).error == "transaction-conflict"
    decide(client, made.txid(1, 2), ("a", 0, batch(b"y")))
    assert client.ask("rollback", made.txid(1, 2)).error == "transaction-conflict"
    assert client.ask("outcome", made.txid(1, 2), extensions={"fence": None}).text.startswith("committed\n")


def test_messages_streamed_before_are_part_of_the_decision() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    content = batch(b"streamed")
    client.ask("put", "a", 0, extensions={"tx": txid}, body=content)
    branch = encode_branch("db", UUID, {"bqual": "b", "connection": None, "wrote": True, "marker": True, "table": "t"})
    body = branch + part("a", 0, batch(b"with it"))
    assert client.ask("decide", txid, extensions={"branches": 1}, body=body).error == "transaction-conflict"
    answer = client.ask("decide", txid, extensions={"branches": 1, **stated([content])}, body=body)
    assert answer.text == "a 0 0 1\na 0 1 1\n"
    again = restarted(made)
    complete(again.session("1.0"), txid)
    assert values(again) == [b"streamed", b"with it"]


def test_decision_without_messages_waits_for_its_branches_and_holds_nothing() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    assert decide(client, txid).code == 200
    put(client, b"x", producer=1)
    assert values(made) == [b"x"]
    assert len(listed(client)) == 1
    complete(client, txid)
    assert listed(client) == []


def test_clock_set_forward_while_away_shows_nothing_before_its_rows() -> None:
    made = node(visibility_hold_ms_max=1000)
    decide(made.session(), made.txid(1, 1), ("a", 0, batch(b"x")))
    made.clock.jump(3_600_000)
    made = restarted(made)
    made.core.tick(made.clock.now_ms())
    made.pump()
    assert values(made) == []
    made.clock.advance(1.0)
    made.core.tick(made.clock.now_ms())
    made.pump()
    assert values(made) == [b"x"]


def test_past_the_longest_hold_messages_are_shown_and_stay_shown() -> None:
    made = node(visibility_hold_ms_max=1000)
    client, txid = made.session(), made.txid(1, 1)
    decide(client, txid, ("a", 0, batch(b"x")))
    made.clock.advance(0.5)
    made.core.tick(made.clock.now_ms())
    made.pump()
    assert values(made) == []
    made.clock.advance(0.6)
    made.core.tick(made.clock.now_ms())
    made.pump()
    assert values(made) == [b"x"]
    assert "shown_before_rows 1" in client.ask("stats", "transactions").text
    (alarm,) = made.context.alarms
    assert (alarm["txid"], alarm["resources"], alarm["held_ms"]) == (txid, ["db0"], 1100)
    for checkpoint in (False, True):
        made = lives(made, checkpoint=checkpoint)
        assert values(made) == [b"x"]
    (row,) = listed(made.connect())
    assert row["is_held"] is False
    complete(made.session("1.0"), txid)
    assert listed(made.connect()) == []


def test_a_floor_does_not_end_a_decision() -> None:
    made = node(outcomes_kept=1)
    client, txid = made.session(), made.txid(1, 1)
    answer = decide(client, txid, ("a", 0, batch(b"x")))
    for counter in range(2, 6):
        body = part("b", 0, batch(b"y"))
        client.ask("commit", made.txid(1, counter), extensions={"floor": counter - 1}, body=body)
    assert client.ask("outcome", txid).text == "committed\n" + answer.text
    assert complete(client, txid).code == 200
    assert values(made) == [b"x"]
    assert complete(client, txid).error == "fenced"


def test_branch_that_decided_alone_is_kept_until_it_is_forgotten() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    decide(client, txid, ("a", 0, batch(b"x")))
    assert complete(client, txid, heuristic="rollback", reason="no%20marker").code == 200
    assert values(made) == [b"x"]
    for checkpoint in (False, True):
        made = lives(made, checkpoint=checkpoint)
        client = made.connect()
        assert listed(client) == []
        (row,) = listed(client, state="heuristic")
        (fact,) = row["heuristics"]
        assert (fact["what"], fact["reason"], row["outcome"]) == ("heuristic-rollback", "no marker", "committed")
    assert client.ask("forget", txid).code == 200
    assert client.ask("forget", txid).error == "unknown-transaction"
    made = restarted(made)
    assert listed(made.connect(), state="all") == []


def test_lone_decision_is_forgotten_also_after_its_session_ended() -> None:
    made = node(sessions_max=1)
    client, txid = made.session(), made.txid(1, 1)
    decide(client, txid, ("a", 0, batch(b"x")))
    complete(client, txid, heuristic="rollback", reason="lost")
    client.disconnect()
    made.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    made.session()
    assert [row["txid"] for row in listed(made.connect(), state="heuristic")] == [txid]
    assert made.connect().ask("forget", txid).code == 200
    assert listed(made.connect(), state="all") == []


def test_a_deleted_topic_holds_nothing_up() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    decide(client, txid, ("a", 0, batch(b"x")), ("b", 0, batch(b"y")))
    client.ask("topic", "delete", "a")
    assert values(made, "b") == []
    complete(client, txid)
    assert values(made, "b") == [b"y"]
    again = restarted(made)
    assert values(again, "b") == [b"y"]


def test_last_hold_of_deleted_topic_lets_those_behind_it_go() -> None:
    made = node()
    client, held, behind = made.session(), made.txid(1, 1), made.txid(1, 2)
    decide(client, held, ("a", 0, batch(b"x")))
    client.ask("commit", behind, body=part("a", 0, batch(b"p")) + part("b", 0, batch(b"q")))
    assert values(made, "b") == []
    client.ask("topic", "delete", "a")
    assert values(made, "b") == [b"q"]


@pytest.mark.parametrize(
    ("body", "branches"),
    [
        (b"", 1), (b"db " + UUID.encode() + b" 2\r\n{}", 1), (b"db " + UUID.encode() + b" 9\r\n{}", 1), (b"", 0),
        (b"db " + UUID.encode() + b" 2\r\n[]", 1), (b"x", 65),
    ],
)  # fmt: skip
def test_malformed_branches_are_refused(body: bytes, branches: int) -> None:
    made = node()
    answer = made.session().ask("decide", made.txid(1, 1), extensions={"branches": branches}, body=body)
    assert answer.error == "bad-request"


def test_two_branches_of_one_resource_are_refused() -> None:
    made = node()
    assert decide(made.session(), made.txid(1, 1), uuids=(UUID, UUID)).error == "bad-request"


def test_only_the_owner_decides_and_anybody_completes() -> None:
    made = node()
    client, other, txid = made.session(), made.session(), made.txid(1, 1)
    assert decide(other, txid, ("a", 0, batch(b"x"))).error == "other-session"
    decide(client, txid, ("a", 0, batch(b"x")))
    assert complete(other, txid, OTHER_UUID).error == "bad-request"
    assert complete(other, txid).code == 200
    assert complete(other, made.txid(1, 9)).error == "unknown-transaction"


def test_every_transaction_is_listed_once_page_by_page() -> None:
    made = node()
    client = made.session()
    for counter in range(1, 6):
        decide(client, made.txid(1, counter), uuids=(UUID, OTHER_UUID))
        complete(client, made.txid(1, counter), heuristic="hazard")
    complete(client, made.txid(1, 2), OTHER_UUID)
    pages = [[row["txid"] for row in page] for page in listed_pages(client, state="all", limit=2)]
    assert sorted(txid for page in pages for txid in page) == [made.txid(1, counter) for counter in range(1, 6)]
    assert [len(page) for page in pages] == [2, 2, 1]
    assert listed(client, state="all", limit="2")[0]["heuristics"]


def test_owner_is_told_with_outcome_that_is_not_committed() -> None:
    made = node()
    client, other = made.session(), made.connect()
    asked = {"owner": None}
    assert other.ask("outcome", made.txid(1, 1), extensions=asked).text == "unknown\nowner connected\n"
    client.disconnect()
    made.clock.advance(2.5)
    assert other.ask("outcome", made.txid(1, 1), extensions=asked).text == "unknown\nowner gone 2500\n"
    other.ask("rollback", made.txid(1, 1))
    assert other.ask("outcome", made.txid(1, 1), extensions=asked).text == "rolled-back\nowner gone 2500\n"


def test_nothing_is_shown_before_the_last_completion_is_forced() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    decide(client, txid, ("a", 0, batch(b"x")))
    opaque = client.send("complete", txid, extensions={"uuid": UUID})
    assert (values(made), opaque in client.received) == ([], False)
    made.pump()
    assert (values(made), client.received[opaque].code) == ([b"x"], 200)


def test_session_with_an_incomplete_decision_never_makes_room() -> None:
    broker = node(sessions_max=1)
    owner, txid = broker.session(), broker.txid(1, 1)
    assert decide(owner, txid, ("a", 0, batch(b"x"))).code == 200
    owner.disconnect()
    broker.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    broker.pump()
    assert broker.connect().hello().error == "overloaded"
    assert complete(broker.connect(), txid).code == 200
    assert values(broker) == [b"x"]
    assert broker.connect().hello().code == 200


def test_branches_completed_during_a_checkpoint_do_not_belong_to_it() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    decide(client, txid, ("a", 0, batch(b"x")), uuids=(UUID, OTHER_UUID))
    with checkpoint_under_way(made):
        complete(client, txid, heuristic="hazard")
        complete(client, txid, OTHER_UUID, heuristic="hazard")
    again = restarted(made)
    assert values(again) == [b"x"]
    (row,) = listed(again.connect(), state="all")
    assert len(row["heuristics"]) == 2


def test_messages_held_by_a_deleted_topic_wait_for_its_sync() -> None:
    made = node()
    client, held, behind = made.session(), made.txid(1, 1), made.txid(1, 2)
    decide(client, held, ("a", 0, batch(b"x")))
    client.ask("commit", behind, body=part("a", 0, batch(b"p")) + part("b", 0, batch(b"q")))
    client.send("topic", "delete", "a")
    assert values(made, "b") == []
    made.pump()
    assert values(made, "b") == [b"q"]


def test_poll_of_a_topic_under_deletion_never_sees_held_messages() -> None:
    made = node()
    client, reader, txid = made.session(), made.connect(), made.txid(1, 1)
    poll = reader.send("get", "a", 0, 0, 1 << 16, extensions={"wait": 30_000})
    details = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
    body = encode_branch("db", UUID, details) + part("a", 0, batch(b"x"))
    client.send("decide", txid, extensions={"branches": 1}, body=body)
    made.core.cut()
    partition = made.partition("a")
    client.send("topic", "delete", "a")
    made.run_steps(2)  # append, apply: the deletion is accepted, and not on disk: a crash brings the topic back
    assert made.core.next_group() is not None
    assert partition.high_watermark == 0
    assert poll not in reader.received or reader.received[poll].body == b""


def test_a_refusal_waits_for_the_record_of_what_it_tells() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    client.send("commit", txid, body=part("a", 0, batch(b"x")))
    opaque = client.send("rollback", txid)
    made.flush()
    assert opaque not in client.received  # a crash now would leave a transaction that was never committed
    made.pump()
    assert client.received[opaque].code == 409
