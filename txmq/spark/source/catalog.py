"""The topics of a query and their offsets at the broker; asked by the driver when a query is planned.

Theory of operation. One question per topic answers its id and the ends of all its partitions at once, so that what is
planned belongs together; in a cluster each of its homes is asked for its own partitions. The id is what readers hold
every batch against, however the topic's name is used later.

A broker that cannot be reached is asked again until ``timeout`` is over.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import txmq
from txmq.addresses import without_secret
from txmq.client import Client
from txmq.errors import (
    ConfigError,
    ConnectionLostError,
    DataLossError,
    OverloadedError,
    RequestTimeoutError,
    UnavailableError,
    UnknownTopicError,
)
from txmq.log import records
from txmq.log.history import LogHistory
from txmq.protocol.json_text import Fields
from txmq.spark.source.options import EARLIEST, LATEST, At, SourceOptions, Where
from txmq.spark.source.ranges import Range

PASSING = (ConnectionLostError, RequestTimeoutError, UnavailableError, OverloadedError)
"""Errors after which the same question may be answered a moment later."""
REQUEST_S = 5.0
_PAUSE_S = 0.1
NAME = "spark-source"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held:
    """A topic as it is now: the readable offsets of each partition.

    Attributes:
        logs: which log they count in (``txmq.log.history``), if that was asked for.
    """

    name: str
    topic_id: int
    partitions: dict[int, Range]
    logs: dict[int, LogHistory] = field(default_factory=dict)


def connect(bootstrap: str, timeout: float) -> Client:
    """A client whose broker may still be away; one question of it takes no longer than ``timeout``."""
    return txmq.connect(bootstrap, timeout=min(REQUEST_S, timeout), name=NAME, lazy=True)


def patiently(client: Client, timeout: float, ask: Callable[[], T]) -> T:
    """Ask until there is an answer, for ``timeout`` seconds at most; then raise what was in the way."""
    deadline = client.clock.monotonic() + timeout
    while True:
        try:
            return ask()
        except PASSING as error:
            if client.clock.monotonic() >= deadline:
                raise type(error)(f"{error}; tried for {timeout:g} s (option timeout)") from error
            client.clock.sleep(_PAUSE_S)


def made_anew(topic: str, topic_id: int, current_id: int) -> DataLossError:
    """The error for a topic that is another one of the same name now."""
    return DataLossError(
        f"topic {topic!r} was deleted and made anew (its id was {topic_id}, now it is {current_id}): the offsets that "
        "were to be read mean other messages now. Begin anew: plan a batch again, give a stream another checkpoint"
    )


def put_back(held: Range, read_to: int, shared: int | None) -> DataLossError:
    """The error for a log that is not the one that was read, or planned, up to an offset."""
    same = f"the two are the same up to offset {shared}" if shared else "nobody can tell how far the two are the same"
    return DataLossError(
        f"{held.topic}-{held.partition}: offset {read_to} counts in another log: an older copy of the broker's data "
        f"was put back, and {same}. Begin anew: give the stream an empty checkpoint, and say in startingOffsets from "
        "where"
    )


class Catalog:
    """See the module's docstring.

    Args:
        logs: the histories that are known, of the topic and partition; those of a broker's present life do not change.
    """

    def __init__(
        self, client: Client, options: SourceOptions, logs: dict[tuple[str, int], LogHistory] | None = None
    ) -> None:
        self._client, self._options = client, options
        self._logs = {} if logs is None else logs

    def topics(self) -> list[str]:
        """Names of the topics to read: those the options list, or whose name matches now."""
        if self._options.topics is not None:
            return list(self._options.topics)
        return sorted(name for name in self._names() if self._options.takes(name))

    def _names(self) -> list[str]:
        return [topic.name for topic in self._ask(self._client.topics.list)]

    def _ask(self, ask: Callable[[], T]) -> T:
        return patiently(self._client, self._options.timeout, ask)

    def held(self, topic: str) -> Held:
        """Ask for the offsets of a topic.

        Raises:
            UnknownTopicError: there is none of that name; names the nearest one.
        """
        return self._held(topic, self._of_one_topic)

    def logged(self, topic: str) -> Held:
        """The same, with the logs that the offsets count in."""

        def found(name: str) -> list[Fields]:
            told = self._of_one_topic(name)
            for row in (row for fields in told for row in fields["watermarks"]):
                self._know(name, row["partition"], row["log"])
            return told

        held = self._held(topic, found)
        return replace(held, logs={number: self._logs[topic, number] for number in held.partitions})

    def _know(self, topic: str, number: int, log: str) -> None:
        known = self._logs.get((topic, number))
        if known is None or known.log != log:
            known = self._client.log_of(topic, number)[1]
            if known.log != log:
                raise UnavailableError(f"{topic}-{number}: the broker has just started anew")
            self._logs[topic, number] = known

    def _of_one_topic(self, topic: str) -> list[Fields]:
        return _of_one_topic(self._client.topics.owned(topic))

    def _held(self, topic: str, ask: Callable[[str], list[Fields]]) -> Held:
        try:
            told = self._ask(lambda: ask(topic))
        except UnknownTopicError:
            near = difflib.get_close_matches(topic, self._names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownTopicError(
                f"no topic {topic!r} at {without_secret(str(self._options.bootstrap))}{hint}"
            ) from None
        topic_id = int(told[0]["topic_id"])
        partitions = {
            int(each["partition"]): Range(
                topic, topic_id, each["partition"], each["start"], each["end"], each["bytes"], each.get("log", "")
            )
            for fields in told
            for each in fields["watermarks"]
        }
        return Held(topic, topic_id, partitions)

    def offset_at(self, held: Range, timestamp_ms: int) -> int:
        """The first message that is not older. The broker knows batches; the one it names is looked into."""
        client, topic, number = self._client, held.topic, held.partition
        offset = self._ask(lambda: client.offset_for(topic, number, timestamp_ms))
        if offset >= held.end:
            return held.end
        content = self._ask(lambda: client.fetch_raw(topic, number, offset, 1, 0.0))
        messages = records.decode(content, topic, number, topic_id=held.topic_id)
        found = (message.offset for message in messages if message.timestamp_ms >= timestamp_ms)
        behind = messages[-1].offset + 1  # of a batch whose header names a later time than its messages have
        return max(next(found, behind), held.start)


def _of_one_topic(told: list[Fields]) -> list[Fields]:
    """What homes tell of a topic, if they mean the same one: it may be made anew meanwhile."""
    if len({fields["topic_id"] for fields in told}) != 1:
        raise UnavailableError(f"homes tell of different topics {told[0]['name']!r}: one is made anew")
    return told


def placed(held: Range, where: Where, offset_at: Callable[[Range, int], int], *, is_end: bool) -> int:
    """The offset that ``where`` means in a partition.

    Args:
        offset_at: finds the first message of a time, in ms since 1970, or later.

    Raises:
        ConfigError: it is given by partition, and this one is not among them.
    """
    if isinstance(where, At):
        return offset_at(held, where.timestamp_ms)
    word: str | int | None
    if isinstance(where, Mapping):
        word = where.get(held.topic, {}).get(held.partition)
        if word is None:
            option = "endingOffsets" if is_end else "startingOffsets"
            raise ConfigError(f"option {option}: says nothing of {held.topic}-{held.partition}; name every partition")
    else:
        word = where
    return word if isinstance(word, int) else {EARLIEST: held.start, LATEST: held.end}[word]


def check_offsets(where: Where, topics: Sequence[Held], option: str) -> None:
    """Refuse offsets for what is not read.

    Raises:
        ConfigError: names the topic or partition.
    """
    if isinstance(where, Mapping):
        partitions = {held.name: held.partitions for held in topics}
        for topic, offsets in where.items():
            if topic not in partitions:
                raise ConfigError(
                    f"option {option}: names {topic!r}, which is not read; read are {', '.join(partitions)}"
                )
            for number in offsets:
                if number not in partitions[topic]:
                    raise ConfigError(
                        f"option {option}: {topic} has no partition {number}, only {len(partitions[topic])}"
                    )
