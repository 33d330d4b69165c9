"""Endless load: whenever the journal is free there is another put in the broker's queue, small, large or either."""

from __future__ import annotations

import itertools

from tools.images.node import Client as NodeClient
from tools.images.node import Node
from txmq.log import records

from .history import Put, Shared

SIZES = ((10,), (24_000,), (10, 24_000, 600))


class Load:
    """Puts that are in the queue as soon as it is empty; they are told in the history as those of any client."""

    def __init__(self, shared: Shared, topic: str) -> None:
        self._shared, self._world = shared, shared.world
        self._place = topic, 0
        self._sizes = itertools.cycle(shared.world.rng.choice(SIZES))
        self._count = 0
        self._client: _Feed | None = None

    def feed(self, node: Node) -> None:
        """Put one more if nothing is queued."""
        if self._shared.stopping or node.core.next_group() is not None or node.context.disk_full:
            return
        if self._client is None or self._client.node is not node:
            self._client = _Feed(node)
            self._client.client.user = self._shared.user
        self._count += 1
        value = b"load-%06d-%b" % (self._count, b"." * next(self._sizes))
        put = Put(self._place, (value,))
        self._shared.history.puts.append(put)
        body = records.encode([(b"load", value, (), self._world.clock.now_ms())])
        self._client.puts[self._client.send("put", *self._place, body=bytes(body))] = put
        self._world.meet("endless load")


class _Feed(NodeClient):
    """The load's connection: within the process, never late."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.puts: dict[bytes, Put] = {}

    def take(self) -> None:
        """Note what was told."""
        super().take()
        for opaque, answer in self.received.items():
            put = self.puts.pop(opaque, None)
            if put is not None and answer.code == 200:
                put.told = int(answer.body)
        self.received.clear()
