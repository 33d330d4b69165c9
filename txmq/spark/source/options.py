"""Options of ``spark.read.format("txmq")`` and ``spark.readStream``: read once, checked at once.

Spark hands them over as text, with keys in lower case. What is not known is refused and the nearest known one named:
an option that is misspelt and passed over would read the wrong rows.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from txmq.errors import ConfigError
from txmq.log.batch import TIMESTAMP_MS_MAX
from txmq.model import is_valid_name

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_SPECIAL: Final = {-2: EARLIEST, -1: LATEST}  # as Spark's Kafka source writes them in JSON
PARTITION_SIZE_BYTES: Final = 128 << 20  # as spark.sql.files.maxPartitionBytes


@dataclass(frozen=True, slots=True)
class At:
    """The first message of this time or later, in ms since 1970."""

    timestamp_ms: int


Offsets = Mapping[str, Mapping[int, str | int]]
"""By topic and partition: an offset, earliest or latest."""
Where = str | At | Offsets
"""Earliest or latest for all, a time for all, or each by itself."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What to read, and how.

    Attributes:
        bootstrap: the broker, ``txmq://HOST:PORT``; or None and ``path``, a directory of segment files.
        topics: names; or None and ``pattern``, which a whole name must match; neither with ``path``: all.
        start, end: where to begin and to stop (not with).
        columns: names, in order; None: all, ``headers`` only with ``has_headers``.
        tasks_min: at least so many Spark tasks if there are so many messages; None: as many as processors.
        task_size_bytes: about the most that one task reads.
        trigger_rows_max, trigger_size_bytes_max: the most that one micro-batch takes; None: all there is.
        fails_on_loss: whether messages that are gone are an error, or a warning.
        timeout: seconds for which a broker that cannot be reached is tried again.
        reads_replicas: tasks ask replicas, and the leader for what those do not have.
    """

    bootstrap: str | None
    path: str | None
    topics: tuple[str, ...] | None
    pattern: str | None
    start: Where
    end: Where
    columns: tuple[str, ...] | None
    has_headers: bool
    tasks_min: int | None
    task_size_bytes: int
    trigger_rows_max: int | None
    trigger_size_bytes_max: int | None
    fails_on_loss: bool
    timeout: float
    reads_replicas: bool = False

    def takes(self, topic: str) -> bool:
        """Whether a topic of this name is read."""
        if self.topics is not None:
            return topic in self.topics
        return self.pattern is None or re.fullmatch(self.pattern, topic) is not None


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.strip().lower()]


def _is_replica(text: str) -> bool:
    return {"leader": False, "replica": True}[text.strip().lower()]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:
        raise ValueError(text)
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(is_valid_name(name) for name in names) or len(set(names)) < len(names):
        raise ValueError(text)
    return names


def _words(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _pattern(text: str) -> str:
    re.compile(text)
    return text


def _bootstrap(text: str) -> str:
    return text if "://" in text else f"txmq://{text}"


def _timestamp(text: str) -> At:
    try:
        timestamp_ms = int(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError(text) from None
        timestamp_ms = -(-int(moment.timestamp() * 1_000_000) // 1000)
    if not 0 <= timestamp_ms <= TIMESTAMP_MS_MAX:
        raise ValueError(text)
    return At(timestamp_ms)


def _where(text: str) -> Where:
    if text.strip().lower() in (EARLIEST, LATEST):
        return text.strip().lower()
    value = json.loads(text)
    return {topic: {_partition(p): _offset(at) for p, at in partitions.items()} for topic, partitions in value.items()}


def _partition(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _offset(value: Any) -> str | int:
    if type(value) is not int or value < -2:
        raise ValueError(value)
    return _SPECIAL.get(value, value)


_OFFSETS: Final = 'earliest, latest or {"topic": {"0": 23, "1": -2}} with -2 for earliest and -1 for latest'
_TIME: Final = "ms since 1970, or a time with its zone such as 2026-01-31T12:00:00+00:00"
_KNOWN: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "bootstrap": (_bootstrap, "txmq://HOST:PORT"),
    "path": (str, "a directory"),
    "topic": (_names, "a topic's name, or several separated by commas"),
    "subscribe": (_names, "a topic's name, or several separated by commas"),
    "subscribePattern": (_pattern, "a regular expression that whole names match"),
    "startingOffsets": (_where, _OFFSETS),
    "endingOffsets": (_where, _OFFSETS),
    "startingTimestamp": (_timestamp, _TIME),
    "endingTimestamp": (_timestamp, _TIME),
    "columns": (_words, "names of columns, separated by commas"),
    "includeHeaders": (_flag, "true or false"),
    "minPartitions": (_count, "a number from 1"),
    "maxBytesPerPartition": (_count, "bytes, from 1"),
    "maxOffsetsPerTrigger": (_count, "a number from 1"),
    "maxBytesPerTrigger": (_count, "bytes, from 1"),
    "failOnDataLoss": (_flag, "true or false"),
    "timeout": (_seconds, "seconds, up to 86400"),
    "readFrom": (_is_replica, "leader or replica"),
}
_BY_LOWER: Final = {name.lower(): name for name in _KNOWN}
_STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger")
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "path")


def parse(options: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Read and check.

    Raises:
        ConfigError: an option is unknown, has a value that is not allowed, or contradicts another one; says which.
    """
    found = {name: _value(name, text) for name, text in _named(options).items()}
    refused = _BATCH_ONLY if is_stream else _STREAM_ONLY
    for name in refused:
        if name in found:
            kind = "a stream" if is_stream else "a batch"
            raise ConfigError(f"option {name}: {kind} has none; it is for {'a batch' if is_stream else 'a stream'}")
    _require_one(found, "bootstrap", "path")
    if "path" in found and "readFrom" in found:
        raise ConfigError("option readFrom: segment files in a path have no replica; it goes with bootstrap")
    topics = _one_of(found, "topic", "subscribe", "subscribePattern")
    if topics is None and "path" not in found:
        raise ConfigError("what is to be read? give one of the options topic, subscribe and subscribePattern")
    start = _one_of(found, "startingOffsets", "startingTimestamp")
    end = _one_of(found, "endingOffsets", "endingTimestamp")
    if end == EARLIEST or (isinstance(end, Mapping) and any(EARLIEST in each.values() for each in end.values())):
        raise ConfigError("option endingOffsets: earliest (-2) is no end")
    return SourceOptions(
        bootstrap=found.get("bootstrap"),
        path=found.get("path"),
        topics=found.get("topic", found.get("subscribe")),
        pattern=found.get("subscribePattern"),
        start=start if start is not None else LATEST if is_stream else EARLIEST,
        end=LATEST if end is None else end,
        columns=found.get("columns"),
        has_headers=found.get("includeHeaders", False),
        tasks_min=found.get("minPartitions"),
        task_size_bytes=found.get("maxBytesPerPartition", PARTITION_SIZE_BYTES),
        trigger_rows_max=found.get("maxOffsetsPerTrigger"),
        trigger_size_bytes_max=found.get("maxBytesPerTrigger"),
        fails_on_loss=found.get("failOnDataLoss", True),
        timeout=found.get("timeout", 30.0),
        reads_replicas=found.get("readFrom", False),
    )


