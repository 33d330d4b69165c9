"""The transaction block: ``with producer.transaction(...) as tx``.

Theory of operation. ``send`` in the block joins it through a context variable: messages are kept here
(``transaction_parts``) and go out with the decision, or ahead of it once they no longer fit one request. At the end of
the block a local transaction is decided by the broker (``transaction_local``), one with a last resource by its database
(``transaction_last_resource``), one with XA resources by the broker when all of them are prepared
(``transaction_xa_block``). An exception in the body rolls back and goes on unchanged.

Invariants:
    * no block inside a block, and nothing joins a block that is over;
    * a block belongs to the process that began it: a forked child that leaves it tells nobody anything, for what it
      would roll back may be committed by then;
    * a normal return means that the decision is durable; ``pending`` names who is still to be told;
    * an error in cleaning up never takes the place of the body's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Literal

from txmq.client import transaction_local
from txmq.client.arguments import require_transaction_timeout
from txmq.client.resolver import resolver_of
from txmq.client.transaction_acks import TransactionAcks
from txmq.client.transaction_home import TransactionHome, raise_rolled_back, rolled_back
from txmq.client.transaction_last_resource import LastResourceRun
from txmq.client.transaction_parts import MessageBuffer
from txmq.client.transaction_xa_block import XaBlock, is_xa, refuse_twins
from txmq.errors import (
    ConfigError,
    HeuristicCommitError,
    HeuristicMixedError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionError,
    TransactionStateError,
    TxmqError,
    anew,
)
from txmq.model import Message, Outcome, SendResult
from txmq.runtime.owner import current_process
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock
from txmq.xa import LastResource, marker
from txmq.xa.branch import UsedXAConnection, XAResource
from txmq.xa.coordinator import Event, State
from txmq.xa.last_resource import Branch, Unsettled, UsedConnection

_STREAM_AT_BYTES = 8 << 20  # buffered messages beyond this go ahead of the decision
Resource = LastResource | UsedConnection | XAResource | UsedXAConnection
_UNKNOWN, _COMMITTED = Outcome.UNKNOWN, Outcome.COMMITTED  # looking them up costs 0.2 us each, once a transaction

_current: ContextVar[Transaction | None] = ContextVar("txmq_transaction", default=None)


def current_transaction() -> Transaction | None:
    """The transaction whose block the caller stands in, or None."""
    return _current.get()


class Transaction:
    """A unit of messages and database rows that become visible all or none.

    Args:
        client: whose broker is the home.
        producer: chooses partitions for ``send``.
        resources: one ``LastResource``, or any number of XA resources, or what their ``using`` answers.
        timeout: seconds from the beginning of the block within which it must be decided.

    Attributes:
        client: as given.
        outcome: COMMITTED or ROLLED_BACK once that is durable, UNKNOWN before, and where it cannot be known.

    Thread safety: ``send`` and ``add`` from any thread; the block belongs to one. In a forked child it is nobody's:
    whatever uses it, or leaves it without an error, raises a ``TransactionStateError``.
    """

    def __init__(
        self, client: Any, producer: Any, resources: Sequence[Resource] = (), timeout: float = 30.0,
        *, compression: str | None = None,
    ) -> None:  # fmt: skip
        require_transaction_timeout(timeout)
        self._resource, self._xa_resources = _sorted_out(resources)
        self.client, self._producer = client, producer
        self.outcome = _UNKNOWN
        self._pending: tuple[str, ...] = ()
        self._timeout = timeout
        self._clock: Clock = client.clock
        self._messages = MessageBuffer(compression)
        self._home: TransactionHome | None = None
        self._run: LastResourceRun | None = None
        self._branch: Branch | None = None
        self._xa: XaBlock | None = None
        self._failure: RolledBackError | None = None  # a part sent ahead failed: the block cannot commit any more
        self._token: Token[Transaction | None] | None = None
        self._lock = Lock()
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
        self._require_open()
        token = _current.set(self)
        try:
            result: SendResult = self._producer.send(
                topic, value, key=key, headers=headers, tag=tag, partition=partition
            )
            return result
        finally:
            _current.reset(token)

    def add(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None,
        headers: Sequence[tuple[str, bytes]], timestamp_ms: int,
    ) -> SendResult:  # fmt: skip
        """Append a message whose partition is chosen; for producers.

        Raises:
            TransactionStateError: the block is over.
            RolledBackError: the transaction outgrew one request, and the broker refused a part sent ahead.
        """
        with self._lock:
            home = self._require_open()
            result = self._messages.add(topic, partition, (key, value, headers, timestamp_ms))
            if self._messages.size_bytes > _STREAM_AT_BYTES:
                self._stream(home)
        return result

    def ack(self, message: Message) -> None:
        """A message that a consumer delivered is dealt with, exactly when this transaction commits.

        Its offset is saved in the broker together with the decision. Acknowledge a partition's messages in order. When
        the block has rolled back the message is as it was: reject it, or run the block again.

        Raises:
            TransactionStateError: a message before it is not acknowledged; it is not under way, or another
                transaction's.
            RolledBackError: its partition is somebody else's now, or an earlier transaction's outcome is not known yet.
            ConfigError: the consumer's offsets are not in the broker.

        Durability: with the decision.
        """
        with self._lock:
            home = self._require_open()
            home.acks = self._acks = self._acks or TransactionAcks(self.client)
            self._acks.add(message)

    def connection(self, resource: LastResource | XAResource) -> Any:
        """The database connection of this transaction: the driver's own, without commit, rollback and close."""
        self._require_open()
        if self._xa is not None:
            return self._xa.connection(resource)
        if self._branch is None or self._branch.resource is not resource:
            raise TransactionStateError(f"{resource!r} takes no part in this transaction")
        return self._branch.connection

    @property
    def txid(self) -> str:
        """The transaction's id; taken from the broker's session when first asked for."""
        if self._home is None:
            raise TransactionStateError("the transaction has not begun: use it as a context manager")
        return self._home.txid

    @property
    def pending(self) -> tuple[str, ...]:
        """Who is still to be told of the decision: "broker", or names of XA resources; empty when all is done."""
        return self._pending if self._xa is None else self._xa.pending

    @property
    def results(self) -> list[SendResult]:
        """One result a message, in order of sending; with offsets once the broker has told them."""
        return self._messages.results

    # --- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Transaction:
        if self._state != "new":
            raise TransactionStateError("a transaction is for one block: make another one")
        if _current.get() is not None:
            raise TransactionStateError("this block stands inside another transaction block: blocks do not nest")
        home = TransactionHome(self.client, self._clock, self._timeout)
        home.reach()
        if self._resource is not None:
            self._branch = self._enlist(home, self._resource)
            self._run = LastResourceRun(home, self._branch, self._messages)
        elif self._xa_resources:
            self._xa = self._begin_xa(home)
        self._home, self._state, self._process = home, "open", current_process()
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if self._is_parents:
            self._left_by_child(error)
            return False
        home = self._require_open()
        with self._lock:
            self._state = "over"
        if self._token is not None:
            _current.reset(self._token)
        try:
            if self._run is not None:
                self._end_last_resource(home, self._run, error)
            elif self._xa is not None:
                self._end_xa(self._xa, error)
            elif error is None:
                self._commit_local(home)
            else:
                self._undo_local(home)
        finally:
            if self._acks is not None:
                self._acks.ended(self._known_outcome(), home.txid if home.has_txid else None)
        return False

    def _left_by_child(self, error: BaseException | None) -> None:
        if self._token is not None:
            _current.reset(self._token)
        if error is None:
            self._require_open()

    def _known_outcome(self) -> Outcome:
        """What the broker is known to have made of it: a database that decided may not have told it yet."""
        run = self._run
        if run is None:
            return self.outcome
        if run.coordinator.state is State.COMMITTED:
            return Outcome.COMMITTED
        is_over = self.outcome is Outcome.ROLLED_BACK and run.is_told is not False
        return Outcome.ROLLED_BACK if is_over and run.coordinator.state is not State.BROKER_ALONE else Outcome.UNKNOWN

    def _require_open(self) -> TransactionHome:
        if self._state != "open" or self._home is None:
            word = "has not begun" if self._state == "new" else "is over"
            raise TransactionStateError(f"the transaction {word}: use it inside its with block")
        if self._is_parents:
            raise TransactionStateError("the block is that of the process which this one was forked from")
        return self._home

    @property
    def _is_parents(self) -> bool:
        return self._process not in (0, current_process())

    def _enlist(self, home: TransactionHome, resource: LastResource | UsedConnection) -> Branch:
        try:
            cluster = home.cluster
        except TxmqError as error:
            raise_rolled_back(error, None)
        own = resource.connection if isinstance(resource, UsedConnection) else None
        known = resource.resource if isinstance(resource, UsedConnection) else resource
        try:
            branch = known.enlist(cluster, own)
        except BaseException:
            home.finished()
            raise
        resolver_of(self.client).add(known)
        return branch

    def _stream(self, home: TransactionHome) -> None:
        if self._failure is not None:
            raise anew(self._failure)
        self._failure = RolledBackError("sending messages ahead was interrupted")
        try:
            if self._run is not None:
                self._run.coordinator.step(Event.PARTS_STREAMED)
            home.stream(home.take_parts(self._messages))
        except TxmqError as error:
            self._failure = rolled_back(error, home.txid if home.has_txid else None)
            raise anew(self._failure) from self._failure.__cause__
        self._failure = None

    # --- local -------------------------------------------------------------------------------------------------------

    def _commit_local(self, home: TransactionHome) -> None:
        if not self._messages and not self._acks:
            self._ended(home, Outcome.COMMITTED)
            return
        try:
            if self._failure is not None:
                transaction_local.withdraw(home)
                raise anew(self._failure)
            lines = transaction_local.commit(home, self._messages)
        except RolledBackError:
            self._ended(home, Outcome.ROLLED_BACK)
            raise
        except BaseException:  # unknown, or an interrupt in the middle
            home.lost()
            raise
        self._messages.place(lines)
        self._ended(home, _COMMITTED)
        home.find_lost()

    def _undo_local(self, home: TransactionHome) -> None:
        # Nothing was asked to be decided: it is rolled back whatever becomes of the request.
        self._ended(home, Outcome.ROLLED_BACK)
        transaction_local.withdraw(home)

    def _ended(self, home: TransactionHome, outcome: Outcome) -> None:
        self.outcome = outcome
        home.finished()

    # --- XA ----------------------------------------------------------------------------------------------------------

    def _begin_xa(self, home: TransactionHome) -> XaBlock:
        try:
            home.txid  # noqa: B018  takes the session
        except TxmqError as error:
            raise_rolled_back(error, None)
        try:
            return XaBlock(home, self._xa_resources, self._messages, resolver_of(self.client))
        except BaseException:
            home.finished()
            raise

    def _end_xa(self, xa: XaBlock, error: BaseException | None) -> None:
        self.outcome, problem = xa.end(error, self._failure)
        if xa.run.lines is not None:
            self._messages.place(xa.run.lines)
        if error is not None:
            return  # the body's own error goes on, unchanged
        if xa.run.interrupt is not None:
            raise xa.run.interrupt
        if problem is not None:
            raise problem

    # --- last resource -----------------------------------------------------------------------------------------------

    def _end_last_resource(self, home: TransactionHome, run: LastResourceRun, error: BaseException | None) -> None:
        state = run.run(Event.BODY_DONE if error is None and self._is_body_sound(home, run) else Event.BODY_FAILED)
        problem = self._conclude(home, run, state)
        if error is not None:
            return  # the body's own error goes on, unchanged
        if run.interrupt is not None:
            raise run.interrupt
        if problem is not None:
            raise problem

    def _is_body_sound(self, home: TransactionHome, run: LastResourceRun) -> bool:
        try:
            self._required_branch().end_body()
            home.check_deadline()
            home.reach()
            if self._failure is not None:
                raise anew(self._failure)
        except TransactionError as error:
            run.error = error
        except BaseException as interrupt:  # noqa: BLE001  raised again when the transaction is undone
            run.interrupt = interrupt
        else:
            return True
        return False

    def _conclude(self, home: TransactionHome, run: LastResourceRun, state: State) -> TransactionError | None:
        """Enter the outcome, leave the rest to the resolver; the error that the caller is to see."""
        if run.lines is not None:
            self._messages.place(run.lines)
        if state in (State.COMMITTED, State.COMMITTED_PENDING):
            self.outcome = Outcome.COMMITTED
            self._committed(home, state)
            return None
        if state is State.COMMITTED_ALONE:
            self._ended(home, Outcome.COMMITTED)
            return HeuristicMixedError(f"the rows are committed, the messages were given up: {run.error}", home.txid)
        if state is State.UNKNOWN:
            self._leave(home, None)
            return OutcomeUnknownError(f"COMMIT was not answered: {run.error or run.interrupt}", home.txid)
        self.outcome = Outcome.ROLLED_BACK
        if state is State.BROKER_ALONE:
            home.finished()
            return HeuristicCommitError("the rows are rolled back, the broker committed the messages", home.txid)
        return self._undone(home, run)

    def _committed(self, home: TransactionHome, state: State) -> None:
        resource = self._required_branch().resource
        if state is State.COMMITTED:
            home.finished()
            resource.finished.append(home.txid)
            return
        self._pending = ("broker",)

        def settled() -> None:
            self._pending = ()
            home.finished()

        resource.unsettled.append(Unsettled(home.txid, marker.COMMITTED, home.deadline_ms, settled))
        resolver_of(self.client).wake()

    def _undone(self, home: TransactionHome, run: LastResourceRun) -> TransactionError:
        if run.is_told is False:
            self._leave(home, marker.ROLLED_BACK)
        else:
            home.finished()
        return run.error or RolledBackError("the transaction was rolled back", home.txid)

    def _leave(self, home: TransactionHome, outcome: str | None) -> None:
        """Let the resolver tell the broker, by this outcome or (None) by what the database proves."""
        resource = self._required_branch().resource
        resource.unsettled.append(Unsettled(home.txid, outcome, home.deadline_ms, home.finished))
        resolver_of(self.client).wake()

    def _required_branch(self) -> Branch:
        if self._branch is None:
            raise TransactionStateError("no resource takes part in this transaction")
        return self._branch


def _sorted_out(resources: Sequence[Resource]) -> tuple[LastResource | UsedConnection | None, Sequence[Resource]]:
    """The last resource, and the XA resources; not both."""
    if not resources:
        return None, ()
    last: list[LastResource | UsedConnection] = []
    for resource in resources:
        if isinstance(resource, LastResource | UsedConnection):
            last.append(resource)
        elif not is_xa(resource):
            raise ConfigError(f"{resource!r} is not a resource: expected a LastResource, or what its using() answers")
    if len(last) > 1:
        raise ConfigError("a transaction takes one last resource: its COMMIT is the decision")
    if last and len(resources) > 1:
        raise ConfigError(
            "a last resource and XA resources do not mix: one decides by its own COMMIT, the others by the broker's "
            "decision; use MySQLResource for all of them"
        )
    if last:
        return last[0], ()
    refuse_twins(resources)
    return None, resources
