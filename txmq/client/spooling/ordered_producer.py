"""``client.ordered_producer(...)``: same key, same partition, same order, through failures of broker and producer.

A message is checked here, its partition is chosen, and the partition's queue sends or spools it
(``direct_or_spooled``). There are threads besides the callers'. Each home has a *drain thread*, which goes over its
partitions with messages in the spool, and waits for a back-off at those that cannot be written. The *spooling thread*
makes the queues take over what was sent directly and failed.

The selector sees the topic's declared partitions. The broker is asked how many there are, and the spool keeps the
answer, so that messages find their partition while the broker is away. A producer that has never reached the broker
uses what its options declare; what the broker has answered counts before that. If the broker is away no message waits
for it: what is known is used, and asked for again ``TOPIC_AGE_S_MAX`` later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from txmq.client.arguments import (
    WAIT_S_MAX,
    require_choice,
    require_kind,
    require_number,
    require_path,
    require_selector,
    require_wait,
)
from txmq.client.partitioner import KeyHashSelector, PartitionSelector, checked
from txmq.client.producer.bulk import Pair
from txmq.client.producer.core import BACKOFF_S, ProducerLimits, Record, TopicRef
from txmq.client.producer.producer import Content, Producer, ProducerSettings, checked_content
from txmq.client.spooling.direct_or_spooled import VISIBILITY_WAIT_S, PartitionQueue
from txmq.client.spooling.spool import SIZE_BYTES_MAX, Spool
from txmq.client.spooling.spool_homes import SpoolHome, SpoolHomes
from txmq.client.transaction.current import refuse_enclosed
from txmq.client.transaction.half_message import CheckBacks
from txmq.client.transport.reconnecting import END_S_MAX
from txmq.client.transport.session import REQUEST_SIZE_BYTES_MAX
from txmq.errors import (
    ClosedError,
    ConfigError,
    ConnectionLostError,
    ForbiddenError,
    OtherSessionError,
    RequestTimeoutError,
    TxmqError,
)
from txmq.log.compression import CODECS
from txmq.model import Message, ParkedMessage, SendResult, SendStatus, TopicPartition, is_valid_name
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.threads import Future, Lock, Signal, off_loop, start_daemon, watch_forks

if TYPE_CHECKING:
    from txmq.client.client import Client

TOPIC_AGE_S_MAX = 30.0  # the number of a topic's partitions is asked for again after that
_IDLE_S = 5.0  # the drain thread looks this often without a signal
_POLL_S = 0.005
_STOP_S = 10.0
_SPOOLED = "messages wait on local disk: their partition cannot be written now"
_NOT_YET = "the spool cannot be drained yet; it is tried again"
_NOT_GRANTED = "the spool cannot be drained before its user has a grant; it is tried again"  # besides the other one
_DEFAULTS = ProducerSettings()
_AT_A_TIME = 256  # of many messages; then an event loop goes on
_WITHOUT_STORE = ("linger_ms", "batch_size_bytes", "buffer_size_bytes", "max_in_flight")


@dataclass(frozen=True, slots=True)
class OrderedOptions:
    """Times and limits of an ordered producer.

    Attributes:
        timeout: seconds for one attempt to send; then the message goes to the spool.
        compression: "gzip", "lz4", "zstd" or None.
        spool_size_bytes_max: the largest size of all batches in the spool.
        attempts_max: a message that the broker refuses for good this often is parked.
        visibility_wait_s: how long after the end of its session a batch is looked for in the log; not shorter than the
            broker's ``visibility_hold_ms_max``.
        partitions: how many each topic has, by name, for a producer that begins while the broker is away and whose
            spool does not know it yet. Messages for a partition that turns out not to exist are parked.
    """

    timeout: float = 5.0
    compression: str | None = None
    spool_size_bytes_max: int = SIZE_BYTES_MAX
    attempts_max: int = 5
    visibility_wait_s: float = VISIBILITY_WAIT_S
    partitions: Mapping[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ConfigError for what is out of range."""
        for name, low, high in (
            ("timeout", 0.001, WAIT_S_MAX), ("spool_size_bytes_max", 1024, 1 << 50), ("attempts_max", 1, 1_000_000),
            ("visibility_wait_s", 0.0, WAIT_S_MAX),
        ):  # fmt: skip
            require_number(name, getattr(self, name), low, high)
        if self.compression is not None:
            require_choice("compression", self.compression, CODECS)
        require_kind("partitions", self.partitions, Mapping, "a number of partitions for each topic's name")
        for topic, count in self.partitions.items():
            if not isinstance(topic, str) or not is_valid_name(topic) or type(count) is not int or count < 1:
                raise ConfigError(f"partitions: {topic!r} = {count!r}: expected a topic and its number of partitions")


