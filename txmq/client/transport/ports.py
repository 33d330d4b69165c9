"""What the rooms of a client need of it, so that none of them imports the client itself.

``Client`` (``txmq/client/client.py``) has all of it, and so has the simulated broker of the tests as far as its users
need it. A class takes the narrowest of these:

* ``BrokerControl``: the connection for everything but reads;
* ``Broker``: that connection, its session and a clock; for transactions and branches;
* ``HomeBroker``: one home with its connections, and ``Routing``: the choice among them;
* ``Asking``: the routes, for requests of any broker or of a partition's owner;
* ``RoutedBroker``: any broker, and the routes to all of them;
* ``TopicDirectory``: the topics' ids and numbers of partitions;
* ``Log``: what is stored, read without a group; for consumers;
* ``Messaging``: all of it and producers; for senders of their own messages (dead letters, the retry topic, redrive).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.client.transport.session import ClientSession
from txmq.log.history import LogHistory
from txmq.log.records import Headers, Record
from txmq.model import Message, Outcome, PartitionRange, SendResult, TopicPartition
from txmq.protocol.commands import Stated
from txmq.registry.topics import Topic
from txmq.runtime.ports import Buffer, Clock
from txmq.runtime.threads import Future
from txmq.xa.broker_port import Answer, Control, Wanted
from txmq.xid import TxId


class BrokerControl(Control, Protocol):
    """``ReconnectingConnection``, as transactions use it."""

    @property
    def session(self) -> ClientSession | None:
        """The session in use, if there is one yet."""

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """The outcome of a transaction of this session whose end was not seen, once it was asked for."""

    def connect_with_session(self, deadline: float) -> tuple[object, ClientSession]:
        """Connect and open a session if need be."""

    def measure_clock(self, session: ClientSession, timeout: float) -> None:
        """Ask the broker again what time it is."""

    def reach(self, deadline: float) -> None:
        """Return if the broker answers."""

    def regain(self, deadline: float) -> None:
        """Connect again."""

    def repeat(
        self, verb: str, *arguments: str | int, timeout: float,
        extensions: Wanted | None = None, body: Sequence[Buffer] | None = None,
    ) -> bytes:  # fmt: skip
        """Send a request that changes nothing, or the same thing again, until it is answered."""

    def submit_transaction(self, head: str, fields: Stated, body: Sequence[Buffer] | None, deadline: float) -> Answer:
        """Send a transaction's request."""

    def write_transaction(self, head: str, fields: Stated, body: Sequence[Buffer] | None) -> Answer:
        """Send one after a decision, waiting for nothing."""

    def close(self) -> None:
        """End the connection."""


class Broker(Protocol):
    """A client's home broker."""

    @property
    def control(self) -> BrokerControl:
        """The connection for everything but reads."""

    @property
    def session(self) -> ClientSession:
        """The session of the client's transactions, opened if need be."""

    @property
    def clock(self) -> Clock:
        """For deadlines."""

    @property
    def timeout(self) -> float:
        """Seconds for a request that has no timeout of its own."""

    def leave_session(self, full: ClientSession) -> None:
        """The broker takes no more transactions in this session: open another one for the next."""

    def new_connection(self) -> BrokerControl:
        """One more connection to it; the caller closes it."""


class OwnCommits(Protocol):
    """Commits of this client that a home has yet to answer (``client/transaction/home_part.py``)."""

    def __bool__(self) -> bool:
        """Whether there is any."""

    def wait(self, slot: TopicPartition, deadline: float) -> None:
        """Wait until those that write to a partition are answered; raises TxmqError at the deadline (monotonic)."""

    def has_decided(self, txid: str) -> bool:
        """Whether a transaction is among them."""


class RoutedHome(Broker, Protocol):
    """One of a client's homes."""

    def look(self) -> None:
        """Make sure that it is there, for callers that serve other homes, too; raises BrokerAwayError."""


