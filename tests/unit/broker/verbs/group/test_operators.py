"""What operators see of consumer groups, and what they change: offsets, what is deferred, deletion, how many there
are."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.broker.group_support import A0, GROUP, Consumer, describe, pass_time
from tests.unit.broker.support import node, put, restarted
from tools.images.node import Answer, Node


def test_lag_counts_what_is_not_consumed() -> None:
    made = node()
    put(made.connect(), b"x", b"y", b"z")
    one = Consumer(made, "one").join()
    one.save(A0, 1, 1)
    rows = describe(made)["partitions"]
    assert [(row["topic"], row["partition"], row["lag"], row["owner"]) for row in rows] == [
        ("a", 0, 2, "one"), ("a", 1, 0, "one"), ("b", 0, 0, "one"),
    ]  # fmt: skip


def test_offsets_are_reset_only_while_nobody_consumes() -> None:
    made = node()
    one = Consumer(made, "one").join()
    one.save(A0, 1, 7)
    assert one.ask("reset", [["a", 0, 2]]).error == "group-active"
    assert one.ask("delete", []).error == "group-active"
    one.ask("leave", [], member="one")
    assert one.ask("reset", [["a", 0, 2], ["a", 9, 2]]).error == "unknown-topic"
    assert one.ask("reset", [["a", 0, 2]]).code == 200
    assert one.join().view["assigned"][0][3] == 2
    one.ask("leave", [], member="one")
    assert one.ask("delete", []).code == 200
    assert one.ask("describe", []).error == "unknown-group"
    assert json.loads(made.connect().ask("group", "list", "*", body=b"").body) == {"groups": []}


def test_deferred_state_is_changed_only_from_its_known_value() -> None:
    made = node()
    one = Consumer(made, "one").join()
    one.save(A0, 1, 7, "[[3,1,null]]")
    one.save(["a", 1], 1, 5, "[[2,1,null]]")
    client = made.connect()

    def change(known: str | None, wanted: str | None) -> Any:
        rows = json.dumps([["a", 0, known, wanted]]).encode()
        return json.loads(client.ask("group", "deferred", GROUP, body=rows).body)["refused"]

    assert change("[[3,2,null]]", None) == [["a", 0, "[[3,1,null]]"]]  # it has changed since
    assert one.heartbeat().generation("a", 0) == 1
    assert change("[[3,1,null]]", None) == []
    assert one.save(A0, 1, 8, "[[3,1,null]]")[0][:2] == ["a", 0]  # what it knows is of before
    row = next(row for row in one.heartbeat().view["assigned"] if row[:2] == A0)
    assert (row[2] > 1, row[3:]) == (True, [7, None])
    assert one.generation("a", 1) == 1  # the other partition goes on
    assert one.save(A0, row[2], 8) == []
    one.ask("leave", [], member="one")
    assert change(None, "[[3,0,null]]") == []
    again = restarted(made)
    pass_time(again, 1.0)
    assert Consumer(again, "two").join().view["assigned"][0][3:] == [8, "[[3,0,null]]"]


def test_reset_of_an_unknown_group_needs_leave_to_create_it() -> None:
    made = node()
    asker, body = made.connect(), json.dumps([["a", 0, 0]]).encode()
    slip = asker.ask("group", "reset", "biling", body=body)
    assert (slip.code, slip.error) == (404, "unknown-group")
    assert json.loads(asker.ask("group", "list", "*", body=b"").body)["groups"] == []
    assert asker.ask("group", "reset", "reports", extensions={"create": None}, body=body).code == 200
    assert asker.ask("group", "reset", "reports", body=body).code == 200
    assert [row["group"] for row in json.loads(asker.ask("group", "list", "*", body=b"").body)["groups"]] == ["reports"]


def test_reset_of_an_unknown_partition_is_refused() -> None:
    body = json.dumps([["a", 9, 0]]).encode()
    refused = node().connect().ask("group", "reset", "reports", extensions={"create": None}, body=body)
    assert (refused.code, refused.error) == (404, "unknown-topic")


def test_member_that_was_taken_for_gone_does_not_undo_reset() -> None:
    made = node()
    one = Consumer(made, "one", timeout=500).join()
    one.save(A0, 1, 7)
    pass_time(made, 1.0)
    assert one.ask("reset", [["a", 0, 2]]).code == 200
    back = Consumer(made, "one").join(["a", 0, 1], ["a", 1, 1])
    assert back.view["assigned"][:2] == [["a", 0, 3, 2, None], ["a", 1, 1, None, None]]
    assert back.save(A0, 1, 7) == [["a", 0, 3]]


def test_partitions_that_nobody_has_read_are_described_with_their_lag() -> None:
    made = node()
    one = Consumer(made, "one", topics="a").join()
    one.save(A0, 1, 0)
    one.ask("leave", [], member="one")
    put(made.connect(), b"x", b"y", partition=1)
    rows = describe(made)["partitions"]
    assert [(row["topic"], row["partition"], row["offset"], row["lag"]) for row in rows] == [
        ("a", 0, 0, 0), ("a", 1, None, 2),
    ]  # fmt: skip


def test_offset_that_operator_set_for_partition_to_come_stays() -> None:
    made = node()
    one = Consumer(made, "one").join()
    one.ask("leave", [], member="one")
    asker = made.connect()
    assert asker.ask("topic", "alter", "a", extensions={"partitions": 3}).code == 200
    put(asker, b"1", b"2", b"3", partition=2)
    assert asker.ask("group", "reset", GROUP, body=json.dumps([["a", 2, 3]]).encode()).code == 200
    pass_time(made, 1.0)
    two = Consumer(made, "two").join()
    assert next(row[3] for row in two.view["assigned"] if row[:2] == ["a", 2]) == 3


def _join(made: Node, group: str) -> Answer:
    return made.connect().ask("group", "join", group, extensions={"member": "one", "topics": "a"}, body=b"")


def test_groups_are_bounded_and_those_that_are_kept_go_on() -> None:
    """A name that nobody uses again is kept for ever: a new one for each process would fill the broker."""
    made = node(groups_max=2)
    assert [_join(made, name).code for name in ("one", "two", "one")] == [200, 200, 200]
    for refused in (
        _join(made, "three"),
        made.connect().ask("group", "reset", "three", extensions={"create": None}, body=b'[["a", 0, 1]]'),
    ):
        assert (refused.code, refused.error) == (429, "overloaded")
        assert "groups_max" in refused.text
        assert "txmq group delete" in refused.text
    assert sorted(made.state.saved.named) == ["one", "two"]
    pass_time(made, 10.0)  # nobody is in them any more, and they are kept
    again = restarted(made)
    assert (_join(again, "three").code, _join(again, "two").code) == (429, 200)
    assert again.connect().ask("group", "reset", "one", body=b'[["a", 0, 1]]').code == 200
    assert again.connect().ask("group", "delete", "one", body=b"").code == 200
    assert _join(again, "three").code == 200


def test_group_that_has_nothing_yet_counts() -> None:
    made = node(groups_max=1)
    words = {"member": "one", "topics": "not-yet"}
    assert made.connect().ask("group", "join", "one", extensions=words, body=b"").code == 200
    assert _join(made, "two").error == "overloaded"
