"""``commit``, ``prepare``, ``rollback``, ``outcome``, ``recover``, in the words of docs/protocol.md."""

from __future__ import annotations

import json

import pytest

from tools.images.node import Client, Node
from tools.images.requests import UUID, batch, listed_pages, part
from txmq.broker.verbs.session_expiry import end
from txmq.xid import TxId

from ..support import node, prepare, put, restarted, values


def _begun(**changes: object) -> tuple[Node, Client]:
    broker = node(**changes)
    return broker, broker.session()


def _outcome(client: Client, txid: str, *, fence: bool = False) -> str:
    return client.ask("outcome", txid, extensions={"fence": None} if fence else {}).text


# --- local -----------------------------------------------------------------------------------------------------------


def test_a_local_commit_places_all_parts_and_tells_where() -> None:
    broker, client = _begun()
    put(client, b"0")
    body = part("a", 0, batch(b"1", b"2")) + part("b", 0, batch(b"3")) + part("a", 0, batch(b"4"))
    assert client.ask("commit", broker.txid(1, 1), body=body).text == "a 0 1 2\nb 0 0 1\na 0 3 1\n"
    assert (values(broker), values(broker, "b")) == ([b"0", b"1", b"2", b"4"], [b"3"])


def test_repeated_txid_gets_its_answer_and_no_second_message() -> None:
    broker, client = _begun()
    txid, body = broker.txid(1, 1), part("a", 0, batch(b"1"))
    first = client.ask("commit", txid, body=body)
    put(client, b"2")
    assert client.ask("commit", txid, body=body) == first
    broker = restarted(broker)
    client = broker.session("1.0")
    assert client.ask("commit", txid, body=body) == first
    assert _outcome(client, txid) == "committed\na 0 0 1\n"
    assert values(broker) == [b"1", b"2"]


def test_a_refused_commit_leaves_no_trace() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    for bad, error in (
        (part("a", 0, batch(b"1")) + part("nobody", 0, batch()), "unknown-topic"),
        (part("a", 0, batch(b"1")) + part("a", 9, batch()), "unknown-topic"),
        (part("a", 0, batch(b"1")) + part("b", 0, batch(producer=1, sequence=0)), "invalid-batch"),
        (part("a", 0, batch(b"1")) + part("b", 0, batch(b"x")[:-1] + b"y"), "invalid-batch"),
        (part("a", 0, batch(b"1")) + b"b 0 5\r\nabc", "bad-request"),
    ):
        assert client.ask("commit", txid, body=bad).error == error
    assert _outcome(client, txid) == "unknown\n"
    assert broker.context.group.is_empty
    assert client.ask("commit", txid, body=part("a", 0, batch(b"1"))).text == "a 0 0 1\n"


def test_commit_without_parts_of_something_never_seen_is_unknown() -> None:
    broker, client = _begun()
    answer = client.ask("commit", broker.txid(1, 1), body=b"")
    assert (answer.code, answer.error) == (404, "unknown-transaction")


def test_a_rolled_back_transaction_cannot_be_committed() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    assert client.ask("rollback", txid).code == 200
    assert client.ask("rollback", txid).code == 200
    late = client.ask("commit", txid, body=part("a", 0, batch()))
    assert (late.code, late.error) == (409, "transaction-conflict")
    assert values(broker) == []


def test_a_committed_transaction_cannot_be_rolled_back() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    client.ask("commit", txid, body=part("a", 0, batch()))
    assert client.ask("rollback", txid).error == "transaction-conflict"
    assert _outcome(client, txid, fence=True).startswith("committed\n")


def test_a_transaction_belongs_to_its_session() -> None:
    broker, _owner = _begun()
    stranger = broker.session()
    body = part("a", 0, batch())
    assert stranger.ask("commit", broker.txid(1, 1), body=body).error == "other-session"
    assert prepare(stranger, broker.txid(1, 1), ("a", 0, batch())).error == "other-session"
    refused = stranger.ask("put", "a", 0, extensions={"tx": broker.txid(1, 1)}, body=batch())
    assert (refused.code, refused.error) == (403, "other-session")


