"""One transaction, spoken by hand with its broker: what its client relies on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tools.simulated.broker import SimulatedBroker
from txmq.client.transaction.conversation import Conversation
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transport.connection import Reply
from txmq.errors import (
    BadRequestError,
    OtherTokenError,
    OverloadedError,
    RequestTimeoutError,
    TransactionConflictError,
    UnknownTopicError,
    UnknownTransactionError,
)
from txmq.protocol.transaction_bodies import PartResult, encode_branch, parse_outcome, parse_result_lines

UUID = "0123456789abcdef" * 2


class Deal:
    """One transaction, spoken by hand."""

    def __init__(self, client: SimulatedBroker) -> None:
        self.client = client
        self.home = Conversation(client.routes.any_link(), client.clock, 30.0)
        self.home.begin()
        self.control, self.txid = client.control, self.home.txid

    def parts(self, *values: bytes, topic: str = "orders") -> list[Any]:
        """One part with these messages."""
        buffer = MessageBuffer(None, lambda _topic: 0)
        for value in values:
            buffer.add(topic, 0, (b"k", value, [], 1_700_000_000_000))
        return self.home.take_parts(buffer)

    def stream(self, value: bytes) -> None:
        """Send a message ahead."""
        self.home.stream(self.parts(value))

    def prepare(self, *values: bytes) -> None:
        """Prepare them."""
        self.home.submit_prepare(self.parts(*values), "orders-db", UUID, "txmq_marker").result()

    def commit_prepared(self) -> list[PartResult]:
        """Commit what is prepared."""
        return parse_result_lines(self.home.submit_commit(60.0).result())

    def decide(self, *values: bytes, uuids: Sequence[str] = (UUID,)) -> list[PartResult]:
        """Decide them, with a branch in each resource."""
        details = {"bqual": "b", "connection": None, "wrote": True, "marker": True, "table": "txmq_marker"}
        branches = [encode_branch("orders-db", uuid, details) for uuid in uuids]
        return parse_result_lines(
            self.home.submit_decide(self.home.encoded(self.parts(*values)), branches, (), 60.0).result()
        )

    def complete(self, uuid: str = UUID, **extensions: str) -> bytes:
        """A branch is done."""
        given = {"uuid": uuid, **extensions}
        return bytes(self.control.call("complete", self.txid, extensions=given, timeout=60.0))

    def owner(self) -> list[str]:
        """``outcome`` with the owner's line."""
        return (
            bytes(self.control.call("outcome", self.txid, extensions={"owner": None}, timeout=60.0))
            .decode()
            .split("\n")
        )

    def outcome(self, **extensions: None) -> tuple[str, int]:
        """The word, and how many parts have a place."""
        word, lines = parse_outcome(self.control.call("outcome", self.txid, extensions=extensions, timeout=60.0))
        return word, len(lines)

    def listed(self, uuid: str = UUID, **extensions: str) -> list[dict[str, Any]]:
        """This transaction in ``recover``."""
        body = self.control.call("recover", extensions={"uuid": uuid, **extensions}, timeout=60.0)
        return [item for item in json.loads(body)["transactions"] if item["txid"] == self.txid]


@pytest.fixture
def client() -> SimulatedBroker:
    return SimulatedBroker()


@pytest.fixture
def deal(client: SimulatedBroker) -> Deal:
    return Deal(client)


def test_commit_is_executed_once_and_answers_again_alike(deal: Deal) -> None:
    parts = deal.parts(b"1", b"2")
    first = deal.home.commit_local(parts)
    assert [(line.topic, line.partition, line.count) for line in first] == [("orders", 0, 2)]
    assert deal.home.commit_local(parts) == first
    assert deal.outcome() == ("committed", 1)


def test_unseen_transaction_is_unknown_and_cannot_be_committed_empty(deal: Deal) -> None:
    assert deal.outcome() == ("unknown", 0)
    with pytest.raises(UnknownTransactionError):
        deal.commit_prepared()


def test_a_rollback_fences_what_was_never_seen(deal: Deal) -> None:
    deal.home.rollback()
    deal.home.rollback()
    assert deal.outcome() == ("rolled-back", 0)
    with pytest.raises(TransactionConflictError):
        deal.home.commit_local(deal.parts(b"late"))
    with pytest.raises(TransactionConflictError):
        deal.prepare(b"late")


