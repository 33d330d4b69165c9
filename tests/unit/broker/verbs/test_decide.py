"""An XA decision whose topic is deleted before it is applied; and what other tests decide, complete and list with."""

from __future__ import annotations

import json
from typing import Any

from tools.images.node import Answer, Client, Node
from tools.images.requests import UUID, batch, part
from txmq.protocol.transaction_bodies import encode_branch

from ..support import node, restarted

OTHER_UUID = "f" * 32


def decide(client: Client, txid: str, *contents: tuple[str, int, bytes], uuids: tuple[str, ...] = (UUID,)) -> Answer:
    """Decide with one branch a uuid."""
    details = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
    body = b"".join(encode_branch(f"db{number}", uuid, details) for number, uuid in enumerate(uuids))
    body += b"".join(part(*content) for content in contents)
    return client.ask("decide", txid, extensions={"branches": len(uuids)}, body=body)


def complete(client: Client, txid: str, uuid: str = UUID, **extensions: str) -> Answer:
    """Report one branch."""
    return client.ask("complete", txid, extensions={"uuid": uuid, **extensions})


def listed(client: Client, **extensions: str) -> list[dict[str, Any]]:
    """What ``recover`` lists."""
    found: list[dict[str, Any]] = json.loads(client.ask("recover", extensions=extensions).body)["transactions"]
    return found


def lives(of: Node, *, checkpoint: bool) -> Node:
    """The next life, from the journal or from a checkpoint."""
    if checkpoint:
        of.checkpoint()
    return restarted(of)


def test_poll_of_a_topic_under_deletion_never_sees_held_messages() -> None:
    made = node()
    client, reader, txid = made.session(), made.connect(), made.txid(1, 1)
    poll = reader.send("get", "a", 0, 0, 1 << 16, extensions={"wait": 30_000})
    details = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
    body = encode_branch("db", UUID, details) + part("a", 0, batch(b"x"))
    client.send("decide", txid, extensions={"branches": 1}, body=body)
    made.core.cut()
    partition = made.partition("a")
    client.send("topic", "delete", "a")
    made.run_steps(2)  # append, apply: the deletion is accepted, and not on disk: a crash brings the topic back
    assert made.core.next_group() is not None
    assert partition.high_watermark == 0
    assert poll not in reader.received or reader.received[poll].body == b""
