"""The transaction block: ``with producer.transaction(...) as tx``.

Theory of operation. ``tx.send`` adds a message; ``producer.send`` finds the block that it stands in (``current``).
Messages are kept here (``messages``) and go out with the decision, or ahead of it once they no longer fit one request.
The block has one of three endings (``ending``): a local transaction is decided by the broker (``local_ending``), one
with a last resource by its database (``last_resource_ending``), one with XA resources by the broker when all of them
are prepared (``two_phase_ending``). An exception in the body rolls back and goes on unchanged.

Invariants:
    * no block inside a block, and nothing joins a block that is over;
    * a block may be left in another context or thread than it was entered in (a synchronous dependency of FastAPI);
    * a block belongs to the process that began it: a forked child that leaves it sends nothing, since the transaction
      that it would roll back may be committed by then;
    * a normal return means that the decision is durable; ``pending`` says where it has yet to arrive;
    * an error in cleaning up never takes the place of the body's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from txmq.client.arguments import require_transaction_timeout, require_wait
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.transactional_acks import PendingAcks
from txmq.client.transaction.background_resolver import resolver_of
from txmq.client.transaction.conversation import rolled_back
from txmq.client.transaction.current import Entered, current_transaction, enter, note_use
from txmq.client.transaction.ending import Ending
from txmq.client.transaction.homes import TransactionHomes
from txmq.client.transaction.last_resource_ending import LastResourceEnding
from txmq.client.transaction.local_ending import LocalEnding
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.two_phase_ending import TwoPhaseEnding
from txmq.errors import (
    HeuristicError,
    RequestTimeoutError,
    RolledBackError,
    TransactionError,
    TransactionStateError,
    TxmqError,
    anew,
)
from txmq.model import Message, Outcome, SendResult
from txmq.protocol.group_rows import GroupOffsets, OffsetRow, encode_offsets
from txmq.runtime.caller import current_process
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock
from txmq.xa import LastResource
from txmq.xa.database.guarded_connection import Savepoint, tell_of_use
from txmq.xa.resources import Resource, sorted_out
from txmq.xa.two_phase.resource_ports import XAResource

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.producer.producer import Producer

LOOK_AGAIN_S = 0.005
_STREAM_AT_BYTES = 8 << 20  # buffered messages beyond this go ahead of the decision
_UNKNOWN = Outcome.UNKNOWN  # an enum's member is slow to look up
_savepoint: ContextVar[object | None] = ContextVar("txmq_savepoint", default=None)  # the innermost one of the context


class TransactionAcks:
    """The messages that a transaction acknowledges, by consumer, and the offsets that are saved with it.

    No I/O, except in ``pending_acks`` if the outcome is not known. Thread safety: the transaction's lock.

    Args:
        await_end: waits for the broker's answer, until a time, if the transaction has ended before it came.
    """

    def __init__(self, client: Client, await_end: Callable[[float], None]) -> None:
        self._client, self._await_end = client, await_end
        self._partitions: dict[PendingAcks, dict[ConsumedPartition, None]] = {}
        self._rows: dict[PendingAcks, list[OffsetRow]] = {}
        self._groups: list[GroupOffsets] | None = None  # looked at
        self._encoded: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self._partitions)

    def add(self, message: Message) -> None:
        """Acknowledge one. Raises as ``PendingAcks.pending_ack``."""
        consumer = getattr(message, "consumer", None)
        if consumer is None:
            raise TransactionStateError("tx.ack takes messages that a consumer delivered")
        pending_acks: PendingAcks = consumer.pending_acks
        if pending_acks.client is not self._client:
            raise TransactionStateError("tx.ack takes messages of consumers of the transaction's own client")
        if self._groups is not None:
            raise TransactionStateError("the transaction is being decided")
        earlier = pending_acks.saving(message)
        if isinstance(earlier, TransactionAcks) and earlier is not self:
            with suppress(TransactionError):
                earlier._await_end(self._client.clock.monotonic() + self._client.timeout)  # noqa: SLF001
        consumed = pending_acks.pending_ack(message, self)
        self._partitions.setdefault(pending_acks, {})[consumed] = None

    def slots(self) -> Sequence[tuple[str, int]]:
        """See ``SavedOffsets``."""
        return [consumed.slot for partitions in self._partitions.values() for consumed in partitions]

    def of_home(self, slots: frozenset[tuple[str, int]]) -> AcksOfHome:
        """See ``SavedOffsets``."""
        return AcksOfHome(self, slots)

    def encoded(self) -> bytes:
        """See ``SavedOffsets``; looked at once."""
        if self._encoded is None:
            self._encoded = encode_offsets(self._looked_at())
        return self._encoded

    def encoded_of(self, slots: Container[tuple[str, int]]) -> bytes:
        """The same, of some partitions."""
        found = []
        for name, order, rows in self._looked_at():
            own = tuple(row for row in rows if (row.topic, row.partition) in slots)
            if own:
                found.append(GroupOffsets(name, order, own))
        return encode_offsets(found)

    def _looked_at(self) -> list[GroupOffsets]:
        if self._groups is None:
            groups: dict[str, tuple[int, list[OffsetRow]]] = {}
            for pending_acks, partitions in self._partitions.items():
                order, rows = pending_acks.look(partitions, self)
                self._rows[pending_acks] = rows
                _, others = groups.get(pending_acks.group, (0, []))
                groups[pending_acks.group] = order, others + rows
            self._groups = [GroupOffsets(name, order, tuple(rows)) for name, (order, rows) in groups.items()]
        return self._groups

    def ended(self, outcome: Outcome, txid: str | None) -> None:
        """The block is over.

        Args:
            outcome: in the broker; UNKNOWN if it is not known.
            txid: None if nothing was sent under one.
        """
        is_known = outcome is not Outcome.UNKNOWN or txid is None or self._groups is None
        for pending_acks, partitions in self._partitions.items():
            rows = self._rows.get(pending_acks, [])
            if is_known or txid is None:
                known = Outcome.ROLLED_BACK if outcome is Outcome.UNKNOWN else outcome
                pending_acks.end(partitions, self, known, rows)
            else:
                pending_acks.doubt(list(partitions), self, txid, rows)


class AcksOfHome:
    """The offsets of the partitions that one home owns, as it saves them."""

    def __init__(self, whole: TransactionAcks, slots: frozenset[tuple[str, int]]) -> None:
        self._whole, self._slots = whole, slots
        self._encoded: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self._slots)

    def slots(self) -> Sequence[tuple[str, int]]:
        """See ``SavedOffsets``."""
        return [*self._slots]

    def of_home(self, slots: frozenset[tuple[str, int]]) -> AcksOfHome:
        """See ``SavedOffsets``."""
        return AcksOfHome(self._whole, slots)

    def encoded(self) -> bytes:
        """See ``SavedOffsets``."""
        if self._encoded is None:
            self._encoded = self._whole.encoded_of(self._slots)
        return self._encoded


class Transaction:
    """A unit of messages and database rows that become visible all or none.

    Args:
        client: whose broker takes the messages.
        producer: chooses partitions for ``send``.
        resources: one ``LastResource``, or any number of XA resources, or the results of their ``using``.
        timeout: seconds from the beginning of the block within which it must be decided.

    Attributes:
        client: as given.
        outcome: COMMITTED or ROLLED_BACK once that is durable; UNKNOWN before, and if it cannot be known, as when the
            body has ended the database's transaction by itself.

    Thread safety: ``send`` and ``add`` from any thread; the block belongs to one. A forked child cannot use it: any
    use, and leaving it without an error, raises a ``TransactionStateError``.
    """

    def __init__(
        self, client: Client, producer: Producer, resources: Sequence[Resource] = (), timeout: float = 30.0,
        *, compression: str | None = None,
    ) -> None:  # fmt: skip
        require_transaction_timeout(timeout)
        self._resource, self._xa_resources = sorted_out(resources)
        self.client, self._producer = client, producer
        self.outcome = _UNKNOWN
        self._timeout = timeout
        self._clock: Clock = client.clock
        self._messages = MessageBuffer(compression, client.routes.topic_id)
        self._homes: TransactionHomes | None = None
        self._ending: Ending | None = None
        self._failure: RolledBackError | None = None  # a part sent ahead failed: the block cannot commit any more
        self._entered: Entered | None = None
        self._lock = Lock()
        self._savepoints = 0  # made
        self._savepoint: object | None = None  # the innermost one that is open
        self._acks: TransactionAcks | None = None
        self._process = 0  # that began the block
        self._state: Literal["new", "open", "over"] = "new"

    # --- in the block ------------------------------------------------------------------------------------------------

    def send(
        self, topic: str, value: bytes, key: bytes | None = None, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None,
    ) -> SendResult:  # fmt: skip
        """Send a message as part of this transaction; arguments as ``Producer.send``.

        Returns:
            A result with status PENDING; ``results`` has the offsets once the block is over.
        """
        self.require_use()
        where, record = self._producer.route(topic, (key, value, headers, tag), partition, None)
        return self.add(topic, where, *record)

    def add(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None,
        headers: Sequence[tuple[str, bytes]], timestamp_ms: int,
    ) -> SendResult:  # fmt: skip
        """Append a message whose partition is chosen; for producers.

        Raises:
            TransactionStateError: the block is over, or a savepoint is open in another thread.
            RolledBackError: the transaction outgrew one request, and the broker refused a part sent ahead.
        """
        with self._lock:
            homes = self._require_open()
            if self._savepoint is not None:
                self._require_in_savepoint()
            result = self._messages.add(topic, partition, (key, value, headers, timestamp_ms))
            if self._messages.size_bytes > _STREAM_AT_BYTES:
                self._stream(homes)
        return result

    def ack(self, message: Message) -> None:
        """Acknowledge a message that a consumer delivered, if and only if this transaction commits.

        Its offset is saved in the broker together with the decision. Acknowledge a partition's messages in order. When
        the block has rolled back the message is as it was: reject it, or run the block again.

        Raises:
            TransactionStateError: a message before it is not acknowledged; it is not under way, or another
                transaction's.
            RolledBackError: its partition is another member's now, or an earlier transaction's outcome is not known
                yet.
            ConfigError: the consumer's offsets are not in the broker.

        Durability: with the decision.
        """
        self.require_use()
        if self._savepoint is not None:
            raise TransactionStateError("an offset cannot be taken back: acknowledge outside of the savepoint")
        with self._lock:
            homes = self._require_open()
            assert self._ending is not None
            self._acks = self._acks or TransactionAcks(self.client, self._ending.gather_results)
            homes.save(self._acks)
            self._acks.add(message)

    def connection(self, resource: LastResource | XAResource) -> Any:
        """The database connection of this transaction: the driver's own, without commit, rollback and close."""
        entered = self.require_use()
        assert self._ending is not None
        connection = self._ending.connection(resource)
        tell_of_use(connection, partial(note_use, entered))
        return connection

    @contextmanager
    def savepoint(self, resource: LastResource | XAResource) -> Iterator[None]:
        """A block in which a statement may fail without dooming the transaction.

        An exception that leaves it undoes its rows, and takes back the messages sent in it, and goes on::

            try:
                with tx.savepoint(db):
                    tx.connection(db).execute("INSERT ...")
                    tx.send("orders", b"created")
            except IntegrityError:
                ...  # was there already; the transaction goes on

        Left normally, what it did stays; a statement that failed in it did nothing (``guarded_connection``).
        While it is open, its own thread or task sends, and what that begins with a copy of its context: another
        thread's message may belong to it or not, and is refused.

        Raises:
            TransactionStateError: the resource takes no part in the transaction, or a savepoint is open in another
                thread.
            RolledBackError: left normally, but a statement had failed, and PostgreSQL then keeps nothing; or messages
                sent in it were sent ahead, and cannot be taken back: the transaction is doomed.
        """
        connection = self.connection(resource)
        outer, count = self._begin_savepoint()
        try:
            point = Savepoint(connection, self._savepoints)
            try:
                yield
            except BaseException:
                point.roll_back()
                raise
            point.release()
        except BaseException:
            self._take_back(count)
            raise
        finally:
            self._savepoint = outer
            _savepoint.set(outer)

    def _begin_savepoint(self) -> tuple[object | None, int]:
        """The savepoint around the new one, and how many messages were sent before it."""
        with self._lock:
            self._require_in_savepoint()
            outer, self._savepoint = self._savepoint, object()
            _savepoint.set(self._savepoint)
            self._savepoints += 1
            return outer, len(self._messages)

    def _require_in_savepoint(self) -> None:
        if self._savepoint is not None and self._savepoint is not _savepoint.get():
            raise TransactionStateError(
                "a savepoint of this transaction is open in another thread or task, so that a message may belong to it "
                "or not: send where the savepoint was opened, or when it is over"
            )

    def _take_back(self, count: int) -> None:
        with self._lock:
            if self._state == "open" and not self._messages.take_back(count) and self._failure is None:
                self._failure = RolledBackError(
                    "a savepoint was rolled back whose messages were sent ahead of the decision", retriable=False
                )

    @property
    def txid(self) -> str:
        """The transaction's id; taken from the broker's session when first asked for."""
        if self._homes is None:
            raise TransactionStateError("the transaction has not begun: use it as a context manager")
        self._homes.decider.begin()
        return self._homes.decider.txid

    @property
    def txid_or_none(self) -> str | None:
        """The transaction's id, if it has one yet."""
        return None if self._homes is None else self._homes.decider.txid_or_none

    def attach(self) -> None:
        """Have a session, so that ``txid`` waits for nothing. Raises RolledBackError if the broker gives none."""
        self._require_open().decider.attach_for_caller()

    @property
    def pending(self) -> tuple[str, ...]:
        """Where the decision has yet to arrive: "broker", names of XA resources, "home <id>"; empty when it has.

        A home is named, too, while it is known that a message of the transaction waits there for its place.
        """
        return () if self._ending is None else self._ending.pending

    @property
    def results(self) -> list[SendResult]:
        """One result a message, in order of sending; with offsets once the brokers have answered: waits for them.

        Raises:
            HeuristicError: the database has committed, and a broker had given the messages up before.
        """
        return self._results(self._clock.monotonic() + self.client.timeout)

    def _results(self, deadline: float) -> list[SendResult]:
        if self._ending is not None:
            self._ending.gather_results(deadline)
        return self._messages.results

    def wait_visible(self, timeout: float = 1.0) -> None:
        """Wait until readers see every message of the transaction.

        With databases the block ends when they have committed; the brokers show the messages a moment later. Wait here
        before another process is told to look for them.

        Raises:
            TransactionStateError: it is not committed.
            RequestTimeoutError: not within ``timeout`` seconds; they are shown later.
            HeuristicError: as ``results``.
        """
        require_wait(timeout)
        if self.outcome is not Outcome.COMMITTED:
            raise TransactionStateError("only the messages of a committed transaction can be waited for")
        deadline = self._clock.monotonic() + timeout
        ends: dict[tuple[str, int], int | None] = {}
        for result in self._results(deadline):
            slot = result.topic, result.partition
            ends[slot] = None if result.offset is None or ends.get(slot, 0) is None else result.offset + 1
        for slot, end in ends.items():
            while end is None or self._end_of(slot, deadline) < end:
                if end is None or self._clock.monotonic() >= deadline:
                    raise RequestTimeoutError(f"a message for {slot[0]}-{slot[1]} is not shown yet")
                self._clock.sleep(LOOK_AGAIN_S)

    def _end_of(self, slot: tuple[str, int], deadline: float) -> int:
        timeout_s = max(deadline - self._clock.monotonic(), LOOK_AGAIN_S)
        control = self.client.routes.link_for(*slot).control
        return int(control.repeat("offset", *slot, "latest", timeout=timeout_s).split()[2])

    # --- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Transaction:
        self.begin()
        self._entered = enter(self)
        return self

    def enter_context(self) -> None:
        """From now on messages of the caller's context join."""
        self._entered = enter(self)

    def begin(self) -> None:
        """Begin the block; no message joins yet. Raises as the ``with``."""
        if self._state != "new":
            raise TransactionStateError("a transaction is for one block: make another one")
        if current_transaction() is not None:
            raise TransactionStateError("this block stands inside another transaction block: blocks do not nest")
        homes = TransactionHomes(self.client, self._clock, self._timeout)
        if self._resource is None:
            homes.decider.reach()
        ending = self._ending_of(homes)
        ending.begin()
        self._ending, self._homes, self._state, self._process = ending, homes, "open", current_process()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        try:
            if self._process == current_process() or not self._process:
                self._end(self._require_open(), error)
            else:
                self._left_by_child(error)
        except BaseException as interrupt:
            self._end_if_interrupted_before(interrupt)
            raise
        return False

    def _end_if_interrupted_before(self, interrupt: BaseException) -> None:
        """Roll back if nothing of the end has begun: a signal's handler may raise anywhere."""
        homes, ending = self._homes, self._ending
        if homes is not None and ending is not None and not ending.has_begun and not self._is_parents:
            self._end(homes, interrupt)

    def _end(self, homes: TransactionHomes, body_error: BaseException | None) -> None:
        ending = self._ending
        in_broker: Outcome | None = _UNKNOWN
        assert ending is not None
        with self._lock:
            self._state = "over"
        if self._entered is not None:
            self._entered.end()
        try:
            self.outcome, in_broker, problem, interrupt = ending.end(body_error, self._failure)
        finally:
            if self._acks is not None and ending.has_begun and in_broker is not None:
                self._ended_in_broker(in_broker)
            for part in homes.others:
                if part.is_pending:
                    resolver_of(self.client).tell(part.commits)
        if body_error is not None:  # it goes on, unchanged
            if isinstance(problem, HeuristicError):
                body_error.add_note(str(problem))
            return
        if interrupt is not None:
            raise interrupt
        if problem is not None:
            raise problem

    def _ended_in_broker(self, outcome: Outcome) -> None:
        if self._acks is not None and self._homes is not None:
            self._acks.ended(outcome, self._homes.decider.txid_or_none)

    def leave_contexts(self) -> None:
        """No message joins any more that does not name the block."""
        if self._entered is not None:
            self._entered.end()

    def _left_by_child(self, error: BaseException | None) -> None:
        self.leave_contexts()
        if error is None:
            self._require_open()

    def require_use(self) -> Entered:
        """The block is open, and used by its name: a context that does not stand in it is to remember that."""
        self._require_open()
        entered = self._entered
        assert entered is not None
        note_use(entered)
        return entered

    def _require_open(self) -> TransactionHomes:
        if self._state != "open" or self._homes is None:
            word = "has not begun" if self._state == "new" else "is over"
            raise TransactionStateError(f"the transaction {word}: use it inside its with block")
        if self._process != current_process():
            raise TransactionStateError("the block is that of the process which this one was forked from")
        return self._homes

    @property
    def _is_parents(self) -> bool:
        return self._process not in (0, current_process())

    def _ending_of(self, homes: TransactionHomes) -> Ending:
        if self._resource is not None:
            resolver = self.client.resolver or resolver_of(self.client)
            return LastResourceEnding(homes, self._resource, self._messages, resolver, self._ended_in_broker)
        if self._xa_resources:
            resolver = self.client.resolver or resolver_of(self.client)
            return TwoPhaseEnding(homes, self._messages, self._xa_resources, resolver)
        return LocalEnding(homes, self._messages)

    def _stream(self, homes: TransactionHomes) -> None:
        if self._failure is not None:
            raise anew(self._failure)
        self._failure = RolledBackError("sending messages ahead was interrupted")
        try:
            assert self._ending is not None
            self._ending.parts_streamed()
            homes.decider.begin()
            homes.take(self._messages)
            homes.stream()
        except TxmqError as error:
            self._failure = rolled_back(error, homes.decider.txid_or_none)
            raise anew(self._failure) from self._failure.__cause__
        self._failure = None
