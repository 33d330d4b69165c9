"""The homes of an ordered producer: for each its sessions, a sender and a thread that drains the spool.

Theory of operation. A sequence counts in a session, and a session belongs to one home, so each home has ``Sessions``
and an ``OrderedSender`` of its own. A partition's queue sends to the home that owns the partition. Each home has its
own drain thread, so that no home waits for one that is away. A lone broker is the only home.

*Sessions* are this process's own, and those of former processes with the same spool. New batches are sent in the
*current* session, on the ``main`` connection. A batch whose sequence belongs to another session (the process was
restarted, or the broker ended the session) is sent on the ``other`` connection, which resumes the session that is
needed. So a batch is sent with one sequence only, however often it is sent.

Before the first batch of a process is sent to a home, every session of former processes there is taken over once, under
a higher epoch. The broker then closes the connection that held it and lets no process back under a lower epoch, so what
a killed process left in its sockets is stored before that or never. Otherwise it could come in after what is sent now.

A session of which the spool keeps no batch, and of which nothing is on its way any more, is *ended* at the broker: the
current one when the producer closes, a former one when it was taken over. It leaves the spool after that.

Invariants:
    * What former processes may have left on the way to a home is over before anything new is sent there. A session of
      another home has nothing to do with that: it is ended when its home is used, or at ``flush``.
    * A session's identity and secret are on disk before the first batch is sent in it, and a higher epoch before the
      broker gets it: each epoch is higher than all before it.
    * A session is resumed only at the broker that issued it (cluster and home are compared first).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from txmq.client.producer.core import ProducerLimits
from txmq.client.spooling.direct_sender import OrderedSender
from txmq.client.spooling.spool import AssignedSequence, Held, Spool, SpoolIdentity
from txmq.client.transport.connection import Connection, Reply
from txmq.client.transport.reconnecting import ReconnectingConnection, have_ended
from txmq.client.transport.session import PROTOCOL, ClientSession, parse_hello, resume_wish
from txmq.errors import ConnectionLostError, FencedError, RemoteProtocolError, RequestTimeoutError
from txmq.log import records
from txmq.model import TopicPartition
from txmq.runtime.threads import Lock, Signal, new_lock, watch_forks

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

ROOM_LOOK_S = 0.02  # a thread that waits for room in all buffers looks again this often


class Sessions:
    """The sessions at one home. Thread safety: any thread.

    Args:
        former: the sessions of former processes that have not ended; shared with the other homes.
        is_of_home: which of them were issued by this home.

    Attributes:
        main: the connection of the current session.
    """

    def __init__(
        self, main: ReconnectingConnection, other: ReconnectingConnection, spool: Spool, name: str,
        former: list[SpoolIdentity], is_of_home: Callable[[SpoolIdentity], bool],
    ) -> None:  # fmt: skip
        self.main, self._other, self._spool, self._name = main, other, spool, name
        self._noted: SpoolIdentity | None = None
        self._session: ClientSession | None = None
        self._former, self._is_of_home = former, is_of_home
        self._held: dict[SpoolIdentity, Held] = {}
        self._lock = new_lock()  # held during the other connection's greetings
        self._bound: tuple[Connection, SpoolIdentity] | None = None

    @property
    def in_flight_max(self) -> int:
        """How many unanswered batches of a partition the broker tells apart."""
        return 1 if self._session is None else self._session.in_flight_max

    @property
    def request_size_bytes_max(self) -> int | None:
        """The broker's limit, once it is known."""
        return None if self._session is None else self._session.request_size_bytes_max

    def current(self, deadline: float) -> SpoolIdentity:
        """The session in which new batches are numbered; connects if need be.

        Raises:
            ConnectionLostError, RequestTimeoutError: the broker cannot be reached.
            StorageError: the spool cannot note the session.
        """
        return self.bound(deadline)[1]

    def bound(self, deadline: float) -> tuple[Connection, SpoolIdentity, int]:
        """The connection that is bound to the current session, the session, and how many batches it tells apart.

        Raises as ``current``.
        """
        self.end_former_sessions(deadline)
        connection, session = self.main.connect_with_session(deadline)
        noted = self._noted
        if session is not self._session or noted is None:
            noted = SpoolIdentity(session.cluster, session.home, session.id, session.epoch)
            self._spool.remember_session(noted, session.secret)
            self._held[noted] = Held(session.secret, session.epoch)
            self._session, self._noted = session, noted
        return connection, noted, session.in_flight_max

    def end_former_sessions(self, deadline: float) -> None:
        """What former processes sent is stored when this returns, or never. Raises as ``current``."""
        if not self._former:
            return
        with self._lock:
            for identity in filter(self._is_of_home, list(self._former)):
                try:
                    connection = self._resumed(identity, deadline)
                    if not self._spool.needs_session(identity):
                        self._bound = None
                        have_ended([connection.request(deadline, "end", 0)])
                except FencedError:
                    if not self._is_of_home(identity):  # the greeting has told that there are several homes
                        continue
                    # It has ended, and nothing is stored in its name any more.
                self._spool.forget_session(identity)
                self._former.remove(identity)

    def start(
        self, assigned: AssignedSequence, partition: TopicPartition, content: bytes, deadline: float, topic_id: int
    ) -> Reply:  # fmt: skip
        """Send a batch with its sequence; the answer's body is its offset.

        Raises:
            FencedError: the session is no more; nothing was sent.
            ConnectionLostError, RequestTimeoutError: nothing was sent.
        """
        return self._connection_of(assigned.identity, deadline).request(
            deadline, "put", *partition, extensions={"id": topic_id} if topic_id else None,
            body=[stamped(content, assigned)],
        )  # fmt: skip

    def _connection_of(self, identity: SpoolIdentity, deadline: float) -> Connection:
        if identity == self._noted:
            connection, session = self.main.connect_with_session(deadline)
            if session is self._session:
                return connection
        with self._lock:
            return self._resumed(identity, deadline)

    def _resumed(self, identity: SpoolIdentity, deadline: float) -> Connection:
        connection = self._other.connect(deadline)
        if self._bound == (connection, identity):
            return connection
        self._bound = None
        broker = self._hello(connection, "none", deadline)
        if (broker.get("cluster"), broker.get("home")) != (f"{identity.cluster:016x}", f"{identity.home:016x}"):
            raise FencedError("another broker answers than the one that issued the session")
        fields = self._hello(connection, self._wish(identity), deadline)
        if fields.get("session") != f"{identity.session:x}":
            raise RemoteProtocolError(f"session {identity.session:x} was asked for, {fields.get('session')} answered")
        self._bound = connection, identity
        return connection

    def _wish(self, identity: SpoolIdentity) -> str:
        held = self._held.get(identity)
        if held is None:
            held = self._held[identity] = self._spool.take_session(identity)
        if not held.secret:
            raise FencedError(
                f"the spool has no secret of session {identity.session:x}: an older txmq noted none, so it cannot be "
                "resumed"
            )
        return resume_wish(identity.session, held.epoch, held.secret)

    def _hello(self, connection: Connection, wish: str, deadline: float) -> dict[str, object]:
        reply = connection.request(deadline, "hello", PROTOCOL, self._name, extensions={"session": wish})
        return parse_hello(reply.result())

    def renew(self, identity: SpoolIdentity, deadline: float) -> None:
        """Number new batches in another session; batches with a sequence of this one keep it."""
        session = self._session
        if session is not None and identity == self._noted:
            self.main.renew_session(session, deadline)
            self._noted = None

    def reconnect(self) -> None:
        """The connections are no longer bound to their sessions: make others."""
        for connection in (self.main, self._other):
            if connection.live is not None:
                connection.live.fail(ConnectionLostError("another connection took over the session"))

    def reach(self, deadline: float) -> None:
        """Raises ConnectionLostError, soon, if the broker is away."""
        self.main.connect(deadline)

    def end(self, deadline: float) -> None:
        """The producer closes, and nothing is on its way: the broker need not know the session if the spool does not.

        If the answer is lost, the next process asks for the session once more (``end_former_sessions``).
        """
        noted, session = self._noted, self._session
        if noted is None or self.main.session is not session or self._spool.needs_session(noted):
            return
        if have_ended([self.main.end_session(deadline)]):
            self._spool.forget_session(noted)

    def close(self) -> None:
        """Close the connections."""
        self.main.close()
        self._other.close()


