"""Messages of one partition that were fetched and not delivered yet. No I/O, no clock.

Theory of operation. Fetched batches stay as they came, CRC and place checked, until delivery gets to them. Then they
are *opened*, one at a time: the messages of a batch are made, all of them or, if its records contradict its header,
none. So what waits costs its bytes, and no time of the garbage collector. The thread that fetches opens the first batch
of each answer, and reports if it is damaged; so a batch that cannot be opened later is fetched once more.

Invariants:
    * an interrupt loses no message and has none twice: what changes with a batch changes without a call in between,
      because CPython interrupts after calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from txmq.errors import InvalidBatchError
from txmq.log import records
from txmq.log.records import RawBatch
from txmq.model import Message, TopicPartition

_MESSAGE_SIZE_BYTES = 100  # besides key and value
Waiting = tuple[Sequence[Message], RawBatch | None, int]  # opened messages, or a batch; their size


class ReadAhead:
    """See the module's docstring.

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
        self._batches: deque[Waiting] = deque()
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
        added: list[Waiting] = [(messages, None, sum(map(_size, messages)))] if messages else []
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
