"""Programs that run txmq's real ordered producer: one key, one partition, one order, through kills and outages.

Each has a spool on its local disk, which outlives its process. Its values count up over all its lives; the history
holds each as a put, told as the producer told it, so that the general checks (there if acknowledged, not there if
refused, once, in order) hold it to P1, P6 and P7. What is spooled must be there once the spool is drained, which it is
after healing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from txmq.client.partitioner import FixedSelector
from txmq.client.spooling.ordered_producer import OrderedOptions
from txmq.errors import (
    ConnectionLostError,
    RequestTimeoutError,
    SpoolFullError,
    StorageError,
    TxmqError,
    UnavailableError,
)
from txmq.model import SendStatus

from .application import Program
from .history import Put, Shared
from .threads import Threads, pause

SPOOLED = "spooled"


class OrderedProgram(Program):
    """One ordered producer, which writes to one partition of each topic."""

    ends_with_the_world = False

    def __init__(self, shared: Shared, threads: Threads, name: str, folder: str) -> None:
        self._spool = f"{folder}/{name}spool"
        self._count = 0
        self._open: Any = None
        super().__init__(shared, threads, name)

    def _died(self) -> None:
        if self._open is not None:
            self._open._database.close()
            self._open._release()
            self._open = None
        super()._died()

    def main(self) -> None:
        """One life; the last one ends when the spool is empty."""
        client, rng = self.client(), self.world.rng
        options = OrderedOptions(timeout=rng.choice((0.05, 0.3)), spool_size_bytes_max=rng.choice((2048, 1 << 20)))
        with suppress(TxmqError):
            client.session  # noqa: B018
        producer = client.ordered_producer(FixedSelector(0), self._spool, options=options)
        self._open = producer._spool
        while not self.shared.stopping:
            self._send(producer)
            pause(rng.uniform(0.0, 0.02))
        drained = False
        while not drained:
            with suppress(TxmqError):
                producer.flush(1.0)
                drained = True
        producer.close()
        client.close()
        self._open = None

    def _send(self, producer: Any) -> None:
        """One message, or several at once, which overtake each other nowhere."""
        rng = self.world.rng
        topic = rng.choice(sorted(name for name in self.shared.history.topics if name != "temporary"))
        futures = []
        for _ in range(rng.choice((1, 1, 1, 3, 8))):
            self._count += 1
            value = b"%b-%06d-%b" % (self.name.encode(), self._count, b"." * rng.choice((10, 400)))
            put = Put((topic, 0), (value,))
            self.shared.history.puts.append(put)
            with self._told(put):
                futures.append((put, producer.send_async(topic, value, key=self.name.encode())))
        for put, future in futures:
            with self._told(put):
                result = future.result()
                is_spooled = result.status is SendStatus.SPOOLED
                put.told = SPOOLED if is_spooled else result.offset
                word = "spooled" if is_spooled else "acknowledged"
                self.world.meet(f"an ordered message was {word}")

    @contextmanager
    def _told(self, put: Put) -> Iterator[None]:
        try:
            yield
        except (SpoolFullError, ConnectionLostError, RequestTimeoutError, UnavailableError):
            put.told = "not stored"
            self.world.meet("a spool was full or a topic not known")
        except StorageError:  # not known
            pass
