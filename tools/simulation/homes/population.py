"""Programs that run txmq's real client over several homes, and the topics that they share."""

from __future__ import annotations

from collections.abc import Callable

from tools.simulation.application import Application, Program, ResolverProgram
from tools.simulation.client import Process, Steps
from tools.simulation.consumers import ConsumerProgram, ExactProgram
from tools.simulation.drivers import SINK
from tools.simulation.history import Shared
from tools.simulation.members import OUTPUT
from tools.simulation.ordered import OrderedProgram
from tools.simulation.promises import Told
from tools.simulation.threads import Threads
from tools.simulation.users import end_anonymity

from .home import Home
from .sink import PARTITIONS, SinkProgram

TOPICS = ("t0", "t1", "t2")


class Founder(Process):
    """Makes the topics of the programs, and gives them more partitions now and then."""

    def __init__(self, shared: Shared, homes: list[Home]) -> None:
        self._homes = homes
        super().__init__(shared, "founder")

    def main(self) -> Steps:
        """Until the world stops."""
        history, rng = self.shared.history, self.world.rng
        if self.world.has_users:
            yield from end_anonymity(self, lambda: rng.choice(self._homes))
        wanted = {name: rng.randint(2, 6) for name in TOPICS}
        for name, partitions in {**wanted, OUTPUT: 3, SINK: PARTITIONS}.items():
            yield from self._topic("create", name, partitions)
        history.topics = dict(wanted)
        while not self.shared.stopping:
            yield rng.uniform(0.1, 0.8)
            name = rng.choice(TOPICS)
            yield from self._topic("alter", name, history.topics[name] + 1)
            history.topics[name] += 1

    def _topic(self, action: str, name: str, partitions: int) -> Steps:
        """Until it is so: an answer of the registry may have been lost, and the topic be there."""
        while True:
            if self.link is None or self.link.is_lost:
                self.link = None
                self.open_link(self.world.rng.choice(self._homes))
            if self.link is not None:
                reply = yield from self.ask("topic", action, name, extensions={"partitions": partitions})
                if reply is not None and (reply[0] == 200 or (action == "create" and reply[0] == 409)):
                    return
                if self.link is not None and reply is not None and reply[0] == 401:  # its login was lost
                    self.link.cut()
            yield 0.02


def sinks(shared: Shared, threads: Threads, told: Told) -> list[SinkProgram]:
    """Drivers that write under one name."""
    return [SinkProgram(shared, threads, f"w{n}_", told.written) for n in range(shared.world.rng.randint(1, 2))]


def programs(shared: Shared, threads: Threads, told: Told) -> list[Program]:
    """What runs txmq's real client."""
    kinds: list[tuple[int, int, Callable[[int], Program]]] = [
        (1, 2, lambda n: Application(shared, threads, f"a{n}_")),
        (1, 2, lambda n: ResolverProgram(shared, threads, f"s{n}_")),
        (0, 2, lambda n: ConsumerProgram(shared, threads, f"k{n}_", told.dealt)),
        (0, 1, lambda n: ExactProgram(shared, threads, f"e{n}_")),
        (0, 2, lambda n: OrderedProgram(shared, threads, f"o{n}_", told.dealt.folder)),
    ]
    return [make(n) for least, most, make in kinds for n in range(shared.world.rng.randint(least, most))]