# --- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["commit", "rollback", "outcome", "prepare"])
def test_another_home_is_not_the_owner(verb: str) -> None:
    broker, client = _begun()
    identity = broker.recovered.identity
    for txid in (TxId(identity.cluster, identity.node ^ 1, 1, 1), TxId(identity.cluster ^ 1, identity.node, 1, 1)):
        if verb == "prepare":
            answer = prepare(client, str(txid), ("a", 0, batch()))
        else:
            answer = client.ask(verb, str(txid), body=b"" if verb == "commit" else None)
        assert (answer.code, answer.error) == (409, "not-owner")
        assert f"but at {txid.cluster:016x}-{txid.home:016x} (" in answer.text  # as stats writes them


@pytest.mark.parametrize("verb", ["outcome", "rollback", "commit", "decide", "complete", "prepare", "parts"])
def test_a_session_never_issued_is_told_from_one_that_ended(verb: str) -> None:
    broker, client = _begun()
    broker.connect().hello()
    ended = broker.newest_session
    end(broker.core.context, broker.state.sessions[ended])
    words = {"prepare": ("last-resource",)}.get(verb, ())
    body = None if verb in ("outcome", "rollback", "complete", "parts") else b""
    before = broker.state.snapshot()
    for number, error in ((ended, "fenced"), (ended + 1, "never-issued"), (77, "never-issued")):
        answer = client.ask(verb, broker.txid(number, 1), *words, body=body)
        assert (answer.code, answer.error) == (410, error)
    assert broker.state.snapshot() == before  # what is asked of an invented session leaves nothing


@pytest.mark.parametrize("text", ["1", "x-y-z", "0" * 16 + "-" + "0" * 16 + "-1", "A" * 16 + "-" + "0" * 16 + "-1-1"])
def test_what_is_no_txid_is_refused(text: str) -> None:
    assert node().connect().ask("outcome", text).error == "bad-request"


def test_counters_start_at_one() -> None:
    broker, client = _begun()
    assert client.ask("rollback", broker.txid(1, 0)).error == "bad-request"


# --- outcome ---------------------------------------------------------------------------------------------------------


def test_outcome_tells_the_state_and_changes_nothing() -> None:
    broker, client = _begun()
    txids = [broker.txid(1, counter) for counter in range(1, 5)]
    client.ask("commit", txids[0], body=part("a", 0, batch()))
    client.ask("rollback", txids[1])
    prepare(client, txids[2], ("a", 0, batch()))
    told = [_outcome(client, txid) for txid in txids]
    assert told == ["committed\na 0 0 1\n", "rolled-back\n", "prepared\n", "unknown\n"]
    assert [_outcome(client, txid) for txid in txids] == told


def test_a_fence_rolls_an_absent_transaction_back_for_good() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    assert _outcome(broker.connect(), txid, fence=True) == "rolled-back\n"
    assert client.ask("commit", txid, body=part("a", 0, batch())).error == "transaction-conflict"
    assert prepare(client, txid, ("a", 0, batch())).error == "transaction-conflict"
    broker = restarted(broker)
    client = broker.session("1.0")
    assert client.ask("commit", txid, body=part("a", 0, batch())).error == "transaction-conflict"


def test_a_fence_leaves_a_prepared_transaction_alone() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    prepare(client, txid, ("a", 0, batch(b"1")))
    assert _outcome(client, txid, fence=True) == "prepared\n"
    assert client.ask("commit", txid, body=b"").code == 200
    assert values(broker) == [b"1"]


# --- floors ----------------------------------------------------------------------------------------------------------


def test_outcomes_are_kept_until_the_client_has_seen_their_end() -> None:
    broker, client = _begun(outcomes_kept=2)
    for counter in range(1, 6):
        client.ask("commit", broker.txid(1, counter), body=part("a", 0, batch(b"%d" % counter)))
    assert all(_outcome(client, broker.txid(1, counter)).startswith("committed") for counter in range(1, 6))


