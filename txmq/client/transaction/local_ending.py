"""The ending of a block without databases: the broker alone decides, in one request.

Over several homes it is a two-phase ending without databases: the parts of the others are prepared there, the one
request lists them, and then they are told.

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

from txmq.client.transaction.conversation import raise_rolled_back
from txmq.client.transaction.ending import Ended, no_part
from txmq.client.transaction.homes import TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.two_phase_ending import COMMITTED_STATES, TwoPhaseEnding
from txmq.errors import (
    ConnectionLostError,
    FencedError,
    OutcomeUnknownError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TxmqError,
    UnavailableError,
    anew,
    caused,
)
from txmq.model import Outcome
from txmq.protocol.transaction_bodies import PartResult
from txmq.xa.two_phase.coordinator import XAEvent, XAState

_COMMITTED = Ended(Outcome.COMMITTED, Outcome.COMMITTED)
_NO_ANSWER = "no answer to commit"


class LocalEnding:
    """See the module's docstring. It begins when its first message must be sent.

    Attributes:
        has_begun: see ``Ending``.
    """

    def __init__(self, homes: TransactionHomes, messages: MessageBuffer) -> None:
        self._homes, self._messages = homes, messages
        self._lines: list[PartResult] | None = None
        self.has_begun = False

    @property
    def pending(self) -> tuple[str, ...]:
        """See ``TransactionHomes.pending``."""
        return self._homes.pending

    def begin(self) -> None:
        """Do nothing yet: the id is taken from the session at the end of the block."""

    def connection(self, resource: Any) -> Any:
        """See ``Ending``."""
        raise no_part(resource)

    def parts_streamed(self) -> None:
        """See ``Ending``."""
        self._homes.find(self._messages)

    def gather_results(self, deadline: float) -> None:
        """See ``Ending``."""
        if self._lines is not None:
            self._messages.place(self._homes.gather(self._lines, deadline))

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ended:
        """See ``Ending``."""
        self.has_begun, homes = True, self._homes
        try:
            if body_error is not None or failure is not None:
                withdraw(homes)
                error = None if failure is None else anew(failure)
                homes.finished()
                return Ended(Outcome.ROLLED_BACK, Outcome.ROLLED_BACK, error)
            if self._messages or homes.acks:
                self._find_homes()
                if homes.others:
                    return self._end_over_homes()
                self._lines = commit(homes, self._messages)
                self._messages.place(self._lines)
                homes.decided(self._lines)
            homes.finished()
        except RolledBackError as error:
            homes.finished()
            return Ended(Outcome.ROLLED_BACK, Outcome.ROLLED_BACK, error)
        except BaseException:  # unknown, or an interrupt in the middle
            homes.lost()
            raise
        return _COMMITTED

    def _find_homes(self) -> None:
        try:
            self._homes.find(self._messages)
        except RolledBackError:
            withdraw(self._homes)
            raise

    def _end_over_homes(self) -> Ended:
        homes = self._homes
        run = _begun_over_homes(homes, self._messages)
        state = run.run(XAEvent.BODY_DONE)
        self._lines = run.lines
        if state is XAState.UNKNOWN:
            homes.lost()
            return Ended(Outcome.UNKNOWN, Outcome.UNKNOWN, run.unanswered(_NO_ANSWER), run.interrupt)
        homes.finished()
        if state in COMMITTED_STATES:
            return _COMMITTED if run.interrupt is None else _COMMITTED._replace(interrupt=run.interrupt)
        return Ended(Outcome.ROLLED_BACK, Outcome.ROLLED_BACK, run.rolled_back(), run.interrupt)


def commit(homes: TransactionHomes, messages: MessageBuffer) -> list[PartResult]:
    """Commit everything, at one home.

    Returns:
        Where every part went.

    Raises:
        RolledBackError: nothing happened; TransactionTimeoutError or TransactionAwayError if that was the reason.
        OutcomeUnknownError: ask for the outcome by id.

    Durability: what ``sync`` promises, when this returns.
    """
    decider = homes.decider
    try:
        decider.check_deadline()
        decider.reach()
        homes.let_pass(messages)
        decider.begin()
        homes.take(messages, keyed=False)
        homes.stream_if_large()
        lines, decider.parts = decider.commit_local(decider.parts), []
    except RolledBackError:
        withdraw(homes)
        raise
    except (ConnectionLostError, RequestTimeoutError, UnavailableError) as error:
        if decider.may_have_arrived:
            text = f"{_NO_ANSWER}: {error}; ask client.outcome(txid)"
            raise caused(OutcomeUnknownError(text, decider.txid), error) from error
        withdraw(homes)
        raise_rolled_back(error, decider.txid_or_none)
    except TxmqError as error:
        return _refused(homes, error)
    return lines


def commit_over_homes(homes: TransactionHomes, messages: MessageBuffer) -> None:
    """As ``commit``, of messages for several homes. Raises as ``commit``, and what interrupted it."""
    run = _begun_over_homes(homes, messages)
    state = run.run(XAEvent.BODY_DONE)
    if run.interrupt is not None:
        raise run.interrupt
    if state is XAState.UNKNOWN:
        raise run.unanswered(_NO_ANSWER)
    if state not in COMMITTED_STATES:
        raise run.rolled_back()


def _begun_over_homes(homes: TransactionHomes, messages: MessageBuffer) -> TwoPhaseEnding:
    homes.decider.check_deadline()
    homes.decider.reach()
    homes.decider.begin_for_caller()
    return TwoPhaseEnding(homes, messages)


def withdraw(homes: TransactionHomes) -> None:
    """Let the brokers forget what was streamed. They do so by themselves when the connection is lost."""
    if homes.decider.streamed.parts:
        homes.decider.try_rollback()
    homes.roll_back_others()


def _refused(homes: TransactionHomes, error: TxmqError) -> list[PartResult]:
    """See the table above; ``error`` is what the last attempt was refused with."""
    decider = homes.decider
    if not decider.may_have_arrived:
        withdraw(homes)
    elif isinstance(error, FencedError):
        text = f"an attempt to commit was not answered, then: {error}"
        raise caused(OutcomeUnknownError(text, decider.txid), error) from error
    else:
        lines = _resolved(homes, error)
        if lines is not None:
            return lines
    raise_rolled_back(error, decider.txid_or_none)


def _resolved(homes: TransactionHomes, error: TxmqError) -> list[PartResult] | None:
    """Fence the transaction id; None if that rolled it back, else where the parts went."""
    decider = homes.decider
    try:
        try:
            decider.rollback()
        except TransactionConflictError:
            word, lines = decider.outcome()
            if word == Outcome.COMMITTED.value:
                return lines
            if word != Outcome.ROLLED_BACK.value:
                raise
    except TxmqError as failure:
        text = f"commit was refused ({error}), rollback, too"
        raise caused(OutcomeUnknownError(text, decider.txid), failure) from failure
    return None