class HomeBroker(RoutedHome, Protocol):
    """``HomeLink``: the client's side of one home."""

    @property
    def pending_commits(self) -> OwnCommits:
        """Commits that the home has yet to answer."""

    @property
    def control(self) -> ReconnectingConnection:
        """The connection for everything but reads."""

    @property
    def home(self) -> int:
        """The home's id; 0 before the first connection."""

    @property
    def reader(self) -> ReconnectingConnection:
        """The connection for reads."""

    def new_connection(self) -> ReconnectingConnection:
        """One more connection to the home; the caller closes it."""

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """The outcome of a transaction of this client whose end was not seen, once it was asked for."""


T = TypeVar("T")
LinkT = TypeVar("LinkT", bound=Broker, covariant=True)


class Routing(Protocol[LinkT]):
    """``Routes``: which home owns a partition.

    Attributes:
        likely_home: where the last transaction that took its id early wrote to; None before there was one.
    """

    likely_home: int | None

    @property
    def is_lone(self) -> bool:
        """Whether there is one broker, without a registry."""

    def link_for(self, topic: str, partition: int) -> LinkT:
        """The link of the home that owns a partition, as far as that is known."""

    def topic_id(self, topic: str) -> int:
        """The id of the topic that has the name, to be stated with messages for it; 0 at a lone broker."""

    def forget_topics(self) -> None:
        """What is known of topics may be wrong."""

    def link_of_home(self, home: int) -> LinkT:
        """The link of a home, such as the one in a transaction's id."""

    def any_link(self) -> LinkT:
        """A link for a request that any broker answers."""

    def links(self) -> Sequence[LinkT]:
        """The links of all homes that are known."""

    def all_links(self) -> Sequence[LinkT]:
        """As ``links``, and none is missing; raises BrokerAwayError if that cannot be known now."""

    def ask_each(self, links: Sequence[Any], ask: Callable[[Any, float], Sequence[T]]) -> list[T]:
        """Ask several homes, within so many seconds each, and put together what they tell."""


class RoutedBroker(Broker, Protocol):
    """A client: any of its brokers, and the routes to all of them."""

    @property
    def routes(self) -> Routing[RoutedHome]:
        """The choice among the homes."""


class RelayClient(Protocol):
    """A client, as the relay of an outbox uses it."""

    @property
    def clock(self) -> Clock:
        """For deadlines."""

    @property
    def routes(self) -> Any:
        """``Routes``."""

    @property
    def topics(self) -> Any:
        """``Topics``."""


class Asking(Routing[HomeBroker], Protocol):
    """``Routes``, as requests use it that are for any broker, or for the owner of a partition."""

    def ask_any(self, verb: str, *arguments: str | int, timeout: float) -> bytes:
        """Ask what any broker answers."""

    def call_any(
        self, verb: str, *arguments: str | int, timeout: float, extensions: dict[str, str] | None = None
    ) -> bytes:
        """As ``ask_any`` for what must not be done twice."""

    def ask_owner(self, topic: str, partition: int, ask: Callable[[HomeBroker], T]) -> T:
        """Ask the home that owns a partition."""

    def all_links(self) -> Sequence[HomeBroker]:
        """The links of all homes, and none is missing."""

    def homes_of(self, topic: str) -> Sequence[int] | None:
        """The home of each partition, if there are several homes and it is known."""

    def owners(self, topic: str) -> Sequence[HomeBroker]:
        """The links of the homes that own the topic's partitions, asked for anew."""

    def name_of(self, link: Any) -> str:
        """A home for people."""

    def kept_partitions(self, topic: str, count: int) -> Sequence[int]:
        """Those of a topic's ``count`` partitions whose homes are not given up as lost, as far as that is known."""

    def describe(self, topic: str, timeout: float) -> dict[str, Any]:
        """The answer to ``meta``."""