def test_transaction_at_or_below_the_floor_is_not_executed() -> None:
    broker, client = _begun(outcomes_kept=2)
    for counter in range(1, 6):
        body = part("a", 0, batch(b"%d" % counter))
        client.ask("commit", broker.txid(1, counter), extensions={"floor": counter - 1}, body=body)
    for _life in range(2):
        for counter in (1, 2, 3):
            txid = broker.txid(1, counter)
            asked = [
                client.ask("commit", txid, body=part("a", 0, batch())),
                client.ask("rollback", txid),
                client.ask("outcome", txid),
                client.ask("outcome", txid, extensions={"fence": None}),
                prepare(client, txid, ("a", 0, batch())),
                client.ask("put", "a", 0, extensions={"tx": txid}, body=batch()),
            ]
            assert {(answer.code, answer.error) for answer in asked} == {(410, "fenced")}
        assert _outcome(client, broker.txid(1, 4)).startswith("committed")
        broker = restarted(broker)
        client = broker.session("1.0")
    assert len(values(broker)) == 5


def test_a_floor_from_another_connection_is_ignored() -> None:
    broker, client = _begun(outcomes_kept=1)
    for counter in (1, 2):
        client.ask("commit", broker.txid(1, counter), body=part("a", 0, batch()))
    broker.connect().ask("rollback", broker.txid(1, 3), extensions={"floor": 10**9})
    assert _outcome(client, broker.txid(1, 1)).startswith("committed")


def test_a_floor_beyond_64_bits_is_refused() -> None:
    broker, client = _begun()
    for floor in (2**64, 10**20 - 1):
        answer = client.ask("rollback", broker.txid(1, 1), extensions={"floor": floor})
        assert (answer.code, answer.error) == (400, "bad-request")
    assert client.ask("rollback", broker.txid(1, 1), extensions={"floor": 2**64 - 1}).code == 200


def test_an_undecided_transaction_outlives_a_floor_above_it() -> None:
    broker, client = _begun(outcomes_kept=1)
    prepare(client, broker.txid(1, 1), ("a", 0, batch(b"1")))
    for counter in (2, 3, 4):
        client.ask("commit", broker.txid(1, counter), extensions={"floor": counter}, body=part("b", 0, batch()))
    assert _outcome(client, broker.txid(1, 1)) == "prepared\n"
    assert client.ask("commit", broker.txid(1, 1), body=b"").code == 200
    assert values(broker) == [b"1"]


# --- prepare ---------------------------------------------------------------------------------------------------------


def test_a_prepared_transaction_is_invisible_and_holds_nobody_up() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    assert prepare(client, txid, ("a", 0, batch(b"1", b"2")), ("b", 0, batch(b"3"))) == (200, b"")
    assert put(client, b"0").text == "0\n"
    assert values(broker) == [b"0"]
    assert client.ask("commit", txid, body=b"").text == "a 0 1 2\nb 0 0 1\n"
    assert (values(broker), values(broker, "b")) == ([b"0", b"1", b"2"], [b"3"])


def test_prepare_again_is_answered_again_unless_its_messages_differ() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    assert [prepare(client, txid, ("a", 0, batch(b"1"))).code for _ in range(2)] == [200, 200]
    assert prepare(client, txid, ("a", 0, batch(b"2"))).error == "transaction-conflict"
    broker.checkpoint()
    client = restarted(broker).session("1.0")
    assert prepare(client, txid, ("a", 0, batch(b"1"))).code == 200
    assert prepare(client, txid, ("a", 0, batch(b"2"))).error == "transaction-conflict"


def test_prepared_transaction_stays_without_its_owner_for_any_time() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    prepare(client, txid, ("a", 0, batch(b"1")))
    client.disconnect()
    broker.clock.advance(10**7)
    broker.core.tick(broker.clock.now_ms())
    broker = restarted(broker)
    resolver = broker.connect()
    assert _outcome(resolver, txid) == "prepared\n"
    assert resolver.ask("commit", txid, body=b"").text == "a 0 0 1\n"
    assert values(broker) == [b"1"]


def test_a_prepared_transaction_takes_no_more_parts() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    prepare(client, txid, ("a", 0, batch()))
    assert client.ask("put", "a", 0, extensions={"tx": txid}, body=batch()).error == "transaction-conflict"
    assert client.ask("commit", txid, body=part("a", 0, batch())).error == "transaction-conflict"


