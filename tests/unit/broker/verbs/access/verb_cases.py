"""One request of each verb and action, what is there before it, and the grants that it takes: the table, by example.

Each request is served (200) if the user has what ``needs`` says. Things are topic ``a``, group ``g`` and ``UUID``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from tools.images.node import Answer, Client, Node
from tools.images.requests import UUID, batch, part
from txmq.protocol.grants import ADMINISTRATOR, OPERATIONS, Grant
from txmq.redo import entries

from ...support import node, prepare, put
from ..test_check_backs import half
from ..test_decide import complete, decide
from ..test_query import ask as ask_query
from ..test_query import write as write_batch
from .access_support import add, keys, operator

NAMES = {"topic": "a", "group": "g", "resource": UUID, "broker": "all"}
OTHER_NAMES = {"topic": "ab", "group": "gh", "resource": "f" * 32}


def grants_on(names: dict[str, str]) -> list[Grant]:
    """Every grant that there is, on these things."""
    return [Grant(may, kind, name) for kind, name in names.items() for may in OPERATIONS[kind]]


EVERY = grants_on(NAMES)
Need = frozenset[Grant]  # one of them will do


def need(may: str, kind: str) -> Need:
    """A grant on the thing of the kind."""
    return frozenset({Grant(may, kind, NAMES[kind])})


SETTLE_GROUP, ALTER_GROUP, DELETE_GROUP = (need(may, "group") for may in ("settle", "alter", "delete"))
WRITE, READ, GROUP = need("write", "topic"), need("read", "topic"), need("read", "group")
SETTLE, INSTALL = need("settle", "resource"), need("install", "resource")
WATCH = need("describe", "broker")
ANY_OF_TOPIC, ANY_OF_GROUP = (
    frozenset(grant for grant in EVERY if grant.kind == kind) | WATCH for kind in ("topic", "group")
)
NOBODY_ELSE: Need = frozenset()  # administrators only


class World:
    """A broker with users: ``ops``, an administrator, and ``shop``; each has a session (2 and 1)."""

    def __init__(self, *, has_users: bool = True) -> None:
        self.made: Node = node()
        if has_users:
            add(self.made.connect(), "ops")
            add(operator(self.made), "shop")
            self.allow(ADMINISTRATOR)
        self.shop, self.ops = self._session("shop", has_users), self._session("ops", has_users)

    def _session(self, name: str, has_users: bool) -> Client:
        client = operator(self.made, name) if has_users else self.made.connect()
        assert client.hello().code == 200
        return client

    def allow(self, *grants: Grant) -> None:
        """Shop has these grants and no others."""
        self.made.state.principals.fold(entries.GRANTED, {"user": "shop", "grants": grants})

    def own(self, counter: int = 1) -> str:
        """One of shop's transactions."""
        return self.made.txid(1, counter)

    def others(self, counter: int = 1) -> str:
        """One of the administrator's."""
        return self.made.txid(2, counter)

    def group(self, action: str, rows: object = "", group: str = "g", **words: str | int | None) -> Answer:
        """An action of shop's in the group."""
        return self.shop.ask("group", action, group, extensions=words, body=json.dumps(rows or []).encode())


class Case(NamedTuple):
    """A request that is answered 200 to a user to whom all of ``needs`` are granted."""

    verb: str
    action: str
    needs: tuple[Need, ...]
    ask: Callable[[World], Answer]
    before: Callable[[World], object] = lambda world: None
    about: str = ""
    of_any: bool = False  # the grant on any thing of the kind will do
    is_over: bool = False  # nothing is left to end: a user who settles for others is told so (410)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.verb, self.action, self.about)))


def send_page(client: Client, counter: int, after: int, value: bytes = b"", *, session: int = 1) -> Answer:
    """Commit a page that follows the one of transaction ``after`` (0: none); without a value it has no messages."""
    given = {"outbox": UUID, "name": "shop", "after": client.node.txid(session, after) if after else "-"}
    body = part("a", 0, batch(value)) if value else b""
    return client.ask("commit", client.node.txid(session, counter), extensions=given, body=body)


def _prepared(world: World) -> None:
    assert prepare(world.ops, world.others(), ("a", 0, batch(b"x"))).code == 200


def _decided(world: World) -> None:
    assert decide(world.ops, world.others(), ("a", 0, batch(b"x"))).code == 200


def _heuristic(world: World) -> None:
    _prepared(world)
    assert world.ops.ask("rollback", world.others(), extensions={"heuristic": "gone"}).code == 200


def _half(world: World) -> None:
    assert half(world.ops, world.others(), group="g").code == 200


def _member(world: World) -> None:
    assert world.group("join", member="me", topics="a").code == 200


def _saved(world: World) -> None:
    _member(world)
    assert world.group("save", [["a", 0, 1, 1, None]], member="me").text == '{"refused": []}\n'
    assert world.group("leave", member="me").code == 200


def _opened(world: World) -> None:
    assert ask_query(world.ops, "epoch", "*").code == 200
    assert ask_query(world.ops, "open", "g", epoch=1).code == 200


def _no_topic(world: World) -> None:
    assert world.ops.ask("topic", "delete", "a").code == 200


