"""A client that reads each of its messages right after the acknowledgement.

With ``sync = always`` it finds every one. It does not if the disk is too full for the partition files; and of what was
answered before the sync, readers see what was forced.
"""

from __future__ import annotations

from tools.simulated.disk import CAPACITY_BYTES
from txmq.log import records

from .client import Process, Steps
from .history import Put
from .world import Violation

TOPIC = "acknowledged"  # without transactions: none holds the watermark


class AcknowledgedReader(Process):
    """See the module's docstring."""

    def main(self) -> Steps:
        """Until the world heals."""
        count, rng = 0, self.world.rng
        while not self.shared.stopping:
            yield rng.uniform(0.01, 0.1)
            if self.link is None and not self.open_link():
                continue
            count += 1
            value = b"%s-%06d-%b" % (self.name.encode(), count, b"." * rng.choice((1, 1000)))
            put = Put((TOPIC, 0), (value,))
            self.shared.history.puts.append(put)
            body = records.encode([(b"key", value, (), self.world.clock.now_ms())])
            reply = yield from self.ask("put", TOPIC, 0, body=bytes(body))
            if reply is not None and reply[0] == 200:
                put.told = int(reply[1])
                yield from self._look(put.told, value)

    def _look(self, offset: int, value: bytes) -> Steps:
        if self.world.chance(0.5):
            reply = yield from self.ask("offset", TOPIC, 0, "latest")
            is_there = reply is not None and reply[0] == 200 and int(reply[1].split()[2]) > offset
        else:
            reply = yield from self.ask("get", TOPIC, 0, offset, 4096)
            is_there = reply is not None and value in reply[1]
        if is_there:
            self.world.meet("read behind its acknowledgement")
        elif reply is not None and self._is_owed:
            raise Violation(f"P1: offset {offset} was acknowledged, and then {reply[0], reply[1][:40]}")

    @property
    def _is_owed(self) -> bool:
        broker = self.shared.broker
        return (
            broker.settings.sync == "always"
            and broker.disk.capacity_bytes == CAPACITY_BYTES
            and not self.shared.stopping
        )
