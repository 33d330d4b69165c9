"""Rows of an outbox: each number once and in order, placed behind what was prepared before."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import UUID, batch, part
from txmq.broker.state.outboxes import ROWS_KEPT, SERIES_MAX, DrainedRow

from ...homes_support import listed, prepare_branch, two_homes
from ...support import node, prepare, put, restarted, values

SERIES = "5e" * 16
KEY = 7


def drain(client: Client, number: int, value: bytes = b"", **changes: Any) -> Answer:
    """Commit a row of the outbox; without a value it has no messages."""
    words, fields = _words(client, number, value, **changes)
    return client.ask("commit", *words, **fields)


def send(client: Client, number: int, value: bytes = b"", **changes: Any) -> bytes:
    """The same; its answer is not awaited."""
    words, fields = _words(client, number, value, **changes)
    return client.send("commit", *words, **fields)


def _words(
    client: Client, number: int, value: bytes, *, row: str = "", counter: int = 0, session: int = 1, keys: object = KEY,
    topic: str = "a", series: str = SERIES, uuid: str = UUID, **more: str | int,
) -> tuple[list[str], dict[str, Any]]:  # fmt: skip
    words = {"drained": series, "number": number, "row": row or f"row-{number}", "uuid": uuid, **more}
    body = part(topic, 0, batch(value), str(keys)) if value else b""
    return [client.node.txid(session, counter or number)], {"extensions": words, "body": body}


def known(client: Client, **words: int) -> tuple[int, dict[str, str]]:
    """What the broker tells of the series."""
    told = json.loads(client.ask("drained", SERIES, extensions=words).body)
    return told["last"], told["rows"]


def again(broker: Node, *, checkpoint: bool) -> Client:
    """A new session with the broker's next life."""
    if checkpoint:
        broker.checkpoint()
    return restarted(broker).session("new")


both = pytest.mark.parametrize("checkpoint", [False, True])


def test_rows_are_placed_in_the_order_of_their_numbers() -> None:
    client = node().session()
    assert known(client) == (0, {})
    assert drain(client, 1, b"one").text == "a 0 0 1\n"
    assert drain(client, 2, b"two").text == "a 0 1 1\n"
    assert values(client.node) == [b"one", b"two"]
    assert known(client) == (2, {"1": "row-1", "2": "row-2"})
    assert known(client, **{"from": 2}) == (2, {"2": "row-2"})


@both
def test_a_row_sent_twice_is_placed_once(*, checkpoint: bool) -> None:
    broker = node()
    client = broker.session()
    assert drain(client, 1, b"one").text == drain(client, 1, b"one", counter=5).text == "a 0 0 1\n"
    client = again(broker, checkpoint=checkpoint)
    session = client.node.newest_session
    assert drain(client, 1, b"one", session=session).text == "a 0 0 1\n"
    assert drain(client, 2, b"two", session=session).text == "a 0 1 1\n"
    assert values(client.node) == [b"one", b"two"]
    assert known(client) == (2, {"1": "row-1", "2": "row-2"})


def test_a_repeated_row_of_an_ended_session_has_no_lines() -> None:
    client = node().session()
    drain(client, 1, b"one")
    client.node.state.end_session(1)
    client = client.node.session()
    assert drain(client, 1, b"one", session=2) == Answer(200, b"")


@pytest.mark.parametrize(("number", "row"), [(2, "row-2"), (4, "row-4"), (1, "another")])
def test_a_number_that_is_not_next_is_refused(number: int, row: str) -> None:
    client = node().session()
    first = 0 if number == 2 else 2
    for earlier in range(1, first + 1):
        assert drain(client, earlier, b"v").code == 200
    answer = drain(client, number, b"v", row=row, counter=9)
    assert answer.error == "out-of-turn"
    assert answer.text.endswith(f"number {number} of outbox series {SERIES}: the next is {first + 1}\n")
    assert (known(client)[0], len(values(client.node))) == (first, first)
    assert drain(client, first + 1, b"v", counter=9).code == 200


