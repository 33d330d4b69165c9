"""What the broker tells an audit of a topic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from txmq.spark.audit.spec import AuditSpec, parse_terms
from txmq.spark.audit.topic import TopicAudit

TXID, AT_ANOTHER_HOME = "c1-a1-1-1", "c1-a2-1-1"


def row(txid: str, age_ms: int = 1000, topic: str = "orders", **more: Any) -> dict[str, Any]:
    told = {"txid": txid, "state": "prepared", "kind": "xa", "age_ms": age_ms, "prepared_ms": 5}
    return {**told, "parts": [{"topic": topic, "partition": 0, "count": 3}], **more}


def told(*rows: dict[str, Any]) -> list[tuple[str, int]]:
    transactions = SimpleNamespace(list=lambda _what: list(rows))
    client = cast(Any, SimpleNamespace(transactions=transactions))
    spec = AuditSpec("orders", parse_terms(["id = key"]))
    audit = TopicAudit(cast(Any, None), client, "", cast(Any, None), spec)
    return sorted((doubt.txid, doubt.age_ms) for doubt in audit.in_doubt())


def test_part_at_another_home_goes_under_its_messages_id() -> None:
    assert told(row(AT_ANOTHER_HOME, kind="branch", of=TXID)) == [(TXID, 1000)]


def test_transaction_in_doubt_at_several_homes_is_told_once() -> None:
    assert told(row(TXID, 900), row(AT_ANOTHER_HOME, 1200, of=TXID), row("c1-a1-1-2")) == [
        (TXID, 1200), ("c1-a1-1-2", 1000),
    ]  # fmt: skip


def test_what_is_in_doubt_elsewhere_does_not_concern_the_topic() -> None:
    assert told(row(TXID, topic="others")) == []
