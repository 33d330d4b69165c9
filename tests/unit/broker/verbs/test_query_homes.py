"""Queries over several homes: epochs of one counter, one home a query, and whoever dies on the way."""

from __future__ import annotations

import pytest

from txmq.broker.cluster.cluster_view import ASKS_MAX
from txmq.broker.cluster.registry_asks import Ask, FindAnchor, ReleaseAnchor, carry_out
from txmq.errors import RegistryAwayError

from ..support import node
from .support import A, B, Broker, pair

OPENED = '{"query": "%s", "epoch": %d, "batch": null'


def query(broker: Broker, action: str, name: str = "q", body: bytes = b"", **words: int) -> tuple[int, str]:
    """One action; the registry answers at once."""
    code, text = broker.ask("query", action, name, body=body, **words)
    return code, text.rstrip()


def send(broker: Broker, action: str, name: str = "q", **words: int) -> bytes:
    """The same, and nobody asks the registry yet."""
    opaque = broker.client.send("query", action, name, extensions=words, body=b"")
    broker.node.pump()
    return opaque


def answer(broker: Broker, opaque: bytes) -> tuple[int, str] | None:
    """What came, if it did."""
    found = broker.client.received.pop(opaque, None)
    return None if found is None else (found.code, found.text.rstrip())


def anchor(broker: Broker, name: str = "q") -> int | None:
    """The home of a query, as the registry has it."""
    return broker.registry.anchors("query", [name]).get(name)


def is_refused(answered: tuple[int, str], home: int = A, name: str = "q") -> bool:
    """Whether it names the anchor and where that is led."""
    code, text = answered
    return code == 409 and text == f"not-owner leader=10.0.0.{home}:8123 home={home:016x} is the anchor of query {name}"


def away(broker: Broker, ask: Ask) -> None:
    """The registry does not answer."""
    broker.node.core.registry_answered(ask.number, RegistryAwayError("gone"))
    broker.node.pump()


# --- epochs ----------------------------------------------------------------------------------------------------------


def test_epochs_are_of_one_counter_for_all_homes() -> None:
    one, two = pair()
    drawn = [query(broker, "epoch", "*") for broker in (one, two, two, one)]
    assert drawn == [(200, f'{{"epoch": {number}}}') for number in (1, 2, 3, 4)]
    assert (one.journaled().count("epoch-drawn"), one.node.state.queries.last_epoch) == (2, 4)


def test_epoch_is_told_when_its_record_is_forced() -> None:
    one, _ = pair()
    opaque = one.client.send("query", "epoch", "*", body=b"")
    (ask,) = one.asks()
    one.node.core.registry_answered(ask.number, carry_out(one.registry, A, ask))
    one.node.flush()
    assert answer(one, opaque) is None
    one.node.pump()
    assert answer(one, opaque) == (200, '{"epoch": 1}')


def test_epoch_is_above_those_of_queries_opened_here() -> None:
    one, _ = pair()
    assert query(one, "open", epoch=41)[0] == 200
    assert query(one, "epoch", "*") == (200, '{"epoch": 42}')
    assert one.again().node.state.queries.last_epoch == 42


@pytest.mark.parametrize("action", ["epoch", "open"])
def test_registry_that_is_away_leaves_everything_as_it_was(action: str) -> None:
    one, two = pair()
    opaque = send(one, action, "*" if action == "epoch" else "q", **({"epoch": 1} if action == "open" else {}))
    (ask,) = one.asks()
    away(one, ask)
    answered = answer(one, opaque)
    assert answered is not None
    assert (answered[0], "the registry does not answer" in answered[1]) == (503, True)
    assert query(one, "epoch", "*") == (200, '{"epoch": 1}')
    assert query(one, "open", epoch=1)[0] == 200
    assert (anchor(two), is_refused(query(two, "open", epoch=1))) == (A, True)


# --- the home of a query ---------------------------------------------------------------------------------------------


