"""The senders of a client: one for each producer that is open.

One session numbers the batches of one sender only. So the first sender uses the client's own connection and session,
and each further one gets a connection of its own. Senders are kept and used again when producers close, ``IDLE_MAX`` at
most: beyond that a sender's session ends with its producer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from txmq.client.producer.batches import ProducerLimits
from txmq.client.producer.home_sender import HomeSender
from txmq.client.transport.reconnecting import END_S_MAX, ReconnectingConnection, have_ended
from txmq.errors import ClosedError
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, watch_forks

IDLE_MAX: Final = 8


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
            if self._closed or not sender.is_idle or sender not in self._senders:
                return
            is_first = sender is self._senders[0]  # its connection may be the client's own
            if is_first or len(self._idle) < IDLE_MAX:
                self._idle.append(sender)
                return
            self._senders.remove(sender)
        sender.stop()
        try:
            have_ended([sender.reconnecting.end_session(self._clock.monotonic() + END_S_MAX)])
        finally:
            sender.reconnecting.close()

    def stop(self) -> list[ReconnectingConnection]:
        """Give up what is unfinished; no sender is given out any more. Returns their connections, to be closed."""
        with self._lock:
            self._closed = True
            senders, self._idle = list(self._senders), []
        for sender in senders:
            sender.stop()
        return [sender.reconnecting for sender in senders]

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self._lock = Lock()
