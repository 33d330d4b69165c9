"""No answer before its record is forced; what ``sync`` relaxes and what not; the watermarks of one record together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.images.node import Client, Node
from tools.images.requests import UUID, batch, part

from ..support import node, prepare, put, restarted, values

Request = Callable[[Node, Client], bytes]


def _put(_broker: Node, client: Client) -> bytes:
    return client.send("put", "a", 0, body=batch(b"1"))


def _raw(_broker: Node, client: Client) -> bytes:
    return client.send("put", "a", 0, extensions={"raw": None}, body=b"1")


def _idempotent(_broker: Node, client: Client) -> bytes:
    return client.send("put", "a", 0, body=batch(b"1", producer=1))


def _local(broker: Node, client: Client) -> bytes:
    return client.send("commit", broker.txid(1, 1), body=part("a", 0, batch(b"1")))


def _stream(broker: Node, client: Client) -> bytes:
    return client.send("put", "a", 0, extensions={"tx": broker.txid(1, 1)}, body=batch(b"1"))


def _prepare(broker: Node, client: Client) -> bytes:
    words = {"resource": "db", "uuid": UUID, "table": "t"}
    return client.send("prepare", broker.txid(1, 1), "last-resource", extensions=words, body=part("a", 0, batch()))


def _rollback(broker: Node, client: Client) -> bytes:
    return client.send("rollback", broker.txid(1, 1))


def _fence(broker: Node, client: Client) -> bytes:
    return client.send("outcome", broker.txid(1, 1), extensions={"fence": None})


def _hello(broker: Node, client: Client) -> bytes:
    return client.send("hello", 1, "other", extensions={"session": "new"})


def _create(_broker: Node, client: Client) -> bytes:
    return client.send("topic", "create", "t")


def _alter(_broker: Node, client: Client) -> bytes:
    return client.send("topic", "alter", "a", extensions={"partitions": 3})


def _delete(_broker: Node, client: Client) -> bytes:
    return client.send("topic", "delete", "b")


WRITES: list[Request] = [
    _put, _raw, _idempotent, _local, _stream, _prepare, _rollback, _fence, _hello, _create, _alter, _delete,
]  # fmt: skip
RELAXED: list[Request] = [_put, _raw, _idempotent, _local]
STRICT = [request for request in WRITES if request not in RELAXED]


def _name(request: Request) -> str:
    return request.__name__.strip("_")


def _answered(broker: Node, client: Client, opaque: bytes) -> bool:
    broker.flush()
    return opaque in client.received


@pytest.mark.parametrize("request_", WRITES, ids=_name)
def test_no_answer_leaves_before_its_record_is_forced(request_: Request) -> None:
    broker = node()
    client = broker.session()
    opaque = request_(broker, client)
    assert not _answered(broker, client, opaque)
    group = broker.core.seal()
    broker.store.write(group)
    broker.core.written(group)
    assert not _answered(broker, client, opaque)
    broker.store.force()
    assert broker.store.journal.durable_lsn == broker.store.journal.next_lsn
    broker.core.durable(group)
    assert _answered(broker, client, opaque)
    assert client.received[opaque].code == 200


@pytest.mark.parametrize("request_", RELAXED, ids=_name)
@pytest.mark.parametrize("sync", ["interval", "never"])
def test_relaxed_puts_and_local_commits_are_answered_once_written(request_: Request, sync: str) -> None:
    broker = node(sync=sync)
    client = broker.session()
    opaque = request_(broker, client)
    group = broker.core.seal()
    assert not group.needs_sync
    assert not _answered(broker, client, opaque)
    broker.store.write(group)
    broker.core.written(group)
    assert _answered(broker, client, opaque)
    broker.core.durable(group)
    assert len(client.received) == 1


@pytest.mark.parametrize("request_", STRICT, ids=_name)
@pytest.mark.parametrize("sync", ["interval", "never"])
def test_everything_else_is_forced_whatever_sync_says(request_: Request, sync: str) -> None:
    broker = node(sync=sync)
    client = broker.session()
    opaque = request_(broker, client)
    group = broker.core.seal()
    assert group.needs_sync
    broker.core.written(group)
    assert not _answered(broker, client, opaque)
    broker.core.durable(group)
    assert _answered(broker, client, opaque)


def test_a_prepared_transactions_commit_is_forced_whatever_sync_says() -> None:
    broker = node(sync="never")
    client = broker.session()
    prepare(client, broker.txid(1, 1), ("a", 0, batch()))
    client.send("commit", broker.txid(1, 1), body=b"")
    assert broker.core.seal().needs_sync


# --- duplicates and look-ups -----------------------------------------------------------------------------------------

AGAIN: dict[str, tuple[Request, Request]] = {
    "put": (_idempotent, _idempotent),
    "commit": (_local, _local),
    "outcome of a commit": (_local, lambda broker, client: client.send("outcome", broker.txid(1, 1))),
    "rollback": (_rollback, _rollback),
    "outcome of a rollback": (_rollback, lambda broker, client: client.send("outcome", broker.txid(1, 1))),
    "prepare": (_prepare, _prepare),
    "outcome of a prepare": (_prepare, lambda broker, client: client.send("outcome", broker.txid(1, 1))),
    "recover": (_prepare, lambda _broker, client: client.send("recover")),
    "describe": (_alter, lambda _broker, client: client.send("topic", "describe", "a")),
    "list": (_create, lambda _broker, client: client.send("topic", "list", "*")),
    "meta": (_create, lambda _broker, client: client.send("meta", "*")),
}


@pytest.mark.parametrize("sealed", [False, True], ids=["in the same group", "in a later group"])
@pytest.mark.parametrize("sync", ["always", "interval"])
@pytest.mark.parametrize("name", AGAIN)
def test_what_was_looked_up_waits_for_record_it_tells_of(name: str, sync: str, sealed: bool) -> None:
    broker = node(sync=sync)
    client = broker.session()
    first, again = AGAIN[name]
    first(broker, client)
    groups = [broker.core.seal()] if sealed else []
    if sealed:
        broker.core.written(groups[0])
        broker.flush()
    opaque = again(broker, client)
    assert not _answered(broker, client, opaque)
    if not broker.context.group.is_empty:
        groups.append(broker.core.seal())
    for group in groups:
        broker.core.written(group)
        assert not _answered(broker, client, opaque)
    assert any(group.needs_sync for group in groups) or sync == "always"
    for group in groups:
        broker.core.durable(group)
    assert _answered(broker, client, opaque)


def test_what_is_durable_is_answered_at_once() -> None:
    broker = node()
    client = broker.session()
    client.ask("commit", broker.txid(1, 1), body=part("a", 0, batch()))
    opaque = client.send("outcome", broker.txid(1, 1))
    assert _answered(broker, client, opaque)
    assert broker.context.group.is_empty


# --- watermarks ------------------------------------------------------------------------------------------------------


def test_readers_see_whole_record_once_it_is_synced_and_applied() -> None:
    broker = node()
    client = broker.session()
    body = part("a", 0, batch(b"1")) + part("b", 0, batch(b"2"))
    client.send("commit", broker.txid(1, 1), body=body)
    group = broker.core.seal()
    for step in (broker.store.write, lambda _group: broker.store.force(), broker.core.durable, broker.store.apply):
        step(group)
        assert (values(broker), values(broker, "b")) == ([], [])
    broker.core.applied(group)
    assert (values(broker), values(broker, "b")) == ([b"1"], [b"2"])


def test_a_transaction_that_rolls_the_segment_is_published_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = node()
    client = broker.session()
    client.ask("topic", "alter", "a", extensions={"segment_size_bytes": 4096})
    partition = broker.partition("a")
    seen: list[int] = []
    publish = type(partition).publish

    def watched(self: object, next_offset: int) -> None:
        publish(partition, next_offset)
        seen.append(partition.high_watermark)

    monkeypatch.setattr(type(partition), "publish", watched)
    body = b"".join(part("a", 0, batch(bytes(3000))) for _ in range(3))
    client.ask("commit", broker.txid(1, 1), body=body)
    assert seen == [3]


def test_a_group_that_is_full_becomes_its_own_record() -> None:
    broker = node()
    client = broker.connect()
    for _ in range(30):
        client.send("put", "a", 0, body=batch(bytes(4000)))
    assert broker.context.full
    assert broker.context.queued_bytes() > 64 << 10
    sizes = []
    while broker.context.full or not broker.context.group.is_empty:
        sizes.append(broker.core.seal().size_bytes)
    assert len(sizes) == 2
    assert max(sizes) < (64 << 10) + 4200


def test_unsynced_record_lost_with_power_was_never_acknowledged() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1")
    opaque = client.send("put", "a", 0, body=batch(b"2"))
    broker.store.write(broker.core.seal())
    assert not _answered(broker, client, opaque)
    lost = Node(broker.disk.crash(), broker.settings)
    assert values(lost) == [b"1"]


def test_checkpoint_and_journal_behind_it_make_state_again() -> None:
    broker = node()
    client = broker.session()
    put(client, b"1")
    broker.checkpoint()
    put(client, b"2")
    broker = restarted(broker)
    assert values(broker) == [b"1", b"2"]
    assert broker.recovered.records <= 3
