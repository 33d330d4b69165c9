"""A consumer's options, and all of its settings with their checks. Values, no I/O."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from txmq.client.arguments import WAIT_S_MAX, require_choice, require_kind, require_name, require_number, require_path
from txmq.client.consumer.offsets.offset_store import OffsetStore
from txmq.errors import ConfigError
from txmq.model import Message, is_valid_name
from txmq.registry.assignors import ASSIGNORS
from txmq.registry.topics import RESERVED_PREFIX

RETRIES_MAX = 1_000_000
FETCH_SIZE_BYTES_MIN = 64 << 10
READ_FROM = ("leader", "replica", "any")
DEAD_LETTERS_SUFFIX = ".dead-letter"  # of the topic that has a group's dead letters
REDRIVEN_SUFFIX = ".redriven"  # appended to that: of the topic that says which were sent again
Filter = Callable[[Message], bool]
T = TypeVar("T")
_ARGUMENTS = ("start", "max_retries", "retry_store", "broadcast", "offset_store")


def _naming_unknown(cls: type[T]) -> type[T]:
    """A class of options that says what is meant by a name that it does not have."""
    init, known = cls.__init__, tuple(inspect.signature(cls).parameters)

    @wraps(init)
    def named(self: T, *given: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no {name[:80]!r}; {_meant(name, known)}")
        init(self, *given, **options)

    cls.__init__ = named  # type: ignore[assignment]
    return cls


def _meant(name: str, known: tuple[str, ...]) -> str:
    from txmq.config_sources import near_miss

    if name in _ARGUMENTS:
        return f"it is an argument of the consumer itself: client.consumer(group, topics, {name}=...)"
    return near_miss(name, known) or f"known: {', '.join(known)}"


@_naming_unknown
@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Options that few consumers change, as ``client.consumer(..., options=ConsumerOptions(...))``; times in seconds.

    ``max_retries`` and ``retry_store``, which most choose, are arguments of ``client.consumer`` itself.

    Args:
        name: this member's name in the group; by default made up. A member that joins under the name of another one
            takes over, and the other one ends with a FencedError. A broadcast's member finds its offsets under it.
        accept: which messages are delivered; the others count as acknowledged. If it raises, the message is
            delivered: a filter that fails loses nothing.
        strategy: "sticky", "range", "round-robin", "consistent-hash" or "exclusive" (one member has everything, the
            others stand by); the same for all members. Without meaning in a broadcast.
        retry_delay: before the first retry; doubled each time, up to a minute.
        buffer_size_bytes: how much is fetched ahead, all partitions together.
        session_timeout: a member that sends no heartbeat for so long loses its partitions; 0.3 to 600.
        heartbeat_interval: between two heartbeats.
        offset_save_interval: between two saves of offsets.
        deferred_retries: how often a deferred message is delivered again before it becomes a dead letter.
        deferred_delay: before the first of these; doubled each time, up to ten minutes.
        keep_key_order: a deferred message blocks later ones of its key, also in the hands of another member,
            and one of a key is delivered at a time. Needs a ``retry_store``; without one nothing is deferred.
        pass_unreadable: a record batch that is whole and in its place, and still cannot be read, becomes one dead
            letter with its bytes, and its partition goes on after it; otherwise the partition stops there.
        read_from: "leader"; "replica": messages are fetched from a replica of their home while one serves readers;
            "any": from a replica while the leader is away. The group and its offsets stay with the leader, so that a
            member gives its partitions up when that is away for ``session_timeout``.
    """

    name: str | None = None
    accept: Filter | None = None
    strategy: str = "sticky"
    retry_delay: float = 1.0
    buffer_size_bytes: int = 32 << 20
    session_timeout: float = 6.0
    heartbeat_interval: float = 1.0
    offset_save_interval: float = 1.0
    deferred_retries: int = 10
    deferred_delay: float = 10.0
    keep_key_order: bool = False
    pass_unreadable: bool = False
    read_from: str = "leader"

    def check(self) -> None:
        """Raise ConfigError for what is out of range, or of another kind."""
        for name, low, high in (
            ("retry_delay", 0.0, WAIT_S_MAX), ("deferred_delay", 0.0, WAIT_S_MAX), ("deferred_retries", 1, RETRIES_MAX),
            ("buffer_size_bytes", FETCH_SIZE_BYTES_MIN, 1 << 40), ("session_timeout", 0.3, 600.0),
            ("heartbeat_interval", 0.001, WAIT_S_MAX), ("offset_save_interval", 0.001, WAIT_S_MAX),
        ):  # fmt: skip
            require_number(name, getattr(self, name), low, high)
        require_choice("strategy", self.strategy, ASSIGNORS)
        require_choice("read_from", self.read_from, READ_FROM)
        require_kind("keep_key_order", self.keep_key_order, bool, "True or False")
        require_kind("pass_unreadable", self.pass_unreadable, bool, "True or False")
        if self.name is not None:
            require_name("name", self.name)
        if self.accept is not None and not callable(self.accept):
            raise ConfigError(f"accept = {self.accept!r}: expected a function of a message that returns True or False")