class TopicDirectory(Protocol):
    """``client.topics``, as senders and readers use it."""

    def held(self, name: str) -> Topic | None:
        """Id and settings, if the broker need not be asked."""

    def known(self, name: str, timeout: float | None = None) -> Topic:
        """Id and settings, some seconds old at most."""

    def refresh(self, name: str, timeout: float | None = None) -> Topic:
        """Ask the broker."""

    def forget(self, name: str) -> None:
        """Ask the broker the next time: what is known may be wrong."""

    def ensure(self, name: str, partitions: int = 1, **settings: Any) -> None:
        """Create a topic if it is missing."""


class Log(Protocol):
    """The partitioned log, as consumers and tools read it."""

    @property
    def clock(self) -> Clock:
        """For deadlines."""

    @property
    def timeout(self) -> float:
        """Seconds for a request that has no timeout of its own."""

    @property
    def topics(self) -> TopicDirectory:
        """The topics."""

    def fetch(
        self, topic: str, partition: int, offset: int, max_bytes: int = 1 << 20, timeout: float = 1.0
    ) -> list[Message]:
        """Read messages from ``offset`` on."""

    def fetch_raw(
        self, topic: str, partition: int, offset: int, max_bytes: int = 1 << 20, timeout: float = 1.0
    ) -> bytes:
        """As ``fetch``: whole record batches, unchecked."""

    def browse(self, topic: str) -> Iterator[Message]:
        """Every message that is there now."""

    def offsets(self, topic: str, partition: int) -> PartitionRange:
        """The range of offsets that can be read."""

    def log_of(self, topic: str, partition: int) -> tuple[PartitionRange, LogHistory]:
        """The same, and the history of the log that the offsets count in."""

    def offset_for(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """The offset from which to read everything since a time."""


class OpenTransaction(Protocol):
    """A transaction inside its block."""

    @property
    def txid(self) -> str:
        """Its id."""

    def add(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int
    ) -> SendResult:
        """Append a message whose partition is chosen."""


class MessageRouter(Protocol):
    """A producer, as a transaction block uses it."""

    def route(
        self, topic: str, value: bytes, key: bytes | None, headers: Mapping[str, bytes] | None, tag: str | None,
        partition: int | None,
    ) -> tuple[int, Record]:  # fmt: skip
        """Check a message that joins a transaction: its partition, and what is stored of it."""


class MessageProducer(Protocol):
    """A producer, as senders of their own messages use it; a block closes it."""

    def __enter__(self) -> Self:
        """The producer itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As ``close``."""

    def send(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None, timeout: float | None = None,
    ) -> SendResult:  # fmt: skip
        """Send one message and wait for the acknowledgement."""

    def send_async(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None, timeout: float | None = None,
    ) -> Future[SendResult]:  # fmt: skip
        """Send one message; the future is done when it is acknowledged or failed."""

    def transaction(self, *resources: Any, timeout: float = 30.0) -> AbstractContextManager[OpenTransaction]:
        """A transaction block."""

    def close(self, timeout: float | None = None) -> None:
        """Flush and end."""


class GroupDirectory(Protocol):
    """``client.groups``, as tools use it."""

    def describe(self, group: str) -> dict[str, Any]:
        """Members and partitions of a group."""

    def change_deferred(self, group: str, rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
        """Change what is deferred; the rows that were refused."""


class TransactionDirectory(Protocol):
    """``client.transactions``, as tools use it."""

    def fence(self, txid: str) -> Outcome:
        """The final outcome of a transaction."""


class Messaging(RoutedBroker, Log, Protocol):
    """A client: its broker, its log, and producers."""

    @property
    def routes(self) -> Routing[HomeBroker]:
        """The links to its homes."""

    @property
    def groups(self) -> GroupDirectory:
        """Consumer groups."""

    @property
    def transactions(self) -> TransactionDirectory:
        """What is in doubt, and what an operator may do about it."""

    def producer(self) -> MessageProducer:
        """A new producer; the caller closes it."""
