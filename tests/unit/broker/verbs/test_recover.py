"""What ``recover`` and ``checks`` cost however much is in doubt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.growth import growth
from tools.images.node import Client, Node
from tools.images.requests import UUID, batch, listed_pages, part
from txmq.broker.state.deadlines import Deadlines
from txmq.broker.state.in_doubt_index import InDoubtIndex, Ordered
from txmq.protocol.transaction_bodies import split_halves

from ..support import node
from .test_decide import decide

LAST_RESOURCE = {"resource": "db", "uuid": UUID, "table": "txmq_marker"}
MANY = {"transactions_open_max": 1 << 20, "prepared_bytes_max": 1 << 40}
_CONTENT = part("a", 0, batch(b"x"), "7")


def _prepared(kind: str, count: int, **words: Any) -> tuple[Node, Client]:
    """A broker with so many of them."""
    broker = node(**MANY)
    client = broker.session()
    for counter in range(1, count + 1):
        client.send("prepare", broker.txid(1, counter), kind, extensions=words, body=_CONTENT)
        broker.pump()
    return broker, client


def _decided(count: int) -> tuple[Node, Client]:
    broker = node(**MANY)
    client = broker.session()
    for counter in range(1, count + 1):
        decide(client, broker.txid(1, counter))
    return broker, client


def _listed(client: Client, **words: Any) -> list[str]:
    return [row["txid"] for page in listed_pages(client, **words) for row in page]


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{}, {"uuid": UUID}, {"state": "all"}], ids=str)
@pytest.mark.parametrize("begun", [lambda n: _prepared("last-resource", n, **LAST_RESOURCE), _decided])
def test_cost_of_a_listed_row_does_not_grow(begun: Callable[[int], tuple[Node, Client]], words: dict[str, str]) -> None:
    def listing_of(count: int) -> Callable[[], object]:
        _, client = begun(count)
        return lambda: len(_listed(client, limit=20, **words)) == count or pytest.fail("not all were listed")

    assert growth(listing_of, 200, 2_000) < 3


def test_one_transaction_is_found_at_constant_cost() -> None:
    def asking(count: int) -> Callable[[], object]:
        broker, client = _prepared("last-resource", count, **LAST_RESOURCE)
        last = broker.txid(1, count)
        return lambda: [client.ask("recover", extensions={"txid": last}) for _ in range(count)]

    assert growth(asking, 200, 2_000) < 3


def test_cost_of_a_handed_out_half_message_does_not_grow() -> None:
    def handing_out(count: int) -> Callable[[], object]:
        broker, client = _prepared("half", count, group="g", deadline=0)
        client.disconnect()
        other = broker.connect()

        def hand_out() -> None:
            broker.clock.advance(120)
            broker.core.tick(broker.clock.now_ms())
            found = 0
            while halves := split_halves(other.ask("checks", "g", extensions={"limit": 20}).body):
                found += len(halves)
            assert found == count

        return hand_out

    assert growth(handing_out, 200, 2_000) < 3


@pytest.mark.parametrize("polls", [1, 50])
def test_an_idle_tick_touches_no_half_that_is_not_due(polls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, _ = _prepared("half", 500, group="g", deadline=0)
    other = broker.connect()
    for _ in range(polls):
        other.send("checks", "g", extensions={"wait": 30_000})
    asked: list[object] = []
    monkeypatch.setattr("txmq.broker.verbs.check_backs._due_ms", lambda _context, half: asked.append(half))
    for _ in range(100):
        broker.core.tick(broker.clock.now_ms())
    assert asked == []
    assert len(broker.context.checks.polls["g"]) == polls


def test_twenty_thousand_prepared_are_settled_in_linear_time() -> None:
    def settling(count: int) -> Callable[[], object]:
        index: InDoubtIndex[str] = InDoubtIndex()
        numbers = list(range(1, count + 1))
        for number in numbers:
            index.add(number, "x", ("u",))
        random.Random(count).shuffle(numbers)

        def settle() -> None:
            for number in numbers:
                index.remove(number, ("u",))
                next(index.behind(0), None)

        return settle

    assert growth(settling, 2_000, 20_000) < 4


# --- what it is made of ----------------------------------------------------------------------------------------------


def test_ordered_items_are_those_of_a_plain_list() -> None:
    chance = random.Random(7)
    kept: Ordered[int] = Ordered()
    plain: list[int] = []
    for number in range(1, 3_000):
        kept.add(number, -number)
        plain.append(number)
        while plain and chance.random() < 0.49:
            kept.remove(plain.pop(0 if chance.random() < 0.5 else chance.randrange(len(plain))))
        if number % 50 == 0:
            behind = chance.randrange(number + 2)
            assert list(kept.behind(behind)) == [(n, -n) for n in plain if n > behind]
        assert len(kept) == len(plain)


def test_deadlines_hand_out_what_is_due_and_keep_few_past() -> None:
    over: set[int] = set()
    deadlines: Deadlines[int] = Deadlines(over.__contains__)
    for number in range(10_000):
        deadlines.add(number, number)
        if number >= 10:
            over.add(number - 10)
    assert len(deadlines) < 200
    assert deadlines.take_due(9_994) == [9_990, 9_991, 9_992, 9_993, 9_994]
    assert (deadlines.take_all(), len(deadlines)) == ([9_995, 9_996, 9_997, 9_998, 9_999], 0)
