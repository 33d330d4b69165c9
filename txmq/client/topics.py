"""``client.topics``: create, list, describe, alter and delete topics.

``Topics`` also keeps what senders and readers need of a topic (its id and number of partitions), for at most
``METADATA_AGE_S_MAX`` seconds, and asks again if the broker answers that a topic is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

from txmq.errors import (
    BrokerAwayError,
    ConnectionLostError,
    LocalProtocolError,
    PartialResultError,
    RemoteProtocolError,
    RequestTimeoutError,
    TopicExistsError,
    UnavailableError,
    UnknownTopicError,
)
from txmq.model import RetentionPolicy, Storage, TopicConfig, is_valid_name
from txmq.protocol.json_text import Fields, json_object
from txmq.registry.topics import Topic
from txmq.runtime.ports import Clock

if TYPE_CHECKING:
    from txmq.client.home_link import HomeLink
    from txmq.client.routes import Routes

METADATA_AGE_S_MAX = 30.0

FieldsList = list[Fields]
Setting = int | str | bool | Storage | RetentionPolicy | None


class Topics:
    """``client.topics``. Thread safety: any thread."""

    def __init__(self, routes: Routes, clock: Clock, timeout: float) -> None:
        self._routes, self._clock, self._timeout = routes, clock, timeout
        self._known: dict[str, tuple[Topic, float]] = {}

    def create(self, /, name: str, partitions: int = 1, **settings: Setting) -> TopicConfig:
        """Create a topic.

        Args:
            name: 1 to 200 of ``A-Z a-z 0-9 . _ -``, starting with a letter or digit.
            partitions: number of partitions.
            settings: ``storage``, ``retention_ms``, ``retention_size_bytes``, ``retention_policy``,
                ``segment_size_bytes``, ``segment_age_ms``, ``accept_publish``, ``accept_read``; None lifts a limit.

        Raises:
            TopicExistsError: a topic of that name exists.
            InvalidNameError, BadRequestError: the name or a setting is not valid.
            ConnectionLostError, RequestTimeoutError: whether it was created is not known.

        Durability: the topic is in the broker's journal when this returns.
        """
        return self._change("create", name, {"partitions": partitions, **settings})

    def alter(self, /, name: str, **settings: Setting) -> TopicConfig:
        """Change settings; the others stay. ``partitions`` may only grow. Raises as ``create``."""
        return self._change("alter", name, settings)

    def delete(self, name: str) -> None:
        """Delete a topic with all its messages.

        Raises:
            UnknownTopicError: there is no topic of that name.
        """
        self._known.pop(name, None)
        self._routes.call_any("topic", "delete", _checked(name), timeout=self._timeout)

    def describe(self, name: str) -> TopicConfig:
        """A topic's settings.

        Raises:
            UnknownTopicError: there is no topic of that name.
        """
        return self.refresh(name).config

    def watermarks(self, name: str) -> FieldsList:
        """The range of each partition: ``partition``, ``start``, ``end``, ``bytes``, ``broker_number``, ``log``.

        In a cluster also ``home``, which owns it.

        Raises:
            UnknownTopicError: there is no topic of that name.
            PartialResultError: homes of a cluster are away; it has the partitions of the others.
        """
        try:
            return _ranges(self.owned(name))
        except PartialResultError as error:
            raise PartialResultError(str(error), _ranges(error.found), error.away) from None

    def owned(self, name: str) -> FieldsList:
        """What each home that owns partitions of a topic tells of it (``topic describe``). Raises as ``watermarks``."""
        owners = self._routes.owners(_checked(name))
        return self._routes.ask_each(owners, lambda link, timeout: [self._owned(link, name, timeout)])

    def _owned(self, link: HomeLink, topic: str, timeout: float) -> Fields:
        told = json_object(link.control.repeat("topic", "describe", topic, timeout=timeout))
        homes = self._routes.homes_of(topic)
        if homes is not None:
            missing = homes.count(link.home) - len(told["watermarks"])
            if missing > 0:
                raise UnavailableError(f"{missing} new partitions of topic {topic} are not there yet")
            for row in told["watermarks"]:
                row["home"] = f"{link.home:016x}"
        return told

    def list(self) -> list[TopicConfig]:
        """All topics."""
        return [topic.config for topic in self._all()]

    def all_known(self) -> Sequence[Topic]:
        """Every topic, with its id. Raises as ``list``."""
        return tuple(self._all())

    def _all(self) -> Iterable[Topic]:
        body = self._routes.ask_any("topic", "list", "*", timeout=self._timeout)
        return map(_topic, json_object(body)["topics"])

    def ensure(self, /, name: str, partitions: int = 1, **settings: Setting) -> None:
        """Create a topic if it is missing; the settings are those of ``create``."""
        try:
            self.known(name)
        except UnknownTopicError:
            with suppress(TopicExistsError):  # another client was faster
                self.create(name, partitions, **settings)

    def known(self, name: str, timeout: float | None = None) -> Topic:
        """Id and settings, at most ``METADATA_AGE_S_MAX`` old. Raises as ``refresh``."""
        return self.held(name) or self.refresh(name, timeout)

    def held(self, name: str) -> Topic | None:
        """Id and settings if the broker need not be asked, or None."""
        entry = self._known.get(name)
        return entry[0] if entry is not None and self._clock.monotonic() < entry[1] else None

    def refresh(self, name: str, timeout: float | None = None) -> Topic:
        """Ask the broker, for ``timeout`` seconds (the client's by default).

        Raises:
            UnknownTopicError: there is no topic of that name.
            BrokerAwayError: it did not answer in time.
        """
        self._known.pop(name, None)
        try:
            seconds = self._timeout if timeout is None else timeout
            answer = self._routes.describe(_checked(name), seconds)
        except (ConnectionLostError, RequestTimeoutError) as error:
            raise BrokerAwayError(f"the broker did not describe topic {name}: {error}") from error
        topic = _topic(answer["topics"][0])
        self._known[topic.config.name] = topic, self._clock.monotonic() + METADATA_AGE_S_MAX
        return topic

    def forget(self, name: str) -> None:
        """Ask the broker the next time: what is known may be wrong."""
        self._known.pop(name, None)

    def _change(self, action: str, name: str, settings: Fields) -> TopicConfig:
        fields = {key: _word(value) for key, value in settings.items()}
        self._known.pop(name, None)
        body = self._routes.call_any("topic", action, _checked(name), extensions=fields, timeout=self._timeout)
        return _topic(json_object(body)).config


def _ranges(answers: FieldsList) -> FieldsList:
    return sorted((row for told in answers for row in told["watermarks"]), key=lambda row: row["partition"])


def _checked(name: str) -> str:
    """Refuse what a request's line cannot carry; the broker checks whether the topic exists."""
    if not isinstance(name, str):
        raise TypeError(f"a topic's name is a str, not {type(name).__name__}")
    if not is_valid_name(name):
        raise LocalProtocolError(f"{name[:80]!r} cannot name a topic: 1 to 200 of A-Z a-z 0-9 . _ -")
    return name


def _word(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value.value) if isinstance(value, Enum) else str(value)


_TOPIC_FIELDS = ("topic_id", *TopicConfig.__slots__)


def _topic(fields: Fields) -> Topic:
    """Read a topic; a newer broker may send fields this client does not know."""
    try:
        return Topic.from_json({name: fields[name] for name in _TOPIC_FIELDS})
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"not a topic: {error!r}") from None
