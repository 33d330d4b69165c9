"""One partition as a consumer has it: fetched, delivered, acknowledged. No I/O, no clock.

```
   saved            next to deliver       next to fetch
     |  delivered, some acked  |     ahead      |
-----+-------------------------+----------------+----> offsets
```

``position`` is what may be saved: everything below it is acknowledged. Acks may come in any order.

Invariants:
    * messages are delivered in order of their offsets, each once; only a *retry* delivers one again;
    * a KeyboardInterrupt (or what another signal's handler raises) loses none: one that it took is under way;
    * ``position`` never passes a message that is not acknowledged, and only ``seek`` lowers it;
    * an ack in a transaction counts when the outcome is known, not before, and in order;
    * a reply to a fetch changes nothing if ``seek`` or the loss of the partition has overtaken it;
    * ``keeps_key_order``: no message is delivered while an earlier one of its key is in hand or deferred. The partition
      waits for one in hand; one that is deferred lets it pass, and *blocks* what comes of its key, which is deferred
      too.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from txmq.client.consumer.offsets.offset_store import OffsetPosition
from txmq.errors import InvalidBatchError
from txmq.log import records
from txmq.log.history import LogHistory
from txmq.log.records import RawBatch
from txmq.model import Message, TopicPartition

_MESSAGE_SIZE_BYTES = 100  # besides key and value
Fetched = tuple[Sequence[Message], RawBatch | None, int]  # opened messages, or a batch; their size
DEFERRED_MESSAGES_MAX = 1000  # of one partition; 60 characters each at most: below what the broker takes
NO_ROOM = f"{DEFERRED_MESSAGES_MAX} messages are deferred, and one of them blocks the next one"


class ReadAhead:
    """Messages of one partition that were fetched and not delivered yet.

    Fetched batches stay as they came, CRC and place checked, until delivery gets to them. Then they are *opened*, one
    at a time: the messages of a batch are made, all of them or, if its records contradict its header, none. So what
    waits costs its bytes, and no time of the garbage collector. The thread that fetches opens the first batch of each
    answer, and reports if it is damaged; so a batch that cannot be opened later is fetched once more.

    Invariants:
        * an interrupt loses no message and has none twice: what changes with a batch changes without a call in between,
          because CPython interrupts after calls.

    Attributes:
        open: the messages of the batch that is being delivered.
        at: which of them is the next one; moved by the caller.
        damaged_at: base offset of a batch that could not be opened; nothing from there on is kept.
    """

    __slots__ = ("_batches", "_open_size_bytes", "_slot", "_waiting_size_bytes", "at", "damaged_at", "open")

    def __init__(self, slot: TopicPartition) -> None:
        self._slot = slot
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.open: Sequence[Message] = []
        self._batches: deque[Fetched] = deque()
        self.at = self._open_size_bytes = self._waiting_size_bytes = 0
        self.damaged_at: int | None = None

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return self._waiting_size_bytes + self._open_size_bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to deliver."""
        return self.at >= len(self.open) and not self._batches

    def add(self, messages: Sequence[Message], batches: Sequence[RawBatch]) -> None:
        """Append messages, and batches that were checked except for their records."""
        added: list[Fetched] = [(messages, None, sum(map(_size, messages)))] if messages else []
        added += [((), batch, len(batch.content) + _MESSAGE_SIZE_BYTES * batch.record_count) for batch in batches]
        self._waiting_size_bytes += sum(size for _, _, size in added)
        self._batches += added

    def look(self, count: int) -> Sequence[Message]:
        """At most ``count`` of the next messages, of one batch; they stay until ``at`` is moved past them."""
        if self.at >= len(self.open):
            self.let_go()
            while not self.open and self._batches:
                self._open_next()
        return self.open[self.at : self.at + count]

    def _open_next(self) -> None:
        messages, batch, size = self._batches[0]
        if batch is not None:
            try:
                messages = records.decode_batch(batch, *self._slot)
            except InvalidBatchError:
                self.damaged_at = batch.base_offset
                self._batches, self._waiting_size_bytes = deque(), 0
                return
        self.open, self.at, self._open_size_bytes = messages, 0, size
        del self._batches[0]
        self._waiting_size_bytes -= size

    def let_go(self) -> None:
        """Free the messages of the opened batch if all of them were delivered."""
        if self.at >= len(self.open):
            self.open, self.at, self._open_size_bytes = [], 0, 0


def _size(message: Message) -> int:
    value = message.value if type(message) is Message else message.value_view  # which makes no copy of a large one
    return _MESSAGE_SIZE_BYTES + len(value or b"") + len(message.key or b"")


