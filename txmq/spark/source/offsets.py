"""The memory of a stream between its micro-batches: how far each partition was read, as JSON in Spark's checkpoint.

Layout::

    {"topics": {"orders": {"id": 7, "offsets": {"0": 23}, "logs": {"0": "7,..."}}}, "initial": true}
    {"topics": {...}, "from": {"orders": {"0": 0}}}

The topic's id says which topic was meant: one of the same name that was made anew has another one. ``logs`` say which
logs the offsets count in (``txmq.log.history``): if an older copy of a broker's data directory was put back, what
follows it stands at offsets that were read before. ``initial`` marks
where a query begins, before its first micro-batch. Spark asks for that anew when the first micro-batch is repeated
after a crash, and "latest" would then be somewhere else; so the end of the first micro-batch says, in ``from``, where
it began.

Invariants: equal positions have equal text, byte for byte: Spark compares texts to see whether anything is new.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from txmq.errors import ConfigError, StorageError
from txmq.log.history import LogHistory, parsed
from txmq.spark.source.catalog import Held, put_back

Ends = dict[str, dict[int, int]]  # by topic and partition


@dataclass(slots=True)
class Position:
    """How far a query has read.

    Attributes:
        ids: of the topics, by name.
        ends: the first offset that was not read, by topic and partition.
        logs: which logs these count in.
        begins: the offsets at which the first micro-batch began, in its end only.
        is_initial: nothing was read yet.
    """

    ids: dict[str, int] = field(default_factory=dict)
    ends: Ends = field(default_factory=dict)
    begins: Ends | None = None
    is_initial: bool = False
    logs: dict[str, dict[int, LogHistory]] = field(default_factory=dict)

    @classmethod
    def before(cls, held: Iterable[Held], ends: Ends) -> Position:
        """A position in topics as they are now."""
        topics = {one.name: one for one in held if one.name in ends}
        logs = {name: {number: one.logs[number] for number in ends[name]} for name, one in topics.items()}
        return cls({name: one.topic_id for name, one in topics.items()}, ends, logs=logs)

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        topics = {
            name: {
                "id": self.ids[name],
                "offsets": _words(self.ends[name]),
                "logs": {str(number): log.text for number, log in sorted(self.logs.get(name, {}).items())},
            }
            for name in sorted(self.ends)
        }
        found: dict[str, Any] = {"topics": topics}
        if self.is_initial:
            found["initial"] = True
        if self.begins is not None:
            found["from"] = {name: _words(self.begins[name]) for name in sorted(self.begins)}
        return found

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Position:
        """The reverse of ``to_json``.

        Raises:
            ConfigError: another source, or a newer version, wrote it.
        """
        try:
            topics = fields["topics"]
            begins = fields.get("from")
            return cls(
                {name: int(topic["id"]) for name, topic in topics.items()},
                {name: _numbers(topic["offsets"]) for name, topic in topics.items()},
                None if begins is None else {name: _numbers(offsets) for name, offsets in begins.items()},
                bool(fields.get("initial", False)),
                {
                    name: {int(number): parsed(topic["logs"][number]) for number in topic["offsets"]}
                    for name, topic in topics.items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError, StorageError):
            raise ConfigError(f"the checkpoint holds no offsets of txmq: {json.dumps(fields)[:200]}") from None

    def check(self, held: Held) -> None:
        """What this position says of a topic counts in its logs as they are now.

        Raises:
            DataLossError: an older copy of a broker's data was put back; says how far the logs are the same.
        """
        for number, log in self.logs.get(held.name, {}).items():
            end, now = self.ends[held.name][number], held.logs.get(number)
            if now is not None and log != now and (shared := log.shared_with(now, end)) != end:
                raise put_back(held.partitions[number], end, shared)

    def start_of(self, end: Position) -> Ends:
        """The start of the micro-batch that ends at ``end``, if it begins here; a partition not named begins at 0."""
        if not self.is_initial:
            return self.ends
        return end.ends if end.is_initial else end.begins or {}


def _words(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(number): offsets[number] for number in sorted(offsets)}


def _numbers(words: Mapping[str, int]) -> dict[int, int]:
    return {int(number): int(offset) for number, offset in words.items()}


def lag(progress: Mapping[str, Any]) -> dict[str, int]:
    """How many messages a streaming query had not read at its last progress report, by ``topic-partition``.

    Args:
        progress: ``query.lastProgress``; sources that are not txmq's are passed over.
    """
    found: dict[str, int] = {}
    for source in progress.get("sources", ()):
        read, there = (_position(source.get(name)) for name in ("endOffset", "latestOffset"))
        if read is not None and there is not None:
            for topic, ends in there.ends.items():
                for number, end in ends.items():
                    done = read.ends.get(topic, {}).get(number, 0)
                    found[f"{topic}-{number}"] = max(end - done, 0)
    return found


def _position(offset: Any) -> Position | None:
    try:
        return Position.from_json(json.loads(offset) if isinstance(offset, str) else offset)
    except (ConfigError, ValueError, TypeError):
        return None
