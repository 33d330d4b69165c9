"""The short ways of ``decide`` and ``complete`` leave what the table's ways leave, refusals included."""

from __future__ import annotations

import random

import pytest

from txmq.broker.core import Core
from txmq.broker.verbs import decide as decide_verbs
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import encode_branch

from .test_fast_path_local import batch_of, new_core, part, sent
from .test_fast_path_prepared import UUIDS, any_body, finish, require_same, txid


def branch(uuid: bytes, chance: random.Random) -> bytes:
    details = {
        "bqual": chance.choice(["b.1", "b.1", 'A"B\\'[: chance.choice([1, 4])]]),
        "connection": chance.choice([42, 0, None]),
        "wrote": chance.random() < 0.9,
        "marker": chance.random() < 0.9,
        "table": chance.choice(["t", "shop.t"]),
    }
    entry = encode_branch(chance.choice(["db", "d-2.x"]), uuid.decode(), details)
    kind = chance.random()
    if kind < 0.03:
        return entry.replace(b'"wrote"', b'"wrute"')
    if kind < 0.05:
        return entry.replace(b"db ", b"../", 1)
    return entry[:-1] if kind < 0.07 else entry


def any_request(number: int, decided: list[int], chance: random.Random) -> Request:
    """Decisions of one and of two branches, their completions, rollbacks, prepares of a resource, repeats."""
    counter, opaque, kind = number + 1, b"%d" % number, chance.random()
    earlier = chance.choice([*decided[:3], *decided[-3:], max(1, counter - 5)])
    own = txid(counter if chance.random() < 0.95 else earlier, chance.choice([1] * 30 + [2, 77]))
    if kind < 0.45:
        uuids = UUIDS[: chance.choice([1, 1, 2])] if chance.random() < 0.97 else (UUIDS[0], UUIDS[0])
        given = {b"branches": b"%d" % (len(uuids) + (chance.random() < 0.03))}
        if chance.random() < 0.5:
            given[b"floor"] = chance.choice([b"%d" % max(0, counter - 9)] * 20 + [b"9" * 20])
        if chance.random() < 0.05:
            given |= {b"parts": b"1", b"bytes": b"7", b"crc": b"7"}
        body = b"" if chance.random() < 0.03 else any_body(chance)
        return (b"decide", [own], given, bytearray(b"".join(branch(uuid, chance) for uuid in uuids) + body), opaque)
    if kind < 0.5:
        return (b"put", [b"open", b"1"], {b"tx": own}, batch_of(), opaque)
    if kind < 0.55:
        return (b"rollback", [txid(earlier)], None, None, opaque)
    uuid = chance.choice([*UUIDS, UUIDS[0], b"f" * 32])
    given = chance.choice([{b"uuid": uuid}] * 20 + [{}, {b"uuid": uuid, b"heuristic": b"commit"}])
    return (b"complete", [txid(earlier, chance.choice([1] * 30 + [2]))], given, None, opaque)


@pytest.mark.parametrize("seed", range(40))
def test_the_short_ways_leave_what_the_table_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)

    def request_of(number: int, core: Core) -> Request:
        return any_request(number, [name[1] for name in core.context.state.decisions.incomplete], chance)

    table_ways = {b"decide": decide_verbs.decide, b"complete": decide_verbs.complete}
    require_same(request_of, 60, table_ways, chance, monkeypatch)


def test_they_are_taken_by_an_ordinary_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    core, client, _ = new_core()
    monkeypatch.setattr(decide_verbs, "locate", None)  # the table's way would fail here
    body = bytearray(branch(UUIDS[0], random.Random(1)) + part(b"open", 0, batch_of(), b" keys=7"))
    core.receive(client, [(b"decide", [txid(1)], {b"branches": b"1", b"floor": b"0"}, body, b"1")])
    finish(core)
    core.receive(client, [(b"complete", [txid(1)], {b"uuid": UUIDS[0]}, None, b"2")])
    assert core.context.group.may_be_delayed
    finish(core)
    assert sent(client) == [b"result 200 11 1\r\nopen 0 0 1\n", b"result 200 0 2\r\n"]
