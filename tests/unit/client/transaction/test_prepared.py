"""Half messages and branches of foreign transactions, prepared and settled by hand: what both rely on in their home."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from tools.simulated.broker import SimulatedBroker
from txmq.client.transaction.conversation import Conversation, Extensions
from txmq.client.transaction.homes import HomePart, TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.prepared import prepare, resolve
from txmq.errors import TransactionConflictError
from txmq.log.records import decode
from txmq.model import Resolution
from txmq.protocol.transaction_bodies import DueHalf, split_halves

_numbers = count(1)


@pytest.fixture
def client() -> SimulatedBroker:
    return SimulatedBroker()


def deadline_ms(client: SimulatedBroker, seconds: float) -> int:
    """A deadline by the broker's clock."""
    home = Conversation(client.routes.any_link(), client.clock, seconds)
    home.begin()
    return home.deadline_ms


def prepared(client: SimulatedBroker, kind: str, **given: Any) -> HomePart:
    homes = TransactionHomes(client, client.clock, 30.0)
    buffer = MessageBuffer(None, lambda _topic: 0)
    buffer.add("orders", 0, (b"k", b"v", [], 1_700_000_000_000))
    words: Extensions = dict(given)
    prepare(homes, kind, words, buffer)
    return homes.decider


def due(client: SimulatedBroker, group: str) -> list[DueHalf]:
    body = client.control.call("checks", group, extensions={"limit": 10, "wait": 5000}, timeout=30.0)
    return split_halves(body)


def rows(client: SimulatedBroker, **given: Any) -> list[dict[str, Any]]:
    body = client.control.repeat("recover", extensions={"state": "all", **given}, timeout=60.0)
    found: list[dict[str, Any]] = json.loads(body)["transactions"]
    return found


def test_half_message_is_handed_out_until_settled_with_rising_numbers(client: SimulatedBroker) -> None:
    group = f"g{next(_numbers)}"
    home = prepared(client, "half", group=group, deadline=deadline_ms(client, 2.0))
    for attempt in (1, 2):
        [half] = due(client, group)
        assert (half.txid, half.attempt) == (home.txid, attempt)
        [(topic, partition, batch)] = half.parts
        assert [message.value for message in decode(batch, topic, partition)] == [b"v"]
    [row] = [row for row in rows(client) if row["txid"] == home.txid]
    assert (row["state"], row["kind"], row["group"]) == ("prepared", "half", group)
    [line] = resolve(client, home.txid, Resolution.COMMIT, 5.0)
    assert (line.topic, line.count) == ("orders", 1)
    assert resolve(client, home.txid, Resolution.COMMIT, 5.0) == [line]
    with pytest.raises(TransactionConflictError):
        resolve(client, home.txid, Resolution.ROLLBACK, 5.0)


def test_a_half_of_another_group_is_not_handed_out(client: SimulatedBroker) -> None:
    mine, other = (f"g{next(_numbers)}" for _ in range(2))
    until_ms = deadline_ms(client, 2.0)
    prepared(client, "half", group=other, deadline=until_ms)
    home = prepared(client, "half", group=mine, deadline=until_ms)
    assert [half.txid for half in due(client, mine)] == [home.txid]
    resolve(client, home.txid, Resolution.ROLLBACK, 5.0)
    with pytest.raises(TransactionConflictError):
        resolve(client, home.txid, Resolution.COMMIT, 5.0)


def test_foreign_branch_is_found_by_its_xid_and_prepared_once(client: SimulatedBroker) -> None:
    xid = f"7.{next(_numbers):04x}.ff"
    home = prepared(client, "foreign", xid=xid)
    [row] = rows(client, xid=xid)
    assert (row["txid"], row["state"], row["kind"], row["xid"]) == (home.txid, "prepared", "foreign", xid)
    with pytest.raises(TransactionConflictError):
        prepared(client, "foreign", xid=xid)
    assert rows(client, xid="7.ffff.ff") == []
    resolve(client, home.txid, Resolution.ROLLBACK, 5.0)
    assert rows(client, xid=xid) == []
    resolve(client, prepared(client, "foreign", xid=xid).txid, Resolution.COMMIT, 5.0)
