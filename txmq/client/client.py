"""``txmq.connect`` and ``Client``.

A client has a link to each home (``home_link``): connections, sessions, senders. ``routes`` knows which home owns a
partition; a lone broker owns them all. Connections are made when they are first used, except ``control``: ``connect``
makes it at once, unless ``lazy``, so that a wrong address is found there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, ClassVar, Self

from txmq.addresses import TlsFiles, is_ensemble
from txmq.client.admin.groups import Groups
from txmq.client.admin.transactions import Transactions
from txmq.client.arguments import (
    WAIT_S_MAX,
    require_choice,
    require_function,
    require_kind,
    require_number,
    require_path,
    require_selector,
    require_transaction_timeout,
    require_wait,
)
from txmq.client.bootstrap import Bootstrap, bootstrap_of
from txmq.client.consumer.consumer import DEFAULTS, Consumer, ConsumerOptions, ConsumerSettings
from txmq.client.consumer.offsets.offset_store import OffsetStore
from txmq.client.home_link import HomeLink
from txmq.client.partitioner import PartitionSelector
from txmq.client.producer.home_senders import SenderPool
from txmq.client.producer.producer import Producer, ProducerSettings
from txmq.client.reading import Fetcher
from txmq.client.relay.database_side import Durability
from txmq.client.relay.relay import Relay
from txmq.client.routes import Routes
from txmq.client.spooling.ordered_producer import (
    ORDERED_DEFAULTS,
    OrderedMessageProducer,
    OrderedOptions,
    RetryingProducer,
)
from txmq.client.topics import Topics
from txmq.client.transaction.background_resolver import BackgroundResolver, resolver_of, stop_resolver
from txmq.client.transaction.half_message import CheckBacks, Checker
from txmq.client.transaction.xa_resource import BrokerXAResource
from txmq.client.transport.reconnecting import Address, ReconnectingConnection
from txmq.client.transport.session import ClientSession
from txmq.errors import BrokerAwayError, ClosedError, ConfigError, ConnectionLostError, PartialResultError
from txmq.log.history import LogHistory
from txmq.model import Message, Outcome, PartitionRange, is_valid_name
from txmq.outbox.outbox import Outbox
from txmq.runtime.clocks import OSClock, OSRandom
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, watch_exit, watch_forks
from txmq.xa import LastResource
from txmq.xa.two_phase.resource_ports import XAResource
from txmq.xid import TxId

NAME_LENGTH_MAX = 100
DRAIN_S = 1.0  # for answers to commits, before the connections end


def connect(
    bootstrap: str, *, timeout: float = 5.0, name: str = "python", lazy: bool = False,
    ca: str = "", cert: str = "", key: str = "", password: str = "",
) -> Client:  # fmt: skip
    """Connect to a broker.

    Args:
        bootstrap: ``txmq://host[:port][,host[:port]...]``: addresses that are tried in turn. One broker of a cluster is
            enough: the client learns the others from it. Or ``zk://host[:port][,host[:port]...][/path]``, the registry
            of a cluster: the brokers' addresses are read there. With ``txmqs://`` every broker is spoken to by TLS,
            with ``zks://`` the registry as well (``zk://...?tls=brokers``: the brokers alone), and never otherwise: a
            broker has to prove that it is the host of its address.
        timeout: seconds for connecting, which the addresses share, and for each request without a timeout of its own.
        name: this client's name in the broker's lists and logs.
        lazy: connect at the first request, so that a process can start while its broker is away.
        ca: PEM file of the certificates that sign brokers' certificates; by default the system's. This and the next two
            may stand in the address: ``txmqs://broker1?ca=ca.pem``. Changed files count for the next connection.
        cert, key: PEM files of this client's certificate and of its private key, for a broker that asks for one.
        password: of the user in the address (``txmqs://shop@broker1``), sent to nobody (SCRAM-SHA-256); otherwise that
            of ``?password_file=FILE``, or TXMQ_PASSWORD. With neither, ``cert`` has to be the user's.

    Raises:
        UnauthenticatedError: user or password is wrong.
        ConfigError: not such an address, or a file cannot be read.
        BrokerAwayError: no broker answers there, or ZooKeeper does not.
        RegistryError: there is no cluster in that place of ZooKeeper.
    """
    client = Client(bootstrap_of(bootstrap, TlsFiles(ca, cert, key), password), timeout=timeout, name=name)
    watch_exit(client)
    if not lazy:
        try:
            require_broker(client, bootstrap)
        except BaseException:
            client.close()
            raise
    return client


def require_broker(client: Client, bootstrap: str) -> None:
    """Connect within the client's timeout. Raises as ``connect``."""
    try:
        client.control.connect(client.clock.monotonic() + client.timeout)
    except ConnectionLostError as error:
        is_told = is_ensemble(bootstrap) or "a replica of home" in str(error)
        hint = "" if is_told else "; is a broker running there? start one with: txmq broker"
        raise BrokerAwayError(f"{error}{hint}") from None


class Client:
    """A broker's client; made by ``txmq.connect``, usable as a block.

    Attributes:
        topics: create, list, describe, alter, delete.
        transactions: transactions in doubt, and what an operator may do about them.
        groups: consumer groups: list, describe, reset, delete.
        routes: the links to its homes.
        resolver: in the background, of transactions in doubt; None before one of its databases is known.
        link_type: what its links are; a client on an event loop has others.

    Thread safety: any thread. After ``fork`` the child's client connects anew, with another session.
    """

    link_type: ClassVar[type[HomeLink]] = HomeLink

    def __init__(
        self, addresses: Bootstrap | Sequence[Address], *, timeout: float = 5.0, name: str = "python",
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        require_number("timeout", timeout, 0.001, WAIT_S_MAX)
        require_kind("name", name, str, "a text")
        if not (name.isascii() and name.isprintable() and " " not in name and 0 < len(name) <= NAME_LENGTH_MAX):
            raise ConfigError(
                f"name = {name[:80]!r}: expected 1 to {NAME_LENGTH_MAX} printable ASCII characters, no blank"
            )
        self.name, self.timeout = name, timeout
        self.clock: Clock = clock or OSClock()
        bootstrap = addresses if isinstance(addresses, Bootstrap) else Bootstrap(lambda _timeout: addresses)
        self.routes = Routes(bootstrap, name, self.clock, timeout, self._forget_topic, self.link_type)
        self.topics = Topics(self.routes, self.clock, timeout)
        self.transactions = Transactions(self.routes, timeout)
        self.groups = Groups(self.routes, timeout)
        self._fetcher = Fetcher(self.routes, self.topics, self.clock, timeout)
        self._lock = Lock()
        self.resolver: BackgroundResolver | None = None
        self._checks: dict[str, CheckBacks] = {}  # by producer group
        self._ordered: list[OrderedMessageProducer] = []
        self._relays: list[Relay] = []
        self._closed = self._is_exiting = False
        watch_forks(self)

    def _forget_topic(self, name: str) -> None:
        self.topics.forget(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- sending -----------------------------------------------------------------------------------------------------

    def producer(
        self, *, partition_selector: PartitionSelector | None = None, linger_ms: float = 0,
        batch_size_bytes: int = 256 << 10, buffer_size_bytes: int = 64 << 20, max_in_flight: int = 8,
        compression: str | None = None, timeout: float = 5.0, group: str | None = None, checker: Checker | None = None,
        retry_store: str | None = None,
    ) -> Producer:  # fmt: skip
        """Make a producer; a client may have many.

        Args:
            partition_selector: chooses partitions; by default the key's CRC32C, without a key one after the other, each
                for a batch while sends are under way.
            linger_ms: how long a message waits for others to share its request.
            batch_size_bytes: how large a batch may become by waiting; a larger message is sent alone.
            buffer_size_bytes: how much may be unacknowledged; a send beyond that waits.
            max_in_flight: unanswered batches for each partition; the broker's own limit counts as well.
            compression: "gzip", "lz4", "zstd" or None.
            timeout: seconds for a send with its retries, unless the send has a timeout of its own.
            group: producer group, for half messages; its members answer for each other.
            checker: answers what became of the work that a half message stands for. Called in a thread of this client,
                also for half messages of other members, until the client is closed; the newest checker of a group
                counts. It answers ROLLBACK only if the work is not done and never will be, and UNKNOWN if it cannot
                tell.
            retry_store: a directory on local disk, for this producer alone; made if it is absent. A message that cannot
                be sent is kept there (SPOOLED) and sent in the background, by this producer or the next that opens it.
                Not with linger_ms, batch_size_bytes, buffer_size_bytes or max_in_flight.

        Raises:
            ConfigError: an argument out of range.
            DirectoryInUseError, StorageError: the retry store is another's, or cannot be opened.
        """
        settings = ProducerSettings(linger_ms, batch_size_bytes, buffer_size_bytes, max_in_flight, compression, timeout)
        settings.check()
        if partition_selector is not None:
            require_selector(partition_selector)
        require_path("retry_store", retry_store)
        self._refuse_closed()
        checks = self._check_backs(group, checker)
        if retry_store is None:
            return Producer(self, partition_selector, settings, checks)
        return RetryingProducer(self, partition_selector, settings, checks, retry_store)

    def _check_backs(self, group: str | None, checker: Checker | None) -> CheckBacks | None:
        if group is None and checker is None:
            return None
        if not isinstance(group, str) or not is_valid_name(group) or not callable(checker):
            raise ConfigError(f"group={group!r}, checker={checker!r}: half messages need a group's name and a callable")
        with self._lock:
            known = self._checks.get(group)
            if known is None:
                known = self._checks[group] = CheckBacks(self, group, checker)
        known.checker = checker
        self.begin_check_backs(known)
        return known

    def begin_check_backs(self, checks: CheckBacks) -> None:
        """Start the threads of a producer group; a client on an event loop does that in a task."""
        checks.start()

    def ordered_producer(
        self, partition_selector: PartitionSelector, spool: str, *, options: OrderedOptions = ORDERED_DEFAULTS
    ) -> OrderedMessageProducer:
        """Make a producer that keeps order through outages: messages that cannot be sent now wait on local disk.

        Args:
            partition_selector: chooses among the topic's declared partitions, reachable or not.
            spool: a directory, for this producer alone; made if it is absent.
            options: times and limits.

        Raises:
            DirectoryInUseError: another process, or another producer of this one, has the spool.
            StorageError: the spool cannot be opened.
            ConfigError: an argument out of range.
        """
        self._refuse_closed()
        opened = OrderedMessageProducer(self, partition_selector, spool, options)
        with self._lock:
            self._ordered = [*(known for known in self._ordered if not known.is_closed), opened]
        return opened

    def relay(
        self, outbox: Outbox, *, connect: Callable[[], Any], durability: Durability = "forced"
    ) -> Relay:  # fmt: skip
        """Take an outbox's messages to the broker, in a thread of this client, until it or the relay is closed.

        Any number of processes may run one: one relay works at a time, and another goes on where that one ends.

        Args:
            outbox: whose messages they are; ``install`` has made its tables.
            connect: opens a connection to its database, for this relay alone: it is called again whenever the
                connection was lost. The database or the broker may be away; messages wait meanwhile.
            durability: "weak" accepts a database that may lose commits in a power loss, which may stop the line then.

        Raises:
            ConfigError: an argument is none of these.
            ClosedError: the client is closed, or closes.
        """
        require_kind("outbox", outbox, Outbox, "txmq.Outbox(...)")
        require_function("connect", connect, "a function that opens a connection")
        require_choice("durability", durability, ("forced", "weak"))
        with self._lock:  # one that closes has asked its relays to end, or will ask this one
            self._refuse_closed()
            if self._is_exiting:
                raise ClosedError("the client closes")
            began = Relay(self, outbox, connect, durability=durability)
            self._relays = [*(known for known in self._relays if not known.has_ended), began]
        return began

    def xa_resource(self, *, timeout: float = 30.0) -> BrokerXAResource:
        """The broker as a resource of an external transaction manager (X/Open XA): start, end, prepare, commit, ...

        Messages that producers of this client send between ``start`` and ``end`` belong to the branch.

        Args:
            timeout: seconds for each call that asks the broker.

        Raises:
            ConfigError: ``timeout`` is out of range.
        """
        require_transaction_timeout(timeout)
        self._refuse_closed()
        return BrokerXAResource(self, timeout)

    # --- consuming ---------------------------------------------------------------------------------------------------

    def consumer(
        self, group: str, topics: Sequence[str], *, start: str | int | None = None, max_retries: int = 5,
        retry_store: str | None = None, broadcast: bool = False, offset_store: OffsetStore | None = None,
        options: ConsumerOptions = DEFAULTS,
    ) -> Consumer:  # fmt: skip
        """Join a consumer group and share its work: each partition has one consumer of the group at a time.

        Args:
            group: its name, at most 179 characters. Offsets are saved under it, and the topic of its dead letters is
                named after it.
            topics: names of topics; those that do not exist yet are joined when they are created.
            start: where to begin if the group has saved no offset: "earliest" (the default), "latest" (a broadcast's
                default), or a time in ms since 1970.
            max_retries: how often a message that failed is delivered again before it is deferred or becomes a dead
                letter.
            retry_store: a file on local disk, made if it is absent, for messages that are deferred: retried later
                while their partition moves on. "topic": they are kept in the topic ``<group>.retry``. None: a
                message that failed too often becomes a dead letter at once.
            broadcast: this consumer gets every message, and shares none. With ``options.name`` it goes on after its
                last saved offset; without, it begins anew each time and saves none.
            offset_store: the place of the group's offsets: the broker (None), a database of yours
                (``DatabaseOffsetStore``), a file (``FileOffsetStore``: a group of one), ZooKeeper
                (``ZooKeeperOffsetStore``), or a store of your own.
            options: a filter, the member's name, the strategy, times and sizes.

        Raises:
            ConfigError: an argument out of range.
            StorageError: the offset store cannot be used. One that does not answer is waited for: the consumer is made.
        """
        if isinstance(topics, str):
            raise ConfigError(f"topics = {topics!r}: expected a list of names, such as [{topics!r}]")
        require_kind("topics", topics, Iterable, "a list of names")
        require_kind("options", options, ConsumerOptions, "txmq.ConsumerOptions(...)")
        begin = start if start is not None else "latest" if broadcast else "earliest"
        settings = ConsumerSettings(
            group, tuple(topics), begin, max_retries, options, retry_store, broadcast, offset_store
        )
        settings.check()
        self._refuse_closed()
        membership = settings.member(f"{self.name}-{OSRandom().bits(48):012x}")
        return Consumer(self, settings, membership)

    # --- reading -----------------------------------------------------------------------------------------------------

    def fetch(
        self, topic: str, partition: int, offset: int, max_bytes: int = 1 << 20, timeout: float = 1.0
    ) -> list[Message]:
        """Read messages from ``offset`` on.

        Args:
            offset: the first message wanted.
            max_bytes: about how much; at least one whole batch is returned.
            timeout: seconds to wait for a message if there is none yet.

        Returns:
            Messages with dense offsets, the first at ``offset``; none if nothing appeared.

        Raises:
            OffsetOutOfRangeError: the offset is not there.
            UnknownTopicError: the topic or partition does not exist.
            InvalidBatchError: a batch is damaged.
            ConnectionLostError, RequestTimeoutError: the broker cannot be reached.
        """
        require_wait(timeout)
        return self._fetcher.fetch(topic, partition, offset, max_bytes, timeout)

    def fetch_raw(
        self, topic: str, partition: int, offset: int, max_bytes: int = 1 << 20, timeout: float = 1.0
    ) -> bytes:
        """As ``fetch``: whole record batches as they are stored, unchecked, the first of which holds ``offset``."""
        require_wait(timeout)
        return self._fetcher.fetch_raw(topic, partition, offset, max_bytes, timeout)

    def browse(self, topic: str) -> Iterator[Message]:
        """Iterate over every message that is there now, partition by partition, each in order.

        Raises:
            PartialResultError: homes of a cluster are away; raised after the messages of the others.
        """
        return chain.from_iterable(self.browse_pages(topic))

    def browse_pages(self, topic: str) -> Iterator[Sequence[Message]]:
        """As ``browse``, by as many messages as one request has brought."""
        return self._fetcher.browse(topic)

    def offsets(self, topic: str, partition: int) -> PartitionRange:
        """The range of offsets of a partition that can be read."""
        return self._fetcher.offsets(topic, partition)

    def log_of(self, topic: str, partition: int) -> tuple[PartitionRange, LogHistory]:
        """The same, and the history of the log that the offsets count in."""
        return self._fetcher.log_of(topic, partition)

    def ranges(self, topic: str) -> list[PartitionRange]:
        """The ranges of all partitions; those whose home is given up as lost are left out.

        Raises:
            PartialResultError: homes of a cluster are away; it has the ranges of the others.
        """
        return self._fetcher.ranges(topic)

    def offset_for(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """The offset from which to read everything since a time; the partition's end if all messages are older.

        Older messages of the same batch may come with it.
        """
        return self._fetcher.offset_for(topic, partition, timestamp_ms)

    # --- the broker --------------------------------------------------------------------------------------------------

    @property
    def control(self) -> ReconnectingConnection:
        """The connection for everything but reads."""
        return self.routes.any_link().control

    @property
    def senders(self) -> SenderPool:
        """The senders of its producers."""
        return self.routes.any_link().senders

    def new_connection(self) -> ReconnectingConnection:
        """One more connection, for a part of the client; the caller closes it."""
        return self.routes.any_link().new_connection()

    @property
    def session(self) -> ClientSession:
        """The session of this client's transactions, opened if need be. Raises as ``txmq.connect``."""
        return self.routes.any_link().session

    def leave_session(self, full: ClientSession) -> None:
        """As ``HomeLink.leave_session``."""
        self.routes.link_of_home(full.home).leave_session(full)

    def outcome(self, txid: TxId | str) -> Outcome:
        """The outcome of a transaction.

        UNKNOWN if it is not decided, and if the broker has never seen it: a block that was rolled back before its end
        sent nothing, and for all the broker knows a request of it may still be on its way. The extension ``fence`` on
        the wire makes that final (docs/protocol.md, ``outcome``).

        Raises:
            FencedError: it ended so long ago, or in a session so long gone, that nothing is kept.
        """
        return self.transactions.outcome(txid)

    def settle(self, *resources: LastResource | XAResource) -> None:
        """From now on, resolve in the background the transactions that dead owners left in doubt in these databases.

        A transaction with a resource starts that by itself. Call this at the start of a service whose first statements
        may meet the locks of a branch that was left prepared.
        """
        self._refuse_closed()
        for resource in resources:
            resolver_of(self).add(resource)

    def ping(self) -> None:
        """Return if the broker answers, or any of a cluster. Raises as ``txmq.connect``."""
        self.routes.ask_any("ping", timeout=self.timeout)

    def stats(self, item: str | None = None) -> str:
        """The broker's statistics; ``help`` lists the items, ``json`` is for programs.

        In a cluster those of each home, after a line ``home <id>``; with ``json`` an object of them by id.

        Raises:
            PartialResultError: homes of a cluster are away; it has the text of the others.
        """
        links = self.routes.all_links()
        if self.routes.is_single_home or item == "help":
            return self.routes.any_link().stats(item)
        try:
            return _stats_text(
                self.routes.ask_each(links, lambda link, timeout: [(link.home, link.stats(item, timeout))]), item
            )
        except PartialResultError as error:
            raise PartialResultError(str(error), [_stats_text(error.found, item)], error.away) from None

    # --- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End relays, close the connections.

        Unacknowledged messages are given up; a producer's ``close`` waits for them.
        """
        self.exiting()
        stop_resolver(self)
        with self._lock:
            self._closed = True
            checks, self._checks = self._checks, {}
            ordered, self._ordered = self._ordered, []
        for check_backs in checks.values():
            check_backs.stop()
        self.routes.close()
        for ordered_producer in ordered:  # last: a disk that fails must not leave connections open
            ordered_producer.close()

    def exiting(self) -> None:
        """Before the connections end: wait a moment for the answers to commits that were written.

        Relays end, so that others need not wait for them.
        """
        with self._lock:
            self._is_exiting = True
            relays, self._relays = self._relays, []
        for relay in relays:
            relay.ask_to_end()
        for relay in relays:
            relay.close()
        self.routes.drain(self.clock.monotonic() + DRAIN_S)

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold. Relays are the parent's."""
        self._lock = Lock()
        relays, self._relays = self._relays, []
        for relay in relays:
            relay.forked()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("the client is closed")


def _stats_text(found: Sequence[tuple[int, str]], item: str | None) -> str:
    if item == "json":
        return json.dumps({f"{home:016x}": json.loads(text) for home, text in found})
    return "".join(f"home {home:016x}\n{text}" for home, text in found)
