"""Offsets saved by transactions: with the messages or not at all, under the newest generation, held until settled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import UUID, batch, part
from txmq.broker.verbs.session_expiry import SESSION_IDLE_MS_MIN
from txmq.protocol.branches import encode_branch
from txmq.protocol.transaction_offsets import GroupOffsets, OffsetRow, encode_offsets

from ..group_support import A0, GROUP, Consumer, after, describe, pass_time
from ..support import node, put, restarted, values

BRANCH = {"bqual": "b", "connection": 1, "wrote": True, "marker": True, "table": "t"}


def offsets(
    offset: int, generation: int = 1, *, order: int = 0, deferred: str | None = None, group: str = GROUP
) -> bytes:
    """What a transaction saves of partition 0 of topic a."""
    return encode_offsets([GroupOffsets(group, order, (OffsetRow("a", 0, generation, offset, deferred),))])


def commit(client: Client, txid: str, stated: bytes, content: bytes = b"x") -> Answer:
    """A local transaction of one message in topic b."""
    body = stated + part("b", 0, batch(content))
    return client.ask("commit", txid, extensions={"offsets": len(stated)}, body=body)


def prepare(client: Client, txid: str, stated: bytes, content: bytes = b"x") -> Answer:
    """The same, prepared."""
    body = stated + part("b", 0, batch(content), "*")
    words: dict[str, str | int | None] = {
        "resource": "db",
        "uuid": UUID,
        "table": "t",
        "offsets": len(stated),
    }
    return client.ask("prepare", txid, "last-resource", extensions=words, body=body)


def decide(client: Client, txid: str, stated: bytes, *contents: bytes) -> Answer:
    """The same, decided with one branch."""
    body = encode_branch("db", UUID, BRANCH) + stated + b"".join(part("b", 0, batch(value)) for value in contents)
    return client.ask("decide", txid, extensions={"branches": 1, "offsets": len(stated)}, body=body)


def saved(made: Node) -> tuple[int | None, str | None]:
    """What the group has of partition 0 of topic a."""
    row: dict[str, Any] = next(
        row for row in describe(made)["partitions"] if (row["topic"], row["partition"]) == ("a", 0)
    )
    return row["offset"], row["deferred"]


def world() -> tuple[Node, Client, Consumer]:
    """A broker, a session, and the one member of the group."""
    made = node()
    return made, made.session(), Consumer(made, "one").join()


def came_late(made: Node) -> Consumer:
    """A member that joins a broker which waits, after its start, for those that had something."""
    two = Consumer(made, "two").join()
    pass_time(made, 1.5)
    return two.heartbeat()


def lives(of: Node, *, checkpoint: bool) -> Node:
    """The next life, from the journal or from a checkpoint."""
    if checkpoint:
        of.checkpoint()
    return restarted(of)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_local_transaction_saves_messages_and_offset_and_answers_again_alike(checkpoint: bool) -> None:
    made, client, _ = world()
    answer = commit(client, made.txid(1, 1), offsets(5, deferred="w"))
    assert (answer.code, answer.text) == (200, "b 0 0 1\n")
    assert commit(client, made.txid(1, 1), offsets(5, deferred="w")) == answer
    after = lives(made, checkpoint=checkpoint)
    assert (saved(after), values(after, "b")) == ((5, "w"), [b"x"])


def test_messages_decision_and_offset_are_one_record() -> None:
    made, client, _ = world()
    before = made.context.counters.group_commits
    stated = offsets(5)
    client.send("commit", made.txid(1, 1), extensions={"offsets": len(stated)}, body=stated + part("b", 0, batch(b"x")))
    made.pump()
    assert (saved(made), values(made, "b")) == ((5, None), [b"x"])
    assert made.context.counters.group_commits == before + 1


def test_a_transaction_may_save_offsets_and_send_nothing() -> None:
    made, client, _ = world()
    stated = offsets(7)
    assert client.ask("commit", made.txid(1, 1), extensions={"offsets": len(stated)}, body=stated).text == ""
    assert saved(restarted(made)) == (7, None)


@pytest.mark.parametrize("how", [commit, prepare, decide], ids=lambda how: how.__name__)
def test_fenced_generation_is_refused_and_nothing_of_transaction_happens(how: Any) -> None:
    made, client, one = world()
    one.ask("leave", [], member="one")
    two = Consumer(made, "two").join()
    assert two.generation("a", 0) == 2
    for generation in (0, 1, 3):
        answer = how(client, made.txid(1, 1), offsets(5, generation), b"x")
        assert answer.error == "transaction-conflict", answer
    assert (saved(made), values(made, "b")) == ((None, None), [])
    assert client.ask("outcome", made.txid(1, 1)).text == "unknown\n"
    assert two.save(A0, 2, 1) == []
    assert how(client, made.txid(1, 1), offsets(5, 2), b"x").code == 200


def test_newest_generation_may_save_while_nobody_else_has_partition() -> None:
    """After a broker's restart, before the member has joined again: nobody has loaded anything since."""
    made, _, _ = world()
    after = restarted(made)
    client = after.session("1.0")
    assert commit(client, after.txid(1, 1), offsets(5)).code == 200
    assert saved(after) == (5, None)


