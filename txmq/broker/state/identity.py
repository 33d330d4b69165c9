"""The identity of a broker, drawn when its data directory is made (``node.json``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The numbers of cluster and node, and the name that an operator gave. Every transaction id holds the numbers."""

    cluster: int
    node: int
    name: str
