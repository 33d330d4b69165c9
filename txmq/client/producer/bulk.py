"""Many messages at once: cut, grouped by partition and encoded at C speed; results are made when they are read.

The loops here run once for each message, so they are not split into functions. A list of pairs is cut into slices of
bounded size. In a slice each partition gets one batch, or several if one would be too large. The results keep two bytes
for each message: its partition.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar, overload

from crc32c import crc32c

from txmq.client.producer.sender import Completion
from txmq.errors import TooLargeError
from txmq.log import records
from txmq.model import SendResult

Pair = tuple[bytes | None, bytes]
SLICE_COUNT_MAX = 4096
SLICE_SIZE_BYTES_MAX = 2 << 20
IN_TURN = 0xFFFF  # in place of a partition: messages that go to the next one that can be written
_values = itemgetter(1)
T = TypeVar("T")


class Slice:
    """A slice of the messages, and the batches they went into.

    Attributes:
        partitions: of each message, in order; or ``IN_TURN``.
        batches: per partition, and for ``IN_TURN``, the batches its messages went into, in order.
    """

    __slots__ = ("batches", "partitions")

    def __init__(self, partitions: array[int]) -> None:
        self.partitions = partitions
        self.batches: dict[int, list[Completion]] = {}

    def result(self, number: int) -> SendResult:
        """The result of message ``number`` of the slice."""
        partition = self.partitions[number]
        return self._nth(partition, self.partitions[:number].count(partition))

    def results(self) -> Iterator[SendResult]:
        """The results, in order."""
        seen = dict.fromkeys(self.batches, 0)
        for partition in self.partitions:
            yield self._nth(partition, seen[partition])
            seen[partition] += 1

    def _nth(self, partition: int, number: int) -> SendResult:
        for completion in self.batches[partition]:
            if number < completion.batch.count:
                return completion.result(number)
            number -= completion.batch.count
        raise IndexError(number)


class SendResults(Sequence[SendResult]):
    """The results of ``send_many``, in the order of the messages; each is made when it is read."""

    def __init__(self, slices: list[Slice], count: int) -> None:
        self._slices, self._count = slices, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> SendResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...
    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(index)
        for part in self._slices:
            if number < len(part.partitions):
                return part.result(number)
            number -= len(part.partitions)
        raise IndexError(index)

    def __iter__(self) -> Iterator[SendResult]:
        for part in self._slices:
            yield from part.results()


def cut(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    """Slices of bounded count and size; a single message may be larger."""
    for start in range(0, len(pairs), SLICE_COUNT_MAX):
        yield from _halved(pairs[start : start + SLICE_COUNT_MAX])


def _halved(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    size = sum(map(len, map(_values, pairs)))  # refuses None
    if size > SLICE_SIZE_BYTES_MAX and len(pairs) > 1:
        middle = len(pairs) // 2
        yield from _halved(pairs[:middle])
        yield from _halved(pairs[middle:])
    else:
        yield pairs


def assigned(partitions: Iterable[int]) -> array[int]:
    """Partitions that were chosen one by one."""
    return array("H", partitions)


def assign_by_key(pairs: Sequence[Pair], partitions: int, spare: int) -> array[int]:
    """The partition of each by the default selector; ``spare`` for those without a key, so that batches are full.

    Raises:
        TypeError: a key is neither bytes nor None.
    """
    if partitions == 1:
        return array("H", bytes(2 * len(pairs)))
    return array("H", [crc32c(key) % partitions if key is not None else spare for key, _ in pairs])


def group(pairs: Sequence[Pair], partitions: array[int]) -> dict[int, Sequence[Pair]]:
    """The messages of each partition, in order."""
    chosen = set(partitions)
    if len(chosen) == 1:
        return {partitions[0]: pairs}
    groups: dict[int, list[Pair]] = {partition: [] for partition in chosen}
    appends = {partition: members.append for partition, members in groups.items()}
    for partition, pair in zip(partitions, pairs, strict=True):
        appends[partition](pair)
    return dict(groups)


def encode(
    pairs: Sequence[Pair], timestamp_ms: int, compression: str | None, size_bytes_max: int
) -> Iterator[tuple[bytearray, int]]:
    """Batches of at most ``size_bytes_max``, each with its count.

    Raises:
        TooLargeError: a single message does not fit.
        TypeError: a key or value is not bytes.
    """

    def make(some: Sequence[Pair]) -> bytearray:
        return records.encode_values(some, timestamp_ms, compression=compression)

    return fitting(pairs, make, size_bytes_max)


def fitting(
    messages: Sequence[T], make: Callable[[Sequence[T]], bytearray], size_bytes_max: int
) -> Iterator[tuple[bytearray, int]]:
    """Batches of at most ``size_bytes_max``, each with its count: a batch that is too large is halved.

    Raises:
        TooLargeError: a single message does not fit.
    """
    batch = make(messages)
    if len(batch) <= size_bytes_max:
        yield batch, len(messages)
    elif len(messages) == 1:
        raise TooLargeError(f"a message of {len(batch)} bytes is over the limit of {size_bytes_max}")
    else:
        middle = len(messages) // 2
        yield from fitting(messages[:middle], make, size_bytes_max)
        yield from fitting(messages[middle:], make, size_bytes_max)
