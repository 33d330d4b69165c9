"""Who a broker is: drawn when its data directory is made (``node.json``), and part of every transaction id."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The numbers of cluster and node, and the name that an operator gave."""

    cluster: int
    node: int
    name: str
