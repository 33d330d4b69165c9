"""Values that one client states and the broker keeps for others: whatever they are, everybody else can go on.

Each is refused when it comes, or all that reads it works: lists, the commands of operators, the resolver's xids,
consumers. The broker is the core over a simulated disk, so that a seed repeats.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tools.images.node import Answer, Client, Node, small_settings
from tools.images.requests import UUID, batch, listed_pages, part
from tools.simulated.clock import START_MS
from tools.simulated.disk import SimDisk
from txmq.cli import tx_explain
from txmq.client.transaction.xa_resource import checked_xid, listed_xid
from txmq.errors import InvalidBatchError, LocalProtocolError
from txmq.log import records
from txmq.log.batch import HEADER, checksum
from txmq.xid import branch_xid, xid_sql

GUESTS = 40
REFUSALS = (200, 400, 404, 409, 410, 413)
TEXTS = (
    "", "a", "A.b-c_9", "a b", "Ä", "\x1b[2J", "a\nb", "x" * 64, "x" * 65, "x" * 300, "\ud800", "'", "'; DROP TABLE t",
    "..", "-", "*", "%00%ff%C3", "0" * 32, UUID, "b.1.2", "true", "null", "{}", "t", "s.t", "s.t.u",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    True,
    None,
    1.5,
    1 << 31,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**30,
    "7",
    [],
    {},
)
Wild = Callable[[random.Random], Any]


def text(chance: random.Random) -> Any:
    return chance.choice(TEXTS) if chance.random() < 0.9 else number(chance)


def number(chance: random.Random) -> Any:
    return chance.choice(NUMBERS) if chance.random() < 0.9 else chance.choice(TEXTS)


def _or(usual: Any, wild: Wild, chance: random.Random) -> Any:
    """Mostly the usual one: a request has few odd values at a time."""
    return wild(chance) if chance.random() < 0.3 else usual


def _words(chance: random.Random, **usual: Any) -> dict[str, Any]:
    return {name: str(_or(value, text, chance)) for name, value in usual.items()}


def _ask(client: Client, verb: str, *words: object, body: bytes | None = None, **extensions: object) -> Answer | None:
    """The answer; None if the line cannot be written, or ended the connection."""
    given = {name: None if value is None else str(value) for name, value in extensions.items()}
    try:
        opaque = client.send(verb, *map(str, words), extensions=given, body=body)
    except (LocalProtocolError, UnicodeError):
        return None
    client.node.pump()
    return client.received.pop(opaque, None)


def _decide(client: Client, txid: str, chance: random.Random) -> Answer | None:
    details = {
        "bqual": _or("b.1.2", text, chance), "connection": _or(7, number, chance), "wrote": _or(True, number, chance),
        "marker": _or(True, number, chance), "table": _or("t", text, chance),
    }  # fmt: skip
    told = json.dumps(details).encode()
    body = b"db %b %d\r\n%b" % (UUID.encode(), len(told), told) + part("a", 0, batch())
    return _ask(client, "decide", txid, body=body, branches=1)


def _last_resource(client: Client, txid: str, chance: random.Random) -> Answer | None:
    words = _words(chance, resource="db", uuid=UUID, table="t")
    return _ask(client, "prepare", txid, "last-resource", body=part("a", 0, batch()), **words)


def _foreign(client: Client, txid: str, chance: random.Random) -> Answer | None:
    sizes = [chance.choice((0, 1, 64, 65)) for _ in range(2)]
    form = chance.choice(("7", "0", "2147483647", "2147483648", "9999999999", "-1", "x"))
    xid = f"{form}.{'ab' * sizes[0]}.{'cd' * sizes[1]}"
    return _ask(client, "prepare", txid, "foreign", body=part("a", 0, batch()), xid=_or(xid, text, chance))


def _half(client: Client, txid: str, chance: random.Random) -> Answer | None:
    return _ask(client, "prepare", txid, "half", body=part("a", 0, batch()), **_words(chance, group="g"))


def _hazard(client: Client, txid: str, chance: random.Random) -> Answer | None:
    return _ask(client, "rollback", txid, **_words(chance, hazard="x", resource="db", uuid=UUID, kind="xa"))


def _heuristic(client: Client, txid: str, chance: random.Random) -> Answer | None:
    _last_resource(client, txid, random.Random(1))
    return _ask(client, "rollback", txid, **_words(chance, heuristic="why"))


def _report(client: Client, txid: str, chance: random.Random) -> Answer | None:
    row = [
        _or(txid, text, chance), _or("b.1.2", text, chance), _or(5, number, chance), _or("nobody", text, chance)
    ]  # fmt: skip
    found = {
        "kind": _or("xa", text, chance), "uuid": _or(UUID, text, chance), "reachable": _or(True, number, chance),
        "why": _or(None, text, chance), "branches": _or(1, number, chance), "age_ms": _or(9, number, chance),
        "oldest": [row],
    }  # fmt: skip
    name = _or("db", text, chance)
    return _ask(client, "resource", "report", name or "-", body=json.dumps(found).encode())


def _offsets(client: Client, txid: str, chance: random.Random) -> Answer | None:
    row = [_or("a", text, chance), _or(0, number, chance), _or(3, number, chance)]
    answer = _ask(client, "group", "reset", _or("g", text, chance) or "-", body=json.dumps([row]).encode(), create=None)
    deferred = [_or("a", text, chance), 0, _or(None, text, chance), _or("text", text, chance)]
    _ask(client, "group", "deferred", "g", body=json.dumps([deferred]).encode())
    return answer


def _query(client: Client, txid: str, chance: random.Random) -> Answer | None:
    epoch = json.loads(client.ask("query", "epoch", "*", body=b"").body)["epoch"]
    name = _or("q", text, chance) or "-"
    _ask(client, "query", "open", name, body=b"", epoch=_or(epoch, number, chance))
    words = _words(chance, query=name, epoch=epoch, batch=0, task=0, attempt=0)
    return _ask(client, "prepare", txid, "spark", body=part("a", 0, batch()), **words)


def _put(client: Client, txid: str, chance: random.Random) -> Answer | None:
    """Bytes of the records altered, and the header's counts, under a right CRC."""
    names = [str(text(chance)).encode(errors="replace").decode() for _ in range(chance.choice((0, 2)))]
    headers = tuple((name, chance.randbytes(3)) for name in names)
    rows = [(None, chance.randbytes(9), headers, START_MS)] * chance.choice((1, 3))
    made = records.encode(rows, compression=chance.choice((None, "gzip", "zstd", "lz4")))
    for _ in range(chance.choice((0, 1, 4))):
        made[chance.randrange(HEADER.size, len(made))] = chance.randrange(256)
    fields = list(HEADER.unpack_from(made))
    if chance.random() < 0.3:
        fields[12] = chance.choice((0, 1, 2, 1 << 20, (1 << 31) - 1))
        fields[6] = max(0, fields[12] - 1)
    HEADER.pack_into(made, 0, *fields)
    fields[4] = checksum(made[21:])
    HEADER.pack_into(made, 0, *fields)
    return _ask(client, "put", "a", 0, body=bytes(made))


