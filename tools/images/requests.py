"""What is sent to a node: batches, parts, and the pages of a listing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tools.images.node import Client
from tools.simulated.clock import START_MS
from txmq.log import records

UUID = "0123456789abcdef" * 2


def batch(
    *values: bytes, producer: int = -1, epoch: int = 0, sequence: int = 0, time_ms: int = START_MS, key: bytes = b"k"
) -> bytes:
    """One record batch; without a producer it has no sequence."""
    fields = (producer, epoch, sequence) if producer >= 0 else (-1, -1, -1)
    rows = [(key, value, (), time_ms) for value in values or (b"v",)]
    made = records.encode(rows, producer_id=fields[0], producer_epoch=fields[1], base_sequence=fields[2])
    return bytes(made)


def part(topic: str, partition: int, content: bytes, keys: str = "", topic_id: int = 0) -> bytes:
    """One part of a transaction."""
    words = f"{topic} {partition} {len(content)}" + (f" keys={keys}" if keys else "")
    words += f" id={topic_id}" if topic_id else ""
    return f"{words}\r\n".encode() + content


def listed_pages(client: Client, **words: str | int) -> Iterator[list[dict[str, Any]]]:
    """What ``recover`` lists, page after page."""
    after: dict[str, str | int | None] = {}
    while True:
        answer = json.loads(client.ask("recover", extensions={**words, **after}).body)
        yield answer["transactions"]
        if answer["next"] is None:
            return
        after["after"] = answer["next"]