def test_unknown_topic_or_group_conflicts_and_malformed_offsets_are_refused() -> None:
    made, client, _ = world()
    gone = encode_offsets([GroupOffsets(GROUP, 0, (OffsetRow("zz", 0, 1, 5, None),))])
    assert commit(client, made.txid(1, 1), gone).error == "transaction-conflict"
    assert commit(client, made.txid(1, 1), offsets(5, group="nobody")).error == "transaction-conflict"
    for bad in (
        b"[]",
        b"{}",
        b'[["g",0,[]]]',
        b'[["g",0,[["a",0,1,-1,null]]]]',
        b'[["g",0,[["a",0,1,1,null],["a",0,1,2,null]]]]',
    ):
        assert commit(client, made.txid(1, 1), bad).error == "bad-request", bad
    words = {"offsets": 5000}
    assert client.ask("commit", made.txid(1, 1), extensions=words, body=offsets(5)).error == "bad-request"


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_prepared_transaction_holds_the_partition_until_settled_then_hands_over(end: str, *, checkpoint: bool) -> None:
    made, client, one = world()
    one.save(A0, 1, 2)
    assert prepare(client, made.txid(1, 1), offsets(5)).code == 200
    assert saved(made) == (2, None)
    made = lives(made, checkpoint=checkpoint)
    two = came_late(made)
    assert A0 not in two.held
    assert len(two.held) == 2
    client = made.session("1.0")
    assert client.ask(end, made.txid(1, 1), body=b"" if end == "commit" else None).code == 200
    pass_time(made, 0.1)
    two.heartbeat()
    offset = 5 if end == "commit" else 2
    assert next(row for row in two.view["assigned"] if row[:2] == A0) == [*A0, after(made, 1), offset, None]
    assert values(made, "b") == ([b"x"] if end == "commit" else [])


@pytest.mark.parametrize("how", [prepare, decide], ids=lambda how: how.__name__)
def test_operator_sees_who_holds_partition_and_what_transaction_saves(how: Any) -> None:
    made, client, _ = world()
    how(client, made.txid(1, 1), offsets(5), b"x")
    held = {(row["topic"], row["partition"]): row["held_by"] for row in describe(made)["partitions"]}
    assert held == {("a", 0): made.txid(1, 1), ("a", 1): None, ("b", 0): None}
    (listed,) = json.loads(client.ask("recover").body)["transactions"]
    assert listed["offsets"] == [{"group": GROUP, "topic": "a", "partition": 0, "offset": 5}]


def test_owner_keeps_a_partition_that_its_own_transaction_holds() -> None:
    made, client, one = world()
    prepare(client, made.txid(1, 1), offsets(5))
    assert one.heartbeat().held == [["a", 0], ["a", 1], ["b", 0]]
    assert one.generation("a", 0) == 1


def test_what_is_held_is_saved_by_nobody_else() -> None:
    made, client, one = world()
    prepare(client, made.txid(1, 1), offsets(5))
    assert one.save(A0, 1, 3) == [[*A0, 1]]
    assert commit(client, made.txid(1, 2), offsets(9)).error == "transaction-conflict"
    assert prepare(client, made.txid(1, 3), offsets(9)).error == "transaction-conflict"
    assert prepare(client, made.txid(1, 1), offsets(5)).code == 200  # the same one again
    one.ask("leave", [], member="one")
    assert one.ask("reset", [["a", 0, 0]]).error == "group-active"
    assert one.ask("delete", []).error == "group-active"
    client.ask("commit", made.txid(1, 1), body=b"")
    assert saved(made) == (5, None)
    assert one.ask("reset", [["a", 0, 0]]).code == 200


