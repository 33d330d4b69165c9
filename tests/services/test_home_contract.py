"""What a client relies on in its transactions' home: the same for a real broker and for the one in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import txmq
from txmq.client.transaction_home import TransactionHome
from txmq.client.transaction_parts import MessageBuffer
from txmq.errors import TransactionConflictError, UnknownTopicError, UnknownTransactionError
from txmq.protocol.parts import PartResult, parse_outcome, parse_result_lines
from txmq.testing.broker_process import BrokerProcess
from txmq.testing.fake_home import FakeHome

UUID = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("home")
    with BrokerProcess(folder / "broker") as broker, txmq.connect(broker.address) as client:
        client.topics.create("orders")
        yield client


@pytest.fixture(params=["fake", "real"])
def client(request: pytest.FixtureRequest) -> Any:
    return FakeHome() if request.param == "fake" else request.getfixturevalue("real")


class Deal:
    """One transaction, spoken by hand."""

    def __init__(self, client: Any) -> None:
        self.home = TransactionHome(client, client.clock, 30.0)
        self.control, self.txid = client.control, self.home.txid

    def parts(self, *values: bytes, topic: str = "orders") -> list[Any]:
        """One part with these messages."""
        buffer = MessageBuffer()
        for value in values:
            buffer.add(topic, 0, (b"k", value, [], 1_700_000_000_000))
        return self.home.take_parts(buffer)

    def prepare(self, *values: bytes) -> None:
        """Prepare them."""
        self.home.submit_prepare(self.parts(*values), "orders-db", UUID).result()

    def commit_prepared(self) -> list[PartResult]:
        """Commit what is prepared."""
        return parse_result_lines(self.home.submit_commit(5.0).result())

    def outcome(self) -> tuple[str, int]:
        """The word, and how many parts have a place."""
        word, lines = parse_outcome(self.control.call("outcome", self.txid, timeout=5.0))
        return word, len(lines)

    def listed(self) -> list[dict[str, Any]]:
        """This transaction in ``recover``."""
        body = self.control.call("recover", extensions={"uuid": UUID}, timeout=5.0)
        return [item for item in json.loads(body)["transactions"] if item["txid"] == self.txid]


@pytest.fixture
def deal(client: Any) -> Deal:
    return Deal(client)


def test_a_commit_is_executed_once_and_answers_the_same_again(deal: Deal) -> None:
    parts = deal.parts(b"1", b"2")
    first = deal.home.commit_local(parts)
    assert [(line.topic, line.partition, line.count) for line in first] == [("orders", 0, 2)]
    assert deal.home.commit_local(parts) == first
    assert deal.outcome() == ("committed", 1)


def test_what_was_never_seen_is_unknown_and_cannot_be_committed_empty(deal: Deal) -> None:
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


def test_what_is_committed_cannot_be_rolled_back(deal: Deal) -> None:
    deal.home.commit_local(deal.parts(b"1"))
    with pytest.raises(TransactionConflictError):
        deal.home.rollback()


def test_a_prepared_one_is_listed_until_it_is_committed(deal: Deal) -> None:
    deal.prepare(b"1")
    deal.prepare(b"1")  # again: the same answer
    assert deal.outcome() == ("prepared", 0)
    (listed,) = deal.listed()
    assert (listed["kind"], listed["resource"], listed["uuid"]) == ("last-resource", "orders-db", UUID)
    assert listed["deadline_ms"] > listed["prepared_ms"]
    assert (listed["age_ms"] >= 0, listed["owner_connected"], listed["owner_gone_ms"]) == (True, True, 0)
    first = deal.commit_prepared()
    assert deal.commit_prepared() == first
    assert (deal.outcome(), deal.listed()) == (("committed", 1), [])


def test_a_prepared_one_is_rolled_back_by_anybody_who_names_it(deal: Deal) -> None:
    deal.prepare(b"1")
    deal.home.rollback()
    assert (deal.outcome(), deal.listed()) == (("rolled-back", 0), [])
    with pytest.raises(TransactionConflictError):
        deal.commit_prepared()


def test_a_prepared_one_without_messages_is_one_too(deal: Deal) -> None:
    deal.prepare()
    assert deal.outcome() == ("prepared", 0)
    assert deal.commit_prepared() == []
    assert deal.outcome() == ("committed", 0)


def test_a_deadline_that_has_passed_is_not_prepared(client: Any) -> None:
    deal = Deal(client)
    fields = {"resource": "orders-db", "uuid": UUID, "deadline": client.clock.now_ms() - 1000}
    with pytest.raises(TransactionConflictError):
        client.control.call("prepare", deal.txid, "last-resource", body=(), timeout=5.0, extensions=fields)


def test_streamed_parts_are_stated_by_the_decision(deal: Deal) -> None:
    deal.home.stream(deal.parts(b"1"))
    deal.home.stream(deal.parts(b"2"))
    assert deal.outcome() == ("unknown", 0)
    assert len(deal.home.commit_local([])) == 2


def test_streamed_parts_stated_otherwise_are_refused(deal: Deal) -> None:
    deal.home.stream(deal.parts(b"1"))
    deal.home.streamed.add(b"more")
    with pytest.raises(TransactionConflictError):
        deal.home.commit_local([])
    deal.home.rollback()
    assert deal.outcome() == ("rolled-back", 0)


def test_streamed_parts_are_prepared_as_well(deal: Deal) -> None:
    deal.home.stream(deal.parts(b"1"))
    deal.home.submit_prepare([], "orders-db", UUID).result()
    assert deal.outcome() == ("prepared", 0)
    assert len(deal.commit_prepared()) == 1


def test_an_unknown_topic_refuses_all_of_it(deal: Deal) -> None:
    with pytest.raises(UnknownTopicError):
        deal.home.commit_local([*deal.parts(b"1"), *deal.parts(b"2", topic="no-such-topic")])
    assert deal.outcome() == ("unknown", 0)
