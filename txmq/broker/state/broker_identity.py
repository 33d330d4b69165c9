"""The identity of a broker: its numbers, the sources of new ids, and its registration in a cluster.

The numbers are drawn when the data directory is made (``node.json``). A single broker draws ids from its own ``State``;
several brokers share a source outside. The core takes ids from ``Context.ids``; the shell may hand it another source.
An id is used once: a number that is in use is refused before anything is journaled.

``Registration`` is the home's part in a cluster, as its journal tells it: a fold over STARTED, REGISTERED and
HOME_RETIRED. Each start of a broker with a registry journals an incarnation that it has drawn at random, before it asks
the registry to lead the home; then REGISTERED, with the epoch that it got. A start shows all of them to the registry,
which takes a journal that misses the last leader for a copy. The registry may name one that never registered, because
its process died between the two; and one that is long gone, because the ensemble was restored from a backup: the
journal knows it all the same, and the home is led under an epoch above both.

An incarnation is text: 32 hex digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

INCARNATIONS_MAX: Final = 10_000  # starts; an ensemble that knows none of them refuses the home, nothing is lost


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


class Registration:
    """The home's part in a cluster.

    Attributes:
        epoch: the newest that the registry gave out; 0 if the home was never in a registry.
        incarnations: those of all starts; the newest is the last.
        retired: by other home that was given up as lost for ever, why.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.incarnations: list[str] = []
        self.retired: dict[int, str] = {}

    def started(self, incarnation: str) -> None:
        """A process with a registry has started."""
        self.incarnations.append(incarnation)
        del self.incarnations[:-INCARNATIONS_MAX]

    def registered(self, epoch: int, incarnation: str) -> None:
        """A process leads the home: as a rule the one that has started last."""
        self.epoch = epoch
        if incarnation not in self.incarnations:
            self.started(incarnation)

    def snapshot(self) -> dict[str, Any] | None:
        """JSON-able; None for a broker that never had a registry."""
        if not self.incarnations:
            return None
        retired = {f"{home:016x}": reason for home, reason in self.retired.items()}
        return {"epoch": self.epoch, "incarnations": list(self.incarnations), "retired": retired}

    def restore(self, fields: dict[str, Any] | None) -> None:
        """The reverse of ``snapshot``."""
        if fields is not None:
            self.epoch, self.incarnations = fields["epoch"], list(fields["incarnations"])
            self.retired = {int(home, 16): reason for home, reason in fields.get("retired", {}).items()}
