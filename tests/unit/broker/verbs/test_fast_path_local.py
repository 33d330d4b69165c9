"""The short way of a local commit leaves what the table's way leaves: journal, answers, state, and every refusal."""

from __future__ import annotations

import random

import pytest

from tools.simulated.clock import SimRandom
from txmq.broker.client_connection import ClientConnection
from txmq.broker.core import VERBS, Core
from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.broker.state.state import Limits, State
from txmq.broker.verbs import prepare_commit
from txmq.config import BrokerSettings
from txmq.log.records import encode
from txmq.model import Storage, TopicConfig
from txmq.protocol.answers import encode_all
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import encode_branch
from txmq.registry.topics import Topic
from txmq.xid import TxId

UUID = "0123456789abcdef" * 2
DETAILS = {"bqual": "b", "connection": None, "wrote": True, "marker": False, "table": "t"}
SETTINGS = BrokerSettings(batch_size_bytes_max=2048, outcomes_kept=5, transaction_size_bytes_max=64 << 10)


def new_core(settings: BrokerSettings = SETTINGS) -> tuple[Core, ClientConnection, ClientConnection]:
    """A core with two connections, each with a session."""
    state = State(Limits(settings.in_flight_max, settings.outcomes_kept))
    state.put_topic(Topic(1, TopicConfig("open", partitions=3, segment_size_bytes=4096)))
    state.put_topic(Topic(2, TopicConfig("closed", accept_publish=False)))
    state.put_topic(Topic(3, TopicConfig("memory", storage=Storage.MEMORY)))
    core = Core(BrokerIdentity(1, 2, "broker"), settings, state, 1, SimRandom(random.Random(1)))
    clients = core.connected(), core.connected()
    for client in clients:
        core.receive(client, [(b"hello", [b"1", b"test"], {b"session": b"new"}, None, b"h")])
        finish(core)
        client.out.clear()
    return core, *clients


def sent(client: ClientConnection) -> list[bytes]:
    return [encode_all([reply]) for reply in client.out]


def finish(core: Core) -> bytes:
    group = core.seal()
    payload = group.payload()
    core.written(group)
    core.durable(group)
    core.applied(group)
    return payload


def part(topic: bytes, partition: int, batch: bytearray, keys: bytes = b"") -> bytes:
    return b"%b %d %d%b\r\n%b" % (topic, partition, len(batch), keys, bytes(batch))


def batch_of(count: int = 1, size: int = 100, sequence: int = -1) -> bytearray:
    return encode([(None, b"v" * size, (), 1000 + number) for number in range(count)], base_sequence=sequence)


def any_body(chance: random.Random) -> bytes:
    parts = []
    for _ in range(chance.randint(1, 3)):
        topic, batch, keys, kind = b"open", batch_of(chance.randint(1, 3), chance.randint(0, 300)), b"", chance.random()
        if kind < 0.03:
            batch[30] ^= 1
        elif kind < 0.06:
            topic = chance.choice((b"closed", b"memory", b"absent"))
        elif kind < 0.08:
            batch = batch_of(sequence=4)
        elif kind < 0.1:
            batch = batch_of(size=3000)
        elif kind < 0.12:
            keys = chance.choice((b" keys=*", b" keys=1,2", b" keys=2,1"))
        parts.append(part(topic, chance.randrange(3), batch, keys))
    body = b"".join(parts)
    return body[:-1] if chance.random() < 0.02 else body


