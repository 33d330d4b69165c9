"""The broker's knowledge of the other homes and of the registry. In memory: the journal has what must last."""

from __future__ import annotations

from txmq.registry.port import Home


class ClusterView:
    """See the module's docstring.

    Attributes:
        homes: by number, as the registry last told.
    """

    def __init__(self) -> None:
        self.homes: dict[int, Home] = {}

    def leader(self, home: int) -> str | None:
        """Where a home is led; None if no leader is known to live."""
        known = self.homes.get(home)
        return None if known is None else known.address
