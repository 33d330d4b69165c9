"""The messages of an open transaction: kept in order of sending, made into parts, matched with the decision's offsets.

No I/O. A *part* is one record batch for one partition. Messages of one partition go into one part, until it is full
(``PART_SIZE_BYTES_MAX``) or the parts are taken to be streamed.

Invariants:
    * a part goes to the topic that had the name when its first message was sent, or nowhere;
    * messages of a partition keep the order in which they were sent, over all its parts;
    * a part's keys are the CRC32C of its messages' keys; messages without a key share one (that of the empty key), so
      that they keep their order, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from txmq.log.batch import checksum
from txmq.log.records import Record, encode
from txmq.model import SendResult, SendStatus
from txmq.protocol.transaction_bodies import KEYS_MAX, NO_KEYS, PartResult
from txmq.runtime.ports import Buffer

PART_SIZE_BYTES_MAX = 4 << 20
_PENDING = SendStatus.PENDING  # an enum's member is slow to look up
_RECORD_OVERHEAD_BYTES = 64  # lengths, deltas, and the share of the part's own line


class EncodedPart(NamedTuple):
    """A part, ready to be sent.

    Attributes:
        keys: None for "any".
        topic_id: of the topic that is meant; 0 for any of that name.
    """

    topic: str
    partition: int
    batch: bytearray
    keys: frozenset[int] | None
    topic_id: int = 0


class _PartitionBuffer:
    """One partition's messages."""

    __slots__ = ("records", "results", "size_bytes", "topic_id")

    def __init__(self, topic_id: int) -> None:
        self.topic_id = topic_id
        self.records: list[Record] = []  # not taken yet
        self.size_bytes = 0  # of those, about
        self.results: list[int] = []  # where this partition's messages stand in the order of sending


class MessageBuffer:
    """See the module's docstring. Used by one thread at a time.

    Args:
        id_of: tells the id of the topic that has a name now, to be stated with the messages for it; 0 if none is.
    """

    def __init__(self, compression: str | None, id_of: Callable[[str], int]) -> None:
        self._id_of = id_of
        self.size_bytes = 0  # of what is not taken yet, about
        self._compression = compression
        self._places: dict[tuple[str, int], _PartitionBuffer] = {}
        self._results: list[SendResult] = []
        self._lines: Sequence[PartResult] = ()  # not entered into the results yet
        self._taken = 0  # messages that were taken

    def __len__(self) -> int:
        return len(self._results)

    def add(self, topic: str, partition: int, record: Record) -> SendResult:
        """Append one message."""
        if type(topic) is not str:
            topic = str.__str__(topic)  # an enumeration's member, whose text in a line would be its name
        place = self._places.get((topic, partition))
        if place is None:
            place = self._places[topic, partition] = _PartitionBuffer(self._id_of(topic))
        size = _size(record)
        place.records.append(record)
        place.size_bytes += size
        self.size_bytes += size
        place.results.append(len(self._results))
        result = SendResult(topic, partition, None, _PENDING)
        self._results.append(result)
        return result

    def slots(self) -> Iterable[tuple[str, int]]:
        """The topics and partitions of all messages."""
        return [slot for slot, place in self._places.items() if place.results]

    def take_parts(self, txid: str, part_size_bytes_max: int, *, keyed: bool = True) -> list[EncodedPart]:
        """Everything that was not taken yet, as parts; a larger message has a part of its own.

        Args:
            keyed: with the hashes of the keys, which order the commits of prepared transactions.
        """
        parts = []
        limit = min(part_size_bytes_max, PART_SIZE_BYTES_MAX)
        for (topic, partition), place in self._places.items():
            for chunk in _chunks(place, limit) if place.size_bytes > limit else (place.records,):
                if not chunk:
                    continue
                batch = encode(chunk, compression=self._compression, txid=txid)
                keys = _keys(chunk) if keyed else NO_KEYS
                parts.append(EncodedPart(topic, partition, batch, keys, place.topic_id))
        for place in self._places.values():
            place.records, place.size_bytes = [], 0
        self.size_bytes, self._taken = 0, len(self._results)
        return parts

    def take_back(self, count: int) -> bool:
        """Keep only the first ``count`` messages; False, and nothing done, if later ones were taken already."""
        if count < self._taken:
            return False
        for place in self._places.values():
            kept = [index for index in place.results if index < count]
            later = len(place.results) - len(kept)
            if later:
                gone, place.records = place.records[-later:], place.records[:-later]
                size = sum(_size(record) for record in gone)
                place.results, place.size_bytes = kept, place.size_bytes - size
                self.size_bytes -= size
        del self._results[count:]
        return True

    @property
    def results(self) -> list[SendResult]:
        """One result a message, in order of sending."""
        if self._lines:
            self._enter(self._lines)
        return list(self._results)

    def place(self, lines: Sequence[PartResult]) -> None:
        """Take the offsets that the decision assigned; they are entered when ``results`` is read."""
        self._lines = lines

    def _enter(self, lines: Sequence[PartResult]) -> None:
        runs: dict[tuple[str, int], list[range]] = {}
        for line in lines:
            if line.base_offset is None:
                continue  # it waits for its place, and so does all that the transaction has in the partition
            run = range(line.base_offset, line.base_offset + line.count)
            runs.setdefault((line.topic, line.partition), []).append(run)
        for (topic, partition), place in self._places.items():
            offsets = chain.from_iterable(runs.get((topic, partition), ()))
            # A partition without a line was deleted with its topic before the decision: its messages went with it.
            for index, offset in zip(place.results, offsets, strict=False):
                self._results[index] = SendResult(topic, partition, offset, SendStatus.ACKNOWLEDGED)
        self._lines = ()


def _size(record: Record) -> int:
    key, value, headers, _ = record
    size = _RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    for name, content in headers:
        size += 8 + len(name) + len(content)
    return size


def _chunks(place: _PartitionBuffer, size_bytes_max: int) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    room = size_bytes_max
    for record in place.records:
        size = _size(record)
        if chunk and size > room:
            yield chunk
            chunk, room = [], size_bytes_max
        chunk.append(record)
        room -= size
    yield chunk


def _keys(records: Sequence[Record]) -> frozenset[int] | None:
    keys = set()
    for key, _, _, _ in records:
        keys.add(checksum(key or b""))
        if len(keys) > KEYS_MAX:
            return None
    return frozenset(keys)


class Streamed(NamedTuple):
    """Parts that were sent ahead of the decision, as it states them."""

    parts: int
    size_bytes: int
    checksum: int

    def with_part(self, batch: Buffer) -> Streamed:
        """One part more."""
        return Streamed(self.parts + 1, self.size_bytes + len(batch), checksum(batch, self.checksum))

    def extensions(self) -> dict[str, int]:
        """``parts= bytes= crc=``."""
        return {"parts": self.parts, "bytes": self.size_bytes, "crc": self.checksum}


NOTHING_STREAMED = Streamed(0, 0, 0)


class SavedOffsets(Protocol):
    """The consumers' offsets that are saved together with the messages (``TransactionAcks``)."""

    def __bool__(self) -> bool:
        """Whether there is any."""

    def slots(self) -> Sequence[tuple[str, int]]:
        """The topics and partitions."""

    def of_home(self, slots: frozenset[tuple[str, int]]) -> SavedOffsets:
        """Those of the partitions that one home owns."""

    def encoded(self) -> bytes:
        """As they stand before the parts: the same in every repeated request.

        Raises:
            RolledBackError: a partition was lost meanwhile.
        """