def any_request(number: int, chance: random.Random) -> Request:
    """Mostly new commits of the connection's own; else repeats, strangers, malformed ids, other verbs."""
    counter, session, opaque, kind = number + 1, 1, b"%d" % number, chance.random()
    if kind < 0.1:
        counter = max(1, number - chance.randint(0, 12))
    elif kind < 0.13:
        session = chance.choice((2, 77))
    txid = str(TxId(1, chance.choice((2,) * 30 + (3,)), session, counter)).encode()
    if 0.13 <= kind < 0.16:
        txid = chance.choice((txid.upper() + b"A", txid[:-1], txid + b"0" * 17, txid.replace(b"-1-", b"-1-0"), b"x"))
    if 0.16 <= kind < 0.19:
        return (b"put", [b"open", b"1"], {b"tx": txid}, batch_of(), opaque)
    if 0.19 <= kind < 0.21:
        return (b"rollback", [txid], None, None, opaque)
    if 0.21 <= kind < 0.24:  # an XA decision, whose branch completes later or never
        return decide(counter, chance, opaque)
    if 0.24 <= kind < 0.26:
        earlier = str(TxId(1, 2, 1, max(1, number - chance.randint(0, 12)))).encode()
        return (b"complete", [earlier], {b"uuid": UUID.encode()}, None, opaque)
    floor = {b"floor": b"%d" % max(0, number - 3)}
    floors: list[dict[bytes, bytes] | None] = [None, floor, {b"delayable": b"", **floor}]
    more = chance.choice([*floors * 8, {b"floor": b"9" * 20}, {b"parts": b"1", b"floor": b"2"}, {b"parts": b"0"}])
    body = b"" if chance.random() < 0.03 else any_body(chance)
    return (b"commit", [txid], more, bytearray(body), opaque)


def decide(counter: int, chance: random.Random, opaque: bytes) -> Request:
    parts = [part(b"open", chance.randrange(3), batch_of()) for _ in range(chance.randint(1, 2))]
    body = bytearray(b"".join([encode_branch("db", UUID, DETAILS), *parts]))
    return (b"decide", [str(TxId(1, 2, 1, counter)).encode()], {b"branches": b"1"}, body, opaque)


def copied(request: Request) -> Request:
    verb, words, more, body, token = request
    return verb, list(words), more and dict(more), body and bytearray(body), token


@pytest.mark.parametrize("seed", range(40))
def test_the_short_way_leaves_what_the_table_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    core, client, _ = new_core()
    reference, other, _ = new_core()
    for number in range(60):
        request = any_request(number, chance)
        core.receive(client, [copied(request)])
        with monkeypatch.context() as without:
            without.setitem(VERBS, b"commit", prepare_commit.commit)
            reference.receive(other, [copied(request)])
        if number % 4 == 0:
            assert finish(core) == finish(reference)
        assert sent(client) == sent(other), request
        assert core.context.state.snapshot() == reference.context.state.snapshot(), request
    assert finish(core) == finish(reference)
    assert core.context.counters.committed == reference.context.counters.committed > 0


@pytest.mark.parametrize("is_decision_open", [False, True])
def test_an_ordinary_commit_takes_it_also_beside_an_open_decision(
    is_decision_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, client, _ = new_core()
    if is_decision_open:
        core.receive(client, [decide(2, random.Random(1), b"d")])
        finish(core)
        client.out.clear()
    monkeypatch.setattr(prepare_commit, "locate", None)  # the table's way would fail here
    body = bytearray(part(b"open", 0, batch_of()))
    offset = core.context.state.partitions[b"open", b"0"].next_offset
    core.receive(client, [(b"commit", [str(TxId(1, 2, 1, 1)).encode()], {b"floor": b"0"}, body, b"1")])
    finish(core)
    assert sent(client) == [b"result 200 11 1\r\nopen 0 %d 1\n" % offset]


@pytest.mark.parametrize(("flag", "answer"), [("disk_full", b"result 507 "), ("stopping", b"result 503 ")])
def test_nothing_is_decided_while_the_broker_refuses(flag: str, answer: bytes) -> None:
    core, client, _ = new_core()
    setattr(core.context, flag, True)
    core.receive(
        client, [(b"commit", [str(TxId(1, 2, 1, 1)).encode()], None, bytearray(part(b"open", 0, batch_of())), b"1")]
    )
    assert sent(client)[0].startswith(answer)
    assert core.context.counters.committed == 0


def test_an_ended_session_commits_nothing() -> None:
    core, client, _ = new_core()
    core.context.state.end_session(1)
    core.receive(
        client, [(b"commit", [str(TxId(1, 2, 1, 1)).encode()], None, bytearray(part(b"open", 0, batch_of())), b"1")]
    )
    assert sent(client)[0].startswith(b"result 410 ")
