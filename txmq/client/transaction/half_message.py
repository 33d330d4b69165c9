"""Half messages: ``with producer.half("orders", b"created", key=b"42"): save_order(42)``.

Theory of operation. The message is prepared in the broker, forced and invisible, before the block begins. The block
does the application's own work, in whatever store, and commits that. Then ``commit`` lets the message out. If the
process dies in between, the broker asks a live member of the producer group (``checks``), whose checker says whether
the application's work was done.

An exception in the block does not say whether the work was done: the connection to a database may be lost while it
commits. So the checker is asked there and then: COMMIT commits, ROLLBACK rolls back, UNKNOWN leaves the half to the
check-backs. The exception goes on unchanged. After an interrupt that is no ``Exception`` (Ctrl-C, the end of the
process) it is left to them, too.

Invariants:
    * only the application's word (the end of the block, ``commit``, ``rollback``, its checker) resolves a half;
    * a decision that did not reach the broker (``pending``) is reported by the check-back thread, or the checker is
      asked;
    * a commit that meets a durable rollback raises, and the other way round.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from txmq.client.transaction.conversation import ROLLBACK_TIMEOUT_S, Extensions
from txmq.client.transaction.homes import TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.prepared import prepare, resolve
from txmq.client.transaction.refusals import LOST, raise_rolled_back
from txmq.errors import (
    FencedError,
    HeuristicCommitError,
    HeuristicRollbackError,
    NotOwnerError,
    OutcomeUnknownError,
    RequestTimeoutError,
    TransactionConflictError,
    TransactionError,
    TransactionStateError,
    TransactionTimeoutError,
    TxmqError,
    UnknownTransactionError,
)
from txmq.log.records import Record
from txmq.model import Outcome, Resolution, SendResult
from txmq.protocol.transaction_parts import PartResult
from txmq.runtime.caller import current_process
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.threads import Lock

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink
    from txmq.client.transaction.checker import CheckBacks

RESOLVE_S = 5.0  # then the check-back thread goes on reporting
_OUTCOMES = {Resolution.COMMIT: Outcome.COMMITTED, Resolution.ROLLBACK: Outcome.ROLLED_BACK}


class HalfMessage:
    """One half message; made, and prepared, by ``Producer.half``. Usable as a block.

    Attributes:
        txid: its transaction id. Write it into your row, and your checker needs to look for nothing else.
        outcome: COMMITTED or ROLLED_BACK once that is durable in the broker; UNKNOWN before.
        pending: ("broker",) while your decision has yet to reach the broker.

    Thread safety: any thread.
    """

    def __init__(self, client: Client, group: CheckBacks, timeout_s: float, compression: str | None) -> None:
        self._group = group
        self._homes = TransactionHomes(client, client.clock, timeout_s)
        self._broker = self._homes.decider
        self._messages = MessageBuffer(compression, client.routes.topic_id)
        self._record: tuple[str, int, Record] | None = None
        self._lines: list[PartResult] = []
        self._decided: Resolution | None = None
        self._process = 0  # that stands in the block
        self._lock = Lock()
        self.outcome = Outcome.UNKNOWN
        self.pending: tuple[str, ...] = ()

    @property
    def home(self) -> HomeLink:
        """The broker that has it."""
        return self._broker.home

    def reach(self) -> Self:
        """For ``Producer``: raises TransactionAwayError if the broker is away."""
        self._broker.reach()
        return self

    def prepare(self, topic: str, partition: int, record: Record) -> Self:
        """For ``Producer``: force the message in the broker. Once.

        Raises:
            RolledBackError: nothing happened; TransactionAwayError if the broker is away.
        """
        self._record = (topic, partition, record)
        self._messages.add(topic, partition, record)
        try:
            self._homes.find(self._messages)  # one: it is one message
            self._broker.begin()
            fields: Extensions = {"group": self._group.group, "deadline": self._broker.deadline_ms}
            prepare(self._homes, "half", fields, self._messages)
        except (RequestTimeoutError, TransactionTimeoutError) as error:
            self._withdraw()  # it may be prepared: no checker may be asked about work that never began
            raise_rolled_back(error, self._broker.txid_or_none)
        except TxmqError as error:
            if self._broker.may_have_arrived and isinstance(error, LOST):
                self._decided = Resolution.ROLLBACK
                self._leave(Resolution.ROLLBACK)
            else:
                self._homes.finished()
            raise_rolled_back(error, self._broker.txid_or_none)
        except BaseException:
            self._withdraw()
            raise
        crash_point("client.half.prepared")
        return self

    @property
    def txid(self) -> str:
        """See the class."""
        return self._broker.txid

    @property
    def result(self) -> SendResult:
        """Where the message is: PENDING, or ACKNOWLEDGED with its offset after ``commit``.

        In a cluster it may wait for its place after an earlier transaction of its key; this waits for it.
        """
        if self._messages.results[0].offset is None and self._lines:
            self._messages.place(self._homes.gather(self._lines, self.home.clock.monotonic() + self.home.timeout))
        return self._messages.results[0]

    # --- deciding ----------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Your work is done, durably: let the message out.

        If the broker is away now it returns with ``pending``, and the check-back thread reports the commit later.

        Raises:
            HeuristicRollbackError: it was rolled back before, durably: by another member's checker, or an operator.
            OutcomeUnknownError: the broker no longer knows.
            TransactionStateError: it was rolled back here.

        Durability: readers see the message when this returns, unless it is ``pending``, or waits for its place after an
        earlier transaction of its key (``result``).
        """
        self._decide(Resolution.COMMIT)

    def rollback(self) -> None:
        """Your work was not done, and will not be: drop the message.

        Raises:
            HeuristicCommitError: it was committed before, durably.
            OutcomeUnknownError, TransactionStateError: as ``commit``.
        """
        self._decide(Resolution.ROLLBACK)

    def _decide(self, resolution: Resolution) -> None:
        with self._lock:
            if self._decided is resolution:
                return
            if self._decided is not None:
                text = f"the half message was decided before, and that stands: {self._decided.value}"
                raise TransactionStateError(text, self.txid)
            self._decided = resolution
        crash_point("client.half.decided")
        timeout_s = RESOLVE_S if resolution is Resolution.COMMIT else ROLLBACK_TIMEOUT_S
        try:
            self.report(resolution, timeout_s)
        except TransactionError:
            raise
        except TxmqError:
            self._leave(resolution)
        except BaseException:  # Ctrl-C in the middle of the request: the decision stands
            self._leave(resolution)
            raise

    def report(self, resolution: Resolution, timeout_s: float) -> None:
        """Report the decision to the broker; the check-back thread calls this, too.

        Raises:
            HeuristicError, OutcomeUnknownError: as ``commit`` and ``rollback``.
            TxmqError: it was not reported, or that was not answered.
        """
        try:
            lines = resolve(self._broker.home, self.txid, resolution, timeout_s)
        except TransactionConflictError as error:
            self._ended(Outcome.COMMITTED if resolution is Resolution.ROLLBACK else Outcome.ROLLED_BACK)
            if resolution is Resolution.COMMIT:
                text = "your work is done, its message was rolled back before: send it again, or undo the work"
                raise HeuristicRollbackError(text, self.txid) from error
            text = "your work was not done, its message went out before: do the work, or send one that takes it back"
            raise HeuristicCommitError(text, self.txid) from error
        except (FencedError, NotOwnerError, UnknownTransactionError) as error:
            self.pending = ()
            text = f"the broker does not know the half message, or not any more: {error}"
            raise OutcomeUnknownError(text, self.txid) from error
        self._ended(_OUTCOMES[resolution], lines)

    def _ended(self, outcome: Outcome, lines: list[PartResult] | None = None) -> None:
        if lines:
            self._lines = lines
            self._messages.place(lines)
            self._homes.decided(lines)
        self.outcome, self.pending = outcome, ()
        self._homes.finished()

    def _leave(self, resolution: Resolution) -> None:
        self.pending = ("broker",)
        self._group.leave(self, resolution)

    def _withdraw(self) -> None:
        """Roll back a half that may be prepared, and whose work never began."""
        self._decided = Resolution.ROLLBACK
        if not self._broker.txid:
            return
        try:
            self.report(Resolution.ROLLBACK, ROLLBACK_TIMEOUT_S)
        except TransactionError:
            pass
        except TxmqError:
            self._leave(Resolution.ROLLBACK)

    # --- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._decided is not None:
            raise TransactionStateError("the half message is decided: a block is for one that is not", self.txid)
        self._process = current_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if self._process != current_process():
            if error is None:  # the parent's work may not be done yet; a child that knows says commit() or rollback()
                text = "the block is that of the process which this one was forked from"
                raise TransactionStateError(text, self.txid)
        elif error is None:
            if self._decided is None:
                self.commit()
        elif isinstance(error, Exception):
            self.ask_checker(error)
        return False

    def ask_checker(self, error: BaseException) -> None:
        """Ask the checker whether the work of a block that failed was done, and decide so."""
        if self._record is None or self._decided is not None:
            return
        resolution = self._group.ask(self.txid, *self._record)
        if resolution is Resolution.UNKNOWN:
            error.add_note(f"half message {self.txid} is undecided: the checker will be asked again")
            return
        try:
            self._decide(resolution)
        except TransactionError as failure:  # the block's own error says more
            error.add_note(f"half message: {failure}")
