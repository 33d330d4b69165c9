"""Puts taken in by the hundred leave what the same puts leave one by one."""

from __future__ import annotations

import random

import pytest

from tools.simulated.clock import SimRandom
from txmq.broker import core as core_module
from txmq.broker.client_connection import ClientConnection
from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.core import Core
from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.broker.state.state import Limits, State
from txmq.config import BrokerSettings
from txmq.log.batch import checksum, walk
from txmq.log.records import encode
from txmq.model import Storage, TopicConfig
from txmq.protocol.answers import encode_all
from txmq.protocol.requests import Request
from txmq.registry.topics import Topic

SEGMENT_SIZE_BYTES = 4096


def new_core(settings: BrokerSettings | None = None) -> tuple[Core, ClientConnection]:
    settings = settings or BrokerSettings(batch_size_bytes_max=2048)
    state = State(Limits(settings.in_flight_max, settings.outcomes_kept))
    state.put_topic(Topic(1, TopicConfig("open", partitions=3, segment_size_bytes=SEGMENT_SIZE_BYTES)))
    state.put_topic(Topic(2, TopicConfig("closed", accept_publish=False)))
    state.put_topic(Topic(3, TopicConfig("memory", storage=Storage.MEMORY)))
    core = Core(BrokerIdentity(1, 2, "broker"), settings, state, 1, SimRandom(random.Random(1)))
    return core, core.connected()


def batch_of(count: int = 1, size: int = 100, timestamp_ms: int = 1000) -> bytearray:
    return encode([(None, b"v" * size, (), timestamp_ms + number) for number in range(count)])


def put_request(number: int, topic: bytes, partition: bytes, batch: bytearray) -> Request:
    return (b"put", [topic, partition], None, batch, b"%d" % number)


def any_request(number: int, chance: random.Random) -> Request:
    """Mostly plain puts into three partitions; now and then what is refused, or is no put."""
    topic, partition, kind = b"open", b"%d" % chance.randrange(3), chance.random()
    batch = batch_of(chance.randint(1, 4), chance.randint(0, 300), chance.randint(0, 10_000))
    if kind < 0.02:
        batch[30] ^= 1
    elif kind < 0.04:
        topic = chance.choice((b"closed", b"memory", b"absent"))
    elif kind < 0.05:
        batch = batch_of(size=3000)
    elif kind < 0.06:
        return (b"ping", [], None, None, b"%d" % number)
    return put_request(number, topic, partition, batch)


def copied(requests: list[Request]) -> list[Request]:
    return [(verb, list(words), more, body and bytearray(body), token) for verb, words, more, body, token in requests]


def sent(client: ClientConnection) -> list[bytes]:
    return [encode_all([reply]) for reply in client.out]


def finish(core: Core) -> CommitGroup:
    group = core.seal()
    group.payload()
    core.durable(group)
    core.applied(group)
    return group


def runs(group: CommitGroup) -> list[tuple[object, ...]]:
    return [
        (run.partition.number, run.segment_base, run.position, run.base_offset, run.next_offset,
         run.max_timestamp_ms, run.idempotent, bytes(run.buffers[0]))
        for run in group.placed
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_many_at_once_leave_what_one_by_one_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    (together, client), (alone, lone_client) = new_core(), new_core()
    for first in range(0, 300, 100):
        requests = [any_request(first + number, chance) for number in range(100)]
        together.receive(client, copied(requests))
        with monkeypatch.context() as without:
            without.setattr(core_module, "take_puts", lambda _context, _client, _requests, start: start)
            alone.receive(lone_client, copied(requests))
        # Compared per partition: the order of partitions within a record has no meaning.
        group, reference = finish(together), finish(alone)
        assert sorted(runs(group), key=repr) == sorted(runs(reference), key=repr)
        assert (group.size_bytes, group.message_count) == (reference.size_bytes, reference.message_count)
        assert sorted(sent(client)) == sorted(sent(lone_client))
        assert not client.unanswered
    for key, partition in together.context.state.partitions.items():
        other = alone.context.state.partitions[key]
        assert partition.snapshot() == other.snapshot()
        assert partition.high_watermark == other.high_watermark
    assert together.context.counters.put_bytes == alone.context.counters.put_bytes
    assert together.context.counters.put_requests == alone.context.counters.put_requests


def test_batches_are_stamped_with_their_own_place() -> None:
    core, client = new_core()
    core.receive(client, [put_request(number, b"open", b"1", batch_of(2)) for number in range(5)])
    (run,) = finish(core).placed
    assert [(base, count) for _, _, base, count, _ in walk(run.buffers[0], 1, 1, 0, full=True)] == [
        (0, 2), (2, 2), (4, 2), (6, 2), (8, 2),
    ]  # fmt: skip


def test_each_put_is_told_its_offset_of_any_length() -> None:
    core, client = new_core()
    core.receive(client, [put_request(number, b"open", b"0", batch_of()) for number in range(102)])
    finish(core)
    assert client.out == [(b"%d" % number, number) for number in range(102)]


def test_a_token_used_twice_in_one_read_closes_the_connection() -> None:
    core, client = new_core()
    core.receive(client, [put_request(7, b"open", b"0", batch_of()), put_request(7, b"open", b"0", batch_of())])
    assert client.closing
    assert b"".join(sent(client)).startswith(b"result 400 ")
    assert finish(core).message_count == 1


@pytest.mark.parametrize(("flag", "answer"), [("disk_full", b"result 507 "), ("stopping", b"result 503 ")])
def test_nothing_is_taken_in_while_the_broker_refuses(flag: str, answer: bytes) -> None:
    core, client = new_core()
    setattr(core.context, flag, True)
    core.receive(client, [put_request(number, b"open", b"0", batch_of()) for number in range(2)])
    assert [out[: len(answer)] for out in sent(client)] == [answer, answer]
    assert core.context.group.is_empty


def malformed() -> bytearray:
    """A batch whose record says another length than it has, under a right CRC."""
    batch = batch_of(1)
    batch[61] ^= 2
    batch[17:21] = checksum(memoryview(batch)[21:]).to_bytes(4, "big")
    return batch


@pytest.mark.parametrize(
    ("is_set", "user", "is_refused"), [(True, "", True), (False, "alice", True), (False, "", False)]
)
@pytest.mark.parametrize("words", [{}, {b"id": b"1"}], ids=["pipelined", "alone"])
def test_records_of_users_are_looked_into_and_if_asked_all(
    is_set: bool, user: str, is_refused: bool, words: dict[bytes, bytes]
) -> None:
    core, client = new_core(BrokerSettings(validate_records=is_set))
    client.user = user
    verb, arguments, _, body, token = put_request(1, b"open", b"0", malformed())
    core.receive(client, [(verb, arguments, words or None, body, token), put_request(2, b"open", b"0", batch_of())])
    answers = sent(client)
    assert answers[0].startswith(b"result 400 ") if is_refused else not answers
    assert finish(core).message_count == 1 + (not is_refused)
