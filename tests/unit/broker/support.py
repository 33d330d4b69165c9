"""What the broker's tests share: batches, parts, and a node with a topic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tools.images.node import Answer, Client, Node, small_settings
from txmq.broker.commit.steps import Checkpoint
from txmq.log import records
from txmq.log.batch import checksum
from txmq.testing.simulated.clock import START_MS
from txmq.testing.simulated.disk import SimDisk

UUID = "0123456789abcdef" * 2


class Registry:
    """A source of ids outside the broker: each draw takes the next of the numbers listed."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = list(numbers)

    def new_topic_id(self) -> int:
        return self._numbers.pop(0)

    def new_session_number(self) -> int:
        return self._numbers.pop(0)


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


def stated(batches: Sequence[bytes]) -> dict[str, int]:
    """What ``commit`` states of streamed batches."""
    crc = 0
    for content in batches:
        crc = checksum(content, crc)
    return {"parts": len(batches), "bytes": sum(map(len, batches)), "crc": crc}


def node(**changes: object) -> Node:
    """A new broker with topics ``a`` (two partitions) and ``b``."""
    made = Node(SimDisk(), small_settings(**changes))
    client = made.connect()
    assert client.ask("topic", "create", "a", extensions={"partitions": 2}).code == 200
    assert client.ask("topic", "create", "b").code == 200
    return made


def restarted(old: Node) -> Node:
    """The next life of a broker that was killed."""
    return Node(old.kill(), old.settings, clock=old.clock)


@contextmanager
def checkpoint_under_way(of: Node) -> Iterator[None]:
    """The state is copied, its place known; the checkpoint is written when the block ends."""
    of.pipeline.want_checkpoint()
    step = of.next_step()
    assert isinstance(step, Checkpoint)
    yield
    step.run()
    of.step_done(step)
    of.run_steps()


def put(client: Client, *values: bytes, topic: str = "a", partition: int = 0, **fields: int) -> Answer:
    """Put one batch; ``fields`` as of ``batch``."""
    return client.ask("put", topic, partition, body=batch(*values, **fields))  # type: ignore[arg-type]


def values(of: Node, topic: str = "a", partition: int = 0) -> list[bytes]:
    """Every value a reader can see."""
    return [message.value or b"" for message in of.messages(of.partition(topic, partition))]


def listed_pages(client: Client, **words: str | int) -> Iterator[list[dict[str, Any]]]:
    """What ``recover`` lists, page after page."""
    after: dict[str, str | int | None] = {}
    while True:
        answer = json.loads(client.ask("recover", extensions={**words, **after}).body)
        yield answer["transactions"]
        if answer["next"] is None:
            return
        after["after"] = answer["next"]


def prepare(
    client: Client,
    txid: str,
    *contents: tuple[str, int, bytes],
    keys: object = "*",
    **extensions: Any,
) -> Answer:
    """Prepare for the resource ``db``."""
    body = b"".join(part(topic, partition, content, str(keys)) for topic, partition, content in contents)
    words = {"resource": "db", "uuid": UUID, "table": "t", **extensions}
    return client.ask("prepare", txid, "last-resource", extensions=words, body=body)