def test_behind_a_refused_number_all_is_refused_until_asked() -> None:
    """A drainer has read rows 1 to 3; then row 1 was kept back, and rows 2 and 3 behind it, if of its key."""
    broker = node()
    slow, other = broker.session(), broker.session()
    for client in (slow, other):
        assert known(client) == (0, {})
    assert drain(other, 1, row="void", session=2) == Answer(200, b"")
    assert drain(slow, 1, b"first").error == "out-of-turn"
    answer = drain(slow, 2, b"second")
    assert (answer.error, "ask drained" in answer.text) == ("out-of-turn", True)
    assert drain(other, 2, b"of another key", session=2).code == 200
    assert drain(slow, 2, b"of another key", row="row-2").code == 200  # as it is there
    assert drain(slow, 3, b"third").error == "out-of-turn"
    assert known(slow)[0] == 2
    assert drain(slow, 3, b"first", row="row-1").code == 200
    assert values(broker) == [b"of another key", b"first"]


def test_rows_behind_one_that_was_not_sent_are_refused() -> None:
    broker = node()
    slow, other = broker.session(), broker.session()
    assert known(slow) == (0, {})
    assert drain(other, 1, b"one", session=2).code == 200
    assert drain(slow, 2, b"two").error == "out-of-turn"
    assert drain(slow, 1, b"one").code == 200
    assert drain(slow, 2, b"two").code == 200


def test_connection_drains_so_many_series() -> None:
    client = node().session()
    for number in range(SERIES_MAX):
        assert client.ask("drained", f"{number:032x}").code == 200
    assert client.ask("drained", SERIES).error == "overloaded"
    assert drain(client, 1, b"v").error == "overloaded"
    assert client.ask("drained", f"{1:032x}").code == 200


def test_a_number_beyond_the_remembered_rows_is_refused() -> None:
    client = node().session()
    for number in range(1, ROWS_KEPT + 2):
        client.node.state.outboxes.take(SERIES, number, DrainedRow(f"row-{number}", 1, number))
    assert drain(client, 1).error == "out-of-turn"
    assert drain(client, 2).code == 200


def test_a_row_without_messages_uses_up_its_number() -> None:
    client = node().session()
    assert drain(client, 1, row="void") == Answer(200, b"")
    assert drain(client, 1, row="row-1", value=b"v", counter=2).error == "out-of-turn"
    assert drain(client, 2, b"two").text == "a 0 0 1\n"
    assert known(restarted(client.node).session()) == (2, {"1": "void", "2": "row-2"})


def test_a_refused_row_takes_no_number() -> None:
    client = node().session()
    assert drain(client, 1, b"v", topic="gone").error == "unknown-topic"
    assert drain(client, 1, b"v", session=7).error == "never-issued"
    assert known(client) == (0, {})
    assert drain(client, 1, b"v").code == 200


@both
@pytest.mark.parametrize(("keys", "prepared_keys"), [(KEY, KEY), ("*", KEY), (KEY, "*")])
def test_a_row_waits_behind_an_earlier_prepared_one(keys: object, prepared_keys: object, *, checkpoint: bool) -> None:
    broker = node()
    client = broker.session()
    prepare(client, broker.txid(1, 50), ("a", 0, batch(b"first")), keys=prepared_keys)
    waiting = send(client, 1, b"second", keys=keys)
    broker.pump()
    assert waiting not in client.received
    assert known(client) == (1, {"1": "row-1"})
    (row,) = [row for row in listed(client) if row["state"] == "placing"]
    assert (row["kind"], row["uuid"], row["drained"], row["number"], row["row"]) == ("local", UUID, SERIES, 1, "row-1")
    client = again(broker, checkpoint=checkpoint)
    repeated = send(client, 1, b"second", session=client.node.newest_session, keys=keys)
    client.node.pump()
    assert repeated not in client.received
    assert client.ask("commit", broker.txid(1, 50), body=b"").text == "a 0 0 1\n"
    assert client.received[repeated].text == "a 0 1 1\n"
    assert values(client.node) == values(restarted(client.node)) == [b"first", b"second"]


