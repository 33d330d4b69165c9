"""The rules of a partition's queue: which rows of the spool go out together, and what a refusal means."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from txmq.client.producer.core import Batch
from txmq.client.spooling.direct_sender import is_certain
from txmq.client.spooling.spool_rows import Entry
from txmq.client.transport.connection import Reply
from txmq.errors import (
    BadRequestError,
    InvalidBatchError,
    InvalidNameError,
    LocalProtocolError,
    RemoteProtocolError,
    StaleTopicError,
    TooLargeError,
    TxmqError,
    UnknownTopicError,
)
from txmq.log import batch

GONE = (UnknownTopicError, StaleTopicError)  # the topic is; with it went what it held
POISON = (TooLargeError, InvalidBatchError, BadRequestError, InvalidNameError, LocalProtocolError, *GONE)


def stored_at(reply: Reply) -> int:
    """Wait for the answer to ``put``: the offset of the batch."""
    line = reply.result().removesuffix(b"\n")
    if not line.isdigit():
        raise RemoteProtocolError(f"not an answer to put: {line[:80]!r}")
    return int(line)


def has_stored_nothing(error: TxmqError) -> bool:
    """Whether this transmission has certainly stored nothing."""
    return isinstance(error, LocalProtocolError) or is_certain(error)


def is_refused_for_good(taken: Batch) -> bool:
    """Whether the callers get the refusal and nothing is spooled. Of several messages only one may be refused."""
    return isinstance(taken.refusal, GONE) or (taken.count == 1 and isinstance(taken.refusal, POISON))


def to_be_numbered(entries: Sequence[Entry]) -> list[Entry]:
    """The first batches without a sequence: numbers count in one topic."""
    return list(
        takewhile(
            lambda entry: entry.assigned is None and entry.topic_id == entries[0].topic_id and damage_of(entry) is None,
            entries,
        )
    )


def of_one_session(entries: Sequence[Entry]) -> list[Entry]:
    """The first batches that were sent before in one session."""
    first = entries[0].assigned
    assert first is not None
    return list(
        takewhile(
            lambda entry: (
                entry.assigned is not None
                and entry.assigned.identity == first.identity
                and entry.topic_id == entries[0].topic_id
                and damage_of(entry) is None
            ),
            entries,
        )
    )


def damage_of(entry: Entry) -> str | None:
    """Why a row cannot be sent: its CRC is checked before the sequence is written into it."""
    try:
        batch.check(bytearray(entry.content))
    except InvalidBatchError as error:
        return f"damaged in the spool: {error}"
    return None
