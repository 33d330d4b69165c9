"""What ``recover`` and ``checks`` cost however much is in doubt; and that pages lose and repeat nothing meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.growth import growth
from tools.images.node import Client, Node
from tools.images.requests import UUID, batch, listed_pages, part
from txmq.broker.state.deadlines import Deadlines
from txmq.broker.state.in_doubt_index import InDoubtIndex, Ordered
from txmq.broker.verbs import recover as listing
from txmq.protocol.transaction_bodies import split_halves

from ..support import node, prepare, restarted
from .test_decide import complete, decide

OTHER_UUID = "f" * 32
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


# --- pages -----------------------------------------------------------------------------------------------------------


def test_page_continues_where_the_former_ended_despite_settlements() -> None:
    broker, client = _prepared("last-resource", 6, **LAST_RESOURCE)
    first = json.loads(client.ask("recover", extensions={"limit": 3}).body)
    for counter in (3, 4):
        assert client.ask("rollback", broker.txid(1, counter)).code == 200
    following = json.loads(client.ask("recover", extensions={"limit": 3, "after": first["next"]}).body)
    assert [row["txid"] for row in following["transactions"]] == [broker.txid(1, 5), broker.txid(1, 6)]
    assert following["next"] is None


def test_transaction_settled_meanwhile_does_not_hide_later_ones() -> None:
    """It is the last of the first page, and is then listed among the heuristic ones, after all others."""
    broker, client = _prepared("last-resource", 4, **LAST_RESOURCE)
    first = json.loads(client.ask("recover", extensions={"limit": 2, "state": "all"}).body)
    assert client.ask("commit", broker.txid(1, 2), extensions={"heuristic": "me"}, body=b"").code == 200
    words = {"limit": 9, "state": "all", "after": first["next"]}
    rows = json.loads(client.ask("recover", extensions=words).body)["transactions"]
    assert [(row["txid"], row["state"]) for row in rows] == [
        (broker.txid(1, 3), "prepared"), (broker.txid(1, 4), "prepared"), (broker.txid(1, 2), "heuristic"),
    ]  # fmt: skip


def test_after_a_restart_of_the_broker_the_list_begins_anew() -> None:
    broker, client = _prepared("last-resource", 3, **LAST_RESOURCE)
    first = json.loads(client.ask("recover", extensions={"limit": 2}).body)
    again = restarted(broker).connect()
    rows = json.loads(again.ask("recover", extensions={"after": first["next"]}).body)["transactions"]
    assert [row["txid"] for row in rows] == [broker.txid(1, counter) for counter in (1, 2, 3)]


@pytest.mark.parametrize("after", ["1", "1.prepared", "1.lost.3", "1.prepared.x", "0123-1-1"])
def test_a_place_that_no_page_named_is_refused(after: str) -> None:
    assert node().connect().ask("recover", extensions={"after": after}).error == "bad-request"


def test_page_is_bounded_in_bytes_and_holds_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "ROWS_SIZE_BYTES_MAX", 1)
    _, client = _prepared("last-resource", 3, **LAST_RESOURCE)
    assert [len(page) for page in listed_pages(client)] == [1, 1, 1]


def test_rows_beyond_a_page_are_not_handed_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "ROWS_MAX", 2)
    _, client = _prepared("last-resource", 3, **LAST_RESOURCE)
    assert [len(page) for page in listed_pages(client, limit=100)] == [2, 1]


def test_completed_branch_is_no_longer_listed_under_its_resource() -> None:
    broker = node()
    client = broker.session()
    decide(client, broker.txid(1, 1), uuids=(UUID, OTHER_UUID))
    complete(client, broker.txid(1, 1))
    assert (_listed(client, uuid=UUID), _listed(client, uuid=OTHER_UUID)) == ([], [broker.txid(1, 1)])
    broker = restarted(broker)
    client = broker.session("1.0")
    assert (_listed(client, uuid=UUID), _listed(client, uuid=OTHER_UUID)) == ([], [broker.txid(1, 1)])
    complete(client, broker.txid(1, 1), OTHER_UUID)
    assert (_listed(client), len(broker.state.decisions.index)) == ([], 0)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_list_is_equal_after_a_restart(checkpoint: bool) -> None:
    broker = node(**MANY)
    client = broker.session()
    for counter in (4, 2, 9):
        prepare(client, broker.txid(1, counter), ("a", 0, batch()))
    decide(client, broker.txid(1, 5))
    client.ask("rollback", broker.txid(1, 2), extensions={"heuristic": "me"})
    before = _listed(client, state="all")
    if checkpoint:
        broker.checkpoint()
    assert _listed(restarted(broker).connect(), state="all") == before == [
        broker.txid(1, counter) for counter in (4, 9, 5, 2)
    ]  # fmt: skip


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