def _stream(world: World) -> Answer:
    return world.shop.ask("put", "a", 0, extensions={"tx": world.own()}, body=batch(b"x"))


def _offsets(row: object) -> tuple[str, bytes]:
    text = json.dumps([["g", 1, [row]]])
    return str(len(text)), text.encode()


def _commit_offsets(world: World) -> Answer:
    size, text = _offsets(["a", 0, 1, 1, None])
    body = text + part("a", 0, batch(b"x"))
    return world.shop.ask("commit", world.own(), extensions={"offsets": size}, body=body)


def _settle(verb: str, *, others: bool = True) -> Callable[[World], Answer]:
    def ask(world: World) -> Answer:
        body = b"" if verb == "commit" else None
        return world.shop.ask(verb, world.others() if others else world.own(), body=body)

    return ask


def _line(*words: str | int, body: bytes | None = None, **extensions: str | int | None) -> Callable[[World], Answer]:
    return lambda world: world.shop.ask(str(words[0]), *words[1:], extensions=extensions, body=body)


def _line_of_branch(**words: None) -> Callable[[World], Answer]:
    return lambda world: world.shop.ask("outcome", world.others(), extensions={"uuid": UUID, **words})


def _report(world: World) -> Answer:
    found = {"kind": "xa", "uuid": UUID, "reachable": True, "why": None, "branches": 0, "age_ms": 0, "oldest": []}
    return world.shop.ask("resource", "report", "db", body=json.dumps(found).encode())


