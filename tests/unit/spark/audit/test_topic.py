"""What the broker tells an audit of a topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from txmq.errors import PartialResultError
from txmq.spark.audit.audit import InDoubt
from txmq.spark.audit.spec import AuditSpec, parse_terms
from txmq.spark.audit.topic import TopicAudit

TXID, AT_ANOTHER_HOME = "c1-a1-1-1", "c1-a2-1-1"


def row(txid: str, age_ms: int = 1000, topic: str = "orders", **more: Any) -> dict[str, Any]:
    told = {"txid": txid, "state": "prepared", "kind": "xa", "age_ms": age_ms, "prepared_ms": 5}
    return {**told, "parts": [{"topic": topic, "partition": 0, "count": 3}], **more}


class Broker:
    """What a broker lists; ``away``: what is asked of its topics and transactions is answered in part."""

    def __init__(self, *rows: dict[str, Any], away: Sequence[str] = ()) -> None:
        self.rows, self.away = rows, away
        self.transactions = self.topics = self

    def list(self, state: str) -> Sequence[dict[str, Any]]:
        found = [row for row in self.rows if (row["state"] == "heuristic") == (state == "heuristic")]
        if self.away:
            raise PartialResultError("1 of 2 homes did not answer", found, ["b2"])
        return found

    def watermarks(self, topic: str) -> Sequence[dict[str, Any]]:
        if topic in self.away:
            raise PartialResultError(f"1 of 2 homes of {topic} did not answer", [], ["b2"])
        return []


def doubts(broker: Broker) -> list[InDoubt]:
    spec = AuditSpec("orders", parse_terms(["id = key"]), together=("audit",))
    return TopicAudit(cast(Any, None), cast(Any, broker), "", cast(Any, None), spec).in_doubt()


def told(*rows: dict[str, Any]) -> list[tuple[str, int]]:
    return sorted((doubt.txid, doubt.age_ms) for doubt in doubts(Broker(*rows)))


def test_part_at_another_home_goes_under_its_messages_id() -> None:
    assert told(row(AT_ANOTHER_HOME, kind="branch", of=TXID)) == [(TXID, 1000)]


def test_transaction_in_doubt_at_several_homes_is_told_once() -> None:
    assert told(row(TXID, 900), row(AT_ANOTHER_HOME, 1200, of=TXID), row("c1-a1-1-2")) == [
        (TXID, 1200), ("c1-a1-1-2", 1000),
    ]  # fmt: skip


def test_what_is_in_doubt_elsewhere_does_not_concern_the_topic() -> None:
    assert told(row(TXID, topic="others")) == []


# --- homes that are away, or were given up ---------------------------------------------------------------------------


def given_up(txid: str = TXID, **more: Any) -> dict[str, Any]:
    fact = {"what": "heuristic-hazard", "resource": "b2", "branch": AT_ANOTHER_HOME, "reason": "ada: burnt"}
    return row(txid, state="heuristic", kind="local", heuristics=[fact], **more)


def test_home_that_was_given_up_is_told() -> None:
    [doubt] = doubts(Broker(given_up()))
    assert (doubt.txid, doubt.age_ms) == (TXID, 1000)
    assert doubt.detail == f"home b2 was given up (ada: burnt), with its messages there: txmq tx show {TXID}"


def test_given_up_part_goes_under_its_messages_id() -> None:
    fact = {"what": "heuristic-hazard", "resource": "a1", "branch": TXID, "reason": "ada: burnt"}
    [doubt] = doubts(Broker(row(AT_ANOTHER_HOME, state="heuristic", kind="branch", heuristics=[fact])))
    assert (doubt.txid, doubt.detail.endswith(f"tx show {AT_ANOTHER_HOME}")) == (TXID, True)


def test_of_what_was_given_up_other_topics_hear_nothing() -> None:
    unknown = {**given_up("c1-a1-1-2"), "parts": []}  # where its messages are is not known any more
    assert [doubt.txid for doubt in doubts(Broker(given_up(topic="others"), unknown))] == ["c1-a1-1-2"]


def test_what_an_operator_decided_otherwise_is_none_of_it() -> None:
    fact = {"what": "heuristic-commit", "resource": "shop", "reason": "x"}
    assert doubts(Broker(row(TXID, state="heuristic", heuristics=[fact]))) == []


def test_home_without_partitions_of_the_topics_may_be_away() -> None:
    found = doubts(Broker(row(TXID), given_up("c1-a1-1-2"), away=["others"]))
    assert sorted(doubt.txid for doubt in found) == [TXID, "c1-a1-1-2"]
    for topic in ("orders", "audit"):
        with pytest.raises(PartialResultError, match=f"homes of {topic}"):
            doubts(Broker(row(TXID), away=[topic]))
