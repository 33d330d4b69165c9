"""``client.producer(...)``: checks a message, chooses its partition, and lets it join the transaction it is sent in.

``sender`` (threads, deadlines) and ``core`` (decisions) send what joins no transaction.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from txmq.client.arguments import WAIT_S_MAX, require_choice, require_number, require_transaction_timeout, require_wait
from txmq.client.partitioner import (
    KafkaPartitionSelector,
    KeyHashSelector,
    PartitionSelector,
    StickyPartition,
    checked,
    goes_in_turn,
)
from txmq.client.producer import bulk
from txmq.client.producer.bulk import Pair, SendResults, Slice
from txmq.client.producer.core import RECORD_OVERHEAD_BYTES, ProducerLimits, Record
from txmq.client.producer.home_senders import HomeSenders
from txmq.client.producer.sender import Completion, Sender
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.conversation import raise_rolled_back
from txmq.client.transaction.current import associated_branch, enclosing, refuse_enclosed
from txmq.client.transaction.half_message import CheckBacks, HalfMessage
from txmq.client.transaction.homes import PendingCommits
from txmq.client.transport.session import REQUEST_SIZE_BYTES_MAX
from txmq.errors import (
    BrokerAwayError,
    ClosedError,
    ConfigError,
    LocalProtocolError,
    TooLargeError,
    TransactionStateError,
    TxmqError,
)
from txmq.log.compression import CODECS
from txmq.log.records import TAG_HEADER, TXID_HEADER, Headers
from txmq.model import Message, ParkedMessage, SendResult, how_to_encode
from txmq.runtime.threads import Future
from txmq.xa.resources import Resource

if TYPE_CHECKING:
    from txmq.client.client import Client

BATCH_OVERHEAD_BYTES = 1024  # header, request line, and what compression may add

Content = tuple[bytes | None, bytes, Mapping[str, bytes] | None, str | None]  # key, value, headers, tag
T = TypeVar("T")


def checked_content(message: Content, size_bytes_max: int) -> tuple[bytes | None, bytes, Headers]:
    """Check key, value, headers and tag of a message; key, value and headers as they are stored.

    They are ``bytes`` and ``str`` themselves, no subclasses: a batch is encoded when it is sent, and one that cannot be
    encoded then would hold up all after it. The tag travels as a header of its own (``TAG_HEADER``), before the
    application's.

    Raises:
        TypeError, TooLargeError, LocalProtocolError: nothing was sent.
    """
    key, value, headers, tag = message
    if not isinstance(value, bytes):
        raise TypeError(f"a value is bytes, not {type(value).__name__}: {how_to_encode('value', value)}")
    if key is not None and not isinstance(key, bytes):
        raise TypeError(f"a key is bytes or None, not {type(key).__name__}: {how_to_encode('key', key)}")
    key, value = None if key is None else bytes(key), bytes(value)
    size = len(value) + (0 if key is None else len(key)) + BATCH_OVERHEAD_BYTES
    stored = _stored_headers(headers, tag) if headers or tag is not None else ()
    for name, content in stored:
        size += 4 * len(name) + len(content) + RECORD_OVERHEAD_BYTES
    if size > size_bytes_max:
        raise TooLargeError(f"a message of about {size} bytes is over the limit of {size_bytes_max}; nothing was sent")
    return key, value, stored


def _stored_headers(headers: Mapping[str, bytes] | None, tag: str | None) -> Headers:
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"a tag is a str or None, not {type(tag).__name__}")
    stored = [] if tag is None else [(TAG_HEADER, _encoded("a tag", tag))]
    if headers is not None and not isinstance(headers, Mapping):
        raise TypeError(f"headers map str to bytes, and are no {type(headers).__name__}")
    for name, content in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise TypeError("headers map str to bytes")
        plain = _encoded("a header's name", name).decode()
        if plain in (TAG_HEADER, TXID_HEADER):
            raise LocalProtocolError(
                f"the header {plain!r} is txmq's own" + (": use tag=" if plain == TAG_HEADER else "")
            )
        stored.append((plain, bytes(content)))
    return stored


def _encoded(what: str, text: str) -> bytes:
    try:
        return str.encode(text)
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise LocalProtocolError(f"{what} is {text[:80]!r}: expected text that UTF-8 can carry") from error


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """The arguments of ``client.producer``; see there."""

    linger_ms: float = 0
    batch_size_bytes: int = 256 << 10
    buffer_size_bytes: int = 64 << 20
    max_in_flight: int = 8
    compression: str | None = None
    timeout: float = 5.0

    def check(self) -> None:
        """Raises ConfigError for what is out of range."""
        for name, low, high in (
            ("linger_ms", 0.0, 60_000.0), ("batch_size_bytes", 1024, 16 << 20), ("buffer_size_bytes", 1024, 1 << 40),
            ("max_in_flight", 1, 64), ("timeout", 0.001, WAIT_S_MAX),
        ):  # fmt: skip
            require_number(name, getattr(self, name), low, high)
        if self.compression is not None:
            require_choice("compression", self.compression, CODECS)

    def limits(self) -> ProducerLimits:
        """The settings that senders obey."""
        return ProducerLimits(
            linger_s=self.linger_ms / 1000,
            batch_size_bytes=self.batch_size_bytes,
            buffer_size_bytes=self.buffer_size_bytes,
            in_flight_max=self.max_in_flight,
            compression=self.compression,
        )


class Producer:
    """Sends messages. Made by ``client.producer``; usable as a block.

    Thread safety: any thread. Messages of one thread to one partition are stored in the order of its calls.
    """

    def __init__(
        self,
        client: Client,
        selector: PartitionSelector | None,
        settings: ProducerSettings,
        checks: CheckBacks | None = None,
    ) -> None:
        self.client = client
        self.settings = settings
        self._checks = checks
        self._selector = selector or KeyHashSelector()
        self._key_hash = self._selector if type(self._selector) is KeyHashSelector else None
        self._stays = type(self._selector) in (KeyHashSelector, KafkaPartitionSelector)  # without a key
        self._sticky: dict[str, StickyPartition] = {}
        self._spare_partitions = count()
        self._senders = HomeSenders(client, settings.limits())
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TxmqError:
            if error is None:  # the error of the block's body says more
                raise

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None, timeout: float | None = None,
    ) -> SendResult:  # fmt: skip
        """Send one message and wait until the broker acknowledges it; inside a transaction's block, join it.

        Args:
            topic: the topic's name.
            value: the content.
            key: chooses the partition: same key, same partition, same order. Messages without a key take the partitions
                in turn; while sends are under way they stay with one until they would fill a batch.
            headers: names and values that are stored with the message. Subclasses of ``str`` and ``bytes``, of the key
                and value, too, are stored as what they derive from.
            tag: short text that readers can filter by.
            partition: the partition, in place of the selector's choice.
            timeout: seconds; the producer's by default. Retries stay within it.

        Returns:
            ACKNOWLEDGED with its offset, PENDING in a transaction, or SPOOLED (``retry_store``).

        Raises:
            TypeError, LocalProtocolError: an argument is of another type, or is text that UTF-8 cannot carry.
            UnknownTopicError, TopicClosedError, TooLargeError, DiskFullError, ...: nothing was stored.
            BrokerAwayError, RequestTimeoutError: it could not be sent in time; nothing was stored. Outside a block the
                producer tries until ``timeout``; inside, it does not wait for a broker that is known to be away.
            DeliveryUnknownError: no answer in time; it may or may not be stored.
            TransactionStateError: the block is a transaction of another client; or this context has used a block that
                the call does not stand in (``client/transaction/current.py``): use ``tx.send``.

        Durability: an acknowledged message is on the broker's disk, unless its ``sync`` setting says otherwise.
        """
        transaction = enclosing(self.client)
        if transaction is not None:
            where, record = self.route(topic, (key, value, headers, tag), partition, None)
            return transaction.add(topic, where, *record)
        timeout_s = self._timeout_s(timeout)
        where, record = self.route(topic, (key, value, headers, tag), partition, timeout_s)
        return self._send_alone(topic, where, record, self.client.clock.monotonic() + timeout_s, partition is None)

    def send_async(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None, timeout: float | None = None,
    ) -> Future[SendResult]:  # fmt: skip
        """As ``send``, without waiting: the future holds the result or the error that ``send`` would raise.

        Waits only while ``buffer_size_bytes`` is in use. Inside a transaction's block the future is done: PENDING.
        """
        transaction = enclosing(self.client)
        if transaction is None:
            return self.send_outside(topic, (key, value, headers, tag), partition, timeout)
        future: Future[SendResult] = Future()
        where, record = self.route(topic, (key, value, headers, tag), partition, None)
        future.set_result(transaction.add(topic, where, *record))
        return future

    def send_many(self, topic: str, messages: Sequence[Pair], *, timeout: float | None = None) -> Sequence[SendResult]:
        """Send (key, value) pairs, pipelined, and wait until all are acknowledged; inside a block they join.

        Args:
            messages: pairs; a key may be None. Order per partition is kept.
            timeout: seconds, for each batch.

        Returns:
            One result for each message, in order, each made when it is read.

        Raises:
            As ``send``: the first failure; its note says how many messages were acknowledged.
        """
        require_wait(timeout)
        pairs = messages if isinstance(messages, list | tuple) else list(messages)
        transaction = enclosing(self.client)
        if transaction is not None:
            return [self.send(topic, value, key) for key, value in pairs]
        return self.send_pairs_outside(topic, pairs, timeout)

    # --- outside of transactions: ``RetryingProducer`` has its own ---------------------------------------------------

    def send_outside(
        self, topic: str, message: Content, partition: int | None, timeout: float | None
    ) -> Future[SendResult]:
        """As ``send_async``, of a message that joins no transaction, whatever the caller stands in."""
        where, record = self.route(topic, message, partition, self._timeout_s(timeout))
        return self._send_alone_async(topic, where, record, self._deadline(timeout), partition is None)

    def _send_alone(
        self, topic: str, partition: int, record: Record, deadline: float, is_selected: bool
    ) -> SendResult:  # fmt: skip
        single = self._senders.single or self._senders.open_single()
        if single is not None:
            self._senders.let_commits_pass(topic, partition, deadline)
            return single.send(topic, partition, record, deadline)
        is_movable = is_selected and goes_in_turn(self._selector, record[0])
        return self._senders.send(topic, partition, record, deadline, is_movable=is_movable)

    def _send_alone_async(
        self, topic: str, partition: int, record: Record, deadline: float, is_selected: bool
    ) -> Future[SendResult]:  # fmt: skip
        single = self._senders.single or self._senders.open_single()
        if single is not None:
            self._senders.let_commits_pass(topic, partition, deadline)
            return single.send_async(topic, partition, record, deadline)
        is_movable = is_selected and goes_in_turn(self._selector, record[0])
        return self._senders.send_async(topic, partition, record, deadline, is_movable=is_movable)

    def send_pairs_outside(self, topic: str, pairs: Sequence[Pair], timeout: float | None) -> Sequence[SendResult]:
        """As ``send_many``, of messages that join no transaction."""
        single = self._senders.open_single()
        slices: list[Slice] = []
        overdue: set[PendingCommits] = set()
        try:
            for part in bulk.cut(pairs):
                slices.append(self._send_slice(single, topic, part, timeout, overdue))
                if single is not None:
                    single.take_arrived()
        finally:
            for one in slices:
                for completions in one.batches.values():
                    for completion in completions:
                        if single is not None:
                            single.drive(completion)
                        else:
                            completion.futures[0][1].exception()
        _raise_first(slices)
        return SendResults(slices, len(pairs))

    def _send_slice(
        self,
        single: Sender | None,
        topic: str,
        pairs: Sequence[Pair],
        timeout: float | None,
        overdue: set[PendingCommits],
    ) -> Slice:
        now_ms = self.client.clock.now_ms()
        assigned = Slice(self._assign(topic, pairs, now_ms, timeout, has_many=single is None))
        limit = self._batch_size_bytes_max()
        for partition, members in bulk.group(pairs, assigned.partitions).items():
            completions = assigned.batches[partition] = []
            for content, size in bulk.encode(members, now_ms, self.settings.compression, limit):
                if single is not None:
                    until = self._deadline(timeout)
                    completion = self._senders.add_to_single(single, topic, partition, content, size, until, overdue)
                else:
                    completion = self._add_to_home(topic, partition, content, size, timeout, overdue)
                completions.append(completion)
        return assigned

    def _add_to_home(
        self, topic: str, partition: int, content: bytearray, size: int, timeout: float | None,
        overdue: set[PendingCommits],
    ) -> Completion:  # fmt: skip
        is_in_turn = partition == bulk.IN_TURN
        where = self._next_partition(topic) if is_in_turn else partition
        is_movable = is_in_turn or goes_in_turn(self._selector, b"")
        until = self._deadline(timeout)
        return self._senders.add(topic, where, content, size, until, is_movable=is_movable, overdue=overdue)

    def _assign(
        self, topic: str, pairs: Sequence[Pair], now_ms: int, timeout: float | None, *, has_many: bool
    ) -> array[int]:  # fmt: skip
        partitions = self._partitions_of(topic, self._timeout_s(timeout))
        if self._key_hash is not None:
            spare = bulk.IN_TURN if has_many else next(self._spare_partitions) % partitions
            return bulk.assign_by_key(pairs, partitions, spare)
        chosen = (self._select(topic, partitions, (key, value, (), now_ms), None) for key, value in pairs)
        return bulk.assigned(chosen)

    @property
    def spooled(self) -> int:
        """How many messages wait on local disk; 0 without ``retry_store``."""
        return 0

    def parked(self) -> Sequence[ParkedMessage]:
        """Messages on local disk that the broker refuses for good, each with its reason."""
        return ()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is acknowledged or failed (futures hold the failures).

        Raises:
            RequestTimeoutError: not within ``timeout`` seconds; the rest is still sent.
        """
        self._senders.flush(self._deadline(timeout))

    def close(self, timeout: float | None = None) -> None:
        """Flush and end. Raises as ``flush``; unfinished messages are given up when the client closes."""
        deadline = self._deadline(timeout)
        self._closed = True
        self._senders.close(deadline)

    # --- transactions ------------------------------------------------------------------------------------------------

    def transaction(self, *resources: Resource, timeout: float = 30.0) -> Transaction:
        """A transaction, to be used as a block: its messages become visible all or none.

        Args:
            resources: databases whose rows are part of it: one ``LastResource``, or any number of ``MySQLResource``, or
                what their ``using`` answers.
            timeout: seconds within which it must be decided.
        """
        if self._closed:
            raise ClosedError("the producer is closed")
        if associated_branch(self.client) is not None:
            raise TransactionStateError(
                "this thread stands in a branch of an external transaction manager: end it first"
            )
        return Transaction(self.client, self, resources, timeout, compression=self.settings.compression)

    def half(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None, timeout: float = 30.0,
    ) -> HalfMessage:  # fmt: skip
        """Send a half message: on the broker's disk when this returns, and invisible until you commit it.

        Use it as a block around your own work, whose end commits, or call ``commit`` and ``rollback``. If the process
        dies or the block fails before that, the checker of the producer group decides.

        Args:
            timeout: seconds from now in which the checker is not asked while this client is connected. The other
                arguments are those of ``send``.

        Raises:
            ConfigError: the producer has no group and checker.
            TransactionStateError: the call stands in a transaction block.
            RolledBackError: the broker refused it; TransactionAwayError: it is away. Nothing happened.
        """
        if self._checks is None:
            raise ConfigError("half messages need a producer group: client.producer(group=..., checker=...)")
        refuse_enclosed(self.client, "a half message is a transaction of its own: send it outside of this block")
        require_transaction_timeout(timeout)
        half = HalfMessage(self.client, self._checks, timeout, self.settings.compression).reach()
        where, record = self.route(topic, (key, value, headers, tag), partition, self._timeout_s(None))
        self._checks.start()  # a forked child has no thread yet
        return half.prepare(topic, where, record)

    # --- checks ------------------------------------------------------------------------------------------------------

    def route(
        self, topic: str, message: Content,
        partition: int | None, wait_s_max: float | None,
    ) -> tuple[int, Record]:  # fmt: skip
        """Check a message (key, value, headers, tag); returns its partition and its record.

        Args:
            wait_s_max: as ``_asked``: None for one that joins a transaction.
        """
        if self._closed:
            raise ClosedError("the producer is closed")
        record = (*checked_content(message, self._batch_size_bytes_max()), self.client.clock.now_ms())
        return self._partition_for(topic, record, message[3], partition, wait_s_max), record

    def _timeout_s(self, timeout: float | None) -> float:
        if timeout is None:
            return self.settings.timeout
        require_wait(timeout)
        return timeout

    def _partitions_of(self, topic: str, wait_s_max: float | None) -> int:
        topics = self.client.topics
        held = topics.held(topic) or self._asked(lambda seconds: topics.refresh(topic, seconds), wait_s_max)
        return held.config.partitions

    def _asked(self, ask: Callable[[float], T], wait_s_max: float | None) -> T:
        """The broker's answer, within so many seconds.

        Args:
            wait_s_max: how long to wait; None in a block, which holds locks: no longer than the broker is alive.

        Raises:
            BrokerAwayError: it did not answer; in a block a ``TransactionAwayError``.
        """
        if wait_s_max is not None:
            return ask(wait_s_max)
        try:
            return ask(self.client.control.wait_s_max)
        except BrokerAwayError as error:
            raise_rolled_back(error, None)

    def _batch_size_bytes_max(self) -> int:
        single = self._senders.single
        if single is None:
            return self._senders.request_size_bytes_max or REQUEST_SIZE_BYTES_MAX
        session = single.reconnecting.session
        return REQUEST_SIZE_BYTES_MAX if session is None else session.request_size_bytes_max

    def _partition_for(
        self, topic: str, record: Record, tag: str | None, partition: int | None,
        wait_s_max: float | None,
    ) -> int:  # fmt: skip
        partitions = self._partitions_of(topic, wait_s_max)
        if partition is not None:
            if not isinstance(partition, int) or not 0 <= partition < partitions:  # it may have grown
                topics = self.client.topics
                partitions = self._asked(lambda seconds: topics.refresh(topic, seconds), wait_s_max).config.partitions
            return checked(partition, topic, partitions)
        if self._key_hash is not None and record[0] is not None:
            return self._key_hash.partition_of(record[0], partitions)
        return self._select(topic, partitions, record, tag)

    def _select(self, topic: str, partitions: int, record: Record, tag: str | None) -> int:
        if record[0] is not None or not self._stays:
            return self._selected(topic, partitions, record, tag)
        sticky, size = self._sticky.get(topic), len(record[1]) + RECORD_OVERHEAD_BYTES
        if sticky is not None and sticky.left_bytes >= size and self._senders.is_filling(topic, sticky.partition):
            sticky.left_bytes -= size
            if sticky.partition < partitions:  # else the topic was made anew
                return sticky.partition
        chosen = self._selected(topic, partitions, record, tag)
        self._sticky[topic] = StickyPartition(chosen, self.settings.batch_size_bytes - size)
        return chosen

    def _selected(self, topic: str, partitions: int, record: Record, tag: str | None) -> int:
        key, value, headers, now_ms = record
        if (key is None or self._key_hash is None) and self._senders.has_many and goes_in_turn(self._selector, key):
            return self._next_partition(topic)
        if self._key_hash is not None:  # needs no Message
            return self._key_hash.partition_of(key, partitions)
        message = Message(topic, -1, -1, key, value, dict(headers), tag, now_ms, None)
        return checked(self._selector.select(topic, partitions, message), topic, partitions)

    def _next_partition(self, topic: str) -> int:
        return self._senders.next_partition(self.client.topics.known(topic))

    def _deadline(self, timeout: float | None) -> float:
        return self.client.clock.monotonic() + self._timeout_s(timeout)


def _raise_first(slices: list[Slice]) -> None:
    batches = [one.batch for part in slices for completions in part.batches.values() for one in completions]
    failed = [batch for batch in batches if batch.error is not None]
    if failed:
        first = failed[0].error
        assert first is not None
        error = type(first)(*first.args)
        stored = sum(batch.count for batch in batches if batch.error is None)
        places = sorted({(batch.queue.topic, batch.queue.partition) for batch in failed})
        error.add_note(
            f"{stored} of {sum(batch.count for batch in batches)} messages were acknowledged; "
            f"failed: {', '.join(f'{topic}-{partition}' for topic, partition in places)}"
        )
        raise error
