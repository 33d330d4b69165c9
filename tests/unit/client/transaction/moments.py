"""The moments before and after each execution at any home of a cluster in memory."""

from __future__ import annotations

from tools.simulated.broker import SimulatedBroker
from tools.simulated.cluster import SimulatedCluster


class Moments:
    """Counts the moments before and after each execution at any home, and does something at some of them."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.passed = 0
        self.at: dict[int, object] = {}
        for home in cluster.homes:
            home.witness = self.moment

    def moment(self, home: SimulatedBroker, verb: str) -> None:
        self.passed += 1
        happens = self.at.pop(self.passed, None)
        if callable(happens):
            happens()
