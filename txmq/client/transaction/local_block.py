"""The end of a local transaction: the broker alone decides, in one request.

Over several homes it is the end of a transaction of homes without databases (``xa.run``): the parts of the others are
prepared there, the one request lists them, and then they are told.

Meaning of the answers:

=====================  ==========================  =====================================================================
answer to ``commit``   earlier attempt unanswered  then
=====================  ==========================  =====================================================================
200                    either                      COMMITTED, with the offsets
409, 400, 403, 404 ..  no                          not executed: ROLLED BACK
409, 400, 403, 404 ..  yes                         ``rollback``: 200 is ROLLED BACK, 409 may be COMMITTED: ``outcome``
410                    no                          not executed: ROLLED BACK
410                    yes                         UNKNOWN: the outcome is not kept
none till the deadline sent                        UNKNOWN
none till the deadline never sent                  ROLLED BACK (timeout)
=====================  ==========================  =====================================================================
"""

from __future__ import annotations

from typing import Any

from txmq.client.transaction.ending import Ending, no_part
from txmq.client.transaction.homes import RoutedTransaction
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.preparing import begin_for_caller
from txmq.client.transaction.refusals import raise_rolled_back
from txmq.client.transaction.xa.run import XARun
from txmq.errors import (
    ConnectionLostError,
    FencedError,
    OutcomeUnknownError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TransactionError,
    TxmqError,
    UnavailableError,
    anew,
    caused,
)
from txmq.model import Outcome
from txmq.protocol.parts import PartResult
from txmq.xa.two_phase.coordinator import XAEvent, XAState

_COMMITTED_STATES = (XAState.COMMITTED, XAState.COMMITTED_PENDING)
_COMMITTED = Ending(Outcome.COMMITTED, Outcome.COMMITTED)


class LocalBlock:
    """The ending of a block without databases: it begins when its first message is to be sent.

    Attributes:
        has_begun: see ``BlockEnding``.
    """

    def __init__(self, broker: RoutedTransaction, messages: MessageBuffer) -> None:
        self._broker, self._messages = broker, messages
        self._lines: list[PartResult] | None = None
        self._run: XARun | None = None  # over several homes
        self.has_begun = False

    @property
    def pending(self) -> tuple[str, ...]:
        """See ``RoutedTransaction.pending_homes``."""
        return self._broker.pending_homes

    def begin(self) -> None:
        """Do nothing yet: the id is taken from the session at the end of the block."""

    def connection(self, resource: Any) -> Any:
        """See ``BlockEnding``."""
        raise no_part(resource)

    def parts_streamed(self) -> None:
        """See ``BlockEnding``."""
        self._broker.find_homes(self._messages)

    def gather_results(self, deadline: float) -> None:
        """See ``BlockEnding``."""
        lines = self._lines if self._run is None else self._run.lines
        if lines is not None:
            self._messages.place(self._broker.gather(lines, deadline))

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ending:
        """See ``BlockEnding``."""
        self.has_begun, broker = True, self._broker
        try:
            if body_error is not None or failure is not None:
                withdraw(broker)
                error = None if failure is None else anew(failure)
                broker.finished()
                return Ending(Outcome.ROLLED_BACK, Outcome.ROLLED_BACK, error)
            if self._messages or broker.acks:
                self._find_homes()
                if broker.branches:
                    return self._end_over_homes()
                self._lines = commit(broker, self._messages)
                self._messages.place(self._lines)
                broker.decided(self._lines)
            broker.finished()
        except RolledBackError as error:
            broker.finished()
            return Ending(Outcome.ROLLED_BACK, Outcome.ROLLED_BACK, error)
        except BaseException:  # unknown, or an interrupt in the middle
            broker.lost()
            raise
        return _COMMITTED

    def _find_homes(self) -> None:
        try:
            self._broker.find_homes(self._messages)
        except RolledBackError:
            withdraw(self._broker)
            raise

    def _end_over_homes(self) -> Ending:
        broker = self._broker
        run = self._run = _run_over_homes(broker, self._messages)
        state = run.run(XAEvent.BODY_DONE)
        if state is XAState.UNKNOWN:
            broker.lost()
            return Ending(Outcome.UNKNOWN, Outcome.UNKNOWN, _unanswered(run, broker), run.interrupt)
        broker.finished()
        if state in _COMMITTED_STATES:
            return _COMMITTED if run.interrupt is None else _COMMITTED._replace(interrupt=run.interrupt)
        return Ending(Outcome.ROLLED_BACK, Outcome.ROLLED_BACK, _run_rolled_back(run, broker), run.interrupt)


