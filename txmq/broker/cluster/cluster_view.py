"""The broker's knowledge of the cluster: the other homes, the registry, what is asked of it. In memory: the journal has
what must last.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.registry_asks import Ask, Refresh, Result
from txmq.errors import OverloadedError, TxmqError
from txmq.protocol.requests import Request
from txmq.registry.cluster_metadata import HomeEntry

ASKS_MAX: Final = 1000  # without an answer


class RegistryState(enum.Enum):
    """The broker's session with the registry."""

    WAITING = "waiting"  # since the start: nothing is served yet
    CONNECTED = "connected"
    SUSPENDED = "suspended"  # the connection is lost
    EXPIRED = "expired"  # the session is lost, too: other brokers do not find this one


class Parked(NamedTuple):
    """A request that waits for a read of the registry: ``needed`` is the number of one that begins after it."""

    request: Request
    needed: int


class ClusterView:
    """See the module's docstring.

    Attributes:
        address: the registry's, as operators write it.
        state, since_ms: of the session with it, and since when.
        homes: by number, as the registry last told.
        map_version: of the newest map that was taken over; ``is_taken_over``: whether all of that map was.
        older_version: of a map that was older, and refused; -1 if none was. ``older_access``: of users, likewise.
        refused: why topics of the map are not taken over, by id.
        dropping: deleted topics of which the registry is told that this home has dropped them.
        releasing: groups and queries, by kind and name, whose anchor the registry is told to release, and the group
            of the journal after which it is told.
        parked: requests that wait for a read of the registry, in order of arrival; ``parked_bytes``: their bodies.
        refreshes_asked, refreshes_begun, refreshes_done: how many reads were asked for, may have begun, and are done.
        refresh_error: why the last one failed.
        when_lost: by ask, what is called if the connection to the registry is lost before its answer.
        doubt: the number of the read after which it is known again whether users were removed while the process stood
            still.
        resumed: what the request needed that is executed again just now; 0 if none is.
    """

    def __init__(self, address: str = "") -> None:
        self.address = address
        self.state, self.since_ms = RegistryState.WAITING, 0
        self.homes: dict[int, HomeEntry] = {}
        self.map_version, self.older_version = 0, -1
        self.older_access = -1
        self.is_taken_over = False
        self.refused: dict[int, str] = {}
        self.dropping: set[int] = set()
        self.releasing: dict[tuple[str, str], object] = {}
        self.parked: dict[ClientConnection, Parked] = {}
        self.parked_bytes = self.resumed = 0
        self.refreshes_asked = self.refreshes_begun = self.refreshes_done = 0
        self.refresh_error: TxmqError | None = None
        self.when_lost: dict[int, Callable[[], None]] = {}
        self.doubt = 0
        self._next_number = 1
        self._waiting: dict[int, Callable[[Result], None]] = {}
        self._asks: list[tuple[Ask, object]] = []

    def leader(self, home: int) -> str | None:
        """Where a home is led; None if no leader is known to live."""
        known = self.homes.get(home)
        return None if known is None else known.address

    def set_homes(self, homes: Iterable[HomeEntry]) -> list[int]:
        """The registry told of the homes; those that have another leader than before."""
        before, self.homes = self.homes, {home.home: home for home in homes}
        return [number for number, home in self.homes.items() if home.address and home != before.get(number)]

    # --- asks --------------------------------------------------------------------------------------------------------

    @property
    def asked(self) -> int:
        """How many asks have no answer yet."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether too many asks have no answer."""
        return len(self._waiting) >= ASKS_MAX

    def ask(
        self, make: Callable[[int], Ask], then: Callable[[Result], None], behind: object = None,
        when_lost: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Ask the registry; ``then`` gets the answer.

        Args:
            behind: a commit group that must be durable before the registry is asked.
            when_lost: called if the connection is lost before the answer, which comes all the same, some time.

        Raises:
            OverloadedError: too many asks have no answer.
        """
        if self.is_full:
            raise OverloadedError(f"{ASKS_MAX} requests wait for the registry; try again later")
        number = self._next_number
        self._next_number += 1
        self._waiting[number] = then
        self._asks.append((make(number), behind))
        if when_lost is not None:
            self.when_lost[number] = when_lost

    def take_asks(self, is_durable: Callable[[object], bool]) -> list[Ask]:
        """Those that the registry may be asked now, in their order."""
        taken = [ask for ask, behind in self._asks if is_durable(behind)]
        if taken:
            self.refreshes_begun += sum(isinstance(ask, Refresh) for ask in taken)
            numbers = {ask.number for ask in taken}
            self._asks = [each for each in self._asks if each[0].number not in numbers]
        return taken

    def answered(self, number: int, result: Result) -> None:
        """Hand an answer over."""
        self.when_lost.pop(number, None)
        self._waiting.pop(number)(result)
