"""The identity of a broker, drawn when its data directory is made (``node.json``), and the owners of partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The numbers of cluster and node, and the name that an operator gave. Every transaction id holds the numbers."""

    cluster: int
    node: int
    name: str


class Owner(NamedTuple):
    """A partition's owner: the home whose journal holds it, and the address of the broker that leads that home."""

    home: int
    leader: str
