"""The homes of an ordered producer: for each its sessions, a sender and a thread that drains the spool.

Theory of operation. A sequence counts in a session, and a session belongs to one home, so each home has ``Sessions``
and an ``OrderedSender`` of its own. A partition's queue sends to the home that owns the partition. Each home has its
own drain thread, so that no home waits for one that is away. A lone broker is the only home.

Invariants:
    * What former processes may have left on the way to a home is over before anything new is sent there. A session of
      another home has nothing to do with that: it is ended when its home is used, or at ``flush``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from txmq.client.producer.core import ProducerLimits
from txmq.client.spooling.direct_sender import OrderedSender
from txmq.client.spooling.spool import Spool, SpoolIdentity
from txmq.client.spooling.spool_sessions import Sessions
from txmq.errors import RequestTimeoutError
from txmq.model import TopicPartition
from txmq.runtime.threads import Lock, Signal, watch_forks

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

ROOM_LOOK_S = 0.02  # a thread that waits for room in all buffers looks again this often


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