def test_an_outcome_with_fence_is_final(client: SimulatedBroker) -> None:
    absent, prepared, committed = Deal(client), Deal(client), Deal(client)
    prepared.prepare(b"1")
    committed.home.commit_local(committed.parts(b"1"))
    assert [deal.outcome(fence=None) for deal in (absent, prepared, committed)] == [
        ("rolled-back", 0), ("prepared", 0), ("committed", 1),
    ]  # fmt: skip
    with pytest.raises(TransactionConflictError):
        absent.home.commit_local(absent.parts(b"late"))
    prepared.home.rollback()


def test_what_is_committed_cannot_be_rolled_back(deal: Deal) -> None:
    deal.home.commit_local(deal.parts(b"1"))
    with pytest.raises(TransactionConflictError):
        deal.home.rollback()


def test_a_prepared_one_is_listed_until_it_is_committed(deal: Deal) -> None:
    deal.prepare(b"1")
    deal.prepare(b"1")  # again: the same answer
    assert deal.outcome() == ("prepared", 0)
    (listed,) = deal.listed()
    stated = [listed[word] for word in ("kind", "resource", "uuid", "table")]
    assert stated == ["last-resource", "orders-db", UUID, "txmq_marker"]
    assert listed["deadline_ms"] > listed["prepared_ms"]
    assert (listed["age_ms"] >= 0, listed["owner_connected"], listed["owner_gone_ms"]) == (True, True, 0)
    first = deal.commit_prepared()
    assert deal.commit_prepared() == first
    assert (deal.outcome(), deal.listed()) == (("committed", 1), [])


def test_fencing_token_is_taken_after_the_newest_one_only(client: SimulatedBroker) -> None:
    a, b, c = ("abc"[number] * 32 for number in range(3))

    def tell(token: str, **words: str | None) -> str:
        try:
            client.control.call("token", UUID, token, extensions=words, timeout=60.0)
        except OtherTokenError:
            return "other"
        return "newest"

    assert [tell(a), tell(a), tell(b), tell(b, after=a), tell(c, after=a)] == [
        "newest", "newest", "other", "newest", "other",
    ]  # fmt: skip
    assert [tell(c, adopted=None), tell(b, after=a), tell(a, after=c)] == ["newest", "other", "newest"]


def test_prepared_one_is_rolled_back_by_anybody_who_names_it(deal: Deal) -> None:
    deal.prepare(b"1")
    deal.home.rollback()
    assert (deal.outcome(), deal.listed()) == (("rolled-back", 0), [])
    with pytest.raises(TransactionConflictError):
        deal.commit_prepared()


def test_transaction_without_messages_can_be_prepared(deal: Deal) -> None:
    deal.prepare()
    assert deal.outcome() == ("prepared", 0)
    assert deal.commit_prepared() == []
    assert deal.outcome() == ("committed", 0)


def test_a_deadline_that_has_passed_is_not_prepared(client: SimulatedBroker) -> None:
    deal = Deal(client)
    fields = {"resource": "orders-db", "uuid": UUID, "table": "txmq_marker", "deadline": client.clock.now_ms() - 1000}
    with pytest.raises(TransactionConflictError):
        client.control.call("prepare", deal.txid, "last-resource", body=(), timeout=60.0, extensions=fields)


def test_streamed_parts_are_stated_by_the_decision(deal: Deal) -> None:
    deal.stream(b"1")
    deal.stream(b"2")
    assert deal.outcome() == ("unknown", 0)
    assert len(deal.home.commit_local([])) == 2


def test_streamed_parts_stated_otherwise_are_refused(deal: Deal) -> None:
    deal.stream(b"1")
    deal.home.streamed = deal.home.streamed.with_part(b"more")
    with pytest.raises(TransactionConflictError):
        deal.home.commit_local([])
    deal.home.rollback()
    assert deal.outcome() == ("rolled-back", 0)


def test_streamed_parts_are_prepared_as_well(deal: Deal) -> None:
    deal.stream(b"1")
    deal.home.submit_prepare([], "orders-db", UUID, "txmq_marker").result()
    assert deal.outcome() == ("prepared", 0)
    assert len(deal.commit_prepared()) == 1