@pytest.mark.parametrize("contents", [(), (b"x",)], ids=["without messages", "with messages"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_decided_transaction_has_saved_and_holds_until_complete(
    contents: tuple[bytes, ...], *, checkpoint: bool
) -> None:
    made, client, _ = world()
    assert decide(client, made.txid(1, 1), offsets(5), *contents).code == 200
    made = lives(made, checkpoint=checkpoint)
    assert saved(made) == (5, None)
    two = came_late(made)
    assert A0 not in two.held
    assert len(two.held) == 2
    client = made.session("1.0")
    assert client.ask("complete", made.txid(1, 1), extensions={"uuid": UUID}).code == 200
    pass_time(made, 0.1)
    assert [*A0, after(made, 1), 5, None] in two.heartbeat().view["assigned"]


@pytest.mark.parametrize("contents", [(), (b"x",)], ids=["without messages", "with messages"])
@pytest.mark.parametrize("checkpoint", [None, False, True], ids=["live", "redone", "restored"])
def test_decided_transaction_held_back_past_the_limit_holds_no_longer(
    contents: tuple[bytes, ...], checkpoint: bool | None
) -> None:
    made, client, _ = world()
    decide(client, made.txid(1, 1), offsets(5), *contents)
    made.clock.advance(made.settings.visibility_hold_ms_max / 1000)
    made.core.tick(made.clock.now_ms())
    made.pump()
    if checkpoint is not None:
        made = lives(made, checkpoint=checkpoint)
    assert made.state.saved.held == {}
    pass_time(made, 7.0)  # the member is taken for gone
    two = Consumer(made, "two").join()
    assert [*A0, 2 if checkpoint is None else after(made, 1), 5, None] in two.view["assigned"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_decided_transaction_of_a_deleted_topic_holds_until_complete(
    checkpoint: bool,
) -> None:
    made, client, _ = world()
    decide(client, made.txid(1, 1), offsets(5), b"x")
    client.ask("topic", "delete", "b")
    held = made.state.saved.held
    assert held
    assert lives(made, checkpoint=checkpoint).state.saved.held == held


def test_delayed_save_does_not_take_back_what_transaction_saved() -> None:
    made, client, one = world()
    assert commit(client, made.txid(1, 1), offsets(5, order=8)).code == 200
    late = one.ask("save", [[*A0, 1, 2, None]], member="one", order=7)
    assert late.text == '{"refused": []}\n'
    assert saved(made) == (5, None)
    one.ask("save", [[*A0, 1, 3, None]], member="one", order=9)  # it went back: seek
    assert saved(made) == (3, None)


def test_deletion_of_the_topic_ends_holds_and_pending_saves() -> None:
    made, client, _ = world()
    prepare(client, made.txid(1, 1), offsets(5))
    client.ask("topic", "delete", "a")
    assert made.state.saved.held == {}
    made.checkpoint()
    made = restarted(made)
    client = made.session("1.0")
    assert made.state.saved.held == {}
    assert client.ask("commit", made.txid(1, 1), body=b"").code == 200
    assert made.state.saved.named[GROUP].offsets == {}
    assert restarted(made).state.saved.named[GROUP].offsets == {}


def test_generations_go_on_where_a_deleted_groups_ended() -> None:
    made, client, one = world()
    one.ask("leave", [], member="one")
    two = Consumer(made, "two").join()
    two.ask("leave", [], member="two")
    assert one.ask("delete", []).code == 200
    made.checkpoint()
    made = restarted(made)
    client = made.session("1.0")
    three = Consumer(made, "three").join()
    assert three.generation("a", 0) == after(made, 1)
    assert commit(client, made.txid(1, 1), offsets(5, 2)).error == "transaction-conflict"


def test_who_joins_again_has_lost_what_it_does_not_claim() -> None:
    """Another process of the same name must not be taken for the one before, whose requests may still be under way."""
    made, client, one = world()
    one.save(A0, 1, 4)
    again = Consumer(made, "one").join(["a", 1, 1])
    assert again.view["assigned"] == [[*A0, 2, 4, None], ["a", 1, 1, None, None], ["b", 0, 2, None, None]]
    assert one.save(A0, 1, 9) == [[*A0, 2]]
    assert commit(client, made.txid(1, 1), offsets(9)).error == "transaction-conflict"


def test_a_member_that_must_be_alone_bears_nobody_beside_it() -> None:
    made = node()
    Consumer(made, "one", alone=None).join()
    refused = Consumer(made, "two")
    assert refused.ask("join", [], **refused.words).error == "group-active"
    Consumer(made, "one", alone=None).join()
    made = node()
    Consumer(made, "one").join()
    refused = Consumer(made, "two", alone=None)
    assert refused.ask("join", [], **refused.words).error == "group-active"


def test_lone_commit_by_an_operator_saves_the_offset() -> None:
    made, client, _ = world()
    prepare(client, made.txid(1, 1), offsets(5))
    client.disconnect()
    other = made.session()
    assert other.ask("commit", made.txid(1, 1), extensions={"heuristic": "why"}, body=b"").code == 200
    assert saved(made) == (5, None)


def test_a_session_that_ends_leaves_what_its_prepared_transaction_holds() -> None:
    made, client, _ = world()
    put(client, b"m", producer=1)
    prepare(client, made.txid(1, 1), offsets(5))
    client.disconnect()
    made.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    assert (GROUP, 1, 0) in made.state.saved.held
