"""The short ways of prepare and of its commit leave what the table's ways leave: journal, answers, state, refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from txmq.broker.client_connection import ClientConnection
from txmq.broker.core import VERBS, Core, Verb
from txmq.broker.verbs import prepare_commit, transaction_checks
from txmq.config import BrokerSettings
from txmq.protocol.requests import Request
from txmq.xid import TxId

from .test_fast_path_local import batch_of, copied, new_core, part, sent
from .test_fast_path_local import finish as finish_group

UUIDS = (b"0123456789abcdef" * 2, b"fedcba9876543210" * 2)
NOW_MS = 1
SETTINGS = BrokerSettings(
    batch_size_bytes_max=2048, outcomes_kept=5, transaction_size_bytes_max=64 << 10, transactions_open_max=10
)


def finish(core: Core) -> list[bytes]:
    """Force and apply; the record, and what goes to the partition files."""
    placed = core.context.group.placed
    return [finish_group(core), *(b"%d " % run.position + b"".join(run.buffers) for run in placed)]


def txid(counter: int, session: int = 1, home: int = 2) -> bytes:
    return str(TxId(1, home, session, counter)).encode()


def any_body(chance: random.Random) -> bytes:
    parts = []
    for _ in range(chance.randint(1, 3)):
        topic, batch, kind = b"open", batch_of(chance.randint(1, 3), chance.randint(0, 300)), chance.random()
        keys = chance.choice((b"", b" keys=1", b" keys=1,2", b" keys=2", b" keys=*"))
        if kind < 0.02:
            batch[30] ^= 1
        elif kind < 0.04:
            topic = chance.choice((b"closed", b"memory", b"absent"))
        elif kind < 0.05:
            batch = batch_of(sequence=4)
        elif kind < 0.06:
            batch = batch_of(size=3000)
        elif kind < 0.07:
            keys = b" keys=2,1"
        parts.append(part(topic, chance.randrange(3), batch, keys))
    body = b"".join(parts)
    return body[:-1] if chance.random() < 0.02 else body


def any_prepare(counter: int, chance: random.Random, opaque: bytes) -> Request:
    given = {
        b"resource": b"db",
        b"uuid": chance.choice(UUIDS),
        b"table": b"t",
        b"deadline": b"%d" % chance.choice([0, *[99] * 9, 1]),
    }
    kind = chance.random()
    if kind < 0.5:
        given[b"floor"] = b"%d" % max(0, counter - 4)
    elif kind < 0.53:
        given.pop(chance.choice((b"resource", b"uuid", b"table", b"deadline")))
    elif kind < 0.56:
        given |= {b"parts": b"1", b"bytes": b"7", b"crc": b"7"}
    elif kind < 0.58:
        given[chance.choice((b"resource", b"table"))] = b"no name/at all"
    elif kind < 0.6:
        given[b"floor"] = b"9" * 20
    word = chance.choice([b"last-resource"] * 20 + [b"xa", b"half", b"half"])
    if word == b"half":
        given = {b"group": b"checkers", b"deadline": b"99"}
    words = [txid(counter, chance.choice([1] * 30 + [2, 77]), chance.choice([2] * 30 + [3])), word]
    body = b"" if chance.random() < 0.03 else any_body(chance)
    return (b"prepare", words, given, bytearray(body), opaque)


def any_request(number: int, prepared: list[int], chance: random.Random) -> Request:
    """Prepares, commits of what was ``prepared``, in and out of turn; rollbacks, streams, repeats."""
    counter, opaque, kind = number + 1, b"%d" % number, chance.random()
    earlier = chance.choice([*prepared[:3], *prepared[-3:], max(1, counter - 5)])
    if kind < 0.45:
        return any_prepare(counter if chance.random() < 0.95 else earlier, chance, opaque)
    if kind < 0.5:
        return (b"put", [b"open", b"1"], {b"tx": txid(counter)}, batch_of(), opaque)
    if kind < 0.57:
        return (b"rollback", [txid(earlier)], None, None, opaque)
    if kind < 0.59:
        return (b"topic", [b"delete", b"gone"], None, None, opaque)
    floor = {b"floor": b"%d" % max(0, number - 8)}
    floors: list[dict[bytes, bytes] | None] = [None, floor, {b"delayable": b"", **floor}]
    more = chance.choice([*floors * 8, {b"floor": b"9" * 20}, {b"parts": b"0"}, {b"heuristic": b"operator"}])
    body = any_body(chance) if chance.random() < 0.05 else b""
    return (b"commit", [txid(earlier, chance.choice([1] * 30 + [2]))], more, bytearray(body), opaque)


def pair(settings: BrokerSettings = SETTINGS) -> tuple[Core, tuple[ClientConnection, ClientConnection]]:
    core, own, other = new_core(settings)
    core.receive(own, [(b"topic", [b"create", b"gone"], {b"partitions": b"3"}, None, b"t")])
    finish(core)
    own.out.clear()
    return core, (own, other)


def require_same(
    request_of: Callable[[int, Core], Request],
    count: int,
    table_ways: Mapping[bytes, Verb],
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``count`` requests leave the same, with the short ways and with the ``table_ways``, by two owners in turn."""
    monkeypatch.setattr(transaction_checks, "UNFINISHED_OUTCOMES_MAX", 5)
    (core, clients), (reference, others) = pair(), pair()
    for number in range(count):
        request, who = request_of(number, core), int(chance.random() < 0.1)
        core.receive(clients[who], [copied(request)])
        with monkeypatch.context() as without:
            for name, verb in table_ways.items():
                without.setitem(VERBS, name, verb)
            reference.receive(others[who], [copied(request)])
        if number % 3 == 0:
            assert finish(core) == finish(reference), request
        assert [sent(client) for client in clients] == [sent(client) for client in others], request
        assert core.context.state.snapshot() == reference.context.state.snapshot(), request
        assert core.context.state.payload_bytes == reference.context.state.payload_bytes
        assert core.context.group.delayable == reference.context.group.delayable
    assert finish(core) == finish(reference)
    assert core.context.counters == reference.context.counters
    assert core.context.counters.committed > 0


