"""``Consumer.run``: a listener, called with each message by several threads.

Partitions run in parallel, each in order: one thread at a time works for a partition, for some ms before it is the next
one's turn, or for one message if that takes longer. If a message fails, its partition waits until the message is
delivered again. What is no ``Exception`` (SystemExit, the end of a greenlet) is not the message's failure: all threads
end, and ``run`` raises it. Otherwise its thread would end alone, and hold its partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from txmq.client.consumer.assigned_partitions import IDLE_S_MAX, TURN_S, AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.failures import Failures
from txmq.model import Message
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.runtime.ports import Clock
from txmq.runtime.threads import thread_number

if TYPE_CHECKING:
    from txmq.client.consumer.consumer_homes import ConsumerHomes

Handle = Callable[[Message], object]


class Listener:
    """See the module's docstring. Thread safety: any thread; several threads may call ``work``.

    Attributes:
        error: why a thread has ended before the others.
    """

    def __init__(
        self, assignment: AssignedPartitions, failures: Failures, homes: ConsumerHomes, clock: Clock, handle: Handle
    ) -> None:
        self._assignment, self._failures, self._homes = assignment, failures, homes
        self._clock, self._handle = clock, handle
        self._working: set[int] = set()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Call the listener until nothing is delivered any more."""
        with self._assignment.changed:
            self._working.add(thread_number())
        try:
            self._work()
        except SimulatedCrash:
            raise
        except BaseException as error:  # noqa: BLE001  raised by ``run``
            self.error = self.error or error
            self._assignment.stop_delivery()
        finally:
            with self._assignment.changed:
                self._working.discard(thread_number())
                self._assignment.changed.notify_all()

    @property
    def is_called_here(self) -> bool:
        """Whether the caller is one of the threads that call the listener."""
        with self._assignment.changed:
            return thread_number() in self._working

    def wait(self, timeout: float) -> bool:
        """Wait until every thread has finished its message; False at once in a thread that has one itself."""
        deadline = self._clock.monotonic() + timeout
        with self._assignment.changed:
            if thread_number() in self._working:
                return False
            while self._working and (now := self._clock.monotonic()) < deadline:
                self._assignment.changed.wait(deadline - now)
        return True

    def _work(self) -> None:
        while (found := self._next()) is not None:
            message, consumed = found
            until = self._clock.monotonic() + TURN_S
            following: Message | None = message
            while following is not None:
                message = following
                failure: Exception | None = None
                try:
                    self._handle(message)
                except Exception as error:  # noqa: BLE001  whatever the application raises: the message is retried
                    failure = error
                if failure is None:
                    following = self._go_on(message, consumed, until)
                    continue
                self._failures.failed(message, failure, failure)
                failure = following = None  # and with it the listener's frames
            with self._assignment.changed:
                consumed.is_busy = False
                self._assignment.changed.notify_all()

    def _go_on(self, message: Message, consumed: ConsumedPartition, until: float) -> Message | None:
        """Acknowledge a message; the partition's next one, if there is one and it is not another partition's turn."""
        assignment, following = self._assignment, None
        with assignment.lock:
            self._failures.returned(message, consumed)
            now = self._clock.monotonic()
            if now < until and not assignment.is_closed:
                following = assignment.take_next(consumed, now)
        if assignment.has_room:
            self._fetch_more()
        return following

    def _fetch_more(self) -> None:
        self._assignment.has_room = False  # before it is looked for: another thread may find room meanwhile
        self._homes.more()

    def _next(self) -> tuple[Message, ConsumedPartition] | None:
        """Wait for a message of a partition that no other thread works for; None after the end."""
        found = None
        while found is None:
            self._failures.store_blocked()
            with self._assignment.changed:
                if self._assignment.is_closed:
                    return None
                now = self._clock.monotonic()
                found = self._assignment.take_in_order(now)
                if found is None:
                    self._assignment.changed.wait(min(self._assignment.next_retry_in(now), IDLE_S_MAX))
        self._failures.store_blocked()  # a transaction acknowledges in order, and only this thread can defer these
        if self._assignment.has_room:
            self._fetch_more()
        return found
