"""Plain puts by the hundred: one read of a pipelining producer, taken in together.

``take_puts`` does what ``put`` does, for as many requests in a row as are *plain*: a put without extensions, of
a sound batch without producer id, under a fresh token, into a topic on disk that takes messages. It stops before
the first that is not, which then goes through ``put``; so every refusal comes from one place. Batches are gathered per
partition and placed as one, which moves the partition's assigned side once instead of once a batch.

Invariants:
    * the state and the group are what the same puts, one partition after the other, would have left through ``put``;
    * a place never spans segments: a run that does not fit whole is placed batch by batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.appending import PlainPut, place_run, refuse_unreadable
from txmq.broker.verbs.partition_lookup import writable
from txmq.errors import BrokerError, InvalidBatchError
from txmq.log.batch import check
from txmq.log.partition import Partition
from txmq.model import Storage


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
