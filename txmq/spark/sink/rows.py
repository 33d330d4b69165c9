"""Rows of a task made into parts: Arrow batches in, record batches of bounded size out.

Theory of operation. Rows are gathered by topic and partition into a *chunk* of about ``chunk_size_bytes``; a full chunk
becomes one transaction (``task``), so a task holds one chunk and one slice of Spark's, however many rows it has.
Columns leave Arrow as whole lists, and rows without headers take the bulk encoder's way: a loop over rows with their
headers costs five times as much.

Invariants:
    * a row goes where a producer would send it: to its own ``partition``, else by CRC32C of the key over the topic's
      declared partitions; rows without a key go together, each slice to the next partition;
    * rows of one partition keep their order within a task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from txmq.client.partitioner import checked
from txmq.client.producer import bulk
from txmq.client.transaction.messages import EncodedPart
from txmq.errors import BadRequestError, TooLargeError
from txmq.log import records
from txmq.log.records import TXID_HEADER
from txmq.model import TopicPartition
from txmq.protocol.transaction_bodies import NO_KEYS

PARTITIONS_MAX = 1000  # in one chunk: each costs a record batch of its own
_PIECE_ROWS_MAX = 8192  # each may have a place of its own: together fewer than a request has parts
_ROW_OVERHEAD_BYTES = 16

COLUMNS = ("topic", "partition", "key", "value", "headers")
Row = Any  # (key, value), or (key, value, headers) if the rows have headers
PartitionCount = Callable[[str], int]


class Chunk:
    """Rows that will be one transaction."""

    def __init__(self, *, has_headers: bool) -> None:
        self.partitions: dict[TopicPartition, list[Row]] = {}
        self.size_bytes = self.count = 0
        self._has_headers = has_headers

    def add(self, groups: dict[TopicPartition, Sequence[Row]], size_bytes: int) -> None:
        """Append the rows of a slice, by their place."""
        for partition, rows in groups.items():
            self.partitions.setdefault(partition, []).extend(rows)
            self.count += len(rows)
        self.size_bytes += size_bytes

    def parts(self, txid: str, now_ms: int, compression: str | None, size_bytes_max: int) -> list[EncodedPart]:
        """Everything, as parts of a transaction.

        Raises:
            TooLargeError: a row alone is over ``size_bytes_max``.
        """

        def make_plain(some: Sequence[Row]) -> bytearray:
            return records.encode_values(some, now_ms, compression=compression, txid=txid)

        def make(some: Sequence[Row]) -> bytearray:
            rows = [(key, value, headers, now_ms) for key, value, headers in some]
            return records.encode(rows, compression=compression, txid=txid)

        chosen = make if self._has_headers else make_plain
        found = []
        for (topic, partition), rows in self.partitions.items():
            try:
                for batch, _ in bulk.fitting(rows, chosen, size_bytes_max):
                    found.append(EncodedPart(topic, partition, batch, NO_KEYS))
            except TooLargeError as error:
                raise TooLargeError(f"a row for topic {topic!r}, partition {partition}: {error}") from None
        return found


class Gatherer:
    """Cuts a task's Arrow batches into chunks.

    Args:
        topic: where every row goes; None if the column says.
        partitions_of: how many partitions a topic has; raises UnknownTopicError.
        chunk_size_bytes: of a chunk, about.
    """

    def __init__(self, topic: str | None, partitions_of: PartitionCount, chunk_size_bytes: int) -> None:
        self._topic, self._partitions_of, self._limit = topic, partitions_of, chunk_size_bytes
        self._next = 0

    def chunks(self, batches: Iterator[Any]) -> Iterator[Chunk]:
        """Yield every row, in chunks; none if there is no row."""
        chunk: Chunk | None = None
        for batch in batches:
            has_headers = "headers" in batch.schema.names
            for piece, size in self._slices(batch):
                if chunk is not None and (
                    chunk.size_bytes + size > self._limit or len(chunk.partitions) > PARTITIONS_MAX
                ):
                    yield chunk
                    chunk = None
                if chunk is None:
                    chunk = Chunk(has_headers=has_headers)
                chunk.add(self._groups(piece, has_headers=has_headers), size)
        if chunk is not None:
            yield chunk

    def _slices(self, batch: Any) -> Iterator[tuple[Any, int]]:
        """Pieces of about a quarter of a chunk, with their size; one larger than a chunk has one row."""
        if not batch.num_rows:
            return
        pieces = max(1, -(-4 * _size_of(batch) // self._limit))
        count = max(1, min(batch.num_rows // pieces, _PIECE_ROWS_MAX))
        for start in range(0, batch.num_rows, count):
            piece = batch.slice(start, count)
            size = _size_of(piece)
            if size > self._limit and piece.num_rows > 1:  # rows are not alike: large ones stand together
                yield from self._slices(piece)
            else:
                yield piece, size

    def _groups(self, batch: Any, *, has_headers: bool) -> dict[TopicPartition, Sequence[Row]]:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        keys = as_bytes(columns["key"]) if "key" in columns else [None] * batch.num_rows
        pairs = list(zip(keys, as_bytes(columns["value"]), strict=True))
        rows: list[Row] = pairs
        if has_headers:
            headers = map(_headers, columns["headers"].to_pylist())
            rows = [(key, value, named) for (key, value), named in zip(pairs, headers, strict=True)]
        wanted = columns["partition"].to_pylist() if "partition" in columns else None
        found: dict[TopicPartition, Sequence[Row]] = {}
        for topic, numbers in self._topics(columns, len(rows)).items():
            self._next += 1
            some = (pairs, rows, wanted) if numbers is None else (_nth(pairs, numbers), _nth(rows, numbers), None)
            if numbers is not None and wanted is not None:
                some = (*some[:2], _nth(wanted, numbers))
            for partition, members in self._by_partition(topic, *some).items():
                found[topic, partition] = members
        return found

    def _topics(self, columns: dict[str, Any], count: int) -> dict[str, list[int] | None]:
        """The topics, and which rows are theirs; None for all."""
        if self._topic is not None:
            return {self._topic: None}
        topics = columns["topic"].to_pylist()
        named: dict[str, list[int]] = {}
        for number, topic in enumerate(topics):
            named.setdefault(topic, []).append(number)
        if None in named:
            raise BadRequestError("a row has no topic: its column is null, and the option topic is not given")
        return {topic: None if len(numbers) == count else numbers for topic, numbers in named.items()}

    def _by_partition(
        self, topic: str, pairs: list[bulk.Pair], rows: list[Row], wanted: list[int | None] | None
    ) -> dict[int, Sequence[Row]]:
        count = self._partitions_of(topic)
        assigned = bulk.assign_by_key(pairs, count, self._next % count)
        for number, partition in enumerate(wanted or ()):
            if partition is not None:
                assigned[number] = checked(partition, topic, count)
        return bulk.group(rows, assigned)


def _size_of(batch: Any) -> int:
    size: int = batch.nbytes + _ROW_OVERHEAD_BYTES * batch.num_rows
    return size


def _nth(values: list[Any], numbers: list[int]) -> list[Any]:
    return [values[number] for number in numbers]


def as_bytes(column: Any) -> list[bytes | None]:
    """A column of binary or text as Python values; by way of numpy, 5 times as fast as Arrow's own."""
    listed: list[bytes | None] = column.cast("binary").to_numpy(zero_copy_only=False).tolist()
    return listed


def _headers(raw: list[dict[str, Any]] | None) -> list[tuple[str, bytes]]:
    named = [(header["key"] or "", header["value"] or b"") for header in raw or () if header is not None]
    return [header for header in named if header[0] != TXID_HEADER]  # that of the transaction it was read from
