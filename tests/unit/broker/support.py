"""What the broker's tests share: batches, parts, and a node with a topic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tools.images.node import Answer, Client, Node, small_settings
from tools.images.requests import UUID, batch, part
from tools.simulated.disk import SimDisk
from txmq.broker.commit.steps import Checkpoint
from txmq.log.batch import checksum


class Registry:
    """A source of ids outside the broker: each draw takes the next of the numbers listed."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = list(numbers)

    def new_topic_id(self) -> int:
        return self._numbers.pop(0)

    def new_session_number(self) -> int:
        return self._numbers.pop(0)


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
    while not isinstance(step := of.next_step(), Checkpoint):
        assert step is not None
        step.run()
        of.step_done(step)
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
