"""The broker's knowledge of the cluster: the other homes, the registry, what is asked of it, and requests that wait.

In memory: the journal has what must last.

*Parked requests.* A request for a topic that this home does not know waits until the registry was asked: another broker
may have created the topic a moment ago. Only then it is 404. Where there are users, so does every request after a while
in which the process stood still (``authorizer.doubt_users``): its user may have been removed meanwhile, and the
registry's word of it is under way. If the registry does not answer, the home goes on with the users that it knows.

One read of the registry is under way at a time. It counts for the requests that came before it began; the next one, for
all that came meanwhile. A connection's later requests are taken in when its request that waits is answered
(``ClientConnection.waiting``), so that their order is kept.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.registry_asks import Ask, Refresh, Result
from txmq.errors import BrokerError, OverloadedError, TxmqError, UnavailableError
from txmq.protocol.requests import Request
from txmq.registry.cluster_metadata import HomeEntry

ASKS_MAX: Final = 1000  # without an answer
PARKED_BYTES_MAX: Final = 32 << 20  # of the bodies of all requests that wait


class DoubtfulUsersError(UnavailableError):
    """The process stood still: whether users were removed meanwhile is being asked."""


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

    # --- parked requests ---------------------------------------------------------------------------------------------

    def park(self, client: ClientConnection, request: Request, error: BrokerError) -> BrokerError | None:
        """Let a request wait for the registry that was refused with ``error``.

        Returns:
            The answer, if the request must not wait (any longer).
        """
        needed = self.resumed or self.refreshes_begun + 1
        if isinstance(error, DoubtfulUsersError):
            needed = max(needed, self.doubt)
        elif needed <= self.refreshes_done:
            return error if self.refresh_error is None else _unavailable(str(self.refresh_error))
        if self.state is not RegistryState.CONNECTED and not isinstance(error, DoubtfulUsersError):
            return _unavailable(self.state.value)
        size = len(request[3] or b"")
        if self.parked_bytes + size > PARKED_BYTES_MAX:
            return OverloadedError("too many requests wait for the registry; try again later")
        try:
            self._refresh()
        except OverloadedError as overloaded:
            return overloaded
        client.waiting = request
        client.given_bytes = 1 << 62  # ends the connection's turn, as a long answer does: no test in the loop for it
        self.parked[client] = Parked(request, needed)
        self.parked_bytes += size
        return None

    def _refresh(self) -> None:
        """Have the registry read, unless it is under way."""
        if self.refreshes_asked == self.refreshes_done:
            self.ask(Refresh, self._refreshed)
            self.refreshes_asked += 1

    def _refreshed(self, result: Result) -> None:
        self.refreshes_done = self.refreshes_asked
        self.refresh_error = result if isinstance(result, TxmqError) else None
        if self.refreshes_done < self.doubt:  # it may have been read before the process stood still
            self._refresh()

    def stood_still(self, *, is_serving: bool) -> None:
        """The process stood still until now: only a read that begins from now on tells of users again.

        Args:
            is_serving: have it begun; else the users with which the home begins to serve may have been read before.
        """
        self.doubt = self.refreshes_begun + 1
        if is_serving:
            with suppress(OverloadedError):  # a request that is parked asks
                self._refresh()

    def forget(self, client: ClientConnection) -> None:
        """A connection is gone: its request is not executed."""
        parked = self.parked.pop(client, None)
        if parked is not None:
            self.parked_bytes -= len(parked.request[3] or b"")

    def take_parked(self) -> list[tuple[ClientConnection, Parked]]:
        """All requests that wait, in order of arrival. Each must be executed again."""
        taken = list(self.parked.items())
        self.parked.clear()
        self.parked_bytes = 0
        for client, _ in taken:
            client.waiting = None
        return taken


def _unavailable(reason: str) -> UnavailableError:
    return UnavailableError(f"whether the topic exists is not known: the registry does not answer ({reason})")
