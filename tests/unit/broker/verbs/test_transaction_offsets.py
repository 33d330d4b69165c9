"""Offsets of a transaction whose topic is deleted; and what other tests save offsets in transactions with."""

from __future__ import annotations

from tools.images.node import Answer, Client, Node
from tools.images.requests import UUID, batch, part
from txmq.protocol.group_rows import GroupOffsets, OffsetRow, encode_offsets
from txmq.protocol.transaction_bodies import encode_branch

from ..group_support import GROUP, Consumer
from ..support import node, restarted

BRANCH = {"bqual": "b", "connection": 1, "wrote": True, "marker": True, "table": "t"}


def offsets(
    offset: int, generation: int = 1, *, order: int = 0, deferred: str | None = None, group: str = GROUP
) -> bytes:
    """What a transaction saves of partition 0 of topic a."""
    return encode_offsets([GroupOffsets(group, order, (OffsetRow("a", 0, generation, offset, deferred),))])


def commit(client: Client, txid: str, stated: bytes, content: bytes = b"x") -> Answer:
    """A local transaction of one message in topic b."""
    body = stated + part("b", 0, batch(content))
    return client.ask("commit", txid, extensions={"offsets": len(stated)}, body=body)


def prepare(client: Client, txid: str, stated: bytes, content: bytes = b"x") -> Answer:
    """The same, prepared."""
    body = stated + part("b", 0, batch(content), "*")
    words: dict[str, str | int | None] = {
        "resource": "db",
        "uuid": UUID,
        "table": "t",
        "offsets": len(stated),
    }
    return client.ask("prepare", txid, "last-resource", extensions=words, body=body)


def decide(client: Client, txid: str, stated: bytes, *contents: bytes) -> Answer:
    """The same, decided with one branch."""
    body = encode_branch("db", UUID, BRANCH) + stated + b"".join(part("b", 0, batch(value)) for value in contents)
    return client.ask("decide", txid, extensions={"branches": 1, "offsets": len(stated)}, body=body)


def lives(of: Node, *, checkpoint: bool) -> Node:
    """The next life, from the journal or from a checkpoint."""
    if checkpoint:
        of.checkpoint()
    return restarted(of)


def test_deletion_of_the_topic_ends_holds_and_pending_saves() -> None:
    made = node()
    client = made.session()
    Consumer(made, "one").join()
    prepare(client, made.txid(1, 1), offsets(5))
    client.ask("topic", "delete", "a")
    assert made.state.saved.held == {}
    made.checkpoint()
    made = restarted(made)
    client = made.session("1.0")
    assert made.state.saved.held == {}
    assert client.ask("commit", made.txid(1, 1), body=b"").code == 200
    assert made.state.saved.named[GROUP].offsets == {}
    assert restarted(made).state.saved.named[GROUP].offsets == {}