ORDERED_DEFAULTS = OrderedOptions()


class OrderedMessageProducer:
    """Sends messages in order, per partition. Made by ``client.ordered_producer``; usable as a block.

    Thread safety: any thread. Messages of one thread to one partition are stored in the order of its calls.
    """

    _sends = True  # the spool is drained

    def __init__(self, client: Client, selector: PartitionSelector, spool: str, options: OrderedOptions) -> None:
        require_kind("options", options, OrderedOptions, "txmq.OrderedOptions(...)")
        options.check()
        require_selector(selector)
        require_path("spool", spool)
        self._client, self._selector, self._options = client, selector, options
        self._key_hash = selector if type(selector) is KeyHashSelector else None
        self._spool = off_loop(lambda: self._opened(spool, options.spool_size_bytes_max))
        declared = {name: TopicRef(0, count) for name, count in options.partitions.items()}
        self._topics = {
            name: (topic_ref, float("-inf")) for name, topic_ref in (declared | self._spool.topics()).items()
        }
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._retries: dict[TopicPartition, tuple[float, float]] = {}  # not before, back-off; for the drain threads
        self._lock = Lock()
        self._given_up, self._has_taken_over = Signal(), Signal()
        self._closed: str | None = None
        self._log = get_logger(spool=spool)
        self._sparingly, self._has_said_spooled = Sparingly(self._log, client.clock), False
        watch_forks(self)
        limits = ProducerLimits(compression=options.compression)
        self._homes = SpoolHomes(
            client, self._spool, limits, self._given_up.set, self._forget_topic,
            lambda home: start_daemon("txmq-spool", lambda: self._drain(home)),
        )  # fmt: skip
        self._homes.any()  # what is in the spool is drained from the beginning
        start_daemon("txmq-spooling", self._take_over)

    def _opened(self, spool: str, size_bytes_max: int) -> Spool:
        return Spool(spool, size_bytes_max=size_bytes_max)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, timeout: float | None = None,
    ) -> SendResult:  # fmt: skip
        """Send one message: to the broker, or to the spool if its partition cannot be written or messages wait for it.

        Args:
            topic, value, key, headers, tag: as ``Producer.send``.
            timeout: seconds for the attempt to send.

        Returns:
            ACKNOWLEDGED with its offset, or SPOOLED.

        Raises:
            SpoolFullError: nothing was stored.
            TooLargeError, UnknownTopicError, ...: refused for good; nothing was stored.
            BrokerAwayError: nothing was stored: the number of the topic's partitions is neither known nor declared.
            StorageError: the spool's disk failed; whether the message is stored is not known.
            TransactionStateError: the call stands in a transaction's block.

        Durability: an acknowledged message is on the broker's disk, a spooled one on this host's.
        """
        return self.send_to(*self._checked(topic, (key, value, headers, tag), timeout))

    def send_async(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, timeout: float | None = None,
    ) -> Future[SendResult]:  # fmt: skip
        """As ``send``, without waiting for the broker: the future holds the result, or the error ``send`` would raise.

        If the message is spooled, waits until that is synced. Raises errors that are found before anything is stored.
        """
        return self.send_to_async(*self._checked(topic, (key, value, headers, tag), timeout))

    def _checked(
        self, topic: str, message: Content,
        timeout: float | None,
    ) -> tuple[TopicPartition, Record, float, TopicRef]:  # fmt: skip
        self._refuse_closed()
        refuse_enclosed(self._client, "an ordered producer cannot join a transaction: send it outside of this block")
        key, value, stored = checked_content(message, self.request_size_bytes_max)
        now_ms = self._client.clock.now_ms()
        require_wait(timeout)
        deadline = self._client.clock.monotonic() + (self._options.timeout if timeout is None else timeout)
        topic_ref = self.topic_ref(topic, deadline)
        partitions = topic_ref.partitions
        if self._key_hash is not None and key is not None:
            where = self._key_hash.partition_of(key, partitions)
        else:
            shown = Message(topic, -1, -1, key, value, dict(stored), message[3], now_ms, None)
            where = checked(self._selector.select(topic, partitions, shown), topic, partitions)
        return (topic, where), (key, value, stored, now_ms), deadline, topic_ref

    def send_to(self, partition: TopicPartition, record: Record, deadline: float, topic_ref: TopicRef) -> SendResult:
        """For ``RetryingProducer``: as ``send``; the message is checked and its partition chosen."""
        self._refuse_closed()
        queue = self._queue(partition)
        result = queue.send(record, deadline, topic_ref)
        if result.status is SendStatus.SPOOLED:
            self._say_spooled(_SPOOLED, partition)
            queue.home.wake.set()
        return result

    def send_to_async(
        self, partition: TopicPartition, record: Record, deadline: float, topic_ref: TopicRef
    ) -> Future[SendResult]:  # fmt: skip
        """For ``RetryingProducer``: as ``send_async``; the message is checked and its partition chosen."""
        self._refuse_closed()
        self._homes.wait_for_room(len(record[1]), deadline)
        queue = self._queue(partition)
        future = queue.send_async(record, deadline, topic_ref)
        if self._spool.count(partition):
            self._say_spooled(_SPOOLED, partition)
            queue.home.wake.set()
        return future

    def _say_spooled(self, event: str, partition: TopicPartition, **fields: object) -> None:
        self._has_said_spooled = True
        waiting = self._spool.count(partition)
        self._sparingly.warning(event, topic=partition[0], partition=partition[1], waiting=waiting, **fields)

    def _shell_failed(self, event: str, partition: TopicPartition, error: Exception) -> None:
        self._log.error(event, topic=partition[0], partition=partition[1], error=repr(error), exc_info=error)

    def _forget_topic(self, topic: str) -> None:
        self._topics.pop(topic, None)
        self._client.topics.forget(topic)

    @property
    def request_size_bytes_max(self) -> int:
        """The broker's limit, or its default until that is known."""
        return self._homes.request_size_bytes_max or REQUEST_SIZE_BYTES_MAX

    def topic_ref(self, topic: str, deadline: float) -> TopicRef:
        """The topic of that name, as far as it is known. Raises as ``send``."""
        known = self._topics.get(topic)
        now = self._client.clock.monotonic()
        if known is not None and now - known[1] < TOPIC_AGE_S_MAX:
            return known[0]
        try:
            if known is not None:
                self._homes.reach(deadline)  # raises at once if the broker is away
            left_s = max(deadline - self._client.clock.monotonic(), 0.001)
            found = self._client.topics.known(topic, left_s)
        except (ConnectionLostError, RequestTimeoutError):
            if known is None:
                raise
            topic_ref = known[0]
        else:
            topic_id = 0 if self._client.routes.is_single_home else found.topic_id
            topic_ref = TopicRef(topic_id, found.config.partitions)
            self._learnt(topic, topic_ref)
        self._topics[topic] = topic_ref, now
        return topic_ref

    def _learnt(self, topic: str, found: TopicRef) -> None:
        known = self._topics.get(topic)
        if known is None or known[0] != found or topic in self._options.partitions:
            self._spool.remember_topic(topic, found)
        if known is not None and known[0].partitions != found.partitions:
            was, now = known[0].partitions, found.partitions
            self._log.warning("the topic has another number of partitions", topic=topic, was=was, now=now)

    def _queue(self, partition: TopicPartition) -> PartitionQueue:
        queue = self._queues.get(partition)
        if queue is None:
            with self._lock:
                queue = self._queues.get(partition)
                if queue is None:
                    queue = self._queues[partition] = PartitionQueue(
                        partition, self._spool, self._homes, self._client, self._client.clock,
                        attempts_max=self._options.attempts_max, visibility_wait_s=self._options.visibility_wait_s,
                    )  # fmt: skip
        return queue

    # --- the spool ---------------------------------------------------------------------------------------------------

    @property
    def spooled(self) -> int:
        """How many messages wait in the spool."""
        return sum(self._spool.waiting.values())

    def parked(self) -> list[ParkedMessage]:
        """Messages that are parked, each with its reason; ``txmq spool`` shows them and has them tried again."""
        return [entry.as_parked() for entry in self._spool.parked()]

    def flush(self, timeout: float = 30.0) -> None:
        """Wait until nothing is in flight, the spool holds only parked messages, and former sessions have ended.

        The topic then holds all that this spool's producers have sent.

        Raises:
            RequestTimeoutError: not in time; the rest is still sent.
        """
        require_wait(timeout)
        deadline = self._client.clock.monotonic() + timeout
        self._homes.flush(deadline)
        while self.spooled or not self._has_ended_former_sessions(deadline):
            self._refuse_closed()
            if self._client.clock.monotonic() >= deadline:
                raise RequestTimeoutError(
                    f"{self.spooled} messages are still in {self._spool.path}, or the broker away"
                )
            self._client.clock.sleep(_POLL_S)

    def _has_ended_former_sessions(self, deadline: float) -> bool:
        try:
            self._homes.end_former_sessions(deadline)
        except (ConnectionLostError, RequestTimeoutError):
            return False
        return True

    def _take_over(self) -> None:
        """The spooling thread: a thread of its own, because a drain takes its time."""
        while self._closed is None:
            self._given_up.wait(_IDLE_S)
            given_up = [partition for home in self._homes.opened() for partition in home.sender.given_up()]
            for partition in given_up:
                try:
                    self._queue(partition).take_over(self._client.clock.monotonic() + self._options.timeout)
                except Exception as error:  # noqa: BLE001  the thread is the shell, and serves the other partitions, too
                    self._shell_failed("taking over failed", partition, error)
            self._homes.wake()
        self._has_taken_over.set()

    def _drain(self, home: SpoolHome) -> None:
        while self._closed is None:
            pause = self._drain_once(home)
            if pause:
                home.wake.wait(pause)
        home.stopped.set()

    def _drain_once(self, home: SpoolHome) -> float:
        """Drain each partition of a home that is due once. Returns how long there is nothing to do."""
        pause = _IDLE_S
        if not self._sends:
            return pause
        for partition in self._spool.waiting:
            if self._queue(partition).home is not home:
                continue
            now = self._client.clock.monotonic()
            not_before, backoff = self._retries.get(partition, (0.0, 0.0))
            if now < not_before:
                pause = min(pause, not_before - now)
                continue
            queue, drained = self._queue(partition), self._queue(partition).drained
            try:
                queue.drain(now + self._options.timeout)
            except Exception as error:  # noqa: BLE001  the thread is the shell: it tries again after any error
                if not isinstance(error, TxmqError):
                    self._shell_failed("drain failed", partition, error)
                else:
                    # A session that the connection has not got is renewed, and no grant.
                    is_denied = isinstance(error, ForbiddenError) and not isinstance(error, OtherSessionError)
                    self._say_spooled(_NOT_GRANTED if is_denied else _NOT_YET, partition, error=str(error))
                backoff = BACKOFF_S.following(backoff if queue.drained == drained else 0.0)
                self._retries[partition] = self._client.clock.monotonic() + backoff, backoff
                pause = min(pause, backoff)
            else:
                self._retries.pop(partition, None)
                pause = 0.0
                if self._has_said_spooled and queue.drained != drained and not self.spooled:
                    self._has_said_spooled = False
                    self._log.info("the spool is empty again")
            if self._closed is not None:
                break
        return pause

    # --- ends --------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more messages."""
        return self._closed is not None

    def close(self) -> None:
        """End. The next producer that opens the spool sends what is in it."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = "the producer is closed"
        homes = self._homes.opened()
        for home in homes:
            if self.spooled or not home.is_idle:  # what waits for its broker ends here, for the next producer
                home.sessions.close()
            home.wake.set()
        self._given_up.set()
        for home in homes:
            home.stopped.wait(_STOP_S)
        self._has_taken_over.wait(_STOP_S)
        try:
            for queue in list(self._queues.values()):
                queue.close()
            for home in homes:
                home.sessions.end(self._client.clock.monotonic() + END_S_MAX)
                home.sender.close()
                home.sessions.close()
        finally:
            self._spool.close()

    def forked(self) -> None:
        """In a forked child: the spool and its sessions are the parent's."""
        self._closed = "this ordered producer is the parent process's: make one here, with a spool of its own"
        self._lock = Lock()
        self._spool.abandon()

    def _refuse_closed(self) -> None:
        if self._closed is not None:
            raise ClosedError(self._closed)


