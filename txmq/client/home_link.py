"""The client's side of one home: its connections, its sessions, the senders of its partitions.

``control`` carries all requests but reads, and the session that transactions and the first producer share (``senders``
gives the other producers connections of their own). ``reader`` carries ``get``, so that a long poll delays no other
request. If the broker takes no more transactions in the session, ``control`` becomes another connection with another
session; transactions that had begun end in the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from txmq.client.producer.sender_pool import SenderPool
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.client.transport.session import ClientSession
from txmq.model import Outcome
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, watch_forks
from txmq.xid import TxId

FORMER_MAX = 4  # connections of full sessions that are kept; an older one is made again if one of its blocks goes on


class HomeLink:
    """See the module's docstring. Connections are made when they are first used.

    Attributes:
        control: the connection for everything but reads.
        reader: the connection for reads.
        senders: the senders of producers.
        clock: for deadlines.
        timeout: seconds for a request that has no timeout of its own.
        home: the home's id; 0 until it is known.
        is_away: whether the home cannot be reached, as far as is known.

    Thread safety: any thread. After ``fork`` the child's connections are made anew, with another session.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        name: str,
        clock: Clock,
        timeout: float,
        on_unknown_topic: Callable[[str], None],
    ) -> None:
        self.clock, self.timeout = clock, timeout
        self._addresses, self._name = addresses, name
        self.control = self.new_connection()
        self._former: tuple[ReconnectingConnection, ...] = ()  # the former ``control``s, whose sessions were full
        self.reader = self.new_connection()
        self.senders = SenderPool(lambda: self.control, self.new_connection, clock, on_unknown_topic)
        self._lock = Lock()
        self._closed = False
        self.home, self.is_away = 0, False
        watch_forks(self)

    def new_connection(self) -> ReconnectingConnection:
        """One more connection to the home, for a part of the client; the caller closes it."""
        return ReconnectingConnection(self._addresses, self._name, self.clock, self.timeout)

    @property
    def session(self) -> ClientSession:
        """The session of this client's transactions, opened if need be. Raises as ``txmq.connect``."""
        session = self.control.session
        if session is None:
            _, session = self.control.connect_with_session(self.clock.monotonic() + self.timeout)
        return session

    def leave_session(self, full: ClientSession) -> None:
        """For transactions: the broker takes no more of them in this session; open another one for the next.

        It gets a connection of its own: batches and blocks of the old session go on in the old one until they end.
        """
        with self._lock:
            if self._closed or self.control.session is not full:
                return
            former = (*self._former, self.control)
            self.control, self._former = self.new_connection(), former[-FORMER_MAX:]
        for connection in former[:-FORMER_MAX]:
            connection.rest()

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """The outcome of a transaction of this client whose end was not seen, once it was asked for."""
        known = (connection.known_outcome(txid) for connection in (self.control, *self._former))
        return next((outcome for outcome in known if outcome is not None), None)

    def was_silent(self) -> None:
        """The home has not answered in time, or cannot be connected to. A lone broker is asked all the same."""

    def close(self) -> None:
        """Close the connections; unanswered requests are lost."""
        with self._lock:
            self._closed = True
        self.senders.close()
        for connection in (self.control, *self._former, self.reader):
            connection.close()

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self._lock = Lock()