def parse_columns(options: Mapping[str, str]) -> tuple[tuple[str, ...] | None, bool]:
    """The options ``columns`` (None: all) and ``includeHeaders``: what the schema depends on. Errors as ``parse``."""
    found = {name: _value(name, text) for name, text in _named(options).items()}
    return found.get("columns"), found.get("includeHeaders", False)


def _named(options: Mapping[str, str]) -> dict[str, str]:
    """Options by the names they are documented under."""
    named = {}
    for key, text in options.items():
        name = _BY_LOWER.get(key.lower())
        if name is None:
            near = difflib.get_close_matches(key.lower(), _BY_LOWER, n=1)
            hint = f"did you mean {_BY_LOWER[near[0]]!r}? " if near else ""
            raise ConfigError(f"unknown option {key!r}; {hint}known: {', '.join(_KNOWN)}")
        named[name] = text
    return named


def _value(name: str, text: str) -> Any:
    parse_one, expected = _KNOWN[name]
    try:
        return parse_one(text)
    except (ValueError, KeyError, TypeError, AttributeError, re.error):
        raise ConfigError(f"option {name} = {text[:200]!r}: expected {expected}") from None


def _one_of(found: Mapping[str, Any], *names: str) -> Any:
    """The one that is given; None if none is."""
    given = [name for name in names if name in found]
    if len(given) > 1:
        raise ConfigError(f"options {' and '.join(given)}: give one of them")
    return found[given[0]] if given else None


def _require_one(found: Mapping[str, Any], *names: str) -> None:
    if _one_of(found, *names) is None:
        raise ConfigError("where is it to be read from? give bootstrap = txmq://HOST:PORT of a broker, or a path")
