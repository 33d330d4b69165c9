"""A page of an outbox that waits for its place; and what other tests send pages with."""

from __future__ import annotations

import json
from typing import Any

from tools.images.node import Answer, Client
from tools.images.requests import UUID, batch, part

from ..homes_support import listed, prepare_branch, two_homes


def send(client: Client, counter: int, after: int, value: bytes = b"", *, session: int = 1, **changes: Any) -> Answer:
    """Commit a page that follows the one of transaction ``after`` (0: none); without a value it has no messages."""
    before = client.node.txid(session, after) if after else "-"
    given = {"outbox": UUID, "name": "shop", "after": before, **changes}
    body = part("a", 0, batch(value), "") if value else b""
    return client.ask("commit", client.node.txid(session, counter), extensions=given, body=body)


def test_page_waiting_for_its_place_is_newest_at_once() -> None:
    here, there = two_homes()
    client = here.session()
    prepare_branch(client, here.txid(1, 1), there.txid(1, 1), ("a", 0, b"x"))
    given = {"outbox": UUID, "name": "shop", "after": "-"}
    sent = client.ask("commit", here.txid(1, 2), extensions=given, body=part("a", 0, batch(b"behind it"), "7"))
    assert (sent.code, json.loads(client.ask("outbox", UUID).body)) == (200, {"last": here.txid(1, 2)})
    assert {row["state"] for row in listed(client)} == {"prepared", "placing"}