@pytest.mark.parametrize("seed", range(60))
def test_the_short_ways_leave_what_the_table_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)

    def request_of(number: int, core: Core) -> Request:
        request = any_request(number, [name[1] for name in core.context.state.transactions], chance)
        if chance.random() < 0.2:  # parts of a topic that goes meanwhile
            request = (*request[:3], request[3] and request[3].replace(b"open ", b"gone "), request[4])
        return request

    table_ways = {b"prepare": prepare_commit.prepare, b"commit": prepare_commit.commit}
    require_same(request_of, 80, table_ways, chance, monkeypatch)


def test_they_are_taken_by_an_ordinary_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    core, client, _ = new_core()
    monkeypatch.setattr(prepare_commit, "locate", None)  # the table's way would fail here
    given = {b"resource": b"db", b"uuid": UUIDS[0], b"table": b"t", b"deadline": b"99", b"floor": b"0"}
    core.receive(
        client,
        [(b"prepare", [txid(1), b"last-resource"], given, bytearray(part(b"open", 0, batch_of(), b" keys=7")), b"1")],
    )
    finish(core)
    core.receive(client, [(b"commit", [txid(1)], {b"delayable": b"", b"floor": b"0"}, bytearray(), b"2")])
    finish(core)
    assert sent(client) == [b"result 200 0 1\r\n", b"result 200 11 2\r\nopen 0 0 1\n"]


def test_commit_out_of_turn_waits_for_the_one_before() -> None:
    core, client, _ = new_core()
    for counter in (1, 2):
        given = {b"resource": b"db", b"uuid": UUIDS[0], b"table": b"t", b"deadline": b"99"}
        body = bytearray(part(b"open", 0, batch_of(), b" keys=7"))
        core.receive(client, [(b"prepare", [txid(counter), b"last-resource"], given, body, b"p%d" % counter)])
    finish(core)
    client.out.clear()
    core.receive(client, [(b"commit", [txid(2)], None, bytearray(), b"second")])
    assert core.context.group.is_empty
    core.receive(client, [(b"commit", [txid(1)], None, bytearray(), b"first")])
    finish(core)
    assert sent(client) == [b"result 200 11 first\r\nopen 0 0 1\n", b"result 200 11 second\r\nopen 0 1 1\n"]


@pytest.mark.parametrize(("flag", "answer"), [("disk_full", b"result 507 "), ("stopping", b"result 503 ")])
def test_refusing_broker_prepares_nothing_and_still_commits(flag: str, answer: bytes) -> None:
    core, client, _ = new_core()
    given = {b"resource": b"db", b"uuid": UUIDS[0], b"table": b"t", b"deadline": b"99"}
    for counter in (1, 2):
        body = bytearray(part(b"open", 0, batch_of()))
        core.receive(client, [(b"prepare", [txid(counter), b"last-resource"], given, body, b"%d" % counter)])
        setattr(core.context, flag, True)
    core.receive(client, [(b"commit", [txid(1)], None, bytearray(), b"3")])
    finish(core)
    assert sent(client)[0].startswith(answer)
    assert sent(client)[1:] == [b"result 200 0 1\r\n", b"result 200 11 3\r\nopen 0 0 1\n"]