def commit(broker: RoutedTransaction, messages: MessageBuffer) -> list[PartResult]:
    """Commit everything.

    Returns:
        Where every part went.

    Raises:
        RolledBackError: nothing happened; TransactionTimeoutError or TransactionAwayError if that was the reason.
        OutcomeUnknownError: ask for the outcome by id.

    Durability: what ``sync`` promises, when this returns.
    """
    try:
        broker.check_deadline()
        broker.reach()
        broker.let_pass(messages)
        broker.begin()
        parts = broker.take_parts(messages, keyed=False)
        if broker.streamed.parts or not broker.fits_one_request(parts):
            broker.stream(parts)
            parts = []
        return broker.commit_local(parts)
    except RolledBackError:
        withdraw(broker)
        raise
    except (ConnectionLostError, RequestTimeoutError, UnavailableError) as error:
        if broker.may_have_arrived:
            text = f"no answer to commit: {error}; ask client.outcome(txid)"
            raise caused(OutcomeUnknownError(text, broker.txid), error) from error
        withdraw(broker)
        raise_rolled_back(error, broker.txid_or_none)
    except TxmqError as error:
        return _refused(broker, error)


def commit_over_homes(broker: RoutedTransaction, messages: MessageBuffer) -> None:
    """As ``commit``, of messages for several homes. Raises as ``commit``, and what interrupted it."""
    run = _run_over_homes(broker, messages)
    state = run.run(XAEvent.BODY_DONE)
    if run.interrupt is not None:
        raise run.interrupt
    if state is XAState.UNKNOWN:
        raise _unanswered(run, broker)
    if state not in _COMMITTED_STATES:
        raise _run_rolled_back(run, broker)


def _run_over_homes(broker: RoutedTransaction, messages: MessageBuffer) -> XARun:
    broker.check_deadline()
    broker.reach()
    begin_for_caller(broker)
    return XARun(broker, (), messages)


def _unanswered(run: XARun, broker: RoutedTransaction) -> OutcomeUnknownError:
    text = f"no answer to commit: {run.error or run.interrupt}; ask client.outcome(txid)"
    return OutcomeUnknownError(text, broker.txid)


def _run_rolled_back(run: XARun, broker: RoutedTransaction) -> TransactionError:
    return run.error or RolledBackError("the transaction was rolled back", broker.txid)


def withdraw(broker: RoutedTransaction) -> None:
    """Let the broker forget what was streamed. It does so by itself when the connection is lost."""
    if broker.streamed.parts:
        broker.try_rollback()
    broker.roll_back_branches()


def _refused(broker: RoutedTransaction, error: TxmqError) -> list[PartResult]:
    """See the table above; ``error`` is what the last attempt was refused with."""
    if not broker.may_have_arrived:
        withdraw(broker)
    elif isinstance(error, FencedError):
        text = f"an attempt to commit was not answered, then: {error}"
        raise caused(OutcomeUnknownError(text, broker.txid), error) from error
    else:
        lines = _resolved(broker, error)
        if lines is not None:
            return lines
    raise_rolled_back(error, broker.txid_or_none)


def _resolved(broker: RoutedTransaction, error: TxmqError) -> list[PartResult] | None:
    """Fence the transaction id; None if that rolled it back, else where the parts went."""
    try:
        try:
            broker.rollback()
        except TransactionConflictError:
            word, lines = broker.outcome()
            if word == Outcome.COMMITTED.value:
                return lines
            if word != Outcome.ROLLED_BACK.value:
                raise
    except TxmqError as failure:
        text = f"commit was refused ({error}), rollback, too"
        raise caused(OutcomeUnknownError(text, broker.txid), failure) from failure
    return None
