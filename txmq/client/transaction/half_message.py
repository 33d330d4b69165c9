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

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from txmq.client.transaction.conversation import LOST, ROLLBACK_TIMEOUT_S, Extensions, raise_rolled_back
from txmq.client.transaction.homes import TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.prepared import prepare, resolve
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import (
    ClosedError,
    ConnectionLostError,
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
from txmq.log.records import TAG_HEADER, Record, decode
from txmq.model import Message, Outcome, Resolution, SendResult
from txmq.protocol.transaction_bodies import DueHalf, PartResult, split_halves
from txmq.runtime.caller import current_owner, current_process
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Logger, get_logger, in_words
from txmq.runtime.threads import Lock, Signal, start_daemon, watch_forks

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

WAIT_MS = 1000  # of a long poll; an unreported decision waits so long at most
HALVES_PER_POLL = 20  # a slow checker must not hold many that another member could be asked about
PAUSE_S = 1.0  # after an error that is not a lost connection
REPORT_TIMEOUT_S = 1.0
_THREAD_NAME = "txmq-checks"
RESOLVE_S = 5.0  # then the check-back thread goes on reporting
_OUTCOMES = {Resolution.COMMIT: Outcome.COMMITTED, Resolution.ROLLBACK: Outcome.ROLLED_BACK}


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """A half message that its owner has not decided, as a checker gets it.

    Attributes:
        txid: as ``HalfMessage.txid`` when it was sent.
        message: as it was sent; its offset is -1.
        attempt: how often the broker has asked about it since its start; 0 if its own block has just failed.
        age_ms: since it was prepared.
    """

    txid: str
    message: Message
    attempt: int
    age_ms: int

    @property
    def topic(self) -> str:
        """The message's topic."""
        return self.message.topic

    @property
    def key(self) -> bytes | None:
        """The message's key."""
        return self.message.key

    @property
    def value(self) -> bytes:
        """The message's value."""
        return self.message.value or b""


Checker = Callable[[CheckRequest], Resolution]


class CheckBacks:
    """The check-back threads: ask the application's checker about half messages that their owners did not decide.

    Theory of operation. One thread for each producer group of a client and each home, with a connection of its own,
    long-polls ``checks``: the broker hands out halves whose owner has gone, or whose deadline has passed, and waits
    longer each time (1 s, doubling to a minute). The application's checker answers COMMIT, ROLLBACK or UNKNOWN; the
    first two are reported to the broker, and after UNKNOWN it asks again, for ever. The thread also reports decisions
    of owners that could not reach the broker.

    Invariants:
        * a checker that raises, or answers anything but a ``Resolution``, has answered UNKNOWN, and that is logged;
        * nothing is resolved without an answer of the checker;
        * the threads end with the client; a forked child has its own once it uses the group.

    Args:
        client: its homes are polled, and resolve.

    Thread safety: any thread.
    """

    def __init__(self, client: Client, group: str, checker: Checker) -> None:
        self.group, self.checker = group, checker
        self._client = client
        self._checks: dict[HomeLink, _HomeChecks] = {}
        self._log = get_logger(group=group)
        self._lock = Lock()
        self._started: tuple[int, int] | None = None  # process, and how many homes have a thread
        self._is_stopping = False
        watch_forks(self)

    # --- for halves of this process ----------------------------------------------------------------------------------

    def ask(self, txid: str, topic: str, partition: int, record: Record) -> Resolution:
        """Ask the application's checker about a half of this process. Never raises Exception."""
        key, value, headers, timestamp_ms = record
        tag = next((content.decode() for name, content in headers if name == TAG_HEADER), None)
        rest = {name: content for name, content in headers if name != TAG_HEADER}
        message = Message(topic, partition, -1, key, value, rest, tag, timestamp_ms, txid)
        return self.answer(CheckRequest(txid, message, 0, 0))

    def leave(self, half: HalfMessage, resolution: Resolution) -> None:
        """Report a decision until it has reached the broker."""
        self.start()
        self._checks_at(half.home).leave(half, resolution)

    # --- the threads -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a thread for each home, if it does not run in this process."""
        homes = self._client.routes.links()
        started = current_owner()[0], len(homes)
        if self._started == started:
            return
        with self._lock:
            if self._is_stopping:
                return
            self._started = started
            idle = [checks for checks in map(self._made, homes) if not checks.is_started]
            for checks in idle:
                checks.is_started = True
        for checks in idle:
            start_daemon(_THREAD_NAME, partial(checks.serve, self.start))

    def stop(self) -> None:
        """End the threads soon; the broker asks another member about halves that are undecided."""
        with self._lock:
            self._is_stopping = True
        for checks in list(self._checks.values()):
            checks.stop()

    def forked(self) -> None:
        """In a forked child no thread runs, and the parent reports its own decisions."""
        self._lock, self._checks = Lock(), {}

    def poll(self, wait_ms: int = WAIT_MS) -> int:
        """Ask every home for halves that are due, and the checker about each. Returns how many there were.

        Raises:
            TxmqError: a home could not be asked.
        """
        return sum(self._checks_at(home).poll(wait_ms) for home in self._client.routes.links())

    def report_decisions(self) -> None:
        """Report decisions of this process that have not reached their home.

        Raises:
            TxmqError: a home cannot be reached now.
        """
        for checks in list(self._checks.values()):
            checks.report_decisions()

    def _checks_at(self, home: HomeLink) -> _HomeChecks:
        with self._lock:
            return self._made(home)

    def _made(self, home: HomeLink) -> _HomeChecks:
        checks = self._checks.get(home)
        if checks is None:
            checks = self._checks[home] = _HomeChecks(home, self, self._log)
        return checks

    def answer(self, half: CheckRequest) -> Resolution:
        """The checker's answer; one that is none is UNKNOWN."""
        try:
            answer: object = self.checker(half)
        except Exception as error:  # noqa: BLE001  the application's code: an exception is no answer
            self._log.error(
                "the checker failed", txid=half.txid, attempt=half.attempt, error=in_words(error), exc_info=error
            )
            return Resolution.UNKNOWN
        if not isinstance(answer, Resolution):
            self._log.error("the checker answered no Resolution", txid=half.txid, answer=in_words(answer)[:80])
            return Resolution.UNKNOWN
        return answer


class _HomeChecks:
    """The halves of the group at one home.

    Attributes:
        is_started: its thread runs, or is about to.

    Thread safety: ``leave`` and ``stop`` from any thread.
    """

    def __init__(self, home: HomeLink, group: CheckBacks, log: Logger) -> None:
        self._home, self._group, self._log = home, group, log
        self._connection: ReconnectingConnection | None = None
        self._unreported: deque[tuple[HalfMessage, Resolution]] = deque()
        self._signal = Signal()
        self.is_started = self._is_stopping = self._is_away = False

    def leave(self, half: HalfMessage, resolution: Resolution) -> None:
        """Report a decision until it has reached the home."""
        self._unreported.append((half, resolution))
        self._signal.set()

    def stop(self) -> None:
        """End the thread soon."""
        self._is_stopping = True
        self._signal.set()
        if self._connection is not None:
            self._connection.close()

    def serve(self, look_for_homes: Callable[[], None]) -> None:
        """What the thread does, on a connection of its own; between two polls it looks for new homes."""
        self._connection = self._home.new_connection()
        while not self._is_stopping:
            try:
                self.report_decisions()
                self.poll(WAIT_MS)
                look_for_homes()
                self._is_away = False
            except ClosedError:
                return
            except ConnectionLostError as error:  # the connection waits out its back-off by itself
                self._warn_once(error)
            except TxmqError as error:
                self._warn_once(error)
                self._signal.wait(PAUSE_S)

    def _warn_once(self, error: TxmqError) -> None:
        if not self._is_away and not self._is_stopping:
            self._log.warning("no check-backs for the moment", error=str(error))
        self._is_away = True

    def poll(self, wait_ms: int) -> int:
        """See ``CheckBacks.poll``."""
        connection = self._connection or self._home.control
        fields = {"limit": HALVES_PER_POLL, "wait": wait_ms}
        timeout_s = wait_ms / 1000 + self._home.timeout
        due = split_halves(connection.call("checks", self._group.group, extensions=fields, timeout=timeout_s))
        for half in due:
            if self._is_stopping:
                break
            self._check(half)
        return len(due)

    def _check(self, due: DueHalf) -> None:
        try:
            [message] = [m for topic, partition, batch in due.parts for m in decode(batch, topic, partition)]
        except (TxmqError, ValueError) as error:  # ValueError: its topic was deleted
            self._log.warning("a half message cannot be read", txid=due.txid, error=str(error))
            return
        message.offset = -1
        try:
            resolution = self._group.answer(CheckRequest(due.txid, message, due.attempt, due.age_ms))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  the thread serves others, too
            self._log.error("the checker failed", txid=due.txid, error=in_words(error), exc_info=error)
            return
        if resolution is Resolution.UNKNOWN:
            return
        crash_point("client.check.answered")
        try:
            resolve(self._home, due.txid, resolution, REPORT_TIMEOUT_S)
        except TransactionConflictError:
            self._log.error("a half message was decided otherwise before", txid=due.txid, answer=resolution.value)
        except TxmqError as error:  # the broker hands it out again
            self._log.warning("check-back not delivered", txid=due.txid, answer=resolution.value, error=str(error))

    def report_decisions(self) -> None:
        """See ``CheckBacks.report_decisions``."""
        while self._unreported:
            half, resolution = self._unreported[0]
            try:
                half.report(resolution, REPORT_TIMEOUT_S)
            except TransactionError as error:
                self._log.error("a half message ended otherwise than decided", error=str(error))
            self._unreported.popleft()


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