def test_requests_of_connections_that_are_gone_do_not_pile_up() -> None:
    broker = node()
    prepare(broker.session(), broker.txid(1, 50), ("a", 0, batch(b"first")), keys=KEY)
    for session in range(2, 6):
        drainer = broker.session("new")
        send(drainer, 1, b"second", session=session)
        broker.pump()
        drainer.disconnect()
        broker.pump()
    last = broker.session("new")
    waiting = send(last, 1, b"second", session=6)
    broker.pump()
    (row,) = [one for one in broker.core.context.state.transactions.values() if one.meta.get("row") == "row-1"]
    assert len(row.waiting) == 1
    assert last.ask("rollback", broker.txid(1, 50)).code == 200
    assert last.received[waiting].text == "a 0 0 1\n"


def test_waiting_row_goes_on_when_the_prepared_one_rolls_back() -> None:
    client = node().session()
    prepare(client, client.node.txid(1, 50), ("a", 0, batch(b"first")), keys=KEY)
    waiting = send(client, 1, b"second")
    client.ask("rollback", client.node.txid(1, 50))
    assert client.received[waiting].text == "a 0 0 1\n"


@pytest.mark.parametrize(
    "changes", [{"keys": 8}, {"keys": ""}, {"uuid": "ab" * 16}, {"topic": "b"}], ids=lambda changes: next(iter(changes))
)
def test_a_row_of_other_keys_or_resource_waits_for_nobody(changes: dict[str, Any]) -> None:
    client = node().session()
    prepare(client, client.node.txid(1, 50), ("a", 0, batch(b"first")), keys=KEY)
    assert drain(client, 1, b"v", **changes).code == 200


def test_later_rows_of_the_key_wait_and_others_pass() -> None:
    client = node().session()
    prepare(client, client.node.txid(1, 50), ("a", 0, batch(b"first")), keys=KEY)
    waiting = [send(client, 1, b"one"), send(client, 2, b"two")]
    assert drain(client, 3, b"other", keys=8).text == "a 0 0 1\n"
    client.ask("rollback", client.node.txid(1, 50))
    assert [client.received[one].text for one in waiting] == ["a 0 1 1\n", "a 0 2 1\n"]
    assert values(client.node) == [b"other", b"one", b"two"]


def test_prepared_one_behind_a_waiting_row_is_placed_behind_it() -> None:
    client = node().session()
    prepare(client, client.node.txid(1, 50), ("a", 0, batch(b"first")), keys=KEY)
    waiting = send(client, 1, b"second")
    prepare(client, client.node.txid(1, 51), ("a", 0, batch(b"third")), keys=KEY)
    third = client.send("commit", client.node.txid(1, 51), body=b"")
    client.node.pump()
    assert third not in client.received
    client.ask("commit", client.node.txid(1, 50), body=b"")
    assert (client.received[waiting].text, client.received[third].text) == ("a 0 1 1\n", "a 0 2 1\n")


def test_the_txid_of_a_row_takes_no_other_number() -> None:
    client = node().session()
    drain(client, 1, b"one", counter=4)
    assert drain(client, 2, b"two", counter=4).error == "transaction-conflict"
    client.ask("put", "a", 0, extensions={"tx": client.node.txid(1, 5)}, body=batch(b"part"))
    assert drain(client, 2, b"two", counter=5).error == "transaction-conflict"
    assert known(client) == (1, {"1": "row-1"})


def test_only_the_owner_of_the_txid_drains() -> None:
    client = node().session()
    other = client.node.session()
    assert drain(other, 1, b"v", session=1).error == "other-session"


@pytest.mark.parametrize(
    "words",
    [
        {"drained": SERIES}, {"number": 1}, {"row": "r", "uuid": UUID}, {"drained": SERIES, "number": 1, "row": "r"},
        {"drained": SERIES, "number": 0, "row": "r", "uuid": UUID},
        {"drained": SERIES, "number": 1, "row": "R", "uuid": UUID},
        {"drained": SERIES, "number": 1, "row": "r" * 65, "uuid": UUID},
        {"drained": SERIES, "number": 1, "row": "r", "uuid": UUID, "offsets": 0},
        {"drained": SERIES, "number": 1, "row": "r", "uuid": UUID, "homes": "x"},
        {"drained": SERIES, "number": 1, "row": "r", "uuid": UUID, "heuristic": "x"},
        {"drained": SERIES, "number": 1, "row": "r", "uuid": UUID, "parts": 1},
    ],
)  # fmt: skip
def test_words_that_do_not_fit_a_row_are_refused(words: dict[str, Any]) -> None:
    client = node().session()
    assert client.ask("commit", client.node.txid(1, 1), extensions=words, body=b"").error == "bad-request"
    assert known(client) == (0, {})