@pytest.mark.parametrize(
    "extensions",
    [
        {},
        {"resource": "db", "table": "t"},
        {"uuid": UUID, "table": "t"},
        {"resource": "db", "uuid": UUID},
        {"resource": "..", "uuid": UUID, "table": "t"},
        {"resource": "db", "uuid": UUID, "table": "t;DROP"},
    ],
    ids=str,
)
def test_prepare_names_its_resource(extensions: dict[str, str]) -> None:
    broker, client = _begun()
    body = part("a", 0, batch())
    answer = client.ask("prepare", broker.txid(1, 1), "last-resource", extensions=extensions, body=body)
    assert (answer.code, answer.error) == (400, "bad-request")


def test_only_kinds_that_somebody_can_prove_are_prepared() -> None:
    broker, client = _begun()
    extensions = {"resource": "db", "uuid": UUID, "table": "t"}
    for kind in ("local", "nonsense"):
        answer = client.ask("prepare", broker.txid(1, 1), kind, extensions=extensions, body=part("a", 0, batch()))
        assert answer.error == "bad-request"


def test_prepare_behind_its_deadline_is_refused() -> None:
    broker, client = _begun()
    now = broker.clock.now_ms()
    late = prepare(client, broker.txid(1, 1), ("a", 0, batch()), deadline=now)
    assert late.error == "transaction-conflict"
    assert prepare(client, broker.txid(1, 1), ("a", 0, batch()), deadline=now + 1).code == 200


def test_messages_of_topic_that_was_deleted_go_with_it() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    prepare(client, txid, ("a", 0, batch(b"1")), ("b", 0, batch(b"2")))
    client.ask("topic", "delete", "b")
    client.ask("topic", "create", "b")
    assert client.ask("commit", txid, body=b"").text == "a 0 0 1\n"
    assert (values(broker), values(broker, "b")) == ([b"1"], [])


# --- order -----------------------------------------------------------------------------------------------------------


def test_commit_waits_for_earlier_prepared_one_it_collides_with() -> None:
    broker, client = _begun()
    first, second = broker.txid(1, 1), broker.txid(1, 2)
    prepare(client, first, ("a", 0, batch(b"1")), keys="7")
    prepare(client, second, ("a", 0, batch(b"2")), keys="7")
    waiting = client.send("commit", second, body=b"")
    broker.pump()
    assert waiting not in client.received
    assert client.ask("rollback", second).error == "transaction-conflict"
    assert client.ask("commit", first, body=b"").text == "a 0 0 1\n"
    assert client.received[waiting].text == "a 0 1 1\n"
    assert values(broker) == [b"1", b"2"]


def test_a_rollback_lets_those_behind_it_go() -> None:
    broker, client = _begun()
    txids = [broker.txid(1, counter) for counter in (1, 2, 3)]
    for number, txid in enumerate(txids):
        prepare(client, txid, ("a", 0, batch(b"%d" % number)), keys="7")
    waiting = [client.send("commit", txid, body=b"") for txid in txids[1:]]
    broker.pump()
    assert client.ask("rollback", txids[0]).code == 200
    assert [client.received[opaque].text for opaque in waiting] == ["a 0 0 1\n", "a 0 1 1\n"]


def test_more_may_wait_for_one_than_a_journal_record_holds() -> None:
    broker, client = _begun()
    object.__setattr__(broker.settings, "group_size_bytes_max", 4096)  # less than users may set, as its journal files
    txids = [broker.txid(1, counter) for counter in range(1, 302)]
    for txid in txids:
        prepare(client, txid, ("a", 0, batch(b"v")), keys="7")
    waiting = [client.send("commit", txid, body=b"") for txid in txids[1:]]
    broker.pump()
    assert not client.received
    assert client.ask("rollback", txids[0]).code == 200
    assert [client.received[opaque].text for opaque in waiting] == [f"a 0 {offset} 1\n" for offset in range(300)]
    assert len(values(restarted(broker))) == 300


