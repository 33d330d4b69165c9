"""One user makes half of the groups, partitions, queries and outboxes that there may be, and others the rest."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tools.images.node import Answer, Client, Node
from txmq.broker.state import outbox_chains

from ..test_outbox import send as send_page
from ..test_query import ask as ask_query
from .access_support import add, lives, node, operator

MOST = 6
SETTINGS = {"groups_max": MOST, "queries_max": MOST, "partitions_max": MOST + 3}  # three are there
GRANTS = (
    {"may": "read,alter,delete,settle", "group": "*"}, {"may": "read,create,alter,delete", "topic": "*"},
    {"may": "install", "resource": "*"},
)  # fmt: skip


def world() -> Node:
    made = node(**SETTINGS)
    add(made.connect(), "ops")
    for name in ("shop", "other"):
        add(operator(made), name)
        for words in GRANTS:
            assert operator(made).ask("acl", "grant", name, extensions=words).code == 200
    return made


def of(made: Node, user: str) -> Client:
    client = operator(made, user)
    assert client.hello().code == 200
    return client


def saved(client: Client, name: str) -> Answer:
    return client.ask("group", "reset", name, extensions={"create": None}, body=b'[["a", 0, 0]]')


def joined(client: Client, name: str) -> Answer:
    """The second member of it has nothing, and none of it is saved: topic ``b`` has one partition."""
    return client.ask("group", "join", name, extensions={"member": "m", "topics": "b"}, body=b"[]")


def opened(client: Client, name: str) -> Answer:
    epoch = json.loads(ask_query(client, "epoch", "*").body)["epoch"]
    return ask_query(client, "open", name, epoch=epoch)


def forgotten(client: Client, name: str) -> Answer:
    return ask_query(client, "delete", name)


def topic(client: Client, name: str) -> Answer:
    return client.ask("topic", "create", name)


MAKE: dict[str, tuple[Callable[[Client, str], Answer], Callable[[Client, str], Answer], int]] = {
    "group": (saved, lambda client, name: client.ask("group", "delete", name, body=b""), MOST // 2),
    "query": (opened, forgotten, MOST // 2),
    "partition": (topic, lambda client, name: client.ask("topic", "delete", name), (MOST + 3) // 2),
}


@pytest.mark.parametrize("kind", MAKE)
def test_one_user_makes_half_at_most_and_others_the_rest(kind: str) -> None:
    make, delete, half = MAKE[kind]
    made = world()
    shop = of(made, "shop")
    assert [make(shop, f"s{number}").code for number in range(half + 1)] == [200] * half + [429]
    assert make(of(made, "other"), "o1").code == 200
    assert make(operator(made), "o2").code == 200  # an administrator is not counted
    for life in lives(made):
        shop = of(life, "shop")
        refused = make(shop, "more")
        assert (refused.error, "half of which is one user's at most" in refused.text) == ("overloaded", True)
        assert delete(operator(life), "s0").code == 200  # whoever deletes it
        assert make(shop, "s0").code == 200
        assert make(shop, "more").error == "overloaded"
        assert delete(shop, "s0").code == 200
        assert life.state.principals.made_sizes == {
            ("topic" if kind == "partition" else kind, user): size for user, size in (("shop", half - 1), ("other", 1))
        }
        assert make(shop, "s0").code == 200


def test_partitions_that_are_added_count_for_who_made_the_topic() -> None:
    made = world()
    shop, other = of(made, "shop"), of(made, "other")
    assert shop.ask("topic", "create", "s", extensions={"partitions": 2}).code == 200
    assert other.ask("topic", "alter", "s", extensions={"partitions": 4}).code == 200
    assert topic(shop, "t").error == "overloaded"
    assert shop.ask("topic", "alter", "s", extensions={"partitions": 5}).error == "overloaded"
    assert shop.ask("topic", "alter", "s", extensions={"retention_ms": 3_600_000}).code == 200
    assert made.state.principals.made == {("topic", "s"): ("shop", 4)}
    assert shop.ask("topic", "create", "u", extensions={"partitions": 5}).error == "overloaded"
    assert topic(other, "o").code == 200


def test_groups_of_which_nothing_is_saved_count_too() -> None:
    made = world()
    clients = [of(made, "shop") for _ in range(MOST // 2 + 1)]
    answers = [joined(client, f"g{number}").code for number, client in enumerate(clients)]
    assert answers == [200] * (MOST // 2) + [429]
    assert saved(clients[0], "more").error == "overloaded"
    assert joined(of(made, "other"), "o").code == 200


def test_outboxes_are_shared_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_chains, "OUTBOXES_MAX", 4)
    made = world()
    shop, other = of(made, "shop"), of(made, "other")
    sent = []
    for number, client in enumerate((shop, shop, shop, other)):
        session = client.client.session
        assert session is not None
        sent.append(send_page(client, number + 1, 0, session=session.number, outbox=f"{number:032x}").code)
    assert sent == [200, 200, 429, 200]


def test_without_users_nobody_is_counted() -> None:
    made = node(**SETTINGS)
    client = made.session()
    assert [saved(client, f"g{number}").code for number in range(MOST)] == [200] * MOST
    assert made.state.principals.freeze() is None
