"""The identity of a broker: its numbers, the sources of new ids, and its registration in a cluster.

The numbers are drawn when the data directory is made (``node.json``). A single broker draws ids from its own ``State``;
several brokers share a source outside. The core takes ids from ``Context.ids``; the shell may hand it another source.
An id is used once: a number that is in use is refused before anything is journaled.

``Registration`` is the home's part in a cluster, as its journal tells it: a fold over LED and HOME_RETIRED.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

STARTS_MAX: Final = 10_000  # a registry that knows none of them refuses the home, nothing is lost


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """Whose process this is.

    Attributes:
        cluster, node: every transaction id holds them.
        name: an operator gave it.
        replica: which of the home's directories this is (``redo.replica_identity``).
        start: this life of its process, a number drawn at random.
    """

    cluster: int
    node: int
    name: str
    replica: int = 1
    start: int = 0


class Ids(Protocol):
    """A source of new ids. It answers at once: one that asks a registry reserves ids ahead."""

    def new_topic_id(self) -> int:
        """An id that no topic of the cluster has or had. It may be lower than those of existing topics."""

    def new_session_number(self) -> int:
        """A number that no session of this home has or had."""


class Registration:
    """The home's part in a cluster.

    Attributes:
        epoch: the newest that the registry gave out; 0 if the home was never in a registry.
        starts: of the processes that led the home in a cluster; the newest is the last.
        retired: by other home that was given up as lost for ever, why.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.starts: list[int] = []
        self.retired: dict[int, str] = {}

    def led(self, epoch: int, start: int) -> None:
        """A process leads the home under an epoch of the registry's."""
        self.epoch = epoch
        self.starts.append(start)
        del self.starts[:-STARTS_MAX]

    def snapshot(self) -> dict[str, Any] | None:
        """JSON-able; None for a broker that never had a registry."""
        if not self.epoch:
            return None
        retired = {f"{home:016x}": reason for home, reason in self.retired.items()}
        return {"epoch": self.epoch, "starts": [f"{start:032x}" for start in self.starts], "retired": retired}

    def restore(self, fields: dict[str, Any] | None) -> None:
        """The reverse of ``snapshot``."""
        if fields is not None:
            self.epoch, self.starts = fields["epoch"], [int(start, 16) for start in fields["starts"]]
            self.retired = {int(home, 16): reason for home, reason in fields["retired"].items()}
