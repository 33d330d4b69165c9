"""A consumer whose topic has several homes: brokers in memory, and members whose rounds a test runs by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tools.images.node import Node
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from tools.simulated.stand_in import StandIn
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.cluster.registry_asks import Answer, FindAnchor
from txmq.broker.state.deadlines import TICK_MS
from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumer_homes import ConsumerHomes
from txmq.client.consumer.group_member import GroupMember
from txmq.client.consumer.offsets.offset_store import OffsetStore
from txmq.client.consumer.options import ConsumerOptions, ConsumerSettings
from txmq.errors import ClosedError, ConnectionLostError, TxmqError, UnknownMemberError
from txmq.model import PartitionRange, TopicConfig, TopicPartition
from txmq.protocol.answers import broker_error
from txmq.registry.cluster_metadata import PlacedTopic
from txmq.registry.topics import Topic
from txmq.runtime.logging import get_logger


class Connection:
    """A connection to a home; a heartbeat does not wait."""

    live = None
    is_cut_off = False

    def __init__(self, home: Home) -> None:
        self._home, self._client = home, home.node.connect()

    def call(
        self, verb: str, *arguments: str | int, timeout: float, extensions: Mapping[str, Any] | None = None,
        body: Sequence[bytes] | None = None,
    ) -> bytes:  # fmt: skip
        """One request."""
        if self._home.is_away or self.is_cut_off:
            raise ConnectionLostError("away")
        words = {name: value for name, value in (extensions or {}).items() if name != "wait"}
        if self._client.node is not self._home.node:
            self._client = self._home.node.connect()
        opaque = self._client.send(verb, *arguments, extensions=words, body=None if body is None else b"".join(body))
        core = self._home.node.core
        self._home.node.pump()
        for ask in core.take_registry_asks():
            assert isinstance(ask, FindAnchor)
            self._home.asked += 1
            anchor = self._home.anchors.setdefault((ask.kind, ask.name), self._home.home)
            core.registry_answered(ask.number, Answer(value=anchor))
            self._home.node.pump()
        answer = self._client.received.pop(opaque)
        if answer.code != 200:
            raise broker_error(answer.code, answer.body)
        return answer.body

    def cut(self, *, is_off: bool) -> None:
        """The network to the home fails, and the broker notices; or it works again."""
        if is_off and not self.is_cut_off:
            self._client.disconnect()
        elif self.is_cut_off and not is_off:
            self._client = self._home.node.connect()
        self.is_cut_off = is_off

    def connect(self, _deadline: float) -> None:
        """No fetching thread."""
        raise ClosedError("not here")

    def close(self) -> None:
        """There is nothing to close."""


class Home:
    """A broker, and the client's link to it."""

    def __init__(self, number: int, clock: SimClock, anchors: dict[tuple[str, str], int]) -> None:
        self.home, self.is_away, self.anchors, self.asked = number, False, anchors, 0
        self.node = Node(SimDisk(), clock=clock)
        self.node.state.home, self.node.context.cluster = number, ClusterView()

    def pass_time(self) -> None:
        """The broker's timer runs."""
        for _ in range(250 // TICK_MS):
            self.node.core.tick(self.node.clock.now_ms())
        self.node.pump()

    def restart(self) -> None:
        """The process ends, and another one begins."""
        topic = next(iter(self.node.state.placed.values()))
        saved = self.node.state.saved.snapshot()
        self.node = Node(SimDisk(), clock=self.node.clock)
        self.node.state.home, self.node.context.cluster = self.home, ClusterView()
        self.node.state.place_topic(topic)
        self.node.state.saved.restore(saved)

    @property
    def control(self) -> Connection:
        """As of a ``HomeLink``."""
        return self.new_connection()

    def new_connection(self) -> Connection:
        """As of a ``HomeLink``."""
        return Connection(self)


class Cluster:
    """Homes 1, 2, ... with one topic."""

    def __init__(self, *owners: int) -> None:
        self.clock, self.is_map_away = SimClock(), False
        self.anchors: dict[tuple[str, str], int] = {}
        self.homes = [Home(number, self.clock, self.anchors) for number in range(1, max(owners) + 1)]
        self.place(*owners)

    def place(self, *owners: int) -> None:
        """The topic, or a new version of it."""
        self.owners = owners
        while len(self.homes) < max(owners):
            self.homes.append(Home(len(self.homes) + 1, self.clock, self.anchors))
        placed = PlacedTopic(Topic(1, TopicConfig("a", len(owners))), owners, len(owners))
        for home in self.homes:
            home.node.state.place_topic(placed)

    def link_for(self, _topic: str, partition: int) -> Home:
        """As of ``Routes``."""
        return self.homes[self.owners[partition] - 1]

    def links(self) -> list[Home]:
        """As of ``Routes``."""
        return self.homes

    def known(self, topic: str) -> Topic:
        """As of ``client.topics``."""
        if self.is_map_away:
            raise ConnectionLostError("away")
        return Topic(1, TopicConfig(topic, len(self.owners)))

    def all_links(self) -> list[Home]:
        """As of ``Routes``."""
        return self.homes

    def name_of(self, link: Home) -> str:
        """As of ``Routes``."""
        return f"home{link.home}"

    def offsets(self, topic: str, partition: int) -> PartitionRange:
        """As of a ``Client``; every partition has 100 messages."""
        if self.link_for(topic, partition).is_away:
            raise ConnectionLostError("away")
        return PartitionRange(topic, partition, 0, 100)


class Scene:
    """One consumer."""

    def __init__(
        self, cluster: Cluster, name: str = "one", *, start: str = "earliest", store: OffsetStore | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.cluster = cluster
        client: Any = SimpleNamespace(
            clock=cluster.clock, timeout=5.0, routes=cluster, offsets=cluster.offsets, topics=cluster
        )
        settings = ConsumerSettings("g", ("a",), start, 5, ConsumerOptions(name=name, **options), offset_store=store)
        deferred: Any = SimpleNamespace(
            take_over=lambda *_: None, go_on=lambda *_: None, remove=lambda *_: None
        )  # fmt: skip
        self.assignment = AssignedPartitions(None, settings, cluster.clock, get_logger())
        self.homes = ConsumerHomes(
            client, self.assignment, deferred, settings, settings.member(f"{name}-1"), store, get_logger()
        )
        self.homes.start(StandIn(resolve=lambda: None))

    @property
    def members(self) -> Sequence[GroupMember]:
        """One for each home that it has joined, or tried to."""
        return self.homes._members

    def rounds(self, count: int = 1) -> Scene:
        """Each member's thread does so many rounds."""
        for _ in range(count):
            for member in list(self.members):
                try:
                    member._round()
                except UnknownMemberError:
                    member._is_joined = False
                except TxmqError as error:
                    member._cannot_reach(error)
                self.homes.look()
        return self

    def cut_off(self, *numbers: int) -> None:
        """From now on it cannot reach these homes, and no others are away."""
        for home, parts in zip(self.cluster.homes, self.homes._homes, strict=True):
            connection: Any = parts.requests._connection
            connection.cut(is_off=home.home in numbers)

    @property
    def held(self) -> list[TopicPartition]:
        """What it consumes."""
        return sorted(self.assignment.partitions)
