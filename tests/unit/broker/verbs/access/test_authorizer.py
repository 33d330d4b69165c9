"""What lists show to a user."""

from __future__ import annotations

import json
from collections.abc import Callable

from tools.images.node import Answer
from tools.images.requests import UUID
from txmq.protocol.grants import ADMINISTRATOR, Grant

from ..test_query import ask as ask_query
from .verb_cases import World, send_page

WRITE, READ = Grant("write", "topic", "a"), Grant("read", "topic", "a")
GROUP, INSTALL = Grant("read", "group", "g"), Grant("install", "resource", UUID)


def world(*grants: Grant) -> World:
    """Shop has these grants."""
    made = World()
    made.allow(*grants)
    return made


def test_lists_show_what_one_may_do_something_with() -> None:
    made = world()
    listed: dict[str, Callable[[], list[object]]] = {
        "meta": lambda: [row["name"] for row in _json(made.shop.ask("meta", "*"))["topics"]],
        "topic": lambda: [row["name"] for row in _json(made.shop.ask("topic", "list", "*"))["topics"]],
        "cluster": lambda: [row["topic"] for row in _json(made.shop.ask("cluster", "describe"))["topics"]],
        "stats": lambda: _first_words(made.shop.ask("stats", "topics")),
        "offsets": lambda: _first_words(made.shop.ask("stats", "offsets")),
        "json": lambda: [row["name"] for row in _json(made.shop.ask("stats", "json"))["topics"]],
    }
    for grants, shown in (
        ((), []), ((GROUP, INSTALL), []), ((WRITE,), ["a"]), ((Grant("delete", "topic", "b"),), ["b"]),
        ((Grant("describe", "topic", "*"),), ["a", "b"]), ((ADMINISTRATOR,), ["a", "b"]),
    ):  # fmt: skip
        made.allow(*grants)
        for name, ask in listed.items():
            assert ask() == shown, (name, grants)
    made.allow(WRITE)
    found = _json(made.shop.ask("stats", "json"))
    assert found.keys() == {"broker", "resources", "chains", "topics", "offsets"}
    assert {row["topic"] for row in found["offsets"]} == {"a"}


def _first_words(answer: Answer) -> list[object]:
    return list(dict.fromkeys(line.split()[0] for line in answer.text.splitlines()))


def _json(answer: Answer) -> dict[str, list[dict[str, object]]]:
    assert answer.code == 200, answer
    found: dict[str, list[dict[str, object]]] = json.loads(answer.body)
    return found


def test_lists_of_groups_queries_and_databases_show_what_one_may() -> None:
    made = world()
    for name in ("g", "other"):
        words = {"member": "me", "topics": "a,b"}
        assert made.ops.ask("group", "join", name, extensions=words, body=b"").code == 200
    ask_query(made.ops, "epoch", "*")
    for name in ("g", "other"):
        assert ask_query(made.ops, "open", name, epoch=1).code == 200
    for uuid in (UUID, "f" * 32, None):
        found = {"kind": "xa", "uuid": uuid, "reachable": True, "branches": 1, "age_ms": 1}
        body = json.dumps(found).encode()
        assert made.ops.ask("resource", "report", f"db{str(uuid)[0]}", body=body).code == 200
    assert send_page(made.ops, 1, 0, session=2).code == 200

    def shown() -> list[int]:
        return [
            len(_json(made.shop.ask("group", "list", "*", body=b""))["groups"]),
            len(_json(ask_query(made.shop, "list", "*"))["queries"]),
            len(_json(made.shop.ask("resource", "list", "*", body=b""))["resources"]),
            len(made.shop.ask("stats", "resources").text.splitlines()),
            len(made.shop.ask("stats", "chains").text.splitlines()),
        ]

    assert shown() == [0] * 5
    made.allow(GROUP, INSTALL)
    assert shown() == [1] * 5
    rows = _json(made.group("describe"))
    assert rows["partitions"] == []
    made.allow(GROUP, READ)
    assert {row["topic"] for row in _json(made.group("describe"))["partitions"]} == {"a"}
    made.allow(ADMINISTRATOR)
    assert shown() == [2, 2, 3, 3, 1]
