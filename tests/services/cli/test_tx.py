"""``client.transactions`` and ``txmq tx`` against a real broker: what hangs is listed, explained and settled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import txmq
from txmq.client.transaction.conversation import Conversation
from txmq.client.transaction.messages import EncodedPart, MessageBuffer
from txmq.errors import FencedError, LocalProtocolError, TransactionConflictError, UnknownTransactionError
from txmq.protocol.transaction_bodies import encode_branch, encode_part
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess

UUID, OTHER_UUID = "0123456789abcdef" * 2, "fedcba9876543210" * 2
DETAILS = {"bqual": f"{UUID}.1.2", "connection": 42, "wrote": True, "marker": True, "table": "txmq_marker"}
TIMEOUT_S = 60


class Desk:
    """A client, and transactions of it that hang."""

    def __init__(self, client: txmq.Client) -> None:
        self.client, self.transactions = client, client.transactions

    def prepared(self, value: bytes = b"v") -> str:
        """One that waits for the marker row of ``shop``."""
        home = Conversation(self.client.routes.any_link(), self.client.clock, 30.0)
        home.begin()
        home.submit_prepare(self._parts(home, value), "shop", UUID, "txmq_marker").result()
        return home.txid

    def decided(self, value: bytes = b"v") -> str:
        """One that waits for its branches in ``a`` and ``b``."""
        home = Conversation(self.client.routes.any_link(), self.client.clock, 30.0)
        home.begin()
        branches = encode_branch("a", UUID, DETAILS) + encode_branch("b", OTHER_UUID, DETAILS)
        parts = [b for p in self._parts(home, value) for b in encode_part(p.topic, p.partition, p.batch, p.keys)]
        body = [branches, *parts]
        self.client.control.call("decide", home.txid, extensions={"branches": 2}, body=body, timeout=TIMEOUT_S)
        return home.txid

    def _parts(self, home: Conversation, value: bytes) -> list[EncodedPart]:
        buffer = MessageBuffer(None, lambda _topic: 0)
        buffer.add("orders", 0, (None, value, [], 1_700_000_000_000))
        return home.take_parts(buffer)

    def visible(self) -> list[bytes | None]:
        """What readers see."""
        return [message.value for message in self.client.browse("orders")]

    def txids(self, state: str) -> list[str]:
        """Ids of what is listed."""
        return [row["txid"] for row in self.transactions.list(state=state)]


@pytest.fixture
def desk(broker: BrokerProcess) -> Iterator[Desk]:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        yield Desk(client)


def run(broker: BrokerProcess, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "txmq.cli.main", "tx", *words, "--bootstrap", broker.address]
    return fork_server.run(command, stdin=stdin, timeout=TIMEOUT_S)


def as_json(broker: BrokerProcess, *words: str) -> Any:
    result = run(broker, *words, "--json")
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


# --- client.transactions ---------------------------------------------------------------------------------------------


def test_states_part_what_is_listed(desk: Desk) -> None:
    prepared, decided, lone = desk.prepared(), desk.decided(), desk.prepared()
    desk.transactions.rollback(lone, "the database is gone")
    assert desk.txids("in-doubt") == [prepared, decided]
    assert (desk.txids("prepared"), desk.txids("decided"), desk.txids("heuristic")) == ([prepared], [decided], [lone])
    assert desk.txids("all") == [prepared, decided, lone]
    with pytest.raises(LocalProtocolError, match="in-doubt, prepared"):
        desk.transactions.list(state="done")


def test_lone_commit_releases_the_messages_and_is_remembered_until_forgotten(desk: Desk, broker: BrokerProcess) -> None:
    txid = desk.prepared(b"out")
    [line] = desk.transactions.commit(txid, "ticket 17: the row is there, ä%")
    assert (line.topic, line.base_offset, desk.visible()) == ("orders", 0, [b"out"])
    broker.kill()
    broker.start()
    shown = desk.transactions.show(txid)
    assert (shown["outcome"], shown["state"], desk.txids("in-doubt")) == ("committed", "heuristic", [])
    assert [(fact["what"], fact["reason"]) for fact in shown["heuristics"]] == [
        ("heuristic-commit", "ticket 17: the row is there, ä%")
    ]
    assert shown["parts"] == [{"topic": "orders", "partition": 0, "base_offset": 0, "count": 1}]
    desk.transactions.forget(txid)
    assert desk.txids("all") == []
    with pytest.raises(UnknownTransactionError):
        desk.transactions.forget(txid)


def test_a_lone_rollback_keeps_the_messages_and_cannot_be_turned(desk: Desk) -> None:
    txid = desk.prepared(b"never")
    desk.transactions.rollback(txid, "no such row")
    assert (desk.visible(), desk.transactions.outcome(txid)) == ([], txmq.Outcome.ROLLED_BACK)
    with pytest.raises(TransactionConflictError):
        desk.transactions.commit(txid, "changed my mind")
    desk.transactions.rollback(txid, "again")  # the answer of the first one may have been lost
    assert len(desk.transactions.show(txid)["heuristics"]) == 1


def test_what_is_decided_is_not_rolled_back(desk: Desk) -> None:
    txid = desk.decided()
    with pytest.raises(TransactionConflictError):
        desk.transactions.rollback(txid, "no")
    assert desk.transactions.outcome(txid) is txmq.Outcome.COMMITTED


def test_never_prepared_id_is_refused_and_not_rolled_back(desk: Desk) -> None:
    home = Conversation(desk.client.routes.any_link(), desk.client.clock, 30.0)
    home.begin()
    for settle in (desk.transactions.commit, desk.transactions.rollback):
        with pytest.raises(UnknownTransactionError, match="nothing was done"):
            settle(home.txid, "a slip of the pen")
    assert desk.transactions.outcome(home.txid) is txmq.Outcome.UNKNOWN


def test_a_fence_makes_never_seen_final(desk: Desk) -> None:
    home = Conversation(desk.client.routes.any_link(), desk.client.clock, 30.0)
    home.begin()
    assert desk.transactions.fence(home.txid) is txmq.Outcome.ROLLED_BACK
    assert desk.transactions.outcome(home.txid) is txmq.Outcome.ROLLED_BACK
    assert desk.transactions.fence(desk.prepared()) is txmq.Outcome.UNKNOWN
    assert desk.transactions.fence(desk.decided()) is txmq.Outcome.COMMITTED


def test_branch_of_lost_database_is_given_up_showing_messages(desk: Desk) -> None:
    txid = desk.decided(b"held")
    assert (desk.transactions.show(txid)["is_held"], desk.visible()) == (True, [])
    desk.transactions.complete(txid, "a", "hazard", "the disk burnt")
    desk.transactions.complete(txid, OTHER_UUID, "commit", "committed by hand")
    assert (desk.visible(), desk.txids("in-doubt")) == ([b"held"], [])
    facts = desk.transactions.show(txid)["heuristics"]
    assert [(fact["what"], fact["resource"], fact["reason"]) for fact in facts] == [
        ("heuristic-hazard", "a", "the disk burnt"), ("heuristic-commit", "b", "committed by hand")
    ]  # fmt: skip
    with pytest.raises(UnknownTransactionError, match="waited for"):
        desk.transactions.complete(txid, "a", "hazard", "twice")


def test_a_reason_is_some_text_of_reasonable_length(desk: Desk) -> None:
    txid = desk.prepared()
    for reason in ("", "  ", "x" * 4000, "\ud800"):
        with pytest.raises(LocalProtocolError, match="reason"):
            desk.transactions.commit(txid, reason)
    assert desk.txids("prepared") == [txid]


def test_id_of_an_ended_session_is_reported_as_such(desk: Desk) -> None:
    cluster, home, _, counter = desk.prepared().split("-")
    with pytest.raises(FencedError):
        desk.transactions.show(f"{cluster}-{home}-ffff-{counter}")


# --- txmq tx ---------------------------------------------------------------------------------------------------------


def test_the_list_tells_why_and_leaves_out_what_is_young(desk: Desk, broker: BrokerProcess) -> None:
    txid = desk.prepared()
    [row] = as_json(broker, "list", "--in-doubt")
    assert (row["txid"], row["kind"], row["why"]) == (
        txid, "last-resource", "its owner is connected and may still decide; the marker row in shop decides"
    )  # fmt: skip
    assert as_json(broker, "list", "--older-than", "1h") == []
    assert [row["txid"] for row in as_json(broker, "list", "--older-than", "0ms", "--state", "prepared")] == [txid]
    assert as_json(broker, "list", "--state", "heuristic") == []
    table = run(broker, "list").stdout
    assert b"1 in doubt" in table
    assert b"last-resource" in table


def test_decided_one_is_shown_with_branches_and_sql_to_paste(desk: Desk, broker: BrokerProcess) -> None:
    txid = desk.decided()
    shown = as_json(broker, "show", txid)
    assert [branch["resource"] for branch in shown["branches"]] == ["a", "b"]
    statement = f"XA COMMIT X'{txid.encode().hex()}',X'{DETAILS['bqual'].encode().hex()}',1954049393;"  # type: ignore[attr-defined]
    assert shown["sql"].count(statement) == 2
    text = run(broker, "show", txid).stdout.decode()
    assert f"  {statement}\n" in text  # on one line, whatever the width of the terminal
    assert "txmq resolver" in text


def test_keys_of_a_transaction_are_shown_and_values_on_demand(desk: Desk, broker: BrokerProcess) -> None:
    txid, value = desk.prepared(b"order 42 of ada"), "order 42 of ada"
    assert as_json(broker, "show", txid)["messages"] == [
        {"topic": "orders", "partition": 0, "offset": None, "key": None}
    ]
    assert as_json(broker, "show", txid, "--values")["messages"][0]["value"] == value
    assert value in run(broker, "show", txid, "--values").stdout.decode()
    assert desk.visible() == [], "looking decides nothing"
    desk.transactions.commit(txid, "ticket 17")
    [placed] = as_json(broker, "show", txid, "--values")["messages"]
    assert (placed["offset"], placed["value"]) == (0, value)
    held = desk.decided(b"held")
    assert "messages" not in as_json(broker, "show", held, "--values"), "readers do not see them yet"


def test_what_was_decided_alone_says_what_to_repair(desk: Desk, broker: BrokerProcess) -> None:
    committed, rolled_back, decided = desk.prepared(), desk.prepared(), desk.decided()
    desk.transactions.commit(committed, "r")
    desk.transactions.rollback(rolled_back, "r")
    for name in ("a", "b"):
        desk.transactions.complete(decided, name, "rollback", "r")
    assert "look whether its rows are in shop" in as_json(broker, "show", committed)["next"][0]
    assert "never sent: if its rows are in shop" in as_json(broker, "show", rolled_back)["next"][0]
    steps = as_json(broker, "show", decided)["next"]
    assert ["its rows in a are not" in steps[0], "its rows in b are not" in steps[1]] == [True, True]
    assert steps[-1].endswith(f"txmq tx forget {decided}")


def test_deciding_alone_wants_the_word_and_a_yes(desk: Desk, broker: BrokerProcess) -> None:
    txid = desk.prepared(b"asked")
    unsaid = run(broker, "commit", txid, "--reason", "r")
    assert (unsaid.returncode, unsaid.stderr.count(b"\n")) == (2, 1)
    assert b"--heuristic" in unsaid.stderr
    declined = run(broker, "rollback", txid, "--heuristic", "--reason", "r", stdin=b"n\n")
    assert declined.returncode == 1
    assert b"no message will report them" in declined.stderr
    assert desk.txids("prepared") == [txid]
    agreed = run(broker, "commit", txid, "--heuristic", "--reason", "r", stdin=b"y\n")
    assert (agreed.returncode, desk.visible()) == (0, [b"asked"])
    assert b"something that never happened" in agreed.stderr


def test_fence_of_what_is_prepared_says_that_it_fenced_nothing(desk: Desk, broker: BrokerProcess) -> None:
    txid = desk.prepared()
    said = run(broker, "fence", txid)
    assert said.stderr.decode() == (
        f"transaction {txid}: unknown yet, so nothing was fenced; why: txmq tx show {txid}\n"
    )


def test_settling_and_forgetting_speak_json(desk: Desk, broker: BrokerProcess) -> None:
    one, other, decided = desk.prepared(), desk.prepared(), desk.decided()
    committed = as_json(broker, "commit", one, "--heuristic", "--reason", "r", "--yes")
    assert (committed["outcome"], committed["parts"][0]["topic"]) == ("committed", "orders")
    rolled_back = as_json(broker, "rollback", other, "--heuristic", "--reason", "r", "--yes")
    assert rolled_back == {"txid": other, "outcome": "rolled-back"}
    given_up = as_json(broker, "complete", decided, "--resource", "a", "--heuristic", "hazard", "--reason", "r", "-y")
    assert given_up == {"txid": decided, "resource": "a", "heuristic": "hazard"}
    assert as_json(broker, "fence", other) == {"txid": other, "outcome": "rolled-back"}
    assert as_json(broker, "forget", other) == {"txid": other, "forgotten": True}
    assert [row["txid"] for row in as_json(broker, "list", "--state", "heuristic")] == [one, decided]


def test_forgetting_many_is_not_stopped_by_one_unknown(desk: Desk, broker: BrokerProcess) -> None:
    one, other, third = desk.prepared(), desk.prepared(), desk.prepared()
    for txid in (one, other):
        desk.transactions.rollback(txid, "no such row")
    forgotten = run(broker, "forget", one, third, other, one)
    assert forgotten.returncode == 1
    assert forgotten.stderr.count(b"is forgotten") == 2
    assert third.encode() in forgotten.stderr.splitlines()[-1]
    assert desk.txids("heuristic") == []


MISTAKES = [
    (("list", "--state", "done"), 2, b"expected one of in-doubt, prepared"),
    (("list", "--in-doubt", "--state", "all"), 2, b"exclude"),
    (("list", "--older-than", "soon"), 2, b"such as 30s"),
    (("commit", "nonsense", "--heuristic", "--reason", "r", "-y"), 1, b"nonsense"),
]


def test_what_cannot_be_done_is_said_in_one_line(broker: BrokerProcess) -> None:
    for words, status, said in MISTAKES:
        result = run(broker, *words)
        assert result.returncode == status
        assert said in result.stderr
        assert result.stderr.count(b"\n") == 1