_NEW_USER = json.dumps({"keys": keys(), "certificate": None}).encode()
_HAZARD = {"hazard": "x", "resource": "db", "uuid": UUID, "kind": "xa"}
CASES = [
    Case("hello", "", (), _line("hello", 1, "me", session="new")),
    Case("end", "", (), _line("end", 0)),
    Case("ping", "", (), _line("ping")),
    Case("version", "", (), _line("version")),
    Case("help", "", (), _line("help", "*")),
    Case("quit", "", (), _line("quit")),
    Case("put", "", (WRITE,), lambda world: put(world.shop, b"v")),
    Case("put", "", (WRITE,), lambda world: put(world.shop, b"v", producer=1), about="in a session"),
    Case("put", "", (WRITE,), _line("put", "a", 0, raw=None, body=b"v"), about="raw"),
    Case("put", "", (WRITE,), _stream, about="streamed"),
    Case("get", "", (READ,), _line("get", "a", 0, 0, 1000)),
    Case("offset", "", (ANY_OF_TOPIC,), _line("offset", "a", 0, "latest")),
    Case("meta", "", (ANY_OF_TOPIC,), _line("meta", "a")),
    Case("meta", "", (), _line("meta", "*"), about="all"),
    Case("prepare", "", (WRITE, INSTALL), lambda world: prepare(world.shop, world.own(), ("a", 0, batch()))),
    Case("prepare", "", (WRITE, GROUP), lambda world: half(world.shop, world.own(), group="g"), about="half"),
    Case(
        "prepare", "", (WRITE, GROUP), lambda world: write_batch(world.shop, world.own(), ("a", 0, batch()), query="g"),
        _opened, "spark",
    ),
    Case("commit", "", (WRITE,), lambda w: w.shop.ask("commit", w.own(), body=part("a", 0, batch()))),
    Case("commit", "", (WRITE, GROUP), _commit_offsets, _member, "offsets"),
    Case("commit", "", (SETTLE,), _settle("commit"), _prepared, "another's"),
    Case("commit", "", (SETTLE_GROUP,), _settle("commit"), _half, "another's half"),
    Case("rollback", "", (SETTLE,), _settle("rollback"), _prepared, "another's"),
    Case("rollback", "", (), _settle("rollback", others=False)),
    Case("rollback", "", (INSTALL,), lambda w: w.shop.ask("rollback", w.own(), extensions=_HAZARD), about="hazard"),
    Case("rollback", "", (NOBODY_ELSE,), _settle("rollback"), about="another's, absent", is_over=True),
    Case("outcome", "", (), _settle("outcome", others=False)),
    Case("outcome", "", (SETTLE,), _settle("outcome"), _prepared, "another's"),
    Case("outcome", "", (SETTLE,), _settle("outcome"), _decided, "another's, decided"),
    Case("outcome", "", (NOBODY_ELSE,), _settle("outcome"), about="another's, absent"),
    Case("outcome", "", (SETTLE,), _line_of_branch(), about="another's, absent, its branch"),
    Case("outcome", "", (SETTLE,), _line_of_branch(fence=None), about="another's, absent, its branch fenced"),
    Case("decide", "", (WRITE, INSTALL), lambda world: decide(world.shop, world.own(), ("a", 0, batch(b"x")))),
    Case("complete", "", (SETTLE,), lambda world: complete(world.shop, world.others()), _decided),
    Case("forget", "", (SETTLE,), _settle("forget"), _heuristic),
    Case("token", "", (SETTLE | INSTALL,), _line("token", UUID, "b" * 32)),
    Case("token", "", (INSTALL,), _line("token", UUID, "b" * 32, adopted=None), about="adopted"),
    Case("commit", "", (INSTALL,), lambda world: send_page(world.shop, 1, 0), about="a page"),
    Case("commit", "", (WRITE, INSTALL), lambda world: send_page(world.shop, 1, 0, b"x"), about="page and message"),
    Case("outbox", "", (INSTALL,), _line("outbox", UUID)),
    Case("outbox", "", (NOBODY_ELSE,), _line("outbox", UUID, forget=None), about="forget"),
    Case("recover", "", (), _line("recover")),
    Case("parts", "", (SETTLE, READ), _settle("parts"), _prepared),
    Case("checks", "", (GROUP,), _line("checks", "g")),
    Case("group", "join", (GROUP, READ), lambda world: world.group("join", member="me", topics="a")),
    Case("group", "heartbeat", (GROUP,), lambda world: world.group("heartbeat", member="me"), _member),
    Case("group", "elsewhere", (GROUP,), lambda world: world.group("elsewhere", member="me"), _member),
    Case("group", "leave", (GROUP,), lambda world: world.group("leave", member="me"), _member),
    Case("group", "save", (GROUP,), lambda w: w.group("save", [["a", 0, 1, 1, None]], member="me"), _member),
    Case("group", "describe", (ANY_OF_GROUP,), lambda world: world.group("describe"), _member),
    Case("group", "list", (), lambda world: world.group("list", group="*")),
    Case("group", "reset", (ALTER_GROUP, READ), lambda world: world.group("reset", [["a", 0, 1]], create=None)),
    Case("group", "deferred", (ALTER_GROUP, READ), lambda w: w.group("deferred", [["a", 0, None, "x"]]), _saved),
    Case("group", "delete", (DELETE_GROUP,), lambda world: world.group("delete"), _saved),
    Case("query", "epoch", (SETTLE_GROUP,), lambda world: ask_query(world.shop, "epoch", "*"), of_any=True),
    Case("query", "open", (SETTLE_GROUP,), lambda world: ask_query(world.shop, "open", "g", epoch=1), _opened),
    Case("query", "commit", (SETTLE_GROUP,), lambda w: ask_query(w.shop, "commit", "g", epoch=1, batch=0), _opened),
    Case("query", "abort", (SETTLE_GROUP,), lambda world: ask_query(world.shop, "abort", "g"), _opened),
    Case("query", "abort", (NOBODY_ELSE,), lambda w: ask_query(w.shop, "abort", "*", epoch=1), _opened, "of all"),
    Case("query", "list", (), lambda world: ask_query(world.shop, "list", "*")),
    Case("query", "delete", (DELETE_GROUP,), lambda world: ask_query(world.shop, "delete", "g"), _opened),
    Case("resource", "report", (SETTLE,), _report),
    Case("resource", "list", (), _line("resource", "list", "*", body=b"")),
    Case("topic", "create", (need("create", "topic"),), _line("topic", "create", "a"), _no_topic),
    Case("topic", "alter", (need("alter", "topic"),), _line("topic", "alter", "a", retention_ms="none")),
    Case("topic", "delete", (need("delete", "topic"),), _line("topic", "delete", "a")),
    Case("topic", "describe", (ANY_OF_TOPIC,), _line("topic", "describe", "a")),
    Case("topic", "list", (), _line("topic", "list", "*")),
    Case("cluster", "homes", (), _line("cluster", "homes")),
    Case("cluster", "describe", (), _line("cluster", "describe")),
    Case("cluster", "retire", (NOBODY_ELSE,), lambda world: _retire(world)),
    Case("follow", "", (NOBODY_ELSE,), lambda world: _follow(world)),
    Case("stats", "", (), _line("stats", "json")),
    Case("stats", "", (ANY_OF_TOPIC,), lambda world: _known_item(world), about="of a topic"),
    Case("stats", "", (WATCH,), _line("stats", "transactions"), about="transactions"),
    Case("stats", "", (WATCH,), _line("stats", "registry"), about="registry"),
    Case("stats", "", (NOBODY_ELSE,), _line("stats", "config"), about="config"),
    Case("user", "", (NOBODY_ELSE,), _line("user", "add", "card", body=_NEW_USER)),
    Case("acl", "", (NOBODY_ELSE,), _line("acl", "list", "*")),
    Case("quota", "", (NOBODY_ELSE,), _line("quota", "list", "*", "*")),
]  # fmt: skip


def _retire(world: World) -> Answer:
    """A broker that is alone has no other home to give up; a user that may do it is told so."""
    answer = world.shop.ask("cluster", "retire", extensions={"home": f"{2:016x}", "reason": "burnt"})
    return Answer(200, b"") if "alone" in answer.text else answer


def _follow(world: World) -> Answer:
    home = f"{world.made.recovered.identity.node:016x}"
    return world.shop.ask("follow", home, 0, extensions={"replica": "1" * 32})


def _known_item(world: World) -> Answer:
    """``stats`` knows no topic that one may not see: as if there were none."""
    answer = world.shop.ask("stats", "a")
    return Answer(403, b"forbidden") if answer.error == "bad-request" else answer