DEFAULTS = ConsumerOptions()


class MemberSettings(NamedTuple):
    """How a consumer takes part in its group. Times in seconds.

    Attributes:
        incarnation: tells processes apart that have the name one after another.
    """

    group: str
    name: str
    topics: tuple[str, ...]
    strategy: str
    heartbeat_interval_s: float
    session_timeout_s: float
    save_interval_s: float
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """See ``Client.consumer``."""

    group: str
    topics: tuple[str, ...]
    start: str | int
    max_retries: int
    options: ConsumerOptions
    retry_store: str | None = None
    broadcast: bool = False
    offset_store: OffsetStore | None = None

    @property
    def saved_as(self) -> str:
        """The group that offsets are saved under: a broadcast's named member is a group of its own."""
        name = self.options.name
        return f"{self.group}.{name}" if self.broadcast and name is not None else self.group

    def member(self, made_up: str) -> MemberSettings:
        """The settings of its membership."""
        options = self.options
        # Two processes under one name must not share: the second one stands by.
        name, strategy = (made_up, "exclusive") if self.broadcast else (options.name or made_up, options.strategy)
        return MemberSettings(
            self.saved_as, name, self.topics, strategy, options.heartbeat_interval, options.session_timeout,
            options.offset_save_interval, made_up.rpartition("-")[2],
        )  # fmt: skip

    def check(self) -> None:
        """Raise ConfigError for what is out of range, or of another kind."""
        self.options.check()
        require_number("max_retries", self.max_retries, 0, RETRIES_MAX)
        require_path("retry_store", self.retry_store)
        require_name("group", self.group)
        if not self.topics:
            raise ConfigError("topics = []: expected one at least")
        for topic in self.topics:
            require_name("topics", topic)
        longest = self.group + DEAD_LETTERS_SUFFIX + REDRIVEN_SUFFIX  # of the topics that are made for the group
        if not is_valid_name(longest) or self.group.startswith(RESERVED_PREFIX):
            raise ConfigError(f"group = {self.group!r}: {longest!r} could be no topic: too long, or a reserved name")
        if self.start not in ("earliest", "latest") and not (type(self.start) is int and self.start >= 0):
            raise ConfigError(f"start = {self.start!r}: expected 'earliest', 'latest' or a time in ms since 1970")
        options = self.options
        if self.broadcast and options.name is None and self.retry_store is not None:
            raise ConfigError("retry_store: a broadcast's member needs options.name, under which it is remembered")
        if self.broadcast and self.offset_store is not None:
            raise ConfigError("offset_store: a broadcast's offsets are in the broker, or nowhere")
        if not is_valid_name(self.saved_as):
            raise ConfigError(f"{self.saved_as!r} is longer than a group's name may be: 200")
        if options.keep_key_order and self.retry_store is None:
            raise ConfigError("keep_key_order needs a retry_store: without one no message is deferred")
