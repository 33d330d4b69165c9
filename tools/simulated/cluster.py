"""Several home brokers in memory, and a client of them all: for tests of transactions over homes.

Partition n of every topic belongs to home n modulo their number. The homes share a clock; each has faults, a log and
transactions of its own (``broker.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.images.homes import CLUSTER, Cluster, HomeNode, directory
from tools.simulated.broker import OWNER_GONE_S, PARTITIONS, SimulatedBroker, settings_of
from tools.simulated.clock import SimClock
from tools.simulated.connection import SimulatedConnection
from tools.simulated.routes import SimulatedRoutes
from tools.simulated.stand_in import AnyClass
from txmq.broker.cluster.cluster_view import RegistryState
from txmq.broker.cluster.registry_asks import Answer
from txmq.client.producer.producer import Content
from txmq.client.transaction.background_resolver import BackgroundResolver
from txmq.client.transport.session import ClientSession
from txmq.log.records import Record
from txmq.model import TopicConfig
from txmq.registry.cluster_metadata import DeletedTopic, HomeEntry, PlacedTopic, TopicMap
from txmq.registry.topics import Topic
from txmq.xid import TxId

TALK_S = 3.0  # a home looks at a part after a second, and again after another one


class SimulatedHome(SimulatedBroker):
    """One home of several. Attributes: ``cluster``: the one."""

    def __init__(self, node: HomeNode, cluster: SimulatedCluster) -> None:
        super().__init__(clock=cluster.clock, node=node)
        self._cluster = cluster

    def pump(self) -> None:
        """As of ``SimulatedBroker``; the registry is there at once."""
        super().pump()
        while asks := self.node.core.take_registry_asks():
            for ask in asks:
                self.node.core.registry_answered(ask.number, Answer(self._cluster.topic_map, self._cluster.facts))
            self.node.pump()


class SimulatedCluster(AnyClass):
    """The client of several homes, and its producer.

    Attributes:
        homes: the brokers.
        topic_map, facts: the topics and the homes, as the registry has them.
    """

    def __init__(
        self, count: int = 3, topics: Sequence[str] = ("orders", "audit"), request_size_bytes_max: int = 64 << 10
    ) -> None:
        self.clock = SimClock()
        settings = settings_of(request_size_bytes_max)
        nodes = [HomeNode(1 + n, directory(CLUSTER, 0xA1 + n), self.clock, settings, topics={}) for n in range(count)]
        self._network = Cluster(*nodes)
        self.facts = [HomeEntry(node.identity.node, "", node.state.epoch, f"h:{node.number}") for node in nodes]
        self.topic_map = TopicMap(1, tuple(self._placed(name, n) for n, name in enumerate(topics, 1)), ())
        self.homes = [SimulatedHome(node, self) for node in nodes]
        self._tell()
        self.routes = SimulatedRoutes(*self.homes)
        self.timeout = 5.0
        self.resolver: BackgroundResolver | None = None

    def _placed(self, name: str, topic_id: int) -> PlacedTopic:
        owners = [fact.home for fact in self.facts]
        partitions = PARTITIONS * len(owners)
        return PlacedTopic(Topic(topic_id, TopicConfig(name, partitions)), (*owners * PARTITIONS,), topic_id)

    def _tell(self) -> None:
        for home in self.homes:
            home.node.core.registry_state(RegistryState.CONNECTED)
            home.node.core.registry_changed(self.topic_map, self.facts)
            home.pump()

    def recreate(self, name: str) -> None:
        """Delete a topic, and create another one of that name."""
        version, topics, _ = self.topic_map
        old = next(placed for placed in topics if placed.topic.config.name == name)
        others = tuple(placed for placed in topics if placed is not old)
        deleted = DeletedTopic(old.topic.topic_id, name, old.homes)
        self.topic_map = TopicMap(version + 1, others, (deleted,))
        self._tell()
        self.topic_map = TopicMap(version + 2, (*others, self._placed(name, version + 2)), (deleted,))
        self._tell()

    @property
    def control(self) -> SimulatedConnection:
        """Any home's."""
        return self.routes.any_link().control

    @property
    def session(self) -> ClientSession:
        """Any home's."""
        return self.routes.any_link().session

    def leave_session(self, full: ClientSession) -> None:
        """As ``Client.leave_session``."""
        self.routes.link_of_home(full.home).leave_session(full)

    def new_connection(self) -> SimulatedConnection:
        """Any home."""
        return self.routes.any_link().new_connection()

    def route(self, topic: str, message: Content, *_: object) -> tuple[int, Record]:
        """To the partition of the key's first byte; without a key, to partition 0."""
        key, value = message[:2]
        return key[0] % len(self.homes) if key else 0, (key, value, [], self.clock.now_ms())

    def values(self, topic: str) -> list[bytes | None]:
        """The messages of a topic that readers see, partition by partition."""
        return [value for home in self.homes for value in home.values(topic)]

    def owner_dies(self) -> None:
        """As ``SimulatedBroker.owner_dies``."""
        for home in self.homes:
            home.owner_dies(0.0)
        self.clock.advance(OWNER_GONE_S)

    # --- what brokers do among themselves ----------------------------------------------------------------------------

    def talk(self) -> None:
        """Let the homes ask each other for a while, as far as they are there."""
        self._network.away = {home.home for home in self.homes if home.is_away}
        self._network.later(TALK_S)
        for home in self.homes:
            home.pump()
            home.states()

    def check(self) -> None:
        """A part is committed where its transaction's decision lists it, and nowhere else; nothing is in doubt."""
        for home in self.homes:
            for txid, (state, decided_by) in home.branches().items():
                decides = self.routes.link_of_home(TxId.parse(decided_by).home)
                is_committed = decides.states().get(decided_by) in ("committed", "decided")
                assert state == ("committed" if is_committed else "rolled-back"), (txid, decided_by)
            assert home.homes_left() == set()
            assert not {"prepared", "open"} & set(home.states().values())
