"""A decision never waits; its messages wait for their place after open branches of the same keys."""

from __future__ import annotations

import pytest

from tools.images.requests import batch

from ..homes_support import commit, listed, prepare_branch, two_homes
from ..support import put, stated, values

both = pytest.mark.parametrize("with_checkpoint", [False, True])


@both
def test_decision_is_placed_behind_an_open_branch_of_its_key(with_checkpoint: bool) -> None:
    here, there = two_homes()
    client = there.session()
    assert prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"first")).code == 200
    assert commit(client, there.txid(1, 2), ("a", 0, b"second"), ("b", 0, b"too")).text == "a 0 - 1\nb 0 - 1\n"
    assert commit(client, there.txid(1, 2), ("a", 0, b"second"), ("b", 0, b"too")).text == "a 0 - 1\nb 0 - 1\n"
    assert client.ask("outcome", there.txid(1, 2)).text == "committed\na 0 - 1\nb 0 - 1\n"
    assert [row["state"] for row in listed(client)] == ["prepared", "placing"]
    there = there.again(checkpoint=with_checkpoint)
    client = there.session("1.0")
    assert (values(there), values(there, "b")) == ([], [])
    waiting = client.send("commit", there.txid(1, 2), body=b"")
    there.pump()
    assert waiting not in client.received
    assert commit(client, there.txid(1, 1)).text == "a 0 0 1\n"
    assert client.received.pop(waiting).text == "a 0 1 1\nb 0 0 1\n"
    assert (values(there), values(there, "b")) == ([b"first", b"second"], [b"too"])
    assert client.ask("rollback", there.txid(1, 2)).error == "transaction-conflict"
    again = there.again()
    assert (values(again), values(again, "b")) == ([b"first", b"second"], [b"too"])


def test_decision_goes_on_when_the_branch_is_rolled_back() -> None:
    here, there = two_homes()
    client = there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"first"), keys="*")
    assert commit(client, there.txid(1, 2), ("a", 0, b"second")).text == "a 0 - 1\n"
    client.ask("rollback", there.txid(1, 1))
    assert client.ask("outcome", there.txid(1, 2)).text == "committed\na 0 0 1\n"
    assert values(there) == [b"second"]


@pytest.mark.parametrize(("keys", "waits"), [(7, True), ("*", True), (8, False), ("", False)])
def test_only_messages_of_the_same_partition_and_key_wait(keys: object, waits: bool) -> None:
    here, there = two_homes()
    client = there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"first"))
    assert commit(client, there.txid(1, 2), ("a", 1, b"v"), keys=keys).text == "a 1 0 1\n"
    assert commit(client, there.txid(1, 3), ("a", 0, b"v"), keys=keys).text == f"a 0 {'-' if waits else 0} 1\n"


def test_what_was_streamed_waits_for_a_branch_of_any_key() -> None:
    here, there = two_homes()
    client = there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"first"))
    content = batch(b"second")
    client.ask("put", "a", 0, extensions={"tx": there.txid(1, 2)}, body=content)
    answer = client.ask("commit", there.txid(1, 2), extensions=stated([content]), body=b"")
    assert answer.text == "a 0 - 1\n"
    assert put(client, b"plain", producer=1).text == "0\n"
    assert commit(client, there.txid(1, 1)).code == 200
    assert values(there) == [b"plain", b"first", b"second"]


def test_later_branch_waits_for_the_earlier_one() -> None:
    here, there = two_homes()
    client = there.session()
    for counter, value in ((1, b"first"), (2, b"second")):
        prepare_branch(client, there.txid(1, counter), here.txid(1, counter), ("a", 0, value))
    told = client.send("commit", there.txid(1, 2), body=b"")
    there.pump()
    assert told not in client.received
    commit(client, there.txid(1, 1))
    assert client.received.pop(told).text == "a 0 1 1\n"
    assert values(there) == [b"first", b"second"]


def test_two_transactions_that_cross_over_two_homes_both_end() -> None:
    one, two = two_homes()
    clients = one.session(), two.session()
    mine, its = (one.txid(1, 1), two.txid(1, 2)), (one.txid(1, 2), two.txid(1, 1))
    prepare_branch(clients[1], mine[1], mine[0], ("a", 0, b"mine"))
    prepare_branch(clients[0], its[0], its[1], ("a", 0, b"its"))
    assert commit(clients[0], mine[0], ("a", 0, b"mine"), homes=mine[1]).text == "a 0 - 1\n"
    assert commit(clients[1], its[1], ("a", 0, b"its"), homes=its[0]).text == "a 0 - 1\n"
    one, two = one.again(), two.again(checkpoint=True)
    clients = one.session("1.0"), two.session("1.0")
    assert clients[0].ask("outcome", mine[0], extensions={"branch": mine[1]}).text == "committed\n"
    assert commit(clients[1], mine[1]).text == "a 0 0 1\n"
    assert commit(clients[0], its[0]).text == "a 0 0 1\n"
    assert (values(one), values(two)) == ([b"its", b"mine"], [b"mine", b"its"])
    clients[0].ask("complete", mine[0], extensions={"branch": mine[1]})
    clients[1].ask("complete", its[1], extensions={"branch": its[0]})
    assert [row["state"] for client in clients for row in listed(client)] == ["placed", "placed"]  # to be reported
    assert (one.state.sessions[1].owed, two.state.sessions[1].owed) == (0, 0)


def test_report_may_come_before_the_decision_is_placed() -> None:
    one, two = two_homes()
    client = one.session()
    prepare_branch(client, one.txid(1, 1), two.txid(1, 1), ("a", 0, b"first"))
    of, txid = one.txid(1, 2), two.txid(1, 2)
    assert commit(client, of, ("a", 0, b"v"), homes=txid).text == "a 0 - 1\n"
    assert client.ask("complete", of, extensions={"branch": txid}).code == 200
    assert [(row["state"], row["is_placed"]) for row in listed(client, txid=of)] == [("decided", False)]
    commit(client, one.txid(1, 1))
    assert listed(client, txid=of) == []
    assert values(one) == [b"first", b"v"]
    assert one.state.sessions[1].owed == 0


def test_decision_is_placed_whenever_the_broker_dies() -> None:
    for steps in range(1, 12):
        here, there = two_homes()
        object.__setattr__(there.settings, "group_size_bytes_max", 1)  # each entry has a record of its own
        client = there.session()
        prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"first"))
        for counter in (2, 3):
            commit(client, there.txid(1, counter), ("a", 0, b"%d" % counter))
        client.send("commit", there.txid(1, 1), body=b"")
        there.run_steps(steps)
        there = there.again()
        there.pump()
        client = there.connect()
        if client.ask("outcome", there.txid(1, 1)).text == "prepared\n":
            commit(client, there.txid(1, 1))
        assert values(there) == [b"first", b"2", b"3"], steps
        assert len(there.state.prepared) == 0


def test_nothing_waits_if_no_branch_is_open() -> None:
    here, there = two_homes()
    client = there.session()
    for counter in range(1, 6, 2):
        prepare_branch(client, there.txid(1, counter), here.txid(1, counter), ("a", 0, b"x"))
        commit(client, there.txid(1, counter))
        assert "-" not in commit(client, there.txid(1, counter + 1), ("a", 0, b"y")).text
    assert there.state.order.in_common == 0
