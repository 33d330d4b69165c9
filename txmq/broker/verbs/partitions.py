"""The door to a partition: the one place where a request's topic and number become a partition.

Every verb that writes asks ``writable``, and every verb that reads asks ``readable``. What a client may do, and which
partitions this broker owns, is to be decided here and nowhere else.
"""

from __future__ import annotations

from txmq.broker.context import Context
from txmq.errors import TopicClosedError, UnknownTopicError
from txmq.log.partition import Partition


def writable(context: Context, topic: bytes, number: bytes) -> Partition:
    """The partition that a request writes to, by its words on the wire.

    A closed topic is not refused here: a batch that is stored already is answered all the same (``placing``).

    Raises:
        UnknownTopicError: no such topic or partition.
    """
    partition = context.state.partitions.get((topic, number))
    if partition is None:
        raise _unknown(context, topic, number)
    return partition


def readable(context: Context, topic: bytes, number: bytes) -> Partition:
    """The partition that a request reads from.

    Raises:
        UnknownTopicError: no such topic or partition.
        TopicClosedError: the topic is closed for reading.
    """
    partition = context.state.partitions.get((topic, number))
    if partition is None:
        raise _unknown(context, topic, number)
    if not partition.config.accept_read:
        raise TopicClosedError(f"topic {partition.topic!r} is closed for reading")
    return partition


def _unknown(context: Context, name: bytes, number: bytes) -> UnknownTopicError:
    text = name.decode("ascii", "replace")
    topic = context.state.topics.named(text)  # raises for an unknown topic
    return UnknownTopicError(f"topic {text!r} has partitions 0 to {topic.config.partitions - 1}, not {number.decode()}")
