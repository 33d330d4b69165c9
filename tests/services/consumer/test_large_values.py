"""Large values that are looked at where they are, read from a real broker, by ``browse``, ``fetch`` and consumers."""

from __future__ import annotations

import zlib

from tests.services.loop_client import Connect
from txmq.model import Message
from txmq.testing.processes.broker import BrokerProcess

SIZES = [300_000, 1_000_000, 5, 400_000]
VALUES = [bytes([number]) * size for number, size in enumerate(SIZES)]
SUMS = list(map(zlib.crc32, VALUES))


def _sum(message: Message) -> int:
    view = message.value_view
    assert view is not None
    return zlib.crc32(view)


def _is_copy(message: Message) -> bool:
    view = message.value_view
    return view is not None and memoryview(view.obj).nbytes == view.nbytes  # else it is part of an answer


def test_views_are_those_of_every_way_to_read(shared_broker: BrokerProcess, connect: Connect) -> None:
    with connect(shared_broker.address) as client:
        client.topics.create("large")
        for value in VALUES:
            client.producer().send("large", value)
        browsed = list(client.browse("large"))
        fetched = [client.fetch("large", 0, offset, max_bytes=1 << 20)[0] for offset in range(len(SIZES))]
        with client.consumer("large", ["large"]) as consumer:
            polled: list[Message] = []
            while len(polled) < len(SIZES):
                taken = consumer.poll()
                polled += taken
                assert list(map(_sum, polled)) == SUMS[: len(polled)]
                for message in taken:
                    message.ack()
        client.topics.delete("large")
    for messages in (browsed, fetched, polled):  # the client is closed, its buffers are gone
        assert list(map(_is_copy, messages)) == [False, False, True, False]
        assert list(map(_sum, messages)) == SUMS
        assert [message.value for message in messages] == VALUES
