"""Consumer groups in the broker: what they cost in memory and by tick, ids of topics, a connection that is not read."""

from __future__ import annotations

import pytest

from tests.unit.broker.group_support import Consumer, describe, pass_time
from tests.unit.broker.support import Registry, node
from txmq.broker.client_connection import MEMBERS_OVER_MAX
from txmq.broker.verbs import group_coordinator as groups


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


def test_empty_group_takes_no_memory_but_its_offsets() -> None:
    made = node()
    one = Consumer(made, "one").join()
    one.client.disconnect()
    pass_time(made, 1.0)
    assert made.context.groups == {}
    assert describe(made)["members"] == []


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