def key_crc(message: Message) -> int | None:
    """The CRC that stands for a message's key in the text about deferred messages."""
    return None if message.key is None else zlib.crc32(message.key)


class Waiting:
    """A deferred message. ``message`` is None until its content is read; ``is_out`` while the application has it.

    Attributes:
        failures: how often it failed; 0 for one that was blocked, and never delivered.
        copy: offset of its content in the retry topic, if it is there.
    """

    __slots__ = ("copy", "due_at", "failures", "is_out", "key_crc", "message")

    def __init__(
        self, message: Message | None, failures: int, key_crc: int | None, due_at: float = 0.0, copy: int | None = None
    ) -> None:
        self.message, self.failures, self.key_crc, self.due_at = message, failures, key_crc, due_at
        self.copy = copy
        self.is_out = False


class PendingAck(NamedTuple):
    """A message whose acknowledgement depends on a transaction.

    Attributes:
        owner: stands for that transaction.
        position: saved by it, if the offsets are in a database of the application.
    """

    owner: object
    message: Message
    position: OffsetPosition | None = None


class ConsumedPartition:
    """One partition under one generation.

    Attributes:
        home: the number of the consumer's home that has it.
        log: the history of the log that its offsets count in, as it is known; None: it is not.
        ahead: what was fetched and is not delivered.
        fetch: number of the fetch under way; 0 if there is none.
        fetch_at: monotonic time before which nothing is fetched, after an error.
        attempts: how often each message under way failed.
        out_of_turn: offsets whose acknowledgement in a transaction was refused for an earlier message: if such a
            message is rejected now, it has not failed.
        failing: by offset, stands for the thread that is about to retry a message, defer it or dead-letter it.
        retries: messages to be delivered again, each with the time it is due.
        revoked_until: monotonic time until which messages under way may be dealt with, if another member should have
            the partition; None: it stays here.
        was_sought: ``seek`` was called: what was delivered before is not known any more.
        is_busy: a listener works on a message of it.
        deferred: messages that were deferred and acknowledged, by offset; they are delivered again when due.
        deferred_saved: the text about them that the group has.
        blocked: by offset, messages that an earlier one of their key blocks; under way until they are deferred.
        dealt: offsets that were deferred and are dealt with, which the group may still take for deferred.
        is_ready: what is deferred has been read; before that nothing is delivered, fetched or saved.
        keeps_key_order: see the module's docstring.
        blocked_at: monotonic time before which blocked messages are not deferred.
        pending_acks: messages under way that transactions acknowledge, by offset; they count when the outcome is known.
        in_doubt: offsets whose database transaction was abandoned but may still commit. Until its outcome is known, the
            partition's offset is not saved and these messages are not dead-lettered.
        saving: the transaction that saves its offset, from when it was sent until the outcome is known here.
        is_in_doubt: that transaction's outcome could not be known at its end: nothing is delivered until it is.
        stopped: why nothing new is delivered, if something is wrong; ``reported``: as it was logged last.
        fetch_error: why the last fetch failed; ``fetch_reported``: when that was logged.
    """

    __slots__ = (
        "_acked", "_delivered", "_keys_in_hand", "ahead", "attempts", "blocked", "blocked_at", "dealt", "deferred",
        "deferred_saved", "failing", "fetch", "fetch_at", "fetch_error", "fetch_reported", "generation", "home",
        "in_doubt", "is_busy", "is_in_doubt", "is_paused", "is_ready", "keeps_key_order", "log", "next_fetch",
        "out_of_turn", "pending_acks", "position", "reported", "retries", "revoked_until", "saved", "saving", "slot",
        "stopped", "was_sought",
    )  # fmt: skip

    def __init__(
        self, slot: TopicPartition, generation: int, offset: int, saved: int | None, home: int = 0,
        log: LogHistory | None = None,
    ) -> None:  # fmt: skip
        self.slot, self.generation, self.home, self.log = slot, generation, home, log
        self.next_fetch = self.position = offset
        self.saved = saved  # what the store has; None: nothing
        self.ahead = ReadAhead(slot)
        self.fetch, self.fetch_at = 0, 0.0
        self.attempts: dict[int, int] = {}
        self.out_of_turn: set[int] = set()
        self.failing: dict[int, object] = {}
        self.retries: list[tuple[float, Message]] = []
        self.is_paused = self.is_busy = self.was_sought = False
        self.revoked_until: float | None = None
        self.deferred: dict[int, Waiting] = {}
        self.deferred_saved: str | None = None
        self.blocked: dict[int, Message] = {}
        self.dealt: list[int] = []
        self.is_ready, self.keeps_key_order = True, False
        self.stopped: str | None = None
        self.reported: str | None = None
        self.fetch_error: str | None = None
        self.fetch_reported = 0.0
        self.blocked_at = 0.0
        self.pending_acks: dict[int, PendingAck] = {}
        self.in_doubt: set[int] = set()
        self.saving: object | None = None
        self.is_in_doubt = False
        self._keys_in_hand: dict[int, int] = {}  # CRC of the key, by offset
        # Delivered and not below ``position``: when the message was made; None, once it is acknowledged.
        self._acked: dict[int, int | None] = {}
        # The same offsets, ascending: to find a dict's first key is to walk over all that left since it last grew.
        self._delivered: deque[int] = deque()

    @property
    def is_silent(self) -> bool:
        """Whether nothing is delivered, even if there is something."""
        return self.is_paused or self.revoked_until is not None or self.is_in_doubt or not self.is_ready

    @property
    def log_text(self) -> str | None:
        """What is saved with the position."""
        return None if self.log is None else self.log.text

    def goes_on_in(self, log: LogHistory) -> bool:
        """Go on in a log that holds all that was read, and perhaps begins another life; False if it does not."""
        if self.log is not None and self.log.shared_with(log, self.next_fetch) != self.next_fetch:
            return False
        if self.log != log:
            self.log, self.fetch_at = log, 0.0
        return True

    # --- fetching ----------------------------------------------------------------------------------------------------

    def wants_more(self, now: float, buffer_bytes_max: int) -> bool:
        """Whether to fetch: no fetch is under way, and there is room."""
        if self.fetch or self.is_silent:
            return False
        return now >= self.fetch_at and self.ahead.size_bytes < buffer_bytes_max

    def fetched(self, fetch: int, messages: Sequence[Message], batches: Sequence[RawBatch] = ()) -> bool:
        """Keep a reply: its first messages, and batches; False if it is not the reply that is waited for."""
        if fetch != self.fetch:
            return False
        self.fetch, self.fetch_error = 0, None
        fresh = [message for message in messages if message.offset >= self.next_fetch]
        if fresh or batches:
            self.ahead.add(fresh, batches)
            self.next_fetch = batches[-1].end_offset if batches else fresh[-1].offset + 1
        return True

    def failed(self, fetch: int, again_at: float) -> bool:
        """Note that a fetch failed: the next one goes out at ``again_at``. False as in ``fetched``."""
        if fetch != self.fetch:
            return False
        self.fetch, self.fetch_at = 0, again_at
        return True

    # --- delivery ----------------------------------------------------------------------------------------------------

    def take(self, limit: int, now: float) -> list[Message]:
        """Deliver messages that are due again first, then new ones."""
        if self.is_silent:
            return []
        taken = self._due_retries(limit, now) if self.retries else []
        if self.deferred and len(taken) < limit:
            taken += self._due_deferred(limit - len(taken), now)
        if self.keeps_key_order:
            self._take_in_key_order(limit, taken)
            return taken
        while len(taken) < limit and (several := self._look(limit - len(taken))):
            taken += self._next(several)
        return taken

    def take_opened(self) -> Message | None:
        """Deliver the next message of the opened batch, unless it is the last one, which takes more: the quick way."""
        ahead = self.ahead
        at, opened = ahead.at, ahead.open
        if at + 1 >= len(opened) or self.is_silent:
            return None
        message = opened[at]
        offset = message.offset
        self._acked[offset] = message.timestamp_ms  # as ``_next``
        ahead.at = at + 1
        self._delivered.append(offset)
        return message

    def _look(self, count: int) -> Sequence[Message]:
        several = self.ahead.look(count)
        if not several and (damaged_at := self.ahead.damaged_at) is not None:
            # It comes first in the answer to the next fetch, which reports it.
            self.fetch, self.next_fetch, self.ahead.damaged_at = 0, damaged_at, None
        return several

    def _next(self, several: Sequence[Message]) -> Sequence[Message]:
        made_ms = {message.offset: message.timestamp_ms for message in several}
        at = self.ahead.at + len(several)
        # CPython interrupts after calls: no call stands where a message is neither ahead nor under way.
        self._acked |= made_ms
        self._delivered += made_ms
        self.ahead.at = at
        self.ahead.let_go()
        return several

    def _take_in_key_order(self, limit: int, taken: list[Message]) -> None:
        waiting = {item.key_crc for item in self.deferred.values()} | set(map(key_crc, self.blocked.values()))
        in_hand = set(self._keys_in_hand.values())
        if self.stopped == NO_ROOM:
            self.stopped = None
        while len(taken) < limit and (several := self._look(1)):
            crc = key_crc(several[0])
            if crc is not None and crc in waiting:
                if self.stopped is not None or len(self.deferred) + len(self.blocked) >= DEFERRED_MESSAGES_MAX:
                    self.stopped = self.stopped or NO_ROOM
                    return
                (message,) = self._next(several)
                self.blocked[message.offset] = message
                continue
            if crc is not None and crc in in_hand:
                return
            taken += self._next(several)
            if crc is not None:
                self._keys_in_hand[taken[-1].offset] = crc
                in_hand.add(crc)

    def _due_retries(self, limit: int, now: float) -> list[Message]:
        due = [message for at, message in self.retries if at <= now]
        if due:
            due = sorted(due, key=attrgetter("offset"))[:limit]  # transactions acknowledge in this order
            self.retries = [entry for entry in self.retries if entry[1] not in due]
        return due

    def _due_deferred(self, limit: int, now: float) -> list[Message]:
        taken: list[Message] = []
        for waiting in self._deliverable_deferred():
            if waiting.due_at <= now and len(taken) < limit and waiting.message is not None:
                waiting.is_out = True
                taken.append(waiting.message)
        return taken

    def _deliverable_deferred(self) -> Iterator[Waiting]:
        """Deferred messages that may be delivered when they are due; in order of keys, the first of each."""
        keys: set[int] = set()
        for _, waiting in sorted(self.deferred.items()) if self.keeps_key_order else self.deferred.items():
            if self.keeps_key_order and waiting.key_crc is not None:
                if waiting.key_crc in keys:
                    continue
                keys.add(waiting.key_crc)
            if waiting.message is not None and not waiting.is_out:
                yield waiting

    def next_due(self) -> float | None:
        """When the next failed message is due; None if there is none."""
        if self.is_silent or self.is_busy:
            return None
        due = [at for at, _ in self.retries]
        due += [waiting.due_at for waiting in self._deliverable_deferred()]
        return min(due, default=None)

    def defer(self, message: Message, waiting: Waiting) -> None:
        """Defer a message that is stored: it waits outside the order, and the position may pass it."""
        self.deferred[message.offset] = waiting
        self.give_up_retry(message.offset)
        self.ack(message.offset)

    def defer_blocked(self, stored: Iterable[tuple[Message, int | None]]) -> None:
        """Defer blocked messages that are stored, each with its ``copy``; they are due at once."""
        for message, copy in stored:
            if self.blocked.get(message.offset) is message:  # else a seek has forgotten it meanwhile
                del self.blocked[message.offset]
                self.defer(message, Waiting(message, 0, key_crc(message), copy=copy))

    @property
    def deferred_bytes(self) -> int:
        """Size of the deferred messages whose content is in memory."""
        return sum(len(item.message.value or b"") for item in self.deferred.values() if item.message is not None)

    def forget_deferred(self, offset: int) -> Waiting | None:
        """Forget a deferred message: it is acknowledged, or a dead letter."""
        waiting = self.deferred.pop(offset, None)
        if waiting is not None:
            self.dealt.append(offset)
        return waiting

    def deferred_in_hand(self, offset: int) -> Waiting | None:
        """The deferred message at an offset, if the application has it."""
        waiting = self.deferred.get(offset)
        return waiting if waiting is not None and waiting.is_out else None

    def acked(self, message: Message) -> bool:
        """Acknowledge a message, and cancel its retries; whether ones that it held up may be delivered now."""
        offset = message.offset
        if self.retries or self.deferred:
            if self.is_of_another(message):
                return False
            self.give_up_retry(offset)
            self.ack(offset)
            return self.forget_deferred(offset) is not None or self.keeps_key_order
        if self._acked.get(offset) == message.timestamp_ms:  # else of another topic of that name, or not under way
            self.ack(offset)
        return self.keeps_key_order

    def ack(self, offset: int) -> None:
        """Acknowledge a message; nothing happens if it is not under way, or pending in a transaction."""
        acked, delivered = self._acked, self._delivered
        if offset not in acked or offset in self.pending_acks:
            return
        acked[offset] = None
        if self._keys_in_hand:
            self._keys_in_hand.pop(offset, None)
        if self.attempts:
            self.attempts.pop(offset, None)
        if self.out_of_turn:
            self.out_of_turn.discard(offset)
        while delivered:
            lowest = delivered[0]
            if acked[lowest] is not None:
                self.position = lowest
                return
            del acked[delivered.popleft()]
            self.position = lowest + 1

    def lowest_before(self, offset: int, owner: object) -> int | None:
        """The lowest message before ``offset`` that is neither acknowledged nor pending in that transaction."""
        before = self.pending_acks.get(offset - 1)
        if before is not None and before.owner is owner:
            return None  # which was asked of that one
        for lower in self._delivered:
            if lower >= offset:
                return None
            made_ms = self._acked[lower]
            if made_ms is not None and (lower not in self.pending_acks or self.pending_acks[lower].owner is not owner):
                return lower
        return None

    def position_with(self, owner: object) -> int:
        """The position as it will be when a transaction has committed."""
        position = self.position
        for offset in self._delivered:
            made_ms = self._acked[offset]
            if made_ms is not None and (
                offset not in self.pending_acks or self.pending_acks[offset].owner is not owner
            ):
                return offset
            position = offset + 1
        return position

    def is_under_way(self, offset: int) -> bool:
        """Whether a message is delivered and not acknowledged."""
        return self._acked.get(offset) is not None

    def was_delivered(self, offset: int) -> bool:
        """Whether a message was delivered, or is acknowledged, under this generation; True for any after a seek."""
        return self.was_sought or offset < self.position or offset in self._acked

    def is_of_another(self, message: Message) -> bool:
        """Whether a message is of a former topic of this name, which has another message at that offset now."""
        waiting, made_ms = self.deferred.get(message.offset), self._acked.get(message.offset)
        if waiting is not None and waiting.message is not None:
            made_ms = waiting.message.timestamp_ms
        return made_ms is not None and made_ms != message.timestamp_ms

    def count_failure(self, message: Message) -> int:
        """Count a failure; how often the message has failed."""
        count = self.attempts[message.offset] = self.attempts.get(message.offset, 0) + 1
        return count

    def retry(self, message: Message, again_at: float) -> None:
        """Deliver a message under way again, at ``again_at``."""
        self.give_up_retry(message.offset)
        self.retries.append((again_at, message))

    def deliver_again(self, message: Message, again_at: float) -> None:
        """Deliver a message that is out again, as if it had not been delivered."""
        waiting = self.deferred_in_hand(message.offset)
        if waiting is not None:
            waiting.is_out, waiting.due_at = False, again_at
        elif self.is_under_way(message.offset):
            self.retry(message, again_at)

    def turn_at(self, offset: int, again_at: float) -> float:
        """When to deliver a message again that has to come after earlier ones: not before they are due."""
        return max([again_at, *(at for at, message in self.retries if message.offset < offset)])

    def waits_again(self, offset: int) -> bool:
        """Whether a message failed and must be delivered again, in place or as a deferred one."""
        waiting = self.deferred.get(offset)
        return any(message.offset == offset for _, message in self.retries) or (
            waiting is not None and not waiting.is_out
        )

    def give_up_retry(self, offset: int) -> None:
        """Cancel a retry in place."""
        if self.retries:
            self.retries = [entry for entry in self.retries if entry[1].offset != offset]

    @property
    def under_way(self) -> int:
        """How many messages are delivered and not acknowledged."""
        delivered = sum(made_ms is not None for made_ms in self._acked.values())
        return delivered + sum(item.is_out for item in self.deferred.values())

    def skip_to(self, offset: int) -> None:
        """Fetch from ``offset`` on; messages that were fetched stay."""
        self.next_fetch, self.fetch, self.fetch_at = offset, 0, 0.0
        if self.ahead.is_empty and not self._acked:
            self.position = offset

    def pass_over(self, end: int) -> None:
        """Go on at ``end``: what is before it and was not fetched counts as delivered and acknowledged."""
        self.next_fetch, self.fetch, self.fetch_at, self.fetch_error = end, 0, 0.0, None
        self._acked[end - 1] = 0
        self._delivered.append(end - 1)
        self.ack(end - 1)

    def seek(self, offset: int) -> None:
        """Go on at ``offset``: forget messages in the buffer and under way, and deferred ones from there on."""
        self.deferred = {at: waiting for at, waiting in self.deferred.items() if at < offset}
        self.next_fetch = self.position = offset
        self.was_sought = True
        self.ahead.clear()
        self.fetch = 0
        self.fetch_at = 0.0
        self.is_in_doubt = False
        self.retries.clear()
        self.in_doubt.clear()
        self._delivered.clear()
        for forgotten in (
            self._acked,
            self._keys_in_hand,
            self.attempts,
            self.out_of_turn,
            self.failing,
            self.blocked,
            self.pending_acks,
        ):
            forgotten.clear()
