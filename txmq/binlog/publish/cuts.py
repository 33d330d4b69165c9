"""Cuts: what the messages say of the order between the partitions of a topic.

Theory of operation. A partition has its messages in the binlog's order, and between partitions there is none. So the
messages of a topic are counted in *slices*, one after another in the binlog's order. The last message of a slice in
each partition has a header: the *cut*, the offset after the slice in every partition of the topic. Messages below a cut
are all that the binlog had up to there, and nothing else. Who has applied them has the table as the source once had it
(``apply.partition_queues``).

The offsets are counted, from the ends of the partitions when this reader writes into the topic first: no other one
writes then, and all that former ones have written is there. If somebody else writes into a partition, the offset that
a cut says of its own message is another one than the message has. Who reads takes the difference into account.

Invariants:
    * the cuts of a topic are in one order: no offset in a later one is lower;
    * a statement is in a slice without changes;
    * a slice is small: who waits for all of it has room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from txmq.binlog.event_json import CUT_HEADER, DDL, OP_HEADER, TRUNCATE, cut_bytes
from txmq.binlog.publish.gathering import Outgoing

SLICE_ROWS_MAX, SLICE_BYTES_MAX = 500, 1 << 20  # of a topic; by one message more
_STATEMENTS: Final = frozenset({(OP_HEADER, DDL.encode()), (OP_HEADER, TRUNCATE.encode())})


class _Slice:
    """What is counted of a topic since its last cut.

    Attributes:
        last: of each partition the index of its last message.
    """

    __slots__ = ("is_statement", "last", "rows", "size_bytes")

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.rows = self.size_bytes = 0
        self.is_statement = False


class Cuts:
    """See the module's docstring. Used by one thread.

    Args:
        ends: asks where the partitions of a topic end.
        uncut: the topic that has no cuts.
    """

    def __init__(self, ends: Callable[[str], list[int]], uncut: str) -> None:
        self._ask, self._uncut = ends, uncut
        self._ends: dict[str, list[int]] = {}

    def marked(self, messages: Sequence[Outgoing]) -> list[Outgoing]:
        """The messages of a batch, with their cuts. Hot: once for each message."""
        marked, slices = list(messages), dict[str, _Slice]()
        for index, (topic, partition, _, value, headers, _) in enumerate(messages):
            if topic == self._uncut:
                continue
            is_statement = bool(headers) and headers[0] in _STATEMENTS
            slice_ = slices.get(topic)
            if slice_ is None:
                slice_ = slices[topic] = _Slice()
                slice_.is_statement = is_statement
            elif (
                slice_.rows >= SLICE_ROWS_MAX
                or slice_.size_bytes >= SLICE_BYTES_MAX
                or slice_.is_statement is not is_statement
            ):
                self._close(topic, slice_, marked)
                slice_ = slices[topic] = _Slice()
                slice_.is_statement = is_statement
            slice_.last[partition] = index
            slice_.rows += 1
            slice_.size_bytes += len(value)
            self._of(topic)[partition] += 1
        for topic, slice_ in slices.items():
            self._close(topic, slice_, marked)
        return marked

    def _of(self, topic: str) -> list[int]:
        found = self._ends.get(topic)
        if found is None:
            found = self._ends[topic] = self._ask(topic)
        return found

    def of(self, topics: Sequence[str]) -> Mapping[str, list[int]]:
        """Where the partitions of these topics end after what was marked."""
        return {topic: self._ends[topic] for topic in topics if topic in self._ends}

    def _close(self, topic: str, slice_: _Slice, marked: list[Outgoing]) -> None:
        cut = (CUT_HEADER, cut_bytes(self._ends[topic]))
        for index in slice_.last.values():
            topic, partition, key, value, headers, now_ms = marked[index]
            marked[index] = (topic, partition, key, value, (*headers, cut), now_ms)
