"""Which process a consumer reads the messages of a home from: its leader, or a replica of it (``read_from``).

Theory of operation. Only reads go there: the group, its offsets and its acknowledgements stay with the leader. The
place is the destination of the fetcher's connection: it names the addresses in the order of preference, and the fetcher
asks it now and then whether to move (``should_move``). A replica that refuses readers, or is silent while a get is
open, is set aside for ``ASIDE_S``. What comes from a replica is checked like what comes from the leader, and a consumer
goes on where it was: offsets mean the same in both.

    * ``leader``: no other process is asked.
    * ``replica``: the leader is read from while no replica serves readers.
    * ``any``: a replica is read from while the leader is away, for as long as the group's member has its partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from txmq.errors import BrokerAwayError
from txmq.protocol.json_text import Fields
from txmq.runtime.ports import Clock

if TYPE_CHECKING:
    from txmq.client.home_link import HomeLink
    from txmq.client.routes import Routes
    from txmq.client.transport.connection import Connection
    from txmq.client.transport.reconnecting import Address, Login
    from txmq.runtime.tls import ClientTls

ASIDE_S: Final = 5.0
SILENT_S: Final = 4.0  # a get is answered within a second


class ReadPlace:
    """See the module's docstring; a ``Destination``. Thread safety: the fetching thread, and threads that connect.

    Attributes:
        is_replica: whether the process that answered last is one.
    """

    reads_copies = True

    def __init__(self, link: HomeLink, routes: Routes, clock: Clock, *, prefers_replicas: bool) -> None:
        self._link, self._routes, self._clock = link, routes, clock
        self._prefers_replicas = prefers_replicas
        self._aside: dict[Address, float] = {}  # until when
        self._address: Address | None = None
        self.is_replica = False
        self._reads, self._heard_at = 0, 0.0

    @property
    def tls(self) -> ClientTls | None:
        """See ``Destination``."""
        return self._link.tls

    @property
    def login(self) -> Login | None:
        """See ``Destination``."""
        return self._link.login

    @property
    def home_wish(self) -> str | None:
        """See ``Destination``."""
        return self._link.home_wish

    def addresses(self, deadline: float) -> Sequence[Address]:
        """See ``Destination``."""
        replicas = self._replicas()
        if replicas and self._link.is_away:
            return replicas
        try:
            leader = self._link.addresses(deadline)
        except BrokerAwayError:
            if not replicas:
                raise
            return replicas
        return [*replicas, *leader] if self._prefers_replicas else [*leader, *replicas]

    def greeted(self, introduction: Fields, address: Address) -> None:
        """See ``Destination``."""
        self.is_replica, self._address = introduction.get("replica") is True, address
        if not self.is_replica:
            self._link.greeted(introduction, address)
            if self._prefers_replicas:  # those that were tried first
                self._set_aside(self._replicas())
            return
        self._routes.require_home(self._link, introduction)
        if not self._prefers_replicas:  # the leader was tried first
            self._link.was_silent()

    def failed(self) -> None:
        """See ``Destination``."""
        self._link.failed()

    def refused(self) -> None:
        """The process that answered last serves no readers."""
        if self.is_replica and self._address is not None:
            self._set_aside([self._address])

    def should_move(self, connection: Connection, asked_at: float | None) -> bool:
        """Whether to ask another process from now on.

        Args:
            asked_at: when the oldest get that is open was sent; None: none is open.
        """
        now = self._clock.monotonic()
        if not self.is_replica:
            return (self._prefers_replicas or self._link.is_away) and bool(self._replicas())
        if self._address is not None and self._aside.get(self._address, 0.0) > now:
            return True
        if connection.reads != self._reads:
            self._reads, self._heard_at = connection.reads, now
        if asked_at is not None and now - max(asked_at, self._heard_at) > SILENT_S:
            self.refused()
            return True
        return not (self._prefers_replicas or self._link.is_away)

    def _set_aside(self, addresses: Sequence[Address]) -> None:
        until = self._clock.monotonic() + ASIDE_S
        self._aside = {**self._aside, **dict.fromkeys(addresses, until)}

    def _replicas(self) -> list[Address]:
        """Those that are known and not set aside."""
        now = self._clock.monotonic()
        return [one for one in self._routes.replicas_of(self._link) if self._aside.get(one, 0.0) <= now]