def test_a_series_beyond_the_limit_is_refused() -> None:
    client = node().session()
    for number in range(SERIES_MAX):
        client.node.state.outboxes.take(f"{number:032x}", 1, DrainedRow("r", 1, 1))
    assert drain(client, 1, b"v").error == "overloaded"
    assert drain(client, 2, b"v", series=f"{0:032x}").code == 200


def test_a_broker_restored_from_a_backup_knows_fewer_numbers() -> None:
    client = node().session()
    drain(client, 1, b"one")
    backup = deepcopy(client.node.disk).kill()
    for number in (2, 3):
        assert drain(client, number, b"v").code == 200
    restored = Node(backup, client.node.settings, clock=client.node.clock).session()
    assert known(restored) == (1, {"1": "row-1"})
    assert drain(restored, 4, b"v", session=restored.node.newest_session).text.endswith("the next is 2\n")


def test_a_series_that_is_not_hex_cannot_be_asked_about() -> None:
    assert node().session().ask("drained", "orders").error == "bad-request"


@pytest.mark.parametrize("ask", ["out-of-turn", "last"])
def test_what_is_told_of_numbers_waits_for_their_record(ask: str) -> None:
    client = node().session()
    send(client, 1, b"one")
    told = client.send("drained", SERIES) if ask == "last" else send(client, 1, b"one", row="other", counter=2)
    client.node.flush()
    assert told not in client.received
    client.node.pump()
    assert client.received[told].code == (200 if ask == "last" else 409)


def test_stats_tell_series_and_rows() -> None:
    client = node().session()
    drain(client, 1, b"one")
    drain(client, 1, b"one")
    lines = client.ask("stats", "transactions").text.splitlines()
    assert {"outbox_series 1", "drained 1"} <= set(lines)


def test_stats_tell_how_far_each_outbox_is() -> None:
    client = node().session()
    drain(client, 1, b"one")
    prepare(client, client.node.txid(1, 50), ("a", 0, batch(b"first")), keys=KEY)
    send(client, 2, b"two")
    assert f"{SERIES} resource none uuid {UUID} drained 2 waiting 1 last_ms_ago" in client.ask("stats", "outboxes").text
    (row,) = json.loads(client.ask("stats", "json").text)["outboxes"]
    assert (row["series"], row["drained"], row["waiting"], row["last_ms_ago"] >= 0) == (SERIES, 2, 1, True)
    (row,) = json.loads(again(client.node, checkpoint=True).ask("stats", "json").text)["outboxes"]
    assert (row["drained"], row["uuid"], row["last_ms_ago"]) == (2, None, None)


def test_plain_messages_of_the_partition_pass_a_row_that_waits() -> None:
    client = node().session()
    prepare(client, client.node.txid(1, 50), ("a", 0, batch(b"first")), keys=KEY)
    send(client, 1, b"second")
    assert put(client, b"plain").text == "0\n"


@both
def test_home_has_its_own_numbers_and_queues_behind_branches(*, checkpoint: bool) -> None:
    here, there = two_homes()
    client, elsewhere = there.session(), here.session()
    assert prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"first")).code == 200
    waiting = send(client, 1, b"second", counter=2)
    assert drain(elsewhere, 1, b"here", counter=2).text == "a 0 0 1\n"
    there.pump()
    assert waiting not in client.received
    there = there.again(checkpoint=checkpoint)
    client = there.session("1.0")
    waiting = send(client, 1, b"second", counter=3)
    assert client.ask("commit", there.txid(1, 1), body=b"").text == "a 0 0 1\n"
    assert client.received[waiting].text == "a 0 1 1\n"
    assert values(there) == [b"first", b"second"]
