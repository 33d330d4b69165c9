"""Consumer groups in the broker: members, hand-over, generations, saved offsets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.broker.group_support import A0, A1, B0, GROUP, Consumer, after, describe, pass_time
from tests.unit.broker.support import Registry, node, restarted
from tools.images.node import Client, Node
from tools.images.requests import batch
from txmq.broker.client_connection import MEMBERS_OVER_MAX
from txmq.broker.verbs.group import group_coordinator as groups


def test_the_first_member_gets_everything_under_generation_one() -> None:
    one = Consumer(node(), "one").join()
    assert one.view["assigned"] == [["a", 0, 1, None, None], ["a", 1, 1, None, None], ["b", 0, 1, None, None]]


def test_connection_remembers_no_members_that_are_no_more() -> None:
    """One that joined again and again, each time as another process, was remembered each time."""
    one = Consumer(node(), "one")
    for number in range(500):
        one.words["incarnation"] = f"i{number}"
        one.join()
    assert len(one.client.client.members) <= MEMBERS_OVER_MAX + 2
    one.client.disconnect()
    pass_time(one.made, 10.0)
    assert one.made.context.groups == {}


def test_second_member_gets_its_share_after_release_others_are_untouched() -> None:
    made = node()
    one = Consumer(made, "one").join()
    two = Consumer(made, "two").join()
    assert (two.held, two.revoked) == ([], [])
    one.heartbeat()
    (released,) = one.revoked
    kept = one.held
    assert len(kept) == 2
    two.heartbeat()
    assert two.held == []
    one.heartbeat(released)
    two.heartbeat()
    assert (one.held, one.revoked, two.held) == (kept, [], [released])
    assert two.generation(*released) == 2
    assert {one.generation(*slot) for slot in kept} == {1}


def test_later_partitions_begin_at_their_first_message() -> None:
    made = node()
    one = Consumer(made, "one").join()
    asker = made.connect()
    assert asker.ask("topic", "alter", "a", extensions={"partitions": 3}).code == 200
    pass_time(made, 1.0)
    one.heartbeat()
    assert one.view["assigned"] == [
        ["a", 0, 1, None, None],
        ["a", 1, 1, None, None],
        ["a", 2, 1, 0, None],
        ["b", 0, 1, None, None],
    ]
    assert asker.ask("topic", "delete", "b").code == 200
    assert asker.ask("topic", "create", "b").code == 200
    pass_time(made, 1.0)
    one.heartbeat()
    assert next(row[3] for row in one.view["assigned"] if row[:2] == B0) == 0
    after = restarted(made)
    pass_time(after, 1.0)
    again = Consumer(after, "one").join()
    assert [row[3] for row in again.view["assigned"]] == [None, None, 0, 0]


def test_later_topic_with_lower_id_begins_at_first_message() -> None:
    made = node()
    made.context.ids = Registry(90, 50)
    made.connect().ask("topic", "create", "high")
    one = Consumer(made, "one", topics="high,low").join()
    assert one.view["assigned"] == [["high", 0, 1, None, None]]
    made.connect().ask("topic", "create", "low")
    pass_time(made, 1.0)
    one.heartbeat()
    assert one.view["assigned"] == [["high", 0, 1, None, None], ["low", 0, 1, 0, None]]


def test_what_was_not_revoked_cannot_be_released() -> None:
    one = Consumer(node(), "one").join()
    one.heartbeat(A0)
    assert one.held == [A0, A1, B0]


def test_an_offset_is_saved_under_the_newest_generation_only() -> None:
    made = node()
    one = Consumer(made, "one").join()
    assert one.save(A0, 1, 7, "two wait") == []
    assert one.save(A0, 0, 9) == [["a", 0, 1]]
    two = Consumer(made, "two").join()
    one.heartbeat()
    (released,) = one.revoked
    one.heartbeat(released)
    assert one.save(released, 1, 5) == [[*released, 2]]
    two.heartbeat()
    assert two.save(released, 2, 6) == []
    rows = {(row["topic"], row["partition"]): row for row in describe(made)["partitions"]}
    assert (rows["a", 0]["offset"], rows["a", 0]["deferred"]) == (7, "two wait")
    assert rows[tuple(released)]["offset"] == 6


def test_revoked_partition_may_still_be_saved_until_it_is_released() -> None:
    made = node()
    one = Consumer(made, "one").join()
    Consumer(made, "two").join()
    one.heartbeat()
    (revoked,) = one.revoked
    assert one.save(revoked, 1, 3) == []
    one.heartbeat(revoked)
    assert one.save(revoked, 1, 4) != []


def test_who_leaves_frees_its_partitions_at_once() -> None:
    made = node()
    one, two = Consumer(made, "one").join(), Consumer(made, "two").join()
    one.ask("leave", [], member="one")
    assert two.heartbeat().held == [A0, A1, B0]
    assert one.ask("heartbeat", [], member="one").error == "unknown-member"


def test_silent_member_is_removed_and_its_saves_are_refused() -> None:
    made = node()
    one = Consumer(made, "one", timeout=2000).join()
    two = Consumer(made, "two").join()
    pass_time(made, 1.9)
    assert two.heartbeat().held == []
    pass_time(made, 0.1)
    assert two.heartbeat().held == [A0, A1, B0]
    assert {two.generation(*slot) for slot in two.held} == {2}
    assert one.save(A0, 1, 99) == [["a", 0, 2]]


def stop_and_go_on(made: Node, seconds: float) -> None:
    """The process stands still; its timer is the first to run afterwards."""
    made.clock.advance(seconds)
    made.core.tick(made.clock.now_ms())


def test_broker_after_a_standstill_reads_before_it_judges_members() -> None:
    made = node()
    one, two = Consumer(made, "one", timeout=300).join(), Consumer(made, "two", timeout=300).join()
    one.heartbeat(B0)
    two.heartbeat()
    before = one.heartbeat().view["assigned"], two.heartbeat().view["assigned"]
    for _ in range(3):
        pass_time(made, 0.2)
        stop_and_go_on(made, 10.0)
        one.heartbeat()
        two.heartbeat()
    assert (one.view["assigned"], two.view["assigned"]) == before
    pass_time(made, 0.3)
    assert one.ask("heartbeat", [], member="one").error == "unknown-member"


def test_a_clock_that_is_set_forth_or_back_expels_nobody() -> None:
    made = node()
    one = Consumer(made, "one", timeout=300).join()
    for hours in (1, -2, 1):
        made.clock.jump(hours * 3_600_000)
        pass_time(made, 0.1)
        one.heartbeat()


def test_unread_connection_is_not_taken_for_silent() -> None:
    made = node()
    one = Consumer(made, "one", timeout=300).join()
    one.client.client.held = True
    pass_time(made, 2.0)
    made.core.read_again(one.client.client)
    pass_time(made, 0.2)
    one.heartbeat()
    for _ in range(20):
        made.clock.advance(0.05)
        made.core.tick(made.clock.now_ms(), is_reading=False)
    one.heartbeat()


def test_all_groups_together_have_a_bounded_number_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MEMBERS_OF_ALL_MAX", 2)
    made = node()
    client = made.connect()

    def join(group: str, member: str) -> int:
        words: dict[str, str | int | None] = {"member": member, "topics": "a", "timeout": 500}
        return client.ask("group", "join", group, extensions=words, body=b"").code

    assert [join("g", "one"), join("h", "two"), join("h", "three"), join("h", "two")] == [200, 200, 429, 200]
    client.ask("group", "leave", "g", extensions={"member": "one"}, body=b"")
    assert [join("h", "three"), join("g", "one")] == [200, 429]
    pass_time(made, 0.5)
    assert (join("g", "one"), made.context.member_count) == (200, 1)


def test_a_lost_connection_leaves_a_second_to_come_back() -> None:
    made = node()
    one, two = Consumer(made, "one").join(), Consumer(made, "two").join()
    one.client.disconnect()
    pass_time(made, 0.9)
    one.client = made.connect()
    one.heartbeat()
    pass_time(made, 0.2)
    assert two.heartbeat().held == []
    one.client.disconnect()
    pass_time(made, 1.0)
    assert two.heartbeat().held == [A0, A1, B0]


def test_a_heartbeat_waits_until_its_members_view_changes() -> None:
    made = node()
    one = Consumer(made, "one").join()
    words = {"member": "one", "view": one.view["view"], "wait": 10_000}
    opaque = one.client.send("group", "heartbeat", GROUP, extensions=words, body=b"")
    pass_time(made, 1.0)
    assert opaque not in one.client.received
    Consumer(made, "two").join()
    pass_time(made, 0.1)
    assert json.loads(one.client.received.pop(opaque).body)["revoked"]


def test_waiting_heartbeat_is_answered_in_time_and_keeps_its_member() -> None:
    made = node()
    one = Consumer(made, "one", timeout=1500).join()
    words = {"member": "one", "view": one.view["view"], "wait": 1000}
    opaque = one.client.send("group", "heartbeat", GROUP, extensions=words, body=b"")
    pass_time(made, 1.0)
    assert json.loads(one.client.received.pop(opaque).body)["view"] == one.view["view"]


def test_a_member_that_expires_while_it_waits_is_told() -> None:
    made = node()
    one = Consumer(made, "one", timeout=500).join()
    words = {"member": "one", "view": one.view["view"], "wait": 10_000}
    opaque = one.client.send("group", "heartbeat", GROUP, extensions=words, body=b"")
    pass_time(made, 0.5)
    assert one.client.received.pop(opaque).error == "unknown-member"


@pytest.mark.parametrize("checkpoint", [False, True])
def test_offsets_and_generations_survive_a_restart_and_members_go_on(checkpoint: bool) -> None:
    made = node()
    one = Consumer(made, "one").join()
    one.save(A0, 1, 7)
    if checkpoint:
        made.checkpoint()
    again = restarted(made)
    assert Consumer(again, "one").ask("heartbeat", [], member="one").error == "unknown-member"
    back = Consumer(again, "one").join(["a", 0, 1], ["a", 1, 1])
    assert back.view["assigned"][0] == ["a", 0, 1, 7, None]
    assert [row[2] for row in back.view["assigned"]] == [1, 1]
    pass_time(again, 1.0)  # nobody claims the third
    assert [row[2] for row in back.heartbeat().view["assigned"]] == [1, 1, after(again, 1)]


def test_first_member_after_a_restart_does_not_take_everything() -> None:
    made = node()
    one, two = Consumer(made, "one").join(), Consumer(made, "two").join()
    one.heartbeat()
    one.heartbeat(*one.revoked)
    two.heartbeat()
    held = [[row[:3] for row in member.view["assigned"]] for member in (one, two)]
    again = restarted(made)
    first = Consumer(again, "one").join(*held[0])
    assert [row[:3] for row in first.view["assigned"]] == held[0]
    pass_time(again, 0.9)
    second = Consumer(again, "two").join(*held[1])
    pass_time(again, 5.0)
    assert [[row[:3] for row in member.heartbeat().view["assigned"]] for member in (first, second)] == held


def test_partitions_handed_over_since_the_restart_are_free_at_leave() -> None:
    again = restarted(node())
    one, two = Consumer(again, "one").join(), Consumer(again, "two").join()
    one.ask("leave", [], member="one")
    assert two.heartbeat().held == [A0, A1, B0]


def test_claim_of_an_old_generation_or_owned_partition_is_ignored() -> None:
    made = node()
    one = Consumer(made, "one").join()
    again = restarted(made)
    two = Consumer(again, "two").join()
    pass_time(again, 1.0)
    assert {row[2] for row in two.heartbeat().view["assigned"]} == {after(again, 1)}
    late = Consumer(again, "one").join(*([*row[:2], row[2]] for row in one.view["assigned"]))
    assert late.held == []


def test_a_topic_that_comes_later_or_grows_is_shared_out() -> None:
    made = node()
    one = Consumer(made, "one", topics="a,later").join()
    assert one.held == [A0, A1]
    client = made.connect()
    client.ask("topic", "create", "later", extensions={"partitions": 2})
    client.ask("topic", "alter", "a", extensions={"partitions": 3})
    pass_time(made, 0.1)
    assert one.heartbeat().held == [A0, A1, ["a", 2], ["later", 0], ["later", 1]]
    client.ask("topic", "delete", "a")
    pass_time(made, 0.1)
    assert one.heartbeat().held == [["later", 0], ["later", 1]]


def test_deleted_topics_offsets_do_not_come_back_with_its_name() -> None:
    made = node()
    one = Consumer(made, "one").join()
    one.save(B0, 1, 7)
    client = made.connect()
    client.ask("topic", "delete", "b")
    client.ask("topic", "create", "b")
    pass_time(made, 0.1)
    again = restarted(made)
    pass_time(again, 1.0)
    assert Consumer(again, "one").join().view["assigned"][-1][:4] == ["b", 0, after(again, 1), 0]


def test_members_agree_on_a_strategy() -> None:
    made = node()
    Consumer(made, "one", strategy="range").join()
    answer = Consumer(made, "two").ask("join", [], member="two", topics="a")
    assert (answer.error, "range" in answer.text) == ("bad-request", True)


@pytest.mark.parametrize(
    ("action", "words", "body"),
    [
        ("jion", {}, b""), ("join", {}, b""), ("join", {"member": "m"}, b""),
        ("join", {"member": "m", "topics": "a", "timeout": 1}, b""),
        ("join", {"member": "m", "topics": "a", "strategy": "best"}, b""),
        ("join", {"member": "m", "topics": "a"}, b"{"), ("join", {"member": "m", "topics": "a"}, b"{}"),
        ("join", {"member": "m", "topics": "a"}, b"[1]"), ("join", {"member": "m", "topics": "a"}, b'[["a", 0]]'),
        ("join", {"member": "m", "topics": "a"}, b'[["a", 0, "1"]]'), ("save", {"member": "m"}, b'[["a", 0, 1]]'),
        ("save", {"member": "m"}, b'[["a", 0, 1, -1, null]]'), ("save", {"member": "m"}, b'[["a", 0, 1, 1, 5]]'),
        ("save", {"member": "m"}, b'[["a", true, 1, 1, null]]'), ("reset", {}, b'[["a", 0, -1]]'),
        ("deferred", {}, b'[["a", 0, null]]'), ("deferred", {}, b'[["a", 0, null, 5]]'),
        ("deferred", {}, b'[["a", 0, null, null]]'),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused(action: str, words: dict[str, Any], body: bytes) -> None:
    answer = node().connect().ask("group", action, GROUP, extensions=words, body=body)
    assert answer.error == "bad-request", answer


def test_nobody_hears_of_a_partition_before_its_generation_is_forced() -> None:
    made = node()
    client: Client = made.connect()
    opaque = client.send("group", "join", GROUP, extensions={"member": "m", "topics": "a"}, body=b"")
    made.flush()
    assert opaque not in client.received
    made.pump()
    assert client.received[opaque].code == 200
    assert restarted(made).state.saved.named[GROUP].generations == {(1, 0): 1, (1, 1): 1}


def test_empty_group_takes_no_memory_but_its_offsets() -> None:
    made = node()
    one = Consumer(made, "one").join()
    batch(b"x")
    one.client.disconnect()
    pass_time(made, 1.0)
    assert made.context.groups == {}
    assert describe(made)["members"] == []


def test_returned_member_survives_the_end_of_its_older_connection() -> None:
    broker = node()
    one = Consumer(broker, "one").join()
    older, one.client = one.client, broker.connect()
    one.heartbeat()
    older.disconnect()
    pass_time(broker, 1.5)
    assert describe(broker)["members"][0]["connected"]
    one.client.disconnect()
    pass_time(broker, 1.5)
    assert describe(broker)["members"] == []


def test_recreated_topic_is_another_one_and_its_generations_go_on() -> None:
    made = node()
    one = Consumer(made, "one").join()
    one.save(A0, 1, 7)
    operator = made.connect()
    assert operator.ask("topic", "delete", "a").code == 200
    assert operator.ask("topic", "create", "a", extensions={"partitions": 2}).code == 200
    one.heartbeat()  # nothing was heard in between
    assert one.view["assigned"] == [["a", 0, 2, 0, None], ["a", 1, 2, 0, None], ["b", 0, 1, None, None]]
    assert one.save(A0, 1, 8) == [["a", 0, 2]]


def test_late_save_does_not_count_for_the_recreated_topic() -> None:
    broker = node()
    one = Consumer(broker, "one", topics="a").join()
    generation = one.generation("a", 0)
    operator = broker.connect()
    assert operator.ask("topic", "delete", "a").code == 200
    assert operator.ask("topic", "create", "a", extensions={"partitions": 2}).code == 200
    assert one.save(A0, generation, 5) == [["a", 0, 0]]  # before anybody has looked at the members again
    assert one.heartbeat().view["assigned"][0] == ["a", 0, generation + 1, 0, None]


def test_topic_made_anew_while_broker_was_restarted_is_not_claimed() -> None:
    made = node()
    one = Consumer(made, "one").join()
    held = [row[:3] for row in one.view["assigned"]]
    operator = made.connect()
    operator.ask("topic", "delete", "a")
    operator.ask("topic", "create", "a", extensions={"partitions": 2})
    made = restarted(made)
    first, again = after(made, 1), Consumer(made, "one").join(*held)
    assert again.view["assigned"] == [["a", 0, first, None, None], ["a", 1, first, None, None], ["b", 0, 1, None, None]]


def test_join_under_taken_name_gets_everything_and_fences_other() -> None:
    made = node()
    elder, younger = Consumer(made, "same", incarnation="1"), Consumer(made, "same", incarnation="2")
    old = elder.join().generation("a", 0)
    waits = elder.client.send("group", "heartbeat", GROUP, body=b"[]", extensions={
        "member": "same", "incarnation": "1", "view": elder.view["view"], "wait": 30_000,
    })  # fmt: skip
    assert younger.join().held == [A0, A1, B0]
    pass_time(made, 0.1)
    waited = elder.client.received.pop(waits)
    assert (waited.code, b"name of its own" in waited.body) == (410, True)
    assert elder.ask("heartbeat", [], member="same", incarnation="1").code == 410
    assert elder.save(A0, old, 5) == [[*A0, younger.generation("a", 0)]]
    assert elder.ask("leave", [], member="same", incarnation="1").code == 200
    elder.client.disconnect()
    pass_time(made, 2.0)
    assert younger.heartbeat().held == [A0, A1, B0]
    assert younger.ask("heartbeat", [], member="same", incarnation="2").code == 200


def test_new_topic_is_told_to_some_groups_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WORK_A_TICK", 10 * groups.GROUP_WORK)
    made = node()
    client = made.connect()
    for number in range(25):
        words = {"member": "m", "topics": "a,new"}
        assert client.ask("group", "join", f"g{number}", extensions=words, body=b"[]").code == 200
    pass_time(made, 0.1)
    assert client.ask("topic", "create", "new").code == 200
    told = []
    for _ in range(4):
        made.core.tick(made.clock.now_ms())
        told.append(sum(("new", 0) in membership.owned for membership in made.context.groups.values()))
    assert told == [10, 20, 25, 25]


def test_member_whose_group_is_not_told_hears_with_its_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WORK_A_TICK", 0)
    made = node()
    one = Consumer(made, "one", topics="a,b,new").join()
    assert made.connect().ask("topic", "create", "new").code == 200
    made.core.tick(made.clock.now_ms())
    assert one.heartbeat().held == [A0, A1, B0, ["new", 0]]