class RetryingProducer(Producer):
    """``client.producer(retry_store=...)``: a producer that keeps on local disk what it cannot send.

    A message that joins no transaction is sent by an ordered producer (``OrderedMessageProducer``): there is one way to
    keep a message, to number it, and to send it again. So a message has its partition before anything is tried,
    messages that wait for a partition stay ahead of later ones, and the broker recognises what it has by its sequence.
    A message in a transaction's block joins it, as with every producer: a transaction's outcome is never kept for
    later.

    Invariants:
        * Outside transactions ``send`` ends with a message at the broker, a message on this host's disk, or an error
          that says that it is on neither.
        * A transaction does not wait for kept messages, and may overtake them.

    Thread safety: as ``Producer``.

    Raises:
        ConfigError: an argument that only a producer without a store takes.
        DirectoryInUseError: another process, or another producer of this one, has the store.
        StorageError: the store cannot be opened.
    """

    def __init__(
        self, client: Client, selector: PartitionSelector | None, settings: ProducerSettings,
        checks: CheckBacks | None, store: str,
    ) -> None:  # fmt: skip
        super().__init__(client, selector, settings, checks)
        refused = [name for name in _WITHOUT_STORE if getattr(settings, name) != getattr(_DEFAULTS, name)]
        if refused:
            raise ConfigError(f"{', '.join(refused)}: not with a retry_store, which sends in its own way")
        options = OrderedOptions(timeout=settings.timeout, compression=settings.compression)
        self._kept = client.ordered_producer(self._selector, store, options=options)

    @property
    def spooled(self) -> int:
        """How many messages wait in the store."""
        return self._kept.spooled

    def parked(self) -> list[ParkedMessage]:
        """Kept messages that the broker refuses, each with its reason; ``txmq spool`` shows them and tries again."""
        return self._kept.parked()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until only parked messages are kept. Raises RequestTimeoutError if that lasts longer."""
        require_wait(timeout)
        self._kept.flush(self.settings.timeout if timeout is None else timeout)

    def close(self, timeout: float | None = None) -> None:
        """End. The next producer that opens the store sends what is kept."""
        self._closed = True
        self._kept.close()

    def _send_alone(
        self, topic: str, partition: int, record: Record, deadline: float, _is_selected: bool
    ) -> SendResult:  # fmt: skip
        return self._kept.send_to((topic, partition), record, deadline, self._kept.topic_ref(topic, deadline))

    def _send_alone_async(
        self, topic: str, partition: int, record: Record, deadline: float, _is_selected: bool
    ) -> Future[SendResult]:  # fmt: skip
        return self._kept.send_to_async((topic, partition), record, deadline, self._kept.topic_ref(topic, deadline))

    def send_pairs_outside(self, topic: str, pairs: Sequence[Pair], timeout: float | None) -> Sequence[SendResult]:
        futures: list[Future[SendResult]] = []
        for first in range(0, len(pairs), _AT_A_TIME):
            futures += [self._begun(topic, pair, timeout) for pair in pairs[first : first + _AT_A_TIME]]
            self.client.clock.sleep(0.0)
        failures = [error for future in futures if (error := future.exception()) is not None]
        if failures:
            failures[0].add_note(f"{len(pairs) - len(failures)} of {len(pairs)} messages were acknowledged or spooled")
            raise failures[0]
        return [future.result() for future in futures]

    def _begun(self, topic: str, pair: Pair, timeout: float | None) -> Future[SendResult]:
        key, value = pair
        try:
            return self.send_async(topic, value, key, timeout=timeout)
        except TxmqError as error:
            future: Future[SendResult] = Future()
            future.set_exception(error)
            return future

    def _partitions_of(self, topic: str, wait_s_max: float | None) -> int:
        return self._asked(lambda seconds: self._kept.topic_ref(topic, self._deadline(seconds)).partitions, wait_s_max)

    def _batch_size_bytes_max(self) -> int:
        return self._kept.request_size_bytes_max
