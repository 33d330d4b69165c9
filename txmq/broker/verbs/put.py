"""The verb ``put``: one record batch into one partition; and plain puts by the hundred.

Order of checks: topic, batch (header and CRC), producer, duplicate, closed, size, disk. A duplicate gets its answer
whatever has become of topic and disk since: its message is in. Only then is a place assigned; nothing after that point
can refuse, so assigned state never has to be undone.

The plain path (no extensions) is the hottest code of the broker: one dictionary look-up by the words as they stand on
the wire, one CRC over the batch, one over its place, no record is looked at.

``take_puts`` takes in what one read of a pipelining producer brought. It does what ``put`` does, for as many requests
in a row as are *plain*: a put without extensions, of a sound batch without producer id, under a fresh token, into a
topic on disk that takes messages. It stops before the first that is not, which then goes through ``put``; so every
refusal comes from one place. Batches are gathered per partition and placed as one, which moves the partition's assigned
side once instead of once a batch.

Invariants:
    * after ``take_puts`` state and group are what the same puts, one partition after the other, would have left through
      ``put``;
    * a place never spans segments: a run that does not fit whole is placed batch by batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.producer_sequences import Sequences
from txmq.broker.verbs import prepare_commit
from txmq.broker.verbs.appending import PlainPut, place, place_run, refuse_batch, refuse_unreadable, refuse_unready
from txmq.broker.verbs.partition_lookup import refuse_stale, writable
from txmq.broker.verbs.session_expiry import refuse_over_sequences
from txmq.errors import (
    BadRequestError,
    BrokerError,
    FencedError,
    InvalidBatchError,
    InvariantError,
    OtherSessionError,
    TooLargeError,
)
from txmq.log import records
from txmq.log.batch import check
from txmq.log.memory_partition import MemoryPartition
from txmq.log.partition import Partition
from txmq.model import Storage
from txmq.protocol.requests import Request

_MEMORY: Final = Storage.MEMORY  # Python 3.11 looks a member up three times as long as a global name


def put(context: Context, client: ClientConnection, request: Request) -> None:
    """Take in one batch; the answer follows the journal."""
    _, arguments, extensions, body, opaque = request
    partition = writable(context, client, arguments[0], arguments[1])
    if body is None:
        raise BadRequestError("put needs a body")
    if extensions is not None:
        if b"id" in extensions:
            refuse_stale(partition, int(extensions[b"id"]))
        if b"tx" in extensions:
            part = (arguments[0], arguments[1], body, None, None)
            prepare_commit.put_part(context, client, extensions[b"tx"], part, opaque)
            return
        if b"raw" in extensions or b"key" in extensions:
            body = _raw_batch(context, extensions, body)
    count, max_timestamp_ms, producer, epoch, sequence, crc = check(body)
    context.counters.put_requests += 1
    context.counters.put_bytes += len(body)
    if producer >= 0:
        _check_producer(client, producer, epoch, sequence)
        offset = _duplicate_of(partition, producer, sequence, crc)
        if offset is not None:
            context.counters.duplicates += 1
            context.answer_from_state(client, opaque, offset)
            return
    config, settings = partition.config, context.settings
    is_in_memory = config.storage is _MEMORY
    if not config.accept_publish or len(body) > settings.batch_size_bytes_max:
        refuse_batch(context, partition, len(body))
    if context.disk_full or context.stopping:
        refuse_unready(context, in_memory=is_in_memory)
    if settings.validate_records or client.user:
        refuse_unreadable(context, client, body)
    if producer >= 0 and producer not in partition.producers and client.session is not None:
        refuse_over_sequences(context, client.session)
    if is_in_memory:
        base_offset = _append_in_memory(context, partition, body, count, max_timestamp_ms, crc)
        context.answer(client, opaque, base_offset)
        if producer >= 0:
            context.state.accept_sequence(partition, producer, sequence, count, crc, base_offset)
        return
    run, base_offset = place(context, partition, body, count, max_timestamp_ms, crc)
    if producer >= 0:
        run.idempotent = True
        context.state.accept_sequence(partition, producer, sequence, count, crc, base_offset)
    context.group.puts.append((client, opaque, base_offset))


_NO_SEQUENCES = Sequences()


def _duplicate_of(partition: Partition, producer: int, sequence: int, crc: int) -> int | None:
    known = partition.producers.get(producer)
    if known is None and partition.config.storage is _MEMORY:
        return None  # a producer that a restart forgot may go on at any sequence
    return (known or _NO_SEQUENCES).duplicate_of(sequence, crc)


def _check_producer(client: ClientConnection, producer: int, epoch: int, sequence: int) -> None:
    session = client.session
    if session is None or session.number != producer:
        raise OtherSessionError(f"producer id {producer} is not this connection's session; send hello first")
    if epoch > session.epoch:
        # A lower one is the former holder's: the client that took the session over repeats those bytes as they were.
        raise FencedError(f"producer epoch {epoch} is over {session.epoch}, the session's")
    if sequence < 0:
        raise InvalidBatchError("a batch with a producer id needs a base sequence")


def _raw_batch(context: Context, extensions: dict[bytes, bytes], value: bytearray) -> bytearray:
    if b"raw" not in extensions:
        raise BadRequestError("key= goes with raw")
    if len(value) > context.settings.batch_size_bytes_max - 1024:
        raise TooLargeError(f"a value of {len(value)} bytes does not fit a batch")
    return records.encode([(extensions.get(b"key"), bytes(value), (), context.now_ms)])


def _append_in_memory(
    context: Context, partition: Partition, batch: bytearray, count: int, max_timestamp_ms: int, crc: int
) -> int:
    if not isinstance(partition, MemoryPartition):
        raise InvariantError(f"partition {partition.topic}-{partition.number} is in memory and on disk")
    context.moved.append(partition)
    return partition.append(batch, count, max_timestamp_ms, crc)


def take_puts(context: Context, client: ClientConnection, requests: Sequence[Any], start: int) -> int:
    """Take in plain puts from ``requests[start]`` on; returns the index of the first that is not one.

    Hot: one loop, no calls but the checks of the batch.
    """
    settings = context.settings
    if context.disk_full or context.stopping:
        return start
    is_looked_into = settings.validate_records or client.user
    unanswered, size_max = client.unanswered, settings.batch_size_bytes_max
    partitions: dict[tuple[bytes, bytes], Partition] = {}
    gathered: dict[tuple[bytes, bytes], list[PlainPut]] = {}
    index = start
    for request in requests if not start else requests[start:]:
        if type(request) is not tuple:  # a violation is a named one
            break
        verb, arguments, extensions, body, opaque = request
        if verb != b"put" or extensions is not None or not body or len(body) > size_max or opaque in unanswered:
            break
        key = (arguments[0], arguments[1])
        try:
            count, max_timestamp_ms, producer, _, _, crc = check(body)
            if is_looked_into:
                refuse_unreadable(context, client, body)
        except InvalidBatchError:
            break
        if producer >= 0:
            break
        batches = gathered.get(key)
        if batches is None:
            try:
                partition = writable(context, client, *key)
            except BrokerError:
                break
            if partition.config.storage is not Storage.DISK or not partition.config.accept_publish:
                break
            partitions[key], batches = partition, gathered.setdefault(key, [])
        unanswered.add(opaque)
        batches.append((body, count, max_timestamp_ms, crc, opaque))
        index += 1
    for key, batches in gathered.items():
        place_run(context, client, partitions[key], batches)
    return index