def test_first_open_fixes_the_home_of_a_query() -> None:
    one, two = pair()
    assert query(two, "open", epoch=1)[1].startswith(OPENED % ("q", 1))
    assert is_refused(query(one, "open", epoch=2), B)
    assert "query-opened" not in one.journaled()
    assert query(two, "open", epoch=3)[1].startswith(OPENED % ("q", 3))
    assert query(one, "open", "other", epoch=1)[0] == 200
    assert (anchor(one), anchor(one, "other")) == (B, A)


def test_home_that_is_away_is_named_without_a_leader() -> None:
    one, two = pair()
    query(one, "open", epoch=1)
    one.registry.close()
    two.refresh()
    assert query(two, "open", epoch=2) == (409, f"not-owner leader=- home={A:016x} is the anchor of query q")


def test_opening_of_a_known_query_asks_nothing() -> None:
    one, _ = pair()
    query(one, "open", epoch=1)
    for epoch in (1, 5, 4):
        opaque = send(one, "open", epoch=epoch)
        assert one.asks() == []
        assert answer(one, opaque) is not None


def test_home_of_a_query_is_found_again_after_a_crash() -> None:
    one, two = pair()
    send(one, "open", epoch=1)
    (ask,) = one.asks()
    one.carry_out_unheard(ask)  # the anchor is fixed, and nothing is journaled
    again = one.again().lead()
    assert is_refused(query(two, "open", epoch=1))
    assert query(again, "open", epoch=1)[0] == 200


def test_two_openings_that_wait_come_to_one_query() -> None:
    one, _ = pair()
    first, second, former = send(one, "open", epoch=2), send(one, "open", epoch=3), send(one, "open", epoch=1)
    one.work()
    answers = [answer(one, opaque) for opaque in (first, second, former)]
    assert [found and found[0] for found in answers] == [200, 200, 410]
    assert one.node.state.queries.named["q"].epoch == 3


def test_opening_whose_client_is_gone_opens_nothing() -> None:
    one, two = pair()
    send(one, "open", epoch=1)
    one.client.disconnect()
    one.work()
    assert "q" not in one.node.state.queries.named
    assert is_refused(query(two, "open", epoch=1))  # its home stays, and takes the next opening


@pytest.mark.parametrize(
    ("action", "code", "text"),
    [
        ("commit", 404, "unknown-query"), ("delete", 404, "unknown-query"), ("abort", 200, '"rolled_back": 0'),
        ("list", 200, '{"queries": []}'),
    ],
)  # fmt: skip
def test_other_actions_make_no_anchor(action: str, code: int, text: str) -> None:
    one, two = pair()
    for name in ("q", "none"):
        opaque = send(two, action, name, **({"epoch": 1, "batch": 0} if action == "commit" else {}))
        assert two.asks() == []
        answered = answer(two, opaque)
        assert answered is not None
        assert (answered[0], text in answered[1]) == (code, True)
        query(one, "open", epoch=1)
    assert (anchor(one), anchor(one, "none")) == (A, None)


def test_prepare_makes_no_anchor() -> None:
    one, two = pair()
    query(one, "open", epoch=1)
    session = two.client.ask("hello", 1, "worker", extensions={"session": "new"})
    assert session.code == 200
    words: dict[str, str | int] = {"query": "q", "epoch": 1, "batch": 0, "task": 0, "attempt": 0}
    code, text = two.ask("prepare", two.node.txid(1, 1), "spark", body=b"", **words)
    assert (code, text.split()[0], anchor(two)) == (404, "unknown-query", A)


@pytest.mark.parametrize(("name", "epoch"), [("*", 1), ("q", 0), ("q", 1 << 62)])
def test_opening_that_cannot_be_makes_no_anchor(name: str, epoch: int) -> None:
    one, _ = pair()
    opaque = send(one, "open", name, epoch=epoch)
    assert one.asks() == []
    answered = answer(one, opaque)
    assert answered is not None
    assert answered[0] == 400


