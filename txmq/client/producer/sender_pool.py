"""The senders of a client: one for each producer that is open.

One session numbers the batches of one sender only. So the first sender uses the client's own connection and session,
and each further one gets a connection of its own. Senders are kept and used again when producers close.
"""

from __future__ import annotations

from collections.abc import Callable

from txmq.client.producer.batches import ProducerLimits
from txmq.client.producer.home_sender import HomeSender
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import ClosedError
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, watch_forks


class SenderPool:
    """Gives senders to producers; see the module's docstring.

    Args:
        control: returns the client's own connection of the moment.
        new_connection: makes one more connection.
        on_unknown_topic: called with the topic's name if the broker does not know it.
        new_sender: makes a sender.

    Thread safety: any thread.
    """

    def __init__(
        self, control: Callable[[], ReconnectingConnection], new_connection: Callable[[], ReconnectingConnection],
        clock: Clock, on_unknown_topic: Callable[[str], None], new_sender: type[HomeSender] = HomeSender,
    ) -> None:  # fmt: skip
        self._control, self._new_connection, self._clock = control, new_connection, clock
        self._on_unknown_topic, self._new_sender = on_unknown_topic, new_sender
        self._lock = Lock()
        self._senders: list[HomeSender] = []
        self._idle: list[HomeSender] = []
        self._closed = False
        watch_forks(self)

    def take(self, limits: ProducerLimits) -> HomeSender:
        """A sender that no other producer uses.

        Raises:
            ClosedError: the client is closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            if self._idle:
                sender = self._idle.pop()
                sender.limits = limits
                return sender
            connection = self._new_connection() if self._senders else self._control()
            sender = self._new_sender(connection, self._clock, limits)
            sender.on_unknown_topic = self._on_unknown_topic
            self._senders.append(sender)
            return sender

    def give_back(self, sender: HomeSender) -> None:
        """A producer is closed. A sender that holds a batch of unknown outcome is not used again."""
        with self._lock:
            if not self._closed and sender.is_idle and sender in self._senders:
                self._idle.append(sender)

    def close(self) -> None:
        """Close the senders; no other is given out."""
        with self._lock:
            self._closed = True
            senders, self._senders, self._idle = self._senders, [], []
        for sender in senders:
            sender.close()

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self._lock = Lock()
