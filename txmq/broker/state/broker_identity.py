"""The identity of a broker, drawn when its data directory is made (``node.json``), and the sources of new ids.

A single broker draws ids from its own ``State``; several brokers share a source outside. The core takes ids from
``Context.ids``; the shell may hand it another source. An id is used once: a number that is in use is refused before
anything is journaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The numbers of cluster and node, and the name that an operator gave. Every transaction id holds the numbers."""

    cluster: int
    node: int
    name: str


class Ids(Protocol):
    """A source of new ids. It answers at once: one that asks a registry reserves ids ahead."""

    def new_topic_id(self) -> int:
        """An id that no topic of the cluster has or had. It may be lower than those of existing topics."""

    def new_session_number(self) -> int:
        """A number that no session of this home has or had."""
