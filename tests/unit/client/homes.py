"""Several homes, each a scripted broker, and a client whose routes know them all.

Time stands still: a thread that waits looks again, and only a test moves the clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import pytest

from tests.unit.client.scripted import ScriptedBroker, ScriptedStream, TurnedClock
from tools.simulated.stand_in import AnyClass
from txmq.client.home_link import HomeLink
from txmq.client.partitioner import PartitionSelector
from txmq.client.producer.producer import Producer, ProducerSettings
from txmq.client.reading import Fetcher
from txmq.client.routes import Routes
from txmq.client.topics import Topics
from txmq.client.transaction.background_resolver import BackgroundResolver
from txmq.client.transaction.homes import PendingCommits
from txmq.client.transport.reconnecting import Address, ReconnectingConnection
from txmq.client.transport.session import ClientSession
from txmq.errors import BrokerAwayError, NotOwnerError, StaleTopicError
from txmq.log import records
from txmq.model import TopicPartition
from txmq.protocol import answers
from txmq.protocol.json_text import Fields, json_object
from txmq.protocol.requests import Request
from txmq.runtime import net
from txmq.testing.eventually import eventually

PORTS = (1, 2, 3)
_LOOK_AGAIN_S = 0.001

T = TypeVar("T")


class HeldClock(TurnedClock):
    """A clock that only a test moves."""

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(_LOOK_AGAIN_S)


class HomeStream(ScriptedStream):
    """One conversation with a home."""

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        if not self.inbound and not self.is_over:
            if timeout:
                threading.Event().wait(_LOOK_AGAIN_S)
            return None
        return super().receive(timeout)

    def wait(self, timeout: float, *, writable: bool) -> bool:
        return bool(self.inbound) or self.is_over or writable


class Home(ScriptedBroker):
    """A broker that owns some partitions of a topic and refuses the others.

    Attributes:
        owned: numbers of its partitions.
        is_down: whether connections are refused.
        after_put: called when a batch is stored.
        tries: how often a connection was tried.
        meant: the topic's id in each batch for a partition of its own; 0 if there was none.
    """

    def __init__(self, clock: TurnedClock, owned: Sequence[int], partitions: int) -> None:
        super().__init__(partitions)
        self.clock, self.owned = clock, set(owned)
        self.is_down = False
        self.tries = 0
        self.meant: list[int] = []
        self.told["home"] = f"{min(self.owned) + 1:016x}"
        self.after_put: Callable[[], None] = lambda: None

    def connect(self, host: str, port: int, timeout: float) -> ScriptedStream:
        self.tries += 1
        if self.is_down:
            raise ConnectionRefusedError(f"{host}:{port} refused")
        stream = HomeStream(self)
        self.streams.append(stream)
        return stream

    def go_down(self) -> None:
        """Die: every conversation ends, and none begins."""
        self.is_down = True
        self.cut()

    def _put(self, stream: ScriptedStream, request: Request) -> bytes:
        if int(request[1][1]) not in self.owned:
            raise NotOwnerError(f"leader=host:9 home={9:016x} owns partition {int(request[1][1])} of topic 't'")
        self.meant.append(int((request[2] or {}).get(b"id", 0)))
        if self.meant[-1] not in (0, self.topic_id):
            raise StaleTopicError(f"topic 't' has id {self.topic_id} now, not {self.meant[-1]}")
        answer = super()._put(stream, request)
        self.after_put()
        return answer

    def _stats(self, _stream: ScriptedStream, request: Request) -> bytes:
        return answers.result(200, request[4], b"epoch 1\n")


class HomeRoutes:
    """Routes that know the homes of each partition, and learn others when they are corrected."""

    def __init__(self, links: Sequence[HomeLink], homes: Sequence[Home]) -> None:
        self._links, self._homes = links, homes
        self.is_single_home = False
        self.likely_home: int | None = None
        self.believed = self.true_owners()
        self.corrections = 0
        self.forget: Callable[[str], None] = lambda _topic: None

    def true_owners(self) -> dict[int, int]:
        """The home of each partition, by its place in the list."""
        return {partition: number for number, home in enumerate(self._homes) for partition in home.owned}

    def link_for(self, topic: str, partition: int) -> HomeLink:
        return self._links[self.believed[partition]]

    def topic_id(self, topic: str) -> int:
        return self._homes[0].topic_id

    def homes_of(self, topic: str) -> Sequence[int] | None:
        return None

    def forget_topics(self) -> None:
        self.forget("t")

    def any_link(self) -> HomeLink:
        up = (link for link, home in zip(self._links, self._homes, strict=True) if not home.is_down)
        return next(up, self._links[0])

    def link_of_home(self, home: int) -> HomeLink:
        return self._links[home - 1]

    def links(self) -> Sequence[HomeLink]:
        return self._links

    all_links = links

    def corrected(self, topic: str) -> None:
        self.corrections += 1
        self.forget(topic)
        self.believed = self.true_owners()

    def describe(self, topic: str, timeout: float) -> Fields:
        return json_object(self.ask_any("meta", topic, timeout=timeout))

    def ask_any(self, verb: str, *arguments: str | int, timeout: float) -> bytes:
        return self.any_link().control.repeat(verb, *arguments, timeout=timeout)

    def call_any(
        self, verb: str, *arguments: str | int, timeout: float, extensions: dict[str, str] | None = None
    ) -> bytes:
        return self.any_link().control.call(verb, *arguments, timeout=timeout, extensions=extensions)

    def ask_owner(self, topic: str, partition: int, ask: Callable[[HomeLink], T]) -> T:
        return ask(self.link_for(topic, partition))

    def ask_each(self, links: Sequence[Any], ask: Callable[[Any, float], Sequence[T]]) -> list[T]:
        return [found for link in links for found in ask(link, 5.0)]

    def close(self) -> None:
        for link in self._links:
            link.close()


class Ports(AnyClass):
    """Home n answers at port n."""

    login = None

    tls = None

    def addresses_of(self, link: HomeLink, deadline: float) -> Sequence[Address]:
        return [("host", link.home)]

    def greeted(self, link: HomeLink, introduction: Fields, address: Address) -> None:
        pass


class SilentLink(HomeLink):
    """A link that is away from the first sign of it until a test says that the home is back."""

    is_silent = False

    @property
    def is_away(self) -> bool:
        return self.is_silent

    def was_silent(self) -> None:
        self.is_silent = True


class OpenCommits(PendingCommits):
    """Commits of transactions over homes that a home has not answered yet.

    Attributes:
        waited: how often they were waited for.
        deadlines: until when.
    """

    def __init__(self, clock: TurnedClock) -> None:
        super().__init__(clock)
        self.is_open = True
        self.waited = 0
        self.deadlines: list[float] = []

    def __bool__(self) -> bool:
        return self.is_open

    def holds(self, slot: TopicPartition, besides: str = "") -> bool:
        return self.is_open

    def wait(self, slot: TopicPartition, deadline: float, besides: str = "") -> None:
        self.waited += 1
        self.deadlines.append(deadline)
        if self.is_open:
            raise BrokerAwayError("the home does not answer")


class ClusterClient(AnyClass):
    """A client of several homes, as far as producers use it."""

    def __init__(self, routes: HomeRoutes, clock: TurnedClock) -> None:
        self.routes, self.clock, self.timeout, self.name = routes, clock, 5.0, "test"
        self.resolver: BackgroundResolver | None = None
        self.topics = Topics(cast(Routes, routes), clock, self.timeout)
        routes.forget = self.topics.forget
        fetcher = Fetcher(cast(Routes, routes), self.topics, clock, self.timeout)
        self.fetch_raw, self.offsets = partial(fetcher.fetch_raw, timeout=1.0), fetcher.offsets

    @property
    def control(self) -> ReconnectingConnection:
        return self.routes.any_link().control

    @property
    def session(self) -> ClientSession:
        return self.routes.any_link().session

    def new_connection(self) -> ReconnectingConnection:
        return self.routes.any_link().new_connection()

    def leave_session(self, full: ClientSession) -> None:
        raise NotImplementedError

    def producer(self, selector: PartitionSelector | None = None, **settings: Any) -> Producer:
        return Producer(self, selector, ProducerSettings(**settings))


class Cluster:
    """Three homes with two partitions each, and a client of them.

    Attributes:
        homes: home n owns the partitions n and n + 3.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = HeldClock()
        self.homes = [Home(self.clock, (number, number + 3), 6) for number in range(3)]
        monkeypatch.setattr(net, "connect", self._connect)
        self.links = [SilentLink(Ports(), "test", self.clock, 5.0, lambda _topic: None) for _ in PORTS]
        for number, link in enumerate(self.links):
            link.home = number + 1
        self.routes = HomeRoutes(self.links, self.homes)
        self.client = ClusterClient(self.routes, self.clock)

    def _connect(self, host: str, port: int, timeout: float) -> ScriptedStream:
        return self.homes[PORTS.index(port)].connect(host, port, timeout)

    def give(self, partition: int, *, to: int) -> None:
        """Let another home own a partition from now on."""
        for home in self.homes:
            home.owned.discard(partition)
        self.homes[to].owned.add(partition)

    def create_anew(self, *, partitions: int = 6) -> None:
        """Delete the topic, and create another one of that name."""
        for home in self.homes:
            home.partitions, home.topic_id = partitions, home.topic_id + 1
            home.logs.clear()
            home.ends.clear()
            home.following.clear()
            home.sequences.clear()

    def pass_time_until(self, condition: Callable[[], bool]) -> None:
        """Move the clock on, little by little."""

        def look() -> bool:
            self.clock.now += 0.1
            return condition()

        eventually(look, "time brings it about")

    def back(self, number: int) -> None:
        """A home that was away can be reached again."""
        self.homes[number].is_down = False
        self.links[number].is_silent = False

    def values(self, partition: int) -> list[bytes | None]:
        """What a partition holds, at whichever homes."""
        logs = [home.logs[partition] for home in self.homes if partition in home.logs]
        return [message.value for log in logs for message in records.decode(bytes(log), "t", partition)]

    def all_values(self) -> list[bytes | None]:
        """What all partitions hold."""
        return [value for partition in range(6) for value in self.values(partition)]
