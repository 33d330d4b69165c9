"""The client's side of one home: its connections, its sessions, the senders of its partitions.

``control`` carries all requests but reads, and the session that transactions and the first producer share (``senders``
gives the other producers connections of their own). A broker that has users or quotas may delay puts, and whatever
follows them on their connection: there the first producer has a connection of its own, too. ``reader`` carries ``get``,
so that a long poll delays no other request. If the broker takes no more transactions in the session, ``control``
becomes another connection with another session; transactions that had begun end in the old one.

A link to a broker that is alone takes any broker at its addresses. A link that is *bound* to a home of a cluster
follows that home's leader: ``hello`` asks for the home, so that a broker that has the address now is told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from txmq.client.producer.home_senders import HomeSender, SenderPool
from txmq.client.transaction.homes import PendingCommits
from txmq.client.transport.connection import Reply
from txmq.client.transport.reconnecting import Address, Destination, Login, ReconnectingConnection
from txmq.client.transport.session import ClientSession
from txmq.errors import BrokerAwayError, ConnectionLostError, TxmqError
from txmq.model import Outcome
from txmq.protocol.json_text import Fields
from txmq.runtime.backoff import Backoff
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, Signal, start_daemon, watch_forks
from txmq.xid import TxId

if TYPE_CHECKING:
    from txmq.client.routes import Routes
    from txmq.runtime.tls import ClientTls

LOOK_EVERY_S = Backoff(0.02, 1.0)
LOOK_S = 1.0  # a home that does not answer for so long is away
FORMER_MAX = 4  # connections of full sessions that are kept; an older one is made again if one of its blocks goes on


class Presence:
    """Whether the home answers, as far as its client knows.

    A home that does not answer is *away*. A thread then looks at it again and again, so that no caller has to try: at
    once after the first loss, then after a back-off that doubles up to ``LOOK_EVERY_S.most``, without chance. The
    thread ends when the home is heard, or the client is closed.

    Args:
        look: asks the home; whether it answered. It takes a bounded time.

    Attributes:
        is_away: whether the home does not answer.
        is_watched: whether a thread is to look. A broker that is alone is looked at by its callers.

    Thread safety: any thread.
    """

    def __init__(self, look: Callable[[], bool]) -> None:
        self.is_away = self.is_watched = False
        self._look = look
        self._lock = Lock()
        self._watch: Signal | None = None  # ends the thread that looks
        self._closed = False

    def lost(self) -> None:
        """The home did not answer."""
        self.is_away = True
        if not self.is_watched or self._watch is not None:
            return
        with self._lock:
            if self._watch is not None or self._closed:
                return
            watch = self._watch = Signal()
        start_daemon("txmq-home", lambda: self._run(watch))

    def heard(self) -> None:
        """The home has answered."""
        if self.is_away:
            self.is_away = False
            self._end()

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        self._end()

    def forked(self) -> None:
        """In a forked child, where no thread looks: forget what was known."""
        self._lock, self._watch, self.is_away = Lock(), None, False

    def _end(self) -> None:
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.set()

    def _run(self, watch: Signal) -> None:
        pause_s = 0.0
        while not watch.wait(pause_s) and self._watch is watch:
            if self._look():
                self.heard()
            pause_s = LOOK_EVERY_S.following(pause_s)


class HomeLink:
    """See the module's docstring. Connections are made when they are first used.

    Attributes:
        connection_type, sender_type: what its connections and senders are; a client on an event loop has others.
        home: the home's id; 0 before the first connection.
        is_bound: whether it is a home of a cluster, so that no other broker will do.
        address: where the home answered last.
        control: the connection for everything but reads.
        reader: the connection for reads.
        senders: the senders of producers.
        pending_commits: of transactions, which this home has yet to answer.
        clock: for deadlines.
        timeout: seconds for a request that has no timeout of its own.

    Thread safety: any thread. After ``fork`` the child's connections are made anew, with another session.
    """

    reads_copies = False
    connection_type: ClassVar[type[ReconnectingConnection]] = ReconnectingConnection
    sender_type: ClassVar[type[HomeSender]] = HomeSender

    def __init__(
        self, routes: Routes, name: str, clock: Clock, timeout: float, on_unknown_topic: Callable[[str], None]
    ) -> None:
        self.clock, self.timeout = clock, timeout
        self.home, self.is_bound = 0, False
        self.address: Address | None = None
        self._routes, self._name = routes, name
        self.control = self.new_connection()
        self._former: tuple[ReconnectingConnection, ...] = ()  # the former ``control``s, whose sessions were full
        self.reader = self.new_connection()
        self._has_quotas = False  # as the broker said when it was last connected to
        self.senders = SenderPool(self._first_sender, self.new_connection, clock, on_unknown_topic, self.sender_type)
        self._presence = Presence(self._answers)
        self.pending_commits = PendingCommits(clock)
        self._lock = Lock()
        self._closed = False
        watch_forks(self)

    def bind(self, home: int) -> None:
        """From now on no other home will do."""
        self.home, self.is_bound = home, True
        self._presence.is_watched = True

    def __repr__(self) -> str:
        return f"home {self.home:016x}" if self.address is None else f"home {self.home:016x} at {self.address}"

    # --- the destination of its connections --------------------------------------------------------------------------

    @property
    def tls(self) -> ClientTls | None:
        """See ``Destination``."""
        return self._routes.tls

    @property
    def login(self) -> Login | None:
        """See ``Destination``."""
        return self._routes.login

    @property
    def home_wish(self) -> str | None:
        """See ``Destination``."""
        return f"{self.home:016x}" if self.is_bound else None

    def addresses(self, deadline: float) -> Sequence[Address]:
        """See ``Destination``."""
        return self._routes.addresses_of(self, deadline)

    def greeted(self, introduction: Fields, address: Address) -> None:
        """See ``Destination``."""
        self._routes.greeted(self, introduction, address)
        self.address = address
        self._has_quotas = introduction.get("quotas") is True
        self._presence.heard()

    def failed(self) -> None:
        """See ``Destination``."""
        self._presence.lost()

    # --- is it there? ------------------------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether the home does not answer, as far as that is known; asks nobody."""
        return self._presence.is_away

    def look(self) -> None:
        """Make sure that a home of a cluster is there, as far as that can be known, for callers that serve others, too.

        One that does not answer is waited for once, ``LOOK_S`` if it has answered before, and set aside: this costs no
        time until it answers again. A broker that is alone is not looked at.

        Raises:
            BrokerAwayError: it is away.
        """
        if not self.is_bound:
            return
        if self.is_away:
            raise BrokerAwayError(f"{self} is away")
        wait_s = LOOK_S if self.control.live is not None else self.timeout
        try:
            self.control.reach(self.clock.monotonic() + wait_s)
        except ConnectionLostError:
            self.was_silent()
            raise

    def was_silent(self) -> None:
        """A request was not answered in time: the home is away until it answers again, which a thread looks for."""
        self._presence.lost()

    def was_heard(self) -> None:
        """A request was answered."""
        self._presence.heard()

    def _answers(self) -> bool:
        try:
            self.control.call("ping", timeout=LOOK_S)
        except TxmqError:
            return False
        return True

    def stats(self, item: str | None = None, timeout: float | None = None) -> str:
        """The broker's statistics, as ``Client.stats``."""
        return self.control.repeat("stats", item or "*", timeout=timeout or self.timeout).decode("utf-8", "replace")

    # --- connections -------------------------------------------------------------------------------------------------

    def new_connection(self) -> ReconnectingConnection:
        """One more connection to the home, for a part of the client; the caller closes it."""
        return self.connection_to(self)

    def connection_to(self, destination: Destination) -> ReconnectingConnection:
        """One to what else has the home's messages; the caller closes it."""
        return self.connection_type(destination, self._name, self.clock, self.timeout)

    def _first_sender(self) -> ReconnectingConnection:
        """The connection of the first producer's sender."""
        return self.new_connection() if self._has_quotas or self.login is not None else self.control

    @property
    def session(self) -> ClientSession:
        """The session of this client's transactions, opened if need be. Raises as ``txmq.connect``."""
        session = self.control.session
        if session is None:
            session = self.control.have_session(self.clock.monotonic() + self.timeout)
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

    def end_sessions(self, deadline: float) -> list[Reply | None]:
        """Give up what is unfinished, and say that this client is done with its sessions; what carries the answers."""
        return [connection.end_session(deadline) for connection in self._stop()]

    def close(self) -> None:
        """Close the connections; unanswered requests are lost."""
        for connection in (*self._stop(), self.reader):
            connection.close()

    def _stop(self) -> Iterable[ReconnectingConnection]:
        """Give up what is unfinished. Returns the connections that may have a session."""
        with self._lock:
            self._closed = True
        self._presence.close()
        return dict.fromkeys((*self.senders.stop(), self.control, *self._former))

    def forked(self) -> None:
        """In a forked child: replace the locks, which threads of the parent may hold."""
        self._lock = Lock()
        self.pending_commits.forked()
        self._presence.forked()
