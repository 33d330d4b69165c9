"""The embedded registry: topic names, their ids and settings.

Ids are never reused, and files are named by id, so that a name never becomes a path. The table is a fold over the
broker's journal: ``put`` and ``remove`` are called with what an entry says, live and in recovery alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from txmq.errors import BadRequestError, InvalidNameError, TopicExistsError, UnknownTopicError
from txmq.model import PARTITIONS_PER_TOPIC_MAX, RetentionPolicy, Storage, TopicConfig, is_valid_name

RESERVED_PREFIX = "__"  # internal topics
_FIELDS = tuple(field.name for field in dataclasses.fields(TopicConfig))


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the registry knows it."""

    topic_id: int
    config: TopicConfig

    def to_json(self) -> dict[str, object]:
        """Settings by name; enums as their wire words."""
        # Not asdict, which takes ten times as long: a checkpoint asks every topic.
        fields = {name: getattr(self.config, name) for name in _FIELDS}
        fields["storage"] = self.config.storage.value
        fields["retention_policy"] = self.config.retention_policy.value
        return {"topic_id": self.topic_id, **fields}

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> Topic:
        """The reverse of ``to_json``."""
        values = dict(fields)
        topic_id = values.pop("topic_id")
        assert isinstance(topic_id, int)
        values["storage"] = Storage(values["storage"])
        values["retention_policy"] = RetentionPolicy(values["retention_policy"])
        return cls(topic_id, TopicConfig(**values))  # type: ignore[arg-type]


class Topics:
    """All topics of one broker."""

    def __init__(self) -> None:
        self.next_id = 1
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[int, Topic] = {}
        self._made: dict[int, int] = {}  # by id: ``changes`` when the topic was made
        self.changes = 0  # how often a topic, or the owner of a partition, changed in this process

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def named(self, name: str) -> Topic:
        """Look up by name.

        Raises:
            UnknownTopicError: no such topic.
        """
        topic = self._by_name.get(name)
        if topic is None:
            raise UnknownTopicError(f"no topic {name[:200]!r}; see txmq topic list, or make it with txmq topic create")
        return topic

    def find(self, name: str) -> Topic | None:
        """Look up by name; None if no topic has it."""
        return self._by_name.get(name)

    def with_id(self, topic_id: int) -> Topic | None:
        """Look up by id; None if it was deleted."""
        return self._by_id.get(topic_id)

    def made_at(self, topic_id: int) -> int:
        """``changes`` when an existing topic was made. Ids say nothing of the order: they may come from outside."""
        return self._made[topic_id]

    def check_new(self, name: str) -> None:
        """Refuse a name for a new topic.

        Raises:
            InvalidNameError, TopicExistsError: it is not allowed, or a topic has it.
        """
        check_name(name)
        if name in self._by_name:
            raise TopicExistsError(f"topic {name!r} exists")

    def put(self, topic: Topic) -> None:
        """Add or replace (by id)."""
        self.changes += 1
        self._by_name[topic.config.name] = topic
        self._by_id[topic.topic_id] = topic
        self._made.setdefault(topic.topic_id, self.changes)
        self.next_id = max(self.next_id, topic.topic_id + 1)

    def remove(self, topic_id: int) -> Topic | None:
        """Forget a topic; its id stays used."""
        topic = self._by_id.pop(topic_id, None)
        if topic is not None:
            self.changes += 1
            del self._made[topic_id]
            del self._by_name[topic.config.name]
        return topic


def check_name(name: str) -> None:
    """Refuse a name that is not allowed for a topic.

    Raises:
        InvalidNameError: empty, too long, other characters than ``A-Z a-z 0-9 . _ -``, or reserved.
    """
    if not is_valid_name(name):
        raise InvalidNameError(
            f"{name[:64]!r} is not a topic name: use 1 to 200 of A-Z a-z 0-9 . _ - and start with a letter or digit"
        )
    if name.startswith(RESERVED_PREFIX):
        raise InvalidNameError(f"{name[:64]!r}: names that start with {RESERVED_PREFIX} are reserved")


def with_settings(config: TopicConfig, words: Mapping[str, str]) -> TopicConfig:
    """Apply ``setting=value`` words to a topic's settings.

    Raises:
        BadRequestError: an unknown setting or a value out of range; names the setting and what is allowed.
    """
    values: dict[str, object] = {}
    for name, text in words.items():
        parse = _SETTINGS.get(name)
        if parse is None:
            raise BadRequestError(f"unknown topic setting {name[:40]!r}; known: {', '.join(_SETTINGS)}")
        try:
            values[name] = parse(text)
        except (ValueError, KeyError):
            raise BadRequestError(f"topic setting {name}={text[:40]!r}: expected {_EXPECTED[name]}") from None
    return dataclasses.replace(config, **values)  # type: ignore[arg-type]


def altered(config: TopicConfig, words: Mapping[str, str]) -> TopicConfig:
    """Apply ``setting=value`` words to the settings of a topic that exists.

    Raises:
        BadRequestError: as ``with_settings``; or a setting cannot be changed so.
    """
    changed = with_settings(config, words)
    if changed.storage is not config.storage:
        raise BadRequestError("storage cannot be altered; create another topic")
    if changed.partitions < config.partitions:
        raise BadRequestError(f"partitions can only grow; topic {config.name!r} has {config.partitions}")
    return changed


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 16):
            raise ValueError(text)
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def _or_none(parse: Callable[[str], int]) -> Callable[[str], int | None]:
    return lambda text: None if text == "none" else parse(text)


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text]


_SIZE_MAX = 1 << 50
_SETTINGS: dict[str, Callable[[str], object]] = {
    "partitions": _number(1, PARTITIONS_PER_TOPIC_MAX),
    "storage": Storage,
    "retention_ms": _or_none(_number(1, 10**15)),
    "retention_size_bytes": _or_none(_number(1, _SIZE_MAX)),
    "retention_policy": RetentionPolicy,
    "segment_size_bytes": _number(4096, 1 << 32),
    "segment_age_ms": _or_none(_number(1, 10**15)),
    "accept_publish": _flag,
    "accept_read": _flag,
}
_EXPECTED = {
    "partitions": f"1 to {PARTITIONS_PER_TOPIC_MAX}",
    "storage": "disk or memory",
    "retention_ms": "1 to 10^15 or none",
    "retention_size_bytes": "1 to 2^50 or none",
    "retention_policy": "delete or archive",
    "segment_size_bytes": "4096 to 2^32",
    "segment_age_ms": "1 to 10^15 or none",
    "accept_publish": "true or false",
    "accept_read": "true or false",
}
