"""An operator of several homes: makes, alters and deletes topics at any of them, and puts messages to all of them."""

from __future__ import annotations

from tools.simulation.client import Process, Steps
from tools.simulation.history import Put, Shared
from tools.simulation.world import Violation
from txmq.log import records

from .home import Home


class Operator(Process):
    """Makes, alters and deletes topics, at any home; a put to any partition, at any home."""

    def __init__(self, shared: Shared, name: str, homes: list[Home]) -> None:
        self._homes = homes
        self.created: dict[str, int] = {}  # topics that are there, as a broker said: at least so many partitions
        self.deleting: set[str] = set()
        self._number = 0
        self._pause_s_max = max(shared.world.rng.choice((0.02, 0.5)), 0.5 if shared.user else 0.0)
        super().__init__(shared, name)

    def main(self) -> Steps:
        """For ever."""
        rng = self.world.rng
        while not self.shared.stopping:
            if self.link is None or self.link.is_lost or rng.random() < 0.05:
                if self.link is not None:
                    self.link.cut()
                self.link = None
                if not self.open_link(rng.choice(self._homes)):
                    yield 0.02
                    continue
            draw = rng.random()
            if draw < 0.25:
                yield from self._create()
            elif draw < 0.4 and self.created:
                yield from self._alter()
            elif draw < 0.55 and self.created:
                yield from self._delete()
            elif self.created:
                yield from self._put()
            yield rng.uniform(0.0, self._pause_s_max)

    def _create(self) -> Steps:
        self._number += 1
        name, partitions = f"{self.name}t{self._number}", self.world.rng.randint(1, 6)
        reply = yield from self.ask("topic", "create", name, extensions={"partitions": partitions})
        if reply is not None and reply[0] == 200:
            self.created[name] = partitions
            self.world.meet("a topic was created")

    def _alter(self) -> Steps:
        name = self.world.rng.choice(sorted(self.created))
        wanted = self.created[name] + self.world.rng.randint(0, 2)
        reply = yield from self.ask("topic", "alter", name, extensions={"partitions": wanted})
        if reply is not None and reply[0] == 200:
            self.created[name] = wanted
            self.world.meet("a topic was altered")
        elif reply is not None and reply[0] == 404:
            raise Violation(f"R3: {name} was created, and is told to be unknown: {reply[1]!r}")

    def _delete(self) -> Steps:
        name = self.world.rng.choice(sorted(self.created))
        self.deleting.add(name)
        self.shared.history.deleted.add(name)
        del self.created[name]
        reply = yield from self.ask("topic", "delete", name)
        if reply is not None and reply[0] == 200:
            self.world.meet("a topic was deleted")

    def _put(self) -> Steps:
        topic = self.world.rng.choice(sorted(self.created))
        partition = self.world.rng.randrange(self.created[topic])
        self._number += 1
        put = Put((topic, partition), (b"%b-%06d" % (self.name.encode(), self._number),))
        self.shared.history.puts.append(put)
        body = bytes(records.encode([(b"key", put.values[0], (), self.world.clock.now_ms())]))
        reply = yield from self.ask("put", topic, partition, body=body)
        if reply is None:
            return
        if reply[0] == 200:
            put.told = int(reply[1])
            self.world.meet("acknowledged at its home")
        elif reply[0] == 404:
            raise Violation(f"R3: {put.place} was created, and is told to be unknown: {reply[1]!r}")
        elif reply[0] == 409:
            put.told = "not stored"
            self.world.meet("not the owner")