@pytest.mark.parametrize("is_late", [False, True])
def test_more_streams_may_end_at_once_than_journal_record_holds(*, is_late: bool) -> None:
    broker, client = _begun()
    object.__setattr__(broker.settings, "group_size_bytes_max", 4096)  # less than users may set, as its journal files
    txids = [broker.txid(1, counter) for counter in range(1, 601)]
    for txid in txids:
        assert client.ask("put", "a", 0, extensions={"tx": txid}, body=batch(b"v")).code == 200
    if is_late:
        broker.clock.advance(broker.settings.transaction_timeout_ms_max / 1000 + 1)
        broker.core.tick(broker.clock.now_ms())
    else:
        client.disconnect()
    broker.pump()
    assert not broker.state.streams
    again = restarted(broker)
    assert {_outcome(again.session("1.0"), txid) for txid in (txids[0], txids[-1])} == {"rolled-back\n"}


def test_other_keys_do_not_wait() -> None:
    broker, client = _begun()
    prepare(client, broker.txid(1, 1), ("a", 0, batch(b"1")), keys="7")
    prepare(client, broker.txid(1, 2), ("a", 0, batch(b"2")), keys="8,9")
    assert client.ask("commit", broker.txid(1, 2), body=b"").text == "a 0 0 1\n"


def test_order_holds_over_a_restart_and_a_checkpoint() -> None:
    broker, client = _begun()
    for counter in (1, 2, 3):
        prepare(client, broker.txid(1, counter), ("a", 0, batch(b"%d" % counter)), keys="7")
        broker.checkpoint()
    broker = restarted(broker)
    client = broker.session("1.0")
    waiting = [client.send("commit", broker.txid(1, counter), body=b"") for counter in (3, 2)]
    broker.pump()
    assert not any(opaque in client.received for opaque in waiting)
    client.ask("commit", broker.txid(1, 1), body=b"")
    assert values(broker) == [b"1", b"2", b"3"]


# --- recover ---------------------------------------------------------------------------------------------------------


def _recover(client: Client, **extensions: str | int) -> list[dict[str, object]]:
    return json.loads(client.ask("recover", extensions=extensions).body)["transactions"]  # type: ignore[no-any-return]


def test_recover_describes_what_is_in_doubt() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    content = batch(b"1", b"2")
    deadline = broker.clock.now_ms() + 5000
    prepare(client, txid, ("a", 1, content), deadline=deadline)
    client.disconnect()
    broker.clock.advance(3)
    broker.pump()
    (told,) = _recover(broker.connect())
    prepared = broker.clock.now_ms() - 3000
    assert told == {
        "txid": txid, "state": "prepared", "kind": "last-resource", "resource": "db", "uuid": UUID, "table": "t",
        "deadline_ms": deadline, "prepared_ms": prepared, "age_ms": 3000, "owner_connected": False,
        "owner_gone_ms": 3000, "client": "tester",
        "parts": [{"topic": "a", "partition": 1, "count": 2, "bytes": len(content)}],
    }  # fmt: skip


def test_recover_pages_oldest_first_and_by_resource() -> None:
    broker, client = _begun()
    txids = [broker.txid(1, counter) for counter in (3, 1, 2)]
    for txid in txids:
        prepare(client, txid, ("a", 0, batch()))
    assert [item["txid"] for item in _recover(client)] == txids
    assert [item["txid"] for item in _recover(client, limit=2)] == txids[:2]
    assert [[item["txid"] for item in page] for page in listed_pages(client, limit=2)] == [txids[:2], txids[2:]]
    assert [item["txid"] for item in _recover(client, txid=txids[1])] == txids[1:2]
    assert _recover(client, uuid="f" * 32) == []
    assert len(_recover(client, uuid=UUID)) == 3


def test_owner_is_not_long_gone_only_because_broker_restarted() -> None:
    broker, client = _begun()
    prepare(client, broker.txid(1, 1), ("a", 0, batch()))
    broker.clock.advance(3600)
    (told,) = _recover(restarted(broker).connect())
    assert (told["owner_connected"], told["owner_gone_ms"]) == (False, 0)
