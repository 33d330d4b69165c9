"""What the tests of users, grants and quotas share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from tools.images.node import Answer, Client, Node, Served
from txmq.protocol.scram import SALT_SIZE, keys_of

from ...support import restarted


@cache
def keys(password: str = "pencil") -> dict[str, str | int]:
    """Keys as a request states them."""
    return keys_of(password, bytes(SALT_SIZE)).to_json()


def operator(made: Served, name: str = "ops") -> Client:
    """A connection of the administrator, of before there are users, too."""
    client = made.connect()
    client.client.user = name
    return client


def add(client: Client, name: str, *, action: str = "add", **changes: Any) -> Answer:
    """Add a user with a password, or as ``changes`` say."""
    body = {"keys": keys(), "certificate": None, **changes}
    return client.ask("user", action, name, body=json.dumps(body).encode())


def lives(made: Node) -> Iterator[Node]:
    """Two later lives of a broker that was killed: from the journal alone, and from a checkpoint."""
    from_journal = restarted(made)
    yield from_journal
    from_journal.checkpoint()
    yield restarted(from_journal)