def test_opening_over_the_limit_makes_no_anchor() -> None:
    one, _ = pair()
    object.__setattr__(one.node.settings, "queries_max", 1)
    waiting = [send(one, "open", name, epoch=1) for name in ("q", "r")]
    one.work()
    answers = [answer(one, opaque) for opaque in waiting]
    assert [found and found[0] for found in answers] == [200, 429]
    assert query(one, "open", "s", epoch=1)[0] == 429
    assert anchor(one, "s") is None


# --- the end of a query ----------------------------------------------------------------------------------------------


def test_query_that_was_deleted_begins_at_another_home() -> None:
    one, two = pair()
    query(one, "open", epoch=1)
    assert query(one, "delete")[0] == 200
    assert anchor(two) is None
    assert query(two, "open", epoch=2)[1].startswith(OPENED % ("q", 2))
    assert is_refused(query(one, "open", epoch=3), B)
    assert query(one, "commit", epoch=1, batch=0)[0] == 404


def test_home_is_released_when_the_deletion_is_forced() -> None:
    one, two = pair()
    query(one, "open", epoch=1)
    one.client.send("query", "delete", "q", body=b"")
    assert one.node.core.take_registry_asks() == []
    again = one.again().lead()  # it died before that
    assert is_refused(query(two, "open", epoch=2))
    assert query(again, "delete")[0] == 200
    assert anchor(two) is None


def test_home_that_was_not_released_takes_the_next_query() -> None:
    one, two = pair()
    query(one, "open", epoch=1)
    opaque = send(one, "delete")
    (ask,) = one.asks()
    away(one, ask)
    assert answer(one, opaque) is not None
    assert is_refused(query(two, "open", epoch=2))
    assert query(one, "open", epoch=2)[1].startswith(OPENED % ("q", 2))
    assert query(one, "delete")[0] == 200
    assert anchor(two) is None


def test_opening_behind_a_deletion_asks_behind_its_release() -> None:
    one, two = pair()
    query(one, "open", epoch=1)
    one.client.send("query", "delete", "q", body=b"")
    opaque = one.client.send("query", "open", "q", extensions={"epoch": 2}, body=b"")
    assert one.node.core.take_registry_asks() == []
    asks = one.asks()
    assert [type(ask) for ask in asks] == [ReleaseAnchor, FindAnchor]
    one.carry_out(asks[0])
    assert query(two, "open", epoch=3)[0] == 200  # between the two
    one.carry_out(asks[1])
    answered = answer(one, opaque)
    assert answered is not None
    assert is_refused(answered, B)


def test_opening_of_a_query_that_comes_and_goes_asks_again() -> None:
    one, two = pair()
    first, second = send(one, "open", epoch=1), send(one, "open", epoch=2)
    asks = one.asks()
    one.carry_out(asks[0])
    assert answer(one, first) is not None
    send(one, "delete")
    one.carry_out(asks[1])  # asked before the release: what it says is over soon
    one.work()
    assert answer(one, second) is not None
    assert (anchor(one), "q" in one.node.state.queries.named) == (A, True)
    assert is_refused(query(two, "open", epoch=3))


def test_deletion_is_not_refused_while_the_registry_owes_answers() -> None:
    one, two = pair()
    query(one, "open", epoch=1)
    for _ in range(ASKS_MAX):
        send(one, "epoch", "*")
    opaque = send(one, "delete")
    answered = answer(one, opaque)
    assert answered is not None
    assert answered[0] == 200
    late = send(one, "open", epoch=2)
    answered = answer(one, late)
    assert answered is not None
    assert (answered[0], is_refused(query(two, "open", epoch=2))) == (429, True)


def test_lone_broker_asks_nobody() -> None:
    made = node()
    client = made.connect()
    for action, name, words in (
        ("epoch", "*", {}), ("open", "q", {"epoch": 1}), ("delete", "q", {}), ("open", "q", {"epoch": 1}),
    ):  # fmt: skip
        assert client.ask("query", action, name, extensions=words, body=b"").code == 200
    assert client.ask("query", "open", "q", extensions={"epoch": 2}, body=b"").code == 400
    assert made.core.take_registry_asks() == []
