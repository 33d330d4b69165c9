"""The home's part in a cluster, as its journal tells it: a fold over STARTED, REGISTERED and HOME_RETIRED.

Each start of a broker with a registry journals an incarnation that it has drawn at random, before it asks the registry
to lead the home; then REGISTERED, with the epoch that it got. If a process dies between the two, the registry may name
an incarnation that never registered. So every incarnation from the newest registered one on is kept: a start shows them
to the registry, which takes a journal that misses the last leader for a copy.

An incarnation is text: 32 hex digits.
"""

from __future__ import annotations

from typing import Any, Final

INCARNATIONS_MAX: Final = 10_000  # starts that the registry never answered; an older one is refused, nothing is lost


class Registration:
    """See the module's docstring.

    Attributes:
        epoch: the newest that the registry gave out; 0 if the home was never in a registry.
        incarnations: the one that has this epoch, and those of all starts since; the newest is the last.
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
        """A process leads the home."""
        self.epoch, self.incarnations = epoch, [incarnation]

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