def test_an_unknown_topic_refuses_all_of_it(deal: Deal) -> None:
    with pytest.raises(UnknownTopicError):
        deal.home.commit_local([*deal.parts(b"1"), *deal.parts(b"2", topic="no-such-topic")])
    assert deal.outcome() == ("unknown", 0)


def test_timeout_says_why_tries_before_last_were_refused() -> None:
    broker, tries = SimulatedBroker(), [OverloadedError("no room"), RequestTimeoutError("no answer in time")]
    part = Conversation(broker, broker.clock, 30.0)

    def submit() -> Reply:
        raise tries.pop(0)

    with pytest.raises(RequestTimeoutError) as told:
        part.await_prepare(submit, waits_for_room=True, waits_for_broker=True)
    assert isinstance(told.value.__cause__, OverloadedError)


# --- XA --------------------------------------------------------------------------------------------------------------

OTHER = "fedcba9876543210" * 2


def test_decision_is_made_once_and_listed_until_every_branch_completes(deal: Deal) -> None:
    first = deal.decide(b"1", b"2", uuids=(UUID, OTHER))
    assert [(line.topic, line.count) for line in first] == [("orders", 2)]
    assert deal.decide(uuids=(UUID, OTHER)) == first
    assert deal.outcome() == ("committed", 1)
    (listed,) = deal.listed(state="decided")
    assert (listed["state"], listed["owner_connected"], listed["age_ms"] >= 0) == ("decided", True, True)
    assert [(branch["uuid"], branch["complete"]) for branch in listed["branches"]] == [(UUID, False), (OTHER, False)]
    assert (listed["branches"][0]["bqual"], listed["branches"][0]["marker"]) == ("b", True)
    assert deal.complete() == b""
    assert (deal.listed(), len(deal.listed(OTHER))) == ([], 1), "listed where a branch is incomplete"
    deal.complete(OTHER)
    deal.complete(OTHER)
    assert (deal.listed(OTHER), deal.outcome()) == ([], ("committed", 1))


def test_decided_ones_are_not_among_prepared_and_other_way_round(client: SimulatedBroker) -> None:
    decided, prepared = Deal(client), Deal(client)
    decided.decide(b"1")
    prepared.prepare(b"2")
    assert (decided.listed(state="prepared"), len(decided.listed(state="decided"))) == ([], 1)
    assert (prepared.listed(state="decided"), len(prepared.listed(state="prepared"))) == ([], 1)
    decided.complete()
    prepared.home.rollback()


def test_rolled_back_cannot_be_decided_nor_decided_rolled_back(client: SimulatedBroker) -> None:
    fenced, decided = Deal(client), Deal(client)
    fenced.home.rollback()
    with pytest.raises(TransactionConflictError):
        fenced.decide(b"late")
    with pytest.raises(TransactionConflictError):
        fenced.complete()
    decided.decide(b"1")
    with pytest.raises(TransactionConflictError):
        decided.home.rollback()
    decided.complete()
    with pytest.raises(TransactionConflictError):
        decided.home.rollback()


def test_complete_of_an_unseen_transaction_or_no_branch_is_refused(deal: Deal) -> None:
    with pytest.raises(UnknownTransactionError):
        deal.complete()
    deal.decide(b"1")
    with pytest.raises(BadRequestError):
        deal.complete(OTHER)
    deal.complete()


def test_streamed_parts_are_decided_as_well(deal: Deal) -> None:
    deal.stream(b"1")
    deal.home.streamed = deal.home.streamed.with_part(b"more")
    with pytest.raises(TransactionConflictError):
        deal.decide()


def test_the_owner_is_told_of_where_nothing_is_committed(deal: Deal) -> None:
    assert deal.owner() == ["unknown", "owner connected", ""]
    deal.home.rollback()
    assert deal.owner() == ["rolled-back", "owner connected", ""]
    committed = Deal(deal.client)
    committed.home.commit_local(committed.parts(b"1"))
    assert committed.owner()[0] == "committed"
    assert "owner" not in " ".join(committed.owner())


def test_lone_decision_of_branch_is_taken_with_its_reason(deal: Deal) -> None:
    deal.decide(b"1")
    deal.complete(heuristic="rollback", reason="it%20was%20gone")
    assert (deal.listed(), deal.outcome()) == ([], ("committed", 1))
