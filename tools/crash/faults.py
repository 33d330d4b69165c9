"""Faults of campaigns with many processes: what befalls whom, and how.

Invariant: servers are started in the order in which they need each other, clients last.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tools.crash.processes import CampaignError, Child, pause
from txmq.testing.eventually import eventually

POINT_S = 60.0
KILLED = -signal.SIGKILL
_STARTED_IN_ORDER = ("zookeeper", "broker", "database", "source", "target")


class Fault(NamedTuple):
    """What befalls whom.

    Attributes:
        kind: ``kill``, ``pause``, ``restart``: each victim; ``crash``: the first victim, a client, dies at ``point``
            and with it the others; ``spool``: the same, with the others dead before and back meanwhile.
        victims: names of processes, as ``broker 1``.
        point: of the first victim's code, and its visit: ``point:nth``.
    """

    kind: str
    victims: tuple[str, ...]
    away_s: float
    point: str = ""

    @property
    def what(self) -> str:
        """Without numbers: kind and kinds of victims."""
        kinds = [victim.partition(" ")[0] for victim in self.victims]
        majority = ["majority of zookeeper"] if len(kinds) > 1 and len(set(kinds)) == 1 else kinds
        return f"{self.kind} {' + '.join(majority)}"

    def __str__(self) -> str:
        where = f" at {self.point}" if self.point else ""
        return f"{self.kind} {' + '.join(self.victims)}{where}, away {self.away_s:.1f} s"


class Victim(Protocol):
    """A process."""

    @property
    def is_running(self) -> bool:
        """Whether it is there."""

    def start(self) -> object:
        """Start it, and wait until it serves, if it is a server."""

    def kill(self) -> None:
        """SIGKILL."""

    def pause(self) -> None:
        """SIGSTOP."""

    def resume(self) -> None:
        """SIGCONT."""

    def stop(self) -> object:
        """SIGTERM, and wait for its end."""


class Victims(ABC):
    """Processes by the names that a plan uses, and how they come to harm."""

    @abstractmethod
    def named(self, name: str) -> Victim:
        """The process of that name."""

    def child(self, name: str) -> Child:
        """The client of that name."""
        victim = self.named(name)
        assert isinstance(victim, Child), f"{name} is a client"
        return victim

    def befall(self, fault: Fault) -> None:
        """Let it happen, until the victims are up again."""
        ordered = sorted(fault.victims, key=_rank)
        getattr(self, f"_{fault.kind}")([self.named(name) for name in ordered], fault)

    def _kill(self, victims: Sequence[Victim], fault: Fault) -> None:
        for victim in victims:
            victim.kill()
        pause(fault.away_s)
        for victim in victims:
            victim.start()

    @staticmethod
    def _pause(victims: Sequence[Victim], fault: Fault) -> None:
        for victim in victims:
            victim.pause()
        pause(fault.away_s)
        for victim in victims:
            victim.resume()

    @staticmethod
    def _restart(victims: Sequence[Victim], _fault: Fault) -> None:
        for victim in victims:
            victim.stop()
            victim.start()

    def _crash(self, victims: Sequence[Victim], fault: Fault) -> None:
        client = self.child(fault.victims[0])
        client.kill()
        client.start(fault.point)
        await_death(client, fault.point)
        self._kill(victims, fault)


def _rank(name: str) -> int:
    kind = name.partition(" ")[0]
    return _STARTED_IN_ORDER.index(kind) if kind in _STARTED_IN_ORDER else len(_STARTED_IN_ORDER)


def await_death(client: Child, point: str) -> None:
    """Wait until a client dies at a point.

    Raises:
        CampaignError: it does not, or dies of something else.
    """
    eventually(lambda: not client.is_running, f"{client.name} reaches {point}", POINT_S, CampaignError)
    if client.status != KILLED:
        raise CampaignError(f"{client.name} ended with {client.status}, not by {point}; see {client.name}.log")