def stamped(content: bytes, assigned: AssignedSequence) -> bytearray:
    """The batch with its sequence: the same bytes for the same sequence."""
    batch = bytearray(content)
    records.set_sequence(batch, assigned.identity.session, assigned.identity.epoch, assigned.sequence)
    return batch


class SpoolHome:
    """One home.

    Attributes:
        commits: of transactions, which it has yet to answer; messages for their partitions wait for them.
        wake: wakes its drain thread.
        stopped: set when that thread has ended.
    """

    def __init__(self, link: HomeLink, sessions: Sessions, sender: OrderedSender) -> None:
        self._link, self.sessions, self.sender = link, sessions, sender
        self.commits = link.pending_commits
        self.wake, self.stopped = Signal(), Signal()

    @property
    def is_idle(self) -> bool:
        """Whether it is connected, and owes no answer."""
        return self.sessions.main.live is not None and self.sender.is_idle

    def stats(self) -> str:
        """The statistics of the home's broker."""
        return self._link.control.repeat("stats", "*", timeout=self._link.timeout).decode("utf-8", "replace")


class SpoolHomes:
    """See the module's docstring. Thread safety: any thread.

    Args:
        on_given_up: as ``OrderedSender``.
        on_unknown_topic: called with the topic's name if a broker does not know it, or knows another one of that name.
        on_opened: called once for each home, when it is first used.
    """

    def __init__(
        self, client: Client, spool: Spool, limits: ProducerLimits, on_given_up: Callable[[], None],
        on_unknown_topic: Callable[[str], None], on_opened: Callable[[SpoolHome], None],
    ) -> None:  # fmt: skip
        self._client, self._spool, self._limits = client, spool, limits
        self._on_given_up, self._on_unknown_topic, self._on_opened = on_given_up, on_unknown_topic, on_opened
        self._former = spool.sessions()
        self._of_links: dict[HomeLink, SpoolHome] = {}
        self._lock = Lock()
        watch_forks(self)

    def opened(self) -> list[SpoolHome]:
        """The homes that were used."""
        return list(self._of_links.values())

    def any(self) -> SpoolHome:
        """A home for what any broker answers; the first one is opened before anything is sent."""
        return self._of(self._client.routes.any_link())

    def known(self, partition: TopicPartition) -> SpoolHome:
        """The partition's home if no broker has to be asked, or any for now."""
        is_known = self._client.topics.held(partition[0]) is not None
        return self.owner(partition) if is_known else self.any()

    def owner(self, partition: TopicPartition) -> SpoolHome:
        """The home that owns a partition.

        Raises:
            ConnectionLostError, RequestTimeoutError: no broker says which.
        """
        return self._of(self._client.routes.link_for(*partition))

    def corrected(self, topic: str) -> None:
        """A broker does not own a partition of the topic: find out which home does. Raises as ``owner``."""
        self._client.routes.corrected(topic)

    def topic_is_gone(self, topic: str) -> None:
        """Another topic has the name: messages from now on are for that one."""
        self._on_unknown_topic(topic)

    def _of(self, link: HomeLink) -> SpoolHome:
        home = self._of_links.get(link)
        if home is None:
            with self._lock:
                home = self._of_links.get(link)
                if home is None:
                    home = self._of_links[link] = self._new(link)
        return home

    def _new(self, link: HomeLink) -> SpoolHome:
        def is_of_link(identity: SpoolIdentity) -> bool:
            return self._client.routes.is_single_home or identity.home == link.home

        main, other = link.new_connection(), link.new_connection()
        sessions = Sessions(main, other, self._spool, self._client.name, self._former, is_of_link)
        sender = OrderedSender(sessions, self._client.clock, self._limits, self._on_given_up)
        sender.on_unknown_topic = self._on_unknown_topic
        home = SpoolHome(link, sessions, sender)
        self._on_opened(home)
        return home

    @property
    def request_size_bytes_max(self) -> int | None:
        """The smallest limit of the homes, once it is known."""
        limits = (home.sessions.request_size_bytes_max for home in self.opened())
        return min((limit for limit in limits if limit is not None), default=None)

    def reach(self, deadline: float) -> None:
        """Raises ConnectionLostError, soon, if all brokers are away."""
        self.any().sessions.reach(deadline)

    def end_former_sessions(self, deadline: float) -> None:
        """What former processes sent is stored when this returns, or never. Raises as ``Sessions.current``."""
        routes = self._client.routes
        for identity in list(self._former):
            link = routes.link_of_home(identity.home)
            if routes.is_single_home or link.home == identity.home:
                self._of(link).sessions.end_former_sessions(deadline)
            elif all(known.home != identity.home for known in routes.all_links()):
                self._spool.forget_session(identity)  # no home of this cluster: nothing of it comes here
                self._former.remove(identity)

    def wait_for_room(self, size: int, deadline: float) -> None:
        """Wait while the buffers of all homes together are full; batches past their deadline leave them."""
        clock, limit = self._client.clock, self._limits.buffer_size_bytes
        with suppress(RequestTimeoutError):
            while (used := sum(home.sender.core.buffered_bytes for home in self.opened())) and used + size > limit:
                now = clock.monotonic()
                if now >= deadline:
                    return
                for home in self.opened():
                    home.sender.make_room(min(deadline, now + ROOM_LOOK_S))

    def flush(self, deadline: float) -> None:
        """Wait for what is sent directly. Raises as ``Sender.flush``."""
        for home in self.opened():
            home.sender.flush(deadline)

    def wake(self) -> None:
        """Wake all drain threads."""
        for home in self.opened():
            home.wake.set()

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self._lock = Lock()
