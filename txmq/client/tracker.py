"""What a consumer has of one partition: fetched, delivered, acknowledged. No I/O, no clock.

```
   saved            next to deliver       next to fetch
     |  delivered, some acked  |   buffered     |
-----+-------------------------+----------------+----> offsets
```

``position`` is what may be saved: everything below it is acknowledged. Acks may come in any order.

Invariants:
    * messages are delivered in order of their offsets, each once, but for a *retry*, which delivers one again;
    * ``position`` never passes a message that is not acknowledged, and never falls but by ``seek``;
    * a reply to a fetch that ``seek`` or the loss of the partition has overtaken changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from txmq.model import Message

Slot = tuple[str, int]  # topic, partition


class Waiting:
    """A message set aside. ``message`` is None until its contents are there; ``is_out`` while somebody has it."""

    __slots__ = ("due_at", "failures", "is_out", "key_crc", "message")

    def __init__(self, message: Message | None, failures: int, key_crc: int | None, due_at: float = 0.0) -> None:
        self.message, self.failures, self.key_crc, self.due_at = message, failures, key_crc, due_at
        self.is_out = False


class Tracker:
    """One partition under one generation.

    Attributes:
        fetch: number of the fetch under way; 0 where there is none.
        fetch_at: monotonic time before which nothing is fetched, after an error.
        attempts: how often each message under way failed.
        retries: messages to be delivered again, with the time from which on.
        is_busy: a listener has a message of it in hand.
        aside: messages that were set aside and acknowledged, by offset; they are delivered again when due.
        aside_saved: the text about them that the group has.
    """

    __slots__ = (
        "_acked", "aside", "aside_saved", "attempts", "buffer", "buffer_bytes",
        "fetch", "fetch_at", "generation", "is_busy", "is_paused",
        "is_revoked", "next_deliver", "next_fetch", "position", "retries", "saved", "slot",
    )  # fmt: skip

    def __init__(self, slot: Slot, generation: int, offset: int, saved: int | None) -> None:
        self.slot, self.generation = slot, generation
        self.next_fetch = self.next_deliver = self.position = offset
        self.saved = saved  # what the store has; None: nothing
        self.buffer: deque[Message] = deque()
        self.buffer_bytes = 0
        self.fetch, self.fetch_at = 0, 0.0
        self.attempts: dict[int, int] = {}
        self.retries: list[tuple[float, Message]] = []
        self.is_paused = self.is_busy = self.is_revoked = False
        self.aside: dict[int, Waiting] = {}
        self.aside_saved: str | None = None
        self._acked: dict[int, bool] = {}  # delivered and above ``position``, in order

    # --- fetching ----------------------------------------------------------------------------------------------------

    def wants_more(self, now: float, buffer_bytes_max: int) -> bool:
        """Whether to fetch: nothing is under way, and there is room."""
        if self.fetch or self.is_paused or self.is_revoked:
            return False
        return now >= self.fetch_at and self.buffer_bytes < buffer_bytes_max

    def fetched(self, fetch: int, messages: Sequence[Message]) -> bool:
        """A reply came; whether it was the one that is waited for."""
        if fetch != self.fetch:
            return False
        self.fetch = 0
        fresh = [message for message in messages if message.offset >= self.next_fetch]
        if fresh:
            self.buffer.extend(fresh)
            self.buffer_bytes += sum(map(_size, fresh))
            self.next_fetch = fresh[-1].offset + 1
        return True

    def failed(self, fetch: int, again_at: float) -> bool:
        """A fetch failed; the next one not before ``again_at``."""
        if fetch != self.fetch:
            return False
        self.fetch, self.fetch_at = 0, again_at
        return True

    # --- delivery ----------------------------------------------------------------------------------------------------

    def take(self, limit: int, now: float) -> list[Message]:
        """Deliver: what is to be retried first, then what is new."""
        if self.is_paused or self.is_revoked:
            return []
        taken = self._due_retries(limit, now)
        if self.aside and len(taken) < limit:
            taken += self._due_aside(limit - len(taken), now)
        while self.buffer and len(taken) < limit:
            message = self.buffer.popleft()
            self.buffer_bytes -= _size(message)
            self._acked[message.offset] = False
            self.next_deliver = message.offset + 1
            taken.append(message)
        return taken

    def _due_retries(self, limit: int, now: float) -> list[Message]:
        due = [message for at, message in self.retries if at <= now][:limit]
        if due:
            self.retries = [entry for entry in self.retries if entry[1] not in due]
        return due

    def _due_aside(self, limit: int, now: float) -> list[Message]:
        taken: list[Message] = []
        for waiting in self.aside.values():
            if waiting.message is not None and not waiting.is_out and waiting.due_at <= now and len(taken) < limit:
                waiting.is_out = True
                taken.append(waiting.message)
        return taken

    def set_aside(self, message: Message, waiting: Waiting) -> None:
        """It is stored, and waits outside the order: the position may pass it."""
        self.aside[message.offset] = waiting
        self.give_up_retry(message)
        self.ack(message.offset)

    def aside_in_hand(self, offset: int) -> Waiting | None:
        """The message set aside that somebody has in hand, if it is one."""
        waiting = self.aside.get(offset)
        return waiting if waiting is not None and waiting.is_out else None

    def ack(self, offset: int) -> None:
        """A message has been dealt with; again, or of another time: nothing."""
        if offset not in self._acked:
            return
        self._acked[offset] = True
        self.attempts.pop(offset, None)
        while self._acked:
            lowest = next(iter(self._acked))
            if not self._acked[lowest]:
                self.position = lowest
                return
            del self._acked[lowest]
            self.position = lowest + 1

    def is_under_way(self, offset: int) -> bool:
        """Whether a message is delivered and not acknowledged."""
        return self._acked.get(offset) is False

    def fail(self, message: Message, again_at: float) -> int:
        """A message failed and is delivered again from ``again_at`` on; how often it failed by now."""
        count = self.attempts.get(message.offset, 0) + 1
        self.attempts[message.offset] = count
        self.retries.append((again_at, message))
        return count

    def give_up_retry(self, message: Message) -> None:
        """It will not be delivered again."""
        self.retries = [entry for entry in self.retries if entry[1] is not message]

    @property
    def under_way(self) -> int:
        """How many messages are delivered and not acknowledged."""
        return sum(not acked for acked in self._acked.values()) + sum(item.is_out for item in self.aside.values())

    def skip_to(self, offset: int) -> None:
        """What was not fetched below an offset is gone; what was fetched stays."""
        self.next_fetch, self.fetch, self.fetch_at = offset, 0, 0.0
        if not self.buffer and not self._acked:
            self.next_deliver = self.position = offset

    def seek(self, offset: int) -> None:
        """Go on elsewhere: what is buffered or under way is forgotten, what is aside below the new place is not."""
        self.aside = {at: waiting for at, waiting in self.aside.items() if at < offset}
        self.next_fetch = self.next_deliver = self.position = offset
        self.buffer.clear()
        self.buffer_bytes = self.fetch = 0
        self.fetch_at = 0.0
        self._acked.clear()
        self.attempts.clear()
        self.retries.clear()


def _size(message: Message) -> int:
    return 100 + len(message.value or b"") + len(message.key or b"")