def _create(client: Client, txid: str, chance: random.Random) -> Answer | None:
    words = _words(chance, partitions=2, retention_ms=1 << 40)
    return _ask(client, "topic", "create", _or("made", text, chance), **words)


KEPT = (_decide, _last_resource, _foreign, _half, _hazard, _heuristic, _report, _offsets, _query, _put, _create)


def look(made: Node) -> None:
    """All that others do with what is kept."""
    client = made.connect()
    rows = [row for page in listed_pages(client, state="all") for row in page]
    resources = json.loads(client.ask("resource", "list", "*", body=b"").body)["resources"]
    for row in rows:
        json.dumps(row).encode("utf-8")
        told = [tx_explain.why(row), *tx_explain.sql(row), *tx_explain.next_steps(row)]
        "\n".join(told).encode("utf-8")
        for branch in row.get("branches", ()):
            xid = branch_xid(row["txid"], branch["bqual"])
            assert xid is None or xid_sql(xid)
            assert branch["connection"] is None or 0 <= branch["connection"] < 1 << 64
        foreign = listed_xid(row)
        assert foreign is None or checked_xid(foreign) == foreign
    hung = tx_explain.hanging(resources, (), 0)
    "\n".join(line for _, line in tx_explain.branch_lines(resources, hung, 0)).encode("utf-8")
    for outcome in ("committed", "rolled-back", "unknown"):
        "\n".join(
            [*tx_explain.branches_sql(hung, outcome), *tx_explain.next_steps_of_branches("t", hung, outcome)]
        ).encode("utf-8")
    for item in ("topics", "offsets", "transactions", "resources", "chains"):
        client.ask("stats", item).text.encode("utf-8")
    json.loads(client.ask("stats", "json").body)
    for group in json.loads(client.ask("group", "list", "*", body=b"").body)["groups"]:
        for row in json.loads(client.ask("group", "describe", group["group"], body=b"").body)["partitions"]:
            assert 0 <= (row["offset"] or 0) < 1 << 63
    json.loads(client.ask("query", "list", "*", body=b"").body)
    _read(client)


def _read(client: Client) -> None:
    """As a consumer: batch after batch; what cannot be read says so, and is passed over."""
    end, offset = int(client.ask("offset", "a", 0, "latest").text.split()[0]), 0
    while offset < end:
        answer = client.ask("get", "a", 0, offset, 1 << 20)
        assert answer.code == 200, answer
        for found in records.decode_raw(answer.body, "a", 0, expected_offset=offset):
            offset = found.end_offset
            with suppress(InvalidBatchError):
                records.decode_batch(found, "a", 0)


def history(seed: int) -> int:
    """Some guests, then everybody else, then everybody else at a broker that was killed. Returns how much was kept.

    Raises:
        Exception: whatever somebody else met.
    """
    chance, made = random.Random(seed), Node(SimDisk(), small_settings())
    client = made.connect()
    assert client.ask("topic", "create", "a", extensions={"partitions": 2}).code == 200
    kept = 0
    for number in range(1, GUESTS + 1):
        client = made.connect()
        client.ask("hello", 1, "tester", extensions={"session": "new"})
        answer = chance.choice(KEPT)(client, made.txid(number, number), chance)
        assert answer is None or answer.code in REFUSALS, answer
        kept += answer is not None and answer.code == 200
    look(made)
    made.checkpoint()
    look(Node(made.kill(), made.settings, clock=made.clock))
    return kept
